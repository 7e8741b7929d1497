//! Attention over a cache on tensor cores.

use cubecl::prelude::*;

use super::angles::UnitAngles;
use super::cached::{CachedInputs, CachedTilesBlueprint};
use super::cached_rows::{CachedRows, lane_pick};
use super::head_tiles::{
    LANES, PlaneSoftmax, SLICE_VECTORS, add_rows, head_of_row, lane_sums, lane_vector,
    multiply_queries, plane_row, rescale, store_queries,
};
use super::heads::HeadInputs;
use super::inputs::{AttentionShape, KV_GROUP, PartialOutput};
use super::rotate::RowRotation;
use super::softmax::{softmax_weight, with_sink};
use crate::intrinsics::{
    await_copies, cluster_address, leave_cluster, read_cluster, read_cluster_pair, read_ordered,
    shared_address, sync_cluster,
};

/// Computes [`cached_kernel`](super::cached_kernel) for rows of 16-bit floats. A cube has one tile
/// of heads of a query, or two. A few cubes share the query's columns: in turn, each has a tile of
/// 16 columns of the window, padded to a whole group, and then of the compressed rows.
///
/// As many rows as fit are copied to shared memory at a time, the first of them while the queries
/// are normalised, rotated and rounded to 16 bits. Then they go through [three phases](HeadTiles).
///
/// So nothing but the grid depends on the number of queries, and hidden rows at the end change no
/// bit.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn cached_tiles_kernel<F: Float, O: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    output: &mut PartialOutput<O, Const<8>>,
    #[comptime] blueprint: CachedTilesBlueprint,
    #[define(F, O, I, P)] _dtypes: [ElemType; 4],
) {
    let mut cube = TilesCube::<F>::new(&inputs.attention.shape, blueprint);
    cube.attend::<I, P>(inputs);
    cube.write_partials::<O>(&inputs.attention.shape, output);
}

/// [`cached_tiles_kernel`] where the cubes of a query are a cluster, and combine what they have in
/// shared memory.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    cluster_dim = CubeDim::new_3d(1, 1, blueprint.kv_cubes)
)]
pub(crate) fn cached_cluster_kernel<F: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    output: &mut [Vector<F, Const<2>>],
    #[comptime] blueprint: CachedTilesBlueprint,
    #[define(F, I, P)] _dtypes: [ElemType; 3],
) {
    let mut cube = TilesCube::<F>::new(&inputs.attention.shape, blueprint);
    cube.attend::<I, P>(inputs);
    cube.combine(&inputs.attention.shape, output);
}

/// [`cached_tiles_kernel`] for many queries. A cube has up to four tiles of heads of a query and
/// goes through all of its columns, block by block: while one is processed, the rows of the next
/// are copied. `output` is `[batch, count, heads, vectors]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn cached_whole_kernel<F: Float, I: Int, P: Int>(
    inputs: &CachedInputs<F, I, P, Const<8>>,
    output: &mut [Vector<F, Const<8>>],
    #[comptime] blueprint: CachedTilesBlueprint,
    #[define(F, I, P)] _dtypes: [ElemType; 3],
) {
    let mut cube = TilesCube::<F>::new(&inputs.attention.shape, blueprint);
    let angle = cube.attend::<I, P>(inputs);
    cube.write::<I, P>(inputs, angle, output);
}

/// What a cube has.
#[derive(CubeType)]
struct TilesCube<F: Float> {
    /// The query, among those of all sequences, and the first of the cube's heads.
    token: u32,
    first_head: u32,
    queries: Shared<[Vector<F, Const<8>>]>,
    /// The rows of columns, and in the end the sums of a cube of a cluster.
    rows: Shared<[Vector<F, Const<8>>]>,
    logits: Shared<[f32]>,
    weights: Shared<[u32]>,
    biases: Shared<[f32]>,
    factors: Shared<[f32]>,
    /// The largest logits of heads, and their sums of exponentials relative to them.
    softmax_stats: Shared<[f32]>,
    /// The lane's part of the weighted sums.
    sums: Array<Vector<f32, Const<4>>>,
    /// The cube's columns.
    columns: u32,
    /// Of a cluster: the sink of the head of this unit's results, and the angles of their pairs.
    sink: f32,
    angles: UnitAngles<Const<2>>,
    #[cube(comptime)]
    blueprint: CachedTilesBlueprint,
}

