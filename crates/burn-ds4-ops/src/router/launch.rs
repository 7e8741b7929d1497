use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::kernel::{
    DenseBlueprint, HashBlueprint, SelectBlueprint, dense_kernel, hash_kernel, select_kernel,
};
use crate::arrival;
use crate::intrinsics::Target;
use crate::launching::{
    address_type, cube_count, is_float, is_wide_int, output, plane_size, vector_size,
    with_contiguous_rows,
};

/// Largest `k` of the kernels. The selection takes `k` rounds.
const MAX_K: usize = 32;
/// Widest read of a row that is chosen from, in elements.
const MAX_VECTOR: usize = 4;
/// Planes in a cube.
const PLANES: u32 = 4;
/// From here on, the rows of the input alone fill the device, and fewer lanes to a row spend fewer instructions on it.
const MANY_ROWS: usize = 2048;
/// From here on, even fewer.
const VERY_MANY_ROWS: usize = 8192;
/// Columns up to which the rows of a cube of several planes fit in 24 KiB of shared memory.
const MANY_COLUMNS: usize = 384;
const MANY_BYTES: usize = 24 << 10;
/// Columns of a row that fits in 16 KiB of shared memory.
const MAX_COLUMNS: usize = 4096;
/// Vectors that a lane reads at once at most.
const CHUNK: u32 = 8;

pub(super) fn can_select(scores: &CubeTensor, k: usize) -> bool {
    let [rows, columns] = scores.shape().dims();
    rows > 0
        && k <= MAX_K
        && columns <= MAX_COLUMNS
        && is_float(scores.dtype)
        && u32::try_from(rows).is_ok()
        && plane_size(&scores.client).is_some()
}

pub(super) fn topk_select(scores: CubeTensor, k: usize) -> (CubeTensor, CubeTensor) {
    let dtype = scores.dtype;
    select(scores, None, None, k, None, dtype)
}

pub(super) fn activation_topk(
    logits: CubeTensor,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    k: usize,
    scale: f64,
) -> (CubeTensor, CubeTensor) {
    select(logits, bias, padding, k, Some(scale), DType::F32)
}

/// With a scale, selects by score and returns weights; without, selects by value and returns values.
fn select(
    rows: CubeTensor,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    k: usize,
    scale: Option<f64>,
    dtype: DType,
) -> (CubeTensor, CubeTensor) {
    let rows = with_contiguous_rows(rows);
    let [tokens, columns] = rows.shape().dims();
    let outputs = (
        output(&rows, [tokens, k], dtype),
        output(&rows, [tokens, k], DType::I32),
    );
    let size = vector_size(&rows, MAX_VECTOR);
    let plane = plane_size(&rows.client).expect("checked by can_select");
    let shared = rows.client.properties().hardware.max_shared_memory_size;
    let (lanes, planes) = if tokens < MANY_ROWS || columns > MANY_COLUMNS || shared < MANY_BYTES {
        (plane, 1)
    } else if tokens < VERY_MANY_ROWS {
        (plane / 2, PLANES)
    } else {
        (plane / 4, PLANES)
    };
    let scored = scale.is_some();
    let blueprint = select_blueprint(&rows.client, columns, size, lanes, planes, k, scored);
    let source = Source {
        row_vectors: rows.meta.strides()[0] / size,
        part_vectors: 0,
        rows,
        tokens,
        columns,
        size,
    };
    launch_select(
        source,
        bias,
        padding,
        &outputs,
        scale.unwrap_or(1.0),
        blueprint,
    );
    outputs
}

/// For a selection from rows of `columns` elements in vectors of `size` by so many lanes.
fn select_blueprint(
    client: &Client,
    columns: usize,
    size: usize,
    lanes: u32,
    planes: u32,
    k: usize,
    scored: bool,
) -> SelectBlueprint {
    let plane = client.properties().hardware.plane_size_max;
    let vectors = (columns / size).div_ceil(lanes as usize) as u32;
    // Many rows hide the latency of each other's reads; few have to have them all on the way.
    let most = if lanes * 4 == plane { CHUNK / 2 } else { CHUNK };
    let chunks = vectors.div_ceil(most);
    let chunk = vectors.div_ceil(chunks);
    let vectors = chunks * chunk;
    SelectBlueprint {
        scored,
        k: k as u32,
        lanes,
        vectors,
        chunk,
        even: columns == (vectors * lanes) as usize * size,
        depth: if lanes == plane { 3 } else { 4 },
        parts: 1,
        planes,
        plane,
        target: Target::of(client),
    }
}

