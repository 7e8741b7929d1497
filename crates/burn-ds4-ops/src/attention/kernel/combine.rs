//! Combining the partial outputs of planes, and those of KV splits.

use cubecl::prelude::*;

use super::heads::Heads;
use super::inputs::{AttentionShape, PartialOutput, SinkBlueprint};
use super::rotate::{Positions, RowRotation, read_angles, rotate_by};
use super::softmax::{softmax_weight, with_sink};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;

/// Combines the partial outputs of the planes of a cube, and writes the result as
/// [`PartialOutput`] says. If a rotation is given, results are rotated back.
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

/// What a unit has combined so far of the KV splits of a head: as planes do with columns, relative
/// to the largest logit.
#[derive(CubeType)]
struct SplitSums<N: Size> {
    maximum: f32,
    total: f32,
    sum: Vector<f32, N>,
}

/// Where the partials of a head lie.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SplitLayout {
    /// The head, among those of all queries.
    own: u32,
    all_heads: u32,
    splits: u32,
    vectors: u32,
    vector: u32,
}

#[cube]
impl<N: Size> SplitSums<N> {
    /// Adds up to [`SPLITS_IN_FLIGHT`] splits from `first` on. A split without a visible column has
    /// written no sums: `only_written` says whether that is found out before they are read.
    fn add(
        &mut self,
        partials: &PartialOutput<f32, N>,
        layout: SplitLayout,
        first: u32,
        #[comptime] only_written: bool,
        #[comptime] target: Target,
    ) {
        let mut maxima = Array::<f32>::new(SPLITS_IN_FLIGHT);
        let mut totals = Array::<f32>::new(SPLITS_IN_FLIGHT);
        let mut sums = Array::<Vector<f32, N>>::new(SPLITS_IN_FLIGHT);
        #[unroll]
        for i in 0..SPLITS_IN_FLIGHT {
            let split = first + comptime!(i as u32);
            let inside = split < layout.splits;
            let at = select(inside, split, 0u32) * layout.all_heads + layout.own;
            maxima[i] = partials.softmax_stats[at as usize];
            let total = layout.splits * layout.all_heads + at;
            totals[i] = select(inside, partials.softmax_stats[total as usize], 0.0f32);
            let from = at as usize * layout.vectors as usize + layout.vector as usize;
            if comptime!(only_written) {
                let mut partial = Vector::<f32, N>::new(0.0f32);
                if totals[i] != 0.0f32 {
                    partial = partials.sums[from];
                }
                sums[i] = partial;
            } else {
                sums[i] = partials.sums[from];
            }
        }
        // A `let` of the maximum so far would be another name of it, and change with it.
        let mut highest = maxima[0];
        #[unroll]
        for i in 1..SPLITS_IN_FLIGHT {
            highest = max(highest, maxima[i]);
        }
        let maximum = max(self.maximum, highest);
        let rescale = softmax_weight(self.maximum - maximum, target);
        self.total *= rescale;
        self.sum *= Vector::new(rescale);
        #[unroll]
        for i in 0..SPLITS_IN_FLIGHT {
            let weight = softmax_weight(maxima[i] - maximum, target);
            self.total = fma(totals[i], weight, self.total);
            if comptime!(only_written) {
                self.sum += sums[i] * Vector::new(weight);
            } else {
                let partial = select(totals[i] != 0.0f32, sums[i], Vector::new(0.0f32));
                self.sum += partial * Vector::new(weight);
            }
        }
        self.maximum = maximum;
    }
}

/// Combines the KV splits of [`cached_kernel`](super::cached_kernel). A head of a query has a cube;
/// `output` is `[batch, count, heads, vectors]`. If a rotation is given, results are rotated back.
///
/// All that a query needs is read at once, its first [`SPLITS_IN_FLIGHT`] splits included, written
/// or not: reading what is not used takes less time than waiting to know.
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
    let own = token * CUBE_COUNT_X + head;
    let sink = sinks[head as usize];
    let mut vector = UNIT_POS;
    while vector < vectors {
        let mut cosines = Vector::<f32, N>::new(1.0f32);
        let mut sines = Vector::<f32, N>::new(0.0f32);
        #[comptime]
        if let ComptimeOption::Some(rotation) = rotation {
            if vector >= rotation.unrotated {
                let table = &rotation.positions.table;
                let start = rotation.positions.start[(token / rotation.count) as usize];
                let angle = table.at::<P>(start, token % rotation.count);
                let pairs = (vector - rotation.unrotated) * N::value() as u32 / 2;
                let angles = read_angles::<N>(table, angle + pairs as usize);
                cosines = angles.0;
                sines = angles.1;
            }
        }
        let layout = SplitLayout {
            own,
            all_heads: CUBE_COUNT_X * CUBE_COUNT_Y,
            splits,
            vectors,
            vector,
        };
        let mut sums = SplitSums::<N> {
            maximum: partials.softmax_stats[own as usize],
            total: 0.0f32.runtime(),
            sum: Vector::new(0.0f32),
        };
        sums.add(partials, layout, 0u32, false, target);
        let mut first = comptime!(SPLITS_IN_FLIGHT as u32).runtime();
        while first < splits {
            sums.add(partials, layout, first, true, target);
            first += comptime!(SPLITS_IN_FLIGHT as u32);
        }
        let divisor = with_sink(sums.total, sink, sums.maximum, target);
        let at = own as usize * vectors as usize + vector as usize;
        let mut result = sums.sum / Vector::new(divisor);
        #[comptime]
        if let ComptimeOption::Some(rotation) = rotation {
            if vector >= rotation.unrotated {
                result = rotate_by::<N>(result, cosines, sines, true);
            }
        }
        output[at] = Vector::cast_from(result);
        vector += CUBE_DIM;
    }
}
