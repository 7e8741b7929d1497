use cubecl::prelude::*;

use crate::caps::Target;
use crate::intrinsics::{exp, reciprocal};

/// Turns the logits of an `n` x `n` matrix, stored by rows, into a doubly stochastic matrix:
/// softmax of the rows plus `epsilon`, then the columns, then rows and columns alternately.
///
/// Every lane computes the whole matrix: exchanging numbers with neighbours would take longer than
/// computing them.
#[cube]
pub(super) fn sinkhorn(
    matrix: &mut Array<f32>,
    iterations: u32,
    epsilon: f32,
    #[comptime] n: usize,
    #[comptime] target: Target,
) {
    #[unroll]
    for row in 0..n {
        let first = comptime!(row * n);
        let mut top = matrix[first];
        #[unroll]
        for i in 1..n {
            top = max(top, matrix[comptime!(first + i)]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..n {
            let value = exp(matrix[comptime!(first + i)] - top, target);
            sum += value;
            matrix[comptime!(first + i)] = value;
        }
        let by = reciprocal(sum, target);
        #[unroll]
        for i in 0..n {
            let at = comptime!(first + i);
            matrix[at] = fma(matrix[at], by, epsilon);
        }
    }
    normalize(matrix, epsilon, 1usize, n, n, target);
    for _iteration in 1..iterations {
        normalize(matrix, epsilon, n, 1usize, n, target);
        normalize(matrix, epsilon, 1usize, n, n, target);
    }
}

/// Divides every line by its sum plus `epsilon`. Lines begin `line` apart, and their elements are
/// `step` apart.
#[cube]
fn normalize(
    matrix: &mut Array<f32>,
    epsilon: f32,
    #[comptime] line: usize,
    #[comptime] step: usize,
    #[comptime] n: usize,
    #[comptime] target: Target,
) {
    #[unroll]
    for index in 0..n {
        let first = comptime!(index * line);
        // In two parts, because products wait for the sums.
        let mut sum = matrix[first];
        let mut rest = epsilon;
        #[unroll]
        for i in 1..n {
            if comptime!(2 * i < n) {
                sum += matrix[comptime!(first + i * step)];
            } else {
                rest += matrix[comptime!(first + i * step)];
            }
        }
        let by = reciprocal(sum + rest, target);
        #[unroll]
        for i in 0..n {
            let at = comptime!(first + i * step);
            matrix[at] *= by;
        }
    }
}
