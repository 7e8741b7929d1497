//! Log-probabilities: those of an oracle in f64, in order, and those of special values.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_ds4_ops::sampling::{LogProbs, log_probs};

use super::common::{
    EXACT, absolute, assert_close, devices, every_dtype, floats, integer_values, narrow, noise,
    read, some_of_half, values,
};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

fn tokens(ids: &[i32], device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(ids.to_vec(), [ids.len()]);
    Tensor::from_data(data, (device, DType::I32))
}

fn probs(logits: Tensor<2>, ids: &[i32], top: usize) -> LogProbs {
    let tokens = tokens(ids, &logits.device());
    log_probs(logits, tokens, top).expect("arguments that fit")
}

/// The log-probabilities of a row of finite logits.
fn oracle(row: &[f32]) -> Vec<f64> {
    let highest = row.iter().copied().fold(f32::MIN, f32::max);
    let above = |x: f32| f64::from(x) - f64::from(highest);
    let total = row.iter().map(|&x| above(x).exp()).sum::<f64>().ln();
    row.iter().map(|&x| above(x) - total).collect()
}

/// Ids by (value descending, id ascending).
fn ranked(row: &[f32]) -> Vec<i64> {
    let mut ids: Vec<i64> = (0..row.len() as i64).collect();
    ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
    ids
}

fn log_probs_are_those_of_the_oracle() {
    every_dtype(|what, device, dtype| {
        let shapes = [(5, 1000, 20), (3, 67, 4)];
        for &(rows, columns, top) in some_of_half(what, dtype, &shapes, 2) {
            // Many ties, and probabilities down to e^-20.
            let data = noise(rows * columns, 2).into_iter();
            let data: Vec<f32> = data.map(|x| (64.0 * x).round() / 6.25).collect();
            let logits = floats(&data, [rows, columns], device).cast(dtype);
            let held = read(&logits);
            let ids: Vec<i32> = (0..rows as i32).map(|row| row * 13).collect();
            let actual = probs(logits, &ids, top);
            let top_ids = integer_values(actual.top_ids);
            let rows = held.chunks(columns).zip(&ids).zip(top_ids.chunks(top));
            let (mut chosen, mut listed) = (Vec::new(), Vec::new());
            for ((row, &id), top_ids) in rows {
                let oracle = oracle(row);
                chosen.push(oracle[id as usize]);
                assert_eq!(top_ids, &ranked(row)[..top], "{what}, {columns} columns");
                listed.extend(top_ids.iter().map(|&id| oracle[id as usize]));
            }
            let tolerance = absolute(1e-5);
            assert_close(&values(actual.chosen), &narrow(&chosen), tolerance, what);
            assert_close(&values(actual.top), &narrow(&listed), tolerance, what);
        }
    });
}

/// Powers of what is above the highest logit that was found overflow.
fn a_logit_far_above_all_others_is_found_wherever_it_is() {
    for (name, device) in devices() {
        let (columns, places) = (1000, [0, 1, 3, 500, 998, 999]);
        let mut data = noise(places.len() * columns, 11);
        for (row, place) in data.chunks_mut(columns).zip(places) {
            row[place] = 200.0;
        }
        let oracles: Vec<_> = data.chunks(columns).map(oracle).collect();
        let logits = || floats(&data, [places.len(), columns], device);
        let own: Vec<i32> = places.iter().map(|place| *place as i32).collect();
        for ids in [own, vec![7; places.len()]] {
            let oracles = oracles.iter().zip(&ids);
            let expected: Vec<f64> = oracles.map(|(row, id)| row[*id as usize]).collect();
            let actual = values(probs(logits(), &ids, 0).chosen);
            assert_close(&actual, &narrow(&expected), absolute(1e-4), name);
        }
    }
}

