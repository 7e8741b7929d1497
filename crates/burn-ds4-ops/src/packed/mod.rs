//! Kernels that multiply by packed weights, and what they share: decoding codes, and products on
//! tensor cores.
//!
//! # Products of tiles
//!
//! A plane multiplies 16 rows of weights by 8 columns, which are rows of `x`, with `mma`. Lane `4 *
//! g + q` reads 16 bytes at a time of the rows `g` and `g + 8` and decodes them to pairs of `bf16`;
//! the other operand comes from the same columns of row `g` of `x`. The order of columns within a
//! tile does not change the sum if both operands have the same order: `WeightFormat::order` says in
//! which order decoding leaves the columns.
//!
//! Weights are exact in `bf16`, including the scale of FP4, which is a power of two. An FP8 scale
//! is any number: the sum of its block is multiplied by it. An `x` that is not `bf16` is split into
//! two or three terms in `bf16`, in columns of their own. So products are exact, and sums are made
//! in f32, whatever the dtypes are.
//!
//! One path is not exact: up to 16 rows of `x` by FP8 weights, where the hardware converts E4M3
//! codes to `f16`. There `x` becomes `f16`, too, scaled so that the largest number of a row in a
//! block of 128 columns is between 2^14 and 2^15. Numbers below 2^-28 of it lose their digits below
//! 2^-38 of it; see `kernel/f16_input.rs`.

#[allow(
    clippy::collapsible_if,
    clippy::identity_op,
    clippy::if_same_then_else,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    clippy::needless_range_loop,
    reason = "kernels lack these methods and iterators, nest comptime conditions, copy by computing"
)]
pub(crate) mod kernel;
pub(crate) mod launch;
