//! Attention over a cache by tensor cores.

use cubecl::prelude::*;

use super::cached::CachedBlueprint;
use super::heads::Heads;
use super::meeting::with_sink;
use super::rotate::{Table, turn};
use super::sight::Sight;
use super::sink::{Sizes, Stretch, Strides};
use super::weight;
use crate::attention::MASKED;
use crate::intrinsics::{group_sum, multiply_tiles, pack_bf16, pack_halves, shuffle_xor};

/// Heads of a cube, which are those of a tile, and of a plane, which prepares them.
pub(crate) const TILE_HEADS: u32 = 16;
pub(crate) const PLANE_HEADS: u32 = 2;
/// Planes of a cube.
pub(crate) const TILE_PLANES: u32 = TILE_HEADS / PLANE_HEADS;
/// Channels that a plane sums up at a time.
pub(crate) const SLICE: u32 = 64;
/// Columns of a cube, of a plane that multiplies them by queries, and of which the rows are summed up at a time.
pub(crate) const TILE_COLUMNS: u32 = TILE_PLANES * PLANE_COLUMNS;
const PLANE_COLUMNS: u32 = 8;
const SUMMED: u32 = 32;
/// Between lines of shared memory, so that those that are read together are in different banks: vectors of queries, logits, words of weights.
const QUERY_GAP: u32 = 4;
const LOGIT_GAP: u32 = 8;
const WEIGHT_GAP: u32 = 4;

/// What is known of a column.
const HIDDEN: u32 = 0;
const WINDOW: u32 = 1;
const COMPRESSED: u32 = 2;

/// How [`cached_tiles_kernel`] is compiled: a stretch is [`TILE_COLUMNS`], and a row as many times [`SLICE`] channels as there are planes, or
/// fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedTilesBlueprint {
    pub cached: CachedBlueprint,
    /// Vectors of a row.
    pub vectors: u32,
    /// Whether rows are `f16`, not `bf16`.
    pub halves: bool,
}

