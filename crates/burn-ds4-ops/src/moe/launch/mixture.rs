//! A small number of tokens on tensor cores, in two launches.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::Mixture;
use super::experts::Experts;
use crate::caps::Caps;
use crate::gemm::launch::{
    Blueprints, Product, Schedule, StreamProblem, SumProblem, gated_blueprints, launch_stream,
    launch_sum, sum_blueprints,
};
use crate::launching::output;

/// How both launches are compiled.
pub(super) struct MixtureBlueprint {
    gated: Blueprints,
    sum: Blueprints,
}

impl MixtureBlueprint {
    /// `None` where shared memory is too small for any number of tokens of a small M.
    pub fn new(mixture: &Mixture) -> Option<Self> {
        let (dtype, caps) = (mixture.x.dtype, &Caps::of(&mixture.x.client));
        let sizes = mixture.sizes().into();
        let experts = mixture.experts.matrices();
        let shared = mixture.shared.as_ref().map(Experts::matrices);
        let shared_down = shared.map(|[_, down]| down);
        Some(Self {
            gated: gated_blueprints(dtype, experts, shared, sizes, caps)?,
            sum: sum_blueprints(dtype, experts[1], shared_down, sizes, caps)?,
        })
    }
}

impl Mixture {
    /// The sums of all tokens in `dtype`.
    pub fn launch_tiles(&self, blueprint: &MixtureBlueprint, dtype: DType) -> CubeTensor {
        let [tokens, _] = self.sizes();
        let stream = Schedule::Stream(blueprint.sum.first);
        let hidden = |product: Product<'_>, experts: &Experts| {
            let layout = experts.hidden(product.dtype, stream);
            layout.output(product.x, product.pairs)
        };
        let pairs = self.pairs();
        let routed_hidden = hidden(pairs, &self.experts);
        let routed = StreamProblem {
            product: self.experts.gated(pairs),
            output: &routed_hidden,
            blueprint: blueprint.gated.first,
        };
        let shared = self.shared.as_ref().zip(blueprint.gated.second);
        let shared = shared.map(|(experts, blueprint)| {
            let rows = experts.gated(Product::of_rows(&self.x, &experts.matrices[0]));
            (experts, rows, hidden(rows, experts), blueprint)
        });
        let problem = shared
            .as_ref()
            .map(|(_, product, hidden, blueprint)| StreamProblem {
                product: *product,
                output: hidden,
                blueprint: *blueprint,
            });
        launch_stream(&routed, problem.as_ref());
        let down = |experts, hidden| {
            let experts: &Experts = experts;
            SumProblem {
                x: experts.hidden(self.x.dtype, stream).finish(hidden),
                matrices: &experts.matrices[1],
            }
        };
        let sums = output(&self.x, [tokens, self.experts.matrices[1].rows], dtype);
        let shared = shared.map(|(experts, _, hidden, _)| down(experts, hidden));
        let routed = down(&self.experts, routed_hidden);
        launch_sum(&self.ids, &routed, shared.as_ref(), &blueprint.sum, &sums);
        sums
    }
}
