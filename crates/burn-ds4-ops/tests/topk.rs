//! Top-k of rows by tables made by hand: what is chosen, in which order, and what is refused.

use super::common::{devices, floats, integer_values, integers, values};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_ds4_ops::{
    attention::MASKED,
    topk::{
        MAX_COLUMNS, MAX_K, Order, Windows, top_k, top_k_ids, top_k_mask, top_k_per_row,
        top_k_per_row_decode,
    },
};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;
const TINY: f32 = f32::MIN_POSITIVE;

fn flex() -> &'static Device {
    &devices()[0].1
}

/// The columns of the largest entries of rows of five, having checked that the ids and the mask
/// agree.
fn check_rows<const K: usize>(rows: &[([f32; 5], [i64; K])]) {
    let data: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
    for (name, device) in devices() {
        let logits = floats(&data, [rows.len(), 5], device);
        let ids = integer_values(top_k_ids(logits.clone(), Windows::All, K));
        let mask = integer_values(top_k_mask(logits, K).int());
        assert_eq!((ids.len(), mask.len()), (rows.len() * K, rows.len() * 5));
        let results = ids.chunks(K).zip(mask.chunks(5));
        for ((ids, mask), (row, expected)) in results.zip(rows) {
            assert_eq!(ids, expected, "{name}: {row:?}");
            let marked: Vec<i64> = (0..5).map(|c| i64::from(expected.contains(&c))).collect();
            assert_eq!(mask, marked, "{name}: mask of {row:?}");
        }
    }
}

fn the_largest_are_taken_and_the_lower_column_wins_among_equals() {
    check_rows(&[
        ([1.0, 9.0, 3.0, 7.0, 5.0], [1, 3]),
        ([2.0, 2.0, 2.0, 2.0, 2.0], [0, 1]),
        ([1.0, 4.0, 4.0, 9.0, 4.0], [1, 3]),
        ([4.0, 1.0, 9.0, 4.0, 4.0], [0, 2]),
        ([0.0, -0.0, 0.0, -0.0, -1.0], [0, 1]),
        ([-1.0, -0.0, 0.0, -0.0, 0.0], [1, 2]),
        ([-1.0, 0.0, -0.0, 1.0, 0.0], [1, 3]),
        ([MASKED, MASKED, -3.0, MASKED, MASKED], [0, 2]),
        ([-5.0, -4.0, -3.0, -2.0, -1.0], [3, 4]),
        ([-0.0, TINY, -TINY, 0.0, -1.0], [0, 1]),
        ([1.0, 1.0 + f32::EPSILON, 1.0, 1.0, 1.0], [0, 1]),
        (
            [1.0, 1.0, 1.0, 1.0 + f32::EPSILON, 1.0 + f32::EPSILON],
            [3, 4],
        ),
    ]);
}

fn infinities_and_nan_rank_as_documented() {
    check_rows(&[
        ([NAN, 1.0, NAN, 2.0, 0.0], [1, 3, 4]),
        ([NAN, NAN, NAN, NAN, NAN], [0, 1, 2]),
        ([NAN, -NAN, NAN, -NAN, 1.0], [0, 1, 4]),
        ([NAN, 1.0, NAN, NAN, 2.0], [0, 1, 4]),
        ([-INF, -INF, -INF, -INF, -INF], [0, 1, 2]),
        ([-INF, NAN, -INF, 5.0, NAN], [0, 1, 3]),
        ([NAN, -INF, f32::MIN, 5.0, -INF], [0, 2, 3]),
        ([NAN, -INF, MASKED, MASKED, MASKED], [2, 3, 4]),
        ([INF, NAN, INF, 5.0, INF], [0, 2, 4]),
        ([f32::MAX, f32::MAX, INF, INF, INF], [2, 3, 4]),
        ([1.0, INF, -INF, f32::MAX, NAN], [0, 1, 3]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [2, 3, 4]),
    ]);
}

fn numbers_below_the_normal_range_are_told_apart() {
    let step = f32::from_bits(1);
    check_rows(&[
        ([0.0, step, -step, 2.0 * step, -0.0], [1, 3]),
        ([-3.0 * step, -2.0 * step, -step, -step, -step], [2, 3]),
        ([0.0, 0.0, 0.0, 0.0, step], [0, 4]),
    ]);
}

fn a_row_of_k_columns_or_fewer_is_taken_whole() {
    let row = [3.0, NAN, -INF, 3.0, MASKED];
    for (name, device) in devices() {
        for k in [5, 6, 99, MAX_K] {
            let logits = || floats(&row.repeat(2), [2, 5], device);
            let mut expected = vec![0, 1, 2, 3, 4];
            expected.resize(k, -1);
            let ids = integer_values(top_k_ids(logits(), Windows::All, k));
            assert_eq!(ids, expected.repeat(2), "{name} k {k}");
            let mask = integer_values(top_k_mask(logits(), k).int());
            assert_eq!(mask, [1; 10], "{name} k {k}: mask");
        }
    }
}

fn a_single_column_is_always_taken() {
    for (name, device) in devices() {
        let logits = || floats(&[5.0, NAN, -INF], [3, 1], device);
        let ids = integer_values(top_k_ids(logits(), Windows::All, 1));
        assert_eq!(ids, [0, 0, 0], "{name}");
        let ids = integer_values(top_k_ids(logits(), Windows::All, 2));
        assert_eq!(ids, [0, -1, 0, -1, 0, -1], "{name}");
        let mask = integer_values(top_k_mask(logits(), 1).int());
        assert_eq!(mask, [1, 1, 1], "{name}: mask");
    }
}

