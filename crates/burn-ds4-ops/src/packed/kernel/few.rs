//! Kernels for a few rows of `x`, which are bound by reading the weights.

use cubecl::prelude::*;

use super::STEP;
use super::activation::swiglu;
use super::columns::{Columns, padded, part_of, place, slot, unit};
use super::decode::Format;
use super::groups::{Groups, Pairing};
use super::stream::{RING_BYTES, Stream};
use super::weights::{Stack, Weights};
use crate::intrinsics::{Target, prefetch, shuffle_xor};

/// How the kernels for a few rows of `x` are compiled.
///
/// A cube's planes share a tile of 16 rows of weights: each multiplies by stretches of columns, and their sums meet in shared
/// memory. The cut depends on the weights alone, so that a row's result does not depend on how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FewBlueprint {
    /// How the weights are stored, and `x`.
    pub columns: Columns,
    /// (token, slot) pairs, at most, and how they find their matrices.
    pub pairs: u32,
    pub pairing: Pairing,
    /// Rows of `x`, each part by itself, that are in shared memory. Where pairs are added up, all or (8) none; else those that are
    /// multiplied at a time: a tile has 8, of which some may be the same.
    pub lines: u32,
    /// Planes that share a tile.
    pub planes: u32,
    /// Stretches of a plane.
    pub rounds: u32,
    /// Tiles that a cube multiplies side by side.
    pub groups: u32,
    /// Tiles whose sums wait in shared memory: of a group; or all of a cube, where pairs are added up.
    pub batch: u32,
    /// Whether the stretches are all full.
    pub even: bool,
    pub target: Target,
}

impl FewBlueprint {
    /// Units of 8 columns of a row of `x`, filled up to the end of the last stretch.
    pub const fn units(self) -> u32 {
        self.planes * self.rounds * self.columns.format.stretch() / 8
    }

    /// From one row of `x` to the next in shared memory, in units: such that eight lanes that read together meet no bank twice.
    pub const fn pitch(self) -> u32 {
        self.units() + 4
    }

    /// Columns of `x` in 128 bytes, a line of the cache.
    const fn line_columns(self) -> u32 {
        if self.columns.parts == 4 { 32 } else { 64 }
    }

    pub const fn units_of_cube(self) -> u32 {
        32 * self.planes * self.groups
    }

    /// Units of `x` that a unit of the cube stages.
    pub const fn own_units(self) -> u32 {
        (self.lines * self.units()).div_ceil(self.units_of_cube())
    }

    /// Bytes of `x` in shared memory.
    pub const fn staged_bytes(self) -> usize {
        (self.lines * self.pitch()) as usize * 16
    }

    /// Bytes of shared memory, with some for the pairs.
    pub const fn shared_bytes(self) -> usize {
        let ring = RING_BYTES * (self.planes * self.groups) as usize;
        let rest = if self.columns.ordered {
            let staged = if self.lines > 8 {
                self.staged_bytes()
            } else {
                0
            };
            (self.batch * self.pairs * self.planes) as usize * 64 + staged
        } else {
            self.staged_bytes() + (self.batch * self.groups * self.planes) as usize * 512
        };
        ring + rest + (4 << 10)
    }

    /// Pairs that are multiplied at a time.
    const fn pass(self) -> u32 {
        self.lines / self.columns.parts
    }
}

/// A lane's sums of two columns of its lower row and of its upper one, the parts of `x` added up, which are columns side by side: with
/// one part as they are; with two, the first of each row is the sum of both; with four, of both and the neighbour's. All lanes of
/// the plane must be here.
#[cube]
pub(super) fn add_parts(
    sums: Vector<f32, Const<4>>,
    #[comptime] parts: u32,
    #[comptime] target: Target,
) -> Vector<f32, Const<4>> {
    let mut added = sums;
    if comptime!(parts > 1) {
        #[unroll]
        for i in 0..2usize {
            let mut sum = sums.extract(comptime!(2 * i)) + sums.extract(comptime!(2 * i + 1));
            if comptime!(parts == 4) {
                sum += shuffle_xor(sum, 1u32, target);
            }
            added.insert(comptime!(2 * i), sum);
        }
    }
    added
}

