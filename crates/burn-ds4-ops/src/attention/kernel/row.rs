//! Normalising, rotating, rounding and storing a row in shared memory.

use cubecl::prelude::*;

use super::rotate::AngleTable;
use crate::attention::options::{CONTENT_BLOCK, RowRounding};
use crate::caps::Target;
use crate::intrinsics::modulo;
use crate::quant::FP4_BLOCK;
use crate::roundtrip::kernel::{rounded, scale_of};
use crate::roundtrip::{E2M1, E4M3, RoundtripFormat};
use crate::rows::{RowPartition, row_sum};

/// Compile-time configuration of [`store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowBlueprint {
    /// Channels of a row, and the number of them at its end that are rotated.
    pub width: u32,
    pub rotated: u32,
    pub rounding: RowRounding,
    /// How the sum over a row is divided among lanes.
    pub partition: RowPartition,
    /// Planes of a cube.
    pub planes: u32,
    pub target: Target,
}

impl RowBlueprint {
    pub(super) const fn units(self) -> u32 {
        self.partition.plane * self.planes
    }
}

/// The norm of rows, and the factor of their Hadamard transform.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowNorm<W: Float> {
    pub weight: Box<[W]>,
    pub epsilon: f32,
    pub hadamard_scale: f32,
}

/// Shared memory for a row, and for passes over it.
#[derive(CubeType)]
pub(super) struct RowStorage {
    pub row: Shared<[f32]>,
    scratch: Shared<[f32]>,
}

#[cube]
impl RowStorage {
    pub fn new(#[comptime] blueprint: RowBlueprint) -> RowStorage {
        RowStorage {
            row: Shared::new_slice(comptime!(blueprint.width as usize)),
            scratch: Shared::new_slice(comptime!(blueprint.width as usize)),
        }
    }
}

/// Where a row is stored, if it is, and the offset of its angles.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowPlace {
    pub to: usize,
    pub write: bool,
    pub angle: usize,
}

/// Normalises the row in `storage`, rotates it, rounds it and, if `place.write` is true, stores it.
///
/// Every unit of the cube must call this. All barriers are passed whether `write` is true or not,
/// since not every compiler can see that it is the same for the whole cube.
#[cube]
// A condition on comptime values gets an `if` of its own, so that its branch is not compiled.
#[allow(clippy::collapsible_if)]
pub(super) fn store<R: Float, W: Float>(
    storage: &mut RowStorage,
    norm: &RowNorm<W>,
    table: &AngleTable,
    rows: &mut [R],
    place: &RowPlace,
    #[comptime] blueprint: RowBlueprint,
) {
    let width = comptime!(blueprint.width);
    let units = comptime!(blueprint.units());
    let unrotated = comptime!(width - blueprint.rotated);
    let unit_channels = comptime!(width.div_ceil(units) as usize);
    // For each of the unit's channels: the norm weights of it and of its partner in the pair,
    // cosine and sine. These loads overlap with the loads of the row.
    let mut weights = Array::<Vector<f32, Const<4>>>::new(unit_channels);
    #[unroll]
    for i in 0..unit_channels {
        let channel = UNIT_POS + comptime!(i as u32 * units);
        let rotates = channel >= unrotated && channel < width;
        let offset = select(rotates, channel - unrotated, 0u32);
        let partner = select(rotates, unrotated + (offset ^ 1u32), 0u32);
        let pair = place.angle + (offset / 2) as usize;
        let mut read = Vector::<f32, Const<4>>::new(0.0f32);
        read.insert(
            0usize,
            f32::cast_from(norm.weight[min(channel, width - 1) as usize]),
        );
        read.insert(1usize, f32::cast_from(norm.weight[partner as usize]));
        read.insert(2usize, table.angles[pair]);
        read.insert(3usize, table.angles[pair + table.pairs]);
        weights[i] = read;
    }
    sync_cube();
    let factor = norm_factor(&mut storage.row, norm.epsilon, blueprint);

    #[unroll]
    for i in 0..unit_channels {
        let channel = UNIT_POS + comptime!(i as u32 * units);
        if channel < width {
            let read = weights[i];
            let mut value = storage.row[channel as usize] * factor * read.extract(0usize);
            if channel >= unrotated {
                let offset = channel - unrotated;
                let partner = storage.row[(unrotated + (offset ^ 1u32)) as usize]
                    * factor
                    * read.extract(1usize);
                let sin = read.extract(3usize);
                let sin = select(offset & 1u32 == 0, -sin, sin);
                let product = partner * sin;
                value = fma(value, read.extract(2usize), product);
            }
            if comptime!(blueprint.rounding == RowRounding::None) {
                if place.write {
                    rows[place.to + channel as usize] = R::cast_from(value);
                }
            } else {
                storage.scratch[channel as usize] = value;
            }
        }
    }
    sync_cube();

    let row = &mut storage.row;
    let scratch = &mut storage.scratch;
    if comptime!(blueprint.rounding == RowRounding::Content) {
        let block = comptime!(CONTENT_BLOCK as u32);
        store_rounded(rows, scratch, place, unrotated, block, E4M3, blueprint);
        sync_cube();
    } else if comptime!(blueprint.rounding == RowRounding::Index) {
        #[unroll]
        for level in 0..comptime!(width.ilog2()) {
            if comptime!(level % 2 == 0) {
                butterflies(scratch, row, comptime!(1u32 << level), blueprint);
            } else {
                butterflies(row, scratch, comptime!(1u32 << level), blueprint);
            }
        }
        let block = comptime!(FP4_BLOCK as u32);
        if comptime!(width.ilog2() % 2 == 0) {
            scale_all(scratch, norm.hadamard_scale, blueprint);
            store_rounded(rows, scratch, place, width, block, E2M1, blueprint);
        } else {
            scale_all(row, norm.hadamard_scale, blueprint);
            store_rounded(rows, row, place, width, block, E2M1, blueprint);
        }
        sync_cube();
    }
}

