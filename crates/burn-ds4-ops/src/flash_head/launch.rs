use burn::backend::TensorMetadata;
use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::backend::HeadTensors;
use super::kernel::{
    ArgmaxBlueprint, SizesLaunch, SpecialLaunch, argmax_kernel, candidates_kernel,
};
use crate::arrival;
use crate::intrinsics::Target;
use crate::launching::{address_type, cube_count, output};
use crate::matmul::launch::{can_multiply, product_of_picks};

/// Units of a cube that looks for the winner, at most.
const UNITS: u32 = 1024;
/// Candidates that each of them reads at once, at most.
const EACH: usize = 8;
/// Cubes of a token, at most: one unit compares their winners.
const CUBES: usize = 16;
/// Units of a cube that has one candidate each.
const CANDIDATE_UNITS: u32 = 256;

/// Logits of the candidates of some tokens.
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

pub(super) fn can_run(h: &CubeTensor, head: &HeadTensors<CubeBackend>, probes: usize) -> bool {
    let tokens = h.shape()[0];
    let [clusters, capacity] = head.ids.shape().dims();
    // With room for special tokens, which are rows as well.
    let candidates = (clusters + probes) * capacity;
    can_multiply(h) && i32::try_from(tokens * candidates).is_ok()
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

    fn sizes(&self) -> [usize; 4] {
        let [tokens, probes] = self.chosen.shape().dims();
        let special = self.special.as_ref().map_or(0, |(rows, _)| rows.shape()[0]);
        [tokens, probes, self.ids.shape()[1], special]
    }

    fn sizes_arg(&self) -> SizesLaunch {
        let [tokens, probes, capacity, special] = self.sizes().map(|size| size as u32);
        SizesLaunch::new(tokens, probes, capacity, special)
    }

    fn special_arg(&self) -> SpecialLaunch {
        let special = self.special.iter();
        let (rows, logits): (Vec<_>, Vec<_>) = special.cloned().unzip();
        SpecialLaunch::new(
            rows.into_iter().map(CubeTensor::into_buffer_arg).collect(),
            logits
                .into_iter()
                .map(CubeTensor::into_buffer_arg)
                .collect(),
        )
    }

    /// The winner of each token: `[tokens]`, i32.
    pub fn argmax(self) -> CubeTensor {
        let [tokens, probes, capacity, _] = self.sizes();
        let client = self.logits.client.clone();
        let most = client.properties().hardware.max_units_per_cube.min(UNITS);
        let units = 1 << most.ilog2();
        let each = (probes * capacity).div_ceil(units as usize);
        let most = if arrival::has_last_cube(&client) {
            CUBES
        } else {
            1
        };
        let cubes = each.div_ceil(EACH).min(most);
        let blueprint = ArgmaxBlueprint {
            units,
            each: each.min(EACH).next_power_of_two() as u32,
            split: cubes > 1,
            target: Target::of(&client),
        };
        let partial = output(&self.logits, [2, tokens, cubes], DType::U32);
        let counter = arrival::counter(&client, &self.logits.device);
        let winners = output(&self.logits, [tokens], DType::I32);
        let (sizes, special) = (self.sizes_arg(), self.special_arg());
        // SAFETY: candidates are rows of the weight, and there are `cubes` cubes for each token.
        unsafe {
            argmax_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, tokens as u32, 1),
                CubeDim::new_1d(units),
                address_type([&self.logits, &self.ids]),
                self.logits.into_buffer_arg(),
                self.chosen.into_buffer_arg(),
                self.ids.into_buffer_arg(),
                special,
                partial.into_buffer_arg(),
                BufferArg::from_raw_parts(counter, 1),
                winners.clone().into_buffer_arg(),
                sizes,
                blueprint,
            );
        }
        winners
    }

    /// Ids and logits of all: `[tokens, probes * capacity + special]`.
    pub fn all(self) -> (CubeTensor, CubeTensor) {
        let [tokens, probes, capacity, special] = self.sizes();
        let client = self.logits.client.clone();
        let shape = [tokens, probes * capacity + special];
        let all_ids = output(&self.logits, shape, DType::I32);
        let all_logits = output(&self.logits, shape, DType::F32);
        let cubes = (shape[0] * shape[1]).div_ceil(CANDIDATE_UNITS as usize);
        let (sizes, special) = (self.sizes_arg(), self.special_arg());
        // SAFETY: as above; units past the end write nothing.
        unsafe {
            candidates_kernel::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(CANDIDATE_UNITS),
                address_type([&self.logits, &self.ids, &all_logits]),
                self.logits.into_buffer_arg(),
                self.chosen.into_buffer_arg(),
                self.ids.into_buffer_arg(),
                special,
                all_ids.clone().into_buffer_arg(),
                all_logits.clone().into_buffer_arg(),
                sizes,
            );
        }
        (all_ids, all_logits)
    }
}
