use cubecl::prelude::*;

use super::blueprint::StreamBlueprint;
use super::pipeline::{Stream, new_ring};
use super::place::{XColumns, x_place};
use super::rows::{read_rows, store_rows};
use crate::comptime_option::ComptimeOption;
use crate::gemm::kernel::epilogue::{RowSums, add_terms, lane_rows};
use crate::gemm::kernel::groups::{Groups, PairSizes, SortedProblems};
use crate::gemm::kernel::input::padded_columns;
use crate::gemm::kernel::weights::{K_STEPS, MatrixStack, WeightReader};
use crate::intrinsics::modulo;

/// Rows of `x` and the matrices of a stack that they are multiplied by.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SumProblem {
    /// A row for each pair and term, in the order of
    /// [`permuted_column`](crate::gemm::kernel::input::permuted_column).
    pub x: Box<[Vector<u32, Const<4>>]>,
    pub matrices: MatrixStack<Vector<u32, Const<4>>>,
}

/// Multiplies the gated output of [`stream_kernel`](super::stream_kernel) for every pair by the
/// pair's matrix, and sums the pairs of a token in the order of slots. With the blueprint of a
/// shared expert, it also multiplies that one's output for every token by its matrix, which comes
/// last in the sum.
///
/// - `ids`: the matrix of every pair
/// - `output`: `[tokens, rows]`
///
/// The shared expert is multiplied first, because it is known before the pairs are grouped: its
/// first weights are fetched meanwhile, and those of the first pairs while it is multiplied.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn slot_sum_kernel<I: Int, Y: Float>(
    ids: &ComptimeOption<Box<[I]>>,
    experts: &SumProblem,
    shared: &SumProblem,
    output: &mut [Y],
    sizes: PairSizes,
    #[comptime] blueprint: StreamBlueprint,
    #[comptime] shared_expert: Option<StreamBlueprint>,
    #[define(I, Y)] _dtypes: [ElemType; 2],
) {
    let PairSizes { tokens, slots } = sizes;
    let hidden = &experts.x[..];
    let stack = &experts.matrices.layout;
    let shared_hidden = &shared.x[..];
    let shared_stack = &shared.matrices.layout;
    let matrices = stack.count;
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let plane = modulo(UNIT_POS_Y, blueprint.planes);
    let concurrent_tile = UNIT_POS_Y / blueprint.planes;
    let terms = comptime!(blueprint.input.terms);
    let k_block = comptime!(blueprint.input.format.k_block());
    let rows = stack.rows;
    let first_row = CUBE_POS_X * comptime!(16 * blueprint.partial_tiles);
    let pairs = tokens * slots;
    let x_in_shared = comptime!(blueprint.x_rows > 0);
    let vec8s = (padded_columns(stack.columns, blueprint.input.format) / 8) as usize;
    let ring = new_ring(comptime!(blueprint.ring_vectors()));
    let weights = WeightReader::new(&experts.matrices, blueprint.reader());
    let mut stream = Stream::new(weights, quarter, ring.clone(), blueprint);

    // Without a shared expert, nothing of the following is used.
    let shared_blueprint = comptime!(shared_expert.unwrap_or(blueprint));
    let shared_plane = modulo(UNIT_POS_Y, shared_blueprint.planes);
    let shared_concurrent_tile = UNIT_POS_Y / shared_blueprint.planes;
    let shared_k_block = comptime!(shared_blueprint.input.format.k_block());
    let shared_vec8s =
        (padded_columns(shared_stack.columns, shared_blueprint.input.format) / 8) as usize;
    let shared_weights = WeightReader::new(&shared.matrices, shared_blueprint.reader());
    let mut shared_stream = Stream::new(shared_weights, quarter, ring, shared_blueprint);

    // Read the ids first, which most of the work waits for; then `x`; then weights.
    let expert = Groups::read::<I>(ids, sizes, matrices, blueprint.groups());
    let own_vec8s = comptime!(blueprint.unit_vec8s());
    let mut fetched = Array::<Vector<u32, Const<4>>>::new(comptime!((own_vec8s + 1) as usize));
    read_rows(
        hidden,
        pairs * terms,
        vec8s,
        &mut fetched,
        own_vec8s,
        blueprint,
    );
    let shared_own_vec8s = comptime!(shared_expert.map_or(0, StreamBlueprint::unit_vec8s));
    let mut shared_fetched =
        Array::<Vector<u32, Const<4>>>::new(comptime!((shared_own_vec8s + 1) as usize));
    let shared_rows = tokens * terms;
    read_rows(
        shared_hidden,
        shared_rows,
        shared_vec8s,
        &mut shared_fetched,
        shared_own_vec8s,
        shared_blueprint,
    );
    let shared_pitch = if comptime!(x_in_shared) {
        comptime!(shared_blueprint.row_pitch() as usize).runtime()
    } else {
        shared_vec8s
    };
    let shared_row = first_row + shared_concurrent_tile * 16 + row;
    // There are at least as many groups of planes as tiles, so a group has one tile at most.
    let mut shared_k_blocks = 0u32;
    if comptime!(shared_expert.is_some()) {
        let passes = (shared_rows + 7) / 8;
        shared_k_blocks = select(
            shared_concurrent_tile < blueprint.partial_tiles,
            passes * comptime!(shared_blueprint.plane_k_blocks),
            0u32,
        );
        if shared_k_blocks > 0 {
            let x_row =
                (min(row / terms, tokens - 1) * terms + modulo(row, terms)) as usize * shared_pitch;
            let (high, first) = (shared_row + 8, shared_plane * shared_k_block);
            shared_stream.seek(0u32, shared_row, high, first, x_row);
            if comptime!(!x_in_shared) {
                shared_stream.prefetch_x(shared_hidden, 0u32);
            }
            shared_stream.fetch();
        }
    }
    let unsorted = ComptimeOption::<&SortedProblems>::new_None();
    let groups = Groups::of(expert, unsorted, sizes, matrices, blueprint.groups());
    // Partials of every pair and plane, 16 rows for each tile.
    let tile_sums = comptime!(blueprint.pairs * blueprint.planes * 16);
    let mut partials =
        Shared::<[f32]>::new_slice(comptime!((tile_sums * blueprint.partial_tiles) as usize));
    let shared_tile_sums = comptime!(shared_blueprint.pairs * shared_blueprint.planes * 16);
    let mut shared_partials = Shared::<[f32]>::new_slice(comptime!(match shared_expert {
        Some(_) => (shared_tile_sums * blueprint.partial_tiles) as usize,
        None => 1,
    }));
    let mut x_rows = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (blueprint.x_rows * blueprint.row_pitch()).max(1) as usize
    ));
    let mut shared_x_rows =
        Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(match shared_own_vec8s {
            0 => 1,
            _ => (shared_blueprint.x_rows * shared_blueprint.row_pitch()) as usize,
        }));
    let pitch = if comptime!(x_in_shared) {
        comptime!(blueprint.row_pitch() as usize).runtime()
    } else {
        vec8s
    };
    let mut codes = Array::<u32>::new(comptime!(2 * K_STEPS as usize));

    // The groups of planes multiply all tiles of a group of pairs, then those of the next one.
    let end = groups.count() * blueprint.partial_tiles;
    let mut at = concurrent_tile;
    if comptime!(blueprint.planes * blueprint.concurrent_tiles < blueprint.cube_planes) {
        at = select(
            concurrent_tile < blueprint.concurrent_tiles,
            concurrent_tile,
            end,
        );
    }
    // Where `x` comes from memory, each cube begins with another group, so that not all of them
    // read the same rows at the same time.
    let mut turn = 0u32;
    if comptime!(!x_in_shared) {
        turn = CUBE_POS_X * groups.count() / CUBE_COUNT_X;
    }
    let mut start = 0u32;
    let mut count = 0u32;
    if at < end {
        let group = turned(at / blueprint.partial_tiles, turn, &groups, blueprint);
        start = groups.start(group);
        count = groups.size(group, start);
        let (lane_row, k_step) = x_place(is_spread(count, blueprint));
        let pair = groups.pair(start, min(lane_row / terms, count - 1));
        let x_row = (pair * terms + modulo(lane_row, terms)) as usize * pitch;
        let own = first_row + modulo(at, blueprint.partial_tiles) * 16 + row;
        stream.seek(groups.expert(group), own, own + 8, plane * k_block, x_row);
        if comptime!(!x_in_shared) {
            stream.prefetch_x(hidden, k_step);
        }
        if shared_k_blocks == 0 {
            stream.fetch();
        }
    }
    store_rows(&mut x_rows, &fetched, own_vec8s, blueprint);
    store_rows(
        &mut shared_x_rows,
        &shared_fetched,
        shared_own_vec8s,
        shared_blueprint,
    );
    if comptime!(x_in_shared) {
        sync_cube();
    }

    if comptime!(shared_expert.is_some()) {
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        let mut taken = 0u32;
        while taken < shared_k_blocks {
            let fetched = shared_stream.fetched();
            let shared_pass = taken / shared_blueprint.plane_k_blocks * comptime!(8 / terms);
            let ends_pass = modulo(taken, shared_blueprint.plane_k_blocks)
                == comptime!(shared_blueprint.plane_k_blocks - 1);
            shared_stream.load_scales(&mut codes);
            taken += 1;
            let has_next = taken < shared_k_blocks;
            if has_next {
                let pass = taken / shared_blueprint.plane_k_blocks * comptime!(8 / terms);
                let token = min(pass + row / terms, tokens - 1);
                let x_row = (token * terms + modulo(row, terms)) as usize * shared_pitch;
                let next = modulo(taken, shared_blueprint.plane_k_blocks)
                    * comptime!(shared_blueprint.planes)
                    + shared_plane;
                let (high, first) = (shared_row + 8, next * shared_k_block);
                shared_stream.seek(0u32, shared_row, high, first, x_row);
                if comptime!(!x_in_shared) {
                    shared_stream.prefetch_x(shared_hidden, 0u32);
                }
                shared_stream.fetch();
            } else if at < end {
                stream.continue_after(&fetched);
                stream.fetch();
            } else {
                shared_stream.commit_empty_groups();
            }
            let x = if comptime!(x_in_shared) {
                &shared_x_rows[..]
            } else {
                shared_hidden
            };
            let products =
                shared_stream.multiply_staged(&fetched, x, &codes, has_next, XColumns::Rows);
            sum += products[0];
            if ends_pass {
                let sums = add_terms(sum, terms, blueprint.target);
                #[unroll]
                for w in 0..comptime!(lane_rows(terms)) {
                    let of_row = RowSums::new(sums, w, terms);
                    let token = shared_pass + of_row.x_row;
                    if of_row.is_own && token < tokens {
                        let slot = shared_concurrent_tile * shared_tile_sums
                            + (token * shared_blueprint.planes + shared_plane) * 16
                            + row;
                        of_row.store(&mut shared_partials, slot);
                    }
                }
                sum = Vector::new(0.0f32);
            }
        }
    }

    let mut pass = 0u32;
    while at < end {
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        let current_start = start;
        let current_count = count;
        let current_pass = pass;
        let current_tile = modulo(at, blueprint.partial_tiles);
        for block in 0..blueprint.plane_k_blocks {
            let fetched = stream.fetched();
            stream.load_scales(&mut codes);
            let mut next = block + 1;
            if next == blueprint.plane_k_blocks {
                next = 0u32;
                pass += comptime!(8 / terms);
                if pass >= count {
                    pass = 0u32;
                    at += blueprint.concurrent_tiles;
                    if at < end {
                        let group = turned(at / blueprint.partial_tiles, turn, &groups, blueprint);
                        start = groups.start(group);
                        count = groups.size(group, start);
                    }
                }
            }
            let has_next = at < end;
            if has_next {
                let (lane_row, k_step) = x_place(is_spread(count, blueprint));
                let pair = groups.pair(start, min(pass + lane_row / terms, count - 1));
                let x_row = (pair * terms + modulo(lane_row, terms)) as usize * pitch;
                let own = first_row + modulo(at, blueprint.partial_tiles) * 16 + row;
                let first = (next * blueprint.planes + plane) * k_block;
                let matrix = groups.expert(turned(
                    at / blueprint.partial_tiles,
                    turn,
                    &groups,
                    blueprint,
                ));
                stream.seek(matrix, own, own + 8, first, x_row);
                if comptime!(!x_in_shared) {
                    stream.prefetch_x(hidden, k_step);
                }
                stream.fetch();
            } else {
                stream.commit_empty_groups();
            }
            let x = if comptime!(x_in_shared) {
                &x_rows[..]
            } else {
                hidden
            };
            if is_spread(current_count, blueprint) {
                let products =
                    stream.multiply_staged(&fetched, x, &codes, has_next, XColumns::KSteps);
                sum += products[0];
            } else {
                let products =
                    stream.multiply_staged(&fetched, x, &codes, has_next, XColumns::Rows);
                sum += products[0];
            }
        }
        let sum = add_terms(sum, terms, blueprint.target);
        #[unroll]
        for w in 0..comptime!(lane_rows(terms)) {
            let of_row = RowSums::new(sum, w, terms);
            let index = current_pass + of_row.x_row;
            if of_row.is_own && index < current_count {
                let pair = groups.pair(current_start, index);
                let slot = current_tile * tile_sums + (pair * blueprint.planes + plane) * 16 + row;
                of_row.store(&mut partials, slot);
            }
        }
    }
    sync_cube();

    let cube_rows = comptime!(16 * blueprint.partial_tiles);
    let mut at = UNIT_POS;
    while at < tokens * cube_rows {
        let token = at / cube_rows;
        let own = at % cube_rows;
        if first_row + own < rows {
            let mut total = 0.0f32;
            for s in 0..slots {
                let pair = token * slots + s;
                if groups.has_expert(pair) {
                    let slot =
                        own / 16 * tile_sums + pair * comptime!(blueprint.planes * 16) + own % 16;
                    total += reduce_planes(&partials[..], slot, blueprint.planes);
                }
            }
            if comptime!(shared_expert.is_some()) {
                let slot = own / 16 * shared_tile_sums
                    + token * comptime!(shared_blueprint.planes * 16)
                    + own % 16;
                total += reduce_planes(&shared_partials[..], slot, shared_blueprint.planes);
            }
            output[token as usize * rows as usize + (first_row + own) as usize] =
                Y::cast_from(total);
        }
        at += CUBE_DIM;
    }
}

/// Whether all K-steps of the `x` of a group of `count` pairs are in one tile.
#[cube]
fn is_spread(count: u32, #[comptime] blueprint: StreamBlueprint) -> bool {
    if comptime!(blueprint.spread_pairs() > 0) {
        count <= blueprint.spread_pairs()
    } else {
        false.runtime()
    }
}

/// Group `index` of a cube that begins with group `turn`.
#[cube]
fn turned(index: u32, turn: u32, groups: &Groups, #[comptime] blueprint: StreamBlueprint) -> u32 {
    if comptime!(blueprint.x_rows > 0) {
        index
    } else {
        let group = index + turn;
        select(group < groups.count(), group, group - groups.count())
    }
}

/// Reduces the partials of a row of a tile in the order of planes.
#[cube]
fn reduce_planes(partials: &[f32], slot: u32, #[comptime] planes: u32) -> f32 {
    let mut sum = partials[slot as usize];
    #[unroll]
    for p in 1..planes {
        sum += partials[(slot + p * 16) as usize];
    }
    sum
}
