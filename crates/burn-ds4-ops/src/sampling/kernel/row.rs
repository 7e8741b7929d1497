use cubecl::prelude::*;

use crate::select::CubeUnits;

/// The token of a row without candidates.
pub(super) const NONE: i32 = -1;

/// How [`sample_kernel`](super::sample_kernel) is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SampleBlueprint {
    /// Units of a cube, at least those of a strip. Planes of one lane are not relied on.
    pub units: CubeUnits,
    /// Binary logarithm of the number of bins of a search. There are at least as many bins as
    /// units.
    pub log2_bins: u32,
}

/// The rows of logits.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowShape {
    pub rows: u32,
    /// Vectors of a row, and from one row to the next.
    pub vectors: u32,
    pub row_vectors: usize,
    /// Rows of a lane.
    pub lane_rows: u32,
}

/// A row of logits.
#[derive(CubeType)]
pub(super) struct SamplingRow<'a, F: Float, N: Size> {
    logits: &'a [Vector<F, N>],
    first: usize,
    pub vectors: u32,
    #[cube(comptime)]
    pub units: u32,
}

#[cube]
impl<'a, F: Float, N: Size> SamplingRow<'a, F, N> {
    pub fn new(
        logits: &'a [Vector<F, N>],
        first: usize,
        vectors: u32,
        #[comptime] units: u32,
    ) -> SamplingRow<'a, F, N> {
        SamplingRow::<'a, F, N> {
            logits,
            first,
            vectors,
            units,
        }
    }

    pub fn read(&self, vector: u32) -> Vector<F, N> {
        self.logits[self.first + vector as usize]
    }
}
