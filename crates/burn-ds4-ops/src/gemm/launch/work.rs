use super::SMALL_M_ROWS;
use crate::caps::Caps;
use crate::gemm::kernel::{Pairing, StreamBlueprint};

/// Bytes of `x` in shared memory, at most.
const MAX_X_BYTES: usize = 70 << 10;
/// Tiles of a plane up to which the partials of all of them are in shared memory.
const MAX_PARTIAL_TILES: u32 = 8;

/// What a cube has to do of two kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CubeWork {
    /// One of the two.
    Either,
    /// Both, one after the other, whose rows and partials are in shared memory at once.
    Both,
}

/// How one launch is compiled for its problem, or its two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blueprints {
    pub first: StreamBlueprint,
    pub second: Option<StreamBlueprint>,
}

impl Blueprints {
    /// Cubes have the larger of both numbers of planes.
    pub(super) fn new(first: StreamBlueprint, second: Option<StreamBlueprint>) -> Self {
        let cube_planes = second
            .map_or(0, |second| second.cube_planes)
            .max(first.cube_planes);
        let with_planes = |blueprint| StreamBlueprint {
            cube_planes,
            ..blueprint
        };
        Self {
            first: with_planes(first),
            second: second.map(with_planes),
        }
    }

    /// What `of` makes of the first of `budgets` that fits, for so many rows of `x`. The choice
    /// depends on the device and the weights alone, because it decides how K is split: it is `None`
    /// for more than [`SMALL_M_ROWS`], or where shared memory is too small for as many.
    pub(super) fn by_budget<B>(
        budgets: &[B],
        rows: usize,
        (caps, work): (&Caps, CubeWork),
        of: impl Fn(&B, usize) -> Self,
    ) -> Option<Self> {
        let fits = |budget: &&B| of(budget, SMALL_M_ROWS).fits(caps, work);
        let few = rows <= SMALL_M_ROWS;
        let budget = few.then(|| budgets.iter().find(fits)).flatten()?;
        Some(of(budget, rows))
    }

    fn both(&self) -> impl Iterator<Item = &StreamBlueprint> {
        std::iter::once(&self.first).chain(&self.second)
    }

    /// Whether a cube has a unit for each pair that it groups, and enough shared memory for so many
    /// pairs and for fewer.
    pub(super) fn fits(&self, caps: &Caps, work: CubeWork) -> bool {
        let of = |bytes: fn(StreamBlueprint) -> usize| self.both().map(move |own| bytes(*own));
        let of_work = |bytes| match work {
            CubeWork::Either => of(bytes).max().unwrap_or(0),
            CubeWork::Both => of(bytes).sum(),
        };
        let ring = of(StreamBlueprint::ring_bytes).max().unwrap_or(0);
        let groups: usize = of(StreamBlueprint::group_bytes).sum();
        let partials = of_work(StreamBlueprint::partial_bytes);
        let x = of_work(StreamBlueprint::x_bytes);
        self.both().all(|own| {
            own.groups().held_pairs() <= own.cube_units()
                && (own.pairing == Pairing::Sorted || own.x_bytes() <= MAX_X_BYTES)
        }) && caps.fits_shared(ring + groups + partials + x)
    }

    /// The same with partials of exactly as many tiles as a plane has, of either, if those are few
    /// and fit: there is one barrier for their sums, and what is left of shared memory is cache.
    pub(super) fn with_partials_of(self, [tiles, second_tiles]: [usize; 2], caps: &Caps) -> Self {
        let of = |own: StreamBlueprint, tiles: usize| StreamBlueprint {
            partial_tiles: match (1..=MAX_PARTIAL_TILES as usize).contains(&tiles) {
                true => tiles as u32,
                false => own.partial_tiles,
            },
            ..own
        };
        let own = Self {
            first: of(self.first, tiles),
            second: self.second.map(|second| of(second, second_tiles)),
        };
        match own.fits(caps, CubeWork::Either) {
            true => own,
            false => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caps::tests::H200;
    use crate::gemm::Fp4Layout;
    use crate::gemm::kernel::{InputLayout, WeightFormat};

    /// How pairs of tokens are summed by FP4 weights, with so many planes to a cube.
    fn sums_of_pairs(pairs: u32, cube_planes: u32) -> StreamBlueprint {
        StreamBlueprint {
            input: InputLayout {
                format: WeightFormat::Fp4(Fp4Layout::Plain),
                terms: 1,
                permuted: true,
                f16_input: false,
            },
            pairs,
            pairing: Pairing::Ids,
            one_token: false,
            x_rows: 0,
            x_in_registers: false,
            x_k_blocks: 2,
            k_splits: 3,
            planes: 3,
            plane_k_blocks: 2,
            concurrent_tiles: cube_planes / 3,
            cube_planes,
            one_stage: false,
            partial_tiles: 1,
            k_aligned: true,
            scale_vectors: true,
            in_parts: false,
            gated: None,
            target: H200.target,
        }
    }

    #[test]
    fn a_cube_has_a_unit_for_each_pair() {
        let fits = |pairs, planes| sums_of_pairs(pairs, planes).fits(&H200);
        assert!(fits(64, 3) && fits(128, 6));
        assert!(!fits(128, 3), "96 units group 128 pairs");
        let by_rows = StreamBlueprint {
            pairing: Pairing::Every,
            ..sums_of_pairs(128, 3)
        };
        assert!(by_rows.fits(&H200), "nothing is grouped");
    }

    #[test]
    fn what_fits_for_many_pairs_fits_for_fewer() {
        for planes in [3, 6, 12, 15] {
            let bytes: Vec<_> = [8, 16, 32, 64, 128]
                .map(|pairs| sums_of_pairs(pairs, planes).group_bytes())
                .into();
            assert!(bytes.is_sorted(), "{planes} planes: {bytes:?}");
            // The groups of 32 pairs, which each plane has, and the first pair of each expert.
            assert!(bytes[2] >= 4 * (32 + planes as usize * 97), "{bytes:?}");
        }
        // Exactly so much and what compilers reserve.
        let own = sums_of_pairs(64, 6);
        let caps = |shared_bytes| Caps {
            shared_bytes,
            ..H200
        };
        let bytes = own.shared_bytes() + 1024;
        assert!(own.fits(&caps(bytes)) && !own.fits(&caps(bytes - 1)));
    }
}
