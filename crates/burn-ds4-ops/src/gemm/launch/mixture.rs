use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::problem::StreamProblem;
use super::stream::{BUDGETS, Budget, XRows, launch_stream};
use super::sum::{SumProblem, launch_sum, sum_blueprints};
use super::work::{CubeWork, ExpertBlueprints};
use super::{Experts, SMALL_M_ROWS, StreamBlueprint};
use crate::caps::Caps;
use crate::gemm::kernel::Pairing;
use crate::gemm::terms;
use crate::launching::output;

/// Experts and the tokens that they are for: the routed ones, and a shared one if there is any.
pub(crate) struct Mixture {
    pub x: CubeTensor,
    /// Both are `[tokens, slots]`.
    pub ids: CubeTensor,
    pub scores: CubeTensor,
    pub experts: Experts,
    pub shared: Option<Experts>,
}

/// How both launches for a small number of tokens are compiled.
pub(crate) struct MixtureBlueprint {
    gated: ExpertBlueprints,
    sum: ExpertBlueprints,
}

impl MixtureBlueprint {
    /// `None` where shared memory is too small for any number of tokens up to [`SMALL_M_ROWS`].
    pub fn new(mixture: &Mixture) -> Option<Self> {
        let caps = &Caps::of(&mixture.x.client);
        let [tokens, slots] = mixture.sizes();
        let most = |budget: &&Budget| {
            let blueprints = mixture.gated(SMALL_M_ROWS, caps, budget);
            blueprints.fits(caps, CubeWork::Either)
        };
        let budget = BUDGETS.iter().find(most)?;
        let shared = mixture.shared.as_ref().map(|shared| &shared.matrices[1]);
        let (dtype, down) = (mixture.x.dtype, &mixture.experts.matrices[1]);
        Some(Self {
            gated: mixture.gated(tokens, caps, budget),
            sum: sum_blueprints(dtype, down, shared, (tokens, slots), caps)?,
        })
    }
}

impl Mixture {
    fn sizes(&self) -> [usize; 2] {
        self.ids.shape().dims()
    }

    /// The blueprints of the first launch.
    fn gated(&self, tokens: usize, caps: &Caps, budget: &Budget) -> ExpertBlueprints {
        let [_, slots] = self.sizes();
        let of = |experts: &Experts, pairing, slots| {
            let ([gate_up, down], dtype) = (experts.matrices(), self.x.dtype);
            let rows = XRows {
                rows: tokens,
                pairing,
                slots,
                permuted: false,
                reloads: false,
            };
            StreamBlueprint::of_rows(dtype, gate_up, rows, (caps, budget)).gated(down.format)
        };
        let shared = self.shared.as_ref();
        let shared = shared.map(|shared| of(shared, Pairing::One, 0));
        ExpertBlueprints::new(of(&self.experts, Pairing::Ids, slots), shared)
    }

    /// The sums of all tokens in `dtype`, in two launches.
    pub fn launch_tiles<'a>(&'a self, blueprint: &MixtureBlueprint, dtype: DType) -> CubeTensor {
        let [tokens, slots] = self.sizes();
        let pairs = tokens * slots;
        let layout = |experts: &'a Experts| {
            let columns = experts.matrices[1].padded_columns();
            experts.hidden(columns, DType::BF16, terms(self.x.dtype))
        };
        let [gate_up, down] = self.experts.matrices();
        let routed_layout = layout(&self.experts);
        let routed_hidden = routed_layout.output(&self.x, pairs);
        let routed = StreamProblem {
            ids: Some(&self.ids),
            scores: Some(&self.scores),
            slots,
            limit: self.experts.limit,
            ..StreamProblem::of_rows(gate_up, &routed_hidden, tokens, blueprint.gated.experts)
        };
        let shared = self.shared.as_ref().map(|shared| {
            let layout = layout(shared);
            (shared, layout, layout.output(&self.x, tokens))
        });
        let problem = shared.as_ref().zip(blueprint.gated.shared);
        let problem = problem.map(|((shared, _, output), blueprint)| StreamProblem {
            limit: shared.limit,
            ..StreamProblem::of_rows(&shared.matrices[0], output, tokens, blueprint)
        });
        launch_stream(&self.x, &routed, problem.as_ref());
        let sums = output(&self.x, [tokens, down.rows], dtype);
        let experts = SumProblem {
            x: routed_layout.finish(routed_hidden),
            matrices: down,
        };
        let shared = shared.map(|(shared, layout, hidden)| SumProblem {
            x: layout.finish(hidden),
            matrices: &shared.matrices[1],
        });
        launch_sum(&self.ids, &experts, shared.as_ref(), &blueprint.sum, &sums);
        sums
    }
}
