//! Hyper-connections against an `f64` oracle in the order of the released kernel, and matrices normalised by hand.

use super::common::{absolute, assert_close, devices, floats, narrow, noise, values, wide};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::hyper_connection::{
    Coefficients, Sinkhorn, coefficients, collapse, expand, head,
};

const SINKHORN: Sinkhorn = Sinkhorn {
    iterations: 20,
    epsilon: 1e-6,
    norm_epsilon: 1e-6,
};

fn flex() -> &'static Device {
    &devices()[0].1
}

/// Streams and parameters of one case, all of them arbitrary.
struct Case {
    tokens: usize,
    n: usize,
    d: usize,
    streams: Vec<f32>,
    function: Vec<f32>,
    base: Vec<f32>,
    scale: Vec<f32>,
}

impl Case {
    fn new(tokens: usize, n: usize, d: usize, magnitude: f32) -> Self {
        let outputs = (2 + n) * n;
        let scaled = |count, seed, by: f32| noise(count, seed).into_iter().map(move |v| v * by);
        let scales = [0.7, 1.3, 2.1];
        Self {
            tokens,
            n,
            d,
            streams: scaled(tokens * n * d, 1, magnitude).collect(),
            function: scaled(outputs * n * d, 2, 0.8).collect(),
            base: scaled(outputs, 3, 1.5).collect(),
            scale: (0..outputs).map(|i| scales[(i / n).min(2)]).collect(),
        }
    }

    fn coefficients(&self, sinkhorn: Sinkhorn, device: &Device) -> Coefficients {
        let outputs = self.base.len();
        coefficients(
            floats(&self.streams, [self.tokens, self.n, self.d], device),
            floats(&self.function, [outputs, self.n * self.d], device),
            floats(&self.base, [outputs], device),
            floats(&self.scale, [outputs], device),
            sinkhorn,
        )
    }

    fn oracle(&self, sinkhorn: Sinkhorn) -> Oracle {
        let (n, width) = (self.n, self.n * self.d);
        let mut oracle = Oracle::default();
        for token in wide(&self.streams).chunks(width) {
            let mixes = self.mixes(token, &wide(&self.function), sinkhorn.norm_epsilon);
            let m = |i: usize| mixes[i] * f64::from(self.scale[i]) + f64::from(self.base[i]);
            oracle
                .pre
                .extend((0..n).map(|i| sigmoid(m(i)) + sinkhorn.epsilon));
            oracle.post.extend((n..2 * n).map(|i| 2.0 * sigmoid(m(i))));
            let logits: Vec<f64> = (2 * n..(2 + n) * n).map(m).collect();
            oracle.comb.extend(mix(logits, n, sinkhorn));
        }
        oracle
    }

    fn mixes(&self, token: &[f64], function: &[f64], norm_epsilon: f64) -> Vec<f64> {
        let squares: f64 = token.iter().map(|v| v * v).sum();
        let rms = (squares / token.len() as f64 + norm_epsilon).sqrt();
        let rows = function.chunks(token.len());
        rows.map(|row| row.iter().zip(token).map(|(f, v)| f * v).sum::<f64>() / rms)
            .collect()
    }
}

#[derive(Default)]
struct Oracle {
    pre: Vec<f64>,
    post: Vec<f64>,
    comb: Vec<f64>,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Specification order: row softmax plus epsilon, columns, then rows and columns in turn; every sum gets the epsilon.
fn mix(mut matrix: Vec<f64>, n: usize, sinkhorn: Sinkhorn) -> Vec<f64> {
    let epsilon = sinkhorn.epsilon;
    for row in matrix.chunks_mut(n) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        row.iter_mut()
            .for_each(|v| *v = (*v - max).exp() / sum + epsilon);
    }
    let columns = |matrix: &mut Vec<f64>| {
        for column in 0..n {
            let sum: f64 = (0..n).map(|row| matrix[row * n + column]).sum();
            (0..n).for_each(|row| matrix[row * n + column] /= sum + epsilon);
        }
    };
    columns(&mut matrix);
    for _ in 1..sinkhorn.iterations {
        for row in matrix.chunks_mut(n) {
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|v| *v /= sum + epsilon);
        }
        columns(&mut matrix);
    }
    matrix
}

