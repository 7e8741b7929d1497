//! What can be wrong with a checkpoint.

use std::fmt;
use std::path::PathBuf;

use safetensors::Dtype;
use thiserror::Error;

use super::names::DRAFTER;
use crate::config::ConfigError;
use crate::engram::EngramIdsError;
use crate::placement::PlacementError;
use crate::printable::{Printable, place};

/// Most names of a list that are shown.
pub(super) const SHOWN: usize = 20;

/// Why a checkpoint cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The model cannot be divided among the devices as asked.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// There are no ids for the engrams; the message names the file.
    #[error(transparent)]
    EngramIds(#[from] EngramIdsError),
    /// A checkpoint of V4.1 was to be written with the names of `transformers`.
    #[error(
        "{}: checkpoints of V4.1 are not written with the names of transformers",
        place(dir)
    )]
    NotConverted {
        /// The checkpoint.
        dir: PathBuf,
    },
    /// `config.json` cannot be used; the message names the file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device cannot compute in the dtype that was asked for.
    #[error("`dtype` {dtype:?} is not supported by the device {device}")]
    UnsupportedDtype {
        /// The dtype.
        dtype: burn::tensor::FloatDType,
        /// The device.
        device: String,
    },
    /// The indexer's FP4 round trip needs a Hadamard transform, whose width is a power of two.
    #[error(
        "`quantized_cache` needs an index_head_dim that is a power of two, \
         the model has {index_head_dim}"
    )]
    QuantizedIndexer {
        /// Width of the indexer's rows.
        index_head_dim: usize,
    },
    /// A file could not be read, or is no regular file, such as a FIFO.
    #[error("{}: cannot be read: {source}", place(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The directory has neither a single weight file nor an index of shards.
    #[error(
        "{}: has neither model.safetensors nor model.safetensors.index.json",
        place(dir)
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The weights are in llama.cpp's format, which is not read.
    #[error(
        "{}: it is a GGUF file, which is not read here: download the released safetensors \
         instead, as with `hf download deepseek-ai/DeepSeek-V4-Flash --local-dir DIR`",
        place(path)
    )]
    Gguf {
        /// The file.
        path: PathBuf,
    },
    /// A file of a conversion could not be written, or what it is copied from not be read.
    #[error("{}: cannot be written: {source}", place(path))]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The directory that is to be written has files that are not of the same conversion.
    #[error(
        "{}: is not empty, and has no such conversion to go on with",
        place(path)
    )]
    TargetExists {
        /// The directory.
        path: PathBuf,
    },
    /// A weight file was not fetched.
    #[error("{}: {}", place(path), crate::files::LFS_POINTER)]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// A weight file is too short for the length of a header.
    #[error("{}: no safetensors header in {length} bytes", place(path))]
    NoHeader {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        length: u64,
    },
    /// The length of the header that a weight file declares is beyond its end or absurd.
    #[error(
        "{}: declares a header of {declared} bytes in a file of {length} bytes",
        place(path)
    )]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// The declared length.
        declared: u64,
        /// The length of the file in bytes.
        length: u64,
    },
    /// The header is not text, not JSON, lists a tensor twice, or has offsets that overlap, leave
    /// gaps or do not fit the shapes.
    #[error("{}: bad safetensors header: {}", place(path), Printable(reason))]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the tensor's name where there is one.
        reason: String,
    },
    /// The tensors do not end where the file ends: it was truncated or something was appended.
    #[error(
        "{}: {actual} bytes of tensors, {expected} expected (truncated or damaged file)",
        place(path)
    )]
    DataLength {
        /// The file.
        path: PathBuf,
        /// Bytes of tensors according to the header.
        expected: usize,
        /// Bytes after the header.
        actual: usize,
    },
    /// The index of the shards is not JSON of the right form, lists a tensor twice, or none.
    #[error("{}: bad index: {}", place(path), Printable(source))]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The index names a shard that is not a plain file name, as one outside the directory.
    #[error(
        "{}: `{}` is in `{}`, which is not a file name",
        place(index),
        Printable(tensor),
        Printable(shard)
    )]
    ShardName {
        /// The index file.
        index: PathBuf,
        /// A tensor that is said to be there.
        tensor: String,
        /// The shard's name.
        shard: String,
    },
    /// Shards that the index names do not exist.
    #[error("{}: shards that do not exist: {}", place(index), Shown(shards))]
    MissingShards {
        /// The index file.
        index: PathBuf,
        /// The shards, sorted.
        shards: Vec<String>,
    },
    /// Tensors are not in the shards in which the index says they are.
    #[error(
        "{}: tensors that are not in their shards: {}",
        place(index),
        Shown(tensors)
    )]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// The tensors and their shards, sorted.
        tensors: Vec<String>,
    },
    /// Two shards hold the same tensor.
    #[error("{}: `{}` is also in {}", place(second), Printable(name), place(first))]
    DuplicateTensor {
        /// The tensor.
        name: String,
        /// The first file.
        first: PathBuf,
        /// The second file.
        second: PathBuf,
    },
    /// The tensors are those of a DSpark drafter, of which the configuration says nothing.
    #[error(
        "{}: config.json has no dspark_block_size, but the tensors are those of a DSpark drafter \
         ({})",
        place(dir),
        Shown(tensors)
    )]
    UnknownDspark {
        /// The directory.
        dir: PathBuf,
        /// Its tensors, sorted.
        tensors: Vec<String>,
    },
    /// The model would take more memory than the device has.
    #[error(
        "{}: the model takes {bytes} bytes, which do not fit in memory",
        place(dir)
    )]
    OutOfMemory {
        /// The directory.
        dir: PathBuf,
        /// What its tensors take on the device.
        bytes: usize,
    },
    /// The tensors are not those of the model.
    #[error(transparent)]
    Weights(Box<WeightErrors>),
}

