//! One memory-mapped safetensors file.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::IgnoredAny;

use super::error::CheckpointError;
use super::index::UniqueKeys;
use crate::files;

const LENGTH_BYTES: usize = size_of::<u64>();
/// The limit of the `safetensors` crate's own reader.
const MAX_HEADER_BYTES: u64 = 100_000_000;

#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    map: Mmap,
    data_start: usize,
}

impl Shard {
    /// Maps the file and checks its header: afterwards the tensors' offsets are within
    /// [`Self::data`] and do not overlap.
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<(String, TensorInfo)>), CheckpointError> {
        let read_error = |source| CheckpointError::Read {
            path: path.to_path_buf(),
            source,
        };
        let file = files::open(path).map_err(read_error)?;
        let length = file.metadata().map_err(read_error)?.len();
        if length < LENGTH_BYTES as u64 {
            return Err(CheckpointError::NoHeader {
                path: path.to_path_buf(),
                length,
            });
        }
        // SAFETY: the map is read-only and private to this value. That its bytes stay what they are
        // relies on nobody writing to or truncating the file meanwhile, which no portable call can
        // enforce: `Checkpoint` documents it, as every reader of mapped checkpoints does. All
        // values in the bytes are checked when they are used, so that a file that changes gives
        // wrong numbers; a truncated one ends the process (SIGBUS), as SECURITY.md says.
        let map = unsafe { Mmap::map(&file) }.map_err(read_error)?;
        let (metadata, data_start) = read_header(path, &map)?;
        let tensors = metadata
            .offset_keys()
            .into_iter()
            .filter_map(|name| {
                let info = metadata.info(&name)?.clone();
                Some((name, info))
            })
            .collect();
        let shard = Self {
            path: path.to_path_buf(),
            file,
            map,
            data_start,
        };
        Ok((shard, tensors))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn data(&self) -> &[u8] {
        &self.map[self.data_start..]
    }

    /// Reads data from `first` on, without mapping their pages to the process's memory.
    pub(super) fn read(&self, first: usize, bytes: &mut [u8]) -> io::Result<()> {
        let first = self.data_start + first;
        #[cfg(unix)]
        {
            std::os::unix::fs::FileExt::read_exact_at(&self.file, bytes, first as u64)
        }
        #[cfg(not(unix))]
        {
            let _ = &self.file;
            bytes.copy_from_slice(&self.map[first..first + bytes.len()]);
            Ok(())
        }
    }

    /// Takes a range of the data out of the process's memory until it is read again.
    pub(super) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            let (start, length) = (self.data_start + range.start, range.len());
            let advice = UncheckedAdvice::DontNeed;
            // SAFETY: the map is private and nobody has written to it, so that its pages hold
            // nothing but the file's bytes. The next read of one, on whatever thread, finds these
            // again. Without advice, pages stay where they are.
            let _ = unsafe { self.map.unchecked_advise_range(advice, start, length) };
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// What files of llama.cpp begin with.
const GGUF: &[u8] = b"GGUF";

/// The GGUF file that a path leads to, or one in a directory that has none of `others`.
pub(super) fn gguf_at(path: &Path, others: &[&str]) -> Option<PathBuf> {
    let is_named = |path: &Path| {
        let extension = path.extension();
        extension.is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    };
    if path.is_dir() {
        if others.iter().any(|other| path.join(other).exists()) {
            return None;
        }
        let files = path.read_dir().ok()?.flatten().map(|entry| entry.path());
        return files.filter(|file| is_named(file)).min();
    }
    let mut magic = [0; GGUF.len()];
    let begun = files::open(path).and_then(|mut file| file.read_exact(&mut magic));
    let is_gguf = begun.is_ok() && (magic == GGUF || is_named(path));
    is_gguf.then(|| path.to_path_buf())
}

/// The checked header and where the data begins.
///
/// `SafeTensors::read_metadata` does the same, but adds up offsets that the header chooses, which
/// overflows for some.
pub(crate) fn read_header(path: &Path, bytes: &[u8]) -> Result<(Metadata, usize), CheckpointError> {
    let Some((declared, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(CheckpointError::NoHeader {
            path: path.to_path_buf(),
            length: bytes.len() as u64,
        });
    };
    if files::is_lfs_pointer(bytes) {
        return Err(CheckpointError::Pointer {
            path: path.to_path_buf(),
        });
    }
    if bytes.starts_with(GGUF) {
        return Err(CheckpointError::Gguf {
            path: path.to_path_buf(),
        });
    }
    let declared = u64::from_le_bytes(*declared);
    let header = usize::try_from(declared)
        .ok()
        .filter(|_| declared <= MAX_HEADER_BYTES)
        .and_then(|length| rest.get(..length))
        .ok_or_else(|| CheckpointError::HeaderLength {
            path: path.to_path_buf(),
            declared,
            length: bytes.len() as u64,
        })?;

    let header_error = |reason: String| CheckpointError::Header {
        path: path.to_path_buf(),
        reason,
    };
    let text = std::str::from_utf8(header).map_err(|error| header_error(error.to_string()))?;
    serde_json::from_str::<UniqueKeys<IgnoredAny>>(text)
        .map_err(|error| header_error(error.to_string()))?;
    let metadata: Metadata =
        serde_json::from_str(text).map_err(|error| header_error(error.to_string()))?;

    let data_start = LENGTH_BYTES + header.len();
    let actual = bytes.len() - data_start;
    if metadata.data_len() != actual {
        return Err(CheckpointError::DataLength {
            path: path.to_path_buf(),
            expected: metadata.data_len(),
            actual,
        });
    }
    Ok((metadata, data_start))
}
