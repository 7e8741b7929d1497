//! Launches of attention over a cache, and of storing its new rows.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::compress::{F32_BYTES, ROW_UNITS, row_blueprint, row_norm};
use super::splits::{SinkLaunch, blueprint, combine, kv_splits};
use super::tensors::{AttentionTensors, Positions, stride};
use crate::attention::args::{CachedBlocks, NewRows, Queries};
use crate::attention::kernel::{
    AppendSizesLaunch, AppenderLaunch, CacheLayoutLaunch, CachedBlueprint, CachedInputsLaunch,
    CachedTilesBlueprint, HeadTiles, LANES, RowBlueprint, SLICE_CHANNELS, SUMMED_COLUMNS,
    SinkBlueprint, TILE_HEADS, TILE_PLANES, append_kernel, cached_cluster_kernel, cached_kernel,
    cached_tiles_kernel,
};
use crate::attention::options::{DECODE_TOKENS, WindowLayout};
use crate::caps::Caps;
use crate::launching::{
    MAX_CUBES, address_type, fits_i32, is_float, is_wide_int, row_vector_size,
    with_contiguous_rows, with_vectors, writable,
};

/// Heads of a plane that prepares the queries of a tile.
const PLANE_HEADS: u32 = TILE_HEADS / TILE_PLANES;
/// Heads of a cube without tensor cores. With two, a query has half as many cubes, of which half as
/// many run at once: a unit then takes 176 registers in place of 128. No bit depends on it.
const CUBE_HEADS: u32 = 1;
/// Widest row of the tensor-core kernel: each plane has a slice of it.
const MAX_TILE_WIDTH: usize = (TILE_PLANES * SLICE_CHANNELS) as usize;

pub(in crate::attention) fn can_append(new: &NewRows<CubeBackend>, ring: &CubeTensor) -> bool {
    let [batch, count, _] = new.x.shape().dims();
    let [known, rotated] = new.angles.shape().dims();
    let [_, slots, width] = ring.shape().dims();
    rotated > 0
        && batch <= MAX_CUBES
        && count <= MAX_CUBES
        && [new.x.dtype, ring.dtype, new.norm.dtype]
            .into_iter()
            .all(is_float)
        && is_wide_int(new.start.dtype)
        && fits_i32(Some(slots.max(width)))
        && fits_i32(known.checked_add(count))
        && Caps::of(&ring.client).fits_shared((2 * width + ROW_UNITS as usize) * F32_BYTES)
        && row_blueprint(&ring.client, width, rotated, new.rounding).is_some()
}

/// The arguments of the kernels that store new rows.
pub(super) struct AppendArguments {
    pub blueprint: RowBlueprint,
    /// New rows of a sequence that are stored.
    pub stored: usize,
    pub x: CubeTensor,
    pub norm: CubeTensor,
    epsilon: f64,
    pub positions: Positions,
    pub ring: CubeTensor,
}

impl AppendArguments {
    /// For arguments that [`can_append`] accepts.
    pub(super) fn new(new: NewRows<CubeBackend>, ring: CubeTensor) -> Self {
        let [_, count, width] = new.x.shape().dims();
        let [_, rotated] = new.angles.shape().dims();
        let [_, slots, _] = ring.shape().dims();
        let blueprint = row_blueprint(&ring.client, width, rotated, new.rounding)
            .expect("checked by can_append");
        Self {
            blueprint,
            stored: count.min(slots),
            x: with_contiguous_rows(new.x),
            norm: into_contiguous(new.norm),
            epsilon: new.epsilon,
            positions: Positions::new(new.angles, new.start),
            ring: writable(with_contiguous_rows(ring)),
        }
    }

    /// The type of offsets into its tensors.
    pub(super) fn address_type(&self) -> AddressType {
        address_type([&self.x, &self.positions.angles, &self.ring])
    }

    /// The dtypes of new rows, of the ring, of norm weights and of starts.
    pub(super) fn dtypes(&self) -> [ElemType; 4] {
        [&self.x, &self.ring, &self.norm, &self.positions.start]
            .map(|tensor| dtype_to_storage_type(tensor.dtype))
    }

    /// The kernel argument.
    pub(super) fn arg<X: Float, R: Float, W: Float>(&self) -> AppenderLaunch<X, R, W> {
        let (count, slots) = (self.x.shape()[1], self.ring.shape()[1]);
        AppenderLaunch::new(
            self.x.clone().into_buffer_arg(),
            row_norm(self.norm.clone(), self.epsilon),
            self.ring.clone().into_buffer_arg(),
            AppendSizesLaunch::new(
                self.stored as u32,
                (count - self.stored) as u32,
                slots as u32,
                stride(&self.x, 0),
                stride(&self.x, 1),
                stride(&self.ring, 0),
                stride(&self.ring, 1),
            ),
        )
    }
}

