use cubecl::prelude::*;

use super::decode::Format;

/// Rows of `x` that tiles of weights are multiplied by, as pairs of `bf16` in the order in which weights are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    /// How the weights are stored.
    pub format: Format,
    /// Numbers in `bf16` whose sum an element of `x` is: one for `bf16`, two for `f16`, four (the last is 0) for `f32`.
    pub parts: u32,
    /// Whether `x` has the right order already, and its parts are rows: see [`place`].
    pub ordered: bool,
    /// Whether `x` is in `f16` instead, its columns in their own order, with a scale for each [`SCALED`](super::halves::SCALED) of them,
    /// and the hardware turns FP8 weights into `f16`. No row is `ordered` then.
    pub halves: bool,
}

impl Columns {
    /// Vectors of `x` of a unit of 8 columns.
    pub const fn vectors(self) -> u32 {
        if self.parts == 4 { 2 } else { 1 }
    }

    /// Of a unit that a lane of a few rows' kernel has read, before it is put into shared memory.
    pub const fn read_vectors(self) -> u32 {
        if self.halves { self.vectors() } else { 1 }
    }
}

/// The bits of `part` of `value`, the upper half of a word: its sum with the other parts is `value`.
#[cube]
pub(crate) fn part_of(value: f32, part: u32) -> u32 {
    part_in(value, part, 0xffff_0000u32)
}

/// [`part_of`] whose parts have the bits of `digits`, of which three parts have all of an `f32`.
#[cube]
pub(super) fn part_in(value: f32, part: u32, #[comptime] digits: u32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffffu32;
    // What makes a NaN one may be in the lower half.
    let first = select(magnitude > 0x7f80_0000u32, 0x7fc0_0000u32, bits & digits);
    let rest = select(
        magnitude < 0x7f80_0000u32,
        value - f32::reinterpret(first),
        0.0f32,
    );
    let second = u32::reinterpret(rest) & digits;
    let third = u32::reinterpret(rest - f32::reinterpret(second)) & digits;
    let late = select(part == 2u32, third, 0u32);
    select(part == 0u32, first, select(part == 1u32, second, late))
}

#[cube]
pub(crate) fn pair(low: u32, high: u32) -> u32 {
    (low >> 16) | (high & 0xffff_0000u32)
}

/// A unit of 8 columns of a row of `x`, as the four pairs that decoded weights meet. `row` counts vectors of `x`, `unit` units
/// from the beginning of the row.
#[cube]
pub(crate) fn unit<X: Numeric, N: Size>(
    x: &[Vector<X, N>],
    row: usize,
    unit: u32,
    part: u32,
    #[comptime] columns: Columns,
) -> Vector<u32, Const<4>> {
    let order = comptime!(columns.format.order());
    let mut pairs = Vector::<u32, Const<4>>::new(0u32);
    if comptime!(columns.ordered) {
        pairs = Vector::<u32, Const<4>>::reinterpret(x[row + unit as usize]);
    } else if comptime!(columns.parts == 1) {
        let words = Vector::<u32, Const<4>>::reinterpret(x[row + unit as usize]);
        #[unroll]
        for i in 0..4usize {
            let (a, b) = comptime!(order[i]);
            let low = words.extract(comptime!(a as usize / 2));
            let high = words.extract(comptime!(b as usize / 2));
            let low = if comptime!(a % 2 == 0) {
                low << 16
            } else {
                low
            };
            let high = if comptime!(b % 2 == 0) {
                high << 16
            } else {
                high
            };
            pairs.insert(i, pair(low, high));
        }
    } else {
        let mut values = Array::<u32>::new(8usize);
        let vectors = comptime!(columns.vectors());
        #[unroll]
        for v in 0..vectors {
            let vector = Vector::<f32, N>::cast_from(x[row + (unit * vectors + v) as usize]);
            #[unroll]
            for j in 0..comptime!(8 / vectors as usize) {
                values[comptime!(v as usize * 8 / vectors as usize + j)] =
                    part_of(vector.extract(j), part);
            }
        }
        #[unroll]
        for i in 0..4usize {
            let (a, b) = comptime!(order[i]);
            pairs.insert(
                i,
                pair(values[comptime!(a as usize)], values[comptime!(b as usize)]),
            );
        }
    }
    pairs
}

/// Where a unit of 8 columns comes in a row that is in the order in which lanes read it: the first units of four lanes' 16 bytes of
/// weights side by side, then the second ones.
#[cube]
pub(crate) fn slot(unit: u32, #[comptime] format: Format) -> u32 {
    let units = comptime!(format.units());
    unit / (4 * units) * (4 * units) + unit % units * 4 + unit / units % 4
}

/// The unit that comes there.
#[cube]
pub(crate) fn unit_at(slot: u32, #[comptime] format: Format) -> u32 {
    let units = comptime!(format.units());
    slot / (4 * units) * (4 * units) + slot % 4 * units + slot / 4 % units
}

/// Where a column comes in such a row, whose units are in the order in which weights are decoded.
#[cube]
pub(crate) fn place(column: u32, #[comptime] format: Format) -> u32 {
    let inside = match comptime!(format) {
        Format::Fp4 => column % 4 * 2 + column / 4 % 2,
        Format::Fp8 => column / 4 % 2 * 4 + column % 2 * 2 + column / 2 % 2,
        Format::Dense => column % 8,
    };
    slot(column / 8, format) * 8 + inside
}

/// Columns of such a row, from one to the next.
#[cube]
pub(crate) fn padded(columns: u32, #[comptime] format: Format) -> u32 {
    (columns + comptime!(format.chunk() - 1)) / comptime!(format.chunk())
        * comptime!(format.chunk())
}
