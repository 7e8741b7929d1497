//! Rows that are divided into segments: one cube finds the candidates of each segment, another
//! merges those of a row.

use cubecl::prelude::*;

use super::bins::lower_bound_of;
use super::bitmap::ColumnBitmap;
use super::candidates::{Candidates, LongRowBlueprint};
use super::radix_select::RadixSelect;
use super::registers::{RowRegisters, first_vector_of};
use super::row::{LogitRows, TopkIds, TopkRow, write_all_columns};
use super::sample::{sampled_vector, threshold};
use super::window::WindowArgs;
use crate::intrinsics::has_nan_bits;
use crate::select::key::NONE;
use crate::select::{CubeUnits, Scan};

/// Bits in a slot that holds no candidate.
const NO_BITS: u32 = u32::MAX;

/// The bits of a candidate. Those of NaN become those of `-inf`.
#[cube]
fn bits_of(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    select(
        has_nan_bits(x),
        comptime!(f32::NEG_INFINITY.to_bits()),
        bits,
    )
}

/// How [`segment_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SegmentBlueprint {
    /// Vectors of each unit. All units together hold the whole segment.
    pub vectors: u32,
    /// Vectors of the sample that each unit reads.
    pub sample: u32,
    /// Candidates that [`merge_kernel`] reads without reading their number first.
    pub slots: u32,
    /// The units of a cube.
    pub units: CubeUnits,
}

/// How [`merge_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MergeBlueprint {
    /// Slots that each unit holds.
    pub unit_slots: u32,
    /// Slots of each segment.
    pub slots: u32,
    /// The configuration for rows in which a segment has more candidates than slots.
    pub long: LongRowBlueprint,
}

/// The candidates of each segment of each row, in the order of their columns.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SegmentCandidates {
    /// Their bits, `[rows, segments, capacity]`, with capacity for all. Of the first `slots`, those
    /// that are left over hold [`NO_BITS`].
    bits: Box<[u32]>,
    /// Their columns, relative to the window.
    columns: Box<[u32]>,
    /// Their numbers, `[rows, segments]`.
    counts: Box<[u32]>,
}

/// Number of segments of a row, and elements of each.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SegmentSizes {
    segments: u32,
    capacity: u32,
}

/// Writes the candidates of each segment of each row.
///
/// - `logits`, `elements`, `windows`, `rank`: as in `long_row_kernel`
/// - `max_unsampled`: length of a window up to which no sample is used and all elements are
///   candidates
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn segment_kernel<F: Float, I: Int, N: Size>(
    logits: &LogitRows<Vector<F, N>>,
    elements: &[F],
    windows: &WindowArgs<I>,
    candidates: &mut SegmentCandidates,
    rank: u32,
    max_unsampled: u32,
    #[comptime] blueprint: SegmentBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.units);
    let own = blueprint.vectors;
    let length = N::value();
    let size = N::value() as u32;
    let index = CUBE_POS_Y;
    let vectors = logits.columns.div_ceil(size);
    let first = index as usize * logits.stride;
    // The reads of the sample and of the segment wait neither for each other nor for the window.
    let mut sample = Array::<Vector<F, N>>::new(comptime!(blueprint.sample as usize));
    #[unroll]
    for i in 0..blueprint.sample {
        let vector = sampled_vector(vectors, i, blueprint.sample, units);
        sample[i as usize] = logits.elements[first + vector as usize];
    }
    let mut values = Array::<Vector<F, N>>::new(comptime!(own as usize));
    let own_first = CUBE_POS_X * comptime!(units.cube * own) + first_vector_of(own, units);
    #[unroll]
    for i in 0..own {
        let vector = own_first + i * units.plane;
        let vector = select(vector < vectors, vector, 0u32);
        values[i as usize] = logits.elements[first + vector as usize];
    }
    let window = windows.window(index, logits.columns);
    let row = TopkRow::<F, N>::new(logits, elements, first, vectors, window);
    let mut search = RadixSelect::new(units);
    sync_cube();

    let mut lowest = NONE.runtime();
    if row.window.length() > max_unsampled {
        lowest = threshold(&row, &sample, &mut search, rank, blueprint.sample, units);
    }
    let mut registers = RowRegisters::new(own, comptime!(length as u32), units);
    #[unroll]
    for i in 0..own {
        let column = (own_first + i * units.plane) * size;
        let mask = row.window.mask(column, comptime!(length as u32));
        registers.set::<F, N>(i, values[i as usize], mask);
    }
    let hits = registers.at_least(lower_bound_of(lowest));
    let found = registers.in_order(hits, &mut search.scanner);
    let segment = index * CUBE_COUNT_X + CUBE_POS_X;
    let out = segment as usize * comptime!((units.cube * own) as usize) * length;
    #[unroll]
    for i in 0..own {
        let mut at = out + found.vectors[i as usize] as usize;
        #[unroll]
        for j in 0..length {
            let e = comptime!(i as usize * length + j);
            if hits & comptime!(1u32 << e) != 0 {
                candidates.bits[at] = bits_of(registers.values[e]);
                candidates.columns[at] =
                    (own_first + i * units.plane) * size + j as u32 - row.window.start;
                at += 1;
            }
        }
    }
    let mut slot = found.total + UNIT_POS;
    while slot < blueprint.slots {
        candidates.bits[out + slot as usize] = NO_BITS;
        slot += units.cube;
    }
    if UNIT_POS == 0 {
        candidates.counts[segment as usize] = found.total;
    }
}

