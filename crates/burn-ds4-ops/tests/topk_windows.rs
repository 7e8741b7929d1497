//! Windows of rows: bounds of any dtype and size, and the windows of the last tokens of sequences.

use super::common::{devices, floats, integer_values};
use super::distributions::{ALL_EQUAL, DISTRIBUTIONS, NORMAL, Random, rows};
use super::ranking::{Rows, assert_ids, int32, typed, window};
use burn::tensor::{Device, Int, IntDType, Tensor, TensorData};
use burn_ds4_ops::topk::{Windows, top_k_ids, top_k_per_row, top_k_per_row_decode};

const ROW: [f32; 10] = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0];

fn columns_are_relative_to_the_start_of_their_window() {
    let cases = [
        ((0, 10), [4, 5, 7, 8]),
        ((2, 7), [0, 2, 3, 4]),
        ((1, 6), [0, 1, 3, 4]),
        ((0, 5), [0, 1, 2, 4]),
        ((5, 10), [0, 2, 3, 4]),
        ((2, 6), [0, 1, 2, 3]),
        ((0, 3), [0, 1, 2, -1]),
        ((9, 10), [0, -1, -1, -1]),
        ((5, 5), [-1; 4]),
        ((7, 3), [-1; 4]),
        ((0, 0), [-1; 4]),
        ((10, 10), [-1; 4]),
        ((-5, 2), [0, 1, -1, -1]),
        ((-5, 10), [4, 5, 7, 8]),
        ((8, 99), [0, 1, -1, -1]),
        ((5, 99), [0, 2, 3, 4]),
        ((10, 12), [-1; 4]),
        ((99, 200), [-1; 4]),
        ((-9, -3), [-1; 4]),
        ((3, -1), [-1; 4]),
        ((99, 5), [-1; 4]),
        ((i32::MIN.into(), i32::MAX.into()), [4, 5, 7, 8]),
        ((i32::MAX.into(), i32::MIN.into()), [-1; 4]),
        ((i32::MIN.into(), i32::MIN.into()), [-1; 4]),
        ((i32::MAX.into(), i32::MAX.into()), [-1; 4]),
        ((5, i32::MAX.into()), [0, 2, 3, 4]),
        ((i32::MIN.into(), 5), [0, 1, 2, 4]),
    ];
    let count = cases.len();
    let starts: Vec<i64> = cases.iter().map(|case| case.0.0).collect();
    let ends: Vec<i64> = cases.iter().map(|case| case.0.1).collect();
    for (name, device) in devices() {
        for dtype in [IntDType::I32, IntDType::I64] {
            let logits = floats(&ROW.repeat(count), [count, 10], device);
            let bounds = |bounds: &[i64]| typed(bounds, [count], dtype, device);
            let ids = top_k_per_row(logits, bounds(&starts), bounds(&ends), 4)
                .expect("arguments that fit");
            let ids = integer_values(ids);
            assert_eq!(ids.len(), 4 * count, "{name} {dtype:?}");
            for (ids, (bounds, expected)) in ids.chunks(4).zip(&cases) {
                assert_eq!(ids, expected, "{name} {dtype:?} {bounds:?}");
            }
        }
    }
}

fn bounds_that_32_bits_do_not_hold_are_not_cut_off() {
    let wide = 1_i64 << 32;
    let cases = [
        ((0, wide + 3), [4, 5, 7, 8]),
        ((wide, wide + 10), [-1; 4]),
        ((-wide, 5), [0, 1, 2, 4]),
        ((-wide + 7, 10), [4, 5, 7, 8]),
        ((wide + 2, 10), [-1; 4]),
        ((2, -wide + 7), [-1; 4]),
        ((i64::MIN, i64::MAX), [4, 5, 7, 8]),
        ((i64::MAX, i64::MIN), [-1; 4]),
        ((2, i64::from(u32::MAX)), [2, 3, 5, 6]),
    ];
    let count = cases.len();
    let bounds = |end: bool, device: &Device| {
        let bounds = cases.map(|(bounds, _)| if end { bounds.1 } else { bounds.0 });
        typed(&bounds, [count], IntDType::I64, device)
    };
    for (name, device) in devices() {
        let logits = floats(&ROW.repeat(count), [count, 10], device);
        let ids = top_k_per_row(logits, bounds(false, device), bounds(true, device), 4)
            .expect("arguments that fit");
        let ids = integer_values(ids);
        assert_eq!(ids.len(), 4 * count, "{name}");
        for (ids, (bounds, expected)) in ids.chunks(4).zip(&cases) {
            assert_eq!(ids, expected, "{name} {bounds:?}");
        }
    }
}

