//! DeepSeek-V4 operators for the [Burn](https://burn.dev) deep-learning framework, inference only.
//!
//! Every operator takes and returns Burn tensors and runs on every Burn device. Operators are
//! grouped in families, one module each. A family's `reference.rs` defines its results in plain
//! tensor operations.
//!
//! - [`attention`]: partial rotary embedding, pooling of key/value blocks, indexer scores,
//!   attention with a sink, the same over the rows of a cache and what appends them
//! - [`collective`]: sums, copies and rows of several devices, through each other's memory where
//!   they can
//! - [`flash_head`]: an output head that reads the likely part of the vocabulary: the greedy token,
//!   candidates, draws
//! - [`gated_delta`]: gated delta rule: recurrent linear attention on a pool of states
//! - [`hyper_connection`]: coefficients, collapse and expansion of residual streams, the head, each
//!   with the norm that follows
//! - [`markov`]: drafts that are chosen one after the other, each by the token before it
//! - [`matmul`]: small-M products whose rows do not depend on each other, products of any rows; f32
//!   operands never in TF32
//! - [`moe`]: clamped SwiGLU, experts with dense or packed weights, alone and with a shared one
//! - [`norm`]: RMS norm
//! - [`quant`]: dense and packed weights, linear maps by them, alone and in groups, FP8 and FP4
//!   weight decoding, FP8 and FP4 activation round trips, Hadamard transform
//! - [`router`]: score and hash routing, small top-k
//! - [`sampling`]: tokens from logits by the parameters of each lane: the highest, or a seeded draw
//!   after temperature, top-k, top-p and min-p; verification of drafts; penalties, logit bias and
//!   log-probabilities
//! - [`topk`]: the largest entries of long rows, each in a window of its own
//!
//! # Example
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Tensor};
//! use burn_ds4_ops::router::activation_topk;
//!
//! // Logits of one token for four experts; the best two, and weights that sum to 1.
//! let logits = Tensor::<2>::from_data([[0.5, 2.0, 2.0, -1.0]], &Device::flex());
//! let (weights, ids) = activation_topk(logits, None, None, 2, 1.0)?;
//! // Of equal ones the lower expert comes first.
//! assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 2]);
//! assert_eq!(weights.into_data().iter::<f32>().collect::<Vec<_>>(), [0.5, 0.5]);
//! # }
//! # Ok::<(), burn_ds4_ops::OpError>(())
//! ```
//!
//! # Devices
//!
//! [`device`] turns a name such as `cuda:1` into a [`Device`](burn::tensor::Device), or into a
//! one-line error where it is not compiled in or not present. [`readback`] reads a few numbers back
//! while the device continues to work, [`transfer`] moves tensors between devices, and [`upload`]
//! gives a device the words of files. Features `flex` (default), `wgpu`, `cuda` and `cpu` choose
//! the backends.

// Burn's macro for extensions of backends leaves their arguments unused where there is none.
#![cfg_attr(not(any(feature = "flex", feature = "cube")), allow(unused_variables))]

#[cfg(feature = "cube")]
mod argmax;
#[cfg(feature = "cube")]
mod arrival;
pub mod attention;
#[cfg(feature = "cube")]
mod caps;
pub mod collective;
#[cfg(feature = "cube")]
mod comptime_option;
pub mod device;
mod dims;
mod error;
pub mod flash_head;
pub mod gated_delta;
mod gemm;
pub mod hyper_connection;
#[cfg(feature = "cube")]
mod intrinsics;
mod kinds;
#[cfg(feature = "cube")]
mod launching;
pub mod markov;
pub mod matmul;
pub mod moe;
pub mod norm;
mod operators;
mod optional;
pub mod quant;
mod random;
pub mod readback;
mod reference;
mod roundtrip;
pub mod router;
#[cfg(feature = "cube")]
mod rows;
pub mod sampling;
pub mod scratch;
#[cfg(feature = "cube")]
mod select;
pub mod topk;
pub mod transfer;
pub mod upload;
mod validation;
#[cfg(feature = "cube")]
mod warpgroup;

pub use error::OpError;
