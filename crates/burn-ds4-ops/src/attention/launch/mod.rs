mod cached;
mod compress;
mod index;
mod rotate;
mod step;

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::FEW_TOKENS;
use super::backend::CompressedRows;
use super::kernel::{
    BlocksLaunch, CHUNK, SinkBlueprint, SizesLaunch, StridesLaunch, TableLaunch, join_kernel,
    pool_kernel, sink_kernel,
};
use super::reference::Problem;
use crate::intrinsics::Target;
use crate::launching::{
    MAX_CUBES, address_type, cube_count, is_float, is_wide_int, output, plane_size,
    row_vector_size, with_contiguous_rows, with_vectors,
};
pub(super) use cached::{append_rows, cached_attention, can_append, can_attend_cached};
pub(super) use compress::{can_compress, compress_rows};
pub(super) use index::{can_score, index_scores};
pub(super) use rotate::{can_rotate, can_rotate_at, rotate, rotate_at};
pub(super) use step::{can_store, store_step};

/// Heads that share the rows which a cube reads.
const HEADS: u32 = 2;
/// Planes of a cube, and channels up to which their sums fit in 16 KiB of shared memory. For more there are half as many.
const PLANES: u32 = 8;
const MAX_PLANES_WIDTH: usize = 512;
/// Widest row of the kernel: a lane keeps its channels of it in registers, and those of a few others.
const MAX_WIDTH: usize = 1024;
/// Channels of a lane at most, likewise.
const MAX_LANE_WIDTH: usize = 64;
/// Columns of a cube where all compressed rows are seen: one cube reaches far, since most of a cache may be empty. And where they are picked among:
/// the 128 of a window and the 512 picks of the released models are four cubes' then, for each of 32 pairs of heads, which is as many as an
/// H200 has multiprocessors.
const STRETCH: u32 = 192;
const PICKED_STRETCH: u32 = 160;
/// Units of a cube that joins stretches.
const JOIN_UNITS: u32 = 128;
/// Channels of a cube that pools.
const POOL_UNITS: u32 = 64;

/// The angles of all positions, in rows that are contiguous.
fn table(angles: &CubeTensor) -> TableLaunch {
    let [known, rotated] = angles.shape().dims();
    TableLaunch::new(known as u32, stride(angles, 0), rotated / 2)
}

/// Elements from one place to the next along an axis.
fn stride(tensor: &CubeTensor, axis: usize) -> usize {
    tensor.meta.strides()[axis]
}

/// How a kernel is compiled for rows of `width` channels that are picked among or not, and elements of its vectors: `size`, or fewer, but no
/// fewer than `least`.
fn blueprint(
    client: &Client,
    width: usize,
    size: usize,
    least: usize,
    picked: bool,
) -> Option<(SinkBlueprint, usize)> {
    let plane = plane_size(client)?;
    // Rather less to a lane than nothing to some.
    let mut size = size;
    while size > least && width / size < plane as usize {
        size /= 2;
    }
    let vectors = width / size;
    let steps = vectors.div_ceil(plane as usize);
    let planes = if width <= MAX_PLANES_WIDTH {
        PLANES
    } else {
        PLANES / 2
    };
    let blueprint = SinkBlueprint {
        heads: HEADS,
        planes,
        plane,
        steps: steps as u32,
        even: vectors == steps * plane as usize,
        stretch: if picked { PICKED_STRETCH } else { STRETCH },
        split: false,
        target: Target::of(client),
    };
    (width <= MAX_WIDTH && steps * size <= MAX_LANE_WIDTH).then_some((blueprint, size))
}

pub(super) fn can_attend(problem: &Problem<CubeBackend>) -> bool {
    let [batch, count, heads, width] = problem.queries.shape().dims();
    let (rows, picks) = match &problem.compressed {
        CompressedRows::None => (0, None),
        CompressedRows::Shared { rows, .. } => (rows.shape()[1], None),
        CompressedRows::Picked { rows, picks, .. } => (rows.shape()[1], Some(picks)),
    };
    let seen = picks.map_or(rows, |picks| picks.shape()[2]);
    let columns = problem.window.shape()[1];
    let blueprint = blueprint(&problem.queries.client, width, 1, 1, picks.is_some());
    batch * count <= FEW_TOKENS
        && heads <= MAX_CUBES
        && i32::try_from(batch * columns.max(rows).max(seen)).is_ok()
        && is_float(problem.queries.dtype)
        && picks.is_none_or(|picks| is_wide_int(picks.dtype))
        && blueprint.is_some_and(|(blueprint, _)| {
            stretches(problem.span, seen, blueprint.stretch) <= MAX_CUBES
        })
}