/// What is selected from.
struct Source {
    rows: CubeTensor,
    tokens: usize,
    columns: usize,
    /// Elements of a vector.
    size: usize,
    /// Vectors from one row to the next.
    row_vectors: usize,
    /// Vectors from one partial sum of a row to the next.
    part_vectors: usize,
}

fn launch_select(
    source: Source,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    (values, ids): &(CubeTensor, CubeTensor),
    scale: f64,
    blueprint: SelectBlueprint,
) {
    let client = values.client.clone();
    let per_cube = (blueprint.plane_rows() * blueprint.planes) as usize;
    let padding_dtype = padding.as_ref().map_or(DType::U32, |padding| padding.dtype);
    let dtypes = [source.rows.dtype, values.dtype, padding_dtype].map(dtype_to_storage_type);
    // SAFETY: reads are within a row of `columns` elements, writes within `[tokens, k]`.
    unsafe {
        select_kernel::launch_unchecked(
            &client,
            cube_count(&client, source.tokens.div_ceil(per_cube)),
            CubeDim::new_2d(blueprint.plane, blueprint.planes),
            address_type([&source.rows, values]),
            source.size,
            source.rows.into_buffer_arg(),
            optional(bias),
            optional(padding),
            values.clone().into_buffer_arg(),
            ids.clone().into_buffer_arg(),
            source.tokens as u32,
            source.columns as u32,
            source.row_vectors,
            source.part_vectors,
            scale as f32,
            f32::NEG_INFINITY,
            blueprint,
            dtypes,
        );
    }
}

/// A contiguous argument that a kernel can do without.
fn optional<T: From<Option<BufferArg>>>(tensor: Option<CubeTensor>) -> T {
    tensor
        .map(|tensor| into_contiguous(tensor).into_buffer_arg())
        .into()
}

pub(super) fn can_look_up(token_ids: &CubeTensor, table: &CubeTensor, experts: usize) -> bool {
    let [tokens] = token_ids.shape().dims();
    let [vocabulary, k] = table.shape().dims();
    tokens > 0
        && is_wide_int(token_ids.dtype)
        && is_wide_int(table.dtype)
        && i32::try_from(tokens.max(vocabulary).max(experts)).is_ok()
        && plane_size(&table.client).is_some_and(|size| k <= size as usize)
}

/// Tokens up to which the latency of three dependent reads counts, and not what they read.
const STAGED_TOKENS: usize = 256;
/// Experts whose logits are staged at most: 4 KiB of shared memory.
const STAGED_EXPERTS: usize = 1024;

pub(super) fn hash_route(
    token_ids: CubeTensor,
    table: CubeTensor,
    logits: Option<CubeTensor>,
    experts: usize,
    scale: f64,
) -> (CubeTensor, CubeTensor) {
    let (token_ids, table) = (into_contiguous(token_ids), with_contiguous_rows(table));
    let logits = logits.map(with_contiguous_rows);
    let [tokens] = token_ids.shape().dims();
    let [vocabulary, k] = table.shape().dims();
    let client = table.client.clone();
    let (weights, ids) = (
        output(&table, [tokens, k], DType::F32),
        output(&table, [tokens, k], DType::I32),
    );
    let plane = plane_size(&client).expect("checked by can_look_up");
    let size = logits
        .as_ref()
        .map_or(1, |logits| vector_size(logits, MAX_VECTOR));
    let staged = logits.is_some() && tokens <= STAGED_TOKENS && experts <= STAGED_EXPERTS;
    let blueprint = HashBlueprint {
        k: k as u32,
        lanes: (k as u32).next_power_of_two(),
        staged: if staged {
            (experts / size).div_ceil(plane as usize) as u32
        } else {
            0
        },
        plane,
        target: Target::of(&client),
    };
    let (planes, per_cube) = if staged {
        (1, 1)
    } else {
        let planes = if tokens < MANY_ROWS { 1 } else { PLANES };
        (planes, (plane / blueprint.lanes * planes) as usize)
    };
    let logits_dtype = logits.as_ref().map_or(DType::F32, |logits| logits.dtype);
    let row_vectors = logits
        .as_ref()
        .map_or(0, |logits| logits.meta.strides()[0] / size);
    let table_stride = table.meta.strides()[0];
    let addresses = match &logits {
        Some(logits) => address_type([&table, logits]),
        None => address_type([&table, &ids]),
    };
    let dtypes = [token_ids.dtype, table.dtype, logits_dtype].map(dtype_to_storage_type);
    // SAFETY: token ids are clamped to the table, its entries to the experts; writes are within `[tokens, k]`.
    unsafe {
        hash_kernel::launch_unchecked(
            &client,
            cube_count(&client, tokens.div_ceil(per_cube)),
            CubeDim::new_2d(plane, planes),
            addresses,
            size,
            token_ids.into_buffer_arg(),
            table.into_buffer_arg(),
            logits.map(CubeTensor::into_buffer_arg).into(),
            weights.clone().into_buffer_arg(),
            ids.clone().into_buffer_arg(),
            tokens as u32,
            vocabulary as u32,
            experts as u32,
            table_stride,
            row_vectors,
            scale as f32,
            blueprint,
            dtypes,
        );
    }
    (weights, ids)
}

