//! The file of a clustered head.

use std::io;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Tensor, TensorData};
use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions};

use super::error::FlashHeadFileError;
use super::keys::{CAPACITY_KEY, FINGERPRINT_KEY, VERSION, VERSION_KEY};
use super::reader::Reader;
use super::{fingerprint, writer};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::shard::read_header;
use crate::files;

/// Name of the file, in the directory of the checkpoint.
pub const FLASH_HEAD_FILE: &str = "flash_head.safetensors";

/// Contents of a clustered head's file.
///
/// It is a safetensors file with the tensors `assignments`, `[vocabulary]`, U32 or I32,
/// `centroids`, `[clusters, width]`, F32, F16 or BF16, of length 1 or 0, and `norms`, `[clusters]`,
/// F32. Its metadata are `flash_head_version` (1), `capacity`, `special_tokens` (separated by
/// commas), `lm_head` (the fingerprint) and, where it is known, `seed`.
#[derive(Clone, Debug)]
pub struct FlashHeadFile {
    path: PathBuf,
    assignments: Vec<u32>,
    centroids: TensorData,
    norms: TensorData,
    special_tokens: Vec<u32>,
    seed: Option<u64>,
    fingerprint: String,
}

impl FlashHeadFile {
    /// Writes a head to a file, with the seed that its clusters were built from. An existing file
    /// is replaced at once or not at all.
    ///
    /// # Errors
    /// [`FlashHeadFileError::Write`].
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};
    /// use ds4_model::flash_head::FlashHeadFile;
    ///
    /// let output = Tensor::<2>::random([64, 8], Distribution::Default, &Device::flex());
    /// let head = FlashHead::build(output.clone(), 4, &BuildOptions::default(), |_| {})?;
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("flash_head.safetensors");
    /// FlashHeadFile::save(&path, &head, Some(0))?;
    /// let file = FlashHeadFile::open(&path)?;
    /// assert_eq!(file.assignments(), head.assignments());
    /// assert!(file.head(output.clone()).is_ok());
    /// // The clusters are of no use for another matrix.
    /// assert!(file.head(output * 2).is_err());
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save(
        path: &Path,
        head: &FlashHead,
        seed: Option<u64>,
    ) -> Result<(), FlashHeadFileError> {
        let error = |source| FlashHeadFileError::Write {
            path: path.to_path_buf(),
            source,
        };
        let bytes = writer::encode(head, seed).map_err(|reason| error(io::Error::other(reason)))?;
        files::replace(path, &bytes).map_err(error)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`FlashHeadFileError`] for a file that cannot be read, is damaged, lacks an entry or has one
    /// of another form.
    pub fn open(path: &Path) -> Result<Self, FlashHeadFileError> {
        let bytes = files::read(path, u64::MAX).map_err(|source| CheckpointError::Read {
            path: path.to_path_buf(),
            source,
        })?;
        let (metadata, data_start) = read_header(path, &bytes)?;
        let reader = Reader {
            path,
            metadata: &metadata,
            data: &bytes[data_start..],
        };
        reader.expect(VERSION_KEY, |value| value == VERSION, VERSION)?;
        let assignments = reader.assignments()?;
        let (centroids, clusters) = reader.centroids()?;
        let norms = reader.norms(clusters)?;
        let capacity = assignments.len().div_ceil(clusters).to_string();
        reader.expect(CAPACITY_KEY, |value| value == capacity, &capacity)?;
        Ok(Self {
            path: path.to_path_buf(),
            special_tokens: reader.special_tokens()?,
            fingerprint: reader.expect(FINGERPRINT_KEY, |_| true, "a fingerprint")?,
            assignments,
            centroids,
            norms,
            seed: reader.seed()?,
        })
    }

    /// The head that the file describes, made of the given matrix and on its device.
    ///
    /// # Errors
    /// [`FlashHeadFileError::OtherHead`] for another matrix; [`FlashHeadFileError::Head`] for parts
    /// that make no head.
    pub fn head(&self, lm_head: Tensor<2>) -> Result<FlashHead, FlashHeadFileError> {
        let actual = fingerprint::of_matrix(&lm_head);
        if actual != self.fingerprint {
            return Err(FlashHeadFileError::OtherHead {
                path: self.path.clone(),
                stored: self.fingerprint.clone(),
                actual,
            });
        }
        let device = lm_head.device();
        let options = FlashHeadOptions {
            special_tokens: self.special_tokens.clone(),
            norms: Some(Tensor::from_data(self.norms.clone(), (&device, DType::F32))),
        };
        let centroids = Tensor::from_data(self.centroids.clone(), (&device, lm_head.dtype()));
        FlashHead::new(lm_head, &self.assignments, centroids, options).map_err(|source| {
            FlashHeadFileError::Head {
                path: self.path.clone(),
                source,
            }
        })
    }

    /// The cluster of each id.
    pub fn assignments(&self) -> &[u32] {
        &self.assignments
    }

    /// Ids that are always candidates.
    pub fn special_tokens(&self) -> &[u32] {
        &self.special_tokens
    }

    /// The seed that the clusters were built from, if it is known.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }
}
