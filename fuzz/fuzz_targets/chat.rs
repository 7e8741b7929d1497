#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| burn_ds4::conversation::fuzz::answer(data));