fn bounds_may_be_of_any_integer_dtype() {
    let rows = Rows::new(300, rows(&[NORMAL], 300, 5));
    let narrow = [(0, 120), (3, 100), (50, 51), (60, 60), (70, 20)];
    let windows = narrow.map(|(start, end)| window(start, end, 300));
    let all = [
        IntDType::I64,
        IntDType::I32,
        IntDType::I16,
        IntDType::I8,
        IntDType::U64,
        IntDType::U32,
        IntDType::U16,
        IntDType::U8,
    ];
    for (name, device) in devices() {
        // No test of another operator needs the rarer ones either: what a device lacks, it lacks.
        for dtype in all
            .into_iter()
            .filter(|&dtype| device.supports_dtype(dtype))
        {
            let bounds = |bound: fn(&(i64, i64)) -> i64| {
                let bounds: Vec<i64> = narrow.iter().map(bound).collect();
                typed(&bounds, [5], dtype, device)
            };
            let logits = rows.tensor(5, device);
            let ids = top_k_per_row(logits, bounds(|w| w.0), bounds(|w| w.1), 16)
                .expect("arguments that fit");
            assert_ids(ids, &rows.ids(&windows, 16), &format!("{name} {dtype:?}"));
        }
    }
}

fn starts_and_ends_may_differ_in_dtype() {
    let rows = Rows::new(300, rows(&[NORMAL], 300, 13));
    let (starts, ends) = ([7, 0, 250, 299, 40], [290, 300, 251, 300, 20]);
    let windows: Vec<_> = (0..5).map(|i| window(starts[i], ends[i], 300)).collect();
    let dtypes = [IntDType::I32, IntDType::I64, IntDType::U32, IntDType::U64];
    for (name, device) in devices() {
        for start in dtypes {
            for end in dtypes.into_iter().filter(|&end| end != start) {
                let starts = typed(&starts, [5], start, device);
                let ends = typed(&ends, [5], end, device);
                let ids = top_k_per_row(rows.tensor(5, device), starts, ends, 16)
                    .expect("arguments that fit");
                let what = format!("{name} {start:?} {end:?}");
                assert_ids(ids, &rows.ids(&windows, 16), &what);
            }
        }
    }
}

fn unsigned_bounds_may_be_as_large_as_they_get() {
    let rows = Rows::new(300, rows(&[NORMAL], 300, 6));
    let windows = [window(7, 300, 300), window(300, 300, 300)];
    fn wide<E: burn::tensor::Element>(
        bounds: [E; 2],
        dtype: IntDType,
        device: &Device,
    ) -> Tensor<1, Int> {
        Tensor::from_data(
            TensorData::new(bounds.to_vec(), [2]),
            (device, dtype.into()),
        )
    }
    for (name, device) in devices() {
        let u64s = |bounds| wide::<u64>(bounds, IntDType::U64, device);
        let u32s = |bounds| wide::<u32>(bounds, IntDType::U32, device);
        let bounds = [
            (u64s([7, u64::MAX]), u64s([u64::MAX, u64::MAX])),
            (u32s([7, u32::MAX]), u32s([u32::MAX, u32::MAX])),
        ];
        for (starts, ends) in bounds {
            let what = format!("{name} {:?}", starts.dtype());
            let ids = top_k_per_row(rows.tensor(2, device), starts, ends, 16)
                .expect("arguments that fit");
            assert_ids(ids, &rows.ids(&windows, 16), &what);
        }
    }
}

fn windows_about_as_long_as_k_are_right_to_the_column() {
    let (columns, k) = (700, 64);
    let rows = Rows::new(columns, rows(DISTRIBUTIONS, columns, 7));
    for (name, device) in devices() {
        for start in [0, 1, 2, 3, 5, 333] {
            for length in [0, 1, k - 1, k, k + 1, k + 2, 2 * k] {
                let what = format!("{name} {start}..{}", start + length);
                let windows = vec![start..start + length; rows.distinct()];
                rows.check_windows(&windows, k, device, &what);
            }
        }
    }
}

fn long_rows_take_windows_of_any_length_and_place() {
    // About the sizes that may go another way: shared memory, vectors, rows that are split.
    let lengths = [
        1, 31, 99, 100, 101, 255, 1023, 1025, 2047, 2048, 2049, 4096, 4097, 8191, 8192, 8193,
        16_383, 16_385, 19_999, 20_000,
    ];
    let (columns, k) = (20_000, 100);
    let rows = Rows::new(columns, rows(&[NORMAL, ALL_EQUAL], columns, 8));
    let mut random = Random::new(9);
    let mut windows = Vec::new();
    for length in lengths {
        // Each with both rows.
        for start in [0, 1, columns - length, random.index(columns - length + 1)] {
            let window = window(start as u64, (start + length) as u64, columns);
            windows.extend([window.clone(), window]);
        }
    }
    for (name, device) in devices() {
        rows.check_windows(&windows, k, device, name);
        for pair in windows.chunks(2).step_by(7) {
            rows.check_windows(pair, k, device, &format!("{name} {pair:?} alone"));
        }
    }
}

/// The ends of the windows that lengths stand for.
fn ends_of(lengths: &[i64], next_n: usize) -> Vec<i128> {
    let ends = lengths.iter().flat_map(|&length| {
        (0..next_n).map(move |j| i128::from(length) - next_n as i128 + j as i128 + 1)
    });
    ends.collect()
}

