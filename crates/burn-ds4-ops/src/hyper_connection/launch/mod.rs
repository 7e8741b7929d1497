mod fused;
mod tiles;

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::Sinkhorn;
use super::kernel::{
    MixParametersLaunch, PendingOutputLaunch, ProjectedLaunch, StreamsLaunch, TokenBlueprint,
    collapse_kernel, expand_kernel, head_kernel,
};
use crate::caps::Caps;
use crate::launching::{
    address_type, cube_count, is_float, output, vector_size, with_contiguous_rows,
};
use crate::rows::RowPartition;

pub(super) use fused::{can_fuse, collapse_norm, head_norm};
pub(super) use tiles::{can_project, project};

/// The most streams whose mixing matrix a lane can keep in registers.
const MAX_STREAMS: usize = 8;
/// The most bytes of a token's streams that a lane keeps in registers.
const REGISTER_BYTES: usize = 256;
/// Units of a cube that spreads a token's output.
const EXPAND_UNITS: u32 = 128;

fn fits(streams: &CubeTensor) -> bool {
    let [tokens, n, d] = streams.shape().dims();
    n <= MAX_STREAMS && is_float(streams.dtype) && i32::try_from(tokens.max(n * d)).is_ok()
}

pub(super) fn can_collapse(streams: &CubeTensor) -> bool {
    fits(streams) && Caps::of(&streams.client).plane().is_some()
}

pub(super) fn can_expand(y: &CubeTensor, streams: &CubeTensor) -> bool {
    let units = Caps::of(&streams.client).cube_units;
    fits(streams) && is_float(y.dtype) && units >= EXPAND_UNITS
}

/// Streams with contiguous rows, and how the kernels read them.
struct StreamsInput {
    streams: CubeTensor,
    /// Elements of a vector.
    size: usize,
    blueprint: TokenBlueprint,
}

impl StreamsInput {
    fn new(streams: CubeTensor) -> Self {
        let streams = with_contiguous_rows(streams);
        let [_, n, d] = streams.shape().dims();
        let client = &streams.client;
        let plane = Caps::of(client).plane().expect("checked by can_collapse");
        let partition = RowPartition::new(client, plane, d, streams.elem_size());
        let bytes = n * (partition.steps * partition.block) as usize * streams.elem_size();
        let blueprint = TokenBlueprint {
            streams: n as u32,
            partition,
            in_registers: bytes <= REGISTER_BYTES,
            target: Caps::of(client).target,
        };
        let size = vector_size(&streams, usize::MAX);
        Self {
            streams,
            size,
            blueprint,
        }
    }

    fn arg<F: Float, N: Size>(&self) -> StreamsLaunch<F, N> {
        streams_arg(&self.streams, self.size)
    }

    fn cubes(&self) -> (CubeCount, CubeDim) {
        let [tokens, _, _] = self.streams.shape().dims();
        let partition = self.blueprint.partition;
        (
            cube_count(&self.streams.client, tokens),
            CubeDim::new_2d(partition.plane, partition.planes),
        )
    }

    /// An output with a row for each token, in the streams' dtype.
    fn output(&self) -> CubeTensor {
        let [tokens, _, d] = self.streams.shape().dims();
        output(&self.streams, [tokens, d], self.streams.dtype)
    }
}

/// Streams in vectors of `size`.
fn streams_arg<F: Float, N: Size>(streams: &CubeTensor, size: usize) -> StreamsLaunch<F, N> {
    let [tokens, _, d] = streams.shape().dims();
    let strides = streams.meta.strides();
    StreamsLaunch::new(
        streams.clone().into_buffer_arg(),
        tokens as u32,
        (d / size) as u32,
        strides[0] / size,
        strides[1] / size,
    )
}

/// A sub-layer's output in vectors of `size`, and the coefficients with which it is spread.
fn pending_arg<Y: Float, N: Size>(
    output: CubeTensor,
    coefficients: CubeTensor,
    size: usize,
) -> PendingOutputLaunch<Y, N> {
    let stride = output.meta.strides()[0] / size;
    let coefficients = into_contiguous(coefficients).into_buffer_arg();
    PendingOutputLaunch::new(output.into_buffer_arg(), stride, coefficients)
}

