//! How linear weights are stored, and how they are decoded.

use std::array;
use std::borrow::Cow;

pub(super) use burn_ds4_ops::quant::{FP4_BLOCK, FP8_BLOCK, FP8_BLOCKS};
use rayon::prelude::*;
use safetensors::Dtype;

use super::codec;
use super::directory::CheckpointTensor;
use super::names::DIVISOR;

/// The E8M0 code of 1, which fills up the last word of scales.
pub(super) const SCALE_ONE: u8 = 127;

/// The values of E2M1 codes.
const E2M1: [f64; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// How a linear weight is stored. Scales of different types are different formats: one tool makes
/// all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WeightFormat {
    Bf16,
    F16,
    F32,
    Fp8ScaledE8m0,
    Fp8ScaledF32,
    Fp8ScaledBf16,
    /// With scales of rows, of parts of them, or one of all.
    Fp8Rows,
    /// With scales of 32x32 blocks, which kernels read where they are E8M0.
    Fp8Blocks32,
    Fp4,
    Fp4ScaledF32,
    Nvfp4,
}

/// A packed format, its types of codes and of scales, and the block that has a scale.
pub(super) type Packed = (WeightFormat, &'static [Dtype], &'static [Dtype], [usize; 2]);

const FP8: &[Dtype] = &[Dtype::F8_E4M3];
const FP4: &[Dtype] = &[Dtype::I8, Dtype::U8, Dtype::F4];
const E8M0: &[Dtype] = &[Dtype::F8_E8M0, Dtype::U8];
const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::BF16];
const SQUARE: [usize; 2] = [FP8_BLOCK; 2];
pub(super) const PACKED: [Packed; 6] = [
    (WeightFormat::Fp8ScaledE8m0, FP8, E8M0, SQUARE),
    (WeightFormat::Fp8ScaledF32, FP8, &[Dtype::F32], SQUARE),
    (WeightFormat::Fp8ScaledBf16, FP8, &[Dtype::BF16], SQUARE),
    (WeightFormat::Fp4, FP4, E8M0, [1, FP4_BLOCK]),
    (WeightFormat::Fp4ScaledF32, FP4, FLOATS, [1, FP4_BLOCK]),
    (WeightFormat::Nvfp4, FP4, FP8, [1, FP4_BLOCK / 2]),
];

impl WeightFormat {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::Fp8ScaledE8m0 => "FP8 with F8_E8M0 scales",
            Self::Fp8ScaledF32 => "FP8 with F32 scales",
            Self::Fp8ScaledBf16 => "FP8 with BF16 scales",
            Self::Fp8Rows => "FP8 with scales of rows",
            Self::Fp8Blocks32 => "FP8 with scales of 32x32",
            Self::Fp4 => "FP4",
            Self::Fp4ScaledF32 => "FP4 with F32 or BF16 scales",
            Self::Nvfp4 => "NVFP4",
        }
    }

    /// Rows and columns that share a scale on a device, `None` where it has no FP8.
    pub(super) fn fp8_block(self) -> Option<usize> {
        match self {
            Self::Fp8ScaledE8m0 | Self::Fp8ScaledF32 | Self::Fp8ScaledBf16 => Some(FP8_BLOCK),
            Self::Fp8Blocks32 => Some(FP8_BLOCKS[1]),
            _ => None,
        }
    }

    /// The format of a dense dtype, `None` for others.
    pub(super) fn of_dense(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }
}

/// A linear weight in the checkpoint, with checked shape and type.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredLinear<'a> {
    pub(super) format: WeightFormat,
    pub(super) weight: CheckpointTensor<'a>,
    pub(super) scale: Option<CheckpointTensor<'a>>,
    /// The scale of all NVFP4 codes.
    pub(super) global: Option<CheckpointTensor<'a>>,
    /// Rows and columns that have a scale in common.
    pub(super) block: [usize; 2],
}

