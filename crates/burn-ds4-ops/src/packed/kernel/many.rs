//! A kernel for many rows of `x`, which is bound by the tensor cores.

use cubecl::prelude::*;

use super::activation::swiglu;
use super::columns::{Columns, padded, part_of, place, slot, unit, unit_at};
use super::decode::Format;
use super::few::add_parts;
use super::product::{Stack, Weights, add_scaled, rare_bits, weight_pair};
use crate::intrinsics::{Target, ballot, multiply_tiles};

/// Columns of weights that a cube multiplies between two barriers.
const STEP_COLUMNS: u32 = 128;
/// Units of 8 columns of a step.
const UNITS: u32 = STEP_COLUMNS / 8;
/// From one row of `x` to the next in shared memory, in units: such that eight lanes that read together meet no bank twice.
const PITCH: u32 = UNITS + 4;
/// Tiles of 16 rows of a plane: each part of `x` that it reads serves both.
pub(crate) const ROW_TILES: u32 = 2;

/// How [`many_kernel`] is compiled.
///
/// A cube multiplies `8 * tiles` columns, which are rows of `x`, by `32 * planes` rows of weights. The planes share `x`, which goes through
/// shared memory a step at a time, and each reads and decodes its own weights, in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ManyBlueprint {
    /// How the weights are stored, and `x`.
    pub columns: Columns,
    /// Tiles of 8 columns.
    pub tiles: u32,
    pub planes: u32,
    /// Half of the rows are a gate, whose activation is multiplied with the other half and with the score; the result is written as
    /// weights of this format are multiplied by it.
    pub gated: Option<Format>,
    /// Whether the columns of the weights are a multiple of 128.
    pub even: bool,
    pub target: Target,
}

impl ManyBlueprint {
    /// Rows of `x` of a cube.
    pub const fn rows(self) -> u32 {
        8 * self.tiles / self.columns.parts
    }

    /// Units of 8 columns that a unit of the cube puts into shared memory in a step.
    const fn own_units(self) -> u32 {
        (8 * self.tiles * UNITS).div_ceil(self.planes * 32)
    }

    /// Rows of the output of a cube.
    pub const fn outputs(self) -> u32 {
        let rows = 16 * ROW_TILES * self.planes;
        if self.gated.is_some() { rows / 2 } else { rows }
    }
}

/// Which rows of `x` a cube multiplies, and by which matrix.
#[derive(CubeType)]
struct Work {
    matrix: u32,
    /// In the order of the groups.
    start: u32,
    count: u32,
}

