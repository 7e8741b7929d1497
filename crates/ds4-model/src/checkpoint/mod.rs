//! Released DeepSeek-V4 and V4.1 checkpoints: safetensors in, host weights out.
//!
//! [`Checkpoint`] opens a directory and lists every tensor in it; it reads nothing but headers. A
//! [`Loader`] returns the weights one by one, in the layout of the device tensors, and collects
//! what is wrong with them.
//!
//! # Supported
//! - `config.json` as [`ModelConfig`](crate::config::ModelConfig) reads it; `model.safetensors`, or
//!   `model.safetensors.index.json` with its shards.
//! - Tensor names of the released files, with an MTP layer or a DSpark drafter, also with a prefix
//!   such as `model.`, and those of Hugging Face `transformers`, whose tensors of all experts are
//!   divided.
//! - Linear weights in FP4 (`I8`, `U8` or `F4`, scales `F8_E8M0`, `F32` or `BF16` per 32), NVFP4
//!   (scales `F8_E4M3` per 16 and one of all), FP8 (`F8_E4M3`, scales `F8_E8M0`, `F32` or `BF16`
//!   per 128x128, per 32x32, per row, per 32 of a row or one of all), `BF16`, `F16`, `F32`. The
//!   tensors decide, not the configuration, and each linear for itself. FP4 whose scales fold to
//!   E8M0 per 32 is held so; what no kernel reads is decoded in f32 to a dense matrix.
//! - Tables of engrams in FP8 with scales per 32 of a row. They stay in the file.
//!
//! # Rejected
//! - Other architectures.
//! - GGUF and packed integers.
//!
//! # Skipped
//! - Tensors and routing biases for images, biases of routers that have a table of experts, copies
//!   of the embedding and the output matrix under a drafter, scales of activations and caches, and
//!   tensors without elements that nothing asks for.
//!
//! # Written
//! - [`Checkpoint::convert`] writes any of these in the released form, dense, or with the names of
//!   `transformers`.

mod build;
mod codec;
mod convert;
mod direct;
mod directory;
mod error;
mod experts;
mod format;
mod host;
mod index;
mod loader;
mod names;
mod options;
mod packed;
mod progress;
pub(crate) mod shard;
mod stored;
mod tables;
mod values;

#[cfg(test)]
mod tests;

pub use safetensors::Dtype;

pub use crate::weights::load_all;
pub use codec::e8m0_to_f32;
pub use convert::Form;
pub(crate) use directory::CONFIG_FILE;
pub use directory::{Checkpoint, CheckpointTensor};
pub use error::{
    CheckpointError, InvalidReason, InvalidTensor, MisShapedTensor, MissingTensor,
    UnexpectedTensor, WeightErrors,
};
pub use host::{HostExperts, HostLinear};
pub use loader::Loader;
pub use names::Dialect;
pub use options::LoadOptions;
pub use progress::LoadProgress;
