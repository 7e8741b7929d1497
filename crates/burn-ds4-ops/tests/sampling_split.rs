//! Long rows, on which many cubes work where there are few of them: the tokens are those of the
//! reference, however many rows there are, and whatever is in them.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::sampling::{LaneParams, SamplingParams, sample, verify};

use super::common::{devices, every_dtype, floats, integer_values, integers, is_gpu, noise, some};
use super::tokens::{batch, draws, repeated, sampled, verdict};

const INF: f32 = f32::INFINITY;
/// The shortest rows that are divided, for vectors and for single logits.
const COLUMNS: [usize; 2] = [8192, 8193];

/// Parameters in all combinations, in an order that mixes them.
fn params(count: usize, first: usize) -> Vec<LaneParams> {
    let lane = |i: usize| {
        let i = (first + i) * 101;
        LaneParams {
            sampling: SamplingParams {
                temperature: [1.0, 0.3, 0.0, 2.5, 1e20, 1e-30, 1.0][i % 7],
                top_k: [0, 50, 1, 3000, usize::MAX][i % 5],
                top_p: [1.0, 0.95, 0.5, 0.9999][i / 3 % 4],
                min_p: [0.0, 0.05, 1.0][i % 3],
            },
            seed: (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            ..LaneParams::default()
        }
    };
    (0..count).map(lane).collect()
}

/// A row of one of so many kinds.
const KINDS: usize = 11;

fn row(kind: usize, columns: usize) -> Vec<f32> {
    let noise = noise(columns, kind as u32);
    let value = |id: usize| {
        let x = noise[id];
        match kind % KINDS {
            0 => 12.0 * x,
            1 => (40.0 * x).round() / 4.0,
            2 => 0.25,
            // One far above all others, none of which can be neglected.
            3 if id == columns - 2 => 15.0,
            4 if x > 0.99 => INF,
            5 if x > -0.5 => f32::NAN,
            6 if x < 0.999 => -INF,
            // No candidate in most segments.
            7 if id / 1000 != 3 => -INF,
            8 => f32::NAN,
            // Two values, in neighbouring bins or in one.
            9 => {
                if x > 0.0 {
                    0.01
                } else {
                    0.0
                }
            }
            10 => id as f32 / 1000.0,
            _ => 3.0 * x,
        }
    };
    (0..columns).map(value).collect()
}

fn tokens(logits: Tensor<2>, params: &[LaneParams]) -> Vec<i64> {
    let ([rows, columns], device) = (logits.dims(), logits.device());
    let lanes = batch(params, columns, &device);
    let at: Vec<i64> = (0..rows as i64).map(|row| 1000 * row - 7).collect();
    let tokens = sample(logits, &lanes, integers(&at, [rows], &device));
    integer_values(tokens.expect("arguments that fit"))
}

fn rows_of_all_kinds_have_the_tokens_of_the_reference() {
    let (first, reference) = &devices()[0];
    for (name, device) in devices() {
        let sizes = if is_gpu(name) {
            &COLUMNS[..]
        } else {
            &COLUMNS[..1]
        };
        for columns in sizes.iter().copied().chain(is_gpu(name).then_some(129_280)) {
            // One row has the most cubes, 17 and 64 have several segments to a cube.
            for (count, start) in [(64, 0), (17, 64), (2, 81), (1, 83), (1, 84), (64, 200)] {
                let rows = start..start + count;
                let data: Vec<f32> = rows.flat_map(|kind| row(kind, columns)).collect();
                let params = params(count, start);
                let on = |device: &Device| tokens(floats(&data, [count, columns], device), &params);
                let (actual, expected) = (on(device), on(reference));
                for lane in 0..count {
                    assert_eq!(
                        actual[lane],
                        expected[lane],
                        "{name} and {first}, {count} rows of {columns}, kind {}: {:?}",
                        (start + lane) % KINDS,
                        params[lane].sampling
                    );
                }
            }
        }
    }
}

fn many_seeds_have_the_tokens_of_the_reference() {
    let (first, reference) = &devices()[0];
    for (name, device) in devices() {
        let columns = if is_gpu(name) { 129_280 } else { COLUMNS[0] };
        let row: Vec<f32> = noise(columns, 3).iter().map(|x| 9.0 * x).collect();
        for (number, (top_k, top_p, min_p)) in [
            (0, 1.0, 0.0),
            (0, 0.95, 0.0),
            (50, 0.95, 0.05),
            (700, 1.0, 0.0),
        ]
        .into_iter()
        .enumerate()
        {
            let sampling = SamplingParams {
                temperature: 0.8,
                top_k,
                top_p,
                min_p,
            };
            let on = |device: &Device| {
                let logits = repeated(&row, 100, device);
                sampled(logits, &sampling, &draws(number as u64, 40, 100))
            };
            assert_eq!(
                on(device),
                on(reference),
                "{name} and {first}, {sampling:?}"
            );
        }
    }
}

fn a_long_row_has_the_same_token_among_any_number_of_rows() {
    for (name, device) in devices() {
        let columns = COLUMNS[0];
        let data: Vec<f32> = (0..3).flat_map(|kind| row(kind, columns)).collect();
        let sampling = SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 0.9,
            min_p: 0.0,
        };
        // More rows than are divided, too.
        let of_count = |count: usize| {
            let rows = floats(&data, [3, columns], device).repeat(&[count.div_ceil(3), 1]);
            let rows = rows.slice([0..count, 0..columns]);
            sampled(rows, &sampling, &vec![(9, 5); count])
        };
        let alone = of_count(1)[0];
        for &count in some(name, &[129, 2, 64, 17], 2) {
            let tokens = of_count(count);
            let same = tokens.iter().step_by(3).all(|&token| token == alone);
            assert!(same, "{name}, {count} rows: {alone}, {tokens:?}");
        }
    }
}

