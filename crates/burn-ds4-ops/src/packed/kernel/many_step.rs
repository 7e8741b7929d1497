//! What a cube of the many rows' kernel does between two barriers.

use cubecl::prelude::*;

use super::columns::{slot, unit, unit_at};
use super::decode::Format;
use super::many::{ManyBlueprint, PITCH, ROW_TILES, STEP_COLUMNS, UNITS, Work};
use super::pairs::{add_scaled, rare_bits, weight_pair};
use super::weights::Weights;
use crate::intrinsics::{Target, ballot, multiply_tiles};

/// The beginnings of a lane's rows, two to a tile, in words and scales.
#[derive(CubeType)]
pub(super) struct Tiles {
    pub rows: Array<usize>,
    pub scales: Array<usize>,
}

#[cube]
impl Tiles {
    pub fn new(#[comptime] tiles: usize) -> Tiles {
        Tiles {
            rows: Array::new(comptime!(2 * tiles)),
            scales: Array::new(comptime!(2 * tiles)),
        }
    }
}

/// What a lane has of a step's weights: 16 bytes of each row of every chunk, and a scale (FP8) or a scale's code (FP4) of each row.
#[derive(CubeType)]
pub(super) struct Step {
    words: Array<Vector<u32, Const<4>>>,
    scales: Array<u32>,
}

/// Chunks of a step.
const fn chunks(format: Format) -> u32 {
    STEP_COLUMNS / format.chunk()
}

#[cube]
impl Step {
    pub fn new(#[comptime] format: Format) -> Step {
        Step {
            words: Array::new(comptime!((chunks(format) * 2 * ROW_TILES) as usize)),
            scales: Array::new(comptime!(2 * ROW_TILES as usize)),
        }
    }

    pub fn take(&mut self, other: &Step, #[comptime] format: Format) {
        #[unroll]
        for i in 0..comptime!((chunks(format) * 2 * ROW_TILES) as usize) {
            self.words[i] = other.words[i];
        }
        #[unroll]
        for i in 0..comptime!(2 * ROW_TILES as usize) {
            self.scales[i] = other.scales[i];
        }
    }
}

#[cube]
pub(super) fn fetch_weights(
    weights: &Weights<'_, Const<1>>,
    tiles: &Tiles,
    first: u32,
    quarter: u32,
    step: &mut Step,
) {
    let format = comptime!(weights.format);
    #[unroll]
    for chunk in 0..comptime!(chunks(format)) {
        let column =
            first + comptime!(chunk * format.chunk()) + quarter * comptime!(format.columns());
        #[unroll]
        for r in 0..comptime!(2 * ROW_TILES) {
            step.words[comptime!((chunk * 2 * ROW_TILES + r) as usize)] =
                weights.vector(tiles.rows[r as usize], column);
        }
    }
    #[unroll]
    for r in 0..comptime!(2 * ROW_TILES as usize) {
        step.scales[r] = match comptime!(format) {
            Format::Fp4 => {
                let column = first + quarter * 32;
                let word = weights.scale_word(tiles.scales[r], column);
                (word >> weights.scale_shift(tiles.scales[r], column)) & 255
            }
            Format::Fp8 => u32::reinterpret(weights.scale(tiles.scales[r], first)),
            Format::Dense => 0u32.runtime(),
        };
    }
}

/// Whether something in a plane's weights takes longer.
#[cube]
pub(super) fn any_rare(
    step: &Step,
    #[comptime] format: Format,
    #[comptime] target: Target,
) -> bool {
    if comptime!(format == Format::Dense) {
        false.runtime()
    } else {
        let mut rare = 0u32;
        #[unroll]
        for i in 0..comptime!(chunks(format) * 2 * ROW_TILES) {
            let scale = step.scales[comptime!((i % (2 * ROW_TILES)) as usize)];
            rare |= rare_bits(step.words[i as usize], scale, format);
        }
        ballot(rare != 0, target) != 0
    }
}

