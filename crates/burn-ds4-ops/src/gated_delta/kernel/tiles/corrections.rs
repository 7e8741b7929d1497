use cubecl::prelude::*;

use super::blueprint::{TERMS, TilesBlueprint};
use crate::gemm::kernel::{bf16_pair, term_of};

/// Corrections of the planes' rows for each token, in shared memory. A correction is stored as
/// `bf16` terms whose sum it is, two tokens to a word. A row has the words of the first terms, then
/// those of the second terms, and so on.
#[derive(CubeType)]
pub(super) struct CorrectionTerms {
    rows: Shared<[u32]>,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

#[cube]
impl CorrectionTerms {
    pub fn new(#[comptime] blueprint: TilesBlueprint) -> CorrectionTerms {
        let rows =
            comptime!(blueprint.groups * blueprint.group_rows() * blueprint.correction_pitch());
        CorrectionTerms {
            rows: Shared::new_slice(rows as usize),
            blueprint,
        }
    }

    /// Stores the corrections of this lane's row for the first `tokens` tokens, and zeros for the
    /// tokens after them. The plane may read them afterwards.
    pub fn store(&mut self, corrections: &Array<f32>, #[comptime] tokens: u32) {
        let blueprint = comptime!(self.blueprint);
        let rows = comptime!(blueprint.plane_rows());
        let pairs = comptime!(blueprint.pairs());
        let row = UNIT_POS_Y * rows + UNIT_POS_X % rows;
        let to = (row * comptime!(blueprint.correction_pitch())) as usize;
        #[unroll]
        for i in 0..pairs {
            let mut low = 0.0f32;
            let mut high = 0.0f32;
            if comptime!(2 * i < tokens) {
                low = corrections[comptime!(2 * i as usize)];
            }
            if comptime!(2 * i + 1 < tokens) {
                high = corrections[comptime!(2 * i as usize + 1)];
            }
            #[unroll]
            for term in 0..TERMS {
                let word = bf16_pair(term_of(low, term.runtime()), term_of(high, term.runtime()));
                self.rows[to + comptime!((term * pairs + i) as usize)] = word;
            }
        }
        #[unroll]
        for word in comptime!(TERMS * pairs)..comptime!(blueprint.correction_words()) {
            self.rows[to + comptime!(word as usize)] = 0u32;
        }
        sync_plane();
    }

    /// One word of row number `row` of the plane.
    pub fn word(&self, row: u32, index: u32) -> u32 {
        let blueprint = comptime!(self.blueprint);
        let row = UNIT_POS_Y * comptime!(blueprint.plane_rows()) + row;
        self.rows[(row * comptime!(blueprint.correction_pitch()) + index) as usize]
    }
}
