//! Tables of rows that stay in the files.

use std::ops::Range;
use std::sync::Arc;

use safetensors::Dtype;

use super::codec;
use super::directory::CheckpointTensor;
use super::loader::Loader;
use super::shard::Shard;
use crate::weights::{EngramTable, TableSource};

/// Columns of a row that have a scale in common.
const BLOCK: usize = 32;

/// The rows of a table in a file that is mapped: E4M3 codes, and E8M0 scales. What a row holds is
/// not checked when the model is loaded, since a table may be larger than all other weights.
#[derive(Debug)]
struct MappedRows {
    codes: Mapped,
    scales: Mapped,
    width: usize,
}

/// A tensor, as long as anybody has it.
#[derive(Debug)]
struct Mapped {
    shard: Arc<Shard>,
    range: Range<usize>,
}

impl Mapped {
    fn row(&self, row: u64, length: usize) -> &[u8] {
        let first = self.range.start + row as usize * length;
        &self.shard.data()[first..first + length]
    }
}

impl TableSource for MappedRows {
    fn row(&self, row: u64, values: &mut [f32]) {
        let codes = self.codes.row(row, self.width);
        let scales = self.scales.row(row, self.width.div_ceil(BLOCK));
        let blocks = codes.chunks(BLOCK).zip(scales);
        let decoded = blocks.flat_map(|(codes, scale)| {
            let scale = codec::e8m0_to_f32(*scale);
            codes
                .iter()
                .map(move |code| codec::e4m3_to_f32(*code) * scale)
        });
        for (value, decoded) in values.iter_mut().zip(decoded) {
            *value = decoded;
        }
    }
}

impl Loader<'_> {
    /// The table `{prefix}.weight`, `[rows, width]` of E4M3, with `{prefix}.scale` of E8M0 for
    /// every 32 columns of a row.
    pub(super) fn lookup(
        &mut self,
        prefix: &str,
        [rows, width]: [usize; 2],
    ) -> Option<EngramTable> {
        let parts = [
            ("weight", width, &[Dtype::F8_E4M3][..], "F8_E4M3"),
            (
                "scale",
                width.div_ceil(BLOCK),
                &[Dtype::F8_E8M0, Dtype::U8],
                "F8_E8M0",
            ),
        ];
        let found = parts.map(|(part, columns, dtypes, expected)| {
            let shape = [rows, columns];
            let tensor = self.find(&format!("{prefix}.{part}"), &shape)?;
            self.count(&tensor);
            if !dtypes.contains(&tensor.dtype) {
                self.invalid_dtype(&tensor, expected);
                return None;
            }
            self.check_shape(&tensor, &shape).then_some(tensor)
        });
        let [Some(codes), Some(scales)] = found else {
            return None;
        };
        if self.headers_only || self.failed() {
            return None;
        }
        let mapped = |tensor: CheckpointTensor<'_>| {
            let (shard, range) = self.checkpoint().mapped(tensor.name);
            Mapped { shard, range }
        };
        let rows = MappedRows {
            codes: mapped(codes),
            scales: mapped(scales),
            width,
        };
        Some(EngramTable::new(rows, width))
    }
}
