//! The heads of a cube, as its lanes hold them.

use cubecl::prelude::*;

use super::angles::UnitAngles;
use super::inputs::{AttentionInputs, KV_GROUP, SinkBlueprint};
use super::softmax::softmax_weight;
use crate::attention::options::HIDDEN_BELOW;
use crate::intrinsics::{group_sum, group_sums, inverse_rms, read_ordered};

/// The part of a cube's heads that a lane holds.
#[derive(CubeType)]
pub(super) struct Heads<N: Size> {
    /// The lane's vectors of the queries, and of the weighted sums of rows: `[heads, steps]`.
    pub queries: Array<Vector<f32, N>>,
    pub sums: Array<Vector<f32, N>>,
    /// Softmax statistics: the largest logit so far, and the sum of exponentials relative to it.
    pub maxima: Array<f32>,
    pub totals: Array<f32>,
    #[cube(comptime)]
    blueprint: SinkBlueprint,
}

/// A few key/value rows: their offsets, and their biases.
#[derive(CubeType)]
pub(super) struct KvGroup {
    pub starts: Array<usize>,
    pub biases: Array<f32>,
}

#[cube]
impl KvGroup {
    pub fn new() -> KvGroup {
        KvGroup {
            starts: Array::new(comptime!(KV_GROUP as usize)),
            biases: Array::new(comptime!(KV_GROUP as usize)),
        }
    }

    /// Whether any of the rows is visible.
    pub fn is_visible(&self) -> bool {
        let mut best = self.biases[0];
        #[unroll]
        for c in 1..KV_GROUP {
            best = max(best, self.biases[c as usize]);
        }
        best > HIDDEN_BELOW
    }
}

/// What a lane reads for its part of the heads: [`Heads`] before anything is computed.
#[derive(CubeType)]
pub(super) struct HeadInputs<F: Float, N: Size> {
    queries: Array<Vector<F, N>>,
    sinks: Array<f32>,
    #[cube(comptime)]
    blueprint: SinkBlueprint,
}

#[cube]
impl<F: Float, N: Size> HeadInputs<F, N> {
    /// Reads the heads from `first_head` on of a query of a sequence.
    pub fn read<I: Int>(
        inputs: &AttentionInputs<F, I, N>,
        sequence: u32,
        query: u32,
        first_head: u32,
        #[comptime] blueprint: SinkBlueprint,
    ) -> HeadInputs<F, N> {
        let strides = &inputs.strides;
        let start = sequence as usize * strides.queries_sequence + query as usize * strides.query;
        let mut own = HeadInputs::<F, N> {
            queries: Array::new(comptime!((blueprint.heads * blueprint.steps) as usize)),
            sinks: Array::new(comptime!(blueprint.heads as usize)),
            blueprint,
        };
        #[unroll]
        for h in 0..blueprint.heads {
            // Heads past the end repeat the last one, and are not written.
            let head = min(first_head + h, inputs.shape.heads - 1) as usize;
            #[unroll]
            for step in 0..blueprint.steps {
                let mut vector = UNIT_POS_X + step * blueprint.plane;
                if comptime!(!blueprint.even) {
                    vector = select(vector < inputs.shape.vectors, vector, 0u32);
                }
                let at = comptime!((h * blueprint.steps + step) as usize);
                let from = start + head * strides.head + vector as usize;
                own.queries[at] = read_ordered(&inputs.queries, from, blueprint.target);
            }
            own.sinks[h as usize] = inputs.sinks[head];
        }
        own
    }

    /// The heads, before they attend to rows of `vectors` vectors.
    pub fn heads(&self, vectors: u32) -> Heads<N> {
        let blueprint = comptime!(self.blueprint);
        let count = comptime!((blueprint.heads * blueprint.steps) as usize);
        let mut heads = Heads::<N> {
            queries: Array::new(count),
            sums: Array::new(count),
            maxima: Array::new(comptime!(blueprint.heads as usize)),
            totals: Array::new(comptime!(blueprint.heads as usize)),
            blueprint,
        };
        #[unroll]
        for h in 0..blueprint.heads {
            #[unroll]
            for step in 0..blueprint.steps {
                let at = comptime!((h * blueprint.steps + step) as usize);
                let query = Vector::<f32, N>::cast_from(self.queries[at]);
                heads.sums[at] = Vector::new(0.0f32);
                if comptime!(blueprint.even) {
                    heads.queries[at] = query;
                } else {
                    // Zeros, so that what the lane reads in place of a row's vector adds nothing.
                    let mut own = Vector::new(0.0f32);
                    if UNIT_POS_X + step * blueprint.plane < vectors {
                        own = query;
                    }
                    heads.queries[at] = own;
                }
            }
            heads.maxima[h as usize] = max(self.sinks[h as usize], HIDDEN_BELOW);
            heads.totals[h as usize] = 0.0f32;
        }
        heads
    }
}

