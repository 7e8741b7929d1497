use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::small_m::cubes_of;
use super::{Matrices, terms};
use crate::launching::output;
use crate::packed::kernel::{Pairing, SmallMBlueprint, small_m_mixture_kernel, small_m_sum_kernel};

/// Both launches of a mixture of experts for a small number of tokens: the routed experts and the
/// shared one.
pub(crate) struct Mixture<'a> {
    pub x: &'a CubeTensor,
    /// Both are `[tokens, slots]`.
    pub ids: &'a CubeTensor,
    pub scores: &'a CubeTensor,
    /// `[gate and up, down]` of the experts, and of the shared one.
    pub experts: [&'a Matrices; 2],
    pub shared: [&'a Matrices; 2],
    pub limits: [f64; 2],
}

/// How both launches are compiled, each for the routed experts and the shared one.
pub(crate) struct MixtureBlueprint {
    gated: [SmallMBlueprint; 2],
    sum: [SmallMBlueprint; 2],
}

impl MixtureBlueprint {
    /// `None` where shared memory is too small.
    pub fn new(mixture: &Mixture<'_>, tokens: usize, slots: usize) -> Option<Self> {
        let (dtype, client) = (mixture.x.dtype, &mixture.x.client);
        let counts = (tokens, tokens * slots);
        let [gate_up, down] = mixture.experts;
        let [shared_gate_up, shared_down] = mixture.shared;
        let gated = [
            SmallMBlueprint::new(dtype, false, gate_up, counts, client),
            SmallMBlueprint::new(dtype, false, shared_gate_up, (tokens, tokens), client)
                .paired(Pairing::One),
        ];
        let sum = [
            SmallMBlueprint::new(dtype, true, down, counts, client),
            SmallMBlueprint::for_shared_expert(dtype, shared_down, tokens, client),
        ];
        let gated = SmallMBlueprint::with_common_planes(gated);
        let sum = SmallMBlueprint::with_common_planes(sum);
        // The second launch has the rows of all tokens in shared memory, or none.
        let all = sum.iter().all(|blueprint| blueprint.x_rows > 0);
        let x_in_shared = all && fits(bytes_of_sum(&sum), client);
        let sum = if x_in_shared {
            sum
        } else {
            sum.map(|blueprint| SmallMBlueprint {
                x_rows: 0,
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

/// A cube of the first launch has one of the two kinds of work.
fn bytes_of_gated([experts, shared]: &[SmallMBlueprint; 2]) -> usize {
    let partials = experts.partial_bytes().max(shared.partial_bytes());
    let x_rows = experts.x_bytes().max(shared.x_bytes());
    experts.other_bytes() + partials + x_rows
}

/// A cube of the second launch has both.
fn bytes_of_sum([experts, shared]: &[SmallMBlueprint; 2]) -> usize {
    let partials = experts.partial_bytes() + shared.partial_bytes();
    let x_rows = experts.x_bytes() + shared.x_bytes();
    experts.other_bytes() + partials + x_rows
}

impl Mixture<'_> {
    /// The sums of `tokens` in `dtype`.
    pub fn launch(&self, blueprint: MixtureBlueprint, dtype: DType) -> CubeTensor {
        let [tokens, slots] = [self.ids.meta.shape()[0], self.ids.meta.shape()[1]];
        let [_, down] = self.experts;
        let [_, shared_down] = self.shared;
        let term_rows = tokens * terms(self.x.dtype) as usize;
        let hidden = output(
            self.x,
            [term_rows * slots, down.padded_columns()],
            DType::BF16,
        );
        let shared_hidden = output(
            self.x,
            [term_rows, shared_down.padded_columns()],
            DType::BF16,
        );
        self.launch_gated(&hidden, &shared_hidden, blueprint.gated);
        let sums = output(self.x, [tokens, down.rows], dtype);
        self.launch_sum(hidden, shared_hidden, blueprint.sum, &sums);
        sums
    }

    fn launch_gated(
        &self,
        hidden: &CubeTensor,
        shared_hidden: &CubeTensor,
        blueprints: [SmallMBlueprint; 2],
    ) {
        let client = self.x.client.clone();
        let [tokens, slots] = [self.ids.meta.shape()[0], self.ids.meta.shape()[1]];
        let [gate_up, down] = self.experts;
        let [shared_gate_up, shared_down] = self.shared;
        let tiles = |matrices: &Matrices| (matrices.rows / 2).div_ceil(8);
        let groups = (tokens * slots).min(gate_up.count);
        let tiles = tiles(gate_up) * groups + tiles(shared_gate_up);
        // At least one cube for each kind of work.
        let cubes = cubes_of(&client, tiles).max(2);
        let size = 16 / self.x.elem_size();
        let dtypes = [self.x.dtype, self.ids.dtype, hidden.dtype].map(dtype_to_storage_type);
        let x_vectors = self.x.meta.strides()[0] / size;
        // SAFETY: rows and columns past the end are read as others, and not used; ids are those of
        // matrices; writes are within the outputs.
        unsafe {
            small_m_mixture_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, 1, 1),
                blueprints[0].cube_dim(),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
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
        [blueprint, shared]: [SmallMBlueprint; 2],
        result: &CubeTensor,
    ) {
        let client = hidden.client.clone();
        let [tokens, slots] = [self.ids.meta.shape()[0], self.ids.meta.shape()[1]];
        let [_, down] = self.experts;
        let [_, shared_down] = self.shared;
        // SAFETY: rows and columns past the end are read as others, and not used; pairs whose ids
        // are no experts' are left out; writes are within `[tokens, rows]`.
        unsafe {
            small_m_sum_kernel::launch_unchecked(
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