/// Multiplies many rows of `x` by the rows of their matrices: `x · Wᵀ`, or with a gate.
///
/// - `x`: rows of vectors
/// - `order`: the pairs, group by group; without, pair `p` is at place `p` and all have the first matrix
/// - `work`: matrix, first place and number of places, one after the other for every `CUBE_POS_Y`; and in the end how many there are
/// - `scores`: by which a gated pair is multiplied
/// - `words`, `scales`: a stack of matrices
/// - `output`: `[pairs, rows]`; gated, `[places, parts, rows / 2]` in `bf16`, see [`place`]
///
/// `R` is the dtype that a gated result is rounded to. `share` pairs have one row of `x`; where its rows are ordered, it has one for each place and part.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn many_kernel<X: Numeric, R: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    order: ComptimeOption<&[u32]>,
    work: ComptimeOption<&[u32]>,
    scores: ComptimeOption<&[f32]>,
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, Const<1>>],
    output: &mut [Y],
    pairs: u32,
    share: u32,
    x_vectors: usize,
    stack: Stack,
    limit: f32,
    #[comptime] blueprint: ManyBlueprint,
    #[define(X, R, Y)] _dtypes: [ElemType; 3],
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let parts = comptime!(blueprint.columns.parts);
    let format = comptime!(blueprint.columns.format);
    let gated = comptime!(blueprint.gated.is_some());
    let tile_count = comptime!(blueprint.tiles);
    let (rows, width) = (stack.rows, stack.columns);
    let outputs = if comptime!(gated) { rows / 2 } else { rows };

    let work = find_work(&work, pairs, comptime!(blueprint.rows()));
    if work.count == 0 {
        terminate!();
    }
    let weights = Weights::<Const<1>>::new(
        words,
        scales,
        stack,
        format,
        blueprint.even,
        blueprint.target,
    );
    let tile_outputs = comptime!(if gated { 8u32 } else { 16u32 });
    let first_output =
        (CUBE_POS_X * blueprint.planes + UNIT_POS_Y) * comptime!(ROW_TILES * tile_outputs);
    let mut tiles = Tiles::new(comptime!(ROW_TILES as usize));
    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        let low = min(own, outputs - 1);
        let high = if comptime!(gated) {
            low + outputs
        } else {
            own + 8
        };
        let tile = weights.tile(work.matrix, low, high);
        tiles.rows[comptime!(2 * m as usize)] = tile.low;
        tiles.rows[comptime!(2 * m as usize + 1)] = tile.high;
        tiles.scales[comptime!(2 * m as usize)] = tile.low_scale;
        tiles.scales[comptime!(2 * m as usize + 1)] = tile.high_scale;
    }

    let mut stage = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (2 * 8 * tile_count * PITCH) as usize
    ));
    let mut sums =
        Array::<Vector<f32, Const<4>>>::new(comptime!((ROW_TILES * tile_count) as usize));
    #[unroll]
    for i in 0..comptime!(ROW_TILES * tile_count) {
        sums[i as usize] = Vector::new(0.0f32);
    }

    // While a step is multiplied, the next one's weights and columns are on their way to registers.
    let steps = (width + comptime!(STEP_COLUMNS - 1)) / STEP_COLUMNS;
    let mut current = Step::new(format);
    let mut next = Step::new(format);
    let mut columns =
        Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.own_units() as usize));
    fetch_columns(
        x,
        &order,
        &work,
        share,
        x_vectors,
        0u32,
        width,
        &mut columns,
        blueprint,
    );
    fetch_weights(&weights, &tiles, 0u32, quarter, &mut current);
    put_columns(&columns, 0u32, &mut stage, blueprint);
    sync_cube();
    for step in 0..steps {
        let ahead = min(step + 1, steps - 1);
        fetch_columns(
            x,
            &order,
            &work,
            share,
            x_vectors,
            ahead,
            width,
            &mut columns,
            blueprint,
        );
        fetch_weights(&weights, &tiles, ahead * STEP_COLUMNS, quarter, &mut next);
        let buffer = step % 2 * comptime!(8 * tile_count * PITCH);
        let at = buffer + row * PITCH + quarter;
        if any_rare(&current, format, blueprint.target) {
            multiply_step(&current, &stage, at, &mut sums, true, blueprint);
        } else {
            multiply_step(&current, &stage, at, &mut sums, false, blueprint);
        }
        put_columns(&columns, (step + 1) % 2, &mut stage, blueprint);
        current.take(&next, format);
        sync_cube();
    }

    #[unroll]
    for m in 0..ROW_TILES {
        let own = first_output + m * tile_outputs + row;
        #[unroll]
        for n in 0..tile_count {
            let sum = sums[comptime!((m * tile_count + n) as usize)];
            let low = add_parts(
                sum.extract(0usize),
                sum.extract(1usize),
                parts,
                blueprint.target,
            );
            let high = add_parts(
                sum.extract(2usize),
                sum.extract(3usize),
                parts,
                blueprint.target,
            );
            let writes = comptime!(if parts == 1 { 2u32 } else { 1u32 });
            #[unroll]
            for w in 0..writes {
                let column = (n * 8 + quarter * 2 + w) / parts;
                let low = if comptime!(w == 0) {
                    low
                } else {
                    sum.extract(1usize)
                };
                let high = if comptime!(w == 0) {
                    high
                } else {
                    sum.extract(3usize)
                };
                if quarter * 2 % parts == 0 && column < work.count {
                    let at = work.start + column;
                    let pair: ComptimeOption<u32> = order.map(|order| order[at as usize]);
                    let pair = pair.unwrap_or_else(|| at);
                    if comptime!(gated) {
                        if own < outputs {
                            let score: ComptimeOption<f32> =
                                scores.map(|scores| scores[pair as usize]);
                            let score = score.unwrap_or_else(|| 1.0f32);
                            let value = swiglu(low, high, limit, blueprint.target) * score;
                            // What is rounded to the dtype of `x` has as many parts as that.
                            let next = comptime!(blueprint.gated.unwrap());
                            let value = f32::cast_from(R::cast_from(value));
                            #[unroll]
                            for part in 0..parts {
                                let line =
                                    (at * parts + part) as usize * padded(outputs, next) as usize;
                                output[line + place(own, next) as usize] =
                                    Y::cast_from(f32::reinterpret(part_of(value, part)));
                            }
                        }
                    } else {
                        let line = pair as usize * outputs as usize;
                        if own < outputs {
                            output[line + own as usize] = Y::cast_from(low);
                        }
                        if own + 8 < outputs {
                            output[line + own as usize + 8] = Y::cast_from(high);
                        }
                    }
                }
            }
        }
    }
}

/// What a cube has to do, from the table that the pairs were grouped into.
#[cube]
fn find_work(work: &ComptimeOption<&[u32]>, pairs: u32, #[comptime] most: u32) -> Work {
    let mut matrix = 0u32;
    let mut start = CUBE_POS_Y * most;
    let mut count = min(pairs - min(start, pairs), most);
    #[comptime]
    if let ComptimeOption::Some(work) = work {
        let entry = CUBE_POS_Y as usize * 3;
        let entries = work[CUBE_COUNT_Y as usize * 3];
        count = 0u32;
        if CUBE_POS_Y < entries {
            matrix = work[entry];
            start = work[entry + 1];
            count = work[entry + 2];
        }
    }
    Work {
        matrix,
        start,
        count,
    }
}

/// The beginnings of a lane's rows, two to a tile, in words and scales.
#[derive(CubeType)]
struct Tiles {
    rows: Array<usize>,
    scales: Array<usize>,
}

#[cube]
impl Tiles {
    fn new(#[comptime] tiles: usize) -> Tiles {
        Tiles {
            rows: Array::new(comptime!(2 * tiles)),
            scales: Array::new(comptime!(2 * tiles)),
        }
    }
}

/// What a lane has of a step's weights: 16 bytes of each row of every chunk, and a scale (FP8) or a scale's code (FP4) of each row.
#[derive(CubeType)]
struct Step {
    words: Array<Vector<u32, Const<4>>>,
    scales: Array<u32>,
}

/// Chunks of a step.
const fn chunks(format: Format) -> u32 {
    STEP_COLUMNS / format.chunk()
}

#[cube]
impl Step {
    fn new(#[comptime] format: Format) -> Step {
        Step {
            words: Array::new(comptime!((chunks(format) * 2 * ROW_TILES) as usize)),
            scales: Array::new(comptime!(2 * ROW_TILES as usize)),
        }
    }

    fn take(&mut self, other: &Step, #[comptime] format: Format) {
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
fn fetch_weights(
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
fn any_rare(step: &Step, #[comptime] format: Format, #[comptime] target: Target) -> bool {
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
fn multiply_step(
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
fn fetch_columns<X: Numeric, N: Size>(
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
fn put_columns(
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
