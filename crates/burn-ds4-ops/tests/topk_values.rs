//! The values that come with the columns of top-k, in either order.

use super::common::{devices, floats, integer_values, integers, values};
use super::distributions::{DISTRIBUTIONS, NORMAL, Random, TEN_LOW_BITS, rows};
use super::ranking::{Rows, ranges, window};
use burn::tensor::{DType, Device};
use burn_ds4_ops::{
    attention::MASKED,
    topk::{Order, Windows, top_k},
};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// Bits, because signs of zeros count; the bits of a NaN do not.
fn bits(values: &[f32]) -> Vec<u32> {
    let bits = |v: &f32| if v.is_nan() { NAN } else { *v }.to_bits();
    values.iter().map(bits).collect()
}

fn values_come_with_their_columns_in_either_order() {
    type Sorted = (&'static [f32], &'static [i64]);
    let cases: [([f32; 5], Sorted, Sorted); 6] = [
        (
            [1.0, 9.0, 7.0, 5.0, 7.0],
            (&[9.0, 7.0, 5.0, 7.0], &[1, 2, 3, 4]),
            (&[9.0, 7.0, 7.0, 5.0], &[1, 2, 4, 3]),
        ),
        (
            [2.0; 5],
            (&[2.0; 4], &[0, 1, 2, 3]),
            (&[2.0; 4], &[0, 1, 2, 3]),
        ),
        (
            [-0.0, -1.0, 0.0, -0.0, 0.0],
            (&[-0.0, 0.0, -0.0, 0.0], &[0, 2, 3, 4]),
            (&[-0.0, 0.0, -0.0, 0.0], &[0, 2, 3, 4]),
        ),
        (
            [NAN, 1.0, -INF, 2.0, NAN],
            (&[NAN, 1.0, -INF, 2.0], &[0, 1, 2, 3]),
            (&[2.0, 1.0, NAN, -INF], &[3, 1, 0, 2]),
        ),
        (
            [-INF, NAN, INF, f32::MIN, INF],
            (&[-INF, INF, f32::MIN, INF], &[0, 2, 3, 4]),
            (&[INF, INF, f32::MIN, -INF], &[2, 4, 3, 0]),
        ),
        (
            [MASKED, 3.0, MASKED, 4.0, MASKED],
            (&[MASKED, 3.0, MASKED, 4.0], &[0, 1, 2, 3]),
            (&[4.0, 3.0, MASKED, MASKED], &[3, 1, 0, 2]),
        ),
    ];
    let data: Vec<f32> = cases.iter().flat_map(|case| case.0).collect();
    for (name, device) in devices() {
        for order in [Order::Column, Order::Value] {
            let logits = floats(&data, [cases.len(), 5], device);
            let (best, ids) = top_k(logits, Windows::All, 4, order).expect("arguments that fit");
            assert_eq!((best.dtype(), ids.dtype()), (DType::F32, DType::I32));
            let (best, ids) = (values(best), integer_values(ids));
            assert_eq!((best.len(), ids.len()), (4 * cases.len(), 4 * cases.len()));
            let results = best.chunks(4).zip(ids.chunks(4));
            for ((best, ids), (row, by_column, by_value)) in results.zip(&cases) {
                let (expected, columns) = match order {
                    Order::Column => by_column,
                    Order::Value => by_value,
                };
                let what = format!("{name} {order:?}: {row:?}");
                assert_eq!(ids, *columns, "{what}");
                assert_eq!(bits(best), bits(expected), "{what}: {best:?}");
            }
        }
    }
}

