//! Launches of attention with a sink, where masks say what is visible.

use super::many::{self, Blueprint, planes};
use super::splits::{MASKED_HEADS, SplitLaunch, attend, blueprint, kv_splits};
use super::tensors::CachedTensors;
use super::tiles::can_multiply;
use crate::attention::args::{CompressedRows, SinkInputs};
use crate::attention::kernel::{CachedTilesBlueprint, SinkBlueprint};
use crate::attention::options::DECODE_TOKENS;
use crate::launching::prelude::*;

/// Configuration of the kernel, and the number of elements of its vectors.
enum Plan {
    Few(SinkBlueprint, usize),
    Many(CachedTilesBlueprint),
}

impl Plan {
    fn new(inputs: &SinkInputs<CubeBackend>) -> Option<Self> {
        let queries = &inputs.queries;
        let [batch, count, heads, width] = queries.dims();
        let (rows, picks) = match &inputs.compressed {
            CompressedRows::None => (None, None),
            CompressedRows::Shared { rows, .. } => (Some(rows), None),
            CompressedRows::Picked { rows, picks, .. } => (Some(rows), Some(picks)),
        };
        let available = rows.map_or(0, |rows| rows.shape()[1]);
        let selected = picks.map_or(available, |picks| picks.shape()[2]);
        let columns = inputs.window.shape()[1];
        let fits = heads <= MAX_CUBES
            && fits_i32(batch.checked_mul(columns.max(available).max(selected)))
            && fits_i32(columns.checked_add(selected))
            && fits_i32(
                batch
                    .checked_mul(count)
                    .and_then(|all| all.checked_mul(heads)),
            )
            && picks.is_none_or(|picks| is_wide_int(picks.dtype));
        if !fits {
            return None;
        }
        if batch * count > DECODE_TOKENS {
            let blueprint = planes(queries, (width / 8) as u32, true, true);
            return blueprint.filter(|_| can_multiply(queries)).map(Self::Many);
        }
        // The channels of a lane must not depend on the layout of the rows.
        let size = row_vector_size([queries, &inputs.window, rows.unwrap_or(queries)], width);
        let of_size = |size| blueprint(&queries.client, width, size, 1, picks.is_some());
        let (blueprint, size) = of_size(size).or_else(|| of_size(1))?;
        let splits = kv_splits(inputs.span, selected, blueprint.split_columns);
        let heads = MASKED_HEADS;
        let blueprint = SinkBlueprint { heads, ..blueprint };
        (is_float(queries.dtype) && splits <= MAX_CUBES).then_some(Self::Few(blueprint, size))
    }
}

pub(in crate::attention) fn can_attend(inputs: &SinkInputs<CubeBackend>) -> bool {
    Plan::new(inputs).is_some()
}

pub(in crate::attention) fn sink_attention(inputs: SinkInputs<CubeBackend>) -> CubeTensor {
    match Plan::new(&inputs).expect("checked by can_attend") {
        Plan::Few(blueprint, size) => {
            let inputs = CachedTensors::of_masks(inputs, size);
            let splits = kv_splits(inputs.span, inputs.selected, blueprint.split_columns);
            attend(SplitLaunch::new(inputs, blueprint, splits), true)
        }
        Plan::Many(blueprint) => many::attend(
            CachedTensors::of_masks(inputs, 8),
            Blueprint::Planes(blueprint),
        ),
    }
}
