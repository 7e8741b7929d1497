//! Tokens whose logits say which they are: greedy ones, ties, special values, and what each filter
//! leaves.

use burn::tensor::FloatDType;
use burn_ds4_ops::sampling::SamplingParams;

use super::common::{devices, every_dtype, floats, noise, read, some};
use super::tokens::{counts, draws, sampled};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// Lengths of rows. Every other one will do where kernels compile slowly: vectors and single logits
/// by the smallest cubes, vectors by the largest.
const COLUMNS: [usize; 8] = [64, 2, 1021, 63, 20_000, 4100, 1, 65];

/// Draws from all.
const PLAIN: SamplingParams = SamplingParams {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
};

/// The ids that are drawn at all.
fn drawn(row: &[f32], sampling: &SamplingParams, device: &burn::tensor::Device) -> Vec<usize> {
    let counts = counts(row, sampling, 100, device);
    (0..row.len()).filter(|&id| counts[id] > 0).collect()
}

fn greedy_takes_the_lowest_id_of_the_highest_logit() {
    for (name, device) in devices() {
        let rows = [
            ([1.0, 3.0, 2.0, 3.0, -1.0], 1),
            ([NAN, -5.0, -4.0, NAN, -4.0], 2),
            ([-INF, -INF, -3e38, -INF, NAN], 2),
            ([0.0, INF, 2.0, INF, NAN], 1),
            ([-1.0, -0.0, 0.0, 0.0, -0.0], 1),
            ([NAN, NAN, -INF, -INF, NAN], -1),
            ([-INF; 5], -1),
            ([NAN; 5], -1),
            ([7.0, 7.0, 7.0, 7.0, 7.0], 0),
        ];
        let data: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
        let expected: Vec<i64> = rows.iter().map(|row| row.1).collect();
        let logits = floats(&data, [rows.len(), 5], device);
        let draws = draws(0, 0, rows.len());
        let tokens = sampled(logits, &SamplingParams::default(), &draws);
        assert_eq!(tokens, expected, "{name}");
    }
}

fn greedy_tokens_of_long_rows_are_those_of_a_search() {
    every_dtype(|what, device, dtype| {
        // The first has the kernel by which half-precision logits are drawn from, too.
        let step = if dtype == FloatDType::F32 { 2 } else { 8 };
        for &columns in some(what, &COLUMNS, step) {
            let logits = floats(&noise(3 * columns, 5), [3, columns], device).cast(dtype);
            let expected: Vec<i64> = read(&logits)
                .chunks(columns)
                .map(|row| {
                    let highest = row.iter().copied().fold(f32::MIN, f32::max);
                    row.iter().position(|&x| x == highest).expect("a logit") as i64
                })
                .collect();
            let tokens = sampled(logits, &SamplingParams::default(), &draws(0, 0, 3));
            assert_eq!(tokens, expected, "{what}, {columns} columns");
        }
    });
}

fn rows_without_candidates_have_no_token() {
    for (name, device) in devices() {
        let rows = [[NAN, -INF, NAN], [-INF; 3], [NAN; 3], [-INF, 1.0, NAN]];
        for sampling in [
            PLAIN,
            SamplingParams { top_k: 2, ..PLAIN },
            SamplingParams {
                top_p: 0.5,
                ..PLAIN
            },
            SamplingParams {
                min_p: 1.0,
                ..PLAIN
            },
        ] {
            let logits = floats(rows.as_flattened(), [4, 3], device);
            let tokens = sampled(logits, &sampling, &draws(3, 0, 4));
            assert_eq!(tokens, [-1, -1, -1, 1], "{name}, {sampling:?}");
        }
    }
}

fn infinities_share_everything() {
    for (name, device) in devices() {
        let row = [3e38, INF, NAN, INF, 0.0, INF, -INF];
        for (sampling, expected) in [
            (PLAIN, vec![1, 3, 5]),
            (SamplingParams { top_k: 2, ..PLAIN }, vec![1, 3]),
            (SamplingParams { top_k: 6, ..PLAIN }, vec![1, 3, 5]),
            (
                SamplingParams {
                    top_p: 0.5,
                    ..PLAIN
                },
                vec![1, 3],
            ),
            (
                SamplingParams {
                    min_p: 1.0,
                    ..PLAIN
                },
                vec![1, 3, 5],
            ),
        ] {
            assert_eq!(
                drawn(&row, &sampling, device),
                expected,
                "{name}, {sampling:?}"
            );
        }
    }
}

fn top_k_keeps_the_highest_logits_and_of_equal_ones_the_lower_ids() {
    for (name, device) in devices() {
        let row = [1.0, 2.0, 1.0, NAN, 2.0, 1.0, 0.5, 1.0];
        for (top_k, expected) in [
            (1, vec![1]),
            (2, vec![1, 4]),
            (3, vec![0, 1, 4]),
            (4, vec![0, 1, 2, 4]),
            (6, vec![0, 1, 2, 4, 5, 7]),
            (7, vec![0, 1, 2, 4, 5, 6, 7]),
            (8, vec![0, 1, 2, 4, 5, 6, 7]),
            (usize::MAX, vec![0, 1, 2, 4, 5, 6, 7]),
        ] {
            let sampling = SamplingParams { top_k, ..PLAIN };
            assert_eq!(drawn(&row, &sampling, device), expected, "{name}, {top_k}");
        }
    }
}

