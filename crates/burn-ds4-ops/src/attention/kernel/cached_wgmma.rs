//! Attention over a cache with Hopper's warpgroup products, for many queries.

use cubecl::prelude::*;

use super::cached::CachedInputs;
use super::rotate::{RowRotation, rotate_vector};
use super::softmax::{softmax_weight, with_sink};
use super::visibility::Visibility;
use crate::attention::options::{HIDDEN_BELOW, MASKED};
use crate::caps::Target;
use crate::intrinsics::{
    ballot, copy_vector, f16_to_f32, group_max, group_sum, pack_bf16, pack_f16, plane_value,
    prefetch, shared_address, sync_group, sync_planes,
};
use crate::warpgroup::{
    Ring, RingBlueprint, TileLayout, WARPGROUP, arrive, await_products, clear_sums,
    columns_descriptor, commit_products, declare_dots, declare_sums, dot, exchange_words,
    fence_registers, fence_shared, multiply, multiply_shared, rows_descriptor, scale_sums,
    set_registers, store_shared, sum,
};

/// Heads of a cube, which are the rows of all products.
pub(crate) const WARPGROUP_HEADS: u32 = 64;
/// Warpgroups that multiply. Each sums half of the channels.
const GROUPS: u32 = 2;
/// Columns of a stage, and the words with a bit for each.
const COLUMNS: u32 = 64;
const COLUMN_WORDS: u32 = COLUMNS / 32;
/// Vectors of a row in a tile of rows, and bytes of a tile.
const TILE_VECTORS: u32 = 8;
const TILE_BYTES: u32 = 64 * 128;
/// Registers of a unit that copies, and of one that multiplies. All of a cube's together are no
/// more than the 168 for each of 384 units that it starts with.
const REGISTERS: [u32; 2] = [56, 224];

/// How [`cached_wgmma_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedWgmmaBlueprint {
    /// Vectors of 8 channels of a row: 16, 32, 48 or 64.
    pub vectors: u32,
    /// Those in front of queries and results that are not rotated.
    pub unrotated: u32,
    /// Stages of [`COLUMNS`] rows.
    pub stages: u32,
    /// As of [`CachedBlueprint`](super::CachedBlueprint).
    pub causal: bool,
    /// Whether rows are `f16` rather than `bf16`.
    pub f16_input: bool,
    pub target: Target,
}

impl CachedWgmmaBlueprint {
    pub const fn units(self) -> u32 {
        (1 + GROUPS) * WARPGROUP
    }

    /// Tiles of a row.
    const fn tiles(self) -> u32 {
        self.vectors / TILE_VECTORS
    }

    /// Channels of a warpgroup.
    const fn channels(self) -> u32 {
        self.vectors * 8 / GROUPS
    }

    const fn dtype(self) -> &'static str {
        if self.f16_input { "f16" } else { "bf16" }
    }

    const fn stage_bytes(self) -> u32 {
        self.tiles() * TILE_BYTES
    }

    /// Shared memory of a cube: queries, stages, words of their columns, barriers.
    pub const fn shared_bytes(self) -> usize {
        let stage = self.stage_bytes() + COLUMN_WORDS * 4 + 24;
        (self.stage_bytes() + self.stages * stage) as usize
    }
}

