use cubecl::prelude::*;

use crate::gemm::{FP8_BLOCKS, Fp4Layout};
use crate::intrinsics::{e4m3_to_f16, multiply_bf16x2};

/// K-steps of a K-block of the small-M kernels. In each, a lane has 16 bytes of each of its rows.
pub(in crate::gemm::kernel) const K_STEPS: u32 = 4;

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WeightFormat {
    /// E2M1 codes, an E8M0 scale for every 32 columns of a row.
    Fp4(Fp4Layout),
    /// E4M3 codes, an f32 scale for every 128 rows and columns.
    Fp8,
    /// The same for every 32, powers of two, so that scaled weights are `bf16` values.
    Fp8Blocks32,
    /// Floats; `bf16` for tensor cores.
    Dense,
}

impl WeightFormat {
    /// Whether it is FP4, in any layout.
    pub const fn is_fp4(self) -> bool {
        matches!(self, Self::Fp4(_))
    }

    /// Whether it is FP4 that is repacked.
    pub const fn is_repacked(self) -> bool {
        matches!(self, Self::Fp4(Fp4Layout::Repacked))
    }

    /// Whether it is FP8, in blocks of any size.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp8Blocks32)
    }

    /// Rows and columns that share a scale of FP8.
    pub const fn fp8_block(self) -> u32 {
        match self {
            Self::Fp8Blocks32 => FP8_BLOCKS[1] as u32,
            _ => FP8_BLOCKS[0] as u32,
        }
    }

    /// Columns in 16 bytes, which a lane reads at once for tensor cores.
    pub const fn columns(self) -> u32 {
        match self {
            Self::Fp4(_) => 32,
            Self::Fp8 | Self::Fp8Blocks32 => 16,
            Self::Dense => 8,
        }
    }

    /// Columns of a K-step, which four lanes read at once.
    pub const fn k_step(self) -> u32 {
        4 * self.columns()
    }

    /// Columns of a K-block of the small-M kernels.
    pub const fn k_block(self) -> u32 {
        K_STEPS * self.k_step()
    }

    /// Columns in a word; a float counts as a word.
    pub const fn codes(self) -> u32 {
        match self {
            Self::Fp4(_) => 8,
            Self::Fp8 | Self::Fp8Blocks32 => 4,
            Self::Dense => 1,
        }
    }

    /// vec8s in the 16 bytes of a lane.
    pub const fn vec8s(self) -> u32 {
        self.columns() / 8
    }

    /// Where decoding puts the columns of a vec8: pair `i` has the columns `order()[i]`.
    pub const fn order(self) -> [(u32, u32); 4] {
        match self {
            Self::Fp4(_) => [(0, 4), (1, 5), (2, 6), (3, 7)],
            Self::Fp8 | Self::Fp8Blocks32 => [(0, 2), (1, 3), (4, 6), (5, 7)],
            Self::Dense => [(0, 1), (2, 3), (4, 5), (6, 7)],
        }
    }
}

/// Two of the eight weights of a word, in `bf16` and times `2^-126`: pair `i` of
/// [`WeightFormat::order`].
#[cube]
pub(in crate::gemm::kernel) fn fp4_bf16x2(
    word: u32,
    #[comptime] i: usize,
    #[comptime] format: WeightFormat,
) -> u32 {
    let bits = if comptime!(format.is_repacked()) {
        repacked_bits(word, i)
    } else {
        spread_bits(word, i)
    };
    bits & 0x81c0_81c0u32
}

/// Bits among which are those of [`fp4_bf16x2`], of a word that is [repacked](Fp4Layout::Repacked).
#[cube]
fn repacked_bits(word: u32, #[comptime] i: usize) -> u32 {
    // Shifts to the left are multiplications, for which there are units of their own.
    let turned = (word >> 8) | (word << 24);
    match comptime!(i) {
        0 => word,
        1 => word * 16u32,
        2 => turned ^ (turned * 4u32),
        _ => turned ^ (turned * 64u32),
    }
}

/// The same of a [plain](Fp4Layout::Plain) word.
#[cube]
fn spread_bits(word: u32, #[comptime] i: usize) -> u32 {
    // The sign of a code goes to the sign bit, its magnitude across the border between exponent and
    // mantissa. The code's own subnormal is then a subnormal `bf16` of the right value.
    let word = if comptime!(i >= 2) { word >> 8 } else { word };
    if comptime!(i % 2 == 0) {
        (word & 0x000f_000fu32) * 0x1040u32
    } else {
        (word & 0x00f0_00f0u32) * 0x0104u32
    }
}

