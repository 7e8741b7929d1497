#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ds4_fuzz::model::files::header(data));