fn projected_arg(projected: CubeTensor) -> ProjectedLaunch {
    let stride = projected.meta.strides()[0];
    ProjectedLaunch::new(projected.into_buffer_arg(), stride)
}

fn mix_arg(
    base: CubeTensor,
    scale: CubeTensor,
    epsilon: f64,
    norm_epsilon: f64,
) -> MixParametersLaunch {
    let [base, scale] = [base, scale].map(|values| into_contiguous(values).into_buffer_arg());
    MixParametersLaunch::new(base, scale, epsilon as f32, norm_epsilon as f32)
}

pub(super) fn collapse(
    streams: CubeTensor,
    projected: CubeTensor,
    base: CubeTensor,
    scale: CubeTensor,
    sinkhorn: Sinkhorn,
) -> (CubeTensor, CubeTensor) {
    let tokens = StreamsInput::new(streams);
    let projected = with_contiguous_rows(projected);
    let client = projected.client.clone();
    let input = tokens.output();
    let coefficients = output(&projected, projected.shape().dims::<2>(), DType::F32);
    let (count, dim) = tokens.cubes();
    // SAFETY: tokens and vectors past the end repeat others and are not written.
    unsafe {
        collapse_kernel::launch_unchecked(
            &client,
            count,
            dim,
            address_type([&tokens.streams, &projected]),
            tokens.size,
            tokens.arg(),
            projected_arg(projected),
            mix_arg(base, scale, sinkhorn.epsilon, sinkhorn.norm_epsilon),
            input.clone().into_buffer_arg(),
            coefficients.clone().into_buffer_arg(),
            u32::try_from(sinkhorn.iterations).unwrap_or(u32::MAX),
            tokens.blueprint,
            dtype_to_storage_type(input.dtype),
        );
    }
    (input, coefficients)
}

pub(super) fn head(
    streams: CubeTensor,
    projected: CubeTensor,
    base: CubeTensor,
    scale: CubeTensor,
    epsilon: f64,
    norm_epsilon: f64,
) -> CubeTensor {
    let tokens = StreamsInput::new(streams);
    let projected = with_contiguous_rows(projected);
    let client = projected.client.clone();
    let collapsed = tokens.output();
    let (count, dim) = tokens.cubes();
    // SAFETY: tokens and vectors past the end repeat others and are not written.
    unsafe {
        head_kernel::launch_unchecked(
            &client,
            count,
            dim,
            address_type([&tokens.streams, &projected]),
            tokens.size,
            tokens.arg(),
            projected_arg(projected),
            mix_arg(base, scale, epsilon, norm_epsilon),
            collapsed.clone().into_buffer_arg(),
            tokens.blueprint,
            dtype_to_storage_type(collapsed.dtype),
        );
    }
    collapsed
}

pub(super) fn expand(y: CubeTensor, streams: CubeTensor, coefficients: CubeTensor) -> CubeTensor {
    let (y, streams) = (with_contiguous_rows(y), with_contiguous_rows(streams));
    let [tokens, n, d] = streams.shape().dims();
    let client = streams.client.clone();
    let expanded = output(&streams, [tokens, n, d], streams.dtype);
    let size = vector_size(&streams, usize::MAX).min(vector_size(&y, usize::MAX));
    let cubes = (d / size).div_ceil(EXPAND_UNITS as usize);
    let dtypes = [streams.dtype, y.dtype].map(dtype_to_storage_type);
    // SAFETY: tokens and vectors past the end are neither read nor written.
    unsafe {
        expand_kernel::launch_unchecked(
            &client,
            cube_count(&client, tokens * cubes),
            CubeDim::new_1d(EXPAND_UNITS),
            address_type([&y, &streams, &expanded]),
            size,
            pending_arg(y, coefficients, size),
            streams_arg(&streams, size),
            expanded.clone().into_buffer_arg(),
            cubes as u32,
            n,
            dtypes,
        );
    }
    expanded
}
