#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ds4_fuzz::ops::moe_ffn::moe_ffn(data));
