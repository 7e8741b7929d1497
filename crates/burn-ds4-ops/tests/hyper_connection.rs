//! Hyper-connections against an `f64` oracle in the order of the released kernel, and matrices
//! normalised by hand.

use super::common::{absolute, assert_close, devices, floats, narrow, noise, values, wide};
use super::mixing::{Case, Oracle, SINKHORN, sigmoid};
use burn::tensor::Tensor;
use burn_ds4_ops::hyper_connection::{Coefficients, Sinkhorn, expand, head};

fn transposed(comb: &[f64], n: usize) -> Vec<f64> {
    let matrices = comb.chunks(n * n);
    matrices
        .flat_map(|m| (0..n * n).map(|i| m[i % n * n + i / n]))
        .collect()
}

#[track_caller]
fn assert_coefficients(actual: Coefficients, expected: &Oracle, tolerance: f64, what: &str) {
    let all = [
        ("pre", values(actual.pre()), &expected.pre),
        ("post", values(actual.post()), &expected.post),
        ("comb", values(actual.comb()), &expected.comb),
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
    // Without the projection the coefficients are those of the base: gates of 1/2, 3/4, 1/4, 1/2
    // and, after the softmax, rows (3/4, 1/4) and (1/2, 1/2).
    let ln3 = 3f32.ln();
    case.function.fill(0.0);
    case.base = vec![0.0, ln3, -ln3, 0.0, ln3, 0.0, 0.0, 0.0];
    let pre = [0.5, 0.75];
    let post = [0.5, 1.0];
    // Columns sum to 5/4 and 3/4: (3/5, 1/3), (2/5, 2/3). Then rows to 14/15 and 16/15: (9/14,
    // 5/14), (3/8, 5/8). Then columns to 57/56 and 55/56.
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
            assert_close(&values(actual.pre()), &pre, absolute(1e-6), &what);
            assert_close(&values(actual.post()), &post, absolute(1e-6), &what);
            assert_close(&values(actual.comb()), &comb, absolute(1e-6), &what);
        }
    }
}

fn rows_and_columns_of_the_mix_sum_to_one() {
    let mut case = Case::new(5, 4, 6, 1.0);
    // Rows converge the slower the further apart the logits are.
    case.scale.fill(0.5);
    for (name, device) in devices() {
        let comb = values(case.coefficients(SINKHORN, device).comb());
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
        assert_close(
            &values(actual.pre()),
            &[1.0 + eps, eps],
            absolute(1e-7),
            name,
        );
        assert_close(&values(actual.post()), &[2.0, 0.0], absolute(1e-7), name);
        let comb = values(actual.comb());
        assert_close(&comb, &[1.0, 0.0, 0.0, 1.0], absolute(1e-5), name);
        assert!(comb.iter().all(|&v| v > 0.0), "{name}: {comb:?}");
    }
}

fn the_input_is_the_sum_of_the_streams_by_their_weights() {
    let mut case = Case::new(2, 2, 2, 1.0);
    case.streams = vec![1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0];
    case.function.fill(0.0);
    // Weights of 1/2 and 3/4.
    case.base[..2].copy_from_slice(&[0.0, 3f32.ln()]);
    let sinkhorn = Sinkhorn {
        epsilon: 0.0,
        ..SINKHORN
    };
    for (name, device) in devices() {
        let (input, _) = case.collapse(case.streams(device), sinkhorn);
        let expected = [8.0, 16.0, 24.0, 32.0];
        assert_close(&values(input), &expected, absolute(1e-5), name);
    }
}

fn expand_sums_over_the_first_index_of_the_mix() {
    for (name, device) in devices() {
        let actual = expand(
            floats(&[100.0], [1, 1], device),
            floats(&[1.0, 10.0], [1, 2, 1], device),
            &Coefficients::new(
                floats(&[7.0, 7.0], [1, 2], device),
                floats(&[1.0, 2.0], [1, 2], device),
                floats(&[0.1, 0.2, 0.3, 0.4], [1, 2, 2], device),
            )
            .unwrap(),
        );
        // 100 + 0.1·1 + 0.3·10 and 200 + 0.2·1 + 0.4·10; the transposed mix would give 102.1 and
        // 204.3.
        assert_close(
            &values(actual.unwrap()),
            &[103.1, 204.2],
            absolute(1e-4),
            name,
        );
    }
}

fn expand_agrees_with_the_oracle() {
    let (tokens, n, d) = (5, 4, 6);
    let case = Case::new(tokens, n, d, 1.0);
    let output = noise(tokens * d, 21);
    let expected = case.expanded(&wide(&output), &case.oracle(SINKHORN));
    for (name, device) in devices() {
        let actual = expand(
            floats(&output, [tokens, d], device),
            case.streams(device),
            &case.coefficients(SINKHORN, device),
        );
        let actual = values(actual.unwrap());
        assert_close(&actual, &narrow(&expected), absolute(2e-5), name);
    }
}

fn the_head_weighs_by_gates_alone() {
    let case = Case::new(5, 4, 6, 2.0);
    let expected = narrow(&case.headed(0.01, 1e-3));
    for (name, device) in devices() {
        let actual = values(case.head(case.streams(device), 0.01, 1e-3));
        assert_close(&actual, &expected, absolute(1e-5), name);
    }
}

fn no_tokens_give_empty_results() {
    let case = Case::new(0, 4, 6, 1.0);
    for (name, device) in devices() {
        let (collapsed, coefficients) = case.collapse(case.streams(device), SINKHORN);
        assert_eq!(collapsed.dims(), [0, 6], "{name}");
        let dims = (coefficients.pre().dims(), coefficients.post().dims());
        assert_eq!(dims, ([0, 4], [0, 4]), "{name}");
        assert_eq!(coefficients.comb().dims(), [0, 4, 4], "{name}");
        let streams = || Tensor::zeros([0, 4, 6], device);
        let spread = expand(collapsed, streams(), &coefficients).unwrap();
        assert_eq!(spread.dims(), [0, 4, 6], "{name}");
        let function = Tensor::zeros([4, 24], device);
        let (base, scale) = (Tensor::zeros([4], device), Tensor::zeros([1], device));
        let last = head(streams(), function, base, scale, 1e-6, 1e-6).unwrap();
        assert_eq!(last.dims(), [0, 6], "{name}");
    }
}

catalogue![
    coefficients_agree_with_the_oracle,
    a_large_epsilon_enters_exactly_where_the_specification_says,
    a_matrix_of_two_streams_is_normalised_as_by_hand,
    rows_and_columns_of_the_mix_sum_to_one,
    large_and_zero_streams_give_ordinary_coefficients,
    saturated_gates_and_a_mix_of_far_apart_logits_stay_finite,
    the_input_is_the_sum_of_the_streams_by_their_weights,
    expand_sums_over_the_first_index_of_the_mix,
    expand_agrees_with_the_oracle,
    the_head_weighs_by_gates_alone,
    no_tokens_give_empty_results,
];
