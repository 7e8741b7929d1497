//! KV splits: how the columns of a query are divided among cubes, and combined again.

use super::tensors::CachedTensors;
use crate::attention::kernel::{
    CachedBlueprint, KV_GROUP, OutputRotationLaunch, PartialOutputLaunch, SinkBlueprint,
    cached_kernel, combine_kernel,
};
use crate::launching::prelude::*;

/// Heads of a cube without tensor cores, and of one where masks say what is visible, which has no
/// angles to hold. With two, a query has half as many cubes, of which half as many run at once: a
/// unit then takes 176 registers in place of 128. No bit depends on it.
const CUBE_HEADS: u32 = 1;
pub(super) const MASKED_HEADS: u32 = 2;
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

/// Configuration of a kernel for rows of `width` channels, and the number of elements of its
/// vectors: `size`, or fewer, but no fewer than `least`. `picked` says whether queries pick among
/// the rows.
pub(super) fn blueprint(
    client: &Client,
    width: usize,
    mut size: usize,
    least: usize,
    picked: bool,
) -> Option<(SinkBlueprint, usize)> {
    let plane = Caps::of(client).plane()?;
    // Narrower vectors, so that every lane has one.
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

/// The number of KV splits of `split_columns` columns that a query's columns make.
pub(super) fn kv_splits(span: usize, selected: usize, split_columns: u32) -> usize {
    let window = span.next_multiple_of(KV_GROUP as usize);
    (window + selected).div_ceil(split_columns as usize).max(1)
}

/// The inputs and results of the attention kernels.
pub(super) struct SplitLaunch {
    pub inputs: CachedTensors,
    pub blueprint: SinkBlueprint,
    splits: usize,
    pub result: CubeTensor,
    /// With several KV splits, the sums of each one, otherwise the result.
    sums: CubeTensor,
    softmax_stats: CubeTensor,
}

impl SplitLaunch {
    pub(super) fn new(inputs: CachedTensors, blueprint: SinkBlueprint, splits: usize) -> Self {
        let queries = &inputs.queries;
        let [batch, count, heads, width] = queries.dims();
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
    pub(super) fn cubes(&self, cube_heads: u32, column_cubes: u32) -> CubeCount {
        let [batch, count, heads, _] = self.result.dims();
        let head_cubes = (heads as u32).div_ceil(cube_heads);
        CubeCount::Static(head_cubes, (batch * count) as u32, column_cubes)
    }

    pub(super) fn dim(&self) -> CubeDim {
        CubeDim::new_2d(self.blueprint.plane, self.blueprint.planes)
    }

    /// The dtypes of queries, of sums, of picks and of starts.
    pub(super) fn dtypes(&self) -> [ElemType; 4] {
        let [queries, picks, starts] = self.inputs.dtypes();
        [
            queries,
            dtype_to_storage_type(self.sums.dtype),
            picks,
            starts,
        ]
    }

    pub(super) fn partials<O: Float, N: Size>(&self) -> PartialOutputLaunch<O, N> {
        PartialOutputLaunch::new(
            self.sums.clone().into_buffer_arg(),
            self.softmax_stats.clone().into_buffer_arg(),
        )
    }
}

/// Attends without tensor cores.
pub(super) fn attend(launch: SplitLaunch, causal: bool) -> CubeTensor {
    let blueprint = CachedBlueprint {
        sink: launch.blueprint,
        unrotated: launch.inputs.vectors()[1],
        causal,
        masked: launch.inputs.masked(),
    };
    let inputs = &launch.inputs;
    let angles = &inputs.positions.angles;
    let address = address_type([
        &inputs.queries,
        &inputs.window,
        &inputs.rows,
        &launch.sums,
        angles,
    ]);
    // SAFETY: heads and vectors past the end are read as others; slots are taken modulo their
    // number; a row that is out of range or hidden is read as the first one or as the query's own;
    // angles are within the table; writes are within the output.
    unsafe {
        cached_kernel::launch_unchecked(
            &launch.result.client,
            launch.cubes(blueprint.sink.heads, launch.splits as u32),
            launch.dim(),
            address,
            inputs.size,
            inputs.arg(),
            launch.partials(),
            blueprint,
            launch.dtypes(),
        );
    }
    combine(launch)
}

/// Combines the KV splits, if there are several, and rotates results back.
pub(super) fn combine(launch: SplitLaunch) -> CubeTensor {
    if !launch.blueprint.multiple_splits {
        return launch.result;
    }
    let client = launch.result.client.clone();
    let [batch, count, heads, width] = launch.result.dims();
    let size = launch.inputs.size.min(COMBINE_VECTOR);
    let positions = &launch.inputs.positions;
    let [input, _, start] = launch.inputs.dtypes();
    let rotation = (!launch.inputs.masked()).then(|| {
        let unrotated = (width - positions.angles.shape()[1]) / size;
        OutputRotationLaunch::new(positions.arg(), count as u32, unrotated as u32)
    });
    let address = address_type([&launch.sums, &launch.result, &positions.angles]);
    // SAFETY: there is a cube for each head of a query; angles are within the table.
    unsafe {
        combine_kernel::launch_unchecked(
            &client,
            CubeCount::Static(heads as u32, (batch * count) as u32, 1),
            CubeDim::new_1d(COMBINE_UNITS),
            address,
            size,
            launch.partials(),
            launch.inputs.sinks.into_buffer_arg(),
            rotation.into(),
            launch.result.clone().into_buffer_arg(),
            launch.splits as u32,
            (width / size) as u32,
            launch.blueprint.target,
            [input, start],
        );
    }
    launch.result
}