pub(super) fn sink_attention(problem: Problem<CubeBackend>) -> CubeTensor {
    let queries = with_contiguous_rows(problem.queries);
    let window = with_contiguous_rows(problem.window);
    let window_bias = into_contiguous(problem.window_bias);
    let (compressed, picks) = match problem.compressed {
        CompressedRows::None => (None, None),
        CompressedRows::Shared { rows, bias } => (Some((rows, bias)), None),
        CompressedRows::Picked { rows, bias, picks } => (Some((rows, bias)), Some(picks)),
    };
    let picks = picks.map(into_contiguous);
    let seen = match (&compressed, &picks) {
        (None, _) => 0,
        (Some(_), Some(picks)) => picks.shape()[2],
        (Some((rows, _)), None) => rows.shape()[1],
    };
    // Where there are no rows, none of these are read.
    let (rows, rows_bias) = compressed.map_or_else(
        || (window.clone(), window_bias.clone()),
        |(rows, bias)| (with_contiguous_rows(rows), into_contiguous(bias)),
    );

    let [batch, count, heads, width] = queries.shape().dims();
    let client = queries.client.clone();
    // Which channels a lane has must not depend on where the rows are.
    let size = row_vector_size([&queries, &window, &rows], width);
    let picked = picks.is_some();
    let (blueprint, size) = blueprint(&client, width, size, 1, picked)
        .or_else(|| blueprint(&client, width, 1, 1, picked))
        .expect("checked by can_attend");
    let [queries, window, rows] = [queries, window, rows].map(|rows| with_vectors(rows, size));
    let sinks = into_contiguous(problem.sinks);
    let launch = SinkLaunch::new(&queries, problem.span, seen, blueprint);
    let sizes = launch.sizes(&window, rows.shape()[1], size, problem.span, seen);
    let strides = strides(&queries, &window, &rows, size);
    let picks_dtype = picks.as_ref().map_or(DType::I32, |picks| picks.dtype);
    let dtypes = [queries.dtype, launch.sums.dtype, picks_dtype].map(dtype_to_storage_type);
    // SAFETY: heads and vectors past the end are read as others, rows that are none as the first; writes are within the output.
    unsafe {
        sink_kernel::launch_unchecked(
            &client,
            launch.cubes(batch * count, heads, HEADS),
            launch.dim(),
            address_type([&queries, &window, &rows, &rows_bias, &launch.sums]),
            size,
            queries.into_buffer_arg(),
            window.into_buffer_arg(),
            window_bias.into_buffer_arg(),
            rows.into_buffer_arg(),
            rows_bias.into_buffer_arg(),
            picks.map(CubeTensor::into_buffer_arg).into(),
            sinks.clone().into_buffer_arg(),
            launch.sums.clone().into_buffer_arg(),
            launch.shares.clone().into_buffer_arg(),
            sizes,
            strides,
            problem.scale as f32,
            launch.blueprint,
            dtypes,
        );
    }
    let turn = None;
    join(launch, JoinInputs { sinks, turn, size })
}

/// Cubes of `stretch` columns that share the columns of a query out.
fn stretches(span: usize, seen: usize, stretch: u32) -> usize {
    let window = span.next_multiple_of(CHUNK as usize);
    (window + seen).div_ceil(stretch as usize).max(1)
}

/// What the kernels of attention are launched with.
struct SinkLaunch {
    blueprint: SinkBlueprint,
    stretches: usize,
    result: CubeTensor,
    /// Of several stretches each one's sums, otherwise the result.
    sums: CubeTensor,
    shares: CubeTensor,
}

impl SinkLaunch {
    /// For queries that see `span` rows of a window and `seen` compressed ones.
    fn new(queries: &CubeTensor, span: usize, seen: usize, blueprint: SinkBlueprint) -> Self {
        let [batch, count, heads, width] = queries.shape().dims();
        let stretches = stretches(span, seen, blueprint.stretch);
        let split = stretches > 1;
        let result = output(queries, [batch, count, heads, width], queries.dtype);
        let shape = [stretches, batch, count, heads, width];
        Self {
            blueprint: SinkBlueprint { split, ..blueprint },
            stretches,
            sums: if split {
                output(queries, shape, DType::F32)
            } else {
                result.clone()
            },
            shares: output(queries, [2, stretches, batch, count, heads], DType::F32),
            result,
        }
    }

