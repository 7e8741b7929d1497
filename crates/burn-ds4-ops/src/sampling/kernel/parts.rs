//! What the cubes of a row leave for each other.

use cubecl::prelude::*;

use super::filter::FilterBounds;
use super::row::{RowShape, SamplingRow};
use super::wide::Wide;

/// Words of a bin in the sums of a segment: its sum.
pub(crate) const MASS_WORDS: usize = 2;
/// Words of a bin in the sums of a row: the limbs of its sum, and its count. All bins have one of
/// them before the next one, so that units write to neighbouring words.
pub(crate) const TOTAL_WORDS: usize = 4;
/// Words of a row behind its bins: the number of cubes that have arrived.
pub(crate) const COUNTERS: usize = 1;

/// The rows of logits, and how they are divided.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SplitShape {
    pub row: RowShape,
    /// Segments of a row, of as many vectors each: no more than a cube has units.
    pub segments: u32,
    pub segment_vectors: u32,
    /// Segments of a cube.
    pub cube_segments: u32,
}

/// The sums of two bins.
pub(super) type BinPair = Vector<u32, Const<4>>;

/// What the cubes of a row leave for each other.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowParts {
    /// The key of the highest logit of each segment, and its lowest id: `[rows, segments, 2]`.
    pub highest: Box<[u32]>,
    /// Weights of each segment, summed up to and including each bin: `[rows, segments, bins, 2]`,
    /// high words first. Without a filter, the first bin has all.
    pub masses: Box<[BinPair]>,
}

/// A row, and what its cubes have left.
#[derive(CubeType)]
pub(super) struct SplitRow<'a, F: Float, N: Size> {
    pub row: SamplingRow<'a, F, N>,
    parts: &'a RowParts,
    pub index: u32,
    shape: &'a SplitShape,
    #[cube(comptime)]
    log2_bins: u32,
}

#[cube]
impl<'a, F: Float, N: Size> SplitRow<'a, F, N> {
    pub fn new(
        row: SamplingRow<'a, F, N>,
        parts: &'a RowParts,
        index: u32,
        shape: &'a SplitShape,
        #[comptime] log2_bins: u32,
    ) -> SplitRow<'a, F, N> {
        SplitRow::<'a, F, N> {
            row,
            parts,
            index,
            shape,
            log2_bins,
        }
    }

    pub fn segments(&self) -> u32 {
        self.shape.segments
    }

    pub fn segment_vectors(&self) -> u32 {
        self.shape.segment_vectors
    }

    pub fn segment_of(&self, id: u32) -> u32 {
        id / N::value() as u32 / self.shape.segment_vectors
    }

    /// Bins in the order of exponents, of a power of one half divided by a power of two each.
    /// [`NO_EXPONENT`] is in none.
    pub fn bin_of(&self, exponent: u32) -> u32 {
        exponent >> comptime!(bin_shift(self.log2_bins))
    }

    /// Two logits between which are all of a bin.
    pub fn range_of(&self, bin: u32, bounds: &FilterBounds) -> (f32, f32) {
        let shift = comptime!(bin_shift(self.log2_bins));
        bounds.range(bin << shift, (bin + 1) << shift)
    }

    /// The sum of weights of a segment in the bins before one.
    pub fn mass(&self, segment: u32, bin: u32) -> Wide {
        let mut mass = Wide::new(0u32, 0u32);
        if bin > 0 {
            let own = bin - 1;
            let log2_bins = comptime!(self.log2_bins);
            let pair =
                self.parts.masses[pair_at(self.index, segment, own, self.segments(), log2_bins)];
            let is_second = own & 1 == 1;
            mass.high = select(is_second, pair.extract(2usize), pair.extract(0usize));
            mass.low = select(is_second, pair.extract(3usize), pair.extract(1usize));
        }
        mass
    }
}

/// How far exponents are shifted to be bins: all below 2 to the power of 31 have one.
pub(super) fn bin_shift(log2_bins: u32) -> u32 {
    31 - log2_bins
}

/// Where the sums of a bin and its neighbour are.
#[cube]
pub(super) fn pair_at(
    row: u32,
    segment: u32,
    bin: u32,
    segments: u32,
    #[comptime] log2_bins: u32,
) -> usize {
    let bins = comptime!(1usize << log2_bins);
    let segment = row as usize * segments as usize + segment as usize;
    (segment * bins + bin as usize) / 2
}

/// Words of the sums of a row.
#[cube]
pub(super) fn total_words(#[comptime] log2_bins: u32) -> usize {
    comptime!((1usize << log2_bins) * TOTAL_WORDS + COUNTERS).runtime()
}

/// The last exponent of a bin.
#[cube]
pub(super) fn last_of_bin(bin: u32, #[comptime] log2_bins: u32) -> u32 {
    let shift = comptime!(bin_shift(log2_bins));
    ((bin + 1) << shift) - 1
}
