//! DeepSeek-V4 and V4.1 for the [Burn](https://burn.dev) deep-learning framework, inference only.
//!
//! Every part of the model is a Burn module with a configuration of its own
//! (`XConfig -> init(device) -> X`). Compose your own model from these modules, or
//! [load](checkpoint::Checkpoint::load) a released checkpoint and [`generate`] text. A
//! [`Pipeline`](pipeline::Pipeline) has all that the latter takes.
//!
//! - Parts of the model: [`router`], [`moe`], [`attention`], [`norm`], [`rope`], [`linear`],
//!   [`hyper_connection`], [`engram`], [`block`]; the drafters [`mtp`] and [`dspark`]; the whole
//!   [`model`]
//! - What it remembers of texts: [`cache`]
//! - What it is loaded from: [`config`], [`checkpoint`]; where its layers live: [`placement`], and
//!   how several devices share them: [`parallel`]
//! - What writes text: [`generate`], with the engine, sampling and tokenizer; [`pipeline`];
//!   a [`flash_head`] in place of the output matrix
//! - For tests and debugging: [`trace`]; for messages: [`printable`]
//!
//! # Examples
//!
//! A layer in a model of your own. It needs no checkpoint:
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Distribution, Tensor};
//! use ds4_model::moe::MoeLayerConfig;
//!
//! let device = Device::flex();
//! // Tokens of width 64, and 8 experts of width 32, of which each token has two.
//! let layer = MoeLayerConfig::new(64, 32, 8, 2).init(&device);
//! let x = Tensor::<3>::random([1, 5, 64], Distribution::Normal(0.0, 1.0), &device);
//! // Token ids choose the experts of hash routers alone.
//! let y = layer.forward(x, Tensor::zeros([1, 5], &device));
//! assert_eq!(y.dims(), [1, 5, 64]);
//! # }
//! ```
//!
//! Text of a checkpoint, here of that in the repository, from the folder of this crate. Other
//! examples of these pages load it, too:
//!
//! ```
//! # #[cfg(feature = "flex")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burn_ds4_ops::device::DeviceSpec;
//! use ds4_model::pipeline::Pipeline;
//!
//! // Or "cuda", "cuda:1", "wgpu".
//! let device = "flex".parse::<DeviceSpec>()?.init()?;
//! let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &device)?;
//! let prompt = pipeline.encode("And God said,")?;
//! for piece in pipeline.generate(pipeline.defaults.clone(), &prompt)?.take(8) {
//!     print!("{}", piece?);
//! }
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "flex"))]
//! # fn main() {}
//! ```

pub mod attention;
pub mod block;
pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod dspark;
pub mod engram;
mod files;
pub mod flash_head;
pub mod generate;
mod graph;
pub mod hyper_connection;
pub mod linear;
pub mod model;
pub mod moe;
pub mod mtp;
pub mod norm;
pub mod parallel;
pub mod pipeline;
pub mod placement;
pub mod printable;
mod probed_head;
#[cfg(test)]
mod repository;
pub mod rope;
pub mod router;
pub mod trace;
mod weights;

/// The programs of the README are run as tests of this crate.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So are those of the page about the library.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct Library;
