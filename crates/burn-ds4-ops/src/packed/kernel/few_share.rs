use cubecl::prelude::*;

use super::STEP;
use super::activation::swiglu;
use super::blueprint::FewBlueprint;
use super::columns::{padded, part_of, place, slot, unit};
use super::decode::Format;
use super::groups::{Groups, Pairing};
use super::halves::{SCALED_UNITS, read_unit, scale_at, scaled_unit};
use super::stream::{Stream, new_ring};
use super::weights::Weights;
use crate::intrinsics::{Target, shuffle_xor};

/// What a cube multiplies.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Share {
    /// Its place among those that share all tiles, and their number.
    pub index: u32,
    pub count: u32,
    /// Pairs with [ids](Pairing::Ids) that have the same row of `x`, one after the other.
    pub pairs: u32,
}

/// Shared memory of a cube: weights on their way, rows of `x`, and sums that wait for those of other planes.
#[derive(CubeType)]
pub(super) struct Room {
    pub ring: Shared<[Vector<u32, Const<4>>]>,
    lines: Shared<[Vector<u32, Const<4>>]>,
    stage: Shared<[Vector<f32, Const<4>>]>,
}

#[cube]
impl Room {
    /// For two kinds of work, one at a time.
    pub fn new(#[comptime] one: FewBlueprint, #[comptime] other: FewBlueprint) -> Room {
        let planes = comptime!(largest(one.cube_planes, other.cube_planes));
        let lines = comptime!(largest(
            one.lines * one.pitch(),
            other.lines * other.pitch()
        ));
        let stage = comptime!(largest(
            one.batch * one.groups * one.planes,
            other.batch * other.groups * other.planes
        ));
        Room {
            ring: new_ring(planes),
            lines: Shared::new_slice(comptime!(lines as usize)),
            stage: Shared::new_slice(comptime!(stage as usize * 32)),
        }
    }
}

const fn largest(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
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

/// Multiplies a cube's share of all tiles: see [`few_kernel`](super::few_kernel). All of the cube must be here.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_share<X: Float, Y: Float, N: Size, S: Size>(
    x: &[Vector<X, N>],
    scores: &ComptimeOption<&[f32]>,
    weights: Weights<'_, S>,
    groups: &Groups,
    output: &mut [Y],
    share: Share,
    x_vectors: usize,
    limit: f32,
    room: &mut Room,
    #[comptime] gated: Option<Format>,
    #[comptime] blueprint: FewBlueprint,
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let plane = UNIT_POS_Y % blueprint.planes;
    let side = UNIT_POS_Y / blueprint.planes;
    let parts = comptime!(blueprint.columns.parts);
    let stretch = comptime!(blueprint.columns.format.stretch());
    let stride = comptime!(blueprint.groups);
    let (rows, width) = (weights.stack.rows, weights.stack.columns);
    let mut stream = Stream::<S>::new(weights, quarter, room.ring.clone(), blueprint);
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
    // Cubes have equal shares of all tiles of all groups, whatever their number: the first ones a tile more, if need be. Nothing can begin
    // before that is known, so there are as few divisions as can be.
    let grouped = comptime!(blueprint.pairing != Pairing::One);
    let all = if comptime!(grouped) {
        groups.count() * tiles
    } else {
        tiles
    };
    let least = all / share.count;
    let more = all - least * share.count;
    let mut at = share.index * least + min(share.index, more);
    let end = at + least + select(share.index < more, 1u32, 0u32);
    while at < end {
        let group = if comptime!(grouped) {
            at / tiles
        } else {
            0u32.runtime()
        };
        let first_tile = at - group * tiles;
        let last_tile = min(first_tile + (end - at), tiles);
        at += last_tile - first_tile;
        let matrix = groups.expert(group);
        let start = groups.start(group);
        let count = groups.start(group + 1) - start;
        let mut items =
            (last_tile - first_tile + comptime!(stride - 1) - side) / stride * blueprint.rounds;
        if comptime!(blueprint.planes * stride < blueprint.cube_planes) {
            items = select(side < stride, items, 0u32);
        }
        let mut pass = 0u32;
        while pass < count {
            let mut item = 0u32;
            // First `x`, which all wait for: it is on its way when the weights follow.
            let mut fetched = Array::<Vector<u32, Const<4>>>::new(comptime!(
                (blueprint.own_units() * blueprint.columns.read_vectors()) as usize
            ));
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
                let x_row = if comptime!(blueprint.pairing == Pairing::Ids) {
                    pair / share.pairs
                } else {
                    pair
                };
                let source = x_row as usize * x_vectors;
                let read = select(inside, u, 0u32);
                let to = comptime!(i * blueprint.columns.read_vectors());
                if comptime!(blueprint.columns.halves) {
                    read_unit(x, source, read, &mut fetched, to, blueprint.columns);
                } else {
                    let pairs = unit(x, source, read, of % parts, blueprint.columns);
                    fetched[to as usize] = select(inside, pairs, Vector::new(0u32));
                }
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
                let slot = slot(u, blueprint.columns.format);
                let place = (of * comptime!(blueprint.pitch()) + slot) as usize;
                let from = comptime!(i * blueprint.columns.read_vectors());
                if comptime!(blueprint.columns.halves) {
                    let (pairs, scale) =
                        scaled_unit::<X, N>(&fetched, from, u * 8 < width, of % parts, blueprint);
                    if of < blueprint.lines {
                        room.lines[place] = pairs;
                        if u % SCALED_UNITS == 0 {
                            room.lines[scale_at(of, u / SCALED_UNITS, blueprint)] =
                                Vector::new(u32::reinterpret(scale));
                        }
                    }
                } else if of < blueprint.lines {
                    room.lines[place] = fetched[from as usize];
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
                        sum +=
                            stream.multiply(&room.lines[..], x_at, first, &codes, goes_on, false);
                    }
                    let slot = (kept * stride + side) * blueprint.planes + plane;
                    room.stage[(slot * 32 + UNIT_POS_X) as usize] = sum;
                    kept += 1;
                }
                sync_cube();
                let mut local = UNIT_POS_Y;
                while local < comptime!(blueprint.batch * stride) && base + local < last_tile {
                    let slot = local * comptime!(blueprint.planes * 32) + UNIT_POS_X;
                    let mut sum = room.stage[slot as usize];
                    #[unroll]
                    for p in 1..blueprint.planes {
                        sum += room.stage[(slot + p * 32) as usize];
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
                                    let mut score = 1.0f32;
                                    #[comptime]
                                    if let ComptimeOption::Some(scores) = scores {
                                        score = scores[pair as usize];
                                    }
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
