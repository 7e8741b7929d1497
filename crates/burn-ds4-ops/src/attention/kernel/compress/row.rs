//! A row in shared memory.

use cubecl::prelude::*;

use super::CompressBlueprint;
use crate::attention::kernel::rounding::{rounded, scale_of};
use crate::intrinsics::group_sum;
use crate::quant::roundtrip::Format;

/// What the elements of the row are multiplied by, of all of them: the order of additions is that of
/// [`rms_norm`](crate::norm::rms_norm).
#[cube]
pub(super) fn norm_factor(
    row: &Shared<[f32]>,
    epsilon: f32,
    #[comptime] blueprint: CompressBlueprint,
) -> f32 {
    let cut = comptime!(blueprint.cut);
    let width = comptime!(blueprint.width);
    let mut stage = Shared::<[f32]>::new_slice(comptime!(blueprint.planes as usize));
    let own = UNIT_POS_Y % cut.planes * cut.plane + UNIT_POS_X;
    let mut sum = 0.0f32;
    for step in 0..cut.steps {
        let unit = step * comptime!(cut.planes * cut.plane) + own;
        #[unroll]
        for i in 0..cut.unit {
            let channel = unit * cut.unit + i;
            if channel < width {
                let value = row[channel as usize];
                sum = fma(value, value, sum);
            }
        }
    }
    let sum = group_sum(sum, cut.plane, blueprint.target);
    if UNIT_POS_X == 0 {
        stage[UNIT_POS_Y as usize] = sum;
    }
    sync_cube();
    let mut total = stage[0];
    #[unroll]
    for plane in 1..cut.planes {
        total += stage[plane as usize];
    }
    1.0f32 / (total / f32::cast_from(width) + epsilon).sqrt()
}

#[cube]
pub(super) fn normalized<W: Float>(
    row: &Shared<[f32]>,
    norm: &[W],
    channel: u32,
    factor: f32,
) -> f32 {
    let scaled = row[channel as usize] * factor;
    scaled * f32::cast_from(norm[channel as usize])
}

/// One stage of the Hadamard transform. All of the cube must be here.
#[cube]
pub(super) fn butterflies(
    from: &Shared<[f32]>,
    to: &mut Shared<[f32]>,
    #[comptime] stride: u32,
    #[comptime] blueprint: CompressBlueprint,
) {
    let mut channel = UNIT_POS;
    while channel < blueprint.width {
        let value = from[channel as usize];
        let across = from[(channel ^ stride) as usize];
        let low = channel & stride == 0;
        to[channel as usize] = select(low, value + across, across - value);
        channel += comptime!(blueprint.units());
    }
    sync_cube();
}

#[cube]
pub(super) fn scale_all(
    row: &mut Shared<[f32]>,
    scale: f32,
    #[comptime] blueprint: CompressBlueprint,
) {
    let mut channel = UNIT_POS;
    while channel < blueprint.width {
        row[channel as usize] *= scale;
        channel += comptime!(blueprint.units());
    }
    sync_cube();
}

/// The row as it is stored at `to`, its first `rounded` channels rounded in blocks of `size`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_rounded<R: Float>(
    rows: &mut [R],
    row: &Shared<[f32]>,
    to: usize,
    complete: bool,
    #[comptime] count: u32,
    #[comptime] size: u32,
    #[comptime] format: Format,
    #[comptime] blueprint: CompressBlueprint,
) {
    let size = comptime!(size.min(count.max(1)));
    let mut channel = UNIT_POS;
    while channel < blueprint.width {
        let mut value = row[channel as usize];
        if channel < count {
            let first = channel / size * size;
            let mut largest = 0.0f32;
            for i in 0..size {
                let other = first + i;
                let other = row[select(other < count, other, first) as usize];
                let bits = u32::reinterpret(other) & 0x7fff_ffffu32;
                let finite = bits < 0x7f80_0000u32;
                largest = max(largest, select(finite, f32::reinterpret(bits), 0.0f32));
            }
            value = rounded(value, scale_of(largest, format), format);
        }
        if complete {
            rows[to + channel as usize] = R::cast_from(value);
        }
        channel += comptime!(blueprint.units());
    }
}