fn transposed(comb: &[f64], n: usize) -> Vec<f64> {
    let matrices = comb.chunks(n * n);
    matrices
        .flat_map(|m| (0..n * n).map(|i| m[i % n * n + i / n]))
        .collect()
}

#[track_caller]
fn assert_coefficients(actual: Coefficients, expected: &Oracle, tolerance: f64, what: &str) {
    let all = [
        ("pre", values(actual.pre), &expected.pre),
        ("post", values(actual.post), &expected.post),
        ("comb", values(actual.comb), &expected.comb),
    ];
    for (part, actual, expected) in all {
        let what = format!("{what} {part}");
        assert_close(&actual, &narrow(expected), absolute(tolerance), &what);
    }
}

fn coefficients_agree_with_the_oracle() {
    let case = Case::new(5, 4, 6, 1.0);
    let expected = case.oracle(SINKHORN);
    // What the comparison is worth: a transposed mix is far outside of its tolerance.
    let turned = transposed(&expected.comb, 4);
    let apart = expected
        .comb
        .iter()
        .zip(&turned)
        .map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f64::max) > 0.1);
    for (name, device) in devices() {
        assert_coefficients(case.coefficients(SINKHORN, device), &expected, 5e-6, name);
    }
}

fn a_large_epsilon_enters_exactly_where_the_specification_says() {
    let case = Case::new(5, 4, 6, 1.0);
    for iterations in [1, 2] {
        let sinkhorn = Sinkhorn {
            iterations,
            epsilon: 0.1,
            norm_epsilon: 0.3,
        };
        let expected = case.oracle(sinkhorn);
        for (name, device) in devices() {
            let what = format!("{name} iterations {iterations}");
            assert_coefficients(case.coefficients(sinkhorn, device), &expected, 5e-6, &what);
        }
    }
}

fn a_matrix_of_two_streams_is_normalised_as_by_hand() {
    let mut case = Case::new(1, 2, 3, 1.0);
    // Without the projection the coefficients are those of the base: gates of 1/2, 3/4, 1/4, 1/2 and, after the softmax,
    // rows (3/4, 1/4) and (1/2, 1/2).
    let ln3 = 3f32.ln();
    case.function.fill(0.0);
    case.base = vec![0.0, ln3, -ln3, 0.0, ln3, 0.0, 0.0, 0.0];
    let pre = [0.5, 0.75];
    let post = [0.5, 1.0];
    // Columns sum to 5/4 and 3/4: (3/5, 1/3), (2/5, 2/3). Then rows to 14/15 and 16/15: (9/14, 5/14), (3/8, 5/8). Then
    // columns to 57/56 and 55/56.
    let first = [3.0 / 5.0, 1.0 / 3.0, 2.0 / 5.0, 2.0 / 3.0];
    let second = [36.0 / 57.0, 20.0 / 55.0, 21.0 / 57.0, 35.0 / 55.0];
    for (iterations, comb) in [(1, first), (2, second)] {
        let sinkhorn = Sinkhorn {
            iterations,
            epsilon: 0.0,
            norm_epsilon: 1e-6,
        };
        for (name, device) in devices() {
            let actual = case.coefficients(sinkhorn, device);
            let what = format!("{name} iterations {iterations}");
            assert_close(&values(actual.pre), &pre, absolute(1e-6), &what);
            assert_close(&values(actual.post), &post, absolute(1e-6), &what);
            assert_close(&values(actual.comb), &comb, absolute(1e-6), &what);
        }
    }
}

fn rows_and_columns_of_the_mix_sum_to_one() {
    let mut case = Case::new(5, 4, 6, 1.0);
    // Rows converge the slower the further apart the logits are.
    case.scale.fill(0.5);
    for (name, device) in devices() {
        let comb = values(case.coefficients(SINKHORN, device).comb);
        for matrix in comb.chunks(16) {
            for i in 0..4 {
                let row: f32 = (0..4).map(|k| matrix[i * 4 + k]).sum();
                let column: f32 = (0..4).map(|j| matrix[j * 4 + i]).sum();
                assert!((row - 1.0).abs() < 1e-3, "{name}: row {i} sums to {row}");
                // Columns come last.
                assert!((column - 1.0).abs() < 1e-5, "{name}: column {i}, {column}");
            }
        }
    }
}

