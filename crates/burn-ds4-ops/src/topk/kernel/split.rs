//! A row in several stretches, a cube to each, whose candidates another cube brings together.

use cubecl::prelude::*;

use super::candidates::{Candidates, LongRowBlueprint};
use super::held::{Held, first_vector_of};
use super::key::{NONE, lower_bound_of};
use super::map::Map;
use super::row::{Row, take_all};
use super::sample::{sampled_vector, threshold};
use super::search::{Scan, Search, Units};
use super::window::{Tokens, Window};
use crate::intrinsics::has_nan_bits;

/// The bits of no candidate.
const NO_BITS: u32 = u32::MAX;

/// A candidate's bits, which are those of a number for NaN, too.
#[cube]
fn bits_of(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    select(
        has_nan_bits(x),
        comptime!(f32::NEG_INFINITY.to_bits()),
        bits,
    )
}

/// How [`stretch_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StretchBlueprint {
    /// Vectors of a unit: all units together have the whole stretch.
    pub vectors: u32,
    /// Vectors of the sample to a unit.
    pub sample: u32,
    /// Candidates that the other cube takes without asking for their number.
    pub slots: u32,
    /// The units of a cube.
    pub units: Units,
}

/// How [`merge_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MergeBlueprint {
    /// Slots of a unit.
    pub own: u32,
    /// Slots of a stretch.
    pub slots: u32,
    /// Where a stretch has more candidates than slots.
    pub long: LongRowBlueprint,
}

/// The candidates of each stretch of each row, in the order of their columns.
///
/// - `logits`, `elements`, `starts`, `ends`: as in `long_row_kernel`
/// - `kept`, `places`: `[rows, stretches, capacity]`, the candidates' bits and their columns, relative to the window; there is room
///   for all. Of the first `slots`, those that are left over have no candidate's bits.
/// - `counts`: `[rows, stretches]`
/// - `room`: candidates of a row of which no sample is taken
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn stretch_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    elements: &[F],
    starts: ComptimeOption<&[I]>,
    ends: ComptimeOption<&[I]>,
    kept: &mut [u32],
    places: &mut [u32],
    counts: &mut [u32],
    columns: u32,
    row_vectors: usize,
    tokens: Tokens,
    rank: u32,
    room: u32,
    #[comptime] blueprint: StretchBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.units);
    let own = blueprint.vectors;
    let length = N::value();
    let size = N::value() as u32;
    let index = CUBE_POS_Y;
    let vectors = columns.div_ceil(size);
    let first = index as usize * row_vectors;
    // Neither waits for the other, nor for the window.
    let mut sample = Array::<Vector<F, N>>::new(comptime!(blueprint.sample as usize));
    #[unroll]
    for i in 0..blueprint.sample {
        let vector = sampled_vector(vectors, i, blueprint.sample, units);
        sample[i as usize] = logits[first + vector as usize];
    }
    let mut values = Array::<Vector<F, N>>::new(comptime!(own as usize));
    let own_first = CUBE_POS_X * comptime!(units.cube * own) + first_vector_of(own, units);
    #[unroll]
    for i in 0..own {
        let vector = own_first + i * units.plane;
        let vector = select(vector < vectors, vector, 0u32);
        values[i as usize] = logits[first + vector as usize];
    }
    let window = Window::of::<I>(starts, ends, index, columns, &tokens);
    let row = Row::<F, N>::new(logits, elements, first, vectors, window);
    let mut search = Search::new(units);
    sync_cube();

    let mut lowest = NONE.runtime();
    if row.window.length() > room {
        lowest = threshold(&row, &sample, &mut search, rank, blueprint.sample, units);
    }
    let mut held = Held::new(own, comptime!(length as u32), units);
    #[unroll]
    for i in 0..own {
        let column = (own_first + i * units.plane) * size;
        let mask = row.window.mask(column, comptime!(length as u32));
        held.set::<F, N>(i, values[i as usize], mask);
    }
    let hits = held.from(lower_bound_of(lowest));
    let found = held.in_order(hits, 0u32, &mut search.scanner);
    let part = index * CUBE_COUNT_X + CUBE_POS_X;
    let out = part as usize * comptime!((units.cube * own) as usize) * length;
    #[unroll]
    for i in 0..own {
        let mut at = out + found.before[i as usize] as usize;
        #[unroll]
        for j in 0..length {
            let e = comptime!(i as usize * length + j);
            if hits & comptime!(1u32 << e) != 0 {
                kept[at] = bits_of(held.values[e]);
                places[at] = (own_first + i * units.plane) * size + j as u32 - row.window.start;
                at += 1;
            }
        }
    }
    let mut slot = found.total + UNIT_POS;
    while slot < blueprint.slots {
        kept[out + slot as usize] = NO_BITS;
        slot += units.cube;
    }
    if UNIT_POS == 0 {
        counts[part as usize] = found.total;
    }
}