/// Adds a step's products. `at` is where the lane reads its first unit of the first tile's columns.
#[cube]
pub(super) fn multiply_step(
    step: &Step,
    stage: &Shared<[Vector<u32, Const<4>>]>,
    at: u32,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] rare: bool,
    #[comptime] blueprint: ManyBlueprint,
) {
    let format = comptime!(blueprint.columns.format);
    let tile_count = comptime!(blueprint.tiles);
    let count = comptime!((ROW_TILES * tile_count) as usize);
    // FP8 weights are multiplied without their scales, which are those of a step.
    let mut block = Array::<Vector<f32, Const<4>>>::new(comptime!(if format == Format::Fp8 {
        count
    } else {
        1
    }));
    if comptime!(format == Format::Fp8) {
        #[unroll]
        for i in 0..count {
            block[i] = Vector::new(0.0f32);
        }
    }
    #[unroll]
    for chunk in 0..comptime!(chunks(format)) {
        #[unroll]
        for u in 0..comptime!(format.units()) {
            let mut pairs = Array::<u32>::new(comptime!(8 * ROW_TILES as usize));
            #[unroll]
            for r in 0..comptime!(2 * ROW_TILES) {
                let words = step.words[comptime!((chunk * 2 * ROW_TILES + r) as usize)];
                #[unroll]
                for i in 0..4usize {
                    pairs[comptime!(4 * r as usize + i)] = weight_pair(
                        words,
                        step.scales[r as usize],
                        comptime!(u as usize),
                        i,
                        format,
                        false,
                        rare,
                    );
                }
            }
            #[unroll]
            for n in 0..tile_count {
                let slot = comptime!(n * 8 * PITCH + (chunk * format.units() + u) * 4);
                let columns = stage[(at + slot) as usize];
                #[unroll]
                for m in 0..ROW_TILES {
                    let place = comptime!((m * tile_count + n) as usize);
                    let first = comptime!(8 * m as usize);
                    #[unroll]
                    for half in 0..2usize {
                        let sum = if comptime!(format == Format::Fp8) {
                            block[place]
                        } else {
                            sums[place]
                        };
                        let sum = multiply_tiles(
                            pairs[comptime!(first + 2 * half)],
                            pairs[comptime!(first + 4 + 2 * half)],
                            pairs[comptime!(first + 2 * half + 1)],
                            pairs[comptime!(first + 4 + 2 * half + 1)],
                            columns.extract(comptime!(2 * half)),
                            columns.extract(comptime!(2 * half + 1)),
                            sum,
                            "bf16",
                        );
                        if comptime!(format == Format::Fp8) {
                            block[place] = sum;
                        } else {
                            sums[place] = sum;
                        }
                    }
                }
            }
        }
    }
    if comptime!(format == Format::Fp8) {
        #[unroll]
        for m in 0..ROW_TILES {
            let low = f32::reinterpret(step.scales[comptime!(2 * m as usize)]);
            let high = f32::reinterpret(step.scales[comptime!(2 * m as usize + 1)]);
            #[unroll]
            for n in 0..tile_count {
                let place = comptime!((m * tile_count + n) as usize);
                sums[place] = add_scaled(sums[place], block[place], low, high);
            }
        }
    }
}

/// Reads a unit's share of a step's columns of the cube's rows of `x`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn fetch_columns<X: Numeric, N: Size>(
    x: &[Vector<X, N>],
    order: &ComptimeOption<&[u32]>,
    work: &Work,
    share: u32,
    x_vectors: usize,
    step: u32,
    width: u32,
    columns: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] blueprint: ManyBlueprint,
) {
    let parts = comptime!(blueprint.columns.parts);
    #[unroll]
    for i in 0..comptime!(blueprint.own_units()) {
        let index = UNIT_POS + comptime!(i * blueprint.planes * 32);
        let u = index % UNITS;
        let line = index / UNITS;
        let at = work.start + min(line / parts, work.count - 1);
        let x_row = if comptime!(blueprint.columns.ordered) {
            at * parts + line % parts
        } else {
            let pair: ComptimeOption<u32> = order.map(|order| order[at as usize]);
            pair.unwrap_or_else(|| at) / share
        };
        let column = if comptime!(blueprint.columns.ordered) {
            unit_at(u, blueprint.columns.format) * 8
        } else {
            u * 8
        };
        let inside = step * STEP_COLUMNS + column < width;
        let read = if comptime!(blueprint.even) {
            step * UNITS + u
        } else {
            select(inside, step * UNITS + u, 0u32)
        };
        let row = x_row as usize * x_vectors;
        let mut pairs = unit(x, row, read, line % parts, blueprint.columns);
        if comptime!(!blueprint.even) {
            pairs = select(inside, pairs, Vector::new(0u32));
        }
        columns[i as usize] = pairs;
    }
}

/// Puts them into shared memory, in the order in which lanes read them.
#[cube]
pub(super) fn put_columns(
    columns: &Array<Vector<u32, Const<4>>>,
    buffer: u32,
    stage: &mut Shared<[Vector<u32, Const<4>>]>,
    #[comptime] blueprint: ManyBlueprint,
) {
    let lines = comptime!(8 * blueprint.tiles);
    #[unroll]
    for i in 0..comptime!(blueprint.own_units()) {
        let index = UNIT_POS + comptime!(i * blueprint.planes * 32);
        let u = index % UNITS;
        let line = index / UNITS;
        let at = if comptime!(blueprint.columns.ordered) {
            u
        } else {
            slot(u, blueprint.columns.format)
        };
        let place = buffer * comptime!(lines * PITCH) + line * PITCH + at;
        if line < lines {
            stage[place as usize] = columns[i as usize];
        }
    }
}
