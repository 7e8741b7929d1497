use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::few::cubes_of;
use super::{Matrices, parts};
use crate::launching::output;
use crate::packed::kernel::{FewBlueprint, Pairing, few_mixture_kernel, few_sum_kernel};

/// Both launches for a few tokens' experts of their own and the one they share.
pub(crate) struct Mixture<'a> {
    pub x: &'a CubeTensor,
    /// `[tokens, slots]`, both.
    pub ids: &'a CubeTensor,
    pub scores: &'a CubeTensor,
    /// `[gate and up, down]` of the experts, and of the shared one.
    pub experts: [&'a Matrices; 2],
    pub shared: [&'a Matrices; 2],
    pub limits: [f64; 2],
}

/// How the launches are compiled, each for the experts and the shared one.
pub(crate) struct MixtureBlueprint {
    gated: [FewBlueprint; 2],
    sum: [FewBlueprint; 2],
}

impl MixtureBlueprint {
    /// `None` where shared memory is too small.
    pub fn new(mixture: &Mixture<'_>, tokens: usize, slots: usize) -> Option<Self> {
        let (dtype, client) = (mixture.x.dtype, &mixture.x.client);
        let counts = (tokens, tokens * slots);
        let [gate_up, down] = mixture.experts;
        let [shared_gate_up, shared_down] = mixture.shared;
        let gated = [
            FewBlueprint::new(dtype, false, gate_up, counts, client),
            FewBlueprint::new(dtype, false, shared_gate_up, (tokens, tokens), client)
                .paired(Pairing::One),
        ];
        let sum = [
            FewBlueprint::new(dtype, true, down, counts, client),
            FewBlueprint::of_shared(dtype, shared_down, tokens, client),
        ];
        let gated = FewBlueprint::side_by_side(gated);
        let sum = FewBlueprint::side_by_side(sum);
        // Of the tokens' rows, either all are in shared memory or none.
        let all = sum.iter().all(|blueprint| blueprint.lines > 0);
        let staged = all && fits(bytes_of_sum(&sum), client);
        let sum = if staged {
            sum
        } else {
            sum.map(|blueprint| FewBlueprint {
                lines: 0,
                ..blueprint
            })
        };
        let small = gated.iter().all(|blueprint| blueprint.fits(client));
        let possible =
            small && fits(bytes_of_gated(&gated), client) && fits(bytes_of_sum(&sum), client);
        possible.then_some(Self { gated, sum })
    }
}

fn fits(bytes: usize, client: &Client) -> bool {
    bytes <= client.properties().hardware.max_shared_memory_size
}

/// Cubes have one of the two kinds of work.
fn bytes_of_gated([experts, shared]: &[FewBlueprint; 2]) -> usize {
    let waiting = experts.waiting_bytes().max(shared.waiting_bytes());
    let staged = experts.staged_bytes().max(shared.staged_bytes());
    experts.other_bytes() + waiting + staged
}

/// Cubes have both.
fn bytes_of_sum([experts, shared]: &[FewBlueprint; 2]) -> usize {
    let waiting = experts.waiting_bytes() + shared.waiting_bytes();
    let staged = experts.staged_bytes() + shared.staged_bytes();
    experts.other_bytes() + waiting + staged
}

impl Mixture<'_> {
    /// The sums of `tokens` in `dtype`.
    pub fn launch(&self, blueprint: MixtureBlueprint, dtype: DType) -> CubeTensor {
        let [tokens, slots] = [self.ids.meta.shape()[0], self.ids.meta.shape()[1]];
        let [_, down] = self.experts;
        let [_, shared_down] = self.shared;
        let lines = tokens * parts(self.x.dtype) as usize;
        let hidden = output(self.x, [lines * slots, down.padded_columns()], DType::BF16);
        let shared_hidden = output(self.x, [lines, shared_down.padded_columns()], DType::BF16);
        self.launch_gated(&hidden, &shared_hidden, blueprint.gated);
        let sums = output(self.x, [tokens, down.rows], dtype);
        self.launch_sum(hidden, shared_hidden, blueprint.sum, &sums);
        sums
    }

    fn launch_gated(
        &self,
        hidden: &CubeTensor,
        shared_hidden: &CubeTensor,
        blueprints: [FewBlueprint; 2],
    ) {
        let client = self.x.client.clone();
        let [tokens, slots] = [self.ids.meta.shape()[0], self.ids.meta.shape()[1]];
        let [gate_up, down] = self.experts;
        let [shared_gate_up, shared_down] = self.shared;
        let tiles = |matrices: &Matrices| (matrices.rows / 2).div_ceil(8);
        let groups = (tokens * slots).min(gate_up.count);
        let tiles = tiles(gate_up) * groups + tiles(shared_gate_up);
        // One for each kind of work at least.
        let cubes = cubes_of(&client, tiles).max(2);
        let size = 16 / self.x.elem_size();
        let dtypes = [self.x.dtype, self.ids.dtype, hidden.dtype].map(dtype_to_storage_type);
        let x_vectors = self.x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; ids are those of matrices; writes are within the
        // outputs.
        unsafe {
            few_mixture_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, 1, 1),
                blueprints[0].cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the instructions.
                AddressType::U64,
                size,
                gate_up.scale_vector(),
                shared_gate_up.scale_vector(),
                self.x.clone().into_buffer_arg(),
                self.ids.clone().into_buffer_arg(),
                super::optional(Some(self.scores)),
                gate_up.words_arg(),
                gate_up.scales_arg(),
                shared_gate_up.words_arg(),
                shared_gate_up.scales_arg(),
                hidden.clone().into_buffer_arg(),
                shared_hidden.clone().into_buffer_arg(),
                tokens as u32,
                slots as u32,
                gate_up.count as u32,
                x_vectors,
                gate_up.stack(),
                shared_gate_up.stack(),
                self.limits[0] as f32,
                self.limits[1] as f32,
                [down.format, shared_down.format],
                blueprints,
                dtypes,
            );
        }
    }

    fn launch_sum(
        &self,
        hidden: CubeTensor,
        shared_hidden: CubeTensor,
        [blueprint, shared]: [FewBlueprint; 2],
        result: &CubeTensor,
    ) {
        let client = hidden.client.clone();
        let [tokens, slots] = [self.ids.meta.shape()[0], self.ids.meta.shape()[1]];
        let [_, down] = self.experts;
        let [_, shared_down] = self.shared;
        // SAFETY: as above.
        unsafe {
            few_sum_kernel::launch_unchecked(
                &client,
                blueprint.sum_cubes(down.rows),
                blueprint.cube_dim(),
                AddressType::U64,
                down.scale_vector(),
                shared_down.scale_vector(),
                hidden.into_buffer_arg(),
                shared_hidden.into_buffer_arg(),
                self.ids.clone().into_buffer_arg(),
                down.words_arg(),
                down.scales_arg(),
                shared_down.words_arg(),
                shared_down.scales_arg(),
                result.clone().into_buffer_arg(),
                tokens as u32,
                slots as u32,
                down.count as u32,
                down.stack(),
                shared_down.stack(),
                blueprint,
                Some(shared),
                [self.ids.dtype, result.dtype].map(dtype_to_storage_type),
            );
        }
    }
}