/// The columns of the `k` largest entries of each row's window, from the candidates of its stretches, a row to a cube.
///
/// - `kept`, `places`, `counts`: what [`stretch_kernel`] wrote of `stretches` stretches a row, with their `capacity`
/// - the others as in `long_row_kernel`
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn merge_kernel<F: Float, I: Int, N: Size>(
    logits: &[Vector<F, N>],
    elements: &[F],
    starts: ComptimeOption<&[I]>,
    ends: ComptimeOption<&[I]>,
    kept: &[u32],
    places: &[u32],
    counts: &[u32],
    ids: &mut [i32],
    columns: u32,
    row_vectors: usize,
    tokens: Tokens,
    k: u32,
    stretches: u32,
    capacity: u32,
    #[comptime] blueprint: MergeBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.long.units);
    let own = comptime!(blueprint.own as usize);
    let index = CUBE_POS_X;
    let part = index * stretches;
    let mut held = Held::new(blueprint.own, 1u32, units);
    let mut own_places = Array::<u32>::new(own);
    // A last slot that is taken may not be the last candidate.
    let mut last = false;
    #[unroll]
    for i in 0..blueprint.own {
        let slot = first_vector_of(blueprint.own, units) + i * units.plane;
        let stretch = slot / blueprint.slots;
        let within = slot - stretch * blueprint.slots;
        let here = stretch < stretches;
        let from = (part + select(here, stretch, 0u32)) as usize * capacity as usize;
        let bits = select(here, kept[from + within as usize], NO_BITS);
        own_places[i as usize] = places[from + within as usize];
        let mask = select(bits == NO_BITS, 0u32, 1u32);
        held.set::<f32, Const<1>>(
            i,
            Vector::<f32, Const<1>>::new(f32::reinterpret(bits)),
            mask,
        );
        last = last || (mask == 1 && within == comptime!(blueprint.slots - 1));
    }
    let vectors = columns.div_ceil(N::value() as u32);
    let window = Window::of::<I>(starts, ends, index, columns, &tokens);
    let first = index as usize * row_vectors;
    let row = Row::<F, N>::new(logits, elements, first, vectors, window);
    let mut search = Search::new(units);
    let mut full = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        full[0usize] = 0u32;
    }
    sync_cube();

    let out = index as usize * k as usize;
    let length = row.window.length();
    if length <= k {
        take_all(ids, out, length, k, units);
    } else {
        if last {
            full[0usize] = 1u32;
        }
        search.begin(k);
        held.add_to(&mut search);
        search.advance();
        if full[0usize] == 0 && !search.whole {
            while search.goes_on() {
                held.add_to(&mut search);
                search.advance();
            }
            let choice = search.choice();
            let taken = held.taken(&choice, &mut search.scanner);
            #[unroll]
            for i in 0..blueprint.own {
                let mut rank = choice.rank(taken.before[i as usize]);
                let equal = taken.equal & comptime!(1u32 << i) != 0;
                if (equal || taken.above & comptime!(1u32 << i) != 0)
                    && choice.takes_next(equal, &mut rank)
                {
                    ids[out + rank.taken as usize - 1] = own_places[i as usize] as i32;
                }
            }
        } else {
            let mut own_count = 0u32;
            if UNIT_POS < stretches {
                own_count = counts[(part + UNIT_POS) as usize];
            }
            let scan = search.scanner.scan(own_count);
            if scan.total >= k && scan.total <= blueprint.long.capacity {
                merge_lists(
                    kept,
                    places,
                    &mut search,
                    &scan,
                    ids,
                    out,
                    length,
                    k,
                    part,
                    stretches,
                    capacity,
                    own_count,
                    blueprint.long,
                );
            } else {
                sync_cube();
                row.choose_from_all(&mut search, ids, out, k, units);
            }
        }
    }
}

/// Chooses from all candidates of all stretches.
#[cube]
#[allow(clippy::too_many_arguments)]
fn merge_lists(
    kept: &[u32],
    places: &[u32],
    search: &mut Search,
    scan: &Scan,
    ids: &mut [i32],
    out: usize,
    length: u32,
    k: u32,
    part: u32,
    stretches: u32,
    capacity: u32,
    own_count: u32,
    #[comptime] blueprint: LongRowBlueprint,
) {
    let units = comptime!(blueprint.units);
    let mut found = Candidates::new(blueprint);
    let mut map = Map::new(blueprint.words, units);
    let mut ends = Shared::<[u32]>::new_slice(comptime!(units.cube as usize));
    ends[UNIT_POS as usize] = scan.before + own_count;
    sync_cube();
    let mut stretch = UNIT_POS / units.plane;
    while stretch < stretches {
        let mut at = 0u32;
        if stretch > 0 {
            at = ends[(stretch - 1) as usize];
        }
        let size = ends[stretch as usize] - at;
        let from = (part + stretch) as usize * capacity as usize;
        let mut i = UNIT_POS % units.plane;
        while i < size {
            found.values[(at + i) as usize] = f32::reinterpret(kept[from + i as usize]);
            found.columns[(at + i) as usize] = places[from + i as usize];
            i += units.plane;
        }
        stretch += comptime!(units.cube / units.plane);
    }
    sync_cube();
    found.choose(search, &mut map, scan.total, length, ids, out, k);
}