pub(in crate::attention) fn append_rows(new: NewRows<CubeBackend>, ring: CubeTensor) -> CubeTensor {
    let append = AppendArguments::new(new, ring);
    let client = append.ring.client.clone();
    let [batch, _, _] = append.ring.shape().dims();
    // SAFETY: there is a cube for each row that is stored; a vacant sequence, whose start is not in
    // the table, reads the angles of a position in it and writes nothing; slots are taken modulo
    // their number.
    unsafe {
        append_kernel::launch_unchecked(
            &client,
            CubeCount::Static(append.stored as u32, batch as u32, 1),
            CubeDim::new_2d(append.blueprint.partition.plane, append.blueprint.planes),
            append.address_type(),
            append.arg(),
            append.positions.arg(),
            append.blueprint,
            append.dtypes(),
        );
    }
    append.ring
}

/// Whether vectors of `size` elements hold whole pairs, and none both rotated and other channels.
fn holds_pairs(size: usize, rotated: usize) -> bool {
    size.is_multiple_of(2) && rotated.is_multiple_of(size)
}

/// Cubes on tensor cores that share the columns of a query: of a window alone, and of compressed
/// rows as well. Nothing else may count, because the order of sums depends on it.
const WINDOW_KV_CUBES: u32 = 2;
const KV_CUBES: u32 = 4;
/// Columns of such a cube whose rows are in shared memory at a time, at most: those of the window
/// of 128 and the 512 picks of the released models, or of the window and the compressed rows of
/// 65,536 positions.
const TILE_COLUMNS: u32 = 160;
/// Columns of a cube come in steps of so many, so that there are few kernels.
const COLUMN_STEP: u32 = 2 * SUMMED_COLUMNS;
/// Tiles of heads of a cube where there are more cubes than multiprocessors.
const MANY_HEAD_TILES: u32 = 2;
/// The architecture from which on cubes can be clusters.
const CLUSTERS_FROM: u32 = 90;

/// Configuration of a kernel, and the number of elements of its vectors.
struct CachedPlan {
    sink: SinkBlueprint,
    size: usize,
    /// The tiles of a cube of the tensor-core kernels.
    tiles: Option<HeadTiles>,
    kv_cubes: u32,
}

impl CachedPlan {
    fn new(
        queries: &Queries<CubeBackend>,
        rows: [&CubeTensor; 2],
        blocks: &CachedBlocks<CubeBackend>,
    ) -> Option<Self> {
        // The plan must be the same whether this call has picks or not.
        let picked = match blocks {
            CachedBlocks::None => false,
            CachedBlocks::All { picking, .. } => *picking,
            CachedBlocks::Picked { .. } => true,
        };
        let width = queries.x.shape()[3];
        let rotated = queries.angles.shape()[1];
        let client = &queries.x.client;
        // The channels of a lane must not depend on the layout of the rows.
        let mut size = row_vector_size([&queries.x, rows[0], rows[1]], width);
        while size > 1 && !holds_pairs(size, rotated) {
            size /= 2;
        }
        if size == 8
            && let Some(tiles) = head_tiles(&queries.x)
        {
            let sink = SinkBlueprint {
                heads: PLANE_HEADS,
                planes: TILE_PLANES,
                plane: LANES,
                steps: tiles.vectors.div_ceil(LANES),
                even: tiles.vectors.is_multiple_of(LANES),
                split_columns: tiles.columns,
                multiple_splits: false,
                target: tiles.target,
            };
            return Some(Self {
                sink,
                size,
                tiles: Some(tiles),
                kv_cubes: match blocks {
                    CachedBlocks::None => WINDOW_KV_CUBES,
                    _ => KV_CUBES,
                },
            });
        }
        let (sink, size) = blueprint(client, width, size, 2, picked)?;
        holds_pairs(size, rotated).then_some(Self {
            sink: SinkBlueprint {
                heads: CUBE_HEADS,
                ..sink
            },
            size,
            tiles: None,
            kv_cubes: 1,
        })
    }

    /// The number of KV splits that are combined by another launch.
    fn splits(&self, span: usize, selected: usize) -> usize {
        match self.tiles {
            Some(tiles) if tiles.target.is_at_least(CLUSTERS_FROM) => 1,
            Some(_) => self.kv_cubes as usize,
            None => kv_splits(span, selected, self.sink.split_columns),
        }
    }
}

/// Bytes of shared memory of a cube: two numbers for each head besides those of its tiles.
fn shared_bytes(tiles: HeadTiles) -> usize {
    tiles.shared_bytes(1) + 2 * tiles.heads() as usize * F32_BYTES
}

