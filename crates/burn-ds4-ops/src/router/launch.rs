use super::kernel::{
    DenseBlueprint, HashBlueprint, HashSizesLaunch, RouterOperandsLaunch, SelectBlueprint,
    SelectRowsLaunch, SelectionLaunch, dense_kernel, hash_kernel, select_kernel,
};
use crate::launching::prelude::*;

/// Largest `k` of the kernels. The selection takes one iteration for each of the `k` ranks.
const MAX_K: usize = 32;
/// Elements of the widest read of a row that is selected from.
const MAX_VECTOR: usize = 4;
/// Planes of a cube that selects from many rows.
const SELECT_PLANES: u32 = 4;
/// Rows from which on cubes have several planes, each of which works on two rows. So many rows fill
/// the device by themselves, and fewer lanes for each spend fewer instructions on it.
const HALF_PLANE_ROWS: usize = 2048;
/// Rows from which on a plane works on four rows.
const QUARTER_PLANE_ROWS: usize = 8192;
/// Columns up to which the rows of a cube of several planes fit in 24 KiB of shared memory.
const HALF_PLANE_COLUMNS: usize = 384;
const HALF_PLANE_BYTES: usize = 24 << 10;
/// Most columns: such a row fits in 16 KiB of shared memory.
const MAX_COLUMNS: usize = 4096;
/// Most vectors that a lane reads at once.
const MAX_READ_VECTORS: u32 = 8;

pub(super) fn can_select(scores: &CubeTensor, k: usize) -> bool {
    let [rows, columns] = scores.dims();
    rows > 0
        && k <= MAX_K
        && columns <= MAX_COLUMNS
        && is_float(scores.dtype)
        && u32::try_from(rows).is_ok()
        && Caps::of(&scores.client).plane().is_some()
}

/// Selects by score and returns weights if there is a scale. Otherwise selects by value and returns
/// values.
pub(super) fn select(
    rows: CubeTensor,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    k: usize,
    scale: Option<f64>,
) -> (CubeTensor, CubeTensor) {
    let rows = with_contiguous_rows(rows);
    let [tokens, columns] = rows.dims();
    let dtype = scale.map_or(rows.dtype, |_| DType::F32);
    let outputs = [dtype, DType::I32].map(|dtype| output(&rows, [tokens, k], dtype));
    let size = vector_size(&rows, MAX_VECTOR);
    let caps = Caps::of(&rows.client);
    let plane = caps.plane().expect("checked by can_select");
    let fits = caps.fits_shared(HALF_PLANE_BYTES);
    let (lanes, planes) = if tokens < HALF_PLANE_ROWS || columns > HALF_PLANE_COLUMNS || !fits {
        (plane, 1)
    } else if tokens < QUARTER_PLANE_ROWS {
        (plane / 2, SELECT_PLANES)
    } else {
        (plane / 4, SELECT_PLANES)
    };
    let scored = scale.is_some();
    let blueprint = select_blueprint(&rows.client, columns, size, lanes, planes, k, scored);
    let input = SelectInput {
        row_vectors: rows.meta.strides()[0] / size,
        partial_vectors: 0,
        rows,
        tokens,
        columns,
        size,
    };
    launch_select(
        input,
        bias,
        padding,
        outputs,
        scale.unwrap_or(1.0),
        blueprint,
    )
}

/// The blueprint for rows of `columns` elements in vectors of `size`, with `lanes` lanes for each
/// row.
fn select_blueprint(
    client: &Client,
    columns: usize,
    size: usize,
    lanes: u32,
    planes: u32,
    k: usize,
    scored: bool,
) -> SelectBlueprint {
    let plane = Caps::of(client).plane().expect("checked by can_select");
    let vectors = (columns / size).div_ceil(lanes as usize) as u32;
    // Many rows hide the latency of each other's reads. With fewer rows, all reads of a row have to
    // be in flight at once.
    let most = if lanes * 4 == plane {
        MAX_READ_VECTORS / 2
    } else {
        MAX_READ_VECTORS
    };
    let iterations = vectors.div_ceil(most);
    let read_vectors = vectors.div_ceil(iterations);
    let vectors = iterations * read_vectors;
    SelectBlueprint {
        scored,
        k: k as u32,
        lanes,
        vectors,
        read_vectors,
        even: columns == (vectors * lanes) as usize * size,
        depth: if lanes == plane { 3 } else { 4 },
        partials: 1,
        planes,
        plane,
        target: Caps::of(client).target,
    }
}

