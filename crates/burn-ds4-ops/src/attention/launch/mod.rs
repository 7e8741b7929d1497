mod cached;
mod cached_wgmma;
mod compress;
mod index;
mod rotate;
mod sink_tiles;
mod step;

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::DECODE_TOKENS;
use super::backend::CompressedRows;
use super::kernel::{
    AngleTableLaunch, AttentionInputsLaunch, AttentionShapeLaunch, AttentionStridesLaunch,
    KV_GROUP, OutputRotationLaunch, PartialOutputLaunch, PoolSizesLaunch, PositionsLaunch,
    SinkBlueprint, SlotStridesLaunch, combine_kernel, pool_kernel, sink_kernel,
};
use super::reference::SinkInputs;
use crate::caps::Caps;
use crate::launching::{
    MAX_CUBES, address_type, cube_count, is_float, is_wide_int, output, row_vector_size,
    with_contiguous_rows, with_vectors,
};
pub(super) use cached::{append_rows, cached_attention, can_append, can_attend_cached};
pub(super) use cached_wgmma::{attend_prompt, can_attend_prompt};
pub(super) use compress::{can_compress, compress_rows};
pub(super) use index::{can_score, index_scores};
pub(super) use rotate::{can_rotate, can_rotate_at, rotate, rotate_at};
pub(super) use sink_tiles::{can_attend_many, sink_attention_of_many};
pub(super) use step::{can_store, store_step};

/// Heads of a cube. They use the same rows.
const CUBE_HEADS: u32 = 2;
/// Planes of a cube, and the widest row of which their partial sums fit in 16 KiB of shared memory.
/// Wider rows have half as many planes.
const SINK_PLANES: u32 = 8;
const MAX_SINK_PLANES_WIDTH: usize = 512;
/// Widest row of the kernel: a lane holds its channels of it in registers, and those of a few
/// others.
const MAX_WIDTH: usize = 1024;
/// The most channels of a lane, for the same reason.
const MAX_LANE_WIDTH: usize = 64;
/// Columns of a KV split, if queries attend to all compressed rows or pick among them.
///
/// With all rows, splits are long, since most of a cache may be empty. With picks, the window of
/// 128 and the 512 picks of the released models make four splits for each of 32 pairs of heads,
/// which is about one cube for each SM of an H200.
const SPLIT_COLUMNS: u32 = 192;
const PICKED_SPLIT_COLUMNS: u32 = 160;
/// Units of a cube that combines KV splits.
const COMBINE_UNITS: u32 = 128;
/// Channels of a unit that combines KV splits, at most: with more, fewer units of a head would have
/// any, and not all partial sums would be on their way at a time.
const COMBINE_VECTOR: usize = 4;
/// Channels of a cube that pools.
const POOL_UNITS: u32 = 64;

/// The positions at which sequences start, and the table of the angles of all positions.
struct Positions {
    angles: CubeTensor,
    start: CubeTensor,
}

impl Positions {
    fn new(angles: CubeTensor, start: CubeTensor) -> Self {
        Self {
            // A table that has grown may have gaps between its rows, and is too large to copy.
            angles: with_contiguous_rows(angles),
            start: into_contiguous(start),
        }
    }

    fn arg<I: Int>(&self) -> PositionsLaunch<I> {
        let [known, rotated] = self.angles.shape().dims();
        let row = stride(&self.angles, 0);
        let angles = self.angles.clone().into_buffer_arg();
        PositionsLaunch::new(
            self.start.clone().into_buffer_arg(),
            AngleTableLaunch::new(angles, known as u32, row, rotated / 2),
        )
    }
}

/// The stride of an axis, in elements.
fn stride(tensor: &CubeTensor, axis: usize) -> usize {
    tensor.meta.strides()[axis]
}

/// The strides of the first three axes, in vectors of `size`.
fn slot_strides(tensor: &CubeTensor, size: usize) -> SlotStridesLaunch {
    let [sequence, block, slot] = [0, 1, 2].map(|axis| stride(tensor, axis) / size);
    SlotStridesLaunch::new(sequence, block, slot)
}

