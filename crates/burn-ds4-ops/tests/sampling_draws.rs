//! Draws: those of an oracle, as often as their probability says, and the same everywhere.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::sampling::SamplingParams;

use super::common::{compiles_slowly, devices, every_dtype, floats, is_gpu, noise, sized, some};
use super::tokens::{Draw, Oracle, counts, draws, sampled, uniform};

const SAMPLINGS: [SamplingParams; 8] = [
    of(1.0, 0, 1.0, 0.0),
    of(0.3, 0, 1.0, 0.0),
    of(2.5, 5, 1.0, 0.0),
    of(0.8, 0, 0.7, 0.0),
    of(1.0, 0, 0.99, 0.0),
    of(1.5, 0, 1.0, 0.2),
    of(0.9, 40, 0.9, 0.05),
    of(1.2, 1, 0.1, 1.0),
];

const fn of(temperature: f32, top_k: usize, top_p: f32, min_p: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
    }
}

/// Any seeds at any positions.
fn any_draws(count: usize) -> Vec<Draw> {
    let draw = |i: u64| {
        let mixed = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 31), (mixed >> 17) as u32)
    };
    (0..count as u64).map(draw).collect()
}

/// Logits of many sizes: standard normal ones, roughly.
fn normal(count: usize, seed: u32) -> Vec<f32> {
    let parts: Vec<Vec<f32>> = (0..6).map(|part| noise(count, seed + 31 * part)).collect();
    (0..count)
        .map(|i| parts.iter().map(|part| part[i]).sum::<f32>() / 1.4)
        .collect()
}

fn tokens_are_those_of_the_oracle() {
    for (name, device) in devices() {
        let (mut checked, mut close) = (0, 0);
        for (number, sampling) in SAMPLINGS.iter().enumerate() {
            // A test below has the largest cubes.
            let shapes = [(20, 1000), (6, 4099), (5, 1), (30, 64)];
            for &(rows, columns) in some(name, &shapes, 2) {
                let data = normal(rows * columns, number as u32);
                let data: Vec<f32> = data.iter().map(|x| 3.0 * x).collect();
                let logits = floats(&data, [rows, columns], device);
                let draws = any_draws(rows);
                let tokens = sampled(logits, sampling, &draws);
                for ((row, token), (seed, position)) in data.chunks(columns).zip(tokens).zip(draws)
                {
                    let oracle = Oracle::of(row, sampling);
                    if oracle.margin < 1e-6 {
                        close += 1;
                        continue;
                    }
                    checked += 1;
                    let u = uniform(seed, position);
                    assert!(
                        oracle.allows(token, u, 1e-6),
                        "{name}, {sampling:?}, {columns} columns: {token} at {u}"
                    );
                }
            }
        }
        assert!(
            checked > 20 * close,
            "{name}: {close} of {checked} are too close"
        );
    }
}

fn tokens_are_drawn_as_often_as_their_probability_says() {
    for (name, device) in devices() {
        let (none, nan) = (f32::NEG_INFINITY, f32::NAN);
        // As long as whole vectors, like the rows of other tests.
        let row = [
            0.3, -1.0, 2.0, 0.0, 1.1, nan, 1.9, -0.4, 0.8, 1.1, none, nan,
        ];
        // A software device works on one row after the other.
        let times = if compiles_slowly(name) { 2000 } else { 8000 };
        // The 99.9th percentile of chi-square by the degrees of freedom.
        let limits = [
            0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88,
        ];
        for sampling in [
            of(1.0, 0, 1.0, 0.0),
            of(0.5, 0, 1.0, 0.0),
            of(2.0, 6, 1.0, 0.0),
            of(1.3, 0, 0.8, 0.0),
            of(1.0, 7, 0.95, 0.2),
        ] {
            let counts = counts(&row, &sampling, times, device);
            let draws = counts.iter().sum::<usize>() as f64;
            let oracle = Oracle::of(&row, &sampling);
            let expected = |id| {
                oracle
                    .kept
                    .iter()
                    .find(|entry| entry.0 == id)
                    .map_or(0.0, |entry| entry.1)
            };
            let mut statistic = 0.0;
            for (id, &count) in counts.iter().enumerate() {
                let expected = expected(id) * draws;
                if expected == 0.0 {
                    assert_eq!(count, 0, "{name}, {sampling:?}: {id} is not kept");
                } else {
                    statistic += (count as f64 - expected).powi(2) / expected;
                }
            }
            let limit = limits[oracle.kept.len() - 1];
            assert!(
                oracle.kept.len() > 2 && statistic < limit,
                "{name}, {sampling:?}: {statistic}, {counts:?}"
            );
        }
    }
}

/// Rows that are hard to choose from.
fn rows(columns: usize) -> Vec<f32> {
    let normal = normal(columns, 9);
    let rows = [
        normal.iter().map(|x| 4.0 * x).collect::<Vec<_>>(),
        // Ties everywhere.
        normal.iter().map(|x| (2.0 * x).round()).collect(),
        vec![0.25; columns],
        // One far above all others, none of which can be neglected.
        (0..columns)
            .map(|id| if id == columns / 2 { 20.0 } else { normal[id] })
            .collect(),
        // Hardly any of the columns.
        normal
            .iter()
            .map(|&x| if x > 1.5 { x } else { f32::NEG_INFINITY })
            .collect(),
        normal
            .iter()
            .map(|&x| if x < 0.0 { f32::NAN } else { 1e4 * x })
            .collect(),
        // Ascending, to the last column.
        (0..columns).map(|id| id as f32 / columns as f32).collect(),
        // Beyond what is ever drawn.
        normal.iter().map(|x| 1e3 * x).collect(),
    ];
    rows.concat()
}

