use super::super::kernel::{LogProbsBlueprint, LogProbsShapeLaunch, log_probs_kernel};
use super::{MAX_VECTOR, units_and_bins};
use crate::launching::prelude::*;

pub(in super::super) fn can_have_log_probs(logits: &CubeTensor, ids: &CubeTensor) -> bool {
    let ([rows, columns], [_, tokens]) = (logits.dims(), ids.dims());
    fits_i32(Some(columns))
        && fits_i32(rows.checked_mul(tokens))
        && is_float(logits.dtype)
        && ids.dtype == DType::I32
        && units_and_bins(logits).is_some()
}

pub(in super::super) fn log_probs(logits: CubeTensor, ids: CubeTensor) -> CubeTensor {
    let (logits, ids) = (with_contiguous_rows(logits), into_contiguous(ids));
    let ([rows, columns], [_, tokens]) = (logits.dims(), ids.dims());
    let client = logits.client.clone();
    let probs = output(&logits, [rows, tokens], DType::F32);
    let size = vector_size(&logits, MAX_VECTOR);
    let (units, _) = units_and_bins(&logits).expect("checked by can_have_log_probs");
    let blueprint = LogProbsBlueprint {
        units,
        target: Caps::of(&client).target,
    };
    let shape = LogProbsShapeLaunch::new(
        rows as u32,
        columns as u32,
        logits.meta.strides()[0] / size,
        tokens as u32,
        f32::NEG_INFINITY,
    );
    let dtype = dtype_to_storage_type(logits.dtype);
    let address = address_type([&logits, &ids]);
    // SAFETY: reads are of columns of the rows; writes are within `[rows, tokens]`.
    unsafe {
        log_probs_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(units),
            address,
            size,
            logits.clone().into_buffer_arg(),
            logits.into_buffer_arg(),
            ids.into_buffer_arg(),
            probs.clone().into_buffer_arg(),
            shape,
            blueprint,
            dtype,
        );
    }
    probs
}