/// The tiles of a cube, of as many columns as fit, if tensor cores can attend.
fn head_tiles(queries: &CubeTensor) -> Option<HeadTiles> {
    let width = queries.shape()[3];
    let caps = Caps::of(&queries.client);
    let can_multiply = caps.tensor_cores
        && queries.dtype != DType::F32
        && width.is_multiple_of(SLICE_CHANNELS as usize)
        && width <= MAX_TILE_WIDTH;
    let of_columns = |columns| HeadTiles {
        head_tiles: 1,
        vectors: (width / 8) as u32,
        columns,
        dot_sums: 2,
        f16_input: queries.dtype == DType::F16,
        target: caps.target,
    };
    let mut tiles = (1..=TILE_COLUMNS)
        .rev()
        .step_by(COLUMN_STEP as usize)
        .map(of_columns)
        .filter(|_| can_multiply);
    tiles.find(|&tiles| caps.fits_shared(shared_bytes(tiles)))
}

/// The compressed rows, if there are any, the picks among them, and the positions of a block.
pub(super) fn block_tensors(
    blocks: &CachedBlocks<CubeBackend>,
) -> (Option<&CubeTensor>, Option<&CubeTensor>, usize) {
    match blocks {
        CachedBlocks::None => (None, None, 1),
        CachedBlocks::All { rows, ratio, .. } => (Some(rows), None, *ratio),
        CachedBlocks::Picked { rows, picks, ratio } => (Some(rows), Some(picks), *ratio),
    }
}

/// Whether kernels can index what queries attend to.
pub(super) fn fits_cached(
    queries: &Queries<CubeBackend>,
    window: &CubeTensor,
    blocks: &CachedBlocks<CubeBackend>,
) -> bool {
    let count = queries.x.shape()[1];
    let [known, rotated] = queries.angles.shape().dims();
    let (rows, picks, ratio) = block_tensors(blocks);
    let selected = selected_rows(rows, picks);
    let available = rows.map_or(0, |rows| rows.shape()[1]);
    let slots = window.shape()[1];
    rotated > 0
        && fits_i32(Some(available.max(selected).max(ratio)))
        && fits_i32(slots.checked_mul(2))
        && fits_i32(known.checked_add(count))
        && fits_i32(queries.columns().checked_add(selected))
        && is_wide_int(queries.start.dtype)
        && picks.is_none_or(|picks| is_wide_int(picks.dtype))
}

pub(in crate::attention) fn can_attend_cached(
    queries: &Queries<CubeBackend>,
    window: &CubeTensor,
    blocks: &CachedBlocks<CubeBackend>,
) -> bool {
    let [batch, count, heads, _] = queries.x.shape().dims();
    let (rows, picks, _) = block_tensors(blocks);
    let selected = selected_rows(rows, picks);
    // The output of KV splits grows with the queries: for many of a sequence, it would not fit.
    count <= DECODE_TOKENS
        && batch * count <= MAX_CUBES
        && heads <= MAX_CUBES
        && is_float(queries.x.dtype)
        && fits_cached(queries, window, blocks)
        && CachedPlan::new(queries, [window, rows.unwrap_or(window)], blocks)
            .is_some_and(|plan| plan.splits(queries.columns(), selected) <= MAX_CUBES)
}

/// The number of compressed rows that a query attends to or picks.
fn selected_rows(rows: Option<&CubeTensor>, picks: Option<&CubeTensor>) -> usize {
    let available = rows.map_or(0, |rows| rows.shape()[1]);
    picks.map_or(available, |picks| picks.shape()[2])
}

impl AttentionTensors {
    /// The rows of a cache in vectors of `size` elements, and what says which positions they stand
    /// for.
    pub(super) fn of_cache(
        queries: Queries<CubeBackend>,
        window: CubeTensor,
        blocks: &CachedBlocks<CubeBackend>,
        size: usize,
    ) -> (Self, CachedArguments) {
        let (rows, picks, ratio) = block_tensors(blocks);
        let span = queries.columns();
        let tensors = Self {
            available: rows.map_or(0, |rows| rows.shape()[1]),
            selected: selected_rows(rows, picks),
            // Without compressed rows, kernels read none of these.
            rows: with_vectors(rows.unwrap_or(&window).clone(), size),
            picks: picks.cloned().map(into_contiguous),
            queries: with_vectors(queries.x, size),
            window: with_vectors(window, size),
            sinks: into_contiguous(queries.sinks),
            span,
            scale: queries.scale,
            size,
        };
        let arguments = CachedArguments {
            positions: Positions::new(queries.angles, queries.start),
            ratio: ratio as u32,
            latest: queries.layout == WindowLayout::Latest,
            epsilon: queries.epsilon as f32,
        };
        (tensors, arguments)
    }
}

