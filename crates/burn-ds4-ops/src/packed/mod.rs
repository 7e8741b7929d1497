//! What kernels share that multiply by packed weights: reading codes, and products on tensor cores.
//!
//! # Products of tiles
//!
//! A plane multiplies 16 rows of weights by 8 columns, which are rows of `x`, with `mma`. The lane `4 * g + q` reads 16 bytes at a
//! time of the rows `g` and `g + 8`, and turns the codes into pairs of `bf16`; the tile's other factor it has from the same columns of row
//! `g` of `x`. Which column of the weights is which of the tile's makes no difference to the sum, as long as `x` is in the same order:
//! `Format::order` says how decoding takes the columns apart.
//!
//! Weights are exact in `bf16`, with the scale of a power of two that FP4 has. An FP8 scale is any number: it is multiplied with the sum of its
//! block. `x` that is not `bf16` becomes two or three of them, whose sum it is, in columns of their own. So products are exact, and sums are made in
//! f32, whatever the dtypes are.

#[allow(
    clippy::collapsible_if,
    clippy::identity_op,
    clippy::if_same_then_else,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    clippy::needless_range_loop,
    reason = "kernels have neither these methods nor iterators, tell conditions of arguments by their nesting, and copy by computing"
)]
pub(crate) mod kernel;
pub(crate) mod launch;