/// The rows that are selected from.
struct SelectInput {
    rows: CubeTensor,
    tokens: usize,
    columns: usize,
    /// Elements of a vector.
    size: usize,
    /// Vectors from one row to the next.
    row_vectors: usize,
    /// Vectors from one partial of a row to the next.
    partial_vectors: usize,
}

/// What is written for the rows, as a kernel argument.
fn selection_arg<O: Float, P: Int>(
    padding: Option<CubeTensor>,
    outputs: &[CubeTensor; 2],
    scale: f64,
) -> SelectionLaunch<O, P> {
    let [values, ids] = outputs.clone().map(CubeTensor::into_buffer_arg);
    SelectionLaunch::new(
        optional(padding),
        values,
        ids,
        scale as f32,
        f32::NEG_INFINITY,
    )
}

fn launch_select(
    input: SelectInput,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    outputs: [CubeTensor; 2],
    scale: f64,
    blueprint: SelectBlueprint,
) -> (CubeTensor, CubeTensor) {
    let [values, _] = &outputs;
    let client = values.client.clone();
    let per_cube = (blueprint.plane_rows() * blueprint.planes) as usize;
    let padding_dtype = padding.as_ref().map_or(DType::U32, |padding| padding.dtype);
    let dtypes = [input.rows.dtype, values.dtype, padding_dtype].map(dtype_to_storage_type);
    // SAFETY: reads are within a row of `columns` elements, writes within `[tokens, k]`.
    unsafe {
        select_kernel::launch_unchecked(
            &client,
            cube_count(&client, input.tokens.div_ceil(per_cube)),
            CubeDim::new_2d(blueprint.plane, blueprint.planes),
            address_type([&input.rows, values]),
            input.size,
            SelectRowsLaunch::new(
                input.rows.into_buffer_arg(),
                input.tokens as u32,
                input.columns as u32,
                input.row_vectors,
                input.partial_vectors,
            ),
            optional(bias),
            selection_arg(padding, &outputs, scale),
            blueprint,
            dtypes,
        );
    }
    outputs.into()
}

/// The buffer of an optional kernel argument, made contiguous.
fn optional<T: From<Option<BufferArg>>>(tensor: Option<CubeTensor>) -> T {
    tensor
        .map(|tensor| into_contiguous(tensor).into_buffer_arg())
        .into()
}

pub(super) fn can_look_up(token_ids: &CubeTensor, table: &CubeTensor, experts: usize) -> bool {
    let [tokens] = token_ids.dims();
    let [vocabulary, k] = table.dims();
    tokens > 0
        && is_wide_int(token_ids.dtype)
        && is_wide_int(table.dtype)
        && i32::try_from(tokens.max(vocabulary).max(experts)).is_ok()
        && Caps::of(&table.client)
            .plane()
            .is_some_and(|size| k <= size as usize)
}

/// Tokens up to which the latency of three dependent reads is the bound, and not the bytes read.
const PREFETCH_TOKENS: usize = 256;
/// Most experts whose logits are prefetched: 4 KiB of shared memory.
const PREFETCH_EXPERTS: usize = 1024;

