//! Combining the partial outputs of planes, and those of KV splits.

use cubecl::prelude::*;

use super::heads::Heads;
use super::rotate::{AngleTable, rotate_vector};
use super::sink::{AttentionShape, SinkBlueprint};
use super::softmax_weight;
use crate::attention::{MASKED, TINY};
use crate::intrinsics::Target;

/// The sum of all exponentials relative to `maximum`, that of the sink included.
#[cube]
pub(super) fn with_sink(total: f32, sink: f32, maximum: f32, #[comptime] target: Target) -> f32 {
    max(
        total + softmax_weight(max(sink, MASKED) - maximum, target),
        TINY,
    )
}

/// Combines the partial outputs of the planes of a cube, and writes the result as
/// [`sink_kernel`](super::sink_kernel) says.
///
/// If `unrotated` is given, pairs of the vectors from there on are rotated back by the angles at
/// `angle`. Every unit of the cube must call this.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn combine_planes<O: Float, N: Size>(
    heads: &Heads<N>,
    sinks: &[f32],
    angles: &[f32],
    output: &mut [Vector<O, N>],
    softmax_stats: &mut [f32],
    angle: usize,
    pairs: usize,
    shape: &AttentionShape,
    #[comptime] unrotated: Option<u32>,
    #[comptime] blueprint: SinkBlueprint,
) {
    let token = CUBE_POS_Y;
    let split = CUBE_POS_Z;
    let first_head = CUBE_POS_X * blueprint.heads;
    let cube_heads = comptime!(blueprint.heads);
    let plane_vectors = comptime!((blueprint.steps * blueprint.plane) as usize);
    let mut maxima =
        Shared::<[f32]>::new_slice(comptime!((blueprint.planes * cube_heads) as usize));
    let mut totals =
        Shared::<[f32]>::new_slice(comptime!((blueprint.planes * cube_heads) as usize));
    let mut partials =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!(blueprint.planes as usize * plane_vectors));
    if UNIT_POS_X == 0 {
        #[unroll]
        for h in 0..cube_heads {
            maxima[(UNIT_POS_Y * cube_heads + h) as usize] = heads.maxima[h as usize];
            totals[(UNIT_POS_Y * cube_heads + h) as usize] = heads.totals[h as usize];
        }
    }
    sync_cube();
    #[unroll]
    for h in 0..cube_heads {
        let head = first_head + h;
        let mut maximum = maxima[h as usize];
        #[unroll]
        for plane in 1..blueprint.planes {
            maximum = max(
                maximum,
                maxima[comptime!((plane * cube_heads + h) as usize)],
            );
        }
        let mut total = 0.0f32;
        #[unroll]
        for plane in 0..blueprint.planes {
            let at = comptime!((plane * cube_heads + h) as usize);
            total += totals[at] * softmax_weight(maxima[at] - maximum, blueprint.target);
        }
        let weight = softmax_weight(heads.maxima[h as usize] - maximum, blueprint.target);
        #[unroll]
        for step in 0..blueprint.steps {
            let at = UNIT_POS_Y as usize * plane_vectors
                + (UNIT_POS_X + step * blueprint.plane) as usize;
            let sum = heads.sums[comptime!((h * blueprint.steps + step) as usize)];
            partials[at] = sum * Vector::new(weight);
        }
        sync_cube();
        let mut divisor = 1.0f32;
        let mut own = token * shape.heads + head;
        if comptime!(blueprint.multiple_splits) {
            let all_heads = CUBE_COUNT_Y * shape.heads;
            own += split * all_heads;
            if UNIT_POS == 0 && head < shape.heads {
                softmax_stats[own as usize] = maximum;
                softmax_stats[(CUBE_COUNT_Z * all_heads + own) as usize] = total;
            }
        } else {
            let sink = sinks[min(head, shape.heads - 1) as usize];
            divisor = with_sink(total, sink, maximum, blueprint.target);
        }
        let mut vector = UNIT_POS;
        // Nothing reads the output of a KV split without a visible column.
        let written = comptime!(!blueprint.multiple_splits).runtime() || total != 0.0f32;
        while vector < shape.vectors && head < shape.heads && written {
            let mut sum = partials[vector as usize];
            #[unroll]
            for plane in 1..comptime!(blueprint.planes as usize) {
                sum += partials[plane * plane_vectors + vector as usize];
            }
            let at = own as usize * shape.vectors as usize + vector as usize;
            let mut result = sum / Vector::new(divisor);
            if comptime!(!blueprint.multiple_splits && unrotated.is_some()) {
                let unrotated = comptime!(unrotated.unwrap_or(0));
                if vector >= unrotated {
                    let first = angle + ((vector - unrotated) * N::value() as u32 / 2) as usize;
                    result = rotate_vector::<N>(result, angles, first, pairs, true);
                }
            }
            output[at] = Vector::cast_from(result);
            vector += comptime!(blueprint.planes * blueprint.plane);
        }
        if comptime!(h + 1 < cube_heads) {
            sync_cube();
        }
    }
}

