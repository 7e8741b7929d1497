use cubecl::prelude::*;

use crate::sampling::kernel::candidates::Candidates;
use crate::sampling::kernel::radix_select::WeightedRadixSelect;
use crate::sampling::kernel::row::SampleBlueprint;
use crate::sampling::kernel::scan::WideScanner;
use crate::sampling::kernel::wide::Wide;

/// A cube that weighs segments or chooses a token.
#[derive(CubeType)]
pub(super) struct DrawCube {
    pub scanner: WideScanner,
    /// Weights by bins.
    pub bins: WeightedRadixSelect,
    /// Elements by bins.
    pub counts: Shared<[Atomic<u32>]>,
    pub found: Shared<[u32]>,
    pub candidates: Candidates,
    #[cube(comptime)]
    pub blueprint: SampleBlueprint,
}

#[cube]
impl DrawCube {
    pub fn new(
        scanner: WideScanner,
        #[comptime] unit_candidates: u32,
        #[comptime] blueprint: SampleBlueprint,
    ) -> DrawCube {
        let SampleBlueprint { units, log2_bins } = comptime!(blueprint);
        let units = comptime!(units.cube);
        let bins = comptime!(1u32 << log2_bins);
        let counts = Shared::<[Atomic<u32>]>::new_slice(comptime!(bins as usize));
        #[unroll]
        for i in 0..comptime!(bins / units) {
            counts[(UNIT_POS + i * units) as usize].store(0u32);
        }
        DrawCube {
            scanner,
            bins: WeightedRadixSelect::new(log2_bins, units),
            counts,
            found: Shared::new_slice(5usize),
            candidates: Candidates::new(comptime!(units * unit_candidates), units),
            blueprint,
        }
    }

    /// The first of the unit's own bins, which follow each other, and how many there are.
    pub fn own_bins(&self) -> (u32, u32) {
        let SampleBlueprint { units, log2_bins } = comptime!(self.blueprint);
        let own = comptime!((1u32 << log2_bins) / units.cube);
        (UNIT_POS * own, own.runtime())
    }

    /// Clears the sums of all bins. Every unit of the cube must call this.
    pub fn clear_bins(&mut self) {
        let (first, own) = self.own_bins();
        for i in 0..own {
            self.bins.set(first + i, &Wide::new(0u32, 0u32));
        }
        sync_cube();
    }

    /// Sums the unit's own bins.
    pub fn own_sum(&self) -> Wide {
        let (first, own) = self.own_bins();
        let mut sum = Wide::new(0u32, 0u32);
        for i in 0..own {
            sum.add(&self.bins.bin(first + i));
        }
        sum
    }
}