fn top_k_tells_neighbouring_floats_apart() {
    for (name, device) in devices() {
        let next = |x: f32| f32::from_bits(x.to_bits() + 1);
        let row = [1e-3, next(1e-3), 1e-3, next(next(1e-3)), 1e-3];
        for (top_k, expected) in [(1, vec![3]), (2, vec![1, 3]), (3, vec![0, 1, 3])] {
            let sampling = SamplingParams { top_k, ..PLAIN };
            assert_eq!(drawn(&row, &sampling, device), expected, "{name}, {top_k}");
        }
    }
}

fn top_p_keeps_as_few_as_reach_it() {
    for (name, device) in devices() {
        // Probabilities of 0.1, 0.4, 0.2, 0.3.
        let row = [1.0_f32, 4.0, 2.0, 3.0].map(f32::ln);
        for (top_p, expected) in [
            (1e-30, vec![1]),
            (0.39, vec![1]),
            (0.41, vec![1, 3]),
            (0.69, vec![1, 3]),
            (0.71, vec![1, 2, 3]),
            (0.89, vec![1, 2, 3]),
            (0.91, vec![0, 1, 2, 3]),
        ] {
            let sampling = SamplingParams { top_p, ..PLAIN };
            assert_eq!(drawn(&row, &sampling, device), expected, "{name}, {top_p}");
        }
    }
}

fn top_p_is_exact_and_keeps_the_lower_ids_of_equal_weights() {
    for (name, device) in devices() {
        let row = [5.0; 8];
        let above = f32::from_bits(0.25_f32.to_bits() + 1);
        for (top_p, count) in [
            (0.25, 2),
            (above, 3),
            (0.5, 4),
            (0.874, 7),
            (0.875, 7),
            (0.876, 8),
        ] {
            let sampling = SamplingParams { top_p, ..PLAIN };
            let expected: Vec<usize> = (0..count).collect();
            assert_eq!(drawn(&row, &sampling, device), expected, "{name}, {top_p}");
        }
    }
}

fn min_p_is_relative_to_the_most_likely_token() {
    for (name, device) in devices() {
        let row = [1.0_f32, 4.0, 2.0, 4.0].map(f32::ln);
        for (min_p, expected) in [
            (0.0, vec![0, 1, 2, 3]),
            (0.24, vec![0, 1, 2, 3]),
            (0.26, vec![1, 2, 3]),
            (0.49, vec![1, 2, 3]),
            (0.51, vec![1, 3]),
            (1.0, vec![1, 3]),
        ] {
            let sampling = SamplingParams { min_p, ..PLAIN };
            assert_eq!(drawn(&row, &sampling, device), expected, "{name}, {min_p}");
        }
    }
}

fn top_p_is_a_share_of_what_top_k_leaves_and_min_p_comes_last() {
    for (name, device) in devices() {
        let row = [1.0_f32, 4.0, 2.0, 3.0].map(f32::ln);
        // Of 4 and 3: 4/7 is below 0.6. Of all, 0.4 would be as well, but 0.7 is not below 0.69.
        let top = SamplingParams {
            top_k: 2,
            top_p: 0.56,
            ..PLAIN
        };
        assert_eq!(drawn(&row, &top, device), [1], "{name}");
        let top = SamplingParams { top_p: 0.6, ..top };
        assert_eq!(drawn(&row, &top, device), [1, 3], "{name}");
        // What min-p drops still counts for top-p.
        let last = SamplingParams {
            top_p: 0.75,
            min_p: 0.6,
            ..PLAIN
        };
        assert_eq!(drawn(&row, &last, device), [1, 3], "{name}");
    }
}

fn extreme_temperatures_and_logits_are_numbers() {
    for (name, device) in devices() {
        for (row, temperature, expected) in [
            ([0.0, 1.0, 0.999], 1e-30, vec![1]),
            ([0.0, 1.0, 0.999], f32::MIN_POSITIVE, vec![1]),
            ([-3e38, 3e38, 0.0], 1.0, vec![1]),
            ([-3e38, 3e38, 0.0], 2e38, vec![0, 1, 2]),
            ([0.0, 100.0, -100.0], 1e30, vec![0, 1, 2]),
            ([-3e38, -3e38, -2e38], f32::MAX, vec![0, 1, 2]),
        ] {
            let sampling = SamplingParams {
                temperature,
                ..PLAIN
            };
            let what = format!("{name}, {row:?}, {temperature}");
            assert_eq!(drawn(&row, &sampling, device), expected, "{what}");
        }
    }
}

catalogue![
    greedy_takes_the_lowest_id_of_the_highest_logit,
    greedy_tokens_of_long_rows_are_those_of_a_search,
    rows_without_candidates_have_no_token,
    infinities_share_everything,
    top_k_keeps_the_highest_logits_and_of_equal_ones_the_lower_ids,
    top_k_tells_neighbouring_floats_apart,
    top_p_keeps_as_few_as_reach_it,
    top_p_is_exact_and_keeps_the_lower_ids_of_equal_weights,
    min_p_is_relative_to_the_most_likely_token,
    top_p_is_a_share_of_what_top_k_leaves_and_min_p_comes_last,
    extreme_temperatures_and_logits_are_numbers,
];
