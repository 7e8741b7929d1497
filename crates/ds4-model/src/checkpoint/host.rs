//! Weights in host memory, in the layouts of the device tensors.

use burn::tensor::TensorData;
use half::{bf16, f16};
use rayon::prelude::*;

use super::codec;
use super::format::{FP4_BLOCK, FP8_BLOCK, FP8_BLOCKS, SCALE_ONE, StoredLinear, WeightFormat};

/// The weight of a linear layer, `[out, in]` row-major, in the format of its file.
#[derive(Clone, Debug, PartialEq)]
pub enum HostLinear {
    /// BF16, F16 or F32 elements, `[out, in]`, finite.
    Dense(TensorData),
    /// E4M3 codes with a scale per block of 128x128, or of 32x32: as many as there are say which.
    Fp8 {
        /// `[out, in]`.
        shape: [usize; 2],
        /// `[out, ceil(in / 4)]`: byte `j` of a word, the lowest first, is column `4 * word + j`.
        /// Padding is zero.
        words: Vec<u32>,
        /// `[ceil(out / block), ceil(in / block)]`, finite.
        scales: Vec<f32>,
    },
    /// E2M1 codes with an E8M0 scale per 32 inputs.
    Fp4 {
        /// `[out, in]`.
        shape: [usize; 2],
        /// `[out, ceil(in / 8)]`: nibble `j` of a word, the lowest first, is column `8 * word + j`.
        /// Padding is zero.
        words: Vec<u32>,
        /// E8M0 bytes `[out, ceil(in / 32)]`, four to a word, the lowest byte first, the last word
        /// filled up with 127. No byte is NaN.
        scales: Vec<u32>,
    },
}

/// All dimensions of data that have so many.
pub(super) fn dims<const D: usize>(data: &TensorData) -> [usize; D] {
    let dims = data.shape().as_slice().try_into();
    dims.expect("data of as many dimensions as their reader expects")
}

impl HostLinear {
    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(data) => dims(data),
            Self::Fp8 { shape, .. } | Self::Fp4 { shape, .. } => *shape,
        }
    }

    /// A matrix for each of `groups` equal groups of rows. Returns the linear as it is where a
    /// block of FP8 scales has rows of one group and some of another's as well, so that the blocks
    /// of the groups are not alike.
    pub(super) fn into_groups(self, groups: usize) -> Result<HostExperts, Self> {
        let [out, inp] = self.shape();
        let rank = out / groups;
        let shape = [groups, rank, inp];
        Ok(match self {
            Self::Dense(data) => {
                let (bytes, _, dtype) = data.into_parts();
                HostExperts::Dense(TensorData::from_bytes(bytes, shape, dtype))
            }
            Self::Fp8 { words, scales, .. } => {
                let block = block_of([1, out, inp], scales.len());
                if !blocks_alike(groups, rank, block) {
                    return Err(Self::Fp8 {
                        shape: [out, inp],
                        words,
                        scales,
                    });
                }
                let scales = match rank.is_multiple_of(block) || groups == 1 {
                    true => scales,
                    // Groups with a common block row get a copy of it each.
                    false => {
                        let row_blocks = inp.div_ceil(block);
                        let rows = (0..groups).map(|group| group * rank / block * row_blocks);
                        let rows = rows.flat_map(|first| &scales[first..first + row_blocks]);
                        rows.copied().collect()
                    }
                };
                HostExperts::Fp8 {
                    shape,
                    parts: 1,
                    words,
                    scales,
                }
            }
            Self::Fp4 { words, scales, .. } => HostExperts::Fp4 {
                shape,
                words,
                scales,
            },
        })
    }
}

/// Whether the blocks of FP8 scales are alike in equal groups of rows: no block has rows of one
/// group and some of another's as well.
pub(super) fn blocks_alike(groups: usize, rank: usize, block: usize) -> bool {
    groups == 1 || rank.is_multiple_of(block) || block.is_multiple_of(rank)
}

