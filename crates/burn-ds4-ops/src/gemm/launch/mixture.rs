use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::stream::{BUDGETS, Budget, StreamProblem, launch_stream};
use super::sum::{SumBlueprint, SumProblem, launch_sum};
use super::{Hidden, Pairing, SMALL_M_ROWS, StreamBlueprint};
use crate::caps::Caps;
use crate::gemm::{Matrices, terms};
use crate::launching::output;

/// Both launches of a mixture of experts for a small number of tokens: the routed experts, and a
/// shared one if there is any.
pub(crate) struct Mixture<'a> {
    pub x: &'a CubeTensor,
    /// Both are `[tokens, slots]`.
    pub ids: &'a CubeTensor,
    pub scores: &'a CubeTensor,
    /// `[gate and up, down]`.
    pub experts: [&'a Matrices; 2],
    pub limit: f64,
    /// Whether hidden values are rounded to FP8.
    pub rounded: bool,
    pub shared: Option<SharedExpert<'a>>,
}

#[derive(Clone, Copy)]
pub(crate) struct SharedExpert<'a> {
    /// `[gate and up, down]`.
    pub matrices: [&'a Matrices; 2],
    pub limit: f64,
    pub rounded: bool,
}

/// How both launches are compiled.
pub(crate) struct MixtureBlueprint {
    gated: StreamBlueprint,
    shared_gated: Option<StreamBlueprint>,
    sum: SumBlueprint,
}

impl MixtureBlueprint {
    /// `None` where shared memory is too small for any number of tokens up to [`SMALL_M_ROWS`].
    pub fn new(mixture: &Mixture<'_>) -> Option<Self> {
        let caps = &Caps::of(&mixture.x.client);
        let [tokens, slots] = mixture.sizes();
        let most = |budget: &&Budget| {
            let both = mixture.gated(SMALL_M_ROWS, caps, budget);
            let fits = |blueprint: &StreamBlueprint| blueprint.fits(caps);
            both.iter().flatten().all(fits) && bytes_of(&both) <= caps.shared_bytes
        };
        let budget = BUDGETS.iter().find(most)?;
        let [gated, shared_gated] = mixture.gated(tokens, caps, budget);
        let shared = mixture.shared.map(|shared| shared.matrices[1]);
        let dtype = mixture.x.dtype;
        Some(Self {
            gated: gated?,
            shared_gated,
            sum: SumBlueprint::new(dtype, mixture.experts[1], shared, (tokens, slots), caps)?,
        })
    }
}

/// Bytes of shared memory of a cube, which has one of the two kinds of work.
fn bytes_of(blueprints: &[Option<StreamBlueprint>; 2]) -> usize {
    let most = |bytes: fn(&StreamBlueprint) -> usize| {
        blueprints.iter().flatten().map(bytes).max().unwrap_or(0)
    };
    let other = most(|blueprint| blueprint.other_bytes());
    let partials = most(|blueprint| blueprint.partial_bytes());
    other + partials + most(|blueprint| blueprint.x_bytes())
}

impl<'a> Mixture<'a> {
    fn sizes(&self) -> [usize; 2] {
        [self.ids.meta.shape()[0], self.ids.meta.shape()[1]]
    }

    /// The blueprints of the first launch, for the routed experts and the shared one.
    fn gated(&self, tokens: usize, caps: &Caps, budget: &Budget) -> [Option<StreamBlueprint>; 2] {
        let [_, slots] = self.sizes();
        let of = |[gate_up, down]: [&Matrices; 2], slots| {
            let dtype = self.x.dtype;
            StreamBlueprint::of_rows(dtype, gate_up, tokens, slots, (caps, budget))
                .gated(down.format)
        };
        let experts = of(self.experts, slots);
        let Some(shared) = self.shared else {
            return [Some(experts), None];
        };
        let shared = of(shared.matrices, 1).paired(Pairing::One);
        StreamBlueprint::with_common_planes([experts, shared]).map(Some)
    }

    /// The sums of `tokens` in `dtype`.
    pub fn launch(&self, blueprint: &MixtureBlueprint, dtype: DType) -> CubeTensor {
        let [tokens, slots] = self.sizes();
        let hidden = |down: &'a Matrices, rounded| Hidden {
            down,
            columns: down.padded_columns(),
            dtype: DType::BF16,
            terms: terms(self.x.dtype),
            rounded,
        };
        let [gate_up, down] = self.experts;
        let pairs = tokens * slots;
        let layout = hidden(down, self.rounded);
        let routed_hidden = layout.output(self.x, pairs);
        let routed = StreamProblem {
            ids: Some(self.ids),
            scores: Some(self.scores),
            pairs_per_row: slots,
            limit: self.limit,
            ..StreamProblem::of_rows(gate_up, &routed_hidden, pairs, blueprint.gated)
        };
        let shared = self.shared.zip(blueprint.shared_gated);
        let shared = shared.map(|(shared, blueprint)| {
            let layout = hidden(shared.matrices[1], shared.rounded);
            (shared, blueprint, layout, layout.output(self.x, tokens))
        });
        let problem = shared
            .as_ref()
            .map(|(shared, blueprint, _, output)| StreamProblem {
                limit: shared.limit,
                ..StreamProblem::of_rows(shared.matrices[0], output, tokens, *blueprint)
            });
        launch_stream(self.x, &routed, problem.as_ref());
        let sums = output(self.x, [tokens, down.rows], dtype);
        let experts = SumProblem {
            x: &layout.finish(routed_hidden),
            matrices: down,
        };
        let shared = shared.map(|(shared, _, layout, x)| (layout.finish(x), shared.matrices[1]));
        let shared = shared
            .as_ref()
            .map(|(x, matrices)| SumProblem { x, matrices });
        launch_sum(self.ids, &experts, shared.as_ref(), &blueprint.sum, &sums);
        sums
    }
}
