use cubecl::prelude::*;

use super::STEP;
use super::blueprint::FewBlueprint;
use super::columns::padded;
use super::few_rows::{keep_rows, read_rows};
use super::few_share::add_parts;
use super::groups::Groups;
use super::stream::{Stream, new_ring};
use super::weights::{Stack, Weights};

/// Multiplies what [`few_kernel`](super::few_kernel) made of every pair by the pair's matrix, and adds up the pairs of a token, slot by
/// slot; with a blueprint for it, what [`few_mixture_kernel`](super::few_mixture_kernel) made of every token by the matrix of the shared
/// expert, which comes last in the sum.
///
/// - `hidden`: `[tokens * slots, parts, columns]`, see [`place`](super::columns::place); `shared_hidden`: `[tokens, parts, columns]`
/// - `ids`: the matrix of every pair
/// - `words`, `scales`: a stack of matrices; `shared_words`, `shared_scales`: a stack of one
/// - `output`: `[tokens, rows]`
///
/// The shared expert is first in time, since it is known before the pairs are grouped: its first weights come meanwhile, and those of the
/// first pairs while it is multiplied.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn few_sum_kernel<I: Int, Y: Float, S: Size, T: Size>(
    hidden: &[Vector<u32, Const<4>>],
    shared_hidden: &[Vector<u32, Const<4>>],
    ids: &[I],
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    shared_words: &[Vector<u32, Const<4>>],
    shared_scales: &[Vector<u32, T>],
    output: &mut [Y],
    tokens: u32,
    slots: u32,
    matrices: u32,
    stack: Stack,
    shared_stack: Stack,
    #[comptime] blueprint: FewBlueprint,
    #[comptime] shared: Option<FewBlueprint>,
    #[define(I, Y)] _dtypes: [ElemType; 2],
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let plane = UNIT_POS_Y % blueprint.planes;
    let side = UNIT_POS_Y / blueprint.planes;
    let parts = comptime!(blueprint.columns.parts);
    let stretch = comptime!(blueprint.columns.format.stretch());
    let rows = stack.rows;
    let first_row = CUBE_POS_X * comptime!(16 * blueprint.batch);
    let pairs = tokens * slots;
    let staged = comptime!(blueprint.lines > 0);
    let units = (padded(stack.columns, blueprint.columns.format) / 8) as usize;
    let ring = new_ring(blueprint.cube_planes);
    let weights = Weights::<S>::of_few(words, scales, stack, blueprint);
    let mut stream = Stream::<S>::new(weights, quarter, ring.clone(), blueprint);

    // Without a shared expert, none of what is of it is used.
    let of_shared = comptime!(shared.unwrap_or(blueprint));
    let its_plane = UNIT_POS_Y % of_shared.planes;
    let its_side = UNIT_POS_Y / of_shared.planes;
    let its_stretch = comptime!(of_shared.columns.format.stretch());
    let its_units = (padded(shared_stack.columns, of_shared.columns.format) / 8) as usize;
    let its_weights = Weights::<T>::of_few(shared_words, shared_scales, shared_stack, of_shared);
    let mut its_stream = Stream::<T>::new(its_weights, quarter, ring, of_shared);

    // Ids first, which the most waits for; then what is multiplied; then weights.
    let expert = Groups::read::<I>(&ComptimeOption::new_Some(ids), pairs, matrices);
    let stage_units = comptime!(if staged { blueprint.own_units() } else { 0 });
    let mut fetched = Array::<Vector<u32, Const<4>>>::new(comptime!((stage_units + 1) as usize));
    read_rows(
        hidden,
        pairs * parts,
        units,
        &mut fetched,
        stage_units,
        blueprint,
    );
    let its_stage_units = comptime!(if staged && shared.is_some() {
        of_shared.own_units()
    } else {
        0
    });
    let mut its_fetched =
        Array::<Vector<u32, Const<4>>>::new(comptime!((its_stage_units + 1) as usize));
    let its_rows = tokens * parts;
    read_rows(
        shared_hidden,
        its_rows,
        its_units,
        &mut its_fetched,
        its_stage_units,
        of_shared,
    );
    let its_pitch = if comptime!(staged) {
        comptime!(of_shared.pitch() as usize).runtime()
    } else {
        its_units
    };
    let its_row = first_row + its_side * 16 + row;
    // A side has one tile at most: there are no fewer sides than tiles.
    let mut its_steps = 0u32;
    if comptime!(shared.is_some()) {
        let passes = (its_rows + 7) / 8;
        its_steps = select(
            its_side < blueprint.batch,
            passes * comptime!(of_shared.rounds),
            0u32,
        );
        if its_steps > 0 {
            let line = (min(row / parts, tokens - 1) * parts + row % parts) as usize * its_pitch;
            its_stream.aim(0u32, its_row, its_row + 8, its_plane * its_stretch, line);
            if comptime!(!staged) {
                its_stream.fetch_columns(shared_hidden);
            }
            its_stream.fetch();
        }
    }
    let groups = Groups::of(expert, pairs, matrices, blueprint.pairs, blueprint.pairing);
    // Sums of every pair and plane, of 16 rows to a tile.
    let tile_sums = comptime!(blueprint.pairs * blueprint.planes * 16);
    let mut stage = Shared::<[f32]>::new_slice(comptime!((tile_sums * blueprint.batch) as usize));
    let its_tile_sums = comptime!(of_shared.pairs * of_shared.planes * 16);
    let mut its_stage = Shared::<[f32]>::new_slice(comptime!(if shared.is_some() {
        (its_tile_sums * blueprint.batch) as usize
    } else {
        1
    }));
    let mut lines = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(if staged {
        (blueprint.lines * blueprint.pitch()) as usize
    } else {
        1
    }));
    let mut its_lines =
        Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(if its_stage_units > 0 {
            (of_shared.lines * of_shared.pitch()) as usize
        } else {
            1
        }));
    let pitch = if comptime!(staged) {
        comptime!(blueprint.pitch() as usize).runtime()
    } else {
        units
    };
    let mut codes = Array::<u32>::new(comptime!(2 * STEP as usize));

    // All tiles of a group, one side each, then the next group.
    let end = groups.count() * blueprint.batch;
    let mut at = side;
    if comptime!(blueprint.planes * blueprint.groups < blueprint.cube_planes) {
        at = select(side < blueprint.groups, side, end);
    }
    let mut start = 0u32;
    let mut count = 0u32;
    if at < end {
        let group = at / blueprint.batch;
        start = groups.start(group);
        count = groups.start(group + 1) - start;
        let pair = groups.pair(start + min(row / parts, count - 1));
        let line = (pair * parts + row % parts) as usize * pitch;
        let own = first_row + at % blueprint.batch * 16 + row;
        stream.aim(groups.expert(group), own, own + 8, plane * stretch, line);
        if comptime!(!staged) {
            stream.fetch_columns(hidden);
        }
        if its_steps == 0 {
            stream.fetch();
        }
    }
    keep_rows(&mut lines, &fetched, stage_units, blueprint);
    keep_rows(&mut its_lines, &its_fetched, its_stage_units, of_shared);
    if comptime!(staged) {
        sync_cube();
    }

    if comptime!(shared.is_some()) {
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        let mut step = 0u32;
        while step < its_steps {
            let x_at = its_stream.x_at;
            let first = its_stream.first;
            let own = its_stream.own + 0usize;
            let its_pass = step / of_shared.rounds * comptime!(8 / parts);
            let ends = step % of_shared.rounds == comptime!(of_shared.rounds - 1);
            its_stream.take_scales(&mut codes);
            step += 1;
            let goes_on = step < its_steps;
            if goes_on {
                let pass = step / of_shared.rounds * comptime!(8 / parts);
                let token = min(pass + row / parts, tokens - 1);
                let line = (token * parts + row % parts) as usize * its_pitch;
                let next = step % of_shared.rounds * comptime!(of_shared.planes) + its_plane;
                its_stream.aim(0u32, its_row, its_row + 8, next * its_stretch, line);
                its_stream.fetch();
            } else if at < end {
                stream.follow(own);
                stream.fetch();
            } else {
                its_stream.fetch_nothing();
            }
            if comptime!(staged) {
                sum +=
                    its_stream.products(own, &its_lines[..], x_at, first, &codes, goes_on, false);
            } else {
                sum += its_stream.products(own, shared_hidden, x_at, first, &codes, goes_on, true);
            }
            if ends {
                let sums = add_parts(sum, parts, blueprint.target);
                let writes = comptime!(if parts == 1 { 2u32 } else { 1u32 });
                #[unroll]
                for w in 0..writes {
                    let token = its_pass + (quarter * 2 + w) / parts;
                    let low = sums.extract(comptime!(w as usize));
                    let high = sums.extract(comptime!(w as usize + 2));
                    if quarter * 2 % parts == 0 && token < tokens {
                        let slot = its_side * its_tile_sums
                            + (token * of_shared.planes + its_plane) * 16
                            + row;
                        its_stage[slot as usize] = low;
                        its_stage[slot as usize + 8] = high;
                    }
                }
                sum = Vector::new(0.0f32);
            }
        }
    }

    let mut pass = 0u32;
    while at < end {
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        let its_start = start;
        let its_count = count;
        let its_pass = pass;
        let its_tile = at % blueprint.batch;
        for round in 0..blueprint.rounds {
            let x_at = stream.x_at;
            let first = stream.first;
            stream.take_scales(&mut codes);
            let mut next = round + 1;
            if next == blueprint.rounds {
                next = 0u32;
                pass += comptime!(8 / parts);
                if pass >= count {
                    pass = 0u32;
                    at += blueprint.groups;
                    if at < end {
                        start = groups.start(at / blueprint.batch);
                        count = groups.start(at / blueprint.batch + 1) - start;
                    }
                }
            }
            let goes_on = at < end;
            if goes_on {
                let pair = groups.pair(start + min(pass + row / parts, count - 1));
                let line = (pair * parts + row % parts) as usize * pitch;
                let own = first_row + at % blueprint.batch * 16 + row;
                let first = (next * blueprint.planes + plane) * stretch;
                let matrix = groups.expert(at / blueprint.batch);
                stream.aim(matrix, own, own + 8, first, line);
            }
            if comptime!(staged) {
                sum += stream.multiply(&lines[..], x_at, first, &codes, goes_on, false);
            } else {
                sum += stream.multiply(hidden, x_at, first, &codes, goes_on, true);
            }
        }
        let sum = add_parts(sum, parts, blueprint.target);
        let writes = comptime!(if parts == 1 { 2u32 } else { 1u32 });
        #[unroll]
        for w in 0..writes {
            let of = (quarter * 2 + w) / parts;
            let low = sum.extract(comptime!(w as usize));
            let high = sum.extract(comptime!(w as usize + 2));
            if quarter * 2 % parts == 0 && its_pass + of < its_count {
                let pair = groups.pair(its_start + its_pass + of);
                let slot = its_tile * tile_sums + (pair * blueprint.planes + plane) * 16 + row;
                stage[slot as usize] = low;
                stage[slot as usize + 8] = high;
            }
        }
    }
    sync_cube();

    let cube_rows = comptime!(16 * blueprint.batch);
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
                    total += sum_of_planes(&stage[..], slot, blueprint.planes);
                }
            }
            if comptime!(shared.is_some()) {
                let slot =
                    own / 16 * its_tile_sums + token * comptime!(of_shared.planes * 16) + own % 16;
                total += sum_of_planes(&its_stage[..], slot, of_shared.planes);
            }
            output[token as usize * rows as usize + (first_row + own) as usize] =
                Y::cast_from(total);
        }
        at += CUBE_DIM;
    }
}

/// What the planes that share a tile have summed up of a row, in their order.
#[cube]
fn sum_of_planes(stage: &[f32], slot: u32, #[comptime] planes: u32) -> f32 {
    let mut sum = stage[slot as usize];
    #[unroll]
    for p in 1..planes {
        sum += stage[(slot + p * 16) as usize];
    }
    sum
}