#[cube]
impl<F: Float> TilesCube<F> {
    fn new(shape: &AttentionShape, #[comptime] blueprint: CachedTilesBlueprint) -> TilesCube<F> {
        let CachedTilesBlueprint { tiles, stages, .. } = comptime!(blueprint);
        let heads = comptime!(tiles.heads() as usize);
        let mut token = CUBE_POS_Y;
        let mut head_cube = CUBE_POS_X;
        if comptime!(blueprint.whole) {
            // The cubes of a query are neighbours: they read the same rows.
            let head_cubes = shape.heads.div_ceil(tiles.heads());
            token = CUBE_POS_X / head_cubes;
            head_cube = CUBE_POS_X % head_cubes;
        }
        TilesCube::<F> {
            token,
            first_head: head_cube * comptime!(tiles.heads()),
            queries: Shared::new_slice(comptime!(tiles.query_vectors() as usize)),
            rows: Shared::new_slice(comptime!((stages * tiles.block_vectors()) as usize)),
            logits: Shared::new_slice(comptime!(tiles.logit_words() as usize)),
            weights: Shared::new_slice(comptime!(tiles.weight_words() as usize)),
            biases: Shared::new_slice(comptime!((stages * tiles.columns) as usize)),
            factors: Shared::new_slice(heads),
            softmax_stats: Shared::new_slice(comptime!(2 * heads)),
            sums: Array::new(comptime!(8 * tiles.head_tiles as usize)),
            columns: 0u32.runtime(),
            sink: 0.0f32.runtime(),
            angles: UnitAngles::new(blueprint.result_steps()),
            blueprint,
        }
    }