/// Rows and columns that share a scale, where linears `[linears, out, in]` have so many. Where any
/// block would do, each has one.
pub(super) fn block_of([linears, out, inp]: [usize; 3], scales: usize) -> usize {
    let of = |block: &usize| linears * out.div_ceil(*block) * inp.div_ceil(*block);
    let found = FP8_BLOCKS.into_iter().find(|block| of(block) == scales);
    found.unwrap_or(FP8_BLOCK)
}

/// The weights of all experts of a layer, or of several groups of channels, stacked
/// `[experts, out, in]` in one format.
///
/// The rows of each expert are `parts` linears on top of each other: two for gate and up (`w1`
/// above `w3`), one for down (`w2`).
#[derive(Clone, Debug, PartialEq)]
pub enum HostExperts {
    /// BF16, F16 or F32 elements, `[experts, out, in]`, finite.
    Dense(TensorData),
    /// E4M3 codes with a scale per block of 128x128, or of 32x32, of each part.
    Fp8 {
        /// `[experts, out, in]`.
        shape: [usize; 3],
        /// Linears in the rows of an expert; blocks do not reach from one into the next.
        parts: usize,
        /// `[experts, out, ceil(in / 4)]`, packed as in [`HostLinear::Fp8`].
        words: Vec<u32>,
        /// `[experts, parts, ceil(out / parts / block), ceil(in / block)]`, finite.
        scales: Vec<f32>,
    },
    /// E2M1 codes with an E8M0 scale per 32 inputs.
    Fp4 {
        /// `[experts, out, in]`.
        shape: [usize; 3],
        /// `[experts, out, ceil(in / 8)]`, packed as in [`HostLinear::Fp4`].
        words: Vec<u32>,
        /// E8M0 bytes `[experts, out, ceil(in / 32)]`, four to a word without gaps between experts,
        /// the last word filled up with 127.
        scales: Vec<u32>,
    },
}

impl HostExperts {
    /// `[experts, out, in]`.
    pub fn shape(&self) -> [usize; 3] {
        match self {
            Self::Dense(data) => dims(data),
            Self::Fp8 { shape, .. } | Self::Fp4 { shape, .. } => *shape,
        }
    }
}

impl From<HostLinear> for HostExperts {
    /// A stack of one expert, of one part.
    fn from(linear: HostLinear) -> Self {
        let [out, inp] = linear.shape();
        let shape = [1, out, inp];
        match linear {
            HostLinear::Dense(data) => {
                let (bytes, _, dtype) = data.into_parts();
                Self::Dense(TensorData::from_bytes(bytes, shape, dtype))
            }
            HostLinear::Fp8 { words, scales, .. } => Self::Fp8 {
                shape,
                parts: 1,
                words,
                scales,
            },
            HostLinear::Fp4 { words, scales, .. } => Self::Fp4 {
                shape,
                words,
                scales,
            },
        }
    }
}

/// Some weights of a stack.
struct Part<'s, 'a> {
    first: usize,
    sources: &'s [StoredLinear<'a>],
    /// Of a weight.
    rows: usize,
}

impl Part<'_, '_> {
    /// Decodes the bytes of each weight to its rows of so many values, by several threads.
    fn decode<T: Send>(
        &self,
        values: &mut [T],
        row: usize,
        decode: impl Fn(&[u8], &mut [T]) + Sync,
    ) {
        self.fill(values, row, |source, values| {
            decode(source.weight.bytes, values)
        });
    }