pub(super) fn hash_route(
    token_ids: CubeTensor,
    table: CubeTensor,
    logits: Option<CubeTensor>,
    experts: usize,
    scale: f64,
) -> (CubeTensor, CubeTensor) {
    let (token_ids, table) = (into_contiguous(token_ids), with_contiguous_rows(table));
    let logits = logits.map(with_contiguous_rows);
    let [tokens] = token_ids.dims();
    let [vocabulary, k] = table.dims();
    let client = table.client.clone();
    let (weights, ids) = (
        output(&table, [tokens, k], DType::F32),
        output(&table, [tokens, k], DType::I32),
    );
    let plane = Caps::of(&client).plane().expect("checked by can_look_up");
    let size = logits
        .as_ref()
        .map_or(1, |logits| vector_size(logits, MAX_VECTOR));
    let prefetches = logits.is_some() && tokens <= PREFETCH_TOKENS && experts <= PREFETCH_EXPERTS;
    let blueprint = HashBlueprint {
        k: k as u32,
        lanes: (k as u32).next_power_of_two(),
        prefetch: if prefetches {
            (experts / size).div_ceil(plane as usize) as u32
        } else {
            0
        },
        plane,
        target: Caps::of(&client).target,
    };
    let (planes, per_cube) = if prefetches {
        (1, 1)
    } else {
        let planes = if tokens < HALF_PLANE_ROWS {
            1
        } else {
            SELECT_PLANES
        };
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
    // SAFETY: token ids are clamped to the table and its entries to the experts; writes are within
    // `[tokens, k]`.
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
            HashSizesLaunch::new(
                tokens as u32,
                vocabulary as u32,
                experts as u32,
                table_stride,
                row_vectors,
                scale as f32,
            ),
            blueprint,
            dtypes,
        );
    }
    (weights, ids)
}

/// Tokens up to which [`dense_router`] is two launches: where warpgroups multiply beyond, other
/// tensor cores, or none. The matrix product reads `x` and the gate fewer times.
const FUSED_TOKENS: [usize; 3] = [128, 2048, 512];
/// Largest `d_model` for which the selection adds the partials while it reads them.
const MAX_MODEL: usize = 1 << 14;
/// Cubes that `d_model` is divided among, or more for a long one. More fill the device better,
/// but add partials.
const K_SPLITS: usize = 4;
/// Most iterations over `d_model` of a plane, without tensor cores and with them. All that the
/// plane reads of the gate is in flight at once, in registers.
const SIMT_STEPS: usize = 2;
const MMA_STEPS: usize = 4;
/// Experts of a plane, planes of a cube that divide its experts, and planes that divide its part of
/// `d_model`; without tensor cores and with them.
const SIMT_PARTITION: (u32, u32, u32) = (2, 4, 4);
const MMA_PARTITION: (u32, u32, u32) = (16, 1, 16);
/// Most tokens of a cube, without tensor cores and with them.
const SIMT_TOKENS: u32 = 16;
const MMA_TOKENS: usize = 64;

/// The dtype of both operands if tensor cores can multiply them. The fragment layout is that of
/// CUDA.
fn mma_dtype(x: &CubeTensor, gate: &CubeTensor) -> Option<&'static str> {
    let [_, d_model] = x.dims();
    let possible =
        Caps::of(&x.client).tensor_cores && x.dtype == gate.dtype && d_model.is_multiple_of(8);
    match x.dtype {
        DType::BF16 if possible => Some("bf16"),
        DType::F16 if possible => Some("f16"),
        _ => None,
    }
}

/// Whether there is a kernel that multiplies and selects.
pub(super) fn can_fuse(x: &CubeTensor, gate: &CubeTensor, k: usize) -> bool {
    let ([tokens, d_model], [experts, _]) = (x.dims(), gate.dims());
    let most = match mma_dtype(x, gate) {
        Some(_) if Caps::of(&x.client).wgmma => FUSED_TOKENS[0],
        Some(_) => FUSED_TOKENS[1],
        None => FUSED_TOKENS[2],
    };
    (1..=most).contains(&tokens)
        && d_model > 0
        && k <= MAX_K
        && is_float(x.dtype)
        && is_float(gate.dtype)
        && experts <= MAX_COLUMNS
        && d_model <= MAX_MODEL
        && Caps::of(&x.client).plane().is_some()
}

