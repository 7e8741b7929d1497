use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::{StreamsInput, can_collapse, mix_arg, pending_arg, streams_arg, tiles};
use crate::caps::Caps;
use crate::hyper_connection::Sinkhorn;
use crate::hyper_connection::backend::{Mix, PendingOutput};
use crate::hyper_connection::kernel::{
    CollapsedNormLaunch, MixParametersLaunch, PartialsBlueprint, ProjectBlueprint, TOKEN_CUBES,
    collapse_norm_kernel, expand_project_kernel, head_norm_kernel, project_kernel,
};
use crate::launching::{
    MAX_CUBES, address_type, is_float, output, row_vector_size, vector_size, with_vectors,
};

/// Channels of a split of the projection, and the same with more than [`MAX_STREAMS_WIDE_SPLIT`]
/// streams.
const SPLIT_CHANNELS: usize = 64;
const NARROW_SPLIT_CHANNELS: usize = 32;
const MAX_STREAMS_WIDE_SPLIT: usize = 4;
/// Lanes that share a row of the projection: they read 128 bytes at once.
const LANES_PER_ROW: u32 = 8;
/// The most units of a cube that projects.
const PROJECT_UNITS: u32 = 256;
/// The most elements of a vector of the projection.
const MAX_VECTOR: usize = 4;
/// The most tokens of a cube that projects. It reads its part of the projection once for them.
const MAX_CUBE_TOKENS: usize = 16;
/// Cubes for each multiprocessor up to which tokens have as many cubes as can be.
const CUBES_PER_PROCESSOR: usize = 2;

fn split_channels(n: usize) -> usize {
    if n <= MAX_STREAMS_WIDE_SPLIT {
        SPLIT_CHANNELS
    } else {
        NARROW_SPLIT_CHANNELS
    }
}

/// Tokens of a cube: the fewest that leave each multiprocessor of `client` few cubes.
fn cube_tokens(tokens: usize, splits: usize, client: &Client) -> usize {
    let cubes = CUBES_PER_PROCESSOR * Caps::of(client).processors as usize;
    (tokens * splits)
        .div_ceil(cubes.max(1))
        .next_power_of_two()
        .min(MAX_CUBE_TOKENS)
}

/// Whether there are kernels for the number of tokens and for all inputs.
pub(in super::super) fn can_fuse(
    pending: &PendingOutput<CubeBackend>,
    mix: &Mix<CubeBackend>,
) -> bool {
    let [tokens, n, d] = mix.streams.shape().dims();
    let output = match pending {
        PendingOutput::None => true,
        PendingOutput::Some { output, .. } => is_float(output.dtype),
    };
    let shared_bytes = MAX_CUBE_TOKENS * n * split_channels(n) * size_of::<f32>();
    output
        && tokens <= MAX_CUBES
        && can_collapse(&mix.streams)
        && is_float(mix.function.dtype)
        && is_float(mix.weight.dtype)
        && i32::try_from(mix.function.shape().num_elements()).is_ok()
        && d.div_ceil(split_channels(n)) <= MAX_CUBES
        && Caps::of(&mix.streams.client).fits_shared(shared_bytes)
}

/// Returns the streams with nothing pending, and the partials of their projection:
/// `[tokens, rows + 1, splits]`.
fn project(
    pending: PendingOutput<CubeBackend>,
    streams: CubeTensor,
    function: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    if let Some(blueprint) = tiles::blueprint(&pending, &streams, &function) {
        return tiles::project_splits(pending, streams, function, blueprint);
    }
    let client = streams.client.clone();
    let [tokens, n, d] = streams.shape().dims();
    let [rows, _] = function.shape().dims();
    let plane = Caps::of(&client).plane().expect("checked by can_collapse");
    let lanes = LANES_PER_ROW.min(plane);
    let most = PROJECT_UNITS.min(Caps::of(&client).cube_units);
    let wanted = (rows as u32 + 1) * lanes;
    let planes = wanted.div_ceil(plane).min(most / plane);
    let splits = d.div_ceil(split_channels(n));
    let cube_tokens = cube_tokens(tokens, splits, &client);
    let blueprint = ProjectBlueprint {
        cube_tokens: cube_tokens as u32,
        streams: n as u32,
        rows: rows as u32,
        channels: split_channels(n) as u32,
        lanes,
        groups: planes * plane / lanes,
        target: Caps::of(&client).target,
    };
    let count = CubeCount::Static(splits as u32, tokens.div_ceil(cube_tokens) as u32, 1);
    let dim = CubeDim::new_2d(plane, planes);
    let function = into_contiguous(function);
    let partials = output(&streams, [tokens, rows + 1, splits], DType::F32);
    // The vector size depends on dtype and width alone: other vectors would be added up in another
    // order.
    let size = match &pending {
        PendingOutput::None => row_vector_size([&streams], d),
        PendingOutput::Some { output, .. } => row_vector_size([&streams, output], d),
    };
    let columns = row_vector_size([&function], d).min(MAX_VECTOR).min(size);
    let streams = with_vectors(streams, size);
    let PendingOutput::Some {
        output: own,
        coefficients,
    } = pending
    else {
        let dtypes = [streams.dtype, function.dtype].map(dtype_to_storage_type);
        // SAFETY: vectors past the end repeat others and count as zeros; only existing tokens and
        // rows are written.
        unsafe {
            project_kernel::launch_unchecked(
                &client,
                count,
                dim,
                address_type([&streams, &function, &partials]),
                size,
                columns,
                streams_arg(&streams, size),
                function.into_buffer_arg(),
                partials.clone().into_buffer_arg(),
                blueprint,
                dtypes,
            );
        }
        return (streams, partials);
    };
    let own = with_vectors(own, size);
    let expanded = output(&streams, [tokens, n, d], streams.dtype);
    let dtypes = [streams.dtype, own.dtype, function.dtype].map(dtype_to_storage_type);
    // SAFETY: vectors past the end repeat others, count as zeros and are not written to `expanded`;
    // only existing tokens and rows are written.
    unsafe {
        expand_project_kernel::launch_unchecked(
            &client,
            count,
            dim,
            address_type([&own, &streams, &function, &expanded, &partials]),
            size,
            columns,
            pending_arg(own, coefficients, size),
            streams_arg(&streams, size),
            function.into_buffer_arg(),
            expanded.clone().into_buffer_arg(),
            partials.clone().into_buffer_arg(),
            blueprint,
            dtypes,
        );
    }
    (expanded, partials)
}