fn large_and_zero_streams_give_ordinary_coefficients() {
    let mut large = Case::new(5, 4, 6, 1e4);
    // One token of nothing: its coefficients are those of the base.
    large.streams[..24].fill(0.0);
    let expected = large.oracle(SINKHORN);
    let gate = sigmoid(f64::from(large.base[0])) + SINKHORN.epsilon;
    assert!((expected.pre[0] - gate).abs() < 1e-12);
    for (name, device) in devices() {
        assert_coefficients(large.coefficients(SINKHORN, device), &expected, 5e-6, name);
    }
}

fn saturated_gates_and_a_mix_of_far_apart_logits_stay_finite() {
    let mut case = Case::new(1, 2, 3, 1.0);
    case.function.fill(0.0);
    case.base = vec![1e4, -1e4, 1e4, -1e4, 1e4, -1e4, -1e4, 1e4];
    for (name, device) in devices() {
        let actual = case.coefficients(SINKHORN, device);
        let eps = SINKHORN.epsilon as f32;
        assert_close(&values(actual.pre), &[1.0 + eps, eps], absolute(1e-7), name);
        assert_close(&values(actual.post), &[2.0, 0.0], absolute(1e-7), name);
        let comb = values(actual.comb);
        assert_close(&comb, &[1.0, 0.0, 0.0, 1.0], absolute(1e-5), name);
        assert!(comb.iter().all(|&v| v > 0.0), "{name}: {comb:?}");
    }
}

fn collapse_weighs_the_streams_of_each_token() {
    for (name, device) in devices() {
        let streams = floats(
            &[1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0],
            [2, 2, 2],
            device,
        );
        let pre = floats(&[0.5, 2.0, -1.0, 0.1], [2, 2], device);
        let expected = [20.5, 41.0, 0.0, 0.0];
        let actual = values(collapse(streams, pre));
        assert_close(&actual, &expected, absolute(1e-5), name);
    }
}

fn expand_sums_over_the_first_index_of_the_mix() {
    for (name, device) in devices() {
        let actual = expand(
            floats(&[100.0], [1, 1], device),
            floats(&[1.0, 10.0], [1, 2, 1], device),
            Coefficients {
                pre: floats(&[7.0, 7.0], [1, 2], device),
                post: floats(&[1.0, 2.0], [1, 2], device),
                comb: floats(&[0.1, 0.2, 0.3, 0.4], [1, 2, 2], device),
            },
        );
        // 100 + 0.1·1 + 0.3·10 and 200 + 0.2·1 + 0.4·10; the transposed mix would give 102.1 and 204.3.
        assert_close(&values(actual), &[103.1, 204.2], absolute(1e-4), name);
    }
}

fn expand_agrees_with_the_oracle() {
    let (tokens, n, d) = (5, 4, 6);
    let case = Case::new(tokens, n, d, 1.0);
    let output = noise(tokens * d, 21);
    let Oracle { post, comb, .. } = case.oracle(SINKHORN);
    let streams = wide(&case.streams);
    let mut expected = Vec::new();
    for t in 0..tokens {
        for k in 0..n {
            for c in 0..d {
                let mixed =
                    (0..n).map(|j| comb[(t * n + j) * n + k] * streams[(t * n + j) * d + c]);
                let own = post[t * n + k] * f64::from(output[t * d + c]);
                expected.push(own + mixed.sum::<f64>());
            }
        }
    }
    for (name, device) in devices() {
        let actual = expand(
            floats(&output, [tokens, d], device),
            floats(&case.streams, [tokens, n, d], device),
            case.coefficients(SINKHORN, device),
        );
        assert_close(&values(actual), &narrow(&expected), absolute(2e-5), name);
    }
}