/// Computes [`cached_kernel`](super::cached_kernel) for rows of 16-bit floats and many queries.
///
/// `output` is `[batch, count, heads, vectors]`. Queries are rounded to 16 bits once they are
/// normalised and rotated. The weights of columns, which are relative to the largest logit so far,
/// are rounded to 16 bits; the divisor is the sum of the rounded weights.
///
/// Cubes take [`WARPGROUP_HEADS`] heads of one query after another. The first warpgroup copies the
/// rows of its columns to a ring of stages, those of the window and then compressed rows. The
/// others each multiply all of the queries by a stage, and its weights by half of its channels: to
/// exchange weights, they would have to wait for each other in every stage.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn cached_wgmma_kernel<F: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    output: &mut [Vector<F, Const<8>>],
    queries: u32,
    #[comptime] blueprint: CachedWgmmaBlueprint,
    #[define(F, I, P)] _dtypes: [ElemType; 3],
) {
    let target = comptime!(blueprint.target);
    declare_sums(comptime!(blueprint.channels() / 2));
    declare_dots(comptime!(COLUMNS / 2), "dot");
    let words = comptime!(blueprint.stages * blueprint.stage_bytes() / 4);
    let query_tiles = Shared::<[u32]>::new_aligned_slice(
        comptime!(blueprint.stage_bytes() as usize / 4),
        1024usize,
    );
    let row_tiles = Shared::<[u32]>::new_aligned_slice(words as usize, 1024usize);
    let mut hidden =
        Shared::<[u32]>::new_slice(comptime!((blueprint.stages * COLUMN_WORDS) as usize));
    let barriers = Shared::<[u64]>::new_slice(comptime!(3 * blueprint.stages as usize));
    let mut ring = Ring::new(
        &barriers,
        comptime!(RingBlueprint {
            stages: blueprint.stages,
            landings: WARPGROUP + WARPGROUP / 32,
            planes: GROUPS * WARPGROUP / 32,
            fenced: true,
        }),
    );
    let query_tiles = shared_address(&query_tiles);
    let row_tiles = shared_address(&row_tiles);
    let head_tiles = inputs.attention.shape.heads.div_ceil(WARPGROUP_HEADS);
    let tiles = queries * head_tiles;
    let [copying, multiplying] = comptime!(REGISTERS);
    let group = plane_value(UNIT_POS / WARPGROUP, 0u32, target);
    if group == 0 {
        set_registers(copying, false);
        for tile in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
            let source = RowSource::new(inputs, tile / head_tiles, blueprint);
            let next = tile + CUBE_COUNT_X;
            if next < tiles {
                prefetch_queries(inputs, next / head_tiles, next % head_tiles, blueprint);
            }
            for block in 0..source.blocks() {
                source.copy(inputs, block, &mut ring, row_tiles, &mut hidden);
            }
        }
        ring.finish();
    } else {
        set_registers(multiplying, true);
        for tile in range_stepped(CUBE_POS_X, tiles, CUBE_COUNT_X) {
            let token = tile / head_tiles;
            let source = RowSource::new(inputs, token, blueprint);
            let first_head = tile % head_tiles * WARPGROUP_HEADS;
            let own = TileHeads {
                token,
                first_head,
                group: group - 1,
                blueprint,
            };
            // No one reads the queries of the tile before any more.
            sync_planes(0u32, comptime!(GROUPS * WARPGROUP / 32));
            own.store_queries(inputs, &source.visibility, query_tiles);
            fence_shared();
            sync_planes(0u32, comptime!(GROUPS * WARPGROUP / 32));
            own.attend(
                inputs,
                &source,
                &mut ring,
                query_tiles,
                row_tiles,
                &hidden,
                output,
            );
        }
    }
}

/// Brings the queries of a tile of heads to the second-level cache. The first warpgroup calls this.
#[cube]
fn prefetch_queries<F: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    token: u32,
    head_tile: u32,
    #[comptime] blueprint: CachedWgmmaBlueprint,
) {
    let (shape, strides) = (&inputs.attention.shape, &inputs.attention.strides);
    let (sequence, query) = shape.query_of(token);
    let queries = sequence as usize * strides.queries_sequence + query as usize * strides.query;
    // A line of 128 bytes is as much as a row of a tile.
    #[unroll]
    for i in 0..comptime!(WARPGROUP_HEADS * blueprint.tiles() / WARPGROUP) {
        let line = UNIT_POS + comptime!(i * WARPGROUP);
        let head = head_tile * WARPGROUP_HEADS + line % WARPGROUP_HEADS;
        let first = line / WARPGROUP_HEADS * TILE_VECTORS;
        let at = queries + min(head, shape.heads - 1) as usize * strides.head + first as usize;
        prefetch(&inputs.attention.queries[at..at + 1]);
    }
}

/// The columns of a query, and where their rows are.
#[derive(CubeType)]
struct RowSource {
    token: u32,
    visibility: Visibility,
    /// Compressed rows that the query may attend to.
    selected: u32,
    span: u32,
    #[cube(comptime)]
    blueprint: CachedWgmmaBlueprint,
}

