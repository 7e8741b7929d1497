//! A row in shared memory, and what becomes of it before it is stored.

use cubecl::prelude::*;

use super::rotate::Table;
use super::rounding::{rounded, scale_of};
use crate::attention::{CONTENT_BLOCK, RowRounding};
use crate::intrinsics::Target;
use crate::quant::FP4_BLOCK;
use crate::quant::roundtrip::{E2M1, E4M3, Format};
use crate::rows::{RowCut, row_sum};

/// How what becomes of a row is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowBlueprint {
    /// Channels of a row, and those at its end that turn.
    pub width: u32,
    pub rotated: u32,
    pub rounding: RowRounding,
    /// Who adds up what of a row.
    pub cut: RowCut,
    /// Planes of a cube.
    pub planes: u32,
    pub target: Target,
}

impl RowBlueprint {
    pub(super) const fn units(self) -> u32 {
        self.cut.plane * self.planes
    }
}

/// Normalises `row`, turns it by the angles at `angle`, rounds it and stores it at `to`, if that is `wanted`. `other` is as long.
///
/// All of the cube must be here, and all barriers are passed whether the row is wanted or not: not every compiler can see the whole cube
/// agree on that.
#[cube]
// What is known at compile time is asked by itself, so that the rest is left out.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(super) fn store<R: Float, W: Float>(
    row: &mut Shared<[f32]>,
    other: &mut Shared<[f32]>,
    norm: &[W],
    angles: &[f32],
    rows: &mut [R],
    angle: usize,
    table: &Table,
    to: usize,
    wanted: bool,
    epsilon: f32,
    hadamard_scale: f32,
    #[comptime] blueprint: RowBlueprint,
) {
    let width = comptime!(blueprint.width);
    let units = comptime!(blueprint.units());
    let kept = comptime!(width - blueprint.rotated);
    let own = comptime!(width.div_ceil(units) as usize);
    // Of each of the unit's channels: weights of it and of the other of its pair, cosine and sine. They come while the row does.
    let mut weights = Array::<Vector<f32, Const<4>>>::new(own);
    #[unroll]
    for i in 0..own {
        let channel = UNIT_POS + comptime!(i as u32 * units);
        let turns = channel >= kept && channel < width;
        let offset = select(turns, channel - kept, 0u32);
        let across = select(turns, kept + (offset ^ 1u32), 0u32);
        let pair = angle + (offset / 2) as usize;
        let mut read = Vector::<f32, Const<4>>::new(0.0f32);
        read.insert(
            0usize,
            f32::cast_from(norm[min(channel, width - 1) as usize]),
        );
        read.insert(1usize, f32::cast_from(norm[across as usize]));
        read.insert(2usize, angles[pair]);
        read.insert(3usize, angles[pair + table.pairs]);
        weights[i] = read;
    }
    sync_cube();
    let factor = norm_factor(row, epsilon, blueprint);

    #[unroll]
    for i in 0..own {
        let channel = UNIT_POS + comptime!(i as u32 * units);
        if channel < width {
            let read = weights[i];
            let mut value = row[channel as usize] * factor * read.extract(0usize);
            if channel >= kept {
                let offset = channel - kept;
                let across = row[(kept + (offset ^ 1u32)) as usize] * factor * read.extract(1usize);
                let sin = read.extract(3usize);
                let sin = select(offset & 1u32 == 0, -sin, sin);
                let product = across * sin;
                value = fma(value, read.extract(2usize), product);
            }
            if comptime!(blueprint.rounding == RowRounding::None) {
                if wanted {
                    rows[to + channel as usize] = R::cast_from(value);
                }
            } else {
                other[channel as usize] = value;
            }
        }
    }
    sync_cube();

    if comptime!(blueprint.rounding == RowRounding::Content) {
        let block = comptime!(CONTENT_BLOCK as u32);
        store_rounded(rows, other, to, wanted, kept, block, E4M3, blueprint);
        sync_cube();
    } else if comptime!(blueprint.rounding == RowRounding::Index) {
        #[unroll]
        for stage in 0..comptime!(width.ilog2()) {
            if comptime!(stage % 2 == 0) {
                butterflies(other, row, comptime!(1u32 << stage), blueprint);
            } else {
                butterflies(row, other, comptime!(1u32 << stage), blueprint);
            }
        }
        let block = comptime!(FP4_BLOCK as u32);
        if comptime!(width.ilog2() % 2 == 0) {
            scale_all(other, hadamard_scale, blueprint);
            store_rounded(rows, other, to, wanted, width, block, E2M1, blueprint);
        } else {
            scale_all(row, hadamard_scale, blueprint);
            store_rounded(rows, row, to, wanted, width, block, E2M1, blueprint);
        }
        sync_cube();
    }
}

/// What the elements of the row are multiplied by, of all of them: the order of additions is that of
/// [`rms_norm`](crate::norm::rms_norm) of an f32 row.
#[cube]
fn norm_factor(row: &mut Shared<[f32]>, epsilon: f32, #[comptime] blueprint: RowBlueprint) -> f32 {
    let cut = comptime!(blueprint.cut);
    let width = comptime!(blueprint.width);
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
    // Further planes have the sums of the first ones, too.
    let total = row_sum(sum, 0u32, blueprint.planes, cut, blueprint.target);
    1.0f32 / (total / f32::cast_from(width) + epsilon).sqrt()
}

/// One stage of the Hadamard transform. All of the cube must be here.
#[cube]
fn butterflies(
    from: &mut Shared<[f32]>,
    to: &mut Shared<[f32]>,
    #[comptime] stride: u32,
    #[comptime] blueprint: RowBlueprint,
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
fn scale_all(row: &mut Shared<[f32]>, scale: f32, #[comptime] blueprint: RowBlueprint) {
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
fn store_rounded<R: Float>(
    rows: &mut [R],
    row: &mut Shared<[f32]>,
    to: usize,
    wanted: bool,
    #[comptime] count: u32,
    #[comptime] size: u32,
    #[comptime] format: Format,
    #[comptime] blueprint: RowBlueprint,
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
        if wanted {
            rows[to + channel as usize] = R::cast_from(value);
        }
        channel += comptime!(blueprint.units());
    }
}
