//! DeepSeek-V4 for the [Burn](https://burn.dev) deep-learning framework, inference only.
//!
//! Every part of the model is a Burn module of its own, made by a configuration (`XConfig -> init(device) -> X`): compose your own model
//! from them, or [load](checkpoint::Checkpoint::load) a released checkpoint and [`generate`] text.

pub mod attention;
pub mod block;
pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod flash_head;
pub mod generate;
mod graph;
pub mod hyper_connection;
pub mod linear;
pub mod model;
pub mod moe;
pub mod mtp;
pub mod norm;
#[cfg(test)]
mod repository;
pub mod rope;
pub mod router;
pub mod trace;