fn what_is_no_candidate_has_no_probability() {
    for (name, device) in devices() {
        let rows = [
            [1.0_f32.ln(), NAN, 3.0_f32.ln(), -INF, 0.0],
            [INF, 3e38, INF, NAN, -INF],
            [NAN, -INF, -INF, NAN, -INF],
            [-3e38, 3e38, 0.0, 3e38, -3e38],
        ];
        let logits = || floats(rows.as_flattened(), [4, 5], device);
        let half = 0.5_f32.ln();
        let [one, three] = [0.2_f32.ln(), 0.6_f32.ln()];
        let expected = [
            [one, -INF, three, -INF, one],
            [half, -INF, half, -INF, -INF],
            [-INF; 5],
            [-INF, half, -INF, half, -INF],
        ];
        for id in 0..5 {
            let actual = values(probs(logits(), &[id; 4], 0).chosen);
            let expected = expected.map(|row| row[id as usize]);
            // What is far below f32 may be finite.
            let actual: Vec<f32> = actual
                .iter()
                .map(|&x| if x < -1e38 { -INF } else { x })
                .collect();
            assert_close(&actual, &expected, absolute(1e-6), &format!("{name}, {id}"));
        }
        let actual = probs(logits(), &[-1, 5, i32::MAX, i32::MIN], 3);
        assert_close(&values(actual.chosen), &[-INF; 4], EXACT, name);
        let top_ids = integer_values(actual.top_ids);
        assert_eq!(top_ids[..6], [2, 0, 4, 0, 2, 1], "{name}");
        assert_eq!(top_ids[9..], [1, 3, 2], "{name}");
        let top = [three, one, one, half, half, -INF];
        assert_close(&values(actual.top)[..6], &top, absolute(1e-6), name);
    }
}

fn a_row_has_the_same_bits_alone_and_among_others() {
    for (name, device) in devices() {
        let data = noise(6 * 1000, 8);
        let logits = floats(&data, [6, 1000], device);
        let ids = [0, 10, 200, 30, 999, 5];
        let together = probs(logits.clone(), &ids, 3);
        let (chosen, top) = (values(together.chosen), values(together.top));
        for row in 0..6 {
            let alone = logits.clone().slice([row..row + 1, 0..1000]);
            let alone = probs(alone, &ids[row..row + 1], 3);
            assert_close(&values(alone.chosen), &chosen[row..row + 1], EXACT, name);
            assert_close(&values(alone.top), &top[3 * row..][..3], EXACT, name);
        }
        let view = floats(&data, [100, 60], device).transpose();
        let dense: Tensor<2> = Tensor::from_data(view.clone().into_data(), device);
        let ids = [7; 60];
        let expected = values(probs(dense, &ids, 2).chosen);
        assert_close(&values(probs(view, &ids, 2).chosen), &expected, EXACT, name);
    }
}

fn a_short_row_lists_all_of_its_tokens() {
    for (name, device) in devices() {
        let actual = probs(floats(&[0.0, 1.0], [1, 2], device), &[0], 4);
        let expected = narrow(&oracle(&[0.0, 1.0]));
        assert_eq!(integer_values(actual.top_ids), [1, 0, -1, -1], "{name}");
        let top = [expected[1], expected[0], -INF, -INF];
        assert_close(&values(actual.top), &top, absolute(1e-6), name);
        let nothing = probs(Tensor::zeros([2, 0], device), &[0, 1], 1);
        assert_close(&values(nothing.chosen), &[-INF; 2], EXACT, name);
        assert_eq!(integer_values(nothing.top_ids), [-1, -1], "{name}");
        let nothing = probs(Tensor::zeros([0, 3], device), &[], 2);
        assert_eq!(
            (nothing.chosen.dims(), nothing.top.dims()),
            ([0], [0, 2]),
            "{name}"
        );
    }
}

fn what_does_not_fit_is_refused() {
    for (name, device) in devices() {
        let logits = || Tensor::<2>::zeros([2, 3], device);
        let error = |tokens, top| {
            let error = log_probs(logits(), tokens, top);
            error.expect_err("arguments that do not fit").to_string()
        };
        let message = error(tokens(&[0, 1], device), 21);
        assert_eq!(message, "`top` is 21, expected at most 20", "{name}");
        let message = error(tokens(&[0], device), 1);
        assert_eq!(message, "`tokens` has shape [1], expected [2]", "{name}");
    }
    let device = Device::flex();
    let logits = Tensor::<2>::zeros([1, 3], (&device, DType::F64));
    let error = log_probs(logits, tokens(&[0], &device), 1);
    let message = error.expect_err("no dtype of ours").to_string();
    assert!(message.starts_with("`logits` has dtype F64"), "{message}");
    let wide = Tensor::<1, Int>::zeros([1], (&device, DType::I64));
    let error = log_probs(Tensor::zeros([1, 3], &device), wide, 1);
    let message = error.expect_err("no dtype of ours").to_string();
    assert!(
        message.starts_with("`tokens` has dtype I64, expected I32"),
        "{message}"
    );
}

catalogue![
    log_probs_are_those_of_the_oracle,
    a_logit_far_above_all_others_is_found_wherever_it_is,
    what_is_no_candidate_has_no_probability,
    a_row_has_the_same_bits_alone_and_among_others,
    a_short_row_lists_all_of_its_tokens,
    what_does_not_fit_is_refused,
];