fn the_head_weighs_by_gates_alone() {
    let (tokens, n, d) = (5, 4, 6);
    let (epsilon, norm_epsilon) = (0.01, 1e-3);
    let case = Case::new(tokens, n, d, 2.0);
    let function = &case.function[..n * n * d];
    let mut expected = Vec::new();
    for token in wide(&case.streams).chunks(n * d) {
        let mixes = case.mixes(token, &wide(function), norm_epsilon);
        let gate = |i: usize| sigmoid(mixes[i] * 0.7 + f64::from(case.base[i])) + epsilon;
        expected.extend((0..d).map(|c| (0..n).map(|i| gate(i) * token[i * d + c]).sum::<f64>()));
    }
    for (name, device) in devices() {
        let actual = head(
            floats(&case.streams, [tokens, n, d], device),
            floats(function, [n, n * d], device),
            floats(&case.base[..n], [n], device),
            floats(&[0.7], [1], device),
            epsilon,
            norm_epsilon,
        );
        assert_close(&values(actual), &narrow(&expected), absolute(1e-5), name);
    }
}

fn no_tokens_give_empty_results() {
    let case = Case::new(0, 4, 6, 1.0);
    for (name, device) in devices() {
        let coefficients = case.coefficients(SINKHORN, device);
        let dims = (coefficients.pre.dims(), coefficients.comb.dims());
        assert_eq!(dims, ([0, 4], [0, 4, 4]), "{name}");
        let streams = || Tensor::zeros([0, 4, 6], device);
        let collapsed = collapse(streams(), coefficients.pre.clone());
        assert_eq!(collapsed.dims(), [0, 6], "{name}");
        let spread = expand(collapsed, streams(), coefficients);
        assert_eq!(spread.dims(), [0, 4, 6], "{name}");
        let function = Tensor::zeros([4, 24], device);
        let (base, scale) = (Tensor::zeros([4], device), Tensor::zeros([1], device));
        let last = head(streams(), function, base, scale, 1e-6, 1e-6);
        assert_eq!(last.dims(), [0, 6], "{name}");
    }
}

fn refused(function: [usize; 2], base: usize, scale: usize, iterations: usize) {
    let sinkhorn = Sinkhorn {
        iterations,
        ..SINKHORN
    };
    let device = flex();
    coefficients(
        Tensor::zeros([1, 2, 3], device),
        Tensor::zeros(function, device),
        Tensor::zeros([base], device),
        Tensor::zeros([scale], device),
        sinkhorn,
    );
}

#[test]
#[should_panic(expected = "coefficients: function must be [(2 + n)·n, n·d] for streams of n = 2")]
fn coefficients_refuse_a_function_of_another_shape() {
    refused([8, 5], 8, 8, 1);
}

#[test]
#[should_panic(expected = "coefficients: base must be [(2 + n)·n]")]
fn coefficients_refuse_a_base_of_another_length() {
    refused([8, 6], 1, 8, 1);
}

#[test]
#[should_panic(expected = "coefficients: scale must be [(2 + n)·n]")]
fn coefficients_refuse_three_scales_that_were_not_repeated() {
    refused([8, 6], 8, 3, 1);
}

#[test]
#[should_panic(expected = "coefficients: sinkhorn.iterations must be at least 1")]
fn coefficients_refuse_to_skip_the_normalisation() {
    refused([8, 6], 8, 8, 0);
}

#[test]
#[should_panic(expected = "head: scale must be [1]")]
fn the_head_refuses_a_scale_per_stream() {
    let device = flex();
    let streams = Tensor::zeros([1, 2, 3], device);
    let (base, scale) = (Tensor::zeros([2], device), Tensor::zeros([2], device));
    head(
        streams,
        Tensor::zeros([2, 6], device),
        base,
        scale,
        0.0,
        0.0,
    );
}

catalogue![
    coefficients_agree_with_the_oracle,
    a_large_epsilon_enters_exactly_where_the_specification_says,
    a_matrix_of_two_streams_is_normalised_as_by_hand,
    rows_and_columns_of_the_mix_sum_to_one,
    large_and_zero_streams_give_ordinary_coefficients,
    saturated_gates_and_a_mix_of_far_apart_logits_stay_finite,
    collapse_weighs_the_streams_of_each_token,
    expand_sums_over_the_first_index_of_the_mix,
    expand_agrees_with_the_oracle,
    the_head_weighs_by_gates_alone,
    no_tokens_give_empty_results,
];