/// Tokens up to which [`dense_router`] is one launch, where cubes can hand results to each other: one cube chooses for all of them.
/// For more, a second launch with a cube for each is faster.
const FINISHED_TOKENS: usize = 8;
/// Tokens up to which it is two launches, with tensor cores and without. Beyond, the matrix product reads `x` and the gate less
/// often.
const FUSED_TOKENS: (usize, usize) = (2048, 512);
/// Width of a token up to which the partial sums are few enough to be added in one go.
const MAX_MODEL: usize = 1 << 14;
/// Shared memory of the cube that chooses for several tokens, at most.
const FINISHED_BYTES: usize = 48 << 10;
/// Experts up to which a cube can choose for as many tokens at once as it has planes: 32 KiB of shared memory.
const FINISHED_EXPERTS: usize = 512;
/// Stretches into which `d_model` is cut. More fill the device better, but are more to add up.
const STRETCHES: usize = 4;
/// Steps of a plane at most: all that it reads of the gate is on the way at once, in registers. Without tensor cores and with them.
const UNIT_STEPS: usize = 2;
const TILE_STEPS: usize = 4;
/// Experts of a plane, planes of a cube that divide its experts and that divide its stretch of `d_model`; without tensor cores and
/// with them.
const UNIT_CUT: (u32, u32, u32) = (2, 4, 4);
const TILE_CUT: (u32, u32, u32) = (16, 1, 16);
/// Tokens of a cube at most.
const UNIT_TOKENS: u32 = 16;
const TILE_TOKENS: usize = 64;

/// The dtype of both, if the tensor cores can multiply them: what they have to be laid out like is what CUDA C++ says it is.
fn tiles(x: &CubeTensor, gate: &CubeTensor) -> Option<&'static str> {
    let [_, d_model] = x.shape().dims();
    let possible = Target::of(&x.client).ptx
        && plane_size(&x.client) == Some(32)
        && x.dtype == gate.dtype
        && d_model.is_multiple_of(8);
    match x.dtype {
        DType::BF16 if possible => Some("bf16"),
        DType::F16 if possible => Some("f16"),
        _ => None,
    }
}

/// Whether the matrix product can take the factors as they are without a loss.
pub(super) fn can_multiply_halves(x: &CubeTensor, gate: &CubeTensor) -> bool {
    let [tokens, d_model] = x.shape().dims();
    tokens > 0
        && d_model > 0
        && x.dtype == gate.dtype
        && matches!(x.dtype, DType::F16 | DType::BF16)
}

pub(super) fn can_fuse(x: &CubeTensor, gate: &CubeTensor, k: usize) -> bool {
    let ([tokens, d_model], [experts, _]) = (x.shape().dims(), gate.shape().dims());
    let most = match tiles(x, gate) {
        Some(_) => FUSED_TOKENS.0,
        None => FUSED_TOKENS.1,
    };
    (1..=most).contains(&tokens)
        && d_model > 0
        && k <= MAX_K
        && is_float(x.dtype)
        && is_float(gate.dtype)
        && experts <= MAX_COLUMNS
        && d_model <= MAX_MODEL
        && plane_size(&x.client).is_some()
}

