//! Top-k of long rows against a sort, with ties by design.

use super::common::{devices, floats, integer_values, noise};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::{
    attention::MASKED,
    topk::{top_k_columns, top_k_mask},
};
use proptest::prelude::*;

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

fn flex() -> &'static Device {
    &devices()[0].1
}

/// The first `k` columns by (value descending, column ascending), ascending; special values as documented.
fn oracle(row: &[f32], k: usize) -> Vec<i64> {
    let key = |column: usize| match row[column] {
        v if v.is_nan() => f32::MIN,
        v => v.clamp(f32::MIN, f32::MAX),
    };
    let mut columns: Vec<usize> = (0..row.len()).collect();
    columns.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap().then(a.cmp(&b)));
    columns.truncate(k);
    columns.sort_unstable();
    columns.into_iter().map(|column| column as i64).collect()
}

/// What both operators give, by row, having checked that they agree.
fn picked(scores: &[f32], columns: usize, k: usize, device: &Device, what: &str) -> Vec<Vec<i64>> {
    let scores = floats(scores, [scores.len() / columns, columns], device);
    let mask = integer_values(top_k_mask(scores.clone(), k).int());
    let marked: Vec<Vec<i64>> = mask
        .chunks(columns)
        .map(|row| {
            (0..columns as i64)
                .filter(|&c| row[c as usize] == 1)
                .collect()
        })
        .collect();
    if k <= columns {
        let listed = integer_values(top_k_columns(scores, k));
        let listed: Vec<Vec<i64>> = listed.chunks(k).map(<[i64]>::to_vec).collect();
        assert_eq!(listed, marked, "{what}: columns and mask");
    }
    marked
}

#[track_caller]
fn check(scores: &[f32], columns: usize, k: usize, (name, device): &(String, Device)) {
    let what = format!("{name} columns {columns} k {k}");
    let expected: Vec<Vec<i64>> = scores.chunks(columns).map(|row| oracle(row, k)).collect();
    let actual = picked(scores, columns, k, device, &what);
    for (row, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        assert_eq!(actual, expected, "{what} row {row}");
    }
}

fn the_largest_are_marked_and_the_lower_column_wins_among_equals() {
    let rows = [
        ([1.0, 9.0, 3.0, 7.0, 5.0], [1, 3]),
        ([2.0, 2.0, 2.0, 2.0, 2.0], [0, 1]),
        ([1.0, 4.0, 4.0, 9.0, 4.0], [1, 3]),
        ([4.0, 1.0, 9.0, 4.0, 4.0], [0, 2]),
        ([0.0, -0.0, 0.0, -0.0, -1.0], [0, 1]),
        ([-1.0, -0.0, 0.0, -0.0, 0.0], [1, 2]),
        ([MASKED, MASKED, -3.0, MASKED, MASKED], [0, 2]),
        ([-5.0, -4.0, -3.0, -2.0, -1.0], [3, 4]),
    ];
    let scores: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
    for (name, device) in devices() {
        let actual = picked(&scores, 5, 2, device, name);
        for (actual, (row, expected)) in actual.iter().zip(&rows) {
            assert_eq!(actual, expected, "{name}: {row:?}");
        }
    }
}

fn special_values_rank_as_documented_and_no_mark_is_lost() {
    let rows = [
        ([NAN, 1.0, NAN, 2.0, 0.0], [1, 3, 4]),
        ([NAN, NAN, NAN, NAN, NAN], [0, 1, 2]),
        ([NAN, 1.0, NAN, NAN, 2.0], [0, 1, 4]),
        ([-INF, -INF, -INF, -INF, -INF], [0, 1, 2]),
        ([-INF, NAN, -INF, 5.0, NAN], [0, 1, 3]),
        ([INF, NAN, INF, 5.0, INF], [0, 2, 4]),
        ([1.0, INF, -INF, f32::MAX, NAN], [0, 1, 3]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [2, 3, 4]),
    ];
    let scores: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
    for (name, device) in devices() {
        let actual = picked(&scores, 5, 3, device, name);
        for (actual, (row, expected)) in actual.iter().zip(&rows) {
            assert_eq!(actual, expected, "{name}: {row:?}");
        }
    }
}