/// [`cached_kernel`](super::cached_kernel) for rows of 16-bit floats that queries pick among: a cube has [`TILE_HEADS`] heads of a query and
/// [`TILE_COLUMNS`] of its columns.
///
/// Queries are rounded to 16 bits once they are normalised and turned, and so are the weights of columns, which are relative to the largest
/// logit of the stretch; what they are divided by is the sum of the rounded ones. First, every plane multiplies all queries by a tile of
/// columns; then it has two heads' logits, and last a slice of the channels of all heads. Four lanes read 64 bytes of a row
/// side by side, as in `index_tiles_kernel`; a lane that sums rows up reads eight channels of four of them, and puts
/// together which it needs.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn cached_tiles_kernel<F: Float, O: Float, I: Int, P: Int>(
    queries: &[Vector<F, Const<8>>],
    window: &[Vector<F, Const<8>>],
    rows: &[Vector<F, Const<8>>],
    picks: ComptimeOption<&[I]>,
    sinks: &[f32],
    angles: &[f32],
    start: &[P],
    output: &mut [Vector<O, Const<8>>],
    shares: &mut [f32],
    sizes: Sizes,
    strides: Strides,
    table: Table,
    ratio: u32,
    epsilon: f32,
    scale: f32,
    #[comptime] blueprint: CachedTilesBlueprint,
    #[define(F, O, I, P)] _dtypes: [ElemType; 4],
) {
    let sink = comptime!(blueprint.cached.sink);
    let kept = comptime!(blueprint.cached.kept);
    let dtype = comptime!(if blueprint.halves { "f16" } else { "bf16" });
    let steps = comptime!(blueprint.vectors / 4);
    let line = comptime!(blueprint.vectors + QUERY_GAP);
    let logit_line = comptime!(TILE_COLUMNS + LOGIT_GAP);
    let weight_line = comptime!(TILE_COLUMNS / 2 + WEIGHT_GAP);
    let mut tile =
        Shared::<[Vector<F, Const<8>>]>::new_slice(comptime!((TILE_HEADS * line) as usize));
    let mut logits = Shared::<[f32]>::new_slice(comptime!((TILE_HEADS * logit_line) as usize));
    let mut weights = Shared::<[u32]>::new_slice(comptime!((TILE_HEADS * weight_line) as usize));
    let mut kinds = Shared::<[u32]>::new_slice(TILE_COLUMNS as usize);
    let mut places = Shared::<[u32]>::new_slice(TILE_COLUMNS as usize);
    let mut maxima = Shared::<[f32]>::new_slice(TILE_HEADS as usize);
    let mut totals = Shared::<[f32]>::new_slice(TILE_HEADS as usize);
    let (group, quarter) = (UNIT_POS_X / 4, UNIT_POS_X % 4);

    let token = CUBE_POS_Y;
    let sight = Sight::new::<P>(start, token, ratio, &sizes, &table);
    let own_head = UNIT_POS_Y * PLANE_HEADS;
    let mut heads = Heads::<Const<8>>::new::<F>(
        queries,
        sinks,
        sight.sequence as usize * strides.queries_sequence + sight.query as usize * strides.query,
        CUBE_POS_X * TILE_HEADS + own_head,
        &sizes,
        strides.head,
        sink,
    );

    let mut seen = sizes.seen;
    if picks.is_none() {
        seen = min(seen, sight.visible);
    }
    let stretch = Stretch::new(&sizes, seen, sink);
    if UNIT_POS < TILE_COLUMNS {
        let column = stretch.first + UNIT_POS;
        let mut kind = HIDDEN.runtime();
        let mut place = sight.slot(column, &sizes);
        if column < stretch.rows {
            kind = select(sight.sees(column, &sizes), WINDOW, HIDDEN);
        } else if column < stretch.end {
            let row = column - stretch.rows;
            let at = token as usize * sizes.seen as usize + row as usize;
            let picked: ComptimeOption<I> = picks.map(|picks| picks[at]);
            let picked = picked.unwrap_or_else(|| I::cast_from(row));
            if picked >= I::from_int(0) && picked < I::cast_from(sight.visible) {
                kind = COMPRESSED.runtime();
                place = u32::cast_from(picked);
            }
        }
        kinds[UNIT_POS as usize] = kind;
        places[UNIT_POS as usize] = place;
    }

    heads.normalize_and_turn(angles, sight.angle, &table, sizes.vectors, epsilon, kept);
    #[unroll]
    for h in 0..PLANE_HEADS {
        #[unroll]
        for step in 0..sink.steps {
            let vector = UNIT_POS_X + step * sink.plane;
            if vector < comptime!(blueprint.vectors) {
                let at = (own_head + h) * line + vector;
                tile[at as usize] =
                    Vector::cast_from(heads.queries[comptime!((h * sink.steps + step) as usize)]);
            }
        }
    }
    sync_cube();

    // Of a sequence that is not there, not even the query's own row may be read.
    let some = stretch.first < stretch.end && sight.known > 0;
    let given = select(some, stretch.end - stretch.first, 0u32);
    let columns = (given + comptime!(SUMMED - 1)) / SUMMED * SUMMED;
    let window_start = sight.sequence as usize * strides.window_sequence;
    let rows_start = sight.sequence as usize * strides.rows_sequence;

    let first = UNIT_POS_Y * PLANE_COLUMNS;
    if first < columns {
        let own = (first + group) as usize;
        let mut keys = Array::<Vector<u32, Const<4>>>::new(steps as usize);
        if kinds[own] == COMPRESSED {
            let from = rows_start + places[own] as usize * strides.row + quarter as usize;
            #[unroll]
            for step in 0..comptime!(steps as usize) {
                keys[step] = Vector::<u32, Const<4>>::reinterpret(rows[from + comptime!(4 * step)]);
            }
        } else {
            let from = window_start + places[own] as usize * strides.window_row + quarter as usize;
            #[unroll]
            for step in 0..comptime!(steps as usize) {
                keys[step] =
                    Vector::<u32, Const<4>>::reinterpret(window[from + comptime!(4 * step)]);
            }
        }
        // Two sums, of which one does not wait for the other.
        let mut sums = Array::<Vector<f32, Const<4>>>::new(2usize);
        sums[0] = Vector::new(0.0f32);
        sums[1] = Vector::new(0.0f32);
        #[unroll]
        for step in 0..comptime!(steps as usize) {
            let at = (group * line + quarter) as usize + comptime!(4 * step);
            let low = Vector::<u32, Const<4>>::reinterpret(tile[at]);
            let high =
                Vector::<u32, Const<4>>::reinterpret(tile[at + comptime!((8 * line) as usize)]);
            let key = keys[step];
            #[unroll]
            for half in 0..2usize {
                let (i, j) = comptime!((2 * half, 2 * half + 1));
                sums[half] = multiply_tiles(
                    low.extract(i),
                    high.extract(i),
                    low.extract(j),
                    high.extract(j),
                    key.extract(i),
                    key.extract(j),
                    sums[half],
                    dtype,
                );
            }
        }
        let dots = sums[0] + sums[1];
        #[unroll]
        for column in 0..2u32 {
            let own = first + quarter * 2 + column;
            let hidden = kinds[own as usize] == HIDDEN;
            let at = (group * logit_line + own) as usize;
            let low = dots.extract(comptime!(column as usize)) * scale;
            let high = dots.extract(comptime!(column as usize + 2)) * scale;
            logits[at] = select(hidden, MASKED, low);
            logits[at + comptime!((8 * logit_line) as usize)] = select(hidden, MASKED, high);
        }
    }
    sync_cube();

    let all = CUBE_COUNT_Y * sizes.heads;
    #[unroll]
    for h in 0..PLANE_HEADS {
        let row = own_head + h;
        // A lane has two columns.
        let inside = UNIT_POS_X * 2 < columns;
        let at = (row * logit_line + UNIT_POS_X * 2) as usize;
        let even = select(inside, logits[at], MASKED);
        let odd = select(inside, logits[at + 1], MASKED);
        let mut maximum = max(heads.maxima[h as usize], max(even, odd));
        #[unroll]
        for step in 0..comptime!(sink.plane.ilog2()) {
            maximum = max(
                maximum,
                shuffle_xor(maximum, comptime!(1u32 << step), sink.target),
            );
        }
        let even = weight(even - maximum, sink.target);
        let odd = weight(odd - maximum, sink.target);
        let total = f32::cast_from(F::cast_from(even)) + f32::cast_from(F::cast_from(odd));
        weights[(row * weight_line + UNIT_POS_X) as usize] = if comptime!(blueprint.halves) {
            pack_halves(even, odd)
        } else {
            pack_bf16(even, odd)
        };
        let total = group_sum(total, sink.plane, sink.target);
        if UNIT_POS_X == 0 {
            maxima[row as usize] = maximum;
            totals[row as usize] = total;
            let head = CUBE_POS_X * TILE_HEADS + row;
            if comptime!(sink.split) && head < sizes.heads {
                let own = CUBE_POS_Z * all + token * sizes.heads + head;
                shares[own as usize] = maximum;
                shares[(CUBE_COUNT_Z * all + own) as usize] = total;
            }
        }
    }
    sync_cube();

    let slice = UNIT_POS_Y;
    if slice < comptime!(blueprint.vectors * 8 / SLICE) {
        let own = (slice * comptime!(SLICE / 8) + group) as usize;
        let mut sums = Array::<Vector<f32, Const<4>>>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sums[i] = Vector::new(0.0f32);
        }
        let mut first = 0u32;
        while first < columns {
            let mut values = Array::<Vector<u32, Const<4>>>::new(comptime!(SUMMED as usize / 4));
            // Of each 16 columns, those that the lane has of a tile.
            #[unroll]
            for i in 0..comptime!(SUMMED as usize / 4) {
                let ahead = comptime!((i / 4 * 16 + i % 4 / 2 * 8 + i % 2) as u32);
                let column = (first + quarter * 2 + ahead) as usize;
                let place = places[column] as usize;
                if kinds[column] == COMPRESSED {
                    let at = rows_start + place * strides.row + own;
                    values[i] = Vector::<u32, Const<4>>::reinterpret(rows[at]);
                } else {
                    let at = window_start + place * strides.window_row + own;
                    values[i] = Vector::<u32, Const<4>>::reinterpret(window[at]);
                }
            }
            #[unroll]
            for part in 0..comptime!(SUMMED as usize / 16) {
                let at = (group * weight_line + first / 2 + quarter) as usize + comptime!(8 * part);
                let other = at + comptime!((8 * weight_line) as usize);
                #[unroll]
                for i in 0..8usize {
                    let word = comptime!(i / 2);
                    let (j, upper) = comptime!((4 * part, i % 2 == 1));
                    let before = join(
                        values[j].extract(word),
                        values[comptime!(j + 1)].extract(word),
                        upper,
                    );
                    let after = join(
                        values[comptime!(j + 2)].extract(word),
                        values[comptime!(j + 3)].extract(word),
                        upper,
                    );
                    sums[i] = multiply_tiles(
                        weights[at],
                        weights[other],
                        weights[at + 4],
                        weights[other + 4],
                        before,
                        after,
                        sums[i],
                        dtype,
                    );
                }
            }
            first += SUMMED;
        }
        #[unroll]
        for high in 0..2usize {
            let row = group + comptime!(8 * high as u32);
            let head = CUBE_POS_X * TILE_HEADS + row;
            // Nothing is read of a stretch where nothing is seen.
            if head < sizes.heads && (comptime!(!sink.split).runtime() || columns > 0) {
                #[unroll]
                for part in 0..2usize {
                    let mut sum = Vector::<f32, Const<8>>::new(0.0f32);
                    #[unroll]
                    for i in 0..8usize {
                        sum.insert(i, sums[i].extract(comptime!(2 * high + part)));
                    }
                    let vector =
                        slice * comptime!(SLICE / 8) + quarter * 2 + comptime!(part as u32);
                    let mut to = token * sizes.heads + head;
                    if comptime!(sink.split) {
                        to += CUBE_POS_Z * all;
                    } else {
                        let (total, maximum) = (totals[row as usize], maxima[row as usize]);
                        let divisor = with_sink(total, sinks[head as usize], maximum, sink.target);
                        sum /= Vector::new(divisor);
                        if vector >= kept {
                            let first = sight.angle + ((vector - kept) * 4) as usize;
                            sum = turn::<Const<8>>(sum, angles, first, table.pairs, true);
                        }
                    }
                    output[to as usize * comptime!(blueprint.vectors as usize) + vector as usize] =
                        Vector::cast_from(sum);
                }
            }
        }
    }
}

/// The lower or the upper halves of two words as one.
#[cube]
fn join(first: u32, second: u32, #[comptime] upper: bool) -> u32 {
    if comptime!(upper) {
        (first >> 16) | (second & 0xffff_0000u32)
    } else {
        (first & 0xffffu32) | (second << 16)
    }
}