pub(super) fn dense_router(
    x: CubeTensor,
    gate: CubeTensor,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    k: usize,
    scale: f64,
) -> (CubeTensor, CubeTensor) {
    let (x, gate) = (with_contiguous_rows(x), with_contiguous_rows(gate));
    let ([tokens, d_model], [experts, _]) = (x.shape().dims(), gate.shape().dims());
    let client = x.client.clone();
    let target = Target::of(&client);
    let plane = plane_size(&client).expect("checked by can_fuse");
    let size = vector_size(&x, usize::MAX).min(vector_size(&gate, usize::MAX));
    let columns_size = [4, 2, 1]
        .into_iter()
        .find(|size| experts.is_multiple_of(*size))
        .expect("1 divides everything");
    let finish = arrival::has_last_cube(&client)
        && target.sync_plane
        && tokens <= FINISHED_TOKENS
        && experts <= FINISHED_EXPERTS
        && client.properties().hardware.max_shared_memory_size >= FINISHED_BYTES;

    let model_vectors = d_model / size;
    // A row that starts at an odd place has shorter vectors.
    let tiles = tiles(&x, &gate).filter(|_| size == 8);
    let ((plane_experts, expert_planes, model_planes), lanes) = match tiles {
        Some(_) => (TILE_CUT, 4),
        None => (UNIT_CUT, plane),
    };
    let per_step = (model_planes * lanes) as usize;
    let most = if tiles.is_some() {
        TILE_STEPS
    } else {
        UNIT_STEPS
    };
    let steps = model_vectors.div_ceil(per_step * STRETCHES).min(most) as u32;
    let stretch = (model_planes * steps * lanes) as usize;
    let stretches = model_vectors.div_ceil(stretch);
    let cubes = (experts as u32).div_ceil(plane_experts * expert_planes);
    let cube_tokens = match tiles {
        Some(_) => tile_tokens(&client, tokens, cubes as usize * stretches),
        None => (tokens as u32).next_power_of_two().min(UNIT_TOKENS),
    };
    let planes = expert_planes * model_planes;
    let chooser_planes = if finish { planes } else { 1 };
    let mut choice = select_blueprint(
        &client,
        experts,
        columns_size,
        plane,
        chooser_planes,
        k,
        true,
    );
    choice.parts = stretches as u32;
    let blueprint = DenseBlueprint {
        tokens: cube_tokens,
        experts: plane_experts,
        expert_planes,
        model_planes,
        steps,
        even: model_vectors == stretches * stretch,
        plane,
        tiles,
        finish,
        select: choice,
    };
    let outputs = (
        output(&x, [tokens, k], DType::F32),
        output(&x, [tokens, k], DType::I32),
    );
    let partial = output(&x, [stretches * tokens, experts], DType::F32);
    let padding_dtype = padding.as_ref().map_or(DType::U32, |padding| padding.dtype);
    let dtypes = [x.dtype, gate.dtype, padding_dtype].map(dtype_to_storage_type);
    let (x_vectors, gate_vectors) = (x.meta.strides()[0] / size, gate.meta.strides()[0] / size);
    let counter = arrival::counter(&client, &x.device);
    // SAFETY: tokens, experts and vectors past the end are read as the last or the first; writes are within `partial`, the one
    // number of the counter, and `[tokens, k]`.
    unsafe {
        dense_kernel::launch_unchecked(
            &client,
            CubeCount::Static(
                cubes,
                stretches as u32,
                (tokens as u32).div_ceil(cube_tokens),
            ),
            CubeDim::new_2d(plane, planes),
            address_type([&x, &gate]),
            size,
            columns_size,
            x.into_buffer_arg(),
            gate.into_buffer_arg(),
            partial.clone().into_buffer_arg(),
            BufferArg::from_raw_parts(counter, 1),
            optional(bias.clone()),
            optional(padding.clone()),
            outputs.0.clone().into_buffer_arg(),
            outputs.1.clone().into_buffer_arg(),
            tokens as u32,
            experts as u32,
            model_vectors as u32,
            x_vectors,
            gate_vectors,
            scale as f32,
            f32::NEG_INFINITY,
            blueprint,
            dtypes,
        );
    }
    if !finish {
        let source = Source {
            rows: partial,
            tokens,
            columns: experts,
            size: columns_size,
            row_vectors: experts / columns_size,
            part_vectors: tokens * experts / columns_size,
        };
        launch_select(source, bias, padding, &outputs, scale, choice);
    }
    outputs
}

/// The fewest tokens of a cube for which all cubes run at once.
fn tile_tokens(client: &Client, tokens: usize, cubes: usize) -> u32 {
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let fits = |size: &usize| {
        processors.is_none_or(|processors| tokens.div_ceil(*size) * cubes <= processors as usize)
    };
    let mut sizes = std::iter::successors(Some(8), |size| Some(size * 2));
    let size = sizes.find(|size| fits(size) || *size >= TILE_TOKENS.min(tokens));
    size.map_or(TILE_TOKENS as u32, |size| size as u32)
}
