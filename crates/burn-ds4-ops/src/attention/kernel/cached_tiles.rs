//! Attention over a cache on tensor cores.

use cubecl::prelude::*;

use super::cached::{CachedBlueprint, CachedInputs};
use super::combine::with_sink;
use super::heads::Heads;
use super::rotate::{RowRotation, rotate_vector};
use super::sink::{KvSplit, PartialOutput};
use super::softmax_weight;
use super::visibility::Visibility;
use crate::attention::MASKED;
use crate::intrinsics::{group_sum, multiply_tiles, pack_bf16, pack_f16, shuffle_xor};

/// Heads of a cube, which are the rows of a tile, and the heads that each plane prepares.
pub(crate) const TILE_HEADS: u32 = 16;
pub(crate) const PLANE_HEADS: u32 = 2;
/// Planes of a cube.
pub(crate) const TILE_PLANES: u32 = TILE_HEADS / PLANE_HEADS;
/// Channels of the weighted sums that a plane computes.
pub(crate) const SLICE_CHANNELS: u32 = 64;
/// Columns of a cube, columns that a plane multiplies by the queries, and columns whose rows are
/// summed in one iteration.
pub(crate) const TILE_COLUMNS: u32 = TILE_PLANES * PLANE_COLUMNS;
const PLANE_COLUMNS: u32 = 8;
const SUMMED_COLUMNS: u32 = 32;
/// Padding between rows in shared memory, so that values that are read together are in different
/// banks: vectors of queries, logits, words of weights.
const QUERY_GAP: u32 = 4;
pub(super) const LOGIT_GAP: u32 = 8;
pub(super) const WEIGHT_GAP: u32 = 4;

/// Kinds of columns.
pub(super) const KIND_HIDDEN: u32 = 0;
pub(super) const KIND_WINDOW: u32 = 1;
pub(super) const KIND_COMPRESSED: u32 = 2;

/// Compile-time configuration of [`cached_tiles_kernel`]. A KV split is [`TILE_COLUMNS`] columns. A
/// row has at most [`TILE_PLANES`] times [`SLICE_CHANNELS`] channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedTilesBlueprint {
    pub cached: CachedBlueprint,
    /// Vectors of a row.
    pub vectors: u32,
    /// Whether rows are `f16` rather than `bf16`.
    pub f16_input: bool,
}