/// Multiplies a few rows of `x` by the rows of their matrices: `x · Wᵀ`, or with `gated` half of the rows as a gate.
///
/// - `x`: rows of vectors; pair `p` has row `p / share`
/// - `ids`: the matrix of every pair, or all have the first; `scores`: by which a gated pair is multiplied
/// - `words`, `scales`: a stack of matrices
/// - `output`: `[pairs, rows]`; gated, `[pairs, parts, rows / 2]` in `bf16`, see [`place`]
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn few_kernel<X: Float, I: Int, Y: Float, N: Size, S: Size>(
    x: &[Vector<X, N>],
    ids: ComptimeOption<&[I]>,
    scores: ComptimeOption<&[f32]>,
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    output: &mut [Y],
    pairs: u32,
    share: u32,
    matrices: u32,
    x_vectors: usize,
    stack: Stack,
    limit: f32,
    #[comptime] gated: Option<Format>,
    #[comptime] blueprint: FewBlueprint,
    #[define(X, I, Y)] _dtypes: [ElemType; 3],
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let plane = UNIT_POS_Y % blueprint.planes;
    let side = UNIT_POS_Y / blueprint.planes;
    let parts = comptime!(blueprint.columns.parts);
    let stretch = comptime!(blueprint.columns.format.stretch());
    let stride = comptime!(blueprint.groups);
    let (rows, width) = (stack.rows, stack.columns);
    let weights = Weights::<S>::new(
        words,
        scales,
        stack,
        blueprint.columns.format,
        blueprint.even,
        blueprint.target,
    );
    let mut stream = Stream::<S>::new(
        weights,
        quarter,
        comptime!(blueprint.planes * blueprint.groups),
    );
    // `x` will be waited for: it may come while the pairs are grouped.
    let row_lines = (width + comptime!(blueprint.line_columns() - 1)) / blueprint.line_columns();
    let mut early = UNIT_POS;
    while early < pairs / share * row_lines {
        let vector = early % row_lines * comptime!(blueprint.line_columns()) / N::value() as u32;
        let at = (early / row_lines) as usize * x_vectors + vector as usize;
        prefetch(&x[at..at + 1]);
        early += CUBE_DIM;
    }
    let groups = Groups::new::<I>(&ids, pairs, matrices, blueprint.pairs, blueprint.pairing);
    let mut lines = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (blueprint.lines * blueprint.pitch()) as usize
    ));
    let mut stage = Shared::<[Vector<f32, Const<4>>]>::new_slice(comptime!(
        (blueprint.batch * blueprint.groups * blueprint.planes * 32) as usize
    ));
    let mut codes = Array::<u32>::new(comptime!(2 * STEP as usize));
    let line = (row % blueprint.lines * comptime!(blueprint.pitch())) as usize;

    // Rows of the output, of which a tile has 16, or 8 with their gates.
    let outputs = if comptime!(gated.is_some()) {
        rows / 2
    } else {
        rows
    };
    let tile_outputs = comptime!(if gated.is_some() { 8u32 } else { 16u32 });
    let to_high = if comptime!(gated.is_some()) {
        outputs
    } else {
        8u32.runtime()
    };
    let tiles = (outputs + tile_outputs - 1) / tile_outputs;
    // Every cube has an equal share of all tiles of all groups, whatever their number.
    let all = groups.count() * tiles;
    let mut at = (CUBE_POS_X as u64 * all as u64 / CUBE_COUNT_X as u64) as u32;
    let end = ((CUBE_POS_X as u64 + 1) * all as u64 / CUBE_COUNT_X as u64) as u32;
    while at < end {
        let group = at / tiles;
        let first_tile = at % tiles;
        let last_tile = min(first_tile + (end - at), tiles);
        at += last_tile - first_tile;
        let matrix = groups.expert(group);
        let start = groups.start(group);
        let count = groups.start(group + 1) - start;
        let items =
            (last_tile - first_tile + comptime!(stride - 1) - side) / stride * blueprint.rounds;
        let mut pass = 0u32;
        while pass < count {
            let mut item = 0u32;
            // First `x`, which all wait for: it is on its way when the weights follow.
            let mut fetched =
                Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.own_units() as usize));
            #[unroll]
            for i in 0..comptime!(blueprint.own_units()) {
                let at = UNIT_POS + comptime!(i * blueprint.units_of_cube());
                let of = min(
                    at / comptime!(blueprint.units()),
                    comptime!(blueprint.lines - 1),
                );
                let u = at % comptime!(blueprint.units());
                let pair = groups.pair(start + min(pass + of / parts, count - 1));
                let inside = u * 8 < width;
                let source = (pair / share) as usize * x_vectors;
                let pairs = unit(
                    x,
                    source,
                    select(inside, u, 0u32),
                    of % parts,
                    blueprint.columns,
                );
                fetched[i as usize] = select(inside, pairs, Vector::new(0u32));
            }
            if item < items {
                let own = min((first_tile + side) * tile_outputs + row, outputs - 1);
                stream.aim(matrix, own, own + to_high, plane * stretch, line);
                stream.fetch();
            }
            #[unroll]
            for i in 0..comptime!(blueprint.own_units()) {
                let at = UNIT_POS + comptime!(i * blueprint.units_of_cube());
                let of = at / comptime!(blueprint.units());
                let u = at % comptime!(blueprint.units());
                if of < blueprint.lines {
                    let slot = slot(u, blueprint.columns.format);
                    lines[(of * comptime!(blueprint.pitch()) + slot) as usize] =
                        fetched[i as usize];
                }
            }
            sync_cube();

            let mut base = first_tile;
            while base < last_tile {
                let mut kept = 0u32;
                while kept < blueprint.batch && item < items {
                    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
                    for round in 0..blueprint.rounds {
                        let x_at = stream.x_at;
                        let first = stream.first;
                        stream.take_scales(&mut codes);
                        item += 1;
                        let goes_on = item < items;
                        if goes_on {
                            let turns = round + 1 == blueprint.rounds;
                            let tile = base + (kept + select(turns, 1u32, 0u32)) * stride + side;
                            let own = min(tile * tile_outputs + row, outputs - 1);
                            let next = select(turns, 0u32, round + 1);
                            let first = (next * blueprint.planes + plane) * stretch;
                            stream.aim(matrix, own, own + to_high, first, line);
                        }
                        sum += stream.multiply(&lines[..], x_at, first, &codes, goes_on, false);
                    }
                    let slot = (kept * stride + side) * blueprint.planes + plane;
                    stage[(slot * 32 + UNIT_POS_X) as usize] = sum;
                    kept += 1;
                }
                sync_cube();
                let mut local = UNIT_POS_Y;
                while local < comptime!(blueprint.batch * stride) && base + local < last_tile {
                    let slot = local * comptime!(blueprint.planes * 32) + UNIT_POS_X;
                    let mut sum = stage[slot as usize];
                    #[unroll]
                    for p in 1..blueprint.planes {
                        sum += stage[(slot + p * 32) as usize];
                    }
                    let sum = add_parts(sum, parts, blueprint.target);
                    let writes = comptime!(if parts == 1 { 2u32 } else { 1u32 });
                    #[unroll]
                    for w in 0..writes {
                        let of = (quarter * 2 + w) / parts;
                        let low = sum.extract(comptime!(w as usize));
                        let high = sum.extract(comptime!(w as usize + 2));
                        let own = (base + local) * tile_outputs + row;
                        let speaks = quarter * 2 % parts == 0 && of < comptime!(blueprint.pass());
                        if speaks && pass + of < count {
                            let pair = groups.pair(start + pass + of);
                            if comptime!(gated.is_some()) {
                                if own < outputs {
                                    let score: ComptimeOption<f32> =
                                        scores.map(|scores| scores[pair as usize]);
                                    let score = score.unwrap_or_else(|| 1.0f32);
                                    let value = swiglu(low, high, limit, blueprint.target) * score;
                                    let value = f32::cast_from(X::cast_from(value));
                                    let to = comptime!(gated.unwrap());
                                    let width = padded(outputs, to) as usize;
                                    #[unroll]
                                    for part in 0..parts {
                                        let line = (pair * parts + part) as usize * width;
                                        output[line + place(own, to) as usize] =
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
                    local += CUBE_DIM_Y;
                }
                sync_cube();
                base += comptime!(blueprint.batch * stride);
            }
            pass += comptime!(blueprint.pass());
        }
    }
}
