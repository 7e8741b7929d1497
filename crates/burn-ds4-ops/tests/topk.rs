//! Top-k of rows by tables made by hand: what is chosen, and in which order.

use super::common::{devices, floats, integer_values, integers, values};
use burn::tensor::{DType, Tensor};
use burn_ds4_ops::{
    attention::MASKED,
    topk::{MAX_K, Order, Windows, top_k, top_k_ids, top_k_mask, top_k_per_row},
};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;
const TINY: f32 = f32::MIN_POSITIVE;

/// The columns of the largest entries of rows of five, having checked that the ids and the mask
/// agree.
fn check_rows<const K: usize>(rows: &[([f32; 5], [i64; K])]) {
    let data: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
    for (name, device) in devices() {
        let logits = floats(&data, [rows.len(), 5], device);
        let ids =
            integer_values(top_k_ids(logits.clone(), Windows::All, K).expect("arguments that fit"));
        let mask = integer_values(top_k_mask(logits, K).expect("arguments that fit").int());
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
            let ids =
                integer_values(top_k_ids(logits(), Windows::All, k).expect("arguments that fit"));
            assert_eq!(ids, expected.repeat(2), "{name} k {k}");
            let mask = integer_values(top_k_mask(logits(), k).expect("arguments that fit").int());
            assert_eq!(mask, [1; 10], "{name} k {k}: mask");
        }
    }
}

fn a_single_column_is_always_taken() {
    for (name, device) in devices() {
        let logits = || floats(&[5.0, NAN, -INF], [3, 1], device);
        let ids = integer_values(top_k_ids(logits(), Windows::All, 1).expect("arguments that fit"));
        assert_eq!(ids, [0, 0, 0], "{name}");
        let ids = integer_values(top_k_ids(logits(), Windows::All, 2).expect("arguments that fit"));
        assert_eq!(ids, [0, -1, 0, -1, 0, -1], "{name}");
        let mask = integer_values(top_k_mask(logits(), 1).expect("arguments that fit").int());
        assert_eq!(mask, [1, 1, 1], "{name}: mask");
    }
}

fn no_rows_and_no_columns_give_empty_and_unused_slots() {
    for (name, device) in devices() {
        for (rows, columns) in [(0, 150), (3, 0), (0, 0)] {
            let what = format!("{name} [{rows}, {columns}]");
            let logits = || Tensor::<2>::zeros([rows, columns], (device, DType::F32));
            let bounds = || integers(&vec![0; rows], [rows], device);
            let ids = top_k_per_row(logits(), bounds(), bounds(), 4).expect("arguments that fit");
            assert_eq!((ids.dims(), ids.dtype()), ([rows, 4], DType::I32), "{what}");
            assert_eq!(integer_values(ids), vec![-1; rows * 4], "{what}");
            for order in [Order::Column, Order::Value] {
                let (best, ids) =
                    top_k(logits(), Windows::All, 4, order).expect("arguments that fit");
                assert_eq!(values(best), vec![-INF; rows * 4], "{what}");
                assert_eq!(integer_values(ids), vec![-1; rows * 4], "{what}");
            }
            assert_eq!(
                top_k_mask(logits(), 4).expect("arguments that fit").dims(),
                [rows, columns],
                "{what}"
            );
        }
    }
}

catalogue![
    the_largest_are_taken_and_the_lower_column_wins_among_equals,
    infinities_and_nan_rank_as_documented,
    numbers_below_the_normal_range_are_told_apart,
    a_row_of_k_columns_or_fewer_is_taken_whole,
    a_single_column_is_always_taken,
    no_rows_and_no_columns_give_empty_and_unused_slots,
];