#[cube]
impl RowSource {
    fn new<F: Float, I: Int, P: Int>(
        inputs: &CachedInputs<F, I, P, Const<8>>,
        token: u32,
        #[comptime] blueprint: CachedWgmmaBlueprint,
    ) -> RowSource {
        let shape = &inputs.attention.shape;
        let visibility = Visibility::new::<P>(
            &inputs.positions,
            token,
            &inputs.layout,
            shape,
            blueprint.causal,
            blueprint.target,
        );
        let mut selected = shape.selected;
        if inputs.attention.picks.as_ref().is_none() {
            selected = min(selected, visibility.visible_rows);
        }
        RowSource {
            token,
            selected,
            span: shape.span,
            visibility,
            blueprint,
        }
    }

    /// Blocks of [`COLUMNS`] columns.
    fn blocks(&self) -> u32 {
        (self.span + self.selected).div_ceil(COLUMNS)
    }

    /// The row of a column, of the window or compressed; `u32::MAX` if the column is hidden.
    fn row<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        column: u32,
    ) -> u32 {
        let attention = &inputs.attention;
        let mut row = u32::MAX.runtime();
        if column < self.span {
            if self.visibility.is_visible(column, &attention.shape) {
                row = self.visibility.slot(column, &attention.shape);
            }
        } else if column < self.span + self.selected {
            let picked = attention.pick(self.token, column - self.span);
            let visible =
                picked >= I::from_int(0) && picked < I::cast_from(self.visibility.visible_rows);
            if visible {
                row = u32::cast_from(picked);
            }
        }
        row
    }

    /// Copies the rows of a block to the next stage, zeros for hidden columns, and says which those
    /// are. Eight units copy a row, each a chunk of 16 bytes of every tile to the place that the
    /// swizzle gives it.
    fn copy<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        block: u32,
        ring: &mut Ring,
        row_tiles: u32,
        hidden: &mut Shared<[u32]>,
    ) {
        let blueprint = comptime!(self.blueprint);
        let (attention, sequence) = (&inputs.attention, self.visibility.sequence as usize);
        let strides = &attention.strides;
        let unit_rows = comptime!(COLUMNS * TILE_VECTORS / WARPGROUP);
        let first = block * COLUMNS;
        let (own, chunk) = (UNIT_POS / TILE_VECTORS, UNIT_POS % TILE_VECTORS);
        // All places before the wait: reading picks takes as long as it may.
        let mut rows = Array::<u32>::new(unit_rows as usize);
        #[unroll]
        for i in 0..unit_rows {
            let ahead = comptime!(i * WARPGROUP / TILE_VECTORS);
            rows[i as usize] = self.row(inputs, first + own + ahead);
        }
        let word_row = self.row(inputs, first + UNIT_POS % COLUMNS);
        let word = ballot(word_row == u32::MAX, blueprint.target);
        ring.wait_free();
        let stage = row_tiles + ring.slot * comptime!(blueprint.stage_bytes());
        let to = stage + own * 128 + (chunk ^ (own % 8)) * 16;
        #[unroll]
        for i in 0..unit_rows {
            let ahead = comptime!(i * WARPGROUP / TILE_VECTORS);
            let to = to + comptime!(ahead * 128);
            let row = rows[i as usize];
            let visible = row != u32::MAX;
            let row = select(visible, row, 0u32) as usize;
            if first + own + ahead >= self.span {
                let start = sequence * strides.rows_sequence + row * strides.row;
                let from = start as u32 + chunk;
                #[unroll]
                for tile in 0..comptime!(blueprint.tiles()) {
                    let to = to + comptime!(tile * TILE_BYTES);
                    let from = from + comptime!(tile * TILE_VECTORS);
                    copy_vector(to, &attention.rows, from, visible);
                }
            } else {
                let start = sequence * strides.window_sequence + row * strides.window_row;
                let from = start as u32 + chunk;
                #[unroll]
                for tile in 0..comptime!(blueprint.tiles()) {
                    let to = to + comptime!(tile * TILE_BYTES);
                    let from = from + comptime!(tile * TILE_VECTORS);
                    copy_vector(to, &attention.window, from, visible);
                }
            }
        }
        if UNIT_POS < COLUMNS && UNIT_POS.is_multiple_of(32) {
            hidden[(ring.slot * COLUMN_WORDS + UNIT_POS / 32) as usize] = word;
        }
        sync_group(blueprint.target);
        ring.written();
        ring.copied();
    }
}