fn no_rows_and_no_columns_give_empty_and_unused_slots() {
    for (name, device) in devices() {
        for (rows, columns) in [(0, 150), (3, 0), (0, 0)] {
            let what = format!("{name} [{rows}, {columns}]");
            let logits = || Tensor::<2>::zeros([rows, columns], (device, DType::F32));
            let bounds = || integers(&vec![0; rows], [rows], device);
            let ids = top_k_per_row(logits(), bounds(), bounds(), 4);
            assert_eq!((ids.dims(), ids.dtype()), ([rows, 4], DType::I32), "{what}");
            assert_eq!(integer_values(ids), vec![-1; rows * 4], "{what}");
            for order in [Order::Column, Order::Value] {
                let (best, ids) = top_k(logits(), Windows::All, 4, order);
                assert_eq!(values(best), vec![-INF; rows * 4], "{what}");
                assert_eq!(integer_values(ids), vec![-1; rows * 4], "{what}");
            }
            assert_eq!(top_k_mask(logits(), 4).dims(), [rows, columns], "{what}");
        }
    }
}

fn logits(rows: usize) -> Tensor<2> {
    Tensor::zeros([rows, 4], flex())
}

fn entries(count: usize) -> Tensor<1, Int> {
    Tensor::zeros([count], flex())
}

#[test]
#[should_panic(expected = "top_k: k must be in 1..=4096, got 0")]
fn a_k_of_zero_is_refused() {
    top_k_ids(logits(1), Windows::All, 0);
}

#[test]
#[should_panic(expected = "top_k: k must be in 1..=4096, got 4097")]
fn a_k_above_the_limit_is_refused() {
    top_k(logits(1), Windows::All, MAX_K + 1, Order::Value);
}

#[test]
#[should_panic(expected = "top_k: k must be in 1..=4096, got 0")]
fn the_mask_refuses_a_k_of_zero() {
    top_k_mask(logits(1), 0);
}

#[test]
#[should_panic(expected = "top_k: logits has 8388609 columns, more than 8388608")]
fn more_columns_than_the_limit_are_refused() {
    top_k_ids(Tensor::zeros([0, MAX_COLUMNS + 1], flex()), Windows::All, 1);
}

#[test]
#[should_panic(expected = "top_k: row_starts has 2 entries for 3 rows")]
fn starts_of_another_number_are_refused() {
    top_k_per_row(logits(3), entries(2), entries(3), 1);
}

#[test]
#[should_panic(expected = "top_k: row_ends has 4 entries for 3 rows")]
fn ends_of_another_number_are_refused() {
    top_k_per_row(logits(3), entries(3), entries(4), 1);
}

fn windows(lengths: usize, next_n: usize) -> Windows {
    Windows::Lengths {
        lengths: entries(lengths),
        next_n,
    }
}

#[test]
#[should_panic(expected = "top_k: 2 lengths with next_n = 2 for 3 rows")]
fn lengths_of_another_number_are_refused() {
    top_k_ids(logits(3), windows(2, 2), 1);
}

#[test]
#[should_panic(expected = "top_k: 3 lengths with next_n = 0 for 0 rows")]
fn a_next_n_of_zero_is_refused() {
    top_k(logits(0), windows(3, 0), 1, Order::Column);
}

#[test]
#[should_panic(expected = "top_k: 2 lengths with next_n = 9223372036854775808 for 0 rows")]
fn a_next_n_that_overflows_is_refused() {
    top_k_ids(logits(0), windows(2, 1 << 63), 1);
}

#[test]
#[should_panic(
    expected = "top_k_per_row_decode: seq_lens has shape [3], expected [batch] or \
                [batch, next_n] with batch · next_n = 4 (the number of rows) and next_n = 2"
)]
fn decode_refuses_lengths_of_another_number() {
    top_k_per_row_decode(logits(4), entries(3), 2, 1);
}

#[test]
#[should_panic(
    expected = "top_k_per_row_decode: seq_lens has shape [4, 1], expected [batch] or \
                [batch, next_n] with batch · next_n = 4 (the number of rows) and next_n = 2"
)]
fn decode_refuses_ends_of_another_shape() {
    top_k_per_row_decode(logits(4), entries(4).reshape([4, 1]), 2, 1);
}

#[test]
#[should_panic(
    expected = "top_k_per_row_decode: seq_lens has shape [2, 2, 1], expected [batch] or \
                [batch, next_n] with batch · next_n = 4 (the number of rows) and next_n = 2"
)]
fn decode_refuses_lengths_of_three_dimensions() {
    top_k_per_row_decode(logits(4), entries(4).reshape([2, 2, 1]), 2, 1);
}

#[test]
#[should_panic(
    expected = "top_k_per_row_decode: seq_lens has shape [0], expected [batch] or \
                [batch, next_n] with batch · next_n = 0 (the number of rows) and next_n = 0"
)]
fn decode_refuses_a_next_n_of_zero() {
    top_k_per_row_decode(logits(0), entries(0), 0, 1);
}

catalogue![
    the_largest_are_taken_and_the_lower_column_wins_among_equals,
    infinities_and_nan_rank_as_documented,
    numbers_below_the_normal_range_are_told_apart,
    a_row_of_k_columns_or_fewer_is_taken_whole,
    a_single_column_is_always_taken,
    no_rows_and_no_columns_give_empty_and_unused_slots,
];