fn long_rows_of_half_precision_are_taken_as_they_are() {
    every_dtype(|what, device, dtype| {
        for &columns in some(what, &COLUMNS, 2) {
            let data: Vec<f32> = (0..5).flat_map(|kind| row(kind, columns)).collect();
            let logits = floats(&data, [5, columns], device).cast(dtype);
            let wide = logits.clone().cast(FloatDType::F32);
            let params = params(5, 30);
            let expected = tokens(wide, &params);
            assert_eq!(
                tokens(logits, &params),
                expected,
                "{what}, {columns} columns"
            );
        }
    });
}

fn drafts_of_long_rows_are_verified_as_the_reference_does() {
    let (first, reference) = &devices()[0];
    for (name, device) in devices() {
        let (lanes, rows, columns) = (5, 3, COLUMNS[0]);
        let data: Vec<f32> = (0..lanes * rows)
            .flat_map(|kind| row(kind, columns))
            .collect();
        let params = params(lanes, 7);
        let on = |device: &Device, drafts: &[i64]| {
            let logits = floats(&data, [lanes, rows, columns], device);
            let drafts = integers(drafts, [lanes, rows - 1], device);
            let at = integers(&[5, -1, 77, 1 << 20, 0], [lanes], device);
            let verified = verify(logits, drafts, &batch(&params, columns, device), at);
            verdict(verified.expect("arguments that fit"))
        };
        // The first draft of each lane is right.
        let none = vec![-1; lanes * (rows - 1)];
        let (tokens, _) = on(reference, &none);
        let drafts: Vec<i64> = tokens.chunks(rows).flat_map(|row| [row[0], 3]).collect();
        let (tokens, accepted) = on(device, &drafts);
        assert!(accepted.contains(&1), "{name}: {accepted:?}");
        assert_eq!(
            (tokens, accepted),
            on(reference, &drafts),
            "{name} and {first}"
        );
    }
}

catalogue![
    rows_of_all_kinds_have_the_tokens_of_the_reference,
    many_seeds_have_the_tokens_of_the_reference,
    a_long_row_has_the_same_token_among_any_number_of_rows,
    long_rows_of_half_precision_are_taken_as_they_are,
    drafts_of_long_rows_are_verified_as_the_reference_does,
];