/// The heads of a cube, as a warpgroup has them: all of them, and half of the channels of results.
#[derive(CubeType)]
struct TileHeads {
    token: u32,
    first_head: u32,
    /// The half.
    group: u32,
    #[cube(comptime)]
    blueprint: CachedWgmmaBlueprint,
}

/// The softmax of one of the two heads of a lane.
#[derive(CubeType, Clone, Copy)]
struct Softmax {
    maximum: f32,
    /// This lane's part of the sum of weights.
    total: f32,
}

#[cube]
impl TileHeads {
    /// Stores the queries of all heads, normalised and rotated. Planes take them in turn.
    fn store_queries<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        visibility: &Visibility,
        query_tiles: u32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let vectors = comptime!(blueprint.vectors);
        let steps = comptime!(vectors.div_ceil(32));
        let planes = comptime!(GROUPS * WARPGROUP / 32);
        let rows = comptime!(WARPGROUP_HEADS / planes);
        let attention = &inputs.attention;
        let (shape, strides) = (&attention.shape, &attention.strides);
        let rotation = RowRotation::new(
            &inputs.positions.table,
            visibility.angle,
            blueprint.unrotated,
        );
        let start = visibility.sequence as usize * strides.queries_sequence
            + visibility.query as usize * strides.query;
        let plane = UNIT_POS / 32 % planes;
        let lane = UNIT_POS % 32;
        // All are read before any is used.
        let mut read = Array::<Vector<F, Const<8>>>::new(comptime!((rows * steps) as usize));
        #[unroll]
        for i in 0..comptime!(rows * steps) {
            let (row, step) = comptime!((i / steps, i % steps));
            let head = min(self.first_head + plane + row * planes, shape.heads - 1) as usize;
            let vector = min(lane + step * 32, vectors - 1);
            read[i as usize] = attention.queries[start + head * strides.head + vector as usize];
        }
        #[unroll]
        for i in 0..rows {
            let mut squares = 0.0f32;
            #[unroll]
            for step in 0..steps {
                let at = comptime!((i * steps + step) as usize);
                let value = Vector::<f32, Const<8>>::cast_from(read[at]);
                let mut sum = 0.0f32;
                #[unroll]
                for e in 0..8usize {
                    sum = fma(value.extract(e), value.extract(e), sum);
                }
                squares += select(lane + step * 32 < vectors, sum, 0.0f32);
            }
            let squares = group_sum(squares, 32u32, blueprint.target);
            let width = comptime!(vectors as f32 * 8.0);
            let factor = 1.0f32 / (squares / width + inputs.epsilon).sqrt();
            #[unroll]
            for step in 0..steps {
                let at = comptime!((i * steps + step) as usize);
                let vector = lane + step * 32;
                let value = Vector::<f32, Const<8>>::cast_from(read[at]);
                let mut value = value * Vector::new(factor);
                if vector >= blueprint.unrotated && vector < vectors {
                    value = rotation.rotate::<Const<8>>(value, vector, false);
                }
                read[at] = Vector::cast_from(value);
            }
        }
        #[unroll]
        for i in 0..comptime!(rows * steps) {
            let row = plane + comptime!(i / steps * planes);
            let vector = lane + comptime!(i % steps * 32);
            let (tile, chunk) = (vector / TILE_VECTORS, vector % TILE_VECTORS);
            let to = query_tiles + tile * TILE_BYTES + row * 128 + (chunk ^ (row % 8)) * 16;
            if vector < vectors {
                store_shared(to, Vector::<u32, Const<4>>::reinterpret(read[i as usize]));
            }
        }
    }

    /// Attends to the stages as they become full, and writes the results.
    fn attend<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        source: &RowSource,
        ring: &mut Ring,
        query_tiles: u32,
        row_tiles: u32,
        hidden: &Shared<[u32]>,
        output: &mut [Vector<F, Const<8>>],
    ) {
        let blueprint = comptime!(self.blueprint);
        let (dtype, target) = comptime!((blueprint.dtype(), blueprint.target));
        let channels = comptime!(blueprint.channels());
        let attention = &inputs.attention;
        let row = UNIT_POS % WARPGROUP / 32 * 16 + UNIT_POS % 32 / 4;
        let last = attention.shape.heads - 1;
        let low_sink = attention.sinks[min(self.first_head + row, last) as usize];
        let high_sink = attention.sinks[min(self.first_head + row + 8, last) as usize];
        let mut low = Softmax {
            maximum: max(low_sink, HIDDEN_BELOW),
            total: 0.0f32,
        };
        let mut high = Softmax {
            maximum: max(high_sink, HIDDEN_BELOW),
            total: 0.0f32,
        };
        let queries = rows_descriptor(query_tiles);
        let own_tile = self.group * comptime!(blueprint.tiles() / GROUPS * TILE_BYTES);
        clear_sums(comptime!(channels / 2));
        for _ in 0..source.blocks() {
            ring.wait_full();
            let stage = row_tiles + ring.slot * comptime!(blueprint.stage_bytes());
            let rows = rows_descriptor(stage);
            fence_registers();
            #[unroll]
            for step in 0..comptime!(blueprint.vectors / 2) {
                let ahead = comptime!((step / 4 * TILE_BYTES + step % 4 * 32) / 16);
                let adds = comptime!((step > 0) as u32).runtime();
                multiply_shared(queries + ahead, rows + ahead, adds, COLUMNS, "dot", dtype);
            }
            commit_products();
            let first_word = hidden[(ring.slot * COLUMN_WORDS) as usize];
            let second_word = hidden[(ring.slot * COLUMN_WORDS + 1) as usize];
            await_products(0u32);

            let mut fragments = Array::<u32>::new(comptime!(COLUMNS as usize / 4));
            let low_factor = low.add(
                first_word,
                second_word,
                &mut fragments,
                attention.scale,
                0usize,
                blueprint,
            );
            let high_factor = high.add(
                first_word,
                second_word,
                &mut fragments,
                attention.scale,
                1usize,
                blueprint,
            );
            if ballot(low_factor != 1.0f32 || high_factor != 1.0f32, target) != 0 {
                scale_sums(low_factor, high_factor, channels);
            }

            let values = columns_descriptor(stage + own_tile, TILE_BYTES);
            fence_registers();
            #[unroll]
            for step in 0..comptime!(COLUMNS / 16) {
                multiply(
                    &fragments,
                    comptime!(step as usize),
                    values + comptime!(step * 16 * 128 / 16),
                    1u32,
                    channels,
                    comptime!(TileLayout::Columns),
                    dtype,
                );
            }
            commit_products();
            await_products(0u32);
            arrive(ring.free());
            ring.next();
        }
        let low_total = group_sum(low.total, 4u32, target);
        let high_total = group_sum(high.total, 4u32, target);
        let low_divisor = with_sink(low_total, low_sink, low.maximum, target);
        let high_divisor = with_sink(high_total, high_sink, high.maximum, target);
        let angle = source.visibility.angle;
        self.write(inputs, angle, row, 1.0f32 / low_divisor, 0u32, output);
        self.write(inputs, angle, row + 8, 1.0f32 / high_divisor, 1u32, output);
    }

    /// Writes the results of a row of heads, the lane's first or second one, rotated back.
    fn write<F: Float, I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        angle: usize,
        row: u32,
        factor: f32,
        #[comptime] which: u32,
        output: &mut [Vector<F, Const<8>>],
    ) {
        let blueprint = comptime!(self.blueprint);
        let table = &inputs.positions.table;
        let heads = inputs.attention.shape.heads;
        let head = self.first_head + row;
        let quarter = UNIT_POS % 4;
        let first_vector = self.group * comptime!(blueprint.channels() / 8);
        let to = (self.token as usize * heads as usize + head as usize)
            * comptime!(blueprint.vectors as usize);
        #[unroll]
        for part in 0..comptime!(blueprint.channels() / 32) {
            let mut words = Array::<u32>::new(4usize);
            #[unroll]
            for i in 0..4u32 {
                let tile = comptime!(part * 4 + i);
                let first = comptime!(tile * 4 + which * 2);
                let even = sum(first) * factor;
                let odd = sum(comptime!(first + 1)) * factor;
                let vector = first_vector + tile;
                let mut pair = Vector::<f32, Const<2>>::new(even);
                pair.insert(1usize, odd);
                if vector >= blueprint.unrotated {
                    let ahead = (vector - blueprint.unrotated) * 4 + quarter;
                    let first = angle + ahead as usize;
                    pair = rotate_vector::<Const<2>>(pair, table, first, true);
                }
                words[i as usize] = pack(pair.extract(0usize), pair.extract(1usize), blueprint);
            }
            let vector = exchange_words(&mut words, comptime!(blueprint.target));
            if head < heads {
                let at = to + (first_vector + comptime!(part * 4) + quarter) as usize;
                output[at] = Vector::reinterpret(vector);
            }
        }
    }
}

