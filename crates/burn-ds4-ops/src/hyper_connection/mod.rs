//! Manifold-constrained hyper-connections (mHC): several residual streams, mixed around every
//! sub-layer.
//!
//! A model keeps `n` streams of width `d` for each token. Before a sub-layer they are collapsed
//! into one input. After it, the output is spread over the streams, which are mixed with one
//! another by a doubly stochastic matrix. All coefficients are functions of the streams themselves.
//!
//! [`collapse`], [`expand`] and [`head`] are one of these steps each. A model that runs them one
//! after the other is faster with [`collapse_norm`] and [`head_norm`]. These leave the end of a
//! sub-layer to the beginning of the next: [`Streams`] holds what is pending.
//!
//! Streams are read and written in their own dtype. All arithmetic is in f32, and each result is
//! rounded once. On devices that run the kernels, a token's result has the same bits with up to
//! [`INVARIANT_ROWS`](crate::matmul::INVARIANT_ROWS) tokens as alone.

mod args;
mod backend;
mod coefficients;
mod collapse;
mod expand;
#[cfg(feature = "cube")]
mod kernel;
mod late;
#[cfg(feature = "cube")]
mod launch;
mod reference;
mod streams;
mod validation;

pub use args::Sinkhorn;
pub use coefficients::Coefficients;
pub use collapse::{Collapsed, Norm, collapse, collapse_norm, head, head_norm};
pub use expand::expand;
pub use late::{collapse_norm_late, end_late};
pub use streams::Streams;