impl<'a> StoredLinear<'a> {
    pub(super) fn dense(format: WeightFormat, weight: CheckpointTensor<'a>) -> Self {
        Self {
            format,
            weight,
            scale: None,
            global: None,
            block: [1, 1],
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = CheckpointTensor<'a>> + use<'a> {
        let tensors = [Some(self.weight), self.scale, self.global];
        tensors.into_iter().flatten()
    }

    /// What all codes are multiplied by.
    pub(super) fn factor(&self) -> f64 {
        let Some(global) = self.global else {
            return 1.0;
        };
        let value = codec::scale_values(&global).first().copied();
        let value = f64::from(value.unwrap_or(f32::NAN));
        match global.name.ends_with(DIVISOR) {
            true => value.recip(),
            false => value,
        }
    }

    /// The format in which a device has the weights: FP4 whose scales fold to E8M0 has that, and
    /// others that no kernel reads are dense.
    pub(super) fn held(&self, inp: usize) -> WeightFormat {
        match self.format {
            WeightFormat::Nvfp4 | WeightFormat::Fp4ScaledF32 => match self.fp4_scales(inp) {
                Some(_) => WeightFormat::Fp4,
                None => WeightFormat::F32,
            },
            WeightFormat::Fp8Rows => WeightFormat::F32,
            WeightFormat::Fp8Blocks32 if !self.scale.is_some_and(|of| E8M0.contains(&of.dtype)) => {
                WeightFormat::F32
            }
            format => format,
        }
    }

    /// The smallest dtype that has all values: BF16 where scales are powers of two, but for the
    /// least.
    pub(super) fn dense_dtype(&self, held: WeightFormat) -> Dtype {
        let scales = self.scale.map_or(&[][..], |scale| scale.bytes);
        match held {
            WeightFormat::Fp4 => Dtype::BF16,
            WeightFormat::Fp8ScaledE8m0 | WeightFormat::Fp8Blocks32
                if scales.iter().all(|code| *code >= 8) =>
            {
                Dtype::BF16
            }
            _ => Dtype::F32,
        }
    }

    /// E8M0 scales per 32 codes that mean the same: those of the file, or others that are powers of
    /// two, of NVFP4 alike in both blocks of 16. A block of zeros may have any.
    pub(super) fn fp4_scales(&self, inp: usize) -> Option<Cow<'a, [u8]>> {
        let scale = self.scale?;
        if self.format == WeightFormat::Fp4 {
            return Some(Cow::Borrowed(scale.bytes));
        }
        let factor = self.factor();
        let code_of = |scale: f32| {
            let bits = (f64::from(scale) * factor).to_bits();
            // The sign comes above the exponent.
            let exponent = (bits >> 52).checked_sub(1023 - 127)?;
            (bits << 12 == 0 && exponent < 255).then_some(exponent as u8)
        };
        let is_zero = |codes: &[u8]| codes.iter().all(|codes| codes & 0x77 == 0);
        let fold = |(scales, codes): (&[f32], &[u8])| {
            let (first, second) = codes.split_at(codes.len().min(FP4_BLOCK / 4));
            let [one, other] = [scales[0], scales[scales.len() - 1]];
            match code_of(one) {
                Some(code) if one == other => Some(code),
                _ if is_zero(first) && is_zero(second) => Some(SCALE_ONE),
                _ if is_zero(first) => code_of(other),
                code if is_zero(second) => code,
                _ => None,
            }
        };
        let (width, scales) = (self.block[1], codec::scale_values(&scale));
        let rows = scales.chunks(inp.div_ceil(width));
        let rows = rows.zip(self.weight.bytes.chunks(inp.div_ceil(2)));
        let blocks = rows.flat_map(|(scales, codes)| {
            let scales = scales.chunks(FP4_BLOCK / width);
            scales.zip(codes.chunks(FP4_BLOCK / 2))
        });
        let folded: Option<Vec<u8>> = blocks.map(fold).collect();
        folded.map(Cow::Owned)
    }

    /// Decodes packed weights of `inp` columns, each rounded once.
    pub(super) fn expand(&self, inp: usize, values: &mut [f32]) {
        let is_fp8 = self.weight.dtype == Dtype::F8_E4M3;
        let decoded: [f64; 256] = array::from_fn(|code| match is_fp8 {
            true => codec::e4m3_to_f32(code as u8).into(),
            false => E2M1[code & 15],
        });
        let factor = self.factor();
        let scales = self.scale.iter().flat_map(codec::scale_values);
        let scales: Vec<f64> = scales.map(|scale| f64::from(scale) * factor).collect();
        let row_scales = inp.div_ceil(self.block[1]);
        let bytes = self.weight.bytes;
        let rows = values.par_chunks_mut(inp);
        let rows = rows.zip(bytes.par_chunks(if is_fp8 { inp } else { inp.div_ceil(2) }));
        rows.enumerate().for_each(|(row, (values, bytes))| {
            let scales = &scales[row / self.block[0] * row_scales..];
            for (column, value) in values.iter_mut().enumerate() {
                let code = match is_fp8 {
                    true => bytes[column],
                    false => bytes[column / 2] >> (4 * (column % 2)),
                };
                *value = (decoded[usize::from(code)] * scales[column / self.block[1]]) as f32;
            }
        });
    }
}