/// Computes [`cached_kernel`](super::cached_kernel) for rows of 16-bit floats that queries pick
/// among. A cube has [`TILE_HEADS`] heads of a query and [`TILE_COLUMNS`] of its columns.
///
/// Queries are rounded to 16 bits once they are normalised and rotated. So are the weights of
/// columns, which are relative to the largest logit of the KV split; the divisor is the sum of the
/// rounded weights.
///
/// There are three phases. First, every plane multiplies all queries by a tile of columns. Then it
/// computes the weights of two heads. Last, it sums a slice of the channels of all heads.
///
/// Four lanes read 64 neighbouring bytes of a row, as in `index_tiles_kernel`. A lane that sums
/// rows reads eight channels of four rows, and joins the pairs that a tile needs.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn cached_tiles_kernel<F: Float, O: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    output: &mut PartialOutput<O, Const<8>>,
    #[comptime] blueprint: CachedTilesBlueprint,
    #[define(F, O, I, P)] _dtypes: [ElemType; 4],
) {
    let sink = comptime!(blueprint.cached.sink);
    let unrotated = comptime!(blueprint.cached.unrotated);
    let dtype = comptime!(if blueprint.f16_input { "f16" } else { "bf16" });
    let steps = comptime!(blueprint.vectors / 4);
    let query_stride = comptime!(blueprint.vectors + QUERY_GAP);
    let logit_stride = comptime!(TILE_COLUMNS + LOGIT_GAP);
    let weight_stride = comptime!(TILE_COLUMNS / 2 + WEIGHT_GAP);
    let mut queries_tile =
        Shared::<[Vector<F, Const<8>>]>::new_slice(comptime!((TILE_HEADS * query_stride) as usize));
    let mut logits = Shared::<[f32]>::new_slice(comptime!((TILE_HEADS * logit_stride) as usize));
    let mut weights = Shared::<[u32]>::new_slice(comptime!((TILE_HEADS * weight_stride) as usize));
    let mut kinds = Shared::<[u32]>::new_slice(TILE_COLUMNS as usize);
    let mut row_indices = Shared::<[u32]>::new_slice(TILE_COLUMNS as usize);
    let mut maxima = Shared::<[f32]>::new_slice(TILE_HEADS as usize);
    let mut totals = Shared::<[f32]>::new_slice(TILE_HEADS as usize);
    let (group, group_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);

    let attention = &inputs.attention;
    let shape = &attention.shape;
    let strides = &attention.strides;
    let window = &attention.window;
    let rows = &attention.rows;
    let table = &inputs.positions.table;
    let token = CUBE_POS_Y;
    let visibility = Visibility::new::<P>(
        &inputs.positions,
        token,
        &inputs.layout,
        shape,
        blueprint.cached.causal,
    );
    let own_head = UNIT_POS_Y * PLANE_HEADS;
    let mut heads = Heads::<Const<8>>::new::<F, I>(
        attention,
        visibility.sequence,
        visibility.query,
        CUBE_POS_X * TILE_HEADS + own_head,
        sink,
    );

    let mut selected = shape.selected;
    if attention.picks.as_ref().is_none() {
        selected = min(selected, visibility.visible_rows);
    }
    let split = KvSplit::new(shape, selected, sink);
    if UNIT_POS < TILE_COLUMNS {
        let column = split.first + UNIT_POS;
        let mut kind = KIND_HIDDEN.runtime();
        let mut row_index = visibility.slot(column, shape);
        if column < split.first_compressed {
            kind = select(
                visibility.is_visible(column, shape),
                KIND_WINDOW,
                KIND_HIDDEN,
            );
        } else if column < split.end {
            let row = column - split.first_compressed;
            let picked = attention.pick(token, row);
            if picked >= I::from_int(0) && picked < I::cast_from(visibility.visible_rows) {
                kind = KIND_COMPRESSED.runtime();
                row_index = u32::cast_from(picked);
            }
        }
        kinds[UNIT_POS as usize] = kind;
        row_indices[UNIT_POS as usize] = row_index;
    }

    let rotation = RowRotation::new(table, visibility.angle, unrotated);
    heads.normalize_and_rotate(&rotation, shape.vectors, inputs.epsilon);
    #[unroll]
    for h in 0..PLANE_HEADS {
        #[unroll]
        for step in 0..sink.steps {
            let vector = UNIT_POS_X + step * sink.plane;
            if vector < comptime!(blueprint.vectors) {
                let at = (own_head + h) * query_stride + vector;
                queries_tile[at as usize] =
                    Vector::cast_from(heads.queries[comptime!((h * sink.steps + step) as usize)]);
            }
        }
    }
    sync_cube();

    // Even the query's own row must not be read for a vacant sequence.
    let has_columns = split.first < split.end && visibility.visible_positions > 0;
    let split_columns = select(has_columns, split.end - split.first, 0u32);
    let columns = (split_columns + comptime!(SUMMED_COLUMNS - 1)) / SUMMED_COLUMNS * SUMMED_COLUMNS;
    let window_start = visibility.sequence as usize * strides.window_sequence;
    let rows_start = visibility.sequence as usize * strides.rows_sequence;

    let first = UNIT_POS_Y * PLANE_COLUMNS;
    if first < columns {
        let own = (first + group) as usize;
        let mut keys = Array::<Vector<u32, Const<4>>>::new(steps as usize);
        if kinds[own] == KIND_COMPRESSED {
            let from = rows_start + row_indices[own] as usize * strides.row + group_lane as usize;
            #[unroll]
            for step in 0..comptime!(steps as usize) {
                keys[step] = Vector::<u32, Const<4>>::reinterpret(rows[from + comptime!(4 * step)]);
            }
        } else {
            let from =
                window_start + row_indices[own] as usize * strides.window_row + group_lane as usize;
            #[unroll]
            for step in 0..comptime!(steps as usize) {
                keys[step] =
                    Vector::<u32, Const<4>>::reinterpret(window[from + comptime!(4 * step)]);
            }
        }
        // Two sums, so that neighbouring products do not depend on each other.
        let mut sums = Array::<Vector<f32, Const<4>>>::new(2usize);
        sums[0] = Vector::new(0.0f32);
        sums[1] = Vector::new(0.0f32);
        #[unroll]
        for step in 0..comptime!(steps as usize) {
            let at = (group * query_stride + group_lane) as usize + comptime!(4 * step);
            let low = Vector::<u32, Const<4>>::reinterpret(queries_tile[at]);
            let high = Vector::<u32, Const<4>>::reinterpret(
                queries_tile[at + comptime!((8 * query_stride) as usize)],
            );
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
            let own = first + group_lane * 2 + column;
            let hidden = kinds[own as usize] == KIND_HIDDEN;
            let at = (group * logit_stride + own) as usize;
            let low = dots.extract(comptime!(column as usize)) * attention.scale;
            let high = dots.extract(comptime!(column as usize + 2)) * attention.scale;
            logits[at] = select(hidden, MASKED, low);
            logits[at + comptime!((8 * logit_stride) as usize)] = select(hidden, MASKED, high);
        }
    }
    sync_cube();

    let all_heads = CUBE_COUNT_Y * shape.heads;
    #[unroll]
    for h in 0..PLANE_HEADS {
        let row = own_head + h;
        // Each lane has two columns.
        let inside = UNIT_POS_X * 2 < columns;
        let at = (row * logit_stride + UNIT_POS_X * 2) as usize;
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
        let even = softmax_weight(even - maximum, sink.target);
        let odd = softmax_weight(odd - maximum, sink.target);
        let total = f32::cast_from(F::cast_from(even)) + f32::cast_from(F::cast_from(odd));
        weights[(row * weight_stride + UNIT_POS_X) as usize] = if comptime!(blueprint.f16_input) {
            pack_f16(even, odd)
        } else {
            pack_bf16(even, odd)
        };
        let total = group_sum(total, sink.plane, sink.target);
        if UNIT_POS_X == 0 {
            maxima[row as usize] = maximum;
            totals[row as usize] = total;
            let head = CUBE_POS_X * TILE_HEADS + row;
            if comptime!(sink.multiple_splits) && head < shape.heads {
                let own = CUBE_POS_Z * all_heads + token * shape.heads + head;
                output.softmax_stats[own as usize] = maximum;
                output.softmax_stats[(CUBE_COUNT_Z * all_heads + own) as usize] = total;
            }
        }
    }
    sync_cube();

    let slice = UNIT_POS_Y;
    if slice < comptime!(blueprint.vectors * 8 / SLICE_CHANNELS) {
        let own = (slice * comptime!(SLICE_CHANNELS / 8) + group) as usize;
        let mut sums = Array::<Vector<f32, Const<4>>>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sums[i] = Vector::new(0.0f32);
        }
        let mut first = 0u32;
        while first < columns {
            let mut values =
                Array::<Vector<u32, Const<4>>>::new(comptime!(SUMMED_COLUMNS as usize / 4));
            // Of each 16 columns, the four that are this lane's part of a tile.
            #[unroll]
            for i in 0..comptime!(SUMMED_COLUMNS as usize / 4) {
                let ahead = comptime!((i / 4 * 16 + i % 4 / 2 * 8 + i % 2) as u32);
                let column = (first + group_lane * 2 + ahead) as usize;
                let row_index = row_indices[column] as usize;
                if kinds[column] == KIND_COMPRESSED {
                    let at = rows_start + row_index * strides.row + own;
                    values[i] = Vector::<u32, Const<4>>::reinterpret(rows[at]);
                } else {
                    let at = window_start + row_index * strides.window_row + own;
                    values[i] = Vector::<u32, Const<4>>::reinterpret(window[at]);
                }
            }
            #[unroll]
            for part in 0..comptime!(SUMMED_COLUMNS as usize / 16) {
                let at =
                    (group * weight_stride + first / 2 + group_lane) as usize + comptime!(8 * part);
                let other = at + comptime!((8 * weight_stride) as usize);
                #[unroll]
                for i in 0..8usize {
                    let word = comptime!(i / 2);
                    let (j, upper) = comptime!((4 * part, i % 2 == 1));
                    let before = join_words(
                        values[j].extract(word),
                        values[comptime!(j + 1)].extract(word),
                        upper,
                    );
                    let after = join_words(
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
            first += SUMMED_COLUMNS;
        }
        #[unroll]
        for high in 0..2usize {
            let row = group + comptime!(8 * high as u32);
            let head = CUBE_POS_X * TILE_HEADS + row;
            // Nothing reads the output of a KV split without a visible column.
            if head < shape.heads && (comptime!(!sink.multiple_splits).runtime() || columns > 0) {
                #[unroll]
                for part in 0..2usize {
                    let mut sum = Vector::<f32, Const<8>>::new(0.0f32);
                    #[unroll]
                    for i in 0..8usize {
                        sum.insert(i, sums[i].extract(comptime!(2 * high + part)));
                    }
                    let vector = slice * comptime!(SLICE_CHANNELS / 8)
                        + group_lane * 2
                        + comptime!(part as u32);
                    let mut to = token * shape.heads + head;
                    if comptime!(sink.multiple_splits) {
                        to += CUBE_POS_Z * all_heads;
                    } else {
                        let (total, maximum) = (totals[row as usize], maxima[row as usize]);
                        let own_sink = attention.sinks[head as usize];
                        let divisor = with_sink(total, own_sink, maximum, sink.target);
                        sum /= Vector::new(divisor);
                        if vector >= unrotated {
                            let first = visibility.angle + ((vector - unrotated) * 4) as usize;
                            sum = rotate_vector::<Const<8>>(sum, table, first, true);
                        }
                    }
                    let at = to as usize * comptime!(blueprint.vectors as usize) + vector as usize;
                    output.sums[at] = Vector::cast_from(sum);
                }
            }
        }
    }
}

/// Joins the lower or the upper 16 bits of two words.
#[cube]
pub(super) fn join_words(first: u32, second: u32, #[comptime] upper: bool) -> u32 {
    if comptime!(upper) {
        (first >> 16) | (second & 0xffff_0000u32)
    } else {
        (first & 0xffffu32) | (second << 16)
    }
}