/// The arguments of the kernels that attend over a cache, besides tensors.
pub(super) struct CachedArguments {
    pub positions: Positions,
    ratio: u32,
    latest: bool,
    epsilon: f32,
}

impl CachedArguments {
    pub(super) fn arg<F: Float, I: Int, P: Int, N: Size>(
        &self,
        inputs: &AttentionTensors,
    ) -> CachedInputsLaunch<F, I, P, N> {
        CachedInputsLaunch::new(
            inputs.arg(),
            self.positions.arg(),
            CacheLayoutLaunch::new(self.ratio, inputs.slots(), u32::from(self.latest)),
            self.epsilon,
        )
    }
}

impl SinkLaunch {
    /// The tiles of a cube for this call: of no more columns than there are, and more heads where
    /// there are more cubes than multiprocessors. No bit depends on it.
    fn tiles(&self, tiles: HeadTiles, kv_cubes: u32) -> HeadTiles {
        let caps = Caps::of(&self.result.client);
        let [batch, count, heads, _] = self.result.shape().dims();
        let columns = kv_splits(self.inputs.span, self.inputs.selected, SUMMED_COLUMNS);
        let of_cube = columns.div_ceil(kv_cubes as usize) as u32 * SUMMED_COLUMNS;
        let tiles = HeadTiles {
            columns: of_cube.next_multiple_of(COLUMN_STEP).min(tiles.columns),
            ..tiles
        };
        let cubes = heads.div_ceil(TILE_HEADS as usize) * batch * count * kv_cubes as usize;
        let heads = MANY_HEAD_TILES * TILE_HEADS;
        let more = HeadTiles {
            head_tiles: MANY_HEAD_TILES,
            columns: tiles.columns.max(2 * heads),
            ..tiles
        };
        match cubes > caps.processors as usize && caps.fits_shared(shared_bytes(more)) {
            true => more,
            false => tiles,
        }
    }
}

pub(in crate::attention) fn cached_attention(
    queries: Queries<CubeBackend>,
    window: CubeTensor,
    blocks: CachedBlocks<CubeBackend>,
) -> CubeTensor {
    let rows = block_tensors(&blocks).0.unwrap_or(&window);
    let plan = CachedPlan::new(&queries, [&window, rows], &blocks);
    let plan = plan.expect("checked by can_attend_cached");
    let CachedPlan {
        sink, size, tiles, ..
    } = plan;
    let client = queries.x.client.clone();
    let (width, rotated) = (queries.x.shape()[3], queries.angles.shape()[1]);
    let unrotated = ((width - rotated) / size) as u32;
    let causal = queries.causal;
    let (inputs, cached) = AttentionTensors::of_cache(queries, window, &blocks, size);
    let splits = plan.splits(inputs.span, inputs.selected);
    let launch = SinkLaunch::new(inputs, sink, splits);
    let blueprint = CachedBlueprint {
        sink: launch.blueprint,
        unrotated,
        causal,
    };
    let [input, output, pick] = launch.dtypes();
    let start = dtype_to_storage_type(cached.positions.start.dtype);
    let address = launch.address_type(&cached.positions.angles);
    let tiles = tiles.map(|tiles| CachedTilesBlueprint {
        cached: blueprint,
        tiles: launch.tiles(tiles, plan.kv_cubes),
        kv_cubes: plan.kv_cubes,
        in_cluster: splits == 1,
    });
    let cubes = |heads| launch.cubes(heads, plan.kv_cubes);
    // SAFETY: heads and vectors past the end are read as others; slots are taken modulo their
    // number; a row that is out of range or hidden is read as the first one, as the query's own or
    // not at all; angles are within the table; writes are within the output. Cubes of a cluster
    // read no more of each other than they have, while all of them are there.
    unsafe {
        match tiles {
            Some(tiles) if splits == 1 => cached_cluster_kernel::launch_unchecked(
                &client,
                cubes(tiles.tiles.heads()),
                launch.dim(),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
                AddressType::U64,
                cached.arg(&launch.inputs),
                launch.result.clone().into_buffer_arg(),
                tiles,
                [input, pick, start],
            ),
            Some(tiles) => cached_tiles_kernel::launch_unchecked(
                &client,
                cubes(tiles.tiles.heads()),
                launch.dim(),
                // Offsets in shared memory that are as wide as addresses are part of the
                // instructions.
                AddressType::U64,
                cached.arg(&launch.inputs),
                launch.partials(),
                tiles,
                [input, output, pick, start],
            ),
            None => cached_kernel::launch_unchecked(
                &client,
                launch.cubes(sink.heads, splits as u32),
                launch.dim(),
                address,
                size,
                cached.arg(&launch.inputs),
                launch.partials(),
                blueprint,
                [input, output, pick, start],
            ),
        }
    }
    combine(launch, Some((cached.positions, (width - rotated) as u32)))
}
