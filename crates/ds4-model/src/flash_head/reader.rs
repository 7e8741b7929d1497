//! Reading of a file.

use std::path::Path;

use burn::tensor::{DType, TensorData};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::error::FlashHeadFileError;
use super::keys::{ASSIGNMENTS, CENTROIDS, NORMS, SEED_KEY, SPECIAL_KEY};

/// Header and data of a file; the header has been checked.
pub(super) struct Reader<'a> {
    pub(super) path: &'a Path,
    pub(super) metadata: &'a Metadata,
    pub(super) data: &'a [u8],
}

impl Reader<'_> {
    fn text(&self, key: &str) -> Option<&String> {
        self.metadata.metadata().as_ref()?.get(key)
    }

    pub(super) fn expect(
        &self,
        key: &'static str,
        fits: impl Fn(&str) -> bool,
        expected: &str,
    ) -> Result<String, FlashHeadFileError> {
        let text = self.text(key);
        match text.filter(|text| fits(text)) {
            Some(text) => Ok(text.clone()),
            None => Err(FlashHeadFileError::Metadata {
                path: self.path.to_path_buf(),
                key,
                expected: expected.to_owned(),
                actual: text.map_or("missing".to_owned(), |text| format!("`{text}`")),
            }),
        }
    }

    pub(super) fn seed(&self) -> Result<Option<u64>, FlashHeadFileError> {
        if self.text(SEED_KEY).is_none() {
            return Ok(None);
        }
        let fits = |text: &str| text.parse::<u64>().is_ok();
        let text = self.expect(SEED_KEY, fits, "a whole number")?;
        Ok(text.parse().ok())
    }

    pub(super) fn special_tokens(&self) -> Result<Vec<u32>, FlashHeadFileError> {
        let parse = |text: &str| -> Option<Vec<u32>> {
            let entries = text.split(',').filter(|_| !text.is_empty());
            entries.map(|entry| entry.parse().ok()).collect()
        };
        let expected = "ids separated by commas";
        let text = self.expect(SPECIAL_KEY, |text| parse(text).is_some(), expected)?;
        Ok(parse(&text).unwrap_or_default())
    }

    /// The bytes were checked against dtype and shape when the header was read.
    fn tensor(
        &self,
        name: &'static str,
        accepted: &[Dtype],
        expected: &str,
    ) -> Result<TensorData, FlashHeadFileError> {
        let Some(info) = self.metadata.info(name) else {
            return Err(self.wrong(name, expected.to_owned(), "is missing".to_owned()));
        };
        let dtype = match info.dtype {
            dtype if !accepted.contains(&dtype) => None,
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::U32 => Some(DType::U32),
            Dtype::I32 => Some(DType::I32),
            _ => None,
        };
        let Some(dtype) = dtype else {
            let actual = format!("has dtype {}", info.dtype);
            return Err(self.wrong(name, format!("dtype {expected}"), actual));
        };
        let (begin, end) = info.data_offsets;
        let bytes = self.data[begin..end].to_vec();
        Ok(TensorData::from_bytes_vec(bytes, info.shape.clone(), dtype))
    }

    pub(super) fn assignments(&self) -> Result<Vec<u32>, FlashHeadFileError> {
        let data = self.tensor(ASSIGNMENTS, &[Dtype::U32, Dtype::I32], "U32 or I32")?;
        let expected = "shape [vocabulary] of at least 1";
        if data.shape().num_dims() != 1 || data.num_elements() == 0 {
            let actual = format!("has shape {:?}", data.shape().as_slice());
            return Err(self.wrong(ASSIGNMENTS, expected.to_owned(), actual));
        }
        let clusters = data.iter::<i64>().map(|cluster| {
            u32::try_from(cluster).map_err(|_| {
                let expected = "clusters from 0".to_owned();
                self.wrong(ASSIGNMENTS, expected, format!("has {cluster}"))
            })
        });
        clusters.collect()
    }

    /// The centroids and their number.
    pub(super) fn centroids(&self) -> Result<(TensorData, usize), FlashHeadFileError> {
        let accepted = [Dtype::F32, Dtype::F16, Dtype::BF16];
        let data = self.tensor(CENTROIDS, &accepted, "F32, F16 or BF16")?;
        match *data.shape().as_slice() {
            [clusters, width] if clusters > 0 && width > 0 => Ok((data, clusters)),
            ref shape => {
                let expected = "shape [clusters, width] of at least 1 each".to_owned();
                Err(self.wrong(CENTROIDS, expected, format!("has shape {shape:?}")))
            }
        }
    }

    pub(super) fn norms(&self, clusters: usize) -> Result<TensorData, FlashHeadFileError> {
        let data = self.tensor(NORMS, &[Dtype::F32], "F32")?;
        if data.shape().as_slice() == [clusters] {
            return Ok(data);
        }
        let expected = format!("shape [{clusters}], one for each row of `{CENTROIDS}`");
        let actual = format!("has shape {:?}", data.shape().as_slice());
        Err(self.wrong(NORMS, expected, actual))
    }

    fn wrong(&self, name: &'static str, expected: String, actual: String) -> FlashHeadFileError {
        FlashHeadFileError::Tensor {
            path: self.path.to_path_buf(),
            name,
            expected,
            actual,
        }
    }
}