/// KV splits whose partial sums are loaded before any of them is used.
const SPLITS_IN_FLIGHT: usize = 16;

/// Combines the KV splits of [`sink_kernel`](super::sink_kernel). Each head of a query has a cube;
/// `output` is `[batch, count, heads, vectors]`.
///
/// Where angles and the starts of sequences of `count` queries are given, pairs of the vectors from
/// `unrotated` on are rotated back by them.
#[cube(launch_unchecked, address_type = "dynamic")]
// A condition on comptime values gets an `if` of its own.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn combine_kernel<O: Float, P: Int, N: Size>(
    sums: &[Vector<f32, N>],
    softmax_stats: &[f32],
    sinks: &[f32],
    angles: ComptimeOption<&[f32]>,
    start: ComptimeOption<&[P]>,
    output: &mut [Vector<O, N>],
    splits: u32,
    count: u32,
    vectors: u32,
    unrotated: u32,
    table: AngleTable,
    #[comptime] target: Target,
    #[define(O, P)] _dtypes: [ElemType; 2],
) {
    let head = CUBE_POS_X;
    let token = CUBE_POS_Y;
    let all_heads = CUBE_COUNT_X * CUBE_COUNT_Y;
    let own = token * CUBE_COUNT_X + head;
    let mut vector = UNIT_POS;
    while vector < vectors {
        // As planes do with columns: relative to the largest logit so far.
        let mut maximum = softmax_stats[own as usize];
        let mut total = 0.0f32;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut first = 0u32;
        while first < splits {
            let mut maxima = Array::<f32>::new(SPLITS_IN_FLIGHT);
            let mut totals = Array::<f32>::new(SPLITS_IN_FLIGHT);
            let mut partials = Array::<Vector<f32, N>>::new(SPLITS_IN_FLIGHT);
            #[unroll]
            for i in 0..SPLITS_IN_FLIGHT {
                let split = first + comptime!(i as u32);
                let inside = split < splits;
                let at = select(inside, split, 0u32) * all_heads + own;
                maxima[i] = softmax_stats[at as usize];
                totals[i] = select(
                    inside,
                    softmax_stats[(splits * all_heads + at) as usize],
                    0.0f32,
                );
            }
            let before = maximum;
            #[unroll]
            for i in 0..SPLITS_IN_FLIGHT {
                let mut partial = Vector::<f32, N>::new(0.0f32);
                // Splits without a visible column wrote nothing.
                if totals[i] != 0.0f32 {
                    let at = (first + comptime!(i as u32)) * all_heads + own;
                    partial = sums[at as usize * vectors as usize + vector as usize];
                }
                partials[i] = partial;
                maximum = max(maximum, maxima[i]);
            }
            let rescale = softmax_weight(before - maximum, target);
            total *= rescale;
            sum *= Vector::new(rescale);
            #[unroll]
            for i in 0..SPLITS_IN_FLIGHT {
                let weight = softmax_weight(maxima[i] - maximum, target);
                total = fma(totals[i], weight, total);
                sum += partials[i] * Vector::new(weight);
            }
            first += comptime!(SPLITS_IN_FLIGHT as u32);
        }
        let divisor = with_sink(total, sinks[head as usize], maximum, target);
        let at = own as usize * vectors as usize + vector as usize;
        let mut result = sum / Vector::new(divisor);
        #[comptime]
        if let ComptimeOption::Some(angles) = angles {
            #[comptime]
            if let ComptimeOption::Some(start) = start {
                if vector >= unrotated {
                    let angle = table.at::<P>(start[(token / count) as usize], token % count);
                    let first = angle + ((vector - unrotated) * N::value() as u32 / 2) as usize;
                    result = rotate_vector::<N>(result, angles, first, table.pairs, true);
                }
            }
        }
        output[at] = Vector::cast_from(result);
        vector += CUBE_DIM;
    }
}
