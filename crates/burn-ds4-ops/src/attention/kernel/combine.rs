//! Combining the partial outputs of planes, and those of KV splits.

use cubecl::prelude::*;

use super::heads::Heads;
use super::rotate::{Positions, RowRotation, rotate_vector};
use super::sink::{AttentionShape, PartialOutput, SinkBlueprint};
use super::softmax_weight;
use crate::attention::{MASKED, TINY};
use crate::caps::Target;

/// The sum of all exponentials relative to `maximum`, that of the sink included.
#[cube]
pub(super) fn with_sink(total: f32, sink: f32, maximum: f32, #[comptime] target: Target) -> f32 {
    max(
        total + softmax_weight(max(sink, MASKED) - maximum, target),
        TINY,
    )
}

/// Combines the partial outputs of the planes of a cube, and writes the result as
/// [`sink_kernel`](super::sink_kernel) says. If a rotation is given, results are rotated back.
/// Every unit of the cube must call this.
#[cube]
// A condition on comptime values gets an `if` of its own.
#[allow(clippy::collapsible_if)]
pub(super) fn combine_planes<O: Float, N: Size>(
    heads: &Heads<N>,
    sinks: &[f32],
    rotation: &ComptimeOption<RowRotation>,
    output: &mut PartialOutput<O, N>,
    shape: &AttentionShape,
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
                output.softmax_stats[own as usize] = maximum;
                output.softmax_stats[(CUBE_COUNT_Z * all_heads + own) as usize] = total;
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
            #[comptime]
            if let ComptimeOption::Some(rotation) = rotation {
                if comptime!(!blueprint.multiple_splits) {
                    if vector >= comptime!(rotation.unrotated) {
                        result = rotation.rotate::<N>(result, vector, true);
                    }
                }
            }
            output.sums[at] = Vector::cast_from(result);
            vector += comptime!(blueprint.planes * blueprint.plane);
        }
        if comptime!(h + 1 < cube_heads) {
            sync_cube();
        }
    }
}

/// By which angles results are rotated back.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct OutputRotation<P: Int> {
    pub positions: Positions<P>,
    /// Queries of a sequence.
    pub count: u32,
    /// Vectors in front of a row that are not rotated.
    pub unrotated: u32,
}

/// KV splits whose partial sums are loaded before any of them is used.
const SPLITS_IN_FLIGHT: usize = 16;

/// Combines the KV splits of [`sink_kernel`](super::sink_kernel). Each head of a query has a cube;
/// `output` is `[batch, count, heads, vectors]`. If a rotation is given, results are rotated back.
#[cube(launch_unchecked, address_type = "dynamic")]
// A condition on comptime values gets an `if` of its own.
#[allow(clippy::collapsible_if)]
pub(crate) fn combine_kernel<O: Float, P: Int, N: Size>(
    partials: &PartialOutput<f32, N>,
    sinks: &[f32],
    rotation: &ComptimeOption<OutputRotation<P>>,
    output: &mut [Vector<O, N>],
    splits: u32,
    vectors: u32,
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
        let mut maximum = partials.softmax_stats[own as usize];
        let mut total = 0.0f32;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut first = 0u32;
        while first < splits {
            let mut maxima = Array::<f32>::new(SPLITS_IN_FLIGHT);
            let mut totals = Array::<f32>::new(SPLITS_IN_FLIGHT);
            let mut sums = Array::<Vector<f32, N>>::new(SPLITS_IN_FLIGHT);
            #[unroll]
            for i in 0..SPLITS_IN_FLIGHT {
                let split = first + comptime!(i as u32);
                let inside = split < splits;
                let at = select(inside, split, 0u32) * all_heads + own;
                maxima[i] = partials.softmax_stats[at as usize];
                totals[i] = select(
                    inside,
                    partials.softmax_stats[(splits * all_heads + at) as usize],
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
                    partial = partials.sums[at as usize * vectors as usize + vector as usize];
                }
                sums[i] = partial;
                maximum = max(maximum, maxima[i]);
            }
            let rescale = softmax_weight(before - maximum, target);
            total *= rescale;
            sum *= Vector::new(rescale);
            #[unroll]
            for i in 0..SPLITS_IN_FLIGHT {
                let weight = softmax_weight(maxima[i] - maximum, target);
                total = fma(totals[i], weight, total);
                sum += sums[i] * Vector::new(weight);
            }
            first += comptime!(SPLITS_IN_FLIGHT as u32);
        }
        let divisor = with_sink(total, sinks[head as usize], maximum, target);
        let at = own as usize * vectors as usize + vector as usize;
        let mut result = sum / Vector::new(divisor);
        #[comptime]
        if let ComptimeOption::Some(rotation) = rotation {
            if vector >= rotation.unrotated {
                let table = &rotation.positions.table;
                let start = rotation.positions.start[(token / rotation.count) as usize];
                let angle = table.at::<P>(start, token % rotation.count);
                let pairs = (vector - rotation.unrotated) * N::value() as u32 / 2;
                result = rotate_vector::<N>(result, table, angle + pairs as usize, true);
            }
        }
        output[at] = Vector::cast_from(result);
        vector += CUBE_DIM;
    }
}
