//! Where the shares of planes meet, and those of stretches.

use cubecl::prelude::*;

use super::heads::Heads;
use super::rotate::{Table, turn};
use super::sink::{SinkBlueprint, Sizes};
use super::weight;
use crate::attention::{MASKED, TINY};
use crate::intrinsics::Target;

/// The sum of all exponentials relative to `maximum`, the sink's included.
#[cube]
pub(super) fn with_sink(total: f32, sink: f32, maximum: f32, #[comptime] target: Target) -> f32 {
    max(total + weight(max(sink, MASKED) - maximum, target), TINY)
}

/// Brings together what the planes of a cube have of its heads, and writes it as [`sink_kernel`](super::sink_kernel) says. Of vectors from
/// `kept` on, if they are turned, pairs turn back by the angles at `angle`. All of the cube must be here.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn meet<O: Float, N: Size>(
    heads: &Heads<N>,
    sinks: &[f32],
    angles: &[f32],
    output: &mut [Vector<O, N>],
    shares: &mut [f32],
    angle: usize,
    pairs: usize,
    sizes: &Sizes,
    #[comptime] kept: Option<u32>,
    #[comptime] blueprint: SinkBlueprint,
) {
    let token = CUBE_POS_Y;
    let stretch = CUBE_POS_Z;
    let first_head = CUBE_POS_X * blueprint.heads;
    let cube_heads = comptime!(blueprint.heads);
    let plane_vectors = comptime!((blueprint.steps * blueprint.plane) as usize);
    let mut maxima =
        Shared::<[f32]>::new_slice(comptime!((blueprint.planes * cube_heads) as usize));
    let mut totals =
        Shared::<[f32]>::new_slice(comptime!((blueprint.planes * cube_heads) as usize));
    let mut stage =
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
            total += totals[at] * weight(maxima[at] - maximum, blueprint.target);
        }
        let share = weight(heads.maxima[h as usize] - maximum, blueprint.target);
        #[unroll]
        for step in 0..blueprint.steps {
            let at = UNIT_POS_Y as usize * plane_vectors
                + (UNIT_POS_X + step * blueprint.plane) as usize;
            let sum = heads.sums[comptime!((h * blueprint.steps + step) as usize)];
            stage[at] = sum * Vector::new(share);
        }
        sync_cube();
        let mut divisor = 1.0f32;
        let mut own = token * sizes.heads + head;
        if comptime!(blueprint.split) {
            let all = CUBE_COUNT_Y * sizes.heads;
            own += stretch * all;
            if UNIT_POS == 0 && head < sizes.heads {
                shares[own as usize] = maximum;
                shares[(CUBE_COUNT_Z * all + own) as usize] = total;
            }
        } else {
            let sink = sinks[min(head, sizes.heads - 1) as usize];
            divisor = with_sink(total, sink, maximum, blueprint.target);
        }
        let mut vector = UNIT_POS;
        // Nothing is read of a stretch where nothing is seen.
        let seen = comptime!(!blueprint.split).runtime() || total != 0.0f32;
        while vector < sizes.vectors && head < sizes.heads && seen {
            let mut sum = stage[vector as usize];
            #[unroll]
            for plane in 1..comptime!(blueprint.planes as usize) {
                sum += stage[plane * plane_vectors + vector as usize];
            }
            let at = own as usize * sizes.vectors as usize + vector as usize;
            let mut result = sum / Vector::new(divisor);
            if comptime!(!blueprint.split && kept.is_some()) {
                let kept = comptime!(kept.unwrap_or(0));
                if vector >= kept {
                    let first = angle + ((vector - kept) * N::value() as u32 / 2) as usize;
                    result = turn::<N>(result, angles, first, pairs, true);
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

/// Stretches whose sums are on their way at the same time.
const JOINED: usize = 16;

/// Joins the stretches of [`sink_kernel`](super::sink_kernel), a cube for a head of a query: `output` is `[batch, count, heads, vectors]`.
/// Where there are angles and starts of sequences of `count` queries, pairs of the vectors from `kept` on turn back by them.
#[cube(launch_unchecked, address_type = "dynamic")]
// What is known at compile time is asked by itself.
#[allow(clippy::too_many_arguments, clippy::collapsible_if)]
pub(crate) fn join_kernel<O: Float, P: Int, N: Size>(
    sums: &[Vector<f32, N>],
    shares: &[f32],
    sinks: &[f32],
    angles: ComptimeOption<&[f32]>,
    start: ComptimeOption<&[P]>,
    output: &mut [Vector<O, N>],
    stretches: u32,
    count: u32,
    vectors: u32,
    kept: u32,
    table: Table,
    #[comptime] target: Target,
    #[define(O, P)] _dtypes: [ElemType; 2],
) {
    let head = CUBE_POS_X;
    let token = CUBE_POS_Y;
    let all = CUBE_COUNT_X * CUBE_COUNT_Y;
    let own = token * CUBE_COUNT_X + head;
    let mut vector = UNIT_POS;
    while vector < vectors {
        // As planes do it with columns: relative to the largest so far.
        let mut maximum = shares[own as usize];
        let mut total = 0.0f32;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut first = 0u32;
        while first < stretches {
            let mut maxima = Array::<f32>::new(JOINED);
            let mut totals = Array::<f32>::new(JOINED);
            let mut parts = Array::<Vector<f32, N>>::new(JOINED);
            #[unroll]
            for i in 0..JOINED {
                let stretch = first + comptime!(i as u32);
                let inside = stretch < stretches;
                let at = select(inside, stretch, 0u32) * all + own;
                maxima[i] = shares[at as usize];
                totals[i] = select(inside, shares[(stretches * all + at) as usize], 0.0f32);
            }
            let before = maximum;
            #[unroll]
            for i in 0..JOINED {
                let mut part = Vector::<f32, N>::new(0.0f32);
                // Nothing was written where nothing was seen.
                if totals[i] != 0.0f32 {
                    let at = (first + comptime!(i as u32)) * all + own;
                    part = sums[at as usize * vectors as usize + vector as usize];
                }
                parts[i] = part;
                maximum = max(maximum, maxima[i]);
            }
            let kept = weight(before - maximum, target);
            total *= kept;
            sum *= Vector::new(kept);
            #[unroll]
            for i in 0..JOINED {
                let share = weight(maxima[i] - maximum, target);
                total = fma(totals[i], share, total);
                sum += parts[i] * Vector::new(share);
            }
            first += comptime!(JOINED as u32);
        }
        let divisor = with_sink(total, sinks[head as usize], maximum, target);
        let at = own as usize * vectors as usize + vector as usize;
        let mut result = sum / Vector::new(divisor);
        #[comptime]
        if let ComptimeOption::Some(angles) = angles {
            #[comptime]
            if let ComptimeOption::Some(start) = start {
                if vector >= kept {
                    let angle = table.at::<P>(start[(token / count) as usize], token % count);
                    let first = angle + ((vector - kept) * N::value() as u32 / 2) as usize;
                    result = turn::<N>(result, angles, first, table.pairs, true);
                }
            }
        }
        output[at] = Vector::cast_from(result);
        vector += CUBE_DIM;
    }
}