fn unused_slots_come_last_in_either_order() {
    // Windows of three and of one column, one that begins after the last, one of NaN and -inf, and
    // most of the row.
    let row = [2.0, -INF, 5.0, NAN, 1.0, 3.0];
    let (starts, ends) = ([0, 5, 6, 1, 0], [3, 9, 9, 4, 5]);
    let by_column = (
        [
            [2.0, -INF, 5.0, -INF],
            [3.0, -INF, -INF, -INF],
            [-INF; 4],
            [-INF, 5.0, NAN, -INF],
            [2.0, -INF, 5.0, 1.0],
        ],
        [
            [0, 1, 2, -1],
            [0, -1, -1, -1],
            [-1; 4],
            [0, 1, 2, -1],
            [0, 1, 2, 4],
        ],
    );
    let by_value = (
        [
            [5.0, 2.0, -INF, -INF],
            [3.0, -INF, -INF, -INF],
            [-INF; 4],
            [5.0, -INF, NAN, -INF],
            [5.0, 2.0, 1.0, -INF],
        ],
        [
            [2, 0, 1, -1],
            [0, -1, -1, -1],
            [-1; 4],
            [1, 0, 2, -1],
            [2, 0, 4, 1],
        ],
    );
    for (name, device) in devices() {
        for (order, expected) in [(Order::Column, &by_column), (Order::Value, &by_value)] {
            let logits = floats(&row.repeat(5), [5, 6], device);
            let windows = Windows::Ranges {
                starts: integers(&starts, [5], device),
                ends: integers(&ends, [5], device),
            };
            let (best, ids) = top_k(logits, windows, 4, order).expect("arguments that fit");
            assert_eq!(
                integer_values(ids),
                expected.1.as_flattened(),
                "{name} {order:?}"
            );
            let best = values(best);
            let what = format!("{name} {order:?}: {best:?}");
            assert_eq!(bits(&best), bits(expected.0.as_flattened()), "{what}");
        }
    }
}

/// Values in f32 and columns, in either order.
fn check_values(rows: &Rows, count: usize, k: usize, device: &Device, what: &str) {
    let mut random = Random::new(29);
    let columns = rows.columns;
    let windows: Vec<_> = (0..count)
        .map(|_| {
            let start = random.index(columns);
            let end = start + random.index(columns);
            window(start as u64, end as u64, columns)
        })
        .collect();
    for order in [Order::Column, Order::Value] {
        let logits = rows.tensor(count, device);
        let (best, ids) =
            top_k(logits, ranges(&windows, device), k, order).expect("arguments that fit");
        let (best, ids) = (values(best), integer_values(ids));
        for (row, window) in windows.iter().enumerate() {
            let what = format!("{what} {order:?} row {row}");
            let mut expected = rows.ranking(row).best(window, k);
            if order == Order::Column {
                expected.sort_unstable();
            }
            let used = expected.len();
            let slots = row * k..(row + 1) * k;
            let (best, ids) = (&best[slots.clone()], &ids[slots]);
            assert_eq!(ids[..used], expected, "{what}");
            assert!(ids[used..].iter().all(|&id| id == -1), "{what}");
            for (slot, &value) in best.iter().enumerate() {
                let expected = match expected.get(slot) {
                    Some(&id) => rows.row(row)[window.start + id as usize],
                    None => f32::NEG_INFINITY,
                };
                let same = value.to_bits() == expected.to_bits();
                assert!(
                    same || value.is_nan() && expected.is_nan(),
                    "{what} slot {slot}: {value:e} is not {expected:e}"
                );
            }
        }
    }
}

fn values_of_hard_rows_in_either_order() {
    for (name, device) in devices() {
        for (columns, k) in [(700, 64), (700, 300), (6000, 64)] {
            let rows = Rows::new(columns, rows(DISTRIBUTIONS, columns, 21));
            let what = format!("{name} {columns} columns, k {k}");
            check_values(&rows, rows.distinct(), k, device, &what);
        }
        let few = Rows::new(9000, rows(&[NORMAL, TEN_LOW_BITS], 9000, 30));
        check_values(&few, 2, 2048, device, &format!("{name} k 2048"));
    }
}

catalogue![
    values_come_with_their_columns_in_either_order,
    unused_slots_come_last_in_either_order,
    values_of_hard_rows_in_either_order,
];