fn special_values_lose_no_mark_where_the_row_is_sorted_either() {
    let special = [NAN, INF, -INF, 0.0, -0.0, 1.0, MASKED, f32::MIN, f32::MAX];
    let scores: Vec<f32> = noise(4 * 150, 3)
        .iter()
        .map(|v| special[((v + 1.0) * 4.5) as usize % 9])
        .chain([NAN; 150])
        .collect();
    for device in devices() {
        check(&scores, 150, 65, device);
    }
}

/// Rows of many ties, of few, and of masked tails as a causal mask leaves them.
fn mixed_rows(rows: usize, columns: usize) -> Vec<f32> {
    let noise = noise(rows * columns, 11);
    noise
        .iter()
        .enumerate()
        .map(|(i, &v)| match (i / columns) % 3 {
            0 => (v * 3.0).round(),
            1 => v,
            _ if i % columns > i / columns => MASKED,
            _ => v * 100.0,
        })
        .collect()
}

fn both_ways_to_find_the_threshold_agree_with_a_sort() {
    // 64 is the last k that is searched, 65 the first that is sorted.
    let scores = mixed_rows(12, 150);
    for k in [1, 64, 65] {
        for device in devices() {
            check(&scores, 150, k, device);
        }
    }
}

fn everything_is_marked_where_k_reaches_the_number_of_columns() {
    let scores = [3.0, NAN, -INF, 3.0, MASKED, 0.0];
    for (name, device) in devices() {
        let all = |k| integer_values(top_k_mask(floats(&scores, [2, 3], device), k).int());
        assert_eq!((all(3), all(99)), (vec![1; 6], vec![1; 6]), "{name}");
        let columns = top_k_columns(floats(&scores, [2, 3], device), 3);
        assert_eq!(integer_values(columns), [0, 1, 2, 0, 1, 2], "{name}");
    }
}

fn a_single_column_is_always_taken() {
    for (name, device) in devices() {
        let rows = picked(&[5.0, NAN, -INF], 1, 1, device, name);
        assert_eq!(rows, [[0], [0], [0]], "{name}");
    }
}

fn no_rows_give_no_rows() {
    for (name, device) in devices() {
        for k in [2, 65] {
            let none = || Tensor::<2>::zeros([0, 150], device);
            assert_eq!(top_k_mask(none(), k).dims(), [0, 150], "{name}");
            assert_eq!(top_k_columns(none(), k).dims(), [0, k], "{name}");
        }
    }
}

fn two_runs_give_the_same_columns() {
    let scores = mixed_rows(12, 150);
    for (name, device) in devices() {
        let run = || picked(&scores, 150, 64, device, name);
        assert_eq!(run(), run(), "{name}");
    }
}

#[test]
#[should_panic(expected = "top_k_mask: k must be at least 1")]
fn top_k_mask_refuses_a_k_of_zero() {
    top_k_mask(Tensor::zeros([1, 4], flex()), 0);
}

#[test]
#[should_panic(expected = "top_k_columns: k must be in 1..=4 (the number of columns), got 5")]
fn top_k_columns_refuses_more_columns_than_there_are() {
    top_k_columns(Tensor::zeros([1, 4], flex()), 5);
}

/// Few values, so that ties abound, with now and then one of its own.
fn element() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => prop::sample::select(vec![-1.0_f32, -0.0, 0.0, 1.0, 2.0]),
        2 => Just(MASKED),
        2 => -3.0_f32..3.0,
        1 => prop::sample::select(vec![NAN, INF, -INF, f32::MIN, f32::MAX]),
    ]
}

/// `(scores, columns)` of one to three rows.
fn rows() -> impl Strategy<Value = (Vec<f32>, usize)> {
    (1..200_usize, 1..4_usize).prop_flat_map(|(columns, rows)| {
        let count = rows * columns;
        (prop::collection::vec(element(), count), Just(columns))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    // On the first device only: every other shape is another kernel to build on a GPU.
    #[test]
    fn any_rows_agree_with_a_sort((scores, columns) in rows(), k in 1..220_usize) {
        check(&scores, columns, k, &devices()[0]);
    }
}

catalogue![
    the_largest_are_marked_and_the_lower_column_wins_among_equals,
    special_values_rank_as_documented_and_no_mark_is_lost,
    special_values_lose_no_mark_where_the_row_is_sorted_either,
    both_ways_to_find_the_threshold_agree_with_a_sort,
    everything_is_marked_where_k_reaches_the_number_of_columns,
    a_single_column_is_always_taken,
    no_rows_give_no_rows,
    two_runs_give_the_same_columns,
];