/// The factor of the norm, from all elements of the row. The order of additions is that of
/// [`rms_norm`](crate::norm::rms_norm) of an f32 row.
#[cube]
fn norm_factor(row: &mut Shared<[f32]>, epsilon: f32, #[comptime] blueprint: RowBlueprint) -> f32 {
    let partition = comptime!(blueprint.partition);
    let width = comptime!(blueprint.width);
    let own = modulo(UNIT_POS_Y, partition.planes) * partition.plane + UNIT_POS_X;
    let mut sum = 0.0f32;
    for step in 0..partition.steps {
        let block = step * comptime!(partition.planes * partition.plane) + own;
        #[unroll]
        for i in 0..partition.block {
            let channel = block * partition.block + i;
            if channel < width {
                let value = row[channel as usize];
                sum = fma(value, value, sum);
            }
        }
    }
    // Further planes repeat the sums of the first ones.
    let total = row_sum(sum, 0u32, blueprint.planes, partition, blueprint.target);
    1.0f32 / (total / f32::cast_from(width) + epsilon).sqrt()
}

/// One pass of the Hadamard transform. Every unit of the cube must call this.
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
        let partner = from[(channel ^ stride) as usize];
        let low = channel & stride == 0;
        to[channel as usize] = select(low, value + partner, partner - value);
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

/// Stores the row, with its first `count` channels rounded in blocks of `size`.
#[cube]
fn store_rounded<R: Float>(
    rows: &mut [R],
    row: &mut Shared<[f32]>,
    place: &RowPlace,
    #[comptime] count: u32,
    #[comptime] size: u32,
    #[comptime] format: RoundtripFormat,
    #[comptime] blueprint: RowBlueprint,
) {
    let size = comptime!(size.min(count.max(1)));
    let mut channel = UNIT_POS;
    while channel < blueprint.width {
        let mut value = row[channel as usize];
        if channel < count {
            let first = channel / size * size;
            let mut largest = 0.0f32;
            #[unroll(blueprint.target.ptx)]
            for i in 0..size {
                let other = first + i;
                let other = row[select(other < count, other, first) as usize];
                let bits = u32::reinterpret(other) & 0x7fff_ffffu32;
                let finite = bits < 0x7f80_0000u32;
                largest = max(largest, select(finite, f32::reinterpret(bits), 0.0f32));
            }
            value = rounded(value, scale_of(largest, format), format);
        }
        if place.write {
            rows[place.to + channel as usize] = R::cast_from(value);
        }
        channel += comptime!(blueprint.units());
    }
}