/// Configuration of a kernel for rows of `width` channels, and the number of elements of its
/// vectors: `size`, or fewer, but no fewer than `least`. `picked` says whether queries pick among
/// the rows.
fn blueprint(
    client: &Client,
    width: usize,
    size: usize,
    least: usize,
    picked: bool,
) -> Option<(SinkBlueprint, usize)> {
    let plane = Caps::of(client).plane()?;
    // Narrower vectors, so that every lane has one.
    let mut size = size;
    while size > least && width / size < plane as usize {
        size /= 2;
    }
    let vectors = width / size;
    let steps = vectors.div_ceil(plane as usize);
    let planes = if width <= MAX_SINK_PLANES_WIDTH {
        SINK_PLANES
    } else {
        SINK_PLANES / 2
    };
    let blueprint = SinkBlueprint {
        heads: CUBE_HEADS,
        planes,
        plane,
        steps: steps as u32,
        even: vectors == steps * plane as usize,
        split_columns: if picked {
            PICKED_SPLIT_COLUMNS
        } else {
            SPLIT_COLUMNS
        },
        multiple_splits: false,
        target: Caps::of(client).target,
    };
    (width <= MAX_WIDTH && steps * size <= MAX_LANE_WIDTH).then_some((blueprint, size))
}

/// The number of compressed rows of a sequence, and of those that a query attends to; and the picks
/// among them, if there are any.
fn compressed_rows(inputs: &SinkInputs<CubeBackend>) -> (usize, usize, Option<&CubeTensor>) {
    match &inputs.compressed {
        CompressedRows::None => (0, 0, None),
        CompressedRows::Shared { rows, .. } => (rows.shape()[1], rows.shape()[1], None),
        CompressedRows::Picked { rows, picks, .. } => {
            (rows.shape()[1], picks.shape()[2], Some(picks))
        }
    }
}

pub(super) fn can_attend(inputs: &SinkInputs<CubeBackend>) -> bool {
    let [batch, count, heads, width] = inputs.queries.shape().dims();
    let (rows, selected, picks) = compressed_rows(inputs);
    let columns = inputs.window.shape()[1];
    let blueprint = blueprint(&inputs.queries.client, width, 1, 1, picks.is_some());
    batch * count <= DECODE_TOKENS
        && heads <= MAX_CUBES
        && i32::try_from(batch * columns.max(rows).max(selected)).is_ok()
        && is_float(inputs.queries.dtype)
        && picks.is_none_or(|picks| is_wide_int(picks.dtype))
        && blueprint.is_some_and(|(blueprint, _)| {
            kv_splits(inputs.span, selected, blueprint.split_columns) <= MAX_CUBES
        })
}

/// Contiguous inputs of attention, and the biases of the window and of compressed rows.
fn contiguous(inputs: SinkInputs<CubeBackend>) -> (AttentionTensors, [CubeTensor; 2]) {
    let window = with_contiguous_rows(inputs.window);
    let window_bias = into_contiguous(inputs.window_bias);
    let (compressed, picks) = match inputs.compressed {
        CompressedRows::None => (None, None),
        CompressedRows::Shared { rows, bias } => (Some((rows, bias)), None),
        CompressedRows::Picked { rows, bias, picks } => (Some((rows, bias)), Some(picks)),
    };
    let picks = picks.map(into_contiguous);
    let selected = match (&compressed, &picks) {
        (None, _) => 0,
        (Some(_), Some(picks)) => picks.shape()[2],
        (Some((rows, _)), None) => rows.shape()[1],
    };
    // Without compressed rows, the kernel reads none of these.
    let (rows, rows_bias) = compressed.map_or_else(
        || (window.clone(), window_bias.clone()),
        |(rows, bias)| (with_contiguous_rows(rows), into_contiguous(bias)),
    );
    let tensors = AttentionTensors {
        available: rows.shape()[1],
        queries: with_contiguous_rows(inputs.queries),
        window,
        rows,
        picks,
        sinks: into_contiguous(inputs.sinks),
        span: inputs.span,
        selected,
        scale: inputs.scale,
        size: 1,
    };
    (tensors, [window_bias, rows_bias])
}