    fn fill<T: Send>(
        &self,
        values: &mut [T],
        row: usize,
        fill: impl Fn(&StoredLinear<'_>, &mut [T]) + Sync,
    ) {
        let length = self.rows * row;
        let values = values[self.first * length..].par_chunks_mut(length);
        let parts = values.zip(self.sources);
        parts.for_each(|(values, source)| fill(source, values));
    }
}

/// Linear weights of one format and width, on top of each other.
#[derive(Debug)]
pub(super) enum LinearStack {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
    Fp8 { words: Vec<u32>, scales: Vec<f32> },
    Fp4 { words: Vec<u32>, scales: Vec<u8> },
}

impl LinearStack {
    /// Zeros for `linears` weights of `[out, inp]`, without their scales. `None` if memory cannot
    /// hold them and the scales.
    pub(super) fn zeros(
        format: WeightFormat,
        linears: usize,
        [out, inp]: [usize; 2],
    ) -> Option<Self> {
        // A product that saturates is more than there is.
        let total = |row: usize| linears.saturating_mul(out).saturating_mul(row);
        if let Some(block) = format.fp8_block() {
            let blocks = out.div_ceil(block).saturating_mul(inp.div_ceil(block));
            return Some(Self::Fp8 {
                words: codec::zeros(total(inp.div_ceil(4)))?,
                scales: codec::reserved(linears.saturating_mul(blocks)).ok()?,
            });
        }
        Some(match format {
            WeightFormat::Bf16 => Self::Bf16(codec::filled(total(inp), bf16::ZERO)?),
            WeightFormat::F16 => Self::F16(codec::filled(total(inp), f16::ZERO)?),
            WeightFormat::Fp4 => Self::Fp4 {
                words: codec::zeros(total(inp.div_ceil(8)))?,
                scales: codec::reserved(total(inp.div_ceil(FP4_BLOCK))).ok()?,
            },
            _ => Self::F32(codec::filled(total(inp), 0.0)?),
        })
    }

    /// Fills the stack with weights of its format and shape, from number `first` on. They come in
    /// their order.
    pub(super) fn fill(
        &mut self,
        first: usize,
        sources: &[StoredLinear<'_>],
        [out, inp]: [usize; 2],
    ) {
        let part = Part {
            first,
            sources,
            rows: out,
        };
        match self {
            Self::Bf16(values) => part.decode(values, inp, |bytes, values| {
                codec::decode_elements(bytes, values, bf16::from_le_bytes);
            }),
            Self::F16(values) => part.decode(values, inp, |bytes, values| {
                codec::decode_elements(bytes, values, f16::from_le_bytes);
            }),
            Self::F32(values) => part.fill(values, inp, |source, values| match source.scale {
                Some(_) => source.expand(inp, values),
                None => codec::decode_elements(source.weight.bytes, values, f32::from_le_bytes),
            }),
            Self::Fp8 { words, scales } => {
                part.decode(words, inp.div_ceil(4), |bytes, words| {
                    codec::pack_rows(bytes, inp, words);
                });
                let stored = sources.iter().flat_map(|source| source.scale);
                scales.extend(stored.flat_map(|scale| codec::scale_values(&scale)));
            }
            Self::Fp4 { words, scales } => {
                part.decode(words, inp.div_ceil(8), |bytes, words| {
                    codec::pack_nibble_rows(bytes, inp, words);
                });
                let found = sources.par_iter().map(|source| source.fp4_scales(inp));
                let found: Vec<_> = found.flatten().collect();
                found
                    .iter()
                    .for_each(|found| scales.extend_from_slice(found));
            }
        }
    }

    /// The stack as one linear of this shape.
    pub(super) fn into_linear(self, shape: [usize; 2]) -> HostLinear {
        match self {
            Self::Bf16(values) => HostLinear::Dense(TensorData::new(values, shape)),
            Self::F16(values) => HostLinear::Dense(TensorData::new(values, shape)),
            Self::F32(values) => HostLinear::Dense(TensorData::new(values, shape)),
            Self::Fp8 { words, scales } => HostLinear::Fp8 {
                shape,
                words,
                scales,
            },
            Self::Fp4 { words, scales } => HostLinear::Fp4 {
                shape,
                words,
                scales: codec::words(&scales, SCALE_ONE),
            },
        }
    }

    /// The stack as experts of this shape, each of `parts` linears.
    pub(super) fn into_experts(self, shape: [usize; 3], parts: usize) -> HostExperts {
        match self {
            Self::Bf16(values) => HostExperts::Dense(TensorData::new(values, shape)),
            Self::F16(values) => HostExperts::Dense(TensorData::new(values, shape)),
            Self::F32(values) => HostExperts::Dense(TensorData::new(values, shape)),
            Self::Fp8 { words, scales } => HostExperts::Fp8 {
                shape,
                parts,
                words,
                scales,
            },
            Self::Fp4 { words, scales } => HostExperts::Fp4 {
                shape,
                words,
                scales: codec::words(&scales, SCALE_ONE),
            },
        }
    }
}
