#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ds4_fuzz::ops::cached_attention::cached_attention(data));