#[cube]
impl<N: Size> Heads<N> {
    /// Reads the heads from `first_head` on of a query of a sequence.
    pub fn new<F: Float, I: Int>(
        inputs: &AttentionInputs<F, I, N>,
        sequence: u32,
        query: u32,
        first_head: u32,
        #[comptime] blueprint: SinkBlueprint,
    ) -> Heads<N> {
        let own = HeadInputs::<F, N>::read::<I>(inputs, sequence, query, first_head, blueprint);
        own.heads(inputs.shape.vectors)
    }

    /// Divides the queries by their root mean square, and rotates them.
    pub fn normalize_and_rotate(&mut self, angles: &UnitAngles<N>, vectors: u32, epsilon: f32) {
        let blueprint = comptime!(self.blueprint);
        let steps = comptime!(blueprint.steps);
        let width = vectors * N::value() as u32;
        let mut sums = Array::<f32>::new(comptime!(blueprint.heads as usize));
        #[unroll]
        for h in 0..blueprint.heads {
            let mut sum = 0.0f32;
            #[unroll]
            for step in 0..steps {
                let query = self.queries[comptime!((h * steps + step) as usize)];
                #[unroll]
                for i in 0..N::value() {
                    sum = fma(query.extract(i), query.extract(i), sum);
                }
            }
            sums[h as usize] = sum;
        }
        group_sums(
            &mut sums,
            blueprint.heads,
            blueprint.plane,
            blueprint.target,
        );
        #[unroll]
        for h in 0..blueprint.heads {
            let (sum, width) = (sums[h as usize], f32::cast_from(width));
            let factor = inverse_rms(sum, width, epsilon, blueprint.target);
            #[unroll]
            for step in 0..steps {
                let at = comptime!((h * steps + step) as usize);
                let query = self.queries[at] * Vector::new(factor);
                let vector = UNIT_POS_X + step * blueprint.plane;
                self.queries[at] = angles.rotate(query, vector, vectors, step, false);
            }
        }
    }

    /// Adds the rows of a group to the softmax and to the weighted sums.
    pub fn attend<F: Float>(
        &mut self,
        rows: &[Vector<F, N>],
        group: &KvGroup,
        vectors: u32,
        scale: f32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let steps = comptime!(blueprint.steps);
        let mut keys = Array::<Vector<f32, N>>::new(comptime!((KV_GROUP * steps) as usize));
        #[unroll]
        for c in 0..KV_GROUP {
            #[unroll]
            for step in 0..steps {
                let mut vector = UNIT_POS_X + step * blueprint.plane;
                if comptime!(!blueprint.even) {
                    vector = select(vector < vectors, vector, 0u32);
                }
                keys[comptime!((c * steps + step) as usize)] =
                    Vector::cast_from(rows[group.starts[c as usize] + vector as usize]);
            }
        }
        #[unroll]
        for h in 0..blueprint.heads {
            let before = self.maxima[h as usize];
            let mut maximum = before;
            let mut weights = Array::<f32>::new(comptime!(KV_GROUP as usize));
            #[unroll]
            for c in 0..KV_GROUP {
                let mut dot = 0.0f32;
                #[unroll]
                for step in 0..steps {
                    let query = self.queries[comptime!((h * steps + step) as usize)];
                    let key = keys[comptime!((c * steps + step) as usize)];
                    #[unroll]
                    for i in 0..N::value() {
                        dot = fma(query.extract(i), key.extract(i), dot);
                    }
                }
                let dot = group_sum(dot, blueprint.plane, blueprint.target);
                let logit = fma(dot, scale, group.biases[c as usize]);
                weights[c as usize] = logit;
                maximum = max(maximum, logit);
            }
            let rescale = softmax_weight(before - maximum, blueprint.target);
            let mut total = self.totals[h as usize] * rescale;
            #[unroll]
            for c in 0..KV_GROUP {
                let weight = softmax_weight(weights[c as usize] - maximum, blueprint.target);
                weights[c as usize] = weight;
                total += weight;
            }
            self.maxima[h as usize] = maximum;
            self.totals[h as usize] = total;
            #[unroll]
            for step in 0..steps {
                let at = comptime!((h * steps + step) as usize);
                let mut sum = self.sums[at] * Vector::new(rescale);
                #[unroll]
                for c in 0..KV_GROUP {
                    let row = keys[comptime!((c * steps + step) as usize)];
                    sum += row * Vector::new(weights[c as usize]);
                }
                self.sums[at] = sum;
            }
        }
    }
}
