#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ds4_fuzz::ops::markov::markov(data));
