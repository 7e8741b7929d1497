//! Rows of `x` in `f16`, for FP8 weights that the hardware turns into `f16`: one instruction for two of them, where `bf16` takes six.
//!
//! Such a number has the digits of a `bf16` but not its range. So [`SCALED`] neighbouring columns of a row are multiplied by the power of two
//! that takes the largest of them to between 2^14 and 2^15, and their sums of products are divided by it. What is 2^-28 of the largest, or more, keeps all of
//! its digits; smaller numbers keep those that are no less than 2^-38 of it.

use cubecl::prelude::*;

use super::blueprint::FewBlueprint;
use super::columns::{Columns, part_in};
use crate::intrinsics::{pack_halves, shuffle_xor};

/// Columns that have a scale: those of an FP8 block.
pub(super) const SCALED: u32 = 128;
/// The same in units of 8.
pub(super) const SCALED_UNITS: u32 = SCALED / 8;

/// Begins to read a unit of 8 columns of a row of `x` to `read`, from `to` on.
#[cube]
pub(super) fn read_unit<X: Numeric, N: Size>(
    x: &[Vector<X, N>],
    row: usize,
    unit: u32,
    read: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] to: u32,
    #[comptime] columns: Columns,
) {
    #[unroll]
    for v in 0..columns.vectors() {
        let at = row + (unit * comptime!(columns.vectors()) + v) as usize;
        read[comptime!((to + v) as usize)] = Vector::<u32, Const<4>>::reinterpret(x[at]);
    }
}

/// Sign, exponent and the 11 digits of an `f16`.
const DIGITS: u32 = 0xffff_e000;

/// Part `part` of the unit that was [read](read_unit), in `f16`, and what its sums of products are to be multiplied by. The unit is one of
/// 16 neighbouring lanes', whose columns have one scale. All lanes of the plane must be here.
#[cube]
pub(super) fn scaled_unit<X: Numeric, N: Size>(
    read: &Array<Vector<u32, Const<4>>>,
    #[comptime] from: u32,
    inside: bool,
    part: u32,
    #[comptime] blueprint: FewBlueprint,
) -> (Vector<u32, Const<4>>, f32) {
    let columns = comptime!(blueprint.columns);
    let mut values = Array::<f32>::new(8usize);
    let mut most = 0u32;
    #[unroll]
    for v in 0..columns.vectors() {
        let words = read[comptime!((from + v) as usize)];
        let vector = Vector::<f32, N>::cast_from(Vector::<X, N>::reinterpret(words));
        #[unroll]
        for j in 0..comptime!(8 / columns.vectors()) {
            let mut value = select(inside, vector.extract(comptime!(j as usize)), 0.0f32);
            if comptime!(columns.parts > 1) {
                value = f32::reinterpret(part_in(value, part, DIGITS));
            }
            values[comptime!((v * 8 / columns.vectors() + j) as usize)] = value;
            most = max(most, u32::reinterpret(value) & 0x7fff_ffffu32);
        }
    }
    #[unroll]
    for step in 0..comptime!(SCALED_UNITS.ilog2()) {
        let other = shuffle_xor(
            f32::reinterpret(most),
            comptime!(1u32 << step),
            blueprint.target,
        );
        most = max(most, u32::reinterpret(other));
    }
    // The exponents of both factors are those of normal numbers, whatever the largest is.
    let exponent = min(max(most >> 23, 15u32), 254u32);
    let factor = f32::reinterpret((268u32 - exponent) << 23);
    let mut pairs = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..4usize {
        let low = values[comptime!(2 * i)] * factor;
        let high = values[comptime!(2 * i + 1)] * factor;
        pairs.insert(i, pack_halves(low, high));
    }
    (pairs, f32::reinterpret((exponent - 14u32) << 23))
}

/// Where a row of `x` in shared memory has the scale of block `block` of its columns.
#[cube]
pub(super) fn scale_at(line: u32, block: u32, #[comptime] blueprint: FewBlueprint) -> usize {
    (line * comptime!(blueprint.pitch()) + comptime!(blueprint.units()) + block) as usize
}