/// A tensor that the model has and the checkpoint has not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MissingTensor {
    /// Its name.
    pub name: String,
    /// The shape it should have; that of a linear weight counts elements, whatever its format.
    pub expected: Vec<usize>,
}

impl fmt::Display for MissingTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.expected)
    }
}

/// A tensor that the checkpoint has and the model has not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnexpectedTensor {
    /// Its name.
    pub name: String,
    /// Its stored shape.
    pub shape: Vec<usize>,
    /// Its stored element type.
    pub dtype: Dtype,
}

impl fmt::Display for UnexpectedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Printable(&self.name);
        write!(f, "{name} {} {:?}", self.dtype, self.shape)
    }
}

/// A tensor of another shape than the model's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MisShapedTensor {
    /// Its name.
    pub name: String,
    /// The shape it should have, as its element type is stored.
    pub expected: Vec<usize>,
    /// Its stored shape.
    pub actual: Vec<usize>,
}

impl fmt::Display for MisShapedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {:?}, expected {:?}",
            self.name, self.actual, self.expected
        )
    }
}

/// A tensor whose contents cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InvalidTensor {
    /// Its name.
    pub name: String,
    /// What is wrong.
    pub reason: InvalidReason,
}

impl fmt::Display for InvalidTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.reason)
    }
}

