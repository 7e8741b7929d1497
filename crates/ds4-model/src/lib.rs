//! DeepSeek-V4 for the [Burn](https://burn.dev) deep-learning framework, inference only.
//!
//! Every part of the model is a Burn module with a configuration of its own
//! (`XConfig -> init(device) -> X`). Compose your own model from these modules, or
//! [load](checkpoint::Checkpoint::load) a released checkpoint and [`generate`] text. A
//! [`Pipeline`](pipeline::Pipeline) has all that the latter takes.

pub mod attention;
pub mod block;
pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod dspark;
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
pub mod pipeline;
pub mod printable;
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