fn every_device_draws_the_same_tokens() {
    let (first, reference) = &devices()[0];
    for (name, device) in devices() {
        // In the second list, those in between have kernels of their own.
        let sizes: &[usize] = if is_gpu(name) {
            &[1, 5, 64, 257, 4096, 4097, 40_000, 129_280, 262_144]
        } else {
            &[5, 2000, 64, 4097, 40_000]
        };
        for &columns in some(name, sizes, 2) {
            let data = rows(columns);
            let count = data.len() / columns;
            for (number, sampling) in SAMPLINGS.iter().enumerate() {
                let on = |device: &Device| {
                    let logits = floats(&data, [count, columns], device);
                    sampled(logits, sampling, &draws(1 << 40, number as u32, count))
                };
                assert_eq!(
                    on(device),
                    on(reference),
                    "{name} and {first}, {sampling:?}, {columns} columns"
                );
            }
        }
    }
}

fn a_vocabulary_of_any_length_is_drawn_from() {
    sized(262_144, 129_280, |name, device, columns| {
        let data: Vec<f32> = normal(columns, 4).iter().map(|x| 2.0 * x).collect();
        for sampling in [of(1.0, 0, 0.9, 0.0), of(1.0, 1000, 1.0, 0.01)] {
            let logits = floats(&data, [1, columns], device);
            let token = sampled(logits, &sampling, &draws(11, 5, 1))[0];
            let oracle = Oracle::of(&data, &sampling);
            assert!(
                oracle.allows(token, uniform(11, 5), 1e-6),
                "{name}, {sampling:?}: {token}"
            );
        }
    });
}

fn a_row_draws_the_same_token_alone_and_among_others() {
    for (name, device) in devices() {
        let data = rows(500);
        let count = data.len() / 500;
        let draws = any_draws(count);
        let sampling = of(1.0, 50, 0.95, 0.01);
        let logits = floats(&data, [count, 500], device);
        let tokens = sampled(logits.clone(), &sampling, &draws);
        for (row, &own) in draws.iter().enumerate() {
            let alone = logits.clone().slice([row..row + 1, 0..500]);
            let alone = sampled(alone, &sampling, &[own]);
            assert_eq!(alone, [tokens[row]], "{name}, {row}");
        }
    }
}

fn rows_may_be_anywhere_in_memory() {
    for (name, device) in devices() {
        let data = normal(40 * 24, 2);
        let sampling = of(1.0, 12, 0.9, 0.0);
        let whole = floats(&data, [40, 24], device);
        let of_view = |view: Tensor<2>| {
            let dense: Tensor<2> = Tensor::from_data(view.clone().into_data(), device);
            let draws = draws(3, 0, view.dims()[0]);
            let expected = sampled(dense, &sampling, &draws);
            assert_eq!(sampled(view, &sampling, &draws), expected, "{name}");
        };
        of_view(whole.clone().transpose());
        of_view(whole.clone().slice([3..20, 1..22]));
        of_view(whole.slice([7..8, 0..24]).expand([6, 24]));
    }
}

fn seeds_and_positions_make_a_difference() {
    for (name, device) in devices() {
        let row = floats(&[0.0; 100], [1, 100], device).expand([64, 100]);
        let sampling = of(1.0, 0, 1.0, 0.0);
        let of_seed = |seed, first| sampled(row.clone(), &sampling, &draws(seed, first, 64));
        let tokens = of_seed(1, 0);
        assert_eq!(of_seed(1, 0), tokens, "{name}");
        assert_eq!(of_seed(1, 1)[..63], tokens[1..], "{name}");
        for seed in [0, 2, 1 + (1 << 32)] {
            assert_ne!(of_seed(seed, 0), tokens, "{name}, {seed}");
        }
    }
}

fn half_precision_logits_are_taken_as_they_are() {
    every_dtype(|what, device, dtype| {
        // Vectors, and single logits.
        for &columns in some(what, &[204, 203], 2) {
            let data = rows(columns);
            let count = data.len() / columns;
            let logits = floats(&data, [count, columns], device).cast(dtype);
            let wide = logits.clone().cast(FloatDType::F32);
            let draws = draws(5, 100, count);
            for sampling in [of(0.0, 0, 1.0, 0.0), of(1.0, 30, 0.9, 0.0)] {
                let tokens = sampled(logits.clone(), &sampling, &draws);
                let expected = sampled(wide.clone(), &sampling, &draws);
                assert_eq!(tokens, expected, "{what}, {columns} columns, {sampling:?}");
            }
        }
    });
}

catalogue![
    tokens_are_those_of_the_oracle,
    tokens_are_drawn_as_often_as_their_probability_says,
    every_device_draws_the_same_tokens,
    a_vocabulary_of_any_length_is_drawn_from,
    a_row_draws_the_same_token_alone_and_among_others,
    rows_may_be_anywhere_in_memory,
    seeds_and_positions_make_a_difference,
    half_precision_logits_are_taken_as_they_are,
];