/// What is wrong with the contents of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
#[non_exhaustive]
pub enum InvalidReason {
    /// The element type is not one of those supported here.
    #[error("has dtype {actual}, expected {expected}")]
    Dtype {
        /// The stored element type.
        actual: Dtype,
        /// Those supported.
        expected: &'static str,
    },
    /// The tensor has no elements.
    #[error("has no elements")]
    Empty,
    /// Values are NaN or infinite.
    #[error("has {count} values that are not finite, the first at element {first}")]
    NonFinite {
        /// How many.
        count: usize,
        /// Row-major index of the first.
        first: usize,
    },
    /// FP8 weights hold NaN codes.
    #[error("has {count} NaN codes, the first at element {first}")]
    NanCodes {
        /// How many.
        count: usize,
        /// Row-major index of the first.
        first: usize,
    },
    /// Scales are NaN or infinite.
    #[error("has {count} scales that are not finite, the first at element {first}")]
    NonFiniteScales {
        /// How many.
        count: usize,
        /// Row-major index of the first.
        first: usize,
    },
    /// Ids are out of range.
    #[error("has {count} ids outside 0..{upper_bound}, the first is {value} at element {first}")]
    Ids {
        /// How many.
        count: usize,
        /// Row-major index of the first.
        first: usize,
        /// The first.
        value: i64,
        /// The number of valid ids.
        upper_bound: usize,
    },
    /// A weight of an expert has another format than those that it is stacked with.
    #[error("is {actual}, most of what it is stacked with is {common}")]
    MixedFormats {
        /// Its format.
        actual: &'static str,
        /// The format of most of them.
        common: &'static str,
    },
    /// The file cannot be read there, or not as it was before.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// The host has not enough memory for the tensor, or for the stack it belongs to.
    #[error("does not fit in memory")]
    OutOfMemory,
}

/// All differences between the tensors of a checkpoint and those of the model. Lists are sorted by
/// name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightErrors {
    /// The directory.
    pub dir: PathBuf,
    /// Tensors that are not there; of very many experts of a layer only the first.
    pub missing: Vec<MissingTensor>,
    /// How many more are not there.
    pub more_missing: usize,
    /// Tensors that nothing asked for.
    pub unexpected: Vec<UnexpectedTensor>,
    /// Tensors of another shape.
    pub mis_shaped: Vec<MisShapedTensor>,
    /// Tensors whose element type or contents cannot be used.
    pub invalid: Vec<InvalidTensor>,
}

impl WeightErrors {
    /// Whether there is no error at all.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.mis_shaped.is_empty()
            && self.invalid.is_empty()
    }

    /// Adds those of another part of the model, or those of the same one.
    pub(super) fn extend(&mut self, other: Self, is_repeated: bool) {
        self.missing.extend(other.missing);
        self.more_missing = match is_repeated {
            true => self.more_missing.max(other.more_missing),
            false => self.more_missing.saturating_add(other.more_missing),
        };
        self.mis_shaped.extend(other.mis_shaped);
        self.invalid.extend(other.invalid);
    }

    pub(super) fn sort(&mut self) {
        self.missing.sort();
        self.missing.dedup();
        self.unexpected.sort();
        self.mis_shaped.sort();
        self.mis_shaped.dedup();
        self.invalid.sort();
        self.invalid.dedup();
    }
}

impl std::error::Error for WeightErrors {}

impl fmt::Display for WeightErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the weights do not fit the model", place(&self.dir))?;
        list(f, "missing", &self.missing, self.more_missing)?;
        let mut missing = self.missing.iter();
        if missing.len() > 0 && missing.all(|tensor| tensor.name.starts_with(DRAFTER)) {
            write!(
                f,
                "\nall of them are of what drafts, without which the model runs, too \
                       (`LoadOptions::drafter`, `--drafter none`)"
            )?;
        }
        list(f, "unexpected", &self.unexpected, 0)?;
        list(f, "mis-shaped", &self.mis_shaped, 0)?;
        list(f, "invalid", &self.invalid, 0)
    }
}

/// Shows the first entries, and how many there are with `more` that are not listed.
fn list<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    entries: &[T],
    more: usize,
) -> fmt::Result {
    if entries.is_empty() {
        return Ok(());
    }
    let count = entries.len().saturating_add(more);
    write!(f, "\n{title} ({count}):")?;
    for entry in entries.iter().take(SHOWN) {
        write!(f, "\n  {entry}")?;
    }
    match count.saturating_sub(SHOWN) {
        0 => Ok(()),
        more => write!(f, "\n  and {more} more"),
    }
}

/// The beginning of a list of names.
struct Shown<'a>(&'a [String]);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.0[..self.0.len().min(SHOWN)];
        write!(f, "{}", Printable(shown.join(", ")))?;
        match self.0.len() - shown.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