    /// Attends to the cube's columns, and returns the offset of the query's angles. Every unit of
    /// the cube must call this.
    // A condition on comptime values gets an `if` of its own.
    #[allow(clippy::collapsible_if)]
    fn attend<I: Int, P: Int>(&mut self, inputs: &CachedInputs<F, I, P, Const<8>>) -> usize {
        let CachedTilesBlueprint {
            cached,
            tiles,
            stages,
            whole,
            ..
        } = comptime!(self.blueprint);
        let (token, first_head) = (self.token, self.first_head);
        let sink = comptime!(cached.sink);
        let attention = &inputs.attention;
        let shape = &attention.shape;
        let first_compressed = (shape.span + comptime!(KV_GROUP - 1)) / KV_GROUP * KV_GROUP;
        let mut pick = lane_pick::<F, I>(attention, token, 0u32, first_compressed, self.blueprint);
        let (sequence, query) = shape.query_of(token);
        let mut head_inputs = Sequence::<HeadInputs<F, Const<8>>>::new();
        #[unroll]
        for tile in 0..tiles.head_tiles {
            let head = first_head + head_of_row(plane_row(comptime!(2 * tile)));
            head_inputs.push(HeadInputs::<F, Const<8>>::read::<I>(
                attention, sequence, query, head, sink,
            ));
        }
        let visibility = inputs.visibility(token, cached);
        let (table, angle) = (&inputs.positions.table, visibility.angle);
        let mut angles = UnitAngles::<Const<8>>::new(cached.row_steps());
        if comptime!(!cached.masked) {
            angles.request(table, angle, UNIT_POS_X, shape.vectors);
        }
        if comptime!(self.blueprint.in_cluster) {
            let blueprint = comptime!(self.blueprint);
            let head = min(first_head + result_row(blueprint), shape.heads - 1);
            self.sink = read_ordered(&attention.sinks, head as usize, tiles.target);
            let unit = UNIT_POS % comptime!(blueprint.head_units());
            let pairs = comptime!(blueprint.head_pairs()).runtime();
            self.angles.request(table, angle, unit, pairs);
        }
        let mut selected = shape.selected;
        if attention.picks.as_ref().is_none() {
            selected = min(selected, visibility.visible_rows);
        }
        let end = first_compressed + selected;
        let source =
            CachedRows::<F, I, P>::new(inputs, &visibility, first_compressed, end, self.blueprint);
        self.columns = source.cube_columns();
        if comptime!(whole) {
            // Whole blocks, so that how many columns one has is known to the compiler.
            let blocks = (self.columns + comptime!(tiles.columns - 1)) / tiles.columns;
            self.columns = blocks * tiles.columns;
        }
        let (rows, biases) = (&mut self.rows, &mut self.biases);
        source.copy(0u32, self.columns, pick, 0u32, rows, biases);
        if comptime!(whole) {
            // Picks are read long before they are needed.
            pick = source.pick(token, comptime!(tiles.columns).runtime());
        }

        let mut softmax = PlaneSoftmax::new(tiles);
        #[unroll]
        for tile in 0..tiles.head_tiles {
            let mut own = head_inputs.index(tile as usize).heads(shape.vectors);
            if comptime!(!cached.masked) {
                own.normalize_and_rotate(&angles, shape.vectors, inputs.epsilon);
            }
            #[unroll]
            for step in 0..sink.steps {
                let vector = UNIT_POS_X + comptime!(step * LANES);
                if vector < tiles.vectors {
                    let low = Vector::cast_from(own.queries[step as usize]);
                    let high =
                        Vector::cast_from(own.queries[comptime!((sink.steps + step) as usize)]);
                    let row = plane_row(comptime!(2 * tile));
                    store_queries(&mut self.queries, row, vector, low, high, tiles);
                }
            }
            #[unroll]
            for h in 0..2usize {
                softmax.maxima[comptime!(2 * tile as usize + h)] = own.maxima[h];
            }
        }

        #[unroll]
        for i in 0..comptime!(8 * tiles.head_tiles as usize) {
            self.sums[i] = Vector::new(0.0f32);
        }
        let mut first = 0u32;
        let mut stage = 0u32;
        while first < self.columns {
            let mut columns = comptime!(tiles.columns).runtime();
            if comptime!(!whole) {
                columns = min(self.columns - first, columns);
            }
            await_copies(0u32);
            sync_cube();
            let from = stage;
            if comptime!(stages > 1) {
                let next = first + tiles.columns;
                stage = comptime!(tiles.columns) - stage;
                if next < self.columns {
                    let (rows, biases) = (&mut self.rows, &mut self.biases);
                    source.copy(next, self.columns, pick, stage, rows, biases);
                    pick = source.pick(token, next + tiles.columns);
                }
            }
            multiply_queries(
                &self.queries,
                &self.rows,
                &self.biases,
                &mut self.logits,
                from,
                columns,
                attention.scale,
                tiles,
            );
            sync_cube();
            let (logits, factors) = (&self.logits, &mut self.factors);
            let at_once = comptime!(if whole { 1u32 } else { 2u32 });
            softmax.weigh::<F>(logits, &mut self.weights, factors, columns, at_once);
            sync_cube();
            if UNIT_POS_Y < comptime!(tiles.vectors / SLICE_VECTORS) {
                if first > 0 {
                    rescale(&mut self.sums, &self.factors, tiles);
                }
                let sums = &mut self.sums;
                add_rows(&self.rows, &self.weights, sums, from, columns, tiles);
            }
            first += tiles.columns;
            if comptime!(stages == 1) {
                if first < self.columns {
                    sync_cube();
                    if comptime!(!whole) {
                        pick = source.pick(token, first);
                    }
                    let (rows, biases) = (&mut self.rows, &mut self.biases);
                    source.copy(first, self.columns, pick, 0u32, rows, biases);
                    if comptime!(whole) {
                        pick = source.pick(token, first + tiles.columns);
                    }
                }
            }
        }
        softmax.add_lanes();
        if UNIT_POS_X == 0 {
            #[unroll]
            for h in 0..comptime!(tiles.plane_heads()) {
                let row = head_of_row(plane_row(h));
                let total_at = (row + comptime!(tiles.heads())) as usize;
                self.softmax_stats[row as usize] = softmax.maxima[h as usize];
                self.softmax_stats[total_at] = softmax.totals[h as usize];
            }
        }
        sync_cube();
        angle
    }