/// The arguments of both kernels that start from partial sums.
struct PartialsInput {
    partials: CubeTensor,
    tokens: StreamsInput,
    parameters: MixParametersLaunch,
    weight: CubeTensor,
    /// Elements of a vector of the weight.
    weight_size: usize,
    /// The epsilon of the norm of the collapsed streams.
    epsilon: f32,
    collapsed: CubeTensor,
    normed: CubeTensor,
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
        let weight = into_contiguous(mix.weight);
        let [_, sums, splits] = partials.shape().dims();
        let own = Self {
            blueprint: PartialsBlueprint {
                token: tokens.blueprint,
                rows: sums as u32 - 1,
                splits: splits as u32,
            },
            parameters: mix_arg(mix.base, mix.scale, epsilon, norm_epsilon),
            weight_size: vector_size(&weight, tokens.size),
            epsilon: mix.epsilon as f32,
            collapsed: tokens.output(),
            normed: tokens.output(),
            partials,
            tokens,
            weight,
        };
        (streams, own)
    }

    fn norm<F: Float, W: Float, N: Size, M: Size>(&self) -> CollapsedNormLaunch<F, W, N, M> {
        CollapsedNormLaunch::new(
            self.weight.clone().into_buffer_arg(),
            self.epsilon,
            self.collapsed.clone().into_buffer_arg(),
            self.normed.clone().into_buffer_arg(),
        )
    }

    fn address(&self) -> AddressType {
        address_type([&self.tokens.streams, &self.partials])
    }

    fn dtypes(&self) -> [ElemType; 2] {
        [self.normed.dtype, self.weight.dtype].map(dtype_to_storage_type)
    }
}

pub(in super::super) fn collapse_norm(
    pending: PendingOutput<CubeBackend>,
    mix: Mix<CubeBackend>,
    sinkhorn: Sinkhorn,
) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
    let (epsilon, norm_epsilon) = (sinkhorn.epsilon, sinkhorn.norm_epsilon);
    let (streams, own) = PartialsInput::new(pending, mix, epsilon, norm_epsilon);
    let [count, _, _] = streams.shape().dims();
    let shape = [count, own.blueprint.rows as usize];
    let coefficients = output(&own.partials, shape, DType::F32);
    let (_, dim) = own.tokens.cubes();
    // There are no more than `MAX_CUBES`.
    let cubes = CubeCount::Static(count as u32, TOKEN_CUBES, 1);
    let (address, dtypes, norm) = (own.address(), own.dtypes(), own.norm());
    // SAFETY: tokens and vectors past the end repeat others and are not written; no two cubes of a
    // token write the same element.
    unsafe {
        collapse_norm_kernel::launch_unchecked(
            &own.partials.client.clone(),
            cubes,
            dim,
            address,
            own.tokens.size,
            own.weight_size,
            own.tokens.arg(),
            own.partials.into_buffer_arg(),
            own.parameters,
            norm,
            coefficients.clone().into_buffer_arg(),
            u32::try_from(sinkhorn.iterations).unwrap_or(u32::MAX),
            own.blueprint,
            dtypes,
        );
    }
    (streams, own.collapsed, own.normed, coefficients)
}

pub(in super::super) fn head_norm(
    pending: PendingOutput<CubeBackend>,
    mix: Mix<CubeBackend>,
    epsilon: f64,
    norm_epsilon: f64,
) -> CubeTensor {
    let (_, own) = PartialsInput::new(pending, mix, epsilon, norm_epsilon);
    let (cubes, dim) = own.tokens.cubes();
    let (address, dtypes, norm) = (own.address(), own.dtypes(), own.norm());
    // SAFETY: tokens and vectors past the end repeat others and are not written; a token has one
    // group of units.
    unsafe {
        head_norm_kernel::launch_unchecked(
            &own.partials.client.clone(),
            cubes,
            dim,
            address,
            own.tokens.size,
            own.weight_size,
            own.tokens.arg(),
            own.partials.into_buffer_arg(),
            own.parameters,
            norm,
            own.blueprint,
            dtypes,
        );
    }
    own.normed
}
