//! Log-probabilities of some tokens of each row.

use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::exp;
use crate::select::key::{LOWEST, float_of, key_of};

/// How [`log_probs_kernel`] is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LogProbsBlueprint {
    /// Units of a cube: a power of two.
    pub units: u32,
    pub target: Target,
}

/// Sizes and strides.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct LogProbsShape {
    pub rows: u32,
    pub columns: u32,
    /// Vectors from one row to the next.
    pub row_vectors: usize,
    /// Tokens of a row.
    pub tokens: u32,
    /// `-inf`, of which shader languages have no literal.
    pub none: f32,
}

/// Writes the log-probabilities of some tokens of each row, with one cube for each row. It divides
/// a row among its units, and adds their sums as a tree.
///
/// - `logits`, `elements`: the same rows, by vectors and by elements
/// - `ids`, `probs`: `[rows, tokens]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn log_probs_kernel<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    elements: &[F],
    ids: &[i32],
    probs: &mut [f32],
    shape: LogProbsShape,
    #[comptime] blueprint: LogProbsBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let LogProbsBlueprint { units, target } = comptime!(blueprint);
    // Cubes beyond the rows repeat the work of the last one.
    let row = min(CUBE_POS as u32, shape.rows - 1);
    let first = row as usize * shape.row_vectors;
    let vectors = shape.columns / N::value() as u32;
    let mut keys = Shared::<[u32]>::new_slice(units as usize);
    let mut key = 0u32;
    let mut at = UNIT_POS;
    while at < vectors {
        let values = logits[first + at as usize];
        #[unroll]
        for i in 0..N::value() {
            key = max(key, key_of(f32::cast_from(values.extract(i))));
        }
        at += units;
    }
    keys[UNIT_POS as usize] = key;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let distance = comptime!(units >> (step + 1));
        if UNIT_POS < distance {
            let other = keys[(UNIT_POS + distance) as usize];
            keys[UNIT_POS as usize] = max(keys[UNIT_POS as usize], other);
        }
        sync_cube();
    }
    let highest_key = keys[0usize];
    let highest = float_of(highest_key);

    let mut sums = Shared::<[f32]>::new_slice(units as usize);
    let mut sum = 0.0f32;
    let mut at = UNIT_POS;
    while at < vectors {
        let values = logits[first + at as usize];
        #[unroll]
        for i in 0..N::value() {
            let x = f32::cast_from(values.extract(i));
            let key = key_of(x);
            // The difference of equal infinities would be NaN.
            if key == highest_key {
                sum += 1.0f32;
            } else if key > LOWEST {
                sum += exp(x - highest, target);
            }
        }
        at += units;
    }
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let distance = comptime!(units >> (step + 1));
        if UNIT_POS < distance {
            let other = sums[(UNIT_POS + distance) as usize];
            sums[UNIT_POS as usize] += other;
        }
        sync_cube();
    }
    let total = sums[0usize].ln();

    let mut token = UNIT_POS;
    while token < shape.tokens {
        let at = (row * shape.tokens + token) as usize;
        let id = ids[at];
        let mut prob = shape.none;
        if id >= 0 && id < i32::cast_from(shape.columns) {
            let x = f32::cast_from(elements[first * N::value() + id as usize]);
            let key = key_of(x);
            if key > LOWEST {
                let difference = select(key == highest_key, 0.0f32, x - highest);
                prob = difference - total;
            }
        }
        probs[at] = prob;
        token += units;
    }
}
