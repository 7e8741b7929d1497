use burn::backend::ops::{FloatTensorOps, IntTensorOps};

use super::args::HeadTensors;
use super::kernel::{
    ArgmaxBlueprint, CandidateShapeLaunch, CandidatesLaunch, SpecialLaunch, argmax_kernel,
    candidates_kernel, scatter_kernel,
};
use crate::arrival;
use crate::gemm::launch::dense::product_of_picks;
use crate::launching::prelude::*;

/// The most units of a cube that searches the winner.
const ARGMAX_UNITS: u32 = 1024;
/// The most candidates that each unit reads at once.
const MAX_CANDIDATES_PER_UNIT: usize = 8;
/// The most cubes of a token: one unit compares their winners.
const MAX_ARGMAX_CUBES: usize = 16;
/// Units of a cube in which each unit has one candidate.
const CANDIDATE_UNITS: u32 = 256;

/// The logits of the candidates of some tokens.
pub(super) struct Candidates {
    /// `[tokens, probes * capacity]`, f32.
    logits: CubeTensor,
    /// `[tokens, probes]`, i32.
    chosen: CubeTensor,
    /// `[clusters, capacity]`, i32.
    ids: CubeTensor,
    /// Rows, `[special]`, i32, and their logits, `[tokens, special]`, f32.
    special: Option<(CubeTensor, CubeTensor)>,
}

pub(super) fn can_run(
    h: &CubeTensor,
    head: &HeadTensors<CubeBackend>,
    chosen: &CubeTensor,
) -> bool {
    let (tokens, probes) = (h.shape()[0], chosen.shape()[1]);
    let [clusters, capacity] = head.ids.dims();
    // Special tokens count too, and there are no more of them than rows.
    let candidates = (clusters + probes) * capacity;
    i32::try_from(tokens * candidates).is_ok()
}

impl Candidates {
    pub fn new(
        h: CubeTensor,
        head: HeadTensors<CubeBackend>,
        special: Option<CubeTensor>,
        chosen: CubeTensor,
    ) -> Self {
        let capacity = head.ids.shape()[1];
        let tokens = h.shape()[0];
        let chosen = into_contiguous(chosen);
        let special = special.map(|rows| {
            let rows = into_contiguous(rows);
            let count = rows.shape()[0];
            let picks = CubeBackend::int_reshape(rows.clone(), Shape::new([1, count]));
            let picks = CubeBackend::int_expand(picks, Shape::new([tokens, count]));
            (
                rows,
                product_of_picks(h.clone(), head.weight.clone(), picks, 1),
            )
        });
        Self {
            logits: product_of_picks(h, head.weight, chosen.clone(), capacity),
            chosen,
            ids: into_contiguous(head.ids),
            special,
        }
    }

    fn dims(&self) -> [usize; 4] {
        let [tokens, probes] = self.chosen.dims();
        let special = self.special.as_ref().map_or(0, |(rows, _)| rows.shape()[0]);
        [tokens, probes, self.ids.shape()[1], special]
    }

    fn arg(self) -> CandidatesLaunch {
        let [tokens, probes, capacity, special] = self.dims().map(|size| size as u32);
        let special_arg = self.special.map(|(rows, logits)| {
            SpecialLaunch::new(rows.into_buffer_arg(), logits.into_buffer_arg())
        });
        CandidatesLaunch::new(
            self.logits.into_buffer_arg(),
            self.chosen.into_buffer_arg(),
            self.ids.into_buffer_arg(),
            special_arg.into(),
            CandidateShapeLaunch::new(tokens, probes, capacity, special),
        )
    }

    /// The winner of each token: `[tokens]`, i32.
    pub fn argmax(self) -> CubeTensor {
        let [tokens, probes, capacity, _] = self.dims();
        let client = self.logits.client.clone();
        let most = Caps::of(&client).cube_units.min(ARGMAX_UNITS);
        let units = 1 << most.ilog2();
        let per_unit = (probes * capacity).div_ceil(units as usize);
        let most = if Caps::of(&client).last_cube {
            MAX_ARGMAX_CUBES
        } else {
            1
        };
        let cubes = per_unit.div_ceil(MAX_CANDIDATES_PER_UNIT).min(most);
        let blueprint = ArgmaxBlueprint {
            units,
            per_unit: per_unit.min(MAX_CANDIDATES_PER_UNIT).next_power_of_two() as u32,
            split: cubes > 1,
            target: Caps::of(&client).target,
        };
        let partials = output(&self.logits, [2, tokens, cubes], DType::U32);
        let (counters, turn) = arrival::counters(&client, &self.logits.device, blueprint.split);
        let winners = output(&self.logits, [tokens], DType::I32);
        // SAFETY: candidates are rows of the weight; there are `cubes` cubes for each token, and
        // two counters.
        unsafe {
            argmax_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, tokens as u32, 1),
                CubeDim::new_1d(units),
                address_type([&self.logits, &self.ids]),
                self.arg(),
                partials.into_buffer_arg(),
                BufferArg::from_raw_parts(counters, 2),
                winners.clone().into_buffer_arg(),
                turn,
                blueprint,
            );
        }
        winners
    }

    /// Ids and logits of all candidates: `[tokens, probes * capacity + special]`.
    pub fn all(self) -> (CubeTensor, CubeTensor) {
        let [tokens, probes, capacity, special] = self.dims();
        let client = self.logits.client.clone();
        let shape = [tokens, probes * capacity + special];
        let all_ids = output(&self.logits, shape, DType::I32);
        let all_logits = output(&self.logits, shape, DType::F32);
        let cubes = (shape[0] * shape[1]).div_ceil(CANDIDATE_UNITS as usize);
        // SAFETY: candidates are rows of the weight; units past the last candidate read and write
        // nothing.
        unsafe {
            candidates_kernel::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(CANDIDATE_UNITS),
                address_type([&self.logits, &self.ids, &all_logits]),
                self.arg(),
                all_ids.clone().into_buffer_arg(),
                all_logits.clone().into_buffer_arg(),
            );
        }
        (all_ids, all_logits)
    }

    /// Logits of all ids, `-inf` for those that are no candidates: `[tokens, vocabulary]`, f32.
    pub fn scattered(self, vocabulary: usize) -> CubeTensor {
        let [tokens, probes, capacity, special] = self.dims();
        let client = self.logits.client.clone();
        // In one dimension, an allocation has no gaps.
        let all = Shape::new([tokens * vocabulary]);
        let none = f32::NEG_INFINITY.into();
        let all = CubeBackend::float_full(all, none, &self.logits.device, FloatDType::F32);
        let candidates = tokens * (probes * capacity + special);
        // SAFETY: candidates are rows of the weight; units past the last candidate read and write
        // nothing; ids are columns of the vocabulary, each of one candidate.
        unsafe {
            scatter_kernel::launch_unchecked(
                &client,
                cube_count(&client, candidates.div_ceil(CANDIDATE_UNITS as usize)),
                CubeDim::new_1d(CANDIDATE_UNITS),
                address_type([&self.logits, &self.ids, &all]),
                self.arg(),
                all.clone().into_buffer_arg(),
                vocabulary as u32,
            );
        }
        CubeBackend::float_reshape(all, Shape::new([tokens, vocabulary]))
    }
}
