//! The streams as an argument of kernels.

use crate::hyper_connection::kernel::{PendingOutputLaunch, StreamsLaunch, TokenBlueprint};
use crate::launching::prelude::*;
use crate::rows::RowPartition;

/// The most streams whose mixing matrix a lane can keep in registers.
const MAX_STREAMS: usize = 8;
/// The most bytes of a token's streams that a lane keeps in registers.
const REGISTER_BYTES: usize = 256;

pub(super) fn fits(streams: &CubeTensor) -> bool {
    let [tokens, n, d] = streams.dims();
    n <= MAX_STREAMS && is_float(streams.dtype) && i32::try_from(tokens.max(n * d)).is_ok()
}

/// Streams with contiguous rows, and how the kernels read them.
pub(super) struct StreamsInput {
    pub streams: CubeTensor,
    /// Elements of a vector.
    pub size: usize,
    pub blueprint: TokenBlueprint,
}

impl StreamsInput {
    pub fn new(streams: CubeTensor) -> Self {
        let streams = with_contiguous_rows(streams);
        let [_, n, d] = streams.dims();
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

    pub fn arg<F: Float, N: Size>(&self) -> StreamsLaunch<F, N> {
        streams_arg(&self.streams, self.size)
    }

    /// The units of a token's cube.
    pub fn dim(&self) -> CubeDim {
        let partition = self.blueprint.partition;
        CubeDim::new_2d(partition.plane, partition.planes)
    }

    /// An output with a row for each token, in the streams' dtype.
    pub fn output(&self) -> CubeTensor {
        let [tokens, _, d] = self.streams.dims();
        output(&self.streams, [tokens, d], self.streams.dtype)
    }
}

/// Streams in vectors of `size`.
pub(super) fn streams_arg<F: Float, N: Size>(
    streams: &CubeTensor,
    size: usize,
) -> StreamsLaunch<F, N> {
    let [tokens, _, d] = streams.dims();
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
pub(super) fn pending_arg<Y: Float, N: Size>(
    output: CubeTensor,
    coefficients: CubeTensor,
    size: usize,
) -> PendingOutputLaunch<Y, N> {
    let stride = output.meta.strides()[0] / size;
    let coefficients = into_contiguous(coefficients).into_buffer_arg();
    PendingOutputLaunch::new(output.into_buffer_arg(), stride, coefficients)
}
