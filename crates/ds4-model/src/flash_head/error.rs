use std::path::PathBuf;

use burn_ds4_ops::OpError;
use thiserror::Error;

use crate::checkpoint::CheckpointError;
use crate::printable::{Printable, place};

/// Why the file of a clustered head cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FlashHeadFileError {
    /// The file cannot be read, or is not a safetensors file; the message names it.
    #[error(transparent)]
    File(#[from] CheckpointError),
    /// The file cannot be written.
    #[error("{}: cannot be written: {source}", place(path))]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// An entry of its metadata is missing, or not what it should be.
    #[error(
        "{}: metadata `{key}` is {}, expected {expected}",
        place(path),
        Printable(actual)
    )]
    Metadata {
        /// The file.
        path: PathBuf,
        /// Name of the entry.
        key: &'static str,
        /// What it should be.
        expected: String,
        /// What it is, or `missing`.
        actual: String,
    },
    /// A tensor is missing, or not what it should be.
    #[error("{}: tensor `{name}` {actual}, expected {expected}", place(path))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        name: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        actual: String,
    },
    /// The file was made of another head.
    #[error(
        "{}: was made of the head {}, this one is {actual}",
        place(path),
        Printable(stored)
    )]
    OtherHead {
        /// The file.
        path: PathBuf,
        /// Fingerprint of the head that it was made of.
        stored: String,
        /// Fingerprint of the head at hand.
        actual: String,
    },
    /// The parts in the file do not make a head.
    #[error("{}: {source}", place(path))]
    Head {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: OpError,
    },
}