    fn sizes(
        &self,
        window: &CubeTensor,
        rows: usize,
        size: usize,
        span: usize,
        seen: usize,
    ) -> SizesLaunch {
        let [_, count, heads, width] = self.result.shape().dims();
        SizesLaunch::new(
            count as u32,
            heads as u32,
            (width / size) as u32,
            window.shape()[1] as u32,
            span as u32,
            rows as u32,
            seen as u32,
        )
    }

    /// Of cubes of so many heads each.
    fn cubes(&self, tokens: usize, heads: usize, cube_heads: u32) -> CubeCount {
        let shares = (heads as u32).div_ceil(cube_heads);
        CubeCount::Static(shares, tokens as u32, self.stretches as u32)
    }

    fn dim(&self) -> CubeDim {
        CubeDim::new_2d(self.blueprint.plane, self.blueprint.planes)
    }
}

fn strides(
    queries: &CubeTensor,
    window: &CubeTensor,
    rows: &CubeTensor,
    size: usize,
) -> StridesLaunch {
    let vectors = |tensor: &CubeTensor, axis: usize| stride(tensor, axis) / size;
    StridesLaunch::new(
        vectors(queries, 0),
        vectors(queries, 1),
        vectors(queries, 2),
        vectors(window, 0),
        vectors(window, 1),
        vectors(rows, 0),
        vectors(rows, 1),
    )
}

/// What stretches are joined by.
struct JoinInputs {
    sinks: CubeTensor,
    /// Angles, and starts of sequences, by which results turn back, and the vectors in front that stay.
    turn: Option<(CubeTensor, CubeTensor, u32)>,
    /// Elements of a vector.
    size: usize,
}

/// The result of all stretches.
fn join(launch: SinkLaunch, inputs: JoinInputs) -> CubeTensor {
    if !launch.blueprint.split {
        return launch.result;
    }
    let client = launch.result.client.clone();
    let [batch, count, heads, width] = launch.result.shape().dims();
    let (angles, start, kept) = match inputs.turn {
        None => (None, None, 0),
        Some((angles, start, kept)) => (Some(angles), Some(start), kept),
    };
    let table = angles
        .as_ref()
        .map_or_else(|| TableLaunch::new(0, 0, 0), table);
    let start_dtype = start.as_ref().map_or(DType::I32, |start| start.dtype);
    let dtypes = [launch.result.dtype, start_dtype].map(dtype_to_storage_type);
    let address = address_type([
        &launch.sums,
        &launch.result,
        angles.as_ref().unwrap_or(&launch.result),
    ]);
    // SAFETY: there is a cube for each head of a query; angles are within the table.
    unsafe {
        join_kernel::launch_unchecked(
            &client,
            CubeCount::Static(heads as u32, (batch * count) as u32, 1),
            CubeDim::new_1d(JOIN_UNITS),
            address,
            inputs.size,
            launch.sums.into_buffer_arg(),
            launch.shares.into_buffer_arg(),
            inputs.sinks.into_buffer_arg(),
            angles.map(CubeTensor::into_buffer_arg).into(),
            start.map(CubeTensor::into_buffer_arg).into(),
            launch.result.clone().into_buffer_arg(),
            launch.stretches as u32,
            count as u32,
            (width / inputs.size) as u32,
            kept,
            table,
            launch.blueprint.target,
            dtypes,
        );
    }
    launch.result
}

pub(super) fn pool(values: CubeTensor, scores: CubeTensor) -> CubeTensor {
    let (values, scores) = (with_contiguous_rows(values), with_contiguous_rows(scores));
    let client = values.client.clone();
    let [batch, blocks, slots, width] = values.shape().dims();
    let result = output(&values, [batch, blocks, width], values.dtype);
    let outputs = batch * blocks * width;
    let strides = |tensor: &CubeTensor| {
        let strides = tensor.meta.strides();
        BlocksLaunch::new(strides[0], strides[1], strides[2])
    };
    let (value_strides, score_strides) = (strides(&values), strides(&scores));
    let dtype = dtype_to_storage_type(values.dtype);
    // SAFETY: units past the last channel read and write nothing.
    unsafe {
        pool_kernel::launch_unchecked(
            &client,
            cube_count(&client, outputs.div_ceil(POOL_UNITS as usize)),
            CubeDim::new_1d(POOL_UNITS),
            address_type([&values, &scores]),
            values.into_buffer_arg(),
            scores.into_buffer_arg(),
            result.clone().into_buffer_arg(),
            outputs,
            blocks,
            slots as u32,
            width,
            value_strides,
            score_strides,
            Target::of(&client),
            dtype,
        );
    }
    result
}