    /// Writes what the cube has for the kernel that combines KV splits.
    fn write_partials<O: Float>(
        &self,
        shape: &AttentionShape,
        output: &mut PartialOutput<O, Const<8>>,
    ) {
        let tiles = comptime!(self.blueprint.tiles);
        let all_heads = CUBE_COUNT_Y * shape.heads;
        let first_head = self.first_head;
        let first = CUBE_POS_Z * all_heads + self.token * shape.heads + first_head;
        if UNIT_POS < comptime!(tiles.heads()) && first_head + UNIT_POS < shape.heads {
            let own = first + UNIT_POS;
            output.softmax_stats[own as usize] = self.softmax_stats[UNIT_POS as usize];
            output.softmax_stats[(CUBE_COUNT_Z * all_heads + own) as usize] =
                self.softmax_stats[(UNIT_POS + comptime!(tiles.heads())) as usize];
        }
        // Nothing reads the output of a KV split without a visible column.
        if UNIT_POS_Y < comptime!(tiles.vectors / SLICE_VECTORS) && self.columns > 0 {
            #[unroll]
            for half in 0..comptime!(2 * tiles.head_tiles) {
                let row = head_of_row(UNIT_POS_X / 4 + comptime!(8 * half));
                if first_head + row < shape.heads {
                    #[unroll]
                    for part in 0..2u32 {
                        let at = (first + row) as usize * tiles.vectors as usize
                            + lane_vector(part) as usize;
                        output.sums[at] = Vector::cast_from(lane_sums(&self.sums, half, part));
                    }
                }
            }
        }
    }

    /// Writes the results of a cube that has all columns: divided, rotated back and rounded.
    // A condition on comptime values gets an `if` of its own.
    #[allow(clippy::collapsible_if)]
    fn write<I: Int, P: Int>(
        &self,
        inputs: &CachedInputs<F, I, P, Const<8>>,
        angle: usize,
        output: &mut [Vector<F, Const<8>>],
    ) {
        let CachedTilesBlueprint { cached, tiles, .. } = comptime!(self.blueprint);
        let heads = inputs.attention.shape.heads;
        if UNIT_POS_Y < comptime!(tiles.vectors / SLICE_VECTORS) {
            #[unroll]
            for part in 0..2u32 {
                let vector = lane_vector(part);
                let rotation = RowRotation::new(&inputs.positions.table, angle, cached.unrotated);
                #[unroll]
                for half in 0..comptime!(2 * tiles.head_tiles) {
                    let row = head_of_row(UNIT_POS_X / 4 + comptime!(8 * half));
                    let head = self.first_head + row;
                    if head < heads {
                        let total_at = (row + comptime!(tiles.heads())) as usize;
                        let divisor = with_sink(
                            self.softmax_stats[total_at],
                            inputs.attention.sinks[head as usize],
                            self.softmax_stats[row as usize],
                            tiles.target,
                        );
                        let mut result = lane_sums(&self.sums, half, part) / Vector::new(divisor);
                        if comptime!(!cached.masked) {
                            if vector >= cached.unrotated {
                                result = rotation.rotate::<Const<8>>(result, vector, true);
                            }
                        }
                        let to = (self.token as usize * heads as usize + head as usize)
                            * comptime!(tiles.vectors as usize);
                        output[to + vector as usize] = Vector::cast_from(result);
                    }
                }
            }
        }
    }