fn lengths_of_sequences_give_each_of_their_last_tokens_a_window() {
    let columns = 130;
    let rows = Rows::new(columns, rows(DISTRIBUTIONS, columns, 10));
    // The padding of a batch has length -1.
    let lengths = [
        -1,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        29,
        30,
        31,
        32,
        36,
        128,
        129,
        130,
        131,
        134,
        135,
        136,
        140,
        -5,
        1 << 20,
        i64::from(i32::MAX),
        i64::from(i32::MIN),
    ];
    for (name, device) in devices() {
        for next_n in [1, 2, 5] {
            for dtype in [IntDType::I32, IntDType::I64] {
                let what = format!("{name} next_n {next_n} {dtype:?}");
                let ends = ends_of(&lengths, next_n);
                let windows: Vec<_> = ends.iter().map(|&end| window(0, end, columns)).collect();
                let expected = rows.ids(&windows, 30);
                let logits = || rows.tensor(ends.len(), device);
                let lengths = || typed(&lengths, [lengths.len()], dtype, device);
                let ids = top_k_per_row_decode(logits(), lengths(), next_n, 30)
                    .expect("arguments that fit");
                assert_ids(ids, &expected, &what);
                let lengths = lengths();
                let ids = top_k_ids(logits(), Windows::Lengths { lengths, next_n }, 30)
                    .expect("arguments that fit");
                assert_ids(ids, &expected, &format!("{what} as windows"));
            }
        }
    }
}

fn blocks_are_seen_from_their_last_token_on() {
    let columns = 130;
    let rows = Rows::new(columns, rows(DISTRIBUTIONS, columns, 14));
    let starts = [
        -7,
        -1,
        0,
        1,
        2,
        3,
        6,
        127,
        128,
        129,
        130,
        515,
        520,
        530,
        16_700,
        i64::from(i32::MAX),
        i64::from(i32::MIN),
    ];
    for (name, device) in devices() {
        for (ratio, next_n) in [(1, 1), (4, 1), (4, 3), (128, 5), (3, 2)] {
            for dtype in [IntDType::I32, IntDType::I64] {
                let ends = starts.iter().flat_map(|&start| {
                    let first = i128::from(start.max(0)) + 1;
                    (0..next_n as i128).map(move |j| (first + j) / ratio as i128)
                });
                let windows: Vec<_> = ends.map(|end| window(0, end, columns)).collect();
                let logits = rows.tensor(windows.len(), device);
                let windows_of = Windows::Blocks {
                    starts: typed(&starts, [starts.len()], dtype, device),
                    ratio,
                    next_n,
                };
                let ids = top_k_ids(logits, windows_of, 30).expect("arguments that fit");
                let what = format!("{name} ratio {ratio} next_n {next_n} {dtype:?}");
                assert_ids(ids, &rows.ids(&windows, 30), &what);
            }
        }
    }
}

fn lengths_that_32_bits_do_not_hold_are_not_cut_off() {
    let columns = 130;
    let rows = Rows::new(columns, rows(&[NORMAL], columns, 11));
    let lengths = [i64::MAX, i64::MIN, (1 << 32) + 20, -(1 << 32) + 20, 20];
    for (name, device) in devices() {
        let ends = ends_of(&lengths, 3);
        let windows: Vec<_> = ends.iter().map(|&end| window(0, end, columns)).collect();
        let logits = rows.tensor(ends.len(), device);
        let lengths = typed(&lengths, [lengths.len()], IntDType::I64, device);
        let ids = top_k_per_row_decode(logits, lengths, 3, 30).expect("arguments that fit");
        assert_ids(ids, &rows.ids(&windows, 30), name);
    }
}

fn an_end_for_each_token_is_taken_as_it_is() {
    let columns = 130;
    let rows = Rows::new(columns, rows(DISTRIBUTIONS, columns, 12));
    let ends = [
        i64::from(i32::MIN),
        -1,
        0,
        1,
        29,
        30,
        31,
        77,
        129,
        130,
        131,
        i64::from(i32::MAX),
    ];
    let windows = ends.map(|end| window(0, end, columns));
    for (name, device) in devices() {
        for (batch, next_n) in [(12, 1), (6, 2), (4, 3), (1, 12)] {
            let ends = int32(&ends, [batch, next_n], device);
            let ids = top_k_per_row_decode(rows.tensor(12, device), ends, next_n, 30)
                .expect("arguments that fit");
            let what = format!("{name} next_n {next_n}");
            assert_ids(ids, &rows.ids(&windows, 30), &what);
        }
    }
}

catalogue![
    columns_are_relative_to_the_start_of_their_window,
    bounds_that_32_bits_do_not_hold_are_not_cut_off,
    bounds_may_be_of_any_integer_dtype,
    starts_and_ends_may_differ_in_dtype,
    unsigned_bounds_may_be_as_large_as_they_get,
    windows_about_as_long_as_k_are_right_to_the_column,
    long_rows_take_windows_of_any_length_and_place,
    lengths_of_sequences_give_each_of_their_last_tokens_a_window,
    blocks_are_seen_from_their_last_token_on,
    lengths_that_32_bits_do_not_hold_are_not_cut_off,
    an_end_for_each_token_is_taken_as_it_is,
];
