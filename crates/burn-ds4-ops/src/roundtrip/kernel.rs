//! Rounding to small formats, to the bits of [`fp8_roundtrip`](crate::quant::fp8_roundtrip) and
//! [`fp4_roundtrip`](crate::quant::fp4_roundtrip).

use cubecl::prelude::*;

use super::{RoundtripFormat, SmallFloat};
use crate::intrinsics::modulo;

/// The bits of an f32's mantissa, and the bias of its exponent.
const MANTISSA: u32 = 23;
const BIAS: u32 = 127;

/// `2^(exponent - BIAS)`.
#[cube]
pub(crate) fn power_of_two(exponent: u32) -> f32 {
    f32::reinterpret(exponent << MANTISSA)
}

/// The biased exponent of a block's scale: the smallest power of two whose product with the
/// format's largest value is no less than the block's largest magnitude, which is finite.
#[cube]
pub(crate) fn scale_of(largest: f32, #[comptime] format: RoundtripFormat) -> u32 {
    let bits = u32::reinterpret(max(largest, comptime!(format.amax_floor)));
    let limit = comptime!(format.max.to_bits());
    let mantissa = comptime!((1u32 << MANTISSA) - 1);
    let above = (bits & mantissa) > comptime!(limit & mantissa);
    let exponent = (bits >> MANTISSA) - comptime!((limit >> MANTISSA) - BIAS);
    exponent + select(above, 1u32, 0u32)
}

/// `x` rounded to the nearest value of the format times the scale, ties to even. An `x` that is not
/// finite stays.
#[cube]
pub(crate) fn rounded(x: f32, scale: u32, #[comptime] format: RoundtripFormat) -> f32 {
    let bits = u32::reinterpret(x) & 0x7fff_ffffu32;
    let scaled = f32::reinterpret(bits) * power_of_two(comptime!(2 * BIAS) - scale);
    // Below the normal values, the spacing is that of the smallest normal ones.
    let lowest = comptime!((BIAS as i32 + format.min_exponent) as u32);
    let exponent = max(u32::reinterpret(scaled) >> MANTISSA, lowest);
    let unit = exponent - comptime!(format.mantissa_bits as u32);
    let steps = nearest(scaled * power_of_two(comptime!(2 * BIAS) - unit));
    let magnitude = steps * power_of_two(unit) * power_of_two(scale);
    let value = select(x < 0.0f32, -magnitude, magnitude);
    select(bits < 0x7f80_0000u32, value, x)
}

/// The nearest integer, ties to even, of a small number that is not negative.
#[cube]
fn nearest(x: f32) -> f32 {
    let down = x.floor();
    let rest = x - down;
    let odd = down - 2.0f32 * (down * 0.5f32).floor();
    let up = rest > 0.5f32 || (rest == 0.5f32 && odd == 1.0f32);
    down + select(up, 1.0f32, 0.0f32)
}

/// How [`roundtrip_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RoundtripBlueprint {
    pub to: SmallFloat,
    /// Elements of a vector, and vectors of a block.
    pub vector: u32,
    pub block_vectors: u32,
    /// Blocks that lie by turns, and neighbouring vectors of each.
    pub turns: [u32; 2],
    /// Blocks of a cube.
    pub blocks: u32,
    /// Rows whose sum is rounded. The others of them become zeros.
    pub terms: u32,
}

impl RoundtripBlueprint {
    pub const fn units(self) -> u32 {
        self.blocks * self.block_vectors
    }
}

/// Rounds each block of a row, with a scale of its own. The last one may be partial.
///
/// - `x`, `output`: `[rows · terms, vectors]`
///
/// A unit has a vector of a block. What is not finite stays, and has no part in the scale.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn roundtrip_kernel<X: Float, N: Size>(
    x: &[Vector<X, N>],
    output: &mut [Vector<X, N>],
    rows: usize,
    vectors: usize,
    #[comptime] blueprint: RoundtripBlueprint,
    #[define(X)] _dtype: ElemType,
) {
    let RoundtripBlueprint {
        vector: size,
        block_vectors,
        terms,
        ..
    } = comptime!(blueprint);
    let format = comptime!(blueprint.to.format());
    let [count, run] = comptime!(blueprint.turns);
    let group_vectors = comptime!(count * block_vectors);
    let mut largest_of = Shared::<[u32]>::new_slice(comptime!(blueprint.units() as usize));
    let row_groups = vectors.div_ceil(comptime!(group_vectors as usize));
    let group = ABSOLUTE_POS / comptime!(group_vectors as usize);
    let own = modulo(UNIT_POS, group_vectors);
    let vector = group % row_groups * comptime!(group_vectors as usize) + own as usize;
    let row = group / row_groups;
    let inside = row < rows && vector < vectors;
    let first = select(
        inside,
        row * comptime!(terms as usize) * vectors + vector,
        0usize,
    );
    let mut values = Array::<f32>::new(comptime!(size as usize));
    let mut largest = 0u32;
    let words = Vector::<f32, N>::cast_from(x[first]);
    #[unroll]
    for i in 0..comptime!(size as usize) {
        values[i] = words.extract(i);
    }
    #[unroll]
    for term in 1..terms {
        let words = Vector::<f32, N>::cast_from(x[first + term as usize * vectors]);
        #[unroll]
        for i in 0..comptime!(size as usize) {
            values[i] += words.extract(i);
        }
    }
    #[unroll]
    for i in 0..comptime!(size as usize) {
        let bits = u32::reinterpret(values[i]) & 0x7fff_ffffu32;
        largest = max(largest, select(bits < 0x7f80_0000u32, bits, 0u32));
    }
    largest_of[UNIT_POS as usize] = select(inside, largest, 0u32);
    sync_cube();
    largest = 0u32;
    let start = UNIT_POS - own;
    if comptime!(count > 1) {
        let start = start + own / run % count * run;
        for i in 0..block_vectors {
            let at = start + i / run * comptime!(run * count) + modulo(i, run);
            largest = max(largest, largest_of[at as usize]);
        }
    } else {
        for i in 0..block_vectors {
            largest = max(largest, largest_of[(start + i) as usize]);
        }
    }
    if inside {
        let scale = scale_of(f32::reinterpret(largest), format);
        let mut result = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..comptime!(size as usize) {
            result.insert(i, rounded(values[i], scale, format));
        }
        output[first] = Vector::cast_from(result);
        #[unroll]
        for term in 1..terms {
            output[first + term as usize * vectors] =
                Vector::cast_from(Vector::<f32, N>::new(0.0f32));
        }
    }
}