pub(super) fn sink_attention(inputs: SinkInputs<CubeBackend>) -> CubeTensor {
    let (inputs, [window_bias, rows_bias]) = contiguous(inputs);
    let client = inputs.queries.client.clone();
    let width = inputs.queries.shape()[3];
    // The channels of a lane must not depend on the layout of the rows.
    let size = row_vector_size([&inputs.queries, &inputs.window, &inputs.rows], width);
    let picked = inputs.picks.is_some();
    let (blueprint, size) = blueprint(&client, width, size, 1, picked)
        .or_else(|| blueprint(&client, width, 1, 1, picked))
        .expect("checked by can_attend");
    let inputs = inputs.in_vectors(size);
    let splits = kv_splits(inputs.span, inputs.selected, blueprint.split_columns);
    let launch = SinkLaunch::new(inputs, blueprint, splits);
    // SAFETY: heads and vectors past the end are read as others, picks that are out of range as the
    // first row; writes are within the output.
    unsafe {
        sink_kernel::launch_unchecked(
            &client,
            launch.cubes(CUBE_HEADS, splits as u32),
            launch.dim(),
            launch.address_type(&rows_bias),
            size,
            launch.inputs.arg(),
            window_bias.into_buffer_arg(),
            rows_bias.into_buffer_arg(),
            launch.partials(),
            launch.blueprint,
            launch.dtypes(),
        );
    }
    combine(launch, None)
}

/// The number of KV splits of `split_columns` columns that a query's columns make.
fn kv_splits(span: usize, selected: usize, split_columns: u32) -> usize {
    let window = span.next_multiple_of(KV_GROUP as usize);
    (window + selected).div_ceil(split_columns as usize).max(1)
}

/// The inputs of the attention kernels.
struct AttentionTensors {
    queries: CubeTensor,
    window: CubeTensor,
    rows: CubeTensor,
    picks: Option<CubeTensor>,
    sinks: CubeTensor,
    /// Rows of the window that a query attends to.
    span: usize,
    /// Compressed rows of a sequence, and the number of them that a query attends to or picks.
    available: usize,
    selected: usize,
    scale: f64,
    /// Elements of a vector.
    size: usize,
}

impl AttentionTensors {
    /// With rows that kernels can read in vectors of so many elements.
    fn in_vectors(self, size: usize) -> Self {
        Self {
            queries: with_vectors(self.queries, size),
            window: with_vectors(self.window, size),
            rows: with_vectors(self.rows, size),
            size,
            ..self
        }
    }

    /// Rows of a sequence's window.
    fn slots(&self) -> u32 {
        self.window.shape()[1] as u32
    }

    fn arg<F: Float, I: Int, N: Size>(&self) -> AttentionInputsLaunch<F, I, N> {
        let [_, count, heads, width] = self.queries.shape().dims();
        let vectors = |tensor: &CubeTensor, axis: usize| stride(tensor, axis) / self.size;
        AttentionInputsLaunch::new(
            self.queries.clone().into_buffer_arg(),
            self.window.clone().into_buffer_arg(),
            self.rows.clone().into_buffer_arg(),
            self.picks.clone().map(CubeTensor::into_buffer_arg).into(),
            self.sinks.clone().into_buffer_arg(),
            AttentionShapeLaunch::new(
                count as u32,
                count as u32,
                heads as u32,
                (width / self.size) as u32,
                self.slots(),
                self.span as u32,
                self.available as u32,
                self.selected as u32,
            ),
            AttentionStridesLaunch::new(
                vectors(&self.queries, 0),
                vectors(&self.queries, 1),
                vectors(&self.queries, 2),
                vectors(&self.window, 0),
                vectors(&self.window, 1),
                vectors(&self.rows, 0),
                vectors(&self.rows, 1),
            ),
            self.scale as f32,
        )
    }
}

/// The inputs and results of the attention kernels.
struct SinkLaunch {
    inputs: AttentionTensors,
    blueprint: SinkBlueprint,
    splits: usize,
    result: CubeTensor,
    /// With several KV splits, the sums of each one, otherwise the result.
    sums: CubeTensor,
    softmax_stats: CubeTensor,
}