pub(super) fn dense_router(
    x: CubeTensor,
    gate: CubeTensor,
    bias: Option<CubeTensor>,
    padding: Option<CubeTensor>,
    k: usize,
    scale: f64,
) -> (CubeTensor, CubeTensor) {
    let ([tokens, d_model], [experts, _]) = (x.dims(), gate.dims());
    // The order of a sum depends on the size, which therefore must not depend on the layout.
    let size = row_vector_size([&x, &gate], d_model);
    let (x, gate) = (with_vectors(x, size), with_vectors(gate, size));
    let client = x.client.clone();
    let plane = Caps::of(&client).plane().expect("checked by can_fuse");
    let columns_size = [4, 2, 1]
        .into_iter()
        .find(|size| experts.is_multiple_of(*size))
        .expect("1 divides everything");

    let model_vectors = d_model / size;
    let mma_dtype = mma_dtype(&x, &gate);
    let ((plane_experts, expert_planes, model_planes), lanes) = match mma_dtype {
        Some(_) => (MMA_PARTITION, 4),
        None => (SIMT_PARTITION, plane),
    };
    let per_step = (model_planes * lanes) as usize;
    let most = if mma_dtype.is_some() {
        MMA_STEPS
    } else {
        SIMT_STEPS
    };
    let k_steps = model_vectors.div_ceil(per_step * K_SPLITS).min(most) as u32;
    let split_vectors = (model_planes * k_steps * lanes) as usize;
    let k_splits = model_vectors.div_ceil(split_vectors);
    let cubes = (experts as u32).div_ceil(plane_experts * expert_planes);
    let cube_tokens = match mma_dtype {
        Some(_) => mma_tokens(&client, tokens, cubes as usize * k_splits),
        None => (tokens as u32).next_power_of_two().min(SIMT_TOKENS),
    };
    let planes = expert_planes * model_planes;
    let selection = SelectBlueprint {
        partials: k_splits as u32,
        ..select_blueprint(&client, experts, columns_size, plane, 1, k, true)
    };
    let blueprint = DenseBlueprint {
        tokens: cube_tokens,
        experts: plane_experts,
        expert_planes,
        model_planes,
        k_steps,
        even: model_vectors == k_splits * split_vectors,
        plane,
        mma_dtype,
        target: Caps::of(&client).target,
    };
    let outputs = [DType::F32, DType::I32].map(|dtype| output(&x, [tokens, k], dtype));
    let partials = output(&x, [k_splits * tokens, experts], DType::F32);
    let dtypes = [x.dtype, gate.dtype].map(dtype_to_storage_type);
    let (x_vectors, gate_vectors) = (x.meta.strides()[0] / size, gate.meta.strides()[0] / size);
    // SAFETY: tokens, experts and vectors past the end are read as the last or the first; writes
    // are within `partials`.
    unsafe {
        dense_kernel::launch_unchecked(
            &client,
            CubeCount::Static(
                cubes,
                k_splits as u32,
                (tokens as u32).div_ceil(cube_tokens),
            ),
            CubeDim::new_2d(plane, planes),
            address_type([&x, &gate]),
            size,
            columns_size,
            RouterOperandsLaunch::new(
                x.into_buffer_arg(),
                gate.into_buffer_arg(),
                tokens as u32,
                experts as u32,
                model_vectors as u32,
                x_vectors,
                gate_vectors,
            ),
            partials.clone().into_buffer_arg(),
            blueprint,
            dtypes,
        );
    }
    let input = SelectInput {
        rows: partials,
        tokens,
        columns: experts,
        size: columns_size,
        row_vectors: experts / columns_size,
        partial_vectors: tokens * experts / columns_size,
    };
    launch_select(input, bias, padding, outputs, scale, selection)
}

/// The fewest tokens of a cube for which all cubes run at once.
fn mma_tokens(client: &Client, tokens: usize, cubes: usize) -> u32 {
    let processors = Caps::of(client).processors as usize;
    let fits = |size: &usize| tokens.div_ceil(*size) * cubes <= processors;
    let mut sizes = std::iter::successors(Some(8), |size| Some(size * 2));
    let size = sizes.find(|size| fits(size) || *size >= MMA_TOKENS.min(tokens));
    size.map_or(MMA_TOKENS as u32, |size| size as u32)
}
