//! Weights in the quantisation of the released DeepSeek-V4 models, linear maps by them, and round
//! trips of activations.
//!
//! # Packed weights
//!
//! Weights stay packed in `u32` tensors, little endian: the lowest bits of word `w` hold the lowest
//! column.
//!
//! - FP8: E4M3 codes (1-4-3, bias 7, no infinity, NaN at `0x7f` / `0xff`, largest 448, subnormals
//!   `m * 2^-9`); `ceil(columns / 4)` words in a row of `columns`; one `f32` scale per block of
//!   128x128, or of 32x32 in DeepSeek-V4.1, where they are powers of two.
//! - FP4: E2M1 codes (`0, 0.5, 1, 1.5, 2, 3, 4, 6`, bit 3 is the sign); `ceil(columns / 8)` words
//!   in a row; one E8M0 scale byte (`2^(byte - 127)`, 255 is NaN) per row and 32 columns.
//!
//! The last block of a row or column may be partial. FP4 scale bytes are `[rows, ceil(columns /
//! 32)]`, row-major, four to a `u32` word, padded to a whole word. Formats: OCP OFP8 1.0 and OCP MX
//! 1.0; layout: the released `model.safetensors` files. Tensor-core kernels read FP4 faster where
//! each word is [repacked](Fp4Layout::Repacked).
//!
//! # Exactness
//!
//! Every function except [`quant_linear`], [`quant_linear_pair`], [`quant_linear_group`] and
//! [`grouped_linear`] gives the same bits on every device: code values and E8M0 scales come from
//! tables, the scales of round trips are found by comparison with powers of two instead of a
//! logarithm, and no result but that of [`fp4_scaled_roundtrip`] goes through a division. Nothing
//! is read back to the host. Two things depend on the device:
//!
//! - results and scales below the `f32` normal range (`2^-126`), which a device that flushes
//!   denormals turns into zero; among the E8M0 scales that is byte 0, and byte 1 times the code
//!   0.5;
//! - the sign of a zero and the payload of a NaN.
//!
//! # NaN and infinity
//!
//! A NaN code or a NaN scale decodes to NaN, and only the values that it covers. A product beyond
//! the range of the output dtype is infinite. In a round trip, a NaN or infinite element comes out
//! unchanged and does not affect the scale of its block.

mod args;
mod backend;
#[cfg(feature = "cube")]
mod launch;
mod linear;
mod reference;
mod roundtrips;
mod weights;

pub use crate::gemm::{FP8_BLOCK, FP8_BLOCKS, Fp4Layout, repack_fp4};
pub(crate) use args::PackedWeights;
pub use args::{Activations, FP4_BLOCK, fp8_block};
pub(crate) use backend::QuantOps;
pub use linear::{grouped_linear, quant_linear, quant_linear_group, quant_linear_pair};
#[cfg(feature = "flex")]
pub(crate) use reference::linear;
pub use roundtrips::{fp4_roundtrip, fp4_scaled_roundtrip, fp8_roundtrip, hadamard};
pub use weights::Weights;
