//! Launch of attention with a sink, for few queries.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::splits::{CUBE_HEADS, SinkLaunch, blueprint, combine, kv_splits};
use super::tensors::AttentionTensors;
use crate::attention::args::{CompressedRows, SinkInputs};
use crate::attention::kernel::sink_kernel;
use crate::attention::options::DECODE_TOKENS;
use crate::launching::{MAX_CUBES, is_float, is_wide_int, row_vector_size, with_contiguous_rows};

/// The number of compressed rows of a sequence, and of those that a query attends to; and the picks
/// among them, if there are any.
pub(super) fn compressed_rows(
    inputs: &SinkInputs<CubeBackend>,
) -> (usize, usize, Option<&CubeTensor>) {
    match &inputs.compressed {
        CompressedRows::None => (0, 0, None),
        CompressedRows::Shared { rows, .. } => (rows.shape()[1], rows.shape()[1], None),
        CompressedRows::Picked { rows, picks, .. } => {
            (rows.shape()[1], picks.shape()[2], Some(picks))
        }
    }
}

pub(in crate::attention) fn can_attend(inputs: &SinkInputs<CubeBackend>) -> bool {
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
pub(super) fn contiguous(inputs: SinkInputs<CubeBackend>) -> (AttentionTensors, [CubeTensor; 2]) {
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

pub(in crate::attention) fn sink_attention(inputs: SinkInputs<CubeBackend>) -> CubeTensor {
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
