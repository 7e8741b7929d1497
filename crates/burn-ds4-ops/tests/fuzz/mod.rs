//! Fuzz targets: each takes bytes, makes arguments of them for one or a few operators, and
//! expects on Flex either a typed error where they do not fit, or what the `f64` oracle says. A row
//! of hostile values may be anything, but no other row is to change by it.
//!
//! The crate in `fuzz/` gives them to libFuzzer. Here they run on their corpus and on some made-up
//! inputs; docs/testing.md says how to run them for longer.

pub mod attention;
pub mod cached_attention;
pub mod compress_rows;
mod draw;
pub mod flash_head;
pub mod gated_delta;
pub mod hyper_connection;
pub mod markov;
pub mod matmul;
pub mod moe;
pub mod moe_ffn;
pub mod norm;
pub mod quant;
pub mod router;
pub mod sampling;
pub mod store_step;
pub mod topk;

/// A test of each target, on so many inputs.
#[cfg(test)]
macro_rules! driven {
    ($($target:ident: $cases:literal),* $(,)?) => {
        $(
            #[test]
            fn $target() {
                ds4_fuzz_driver::drive(stringify!($target), $cases, self::$target::$target);
            }
        )*
    };
}

#[cfg(test)]
driven! {
    attention: 2000,
    cached_attention: 6000,
    compress_rows: 1500,
    flash_head: 1000,
    gated_delta: 1000,
    hyper_connection: 1000,
    markov: 3000,
    matmul: 1500,
    moe: 1500,
    moe_ffn: 4000,
    norm: 2000,
    quant: 3000,
    router: 3000,
    sampling: 2000,
    store_step: 3000,
    topk: 1000,
}
