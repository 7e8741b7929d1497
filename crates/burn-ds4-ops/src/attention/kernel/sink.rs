//! Attention with a sink, for few queries.

use cubecl::prelude::*;

use super::combine::combine_planes;
use super::heads::{Heads, KvGroup};
use super::inputs::{AttentionInputs, KV_GROUP, KvSplit, PartialOutput, SinkBlueprint};
use super::rotate::RowRotation;
use crate::attention::options::MASKED;

/// Computes one softmax over the rows of the window, compressed rows and a sink, which has no
/// value.
///
/// - `window`: query `i` of a sequence attends to `span` rows, which end `count - 1 - i` rows
///   before the last
/// - `rows`: all queries of a sequence attend to the first `selected`, or each has `selected` of
///   its own in `picks`; a pick that is out of range is hidden
/// - `window_bias`, `rows_bias`: `[batch, columns]`, `[batch, count, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sink_kernel<F: Float, O: Float, I: Int, N: Size>(
    inputs: &AttentionInputs<F, I, N>,
    window_bias: &[f32],
    rows_bias: &[f32],
    output: &mut PartialOutput<O, N>,
    #[comptime] blueprint: SinkBlueprint,
    #[define(F, O, I)] _dtypes: [ElemType; 3],
) {
    let shape = &inputs.shape;
    let strides = &inputs.strides;
    let token = CUBE_POS_Y;
    let (sequence, query) = shape.query_of(token);
    let first_head = CUBE_POS_X * blueprint.heads;
    let mut heads = Heads::<N>::new::<F, I>(inputs, sequence, query, first_head, blueprint);

    let first_column = shape.columns + 1 - shape.count - shape.span + query;
    let split = KvSplit::new(shape, shape.selected, blueprint);
    let mut first = split.first + UNIT_POS_Y * KV_GROUP;
    while first < min(split.end, shape.span) {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let inside = first + c < shape.span;
            let column = first_column + select(inside, first + c, first);
            let bias = window_bias[(sequence * shape.columns + column) as usize];
            group.biases[c as usize] = select(inside, bias, MASKED);
            group.starts[c as usize] =
                sequence as usize * strides.window_sequence + column as usize * strides.window_row;
        }
        if group.is_visible() {
            heads.attend::<F>(&inputs.window, &group, shape.vectors, inputs.scale);
        }
        first += comptime!(KV_GROUP * blueprint.planes);
    }

    let end = split.row(split.end);
    let mut first = split.row(split.first) + UNIT_POS_Y * KV_GROUP;
    while first < end {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let mut inside = first + c < end;
            let index = select(inside, first + c, first);
            let picked = inputs.pick(token, index);
            inside = inside && picked >= I::from_int(0) && picked < I::cast_from(shape.rows);
            let row = select(inside, u32::cast_from(picked), 0u32) as usize;
            let bias = rows_bias[token as usize * shape.rows as usize + row];
            group.biases[c as usize] = select(inside, bias, MASKED);
            group.starts[c as usize] =
                sequence as usize * strides.rows_sequence + row * strides.row;
        }
        if group.is_visible() {
            heads.attend::<F>(&inputs.rows, &group, shape.vectors, inputs.scale);
        }
        first += comptime!(KV_GROUP * blueprint.planes);
    }

    let rotation = ComptimeOption::<RowRotation>::new_None();
    combine_planes::<O, N>(&heads, &inputs.sinks, &rotation, output, shape, blueprint);
}
