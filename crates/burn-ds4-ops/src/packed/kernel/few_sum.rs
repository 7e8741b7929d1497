use cubecl::prelude::*;

use super::STEP;
use super::columns::padded;
use super::few::{FewBlueprint, add_parts};
use super::groups::Groups;
use super::stream::Stream;
use super::weights::{Stack, Weights};

/// Multiplies what [`few_kernel`](super::few_kernel) made of every pair by the pair's matrix, and adds up the pairs of a token, slot by
/// slot.
///
/// - `hidden`: `[tokens * slots, parts, columns]`, see [`place`](super::columns::place)
/// - `ids`: the matrix of every pair
/// - `words`, `scales`: a stack of matrices
/// - `output`: `[tokens, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn few_sum_kernel<I: Int, S: Size>(
    hidden: &[Vector<u32, Const<4>>],
    ids: &[I],
    words: &[Vector<u32, Const<4>>],
    scales: &[Vector<u32, S>],
    output: &mut [f32],
    tokens: u32,
    slots: u32,
    matrices: u32,
    stack: Stack,
    #[comptime] blueprint: FewBlueprint,
    #[define(I)] _dtype: ElemType,
) {
    let row = UNIT_POS_X / 4;
    let quarter = UNIT_POS_X % 4;
    let plane = UNIT_POS_Y % blueprint.planes;
    let side = UNIT_POS_Y / blueprint.planes;
    let parts = comptime!(blueprint.columns.parts);
    let stretch = comptime!(blueprint.columns.format.stretch());
    let rows = stack.rows;
    let units = (padded(stack.columns, blueprint.columns.format) / 8) as usize;
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
    let pairs = tokens * slots;
    let groups = Groups::new::<I>(
        &ComptimeOption::new_Some(ids),
        pairs,
        matrices,
        blueprint.pairs,
        blueprint.pairing,
    );
    // Sums of every pair and plane, of 16 rows to a tile.
    let tile_sums = comptime!(blueprint.pairs * blueprint.planes * 16);
    let mut stage = Shared::<[f32]>::new_slice(comptime!((tile_sums * blueprint.batch) as usize));
    let mut lines =
        Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(if blueprint.lines > 8 {
            (blueprint.lines * blueprint.pitch()) as usize
        } else {
            1
        }));
    let staged = comptime!(blueprint.lines > 8);
    let pitch = if comptime!(staged) {
        comptime!(blueprint.pitch() as usize).runtime()
    } else {
        units
    };
    let mut codes = Array::<u32>::new(comptime!(2 * STEP as usize));
    let first_row = CUBE_POS_X * comptime!(16 * blueprint.batch);

    // All tiles of a group, one side each, then the next group.
    let end = groups.count() * blueprint.batch;
    let mut at = side;
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
    }
    let stage_units = comptime!(if staged { blueprint.own_units() } else { 0 });
    let mut fetched = Array::<Vector<u32, Const<4>>>::new(comptime!((stage_units + 1) as usize));
    #[unroll]
    for i in 0..stage_units {
        let place = UNIT_POS + comptime!(i * blueprint.units_of_cube());
        let of = min(place / comptime!(blueprint.units()), pairs * parts - 1);
        let u = place % comptime!(blueprint.units());
        let inside = (u as usize) < units;
        fetched[i as usize] = hidden[of as usize * units + select(inside, u, 0u32) as usize];
    }
    if at < end {
        stream.fetch();
    }
    #[unroll]
    for i in 0..stage_units {
        let place = UNIT_POS + comptime!(i * blueprint.units_of_cube());
        let of = place / comptime!(blueprint.units());
        let u = place % comptime!(blueprint.units());
        if of < blueprint.lines {
            lines[(of * comptime!(blueprint.pitch()) + u) as usize] = fetched[i as usize];
        }
    }
    if comptime!(staged) {
        sync_cube();
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
                    let mut sum = stage[slot as usize];
                    #[unroll]
                    for p in 1..blueprint.planes {
                        sum += stage[(slot + p * 16) as usize];
                    }
                    total += sum;
                }
            }
            output[token as usize * rows as usize + (first_row + own) as usize] = total;
        }
        at += CUBE_DIM;
    }
}