/// Selects the columns of the `k` largest entries of each row's window from the candidates of its
/// segments, with one cube for each row.
///
/// - `candidates`: what [`segment_kernel`] wrote
/// - all others as in `long_row_kernel`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn merge_kernel<F: Float, I: Int, N: Size>(
    logits: &LogitRows<Vector<F, N>>,
    elements: &[F],
    windows: &WindowArgs<I>,
    candidates: &SegmentCandidates,
    output: &mut TopkIds,
    sizes: SegmentSizes,
    #[comptime] blueprint: MergeBlueprint,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(blueprint.long.units);
    let own = comptime!(blueprint.unit_slots as usize);
    let index = CUBE_POS_X;
    let segments = sizes.segments;
    let row_segments = RowSegments::new(candidates, index * segments, sizes);
    let mut registers = RowRegisters::new(blueprint.unit_slots, 1u32, units);
    let mut own_columns = Array::<u32>::new(own);
    // If the last slot of a segment is taken, there may be more candidates than slots.
    let mut is_full = false;
    #[unroll]
    for i in 0..blueprint.unit_slots {
        let slot = first_vector_of(blueprint.unit_slots, units) + i * units.plane;
        let segment = slot / blueprint.slots;
        let within = slot - segment * blueprint.slots;
        let inside = segment < segments;
        let from = row_segments.start(select(inside, segment, 0u32));
        let bits = select(inside, candidates.bits[from + within as usize], NO_BITS);
        own_columns[i as usize] = candidates.columns[from + within as usize];
        let mask = select(bits == NO_BITS, 0u32, 1u32);
        registers.set::<f32, Const<1>>(
            i,
            Vector::<f32, Const<1>>::new(f32::reinterpret(bits)),
            mask,
        );
        is_full = is_full || (mask == 1 && within == comptime!(blueprint.slots - 1));
    }
    let vectors = logits.columns.div_ceil(N::value() as u32);
    let window = windows.window(index, logits.columns);
    let first = index as usize * logits.stride;
    let row = TopkRow::<F, N>::new(logits, elements, first, vectors, window);
    let mut search = RadixSelect::new(units);
    let mut full = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        full[0usize] = 0u32;
    }
    sync_cube();

    let k = output.k;
    let out = index as usize * k as usize;
    let length = row.window.length();
    if length <= k {
        write_all_columns(output, out, length, units);
    } else {
        if is_full {
            full[0usize] = 1u32;
        }
        search.begin(k);
        registers.add_to(&mut search);
        search.advance();
        if full[0usize] == 0 && !search.whole {
            while search.needs_pass_to_rank() {
                registers.add_to(&mut search);
                search.advance();
            }
            let taken = registers.taken(&mut search);
            let before = registers.in_order(taken, &mut search.scanner);
            #[unroll]
            for i in 0..blueprint.unit_slots {
                if taken & comptime!(1u32 << i) != 0 {
                    output.ids[out + before.vectors[i as usize] as usize] =
                        own_columns[i as usize] as i32;
                }
            }
        } else {
            let mut own_count = 0u32;
            if UNIT_POS < segments {
                own_count = candidates.counts[(row_segments.first + UNIT_POS) as usize];
            }
            let scan = search.scanner.scan(own_count);
            if scan.total >= k && scan.total <= blueprint.long.capacity {
                row_segments.choose(
                    &mut search,
                    &scan,
                    own_count,
                    length,
                    output,
                    out,
                    blueprint.long,
                );
            } else {
                sync_cube();
                row.choose_by_passes(&mut search, output, out, units);
            }
        }
    }
}

/// The segments of a row.
#[derive(CubeType)]
struct RowSegments<'a> {
    candidates: &'a SegmentCandidates,
    /// The first of them, counted through all rows.
    first: u32,
    sizes: SegmentSizes,
}

#[cube]
impl<'a> RowSegments<'a> {
    fn new(candidates: &'a SegmentCandidates, first: u32, sizes: SegmentSizes) -> RowSegments<'a> {
        RowSegments::<'a> {
            candidates,
            first,
            sizes,
        }
    }

    /// Where the candidates of a segment begin.
    fn start(&self, segment: u32) -> usize {
        (self.first + segment) as usize * self.sizes.capacity as usize
    }

    /// Chooses from all candidates of all segments, of which that of the unit has `own_count`.
    /// Every unit of the cube must call this.
    fn choose(
        &self,
        search: &mut RadixSelect,
        scan: &Scan,
        own_count: u32,
        length: u32,
        output: &mut TopkIds,
        out: usize,
        #[comptime] blueprint: LongRowBlueprint,
    ) {
        let units = comptime!(blueprint.units);
        let mut found = Candidates::new(blueprint);
        let mut bitmap = ColumnBitmap::new(blueprint.words, units);
        let mut ends = Shared::<[u32]>::new_slice(comptime!(units.cube as usize));
        ends[UNIT_POS as usize] = scan.before + own_count;
        sync_cube();
        let mut segment = UNIT_POS / units.plane;
        while segment < self.sizes.segments {
            let mut at = 0u32;
            if segment > 0 {
                at = ends[(segment - 1) as usize];
            }
            let size = ends[segment as usize] - at;
            let from = self.start(segment);
            let mut i = UNIT_POS % units.plane;
            while i < size {
                let candidate = from + i as usize;
                found.values[(at + i) as usize] = f32::reinterpret(self.candidates.bits[candidate]);
                found.columns[(at + i) as usize] = self.candidates.columns[candidate];
                i += units.plane;
            }
            segment += comptime!(units.cube / units.plane);
        }
        sync_cube();
        found.choose(search, &mut bitmap, scan.total, length, output, out);
    }
}