impl SinkLaunch {
    fn new(inputs: AttentionTensors, blueprint: SinkBlueprint, splits: usize) -> Self {
        let queries = &inputs.queries;
        let [batch, count, heads, width] = queries.shape().dims();
        let multiple_splits = splits > 1;
        let result = output(queries, [batch, count, heads, width], queries.dtype);
        let shape = [splits, batch, count, heads, width];
        Self {
            blueprint: SinkBlueprint {
                multiple_splits,
                ..blueprint
            },
            splits,
            sums: if multiple_splits {
                output(queries, shape, DType::F32)
            } else {
                result.clone()
            },
            softmax_stats: output(queries, [2, splits, batch, count, heads], DType::F32),
            result,
            inputs,
        }
    }

    /// The grid, for cubes of `cube_heads` heads, and so many for the columns of each.
    fn cubes(&self, cube_heads: u32, column_cubes: u32) -> CubeCount {
        let [batch, count, heads, _] = self.result.shape().dims();
        let head_cubes = (heads as u32).div_ceil(cube_heads);
        CubeCount::Static(head_cubes, (batch * count) as u32, column_cubes)
    }

    fn dim(&self) -> CubeDim {
        CubeDim::new_2d(self.blueprint.plane, self.blueprint.planes)
    }

    /// The type of offsets into its tensors and another one.
    fn address_type(&self, other: &CubeTensor) -> AddressType {
        let inputs = &self.inputs;
        address_type([
            &inputs.queries,
            &inputs.window,
            &inputs.rows,
            &self.sums,
            other,
        ])
    }

    /// The dtypes of queries, of sums and of picks.
    fn dtypes(&self) -> [ElemType; 3] {
        let picks = self.inputs.picks.as_ref();
        let picks_dtype = picks.map_or(DType::I32, |picks| picks.dtype);
        [self.result.dtype, self.sums.dtype, picks_dtype].map(dtype_to_storage_type)
    }

    fn partials<O: Float, N: Size>(&self) -> PartialOutputLaunch<O, N> {
        PartialOutputLaunch::new(
            self.sums.clone().into_buffer_arg(),
            self.softmax_stats.clone().into_buffer_arg(),
        )
    }
}

/// Combines the KV splits, if there are several. `rotation` has the positions by which results are
/// rotated back, and the number of channels in front that are not.
fn combine(launch: SinkLaunch, rotation: Option<(Positions, u32)>) -> CubeTensor {
    if !launch.blueprint.multiple_splits {
        return launch.result;
    }
    let client = launch.result.client.clone();
    let [batch, count, heads, width] = launch.result.shape().dims();
    let size = launch.inputs.size.min(COMBINE_VECTOR);
    let partials = launch.partials();
    let positions = rotation.as_ref().map(|(positions, _)| positions);
    let start_dtype = positions.map_or(DType::I32, |positions| positions.start.dtype);
    let dtypes = [launch.result.dtype, start_dtype].map(dtype_to_storage_type);
    let angles = positions.map_or(&launch.result, |positions| &positions.angles);
    let address = address_type([&launch.sums, &launch.result, angles]);
    let rotation = rotation.as_ref().map(|(positions, unrotated)| {
        OutputRotationLaunch::new(positions.arg(), count as u32, *unrotated / size as u32)
    });
    // SAFETY: there is a cube for each head of a query; angles are within the table.
    unsafe {
        combine_kernel::launch_unchecked(
            &client,
            CubeCount::Static(heads as u32, (batch * count) as u32, 1),
            CubeDim::new_1d(COMBINE_UNITS),
            address,
            size,
            partials,
            launch.inputs.sinks.into_buffer_arg(),
            rotation.into(),
            launch.result.clone().into_buffer_arg(),
            launch.splits as u32,
            (width / size) as u32,
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
    let sizes = PoolSizesLaunch::new(
        outputs,
        blocks,
        slots as u32,
        width,
        slot_strides(&values, 1),
        slot_strides(&scores, 1),
    );
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
            sizes,
            Caps::of(&client).target,
            dtype,
        );
    }
    result
}