#[cube]
impl Softmax {
    /// Adds the logits of a stage, those of the lane's first or second head. Stores their weights
    /// as they enter the product with the values. Returns the factor for what was summed before.
    fn add(
        &mut self,
        first_word: u32,
        second_word: u32,
        fragments: &mut Array<u32>,
        scale: f32,
        #[comptime] which: usize,
        #[comptime] blueprint: CachedWgmmaBlueprint,
    ) -> f32 {
        let target = comptime!(blueprint.target);
        let quarter = UNIT_POS % 4 * 2;
        let mut logits = Array::<f32>::new(comptime!(COLUMNS as usize / 4));
        let mut maximum = self.maximum;
        #[unroll]
        for i in 0..comptime!(COLUMNS / 4) {
            let (tile, column) = comptime!((i / 2, i % 2));
            let word = if comptime!(tile < 4) {
                first_word
            } else {
                second_word
            };
            let bit = quarter + comptime!(tile % 4 * 8 + column);
            let logit = dot(comptime!(tile * 4 + which as u32 * 2 + column)) * scale;
            let logit = select((word >> bit) & 1 != 0, MASKED, logit);
            logits[i as usize] = logit;
            maximum = max(maximum, logit);
        }
        let maximum = group_max(maximum, 4u32, target);
        let factor = softmax_weight(self.maximum - maximum, target);
        let mut total = 0.0f32;
        #[unroll]
        for tile in 0..comptime!(COLUMNS as usize / 8) {
            let even = softmax_weight(logits[comptime!(2 * tile)] - maximum, target);
            let odd = softmax_weight(logits[comptime!(2 * tile + 1)] - maximum, target);
            let word = pack(even, odd, blueprint);
            total += unpacked(word, false, blueprint) + unpacked(word, true, blueprint);
            fragments[comptime!(2 * tile + which)] = word;
        }
        self.total = self.total * factor + total;
        self.maximum = maximum;
        factor
    }
}

/// Rounds two values to 16 bits.
#[cube]
fn pack(low: f32, high: f32, #[comptime] blueprint: CachedWgmmaBlueprint) -> u32 {
    if comptime!(blueprint.f16_input) {
        pack_f16(low, high)
    } else {
        pack_bf16(low, high)
    }
}

/// One of two such values.
#[cube]
fn unpacked(
    word: u32,
    #[comptime] upper: bool,
    #[comptime] blueprint: CachedWgmmaBlueprint,
) -> f32 {
    if comptime!(blueprint.f16_input) {
        let bits = if comptime!(upper) {
            word >> 16
        } else {
            word & 0xffffu32
        };
        f16_to_f32(bits)
    } else {
        f32::reinterpret(if comptime!(upper) {
            word & 0xffff_0000u32
        } else {
            word << 16
        })
    }
}
