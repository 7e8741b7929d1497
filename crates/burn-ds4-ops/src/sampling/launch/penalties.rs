use super::super::kernel::{PenaltyBlueprint, PenaltyShapeLaunch, count_kernel, penalties_kernel};
use super::tables_arg;
use crate::launching::prelude::*;

/// Units of a cube, and columns of a unit.
const UNITS: u32 = 256;
const UNIT_COLUMNS: u32 = 16;
/// Units of a cube that counts tokens.
const COUNT_UNITS: u32 = 64;

pub(in super::super) fn can_penalise(logits: &CubeTensor, drafts: Option<&CubeTensor>) -> bool {
    let [rows, columns] = logits.dims();
    rows <= MAX_CUBES
        && fits_i32(Some(columns))
        && logits.dtype == DType::F32
        && drafts.is_none_or(|drafts| is_wide_int(drafts.dtype))
        && Caps::of(&logits.client).cube_units >= UNITS
}

/// Changes `logits` in place if nobody else holds them.
pub(in super::super) fn apply_penalties(
    logits: CubeTensor,
    drafts: Option<CubeTensor>,
    counts: CubeTensor,
    tables: [CubeTensor; 2],
) -> CubeTensor {
    let logits = writable(with_contiguous_rows(logits));
    let counts = with_contiguous_rows(counts);
    let ([rows, columns], [lanes, _]) = (logits.dims(), counts.dims());
    let client = logits.client.clone();
    let blueprint = PenaltyBlueprint {
        units: UNITS,
        columns: UNIT_COLUMNS,
    };
    let shape = PenaltyShapeLaunch::new(
        columns as u32,
        (rows / lanes) as u32,
        logits.meta.strides()[0],
        counts.meta.strides()[0],
        0,
    );
    let segments = columns.div_ceil((UNITS * UNIT_COLUMNS) as usize);
    let address = address_type([&logits, &counts]);
    // Without drafts none is read, whatever is passed.
    let drafts = drafts.map_or_else(|| counts.clone(), into_contiguous);
    let dtype = dtype_to_storage_type(drafts.dtype);
    // SAFETY: reads and writes are of columns of the rows, and of the parameters and the drafts of
    // a row's lane; biases are of columns.
    unsafe {
        penalties_kernel::launch_unchecked(
            &client,
            CubeCount::Static(segments as u32, rows as u32, 1),
            CubeDim::new_1d(UNITS),
            address,
            logits.clone().into_buffer_arg(),
            counts.into_buffer_arg(),
            drafts.into_buffer_arg(),
            tables_arg(tables),
            shape,
            blueprint,
            dtype,
        );
    }
    logits
}

pub(in super::super) fn can_count(counts: &CubeTensor, tokens: &CubeTensor) -> bool {
    let ([_, columns], [lanes, count]) = (counts.dims(), tokens.dims());
    fits_i32(Some(columns)) && fits_i32(lanes.checked_mul(count)) && is_wide_int(tokens.dtype)
}

/// Changes `counts` in place if nobody else holds them.
pub(in super::super) fn count_tokens(counts: CubeTensor, tokens: CubeTensor) -> CubeTensor {
    let counts = writable(with_contiguous_rows(counts));
    let tokens = into_contiguous(tokens);
    let ([_, columns], [lanes, count]) = (counts.dims(), tokens.dims());
    let client = counts.client.clone();
    let cubes = lanes.div_ceil(COUNT_UNITS as usize);
    let address = address_type([&counts, &tokens]);
    let counts_row = counts.meta.strides()[0];
    let dtype = dtype_to_storage_type(tokens.dtype);
    // SAFETY: each unit reads and writes within its lane.
    unsafe {
        count_kernel::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_1d(COUNT_UNITS),
            address,
            counts.clone().into_buffer_arg(),
            tokens.into_buffer_arg(),
            lanes as u32,
            count as u32,
            columns as u32,
            counts_row,
            dtype,
        );
    }
    counts
}
