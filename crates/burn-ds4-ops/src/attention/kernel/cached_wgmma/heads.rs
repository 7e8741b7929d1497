//! What the other warpgroups do: preparing queries, and attending.

use cubecl::prelude::*;

use super::blueprint::{
    COLUMN_WORDS, COLUMNS, CachedWgmmaBlueprint, GROUPS, TILE_BYTES, TILE_VECTORS, WARPGROUP_HEADS,
};
use super::rows::RowSource;
use crate::attention::kernel::cached::CachedInputs;
use crate::attention::kernel::rotate::{RowRotation, rotate_vector};
use crate::attention::kernel::softmax::{softmax_weight, with_sink};
use crate::attention::kernel::visibility::Visibility;
use crate::attention::options::{HIDDEN_BELOW, MASKED};
use crate::intrinsics::{ballot, f16_to_f32, group_max, group_sum, pack_bf16, pack_f16};
use crate::warpgroup::{
    Ring, TileLayout, WARPGROUP, arrive, await_products, clear_sums, columns_descriptor,
    commit_products, dot, exchange_words, fence_registers, multiply, multiply_shared,
    rows_descriptor, scale_sums, store_shared, sum,
};

/// The heads of a cube, as a warpgroup has them: all of them, and half of the channels of results.
#[derive(CubeType)]
pub(super) struct TileHeads {
    pub token: u32,
    pub first_head: u32,
    /// The half.
    pub group: u32,
    #[cube(comptime)]
    pub blueprint: CachedWgmmaBlueprint,
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
    pub(super) fn store_queries<F: Float, I: Int, P: Int>(
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
    pub(super) fn attend<F: Float, I: Int, P: Int>(
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