    /// Combines what the cubes of a cluster have, each an equal part of the channels, in the order
    /// of cubes. Results are divided, rotated back and rounded. Every unit of the cube must call
    /// this.
    fn combine(&mut self, shape: &AttentionShape, output: &mut [Vector<F, Const<2>>]) {
        let blueprint = comptime!(self.blueprint);
        let CachedTilesBlueprint {
            tiles, kv_cubes, ..
        } = comptime!(blueprint);
        if UNIT_POS_Y < comptime!(tiles.vectors / SLICE_VECTORS) {
            // Eight lanes write to all banks at once: every second lane the upper half of a vector
            // first, and every second head to where [`sum_offset`] says.
            let upper_first = UNIT_POS_X & 2 != 0;
            #[unroll]
            for half in 0..comptime!(2 * tiles.head_tiles) {
                let row = head_of_row(UNIT_POS_X / 4 + comptime!(8 * half));
                #[unroll]
                for part in 0..2u32 {
                    let to = (row * tiles.vectors + lane_vector(part)) * 2;
                    let to = to ^ sum_offset(row);
                    let sum = lane_sums(&self.sums, half, part);
                    #[unroll]
                    for i in 0..2u32 {
                        let mut own = Vector::<f32, Const<4>>::new(0.0f32);
                        #[unroll]
                        for j in 0..4usize {
                            let at = comptime!(4 * i as usize + j);
                            let other = sum.extract(comptime!(at ^ 4));
                            own.insert(j, select(upper_first, other, sum.extract(at)));
                        }
                        let at = to + select(upper_first, comptime!(1 - i), i);
                        self.rows[at as usize] = Vector::<F, Const<8>>::reinterpret(own);
                    }
                }
            }
        }
        sync_cluster();
        let head_pairs = comptime!(blueprint.head_pairs());
        let head_units = comptime!(blueprint.head_units());
        let count = comptime!(blueprint.unit_pairs());
        let unit = UNIT_POS % head_units;
        let row = result_row(blueprint);
        let head = self.first_head + row;
        let stats = shared_address(&self.softmax_stats[0..1]) + row * 4;
        // In pairs, of which a vector has two.
        let first_pair = row * head_pairs + (unit ^ (sum_offset(row) * 2));
        let sums = shared_address(&self.rows[0..1]) + first_pair * 8;
        let mut maxima = Array::<f32>::new(kv_cubes as usize);
        let mut totals = Array::<f32>::new(kv_cubes as usize);
        let mut partials =
            Array::<Vector<f32, Const<2>>>::new(comptime!((count * kv_cubes) as usize));
        #[unroll]
        for cube in 0..kv_cubes {
            let stats = cluster_address(stats, cube);
            maxima[cube as usize] = read_cluster(stats, 0u32);
            totals[cube as usize] = read_cluster(stats, comptime!(4 * tiles.heads()));
            let sums = cluster_address(sums, cube);
            #[unroll]
            for i in 0..count {
                let own = comptime!((i * kv_cubes + cube) as usize);
                partials[own] = Vector::new(0.0f32);
                if comptime!((i + 1) * head_units <= head_pairs)
                    || unit + comptime!(i * head_units) < head_pairs
                {
                    partials[own] = read_cluster_pair(sums, comptime!(8 * i * head_units));
                }
            }
        }
        let mut maximum = maxima[0];
        #[unroll]
        for cube in 1..comptime!(kv_cubes as usize) {
            maximum = max(maximum, maxima[cube]);
        }
        let mut total = 0.0f32;
        #[unroll]
        for cube in 0..comptime!(kv_cubes as usize) {
            let weight = softmax_weight(maxima[cube] - maximum, tiles.target);
            total = fma(totals[cube], weight, total);
            maxima[cube] = weight;
        }
        let factor = 1.0f32 / with_sink(total, self.sink, maximum, tiles.target);
        #[unroll]
        for i in 0..count {
            let mut result = Vector::<f32, Const<2>>::new(0.0f32);
            #[unroll]
            for cube in 0..kv_cubes {
                let partial = partials[comptime!((i * kv_cubes + cube) as usize)];
                result += partial * Vector::new(maxima[cube as usize]);
            }
            result *= Vector::new(factor);
            let pair = unit + comptime!(i * head_units);
            let pairs = head_pairs.runtime();
            result = self.angles.rotate(result, pair, pairs, i, true);
            if head < shape.heads && pair < head_pairs {
                let to = (self.token * shape.heads + head) as usize * head_pairs as usize;
                output[to + pair as usize] = Vector::cast_from(result);
            }
        }
        leave_cluster();
    }
}

/// What the numbers of the vectors of four sums of a head are combined with (`xor`) in the shared
/// memory of a cube of a cluster.
#[cube]
fn sum_offset(row: u32) -> u32 {
    row & 2
}

/// The head of this unit's results, of those of the cluster.
#[cube]
fn result_row(#[comptime] blueprint: CachedTilesBlueprint) -> u32 {
    CUBE_POS_Z * comptime!(blueprint.result_heads()) + UNIT_POS / comptime!(blueprint.head_units())
}
