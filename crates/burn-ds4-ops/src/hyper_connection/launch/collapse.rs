//! The launches that collapse streams, after that of their projection.

use super::project::{can_project, project};
use super::streams::{StreamsInput, fits};
use crate::hyper_connection::args::{Mix, PendingOutput, Sinkhorn};
use crate::hyper_connection::kernel::{
    CollapsedRowsLaunch, MixParametersLaunch, PartialsBlueprint, RowNormLaunch, TOKEN_CUBES,
    collapse_norm_kernel, head_norm_kernel,
};
use crate::launching::prelude::*;

/// Whether there are kernels for the number of tokens and for all inputs.
pub(in super::super) fn can_collapse(
    pending: &PendingOutput<CubeBackend>,
    mix: &Mix<CubeBackend>,
) -> bool {
    fits(&mix.streams)
        && Caps::of(&mix.streams.client).plane().is_some()
        && can_project(pending, mix)
}

/// The arguments of both kernels that start from partial sums.
struct PartialsInput {
    partials: CubeTensor,
    tokens: StreamsInput,
    parameters: MixParametersLaunch,
    /// The weight of the norm of the collapsed streams, and where it is written.
    norm: Option<(CubeTensor, CubeTensor)>,
    /// Elements of a vector of the weight.
    weight_size: usize,
    /// The epsilon of that norm.
    epsilon: f32,
    collapsed: CubeTensor,
    blueprint: PartialsBlueprint,
}

impl PartialsInput {
    /// Projects the streams. Also returns them with nothing pending.
    fn new(
        pending: PendingOutput<CubeBackend>,
        mix: Mix<CubeBackend>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> (CubeTensor, Self) {
        let (streams, partials) = project(pending, mix.streams, mix.function);
        let tokens = StreamsInput::new(streams.clone());
        let weight = mix.weight.into_option().map(into_contiguous);
        let base = into_contiguous(mix.base).into_buffer_arg();
        let scale = into_contiguous(mix.scale).into_buffer_arg();
        let [_, sums, splits] = partials.dims();
        let own = Self {
            blueprint: PartialsBlueprint {
                token: tokens.blueprint,
                rows: sums as u32 - 1,
                splits: splits as u32,
                layers: streams.shape()[0] > MAX_CUBES,
            },
            parameters: MixParametersLaunch::new(base, scale, epsilon as f32, norm_epsilon as f32),
            weight_size: weight
                .as_ref()
                .map_or(1, |weight| vector_size(weight, tokens.size)),
            norm: weight.map(|weight| (weight, tokens.output())),
            epsilon: mix.epsilon as f32,
            collapsed: tokens.output(),
            partials,
            tokens,
        };
        (streams, own)
    }

    fn rows<F: Float, W: Float, N: Size, M: Size>(&self) -> CollapsedRowsLaunch<F, W, N, M> {
        let norm = self.norm.clone().map(|(weight, normed)| {
            let [weight, normed] = [weight, normed].map(CubeTensor::into_buffer_arg);
            RowNormLaunch::new(weight, self.epsilon, normed)
        });
        CollapsedRowsLaunch::new(norm.into(), self.collapsed.clone().into_buffer_arg())
    }

    /// The norm of the collapsed streams, or these, if there is none.
    fn result(&self) -> CubeTensor {
        let normed = self.norm.as_ref().map(|(_, normed)| normed);
        normed.unwrap_or(&self.collapsed).clone()
    }

    fn address(&self) -> AddressType {
        address_type([&self.tokens.streams, &self.partials])
    }

    fn dtypes(&self) -> [ElemType; 2] {
        let own = self.collapsed.dtype;
        let weight = self.norm.as_ref().map_or(own, |(weight, _)| weight.dtype);
        [own, weight].map(dtype_to_storage_type)
    }
}

pub(in super::super) fn collapse(
    pending: PendingOutput<CubeBackend>,
    mix: Mix<CubeBackend>,
    sinkhorn: Sinkhorn,
) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
    let (epsilon, norm_epsilon) = (sinkhorn.epsilon, sinkhorn.norm_epsilon);
    let (streams, own) = PartialsInput::new(pending, mix, epsilon, norm_epsilon);
    let [count, _, _] = streams.dims();
    let shape = [count, own.blueprint.rows as usize];
    let coefficients = output(&own.partials, shape, DType::F32);
    let (x, layers) = (count.min(MAX_CUBES), count.div_ceil(MAX_CUBES));
    let (address, dtypes, rows) = (own.address(), own.dtypes(), own.rows());
    let results = (own.collapsed.clone(), own.result());
    // SAFETY: tokens and vectors past the end repeat others and are not written; no two cubes of a
    // token write the same element.
    unsafe {
        collapse_norm_kernel::launch_unchecked(
            &own.partials.client.clone(),
            CubeCount::Static(x as u32, TOKEN_CUBES, layers as u32),
            own.tokens.dim(),
            address,
            own.tokens.size,
            own.weight_size,
            own.tokens.arg(),
            own.partials.into_buffer_arg(),
            own.parameters,
            rows,
            coefficients.clone().into_buffer_arg(),
            u32::try_from(sinkhorn.iterations).unwrap_or(u32::MAX),
            own.blueprint,
            dtypes,
        );
    }
    (streams, results.0, results.1, coefficients)
}

pub(in super::super) fn head(
    pending: PendingOutput<CubeBackend>,
    mix: Mix<CubeBackend>,
    epsilon: f64,
    norm_epsilon: f64,
) -> CubeTensor {
    let (streams, own) = PartialsInput::new(pending, mix, epsilon, norm_epsilon);
    let client = own.partials.client.clone();
    let (address, dtypes, rows) = (own.address(), own.dtypes(), own.rows());
    let result = own.result();
    // SAFETY: tokens and vectors past the end repeat others and are not written; a token has one
    // group of units.
    unsafe {
        head_norm_kernel::launch_unchecked(
            &client,
            cube_count(&client, streams.shape()[0]),
            own.tokens.dim(),
            address,
            own.tokens.size,
            own.weight_size,
            own.tokens.arg(),
            own.partials.into_buffer_arg(),
            own.parameters,
            rows,
            own.blueprint,
            dtypes,
        );
    }
    result
}
