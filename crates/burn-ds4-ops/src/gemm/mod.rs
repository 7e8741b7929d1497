//! Matrix products `x · Wᵀ`, by weights of any format, for one matrix or some of a stack: the core
//! of [`matmul`](crate::matmul), [`quant`](crate::quant), [`moe`](crate::moe) and
//! [`flash_head`](crate::flash_head), which keep what callers see.
//!
//! A product is given by a list of problems: a matrix, the rows of `x` that it multiplies, and what
//! happens to the sums. A [schedule](launch) divides them among cubes:
//!
//! - `stream`: up to [`INVARIANT_ROWS`] rows of `x`, packed weights or experts, and more tokens
//!   whose experts have few pairs each. The weights, which are the bound, pass through a ring in
//!   shared memory.
//! - `dense`: few rows of `x`, several matrices of floats, or blocks of rows that each row of `x`
//!   has picked.
//! - `large_m`: many rows of `x`, where tensor cores are the bound.
//! - `portable`: any device and any dtype.
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
//! in f32. The exception is FP8 where the device converts it to `f16`: `x` becomes `f16` too, with
//! a scale for every 128 columns, and loses the digits below 2^-38 of the largest number of these
//! columns.

mod fp4;
#[cfg(feature = "cube")]
#[allow(
    clippy::collapsible_if,
    clippy::identity_op,
    clippy::if_same_then_else,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    clippy::manual_rotate,
    clippy::needless_range_loop,
    reason = "kernels lack these methods and iterators, nest comptime conditions, copy by computing"
)]
pub(crate) mod kernel;
#[cfg(feature = "cube")]
pub(crate) mod launch;
#[cfg(feature = "cube")]
mod matrices;

pub use fp4::{Fp4Layout, repack_fp4};
#[cfg(feature = "cube")]
pub(crate) use matrices::{Matrices, terms};

/// Rows up to which a row's result never depends on the number of rows.
pub const INVARIANT_ROWS: usize = 16;
/// Rows and columns that share one FP8 weight scale, in DeepSeek-V4.
pub const FP8_BLOCK: usize = FP8_BLOCKS[0];
/// The same in all models: those of DeepSeek-V4.1 are the smaller ones.
pub const FP8_BLOCKS: [usize; 2] = [128, 32];