/// The codes of a word of packed weights, the first in the lowest bits.
#[cube]
pub(crate) fn plain_codes<W: Numeric>(word: W, #[comptime] format: WeightFormat) -> u32 {
    let word = u32::cast_from(word);
    if comptime!(format.is_repacked()) {
        let mut codes = 0u32;
        #[unroll]
        for i in 0..4usize {
            let pair = fp4_bf16x2(word, i, format);
            let both = ((pair >> 6) & 0x0007_0007u32) | ((pair >> 12) & 0x0008_0008u32);
            codes |= both << comptime!(4 * i as u32);
        }
        codes
    } else {
        word
    }
}

/// Two of the four weights of a word, in `bf16`, times `2^-120`.
#[cube]
pub(in crate::gemm::kernel) fn fp8_bf16x2(word: u32, #[comptime] i: usize) -> u32 {
    let (sign, magnitude) = if comptime!(i == 0) {
        ((word << 8), (word << 4))
    } else {
        (word, (word >> 4))
    };
    (sign & 0x8000_8000u32) | (magnitude & 0x07f0_07f0u32)
}

/// [`fp8_bf16x2`] times `2^120`; NaN codes become NaN.
#[cube]
fn fp8_bf16x2_with_nan(word: u32, #[comptime] i: usize) -> u32 {
    let pair = fp8_bf16x2(word, i);
    let low = pair & 0x07f0u32 == 0x07f0u32;
    let high = pair & 0x07f0_0000u32 == 0x07f0_0000u32;
    multiply_bf16x2(pair, 0x7b80_7b80u32)
        | select(low, 0x7fc0u32, 0u32)
        | select(high, 0x7fc0_0000u32, 0u32)
}

/// A word that is not 0 if one of the four codes is NaN.
#[cube]
fn fp8_nan(word: u32) -> u32 {
    ((word & 0x7f7f_7f7fu32) + 0x0101_0101u32) & 0x8080_8080u32
}

/// The same of four words.
#[cube]
fn fp8_nans(words: Vector<u32, Const<4>>) -> u32 {
    fp8_nan(words.extract(0usize))
        | fp8_nan(words.extract(1usize))
        | fp8_nan(words.extract(2usize))
        | fp8_nan(words.extract(3usize))
}

/// The factor of [`fp4_bf16x2`] for a scale, twice in a word. A scale of more than two takes
/// [`fp4_first_factor`] and [`fp4_second_factor`] instead.
#[cube]
fn fp4_factor(scale: u32) -> u32 {
    scale * 0x0080_0080u32 + 0x3f00_3f00u32
}

/// [`fp4_factor`] of a scale that may be more than two.
#[cube]
pub(in crate::gemm::kernel) fn fp4_first_factor(scale: u32) -> u32 {
    fp4_factor(min(scale, 128u32))
}

/// The rest of a scale of more than two; NaN for the code that is NaN.
#[cube]
pub(in crate::gemm::kernel) fn fp4_second_factor(scale: u32) -> u32 {
    let exponent = max(scale, 128u32) - 1;
    select(scale == 255u32, 0x7fc0_7fc0u32, exponent * 0x0080_0080u32)
}

/// Whether [`fp8_bf16x2`] times a scale of 32x32 takes two factors: it is very large, subnormal,
/// negative or no number.
#[cube]
pub(in crate::gemm::kernel) fn is_rare_scale(scale: u32) -> bool {
    let exponent = scale >> 23;
    exponent == 0 || exponent > 133
}

/// The first factor of [`fp8_bf16x2`] for a scale of 32x32, twice in a word: the only one if the
/// scale is ordinary.
#[cube]
pub(in crate::gemm::kernel) fn fp8_first_factor(scale: u32) -> u32 {
    select(is_rare_scale(scale), 0x7b80_7b80u32, fp8_factor(scale))
}

/// The factor of [`fp8_bf16x2`] for a scale that is neither very large nor very small, twice in a
/// word; of the scale, no more digits than `bf16` has.
#[cube]
pub(in crate::gemm::kernel) fn fp8_factor(scale: u32) -> u32 {
    ((scale + 0x3c00_0000u32) >> 16) * 0x1_0001u32
}

/// The rest of a scale of 32x32: one, if it is ordinary.
#[cube]
pub(in crate::gemm::kernel) fn fp8_second_factor(scale: u32) -> u32 {
    select(is_rare_scale(scale), scale_bf16x2(scale), 0x3f80_3f80u32)
}

