//! A small number of tokens on tensor cores, in two launches.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use super::Mixture;
use super::experts::ExpertMatrices;
use crate::caps::Caps;
use crate::gemm::launch::{
    Blueprints, Product, Schedule, StreamProblem, gated_blueprints, launch_stream, launch_sum,
    sum_blueprints,
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
        let shared = mixture.shared.as_ref().map(ExpertMatrices::matrices);
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
        let all = std::iter::once((&self.experts, self.product(), blueprint.gated.first));
        let shared = self.shared.as_ref().zip(blueprint.gated.second);
        let all = all.chain(shared.map(|(experts, blueprint)| {
            let product = Product::of_rows(&self.x, &experts.matrices[0]);
            (experts, product, blueprint)
        }));
        // Their hidden values, by the first launch.
        let all = all.map(|(experts, product, blueprint)| {
            let hidden = experts.hidden(&product, stream);
            (experts, product, blueprint, hidden)
        });
        let all: Vec<_> = all.collect();
        let problems = all
            .iter()
            .map(|(experts, product, blueprint, output)| StreamProblem {
                product: experts.gated(*product),
                output,
                blueprint: *blueprint,
            });
        let problems: Vec<_> = problems.collect();
        launch_stream(&problems[0], problems.get(1));
        let sums = output(&self.x, [tokens, self.experts.matrices[1].rows], dtype);
        let down = all.into_iter().map(|(experts, product, _, hidden)| {
            let x = experts.finish(hidden, product.pairs, stream);
            (x, &experts.matrices[1])
        });
        let down: Vec<_> = down.collect();
        launch_sum(&self.ids, &down, &blueprint.sum, &sums);
        sums
    }
}
