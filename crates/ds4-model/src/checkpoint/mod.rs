//! Released DeepSeek-V4 checkpoints: safetensors in, host weights out.
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
//! - Linear weights in FP4 (`I8`, scales `F8_E8M0` per 32), FP8 (`F8_E4M3`, scales `F8_E8M0` or
//!   `F32` per 128x128), `BF16`, `F16`, `F32`. The tensors decide, not the configuration, and each
//!   linear decides for itself.
//!
//! # Rejected
//! - Other architectures.
//! - GGUF, NVFP4 and the formats of `compressed-tensors`.
//!
//! # Skipped
//! - Tensors and routing biases for images, biases of routers that have a table of experts, copies
//!   of the embedding and the output matrix under a drafter, and tensors without elements that
//!   nothing asks for.

mod build;
mod codec;
mod directory;
mod error;
mod experts;
mod host;
mod index;
mod loader;
mod names;
mod options;
mod progress;
pub(crate) mod shard;
mod stored;
mod values;

#[cfg(test)]
mod tests;

pub use safetensors::Dtype;

pub use crate::weights::load_all;
pub use codec::e8m0_to_f32;
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
