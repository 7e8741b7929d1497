//! The elements of one bin of a row, sorted.

use cubecl::prelude::*;

use super::filter::FilterBounds;
use super::parts::SplitRow;
use crate::select::{key::key_of, sort};

/// The rank of no element, and its id.
const NONE: u32 = u32::MAX;
/// Vectors that a unit reads at once.
const READS: u32 = 4;

/// Elements with their ranks, lowest first once they are sorted, in shared memory.
#[derive(CubeType)]
pub(super) struct Candidates {
    pub ranks: Shared<[u32]>,
    pub ids: Shared<[u32]>,
    /// The segments that have such elements.
    segments: Shared<[u32]>,
    /// The number of these segments, and of the elements.
    counts: Shared<[Atomic<u32>]>,
    /// The number of elements.
    pub count: u32,
    /// Their bin, if they are ranked by exponents.
    pub bin: u32,
    #[cube(comptime)]
    capacity: u32,
    #[cube(comptime)]
    units: u32,
}

#[cube]
impl Candidates {
    pub fn new(#[comptime] capacity: u32, #[comptime] units: u32) -> Candidates {
        Candidates {
            ranks: Shared::new_slice(capacity as usize),
            ids: Shared::new_slice(capacity as usize),
            segments: Shared::new_slice(units as usize),
            counts: Shared::new_slice(2usize),
            count: 0u32,
            bin: NONE,
            capacity,
            units,
        }
    }

    /// Collects the elements of a bin that top-k keeps, ranked by their keys, reversed, or by their
    /// exponents. Returns whether all of them fit. Every unit of the cube must call this.
    pub fn collect<F: Float, N: Size>(
        &mut self,
        row: &SplitRow<'_, F, N>,
        bounds: &FilterBounds,
        bin: u32,
        #[comptime] by_key: bool,
    ) -> bool {
        let units = comptime!(self.units);
        // What others still read of the list before has been read.
        sync_cube();
        if UNIT_POS < 2 {
            self.counts[UNIT_POS as usize].store(0u32);
        }
        sync_cube();
        if UNIT_POS < row.segments() {
            let weight = row.mass(UNIT_POS, bin + 1).minus(&row.mass(UNIT_POS, bin));
            if !weight.is_zero() {
                let slot = self.counts[0usize].fetch_add(1u32);
                self.segments[slot as usize] = UNIT_POS;
            }
        }
        sync_cube();
        let (low, high) = row.range_of(bin, bounds);
        let length = row.segment_vectors();
        let vectors = self.counts[0usize].load() * length;
        // A vector's place in the list of segments, and in its segment: from one vector of a unit
        // to the next without a division.
        let (places, rest) = (units / length, units % length);
        let mut place = UNIT_POS / length;
        let mut offset = UNIT_POS % length;
        let mut at = UNIT_POS;
        while at < vectors {
            // The reads do not wait for each other.
            let mut values = Array::<Vector<F, N>>::new(comptime!(READS as usize));
            let mut firsts = Array::<u32>::new(comptime!(READS as usize));
            #[unroll]
            for i in 0..READS {
                let segment = self.segments[min(place, comptime!(units - 1)) as usize];
                let vector = segment * length + offset;
                let is_read = at + i * units < vectors && vector < row.row.vectors;
                let vector = select(is_read, vector, 0u32);
                values[i as usize] = row.row.read(vector);
                firsts[i as usize] = select(is_read, vector * N::value() as u32, NONE);
                let is_past = offset + rest >= length;
                place += places + select(is_past, 1u32, 0u32);
                offset = offset + rest - select(is_past, length, 0u32);
            }
            #[unroll]
            for i in 0..READS {
                let first = firsts[i as usize];
                #[unroll]
                for j in 0..N::value() {
                    let x = f32::cast_from(values[i as usize].extract(j));
                    // Hardly any element gets any further.
                    if x >= low && x <= high && first != NONE {
                        let id = first + j as u32;
                        let exponent = bounds.weighed_exponent(x, id);
                        if row.bin_of(exponent) == bin {
                            self.add(select(by_key, !key_of(x), exponent), id);
                        }
                    }
                }
            }
            at += comptime!(READS * units);
        }
        sync_cube();
        self.count = self.counts[1usize].load();
        self.bin = select(by_key, NONE, bin);
        self.count <= comptime!(self.capacity)
    }

    fn add(&mut self, rank: u32, id: u32) {
        let slot = self.counts[1usize].fetch_add(1u32);
        if slot < self.capacity {
            self.ranks[slot as usize] = rank;
            self.ids[slot as usize] = id;
        }
    }

    /// Sorts by rank, of equal ones by id, in a bitonic network. Every unit of the cube must call
    /// this.
    pub fn sort(&mut self) {
        let units = comptime!(self.units);
        let mut size = 1u32;
        while size < self.count {
            size *= 2;
        }
        let mut at = self.count + UNIT_POS;
        while at < size {
            self.ranks[at as usize] = NONE;
            self.ids[at as usize] = NONE;
            at += units;
        }
        sync_cube();
        sort(&mut self.ranks, &mut self.ids, size, units);
    }
}