/// A scale of 32x32 in `bf16`, twice in a word.
#[cube]
fn scale_bf16x2(scale: u32) -> u32 {
    let nan = scale & 0x7fff_ffffu32 > 0x7f80_0000u32;
    select(nan, 0x7fc0u32, scale >> 16) * 0x1_0001u32
}

/// Decodes pair `i` of vec8 `u` of a lane's 16 bytes, FP8 into `f16` with `f16_input`. `scale` is
/// the code of an FP4 scale, or an FP8 scale of 32x32; others are not applied here.
#[cube]
pub(in crate::gemm::kernel) fn weight_x2(
    words: Vector<u32, Const<4>>,
    scale: u32,
    #[comptime] u: usize,
    #[comptime] i: usize,
    #[comptime] format: WeightFormat,
    #[comptime] f16_input: bool,
    #[comptime] rare: bool,
) -> u32 {
    match comptime!(format) {
        WeightFormat::Fp4(_) => {
            let pair = fp4_bf16x2(words.extract(u), i, format);
            if comptime!(rare) {
                multiply_bf16x2(
                    multiply_bf16x2(pair, fp4_first_factor(scale)),
                    fp4_second_factor(scale),
                )
            } else {
                multiply_bf16x2(pair, fp4_factor(scale))
            }
        }
        WeightFormat::Fp8 => {
            let word = words.extract(comptime!(2 * u + i / 2));
            if comptime!(f16_input) {
                e4m3_to_f16(word, comptime!(i % 2 == 1))
            } else if comptime!(rare) {
                fp8_bf16x2_with_nan(word, comptime!(i % 2))
            } else {
                multiply_bf16x2(fp8_bf16x2(word, comptime!(i % 2)), 0x7b80_7b80u32)
            }
        }
        WeightFormat::Fp8Blocks32 => {
            let word = words.extract(comptime!(2 * u + i / 2));
            if comptime!(rare) {
                let pair = fp8_bf16x2_with_nan(word, comptime!(i % 2));
                multiply_bf16x2(pair, scale_bf16x2(scale))
            } else {
                multiply_bf16x2(fp8_bf16x2(word, comptime!(i % 2)), fp8_factor(scale))
            }
        }
        WeightFormat::Dense => words.extract(i),
    }
}

/// A word that is not 0 if decoding `words` takes the slow path: for an FP4 scale above two, an FP8
/// code that is NaN, or a scale of 32x32 that is [rare](is_rare_scale).
#[cube]
pub(in crate::gemm::kernel) fn rare_bits(
    words: Vector<u32, Const<4>>,
    scale: u32,
    #[comptime] format: WeightFormat,
) -> u32 {
    match comptime!(format) {
        WeightFormat::Fp4(_) => scale & 0x80u32,
        WeightFormat::Fp8 => fp8_nans(words),
        WeightFormat::Fp8Blocks32 => fp8_nans(words) | select(is_rare_scale(scale), 1u32, 0u32),
        WeightFormat::Dense => 0u32.runtime(),
    }
}

/// Value of an E2M1 code in the lowest four bits.
#[cube]
pub(crate) fn fp4_value(code: u32) -> f32 {
    let magnitude =
        f32::reinterpret(((code & 7u32) << 22) + select(code & 6u32 == 0, 0u32, 0x3f00_0000u32));
    // 0.5 is the only subnormal: as the bits of an f32, it would be tiny.
    let magnitude = select(code & 7u32 == 1, 0.5f32, magnitude);
    select(code & 8u32 != 0, -magnitude, magnitude)
}

/// Value of an E4M3 code in the lowest eight bits.
#[cube]
pub(crate) fn fp8_value(code: u32) -> f32 {
    let bits = code & 0x7fu32;
    let normal = f32::reinterpret((bits << 20) + 0x3c00_0000u32);
    let subnormal = f32::cast_from(bits) * 0.001953125f32;
    let magnitude = select(bits < 8, subnormal, normal);
    let value = select(code & 0x80u32 != 0, -magnitude, magnitude);
    f32::reinterpret(select(
        bits == 0x7fu32,
        0x7fc0_0000u32,
        u32::reinterpret(value),
    ))
}

/// Value of an E8M0 code.
#[cube]
pub(crate) fn scale_value(code: u32) -> f32 {
    let bits = select(code == 0, 0x0040_0000u32, code << 23);
    f32::reinterpret(select(code == 255u32, 0x7fc0_0000u32, bits))
}
