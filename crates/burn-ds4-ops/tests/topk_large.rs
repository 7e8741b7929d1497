//! Top-k at the sizes that vLLM and FlagGems test, and at the limits; cut down where the device is
//! no GPU, and more where it emulates one: there, cubes that wait for each other take long.

use std::ops::Range;

use super::common::{self, compiles_slowly, sized};
use super::distributions::{
    ALL_EQUAL, ASCENDING, DESCENDING, DISTRIBUTIONS, Distribution, NORMAL, Random, TEN_LOW_BITS,
    row, rows,
};
use super::ranking::{Rows, assert_ids, int32, ranges, window};
use burn::tensor::{Int, Tensor};
use burn_ds4_ops::topk::{MAX_COLUMNS, MAX_K, Windows, top_k_ids, top_k_per_row_decode};

/// So many rows, of which no more than 37 are distinct: a power of two would hide that rows are
/// mixed up.
fn some(distribution: Distribution, columns: usize, count: usize, seed: u64) -> Rows {
    let kinds = vec![distribution; count.min(37)];
    Rows::new(columns, rows(&kinds, columns, seed))
}

/// `size`, or `smaller` on a software driver.
fn unless_slow<S>(name: &str, size: S, smaller: S) -> S {
    if compiles_slowly(name) { smaller } else { size }
}

/// What is put into the columns that a window leaves out. None of it may be seen.
const TAILS: [Option<f32>; 4] = [
    None,
    Some(f32::NEG_INFINITY),
    Some(f32::INFINITY),
    Some(f32::NAN),
];

/// The logits with `tail` in all columns from the end of each row's window on.
fn with_tail(logits: Tensor<2>, windows: &[Range<usize>], tail: Option<f32>) -> Tensor<2> {
    let Some(tail) = tail else {
        return logits;
    };
    let ([rows, columns], device) = (logits.dims(), logits.device());
    let ends: Vec<i64> = windows.iter().map(|window| window.end as i64).collect();
    let ends = int32(&ends, [rows, 1], &device).expand([rows, columns]);
    let column = Tensor::<1, Int>::arange(0..columns as i64, (&device, ends.dtype()));
    let column = column.reshape([1, columns]).expand([rows, columns]);
    logits.mask_fill(column.greater_equal(ends), tail)
}

fn the_causal_rows_of_a_prefill() {
    type Size = (&'static [usize], [usize; 2]);
    let on_gpu: Size = (&[1, 32, 2050, 3010], [2048, 3000]);
    let elsewhere: Size = (&[10, 514], [500, 512]);
    sized(on_gpu, elsewhere, |name, device, (lengths, ks)| {
        for &length in lengths {
            // Row by row, as many columns as there are rows so far.
            let windows: Vec<_> = (1..=length).map(|end| 0..end).collect();
            for distribution in [NORMAL, TEN_LOW_BITS] {
                let rows = some(distribution, length, length, 51);
                for k in ks {
                    let expected = rows.ids(&windows, k);
                    for tail in TAILS {
                        let logits = with_tail(rows.tensor(length, device), &windows, tail);
                        let ids = top_k_ids(logits, ranges(&windows, device), k)
                            .expect("arguments that fit");
                        let what = format!("{name} {} {length} k {k} {tail:?}", distribution.0);
                        assert_ids(ids, &expected, &what);
                    }
                }
            }
        }
    });
}

fn a_decode_step_of_many_sequences() {
    let batches: [&[usize]; 2] = [&[1, 32, 2050], &[1, 3]];
    sized(batches[0], batches[1], |name, device, batches| {
        let columns = 20_000;
        for &batch in batches {
            // Where it takes long, rows of both kernels.
            for &next_n in common::some(name, &[8, 1], 2) {
                let count = batch * next_n;
                let mut random = Random::new(52);
                let lengths: Vec<i64> = (0..batch)
                    .map(|_| 1 + random.index(columns) as i64)
                    .collect();
                let windows: Vec<_> = (0..count)
                    .map(|row| {
                        let end = lengths[row / next_n] + (row % next_n) as i64 + 1;
                        window(0, end - next_n as i64, columns)
                    })
                    .collect();
                for distribution in [NORMAL, TEN_LOW_BITS] {
                    let rows = some(distribution, columns, count, 53);
                    for &k in common::some(name, &[2048, 3000], 2) {
                        let expected = rows.ids(&windows, k);
                        for tail in [None, Some(f32::NEG_INFINITY)] {
                            let logits = with_tail(rows.tensor(count, device), &windows, tail);
                            let lengths = int32(&lengths, [batch], device);
                            let ids = top_k_per_row_decode(logits, lengths, next_n, k)
                                .expect("arguments that fit");
                            let what = format!(
                                "{name} {} {batch} x {next_n} k {k} {tail:?}",
                                distribution.0
                            );
                            assert_ids(ids, &expected, &what);
                        }
                    }
                }
            }
        }
    });
}

fn a_decode_step_over_a_long_text() {
    sized(4, 1, |name, device, batch| {
        let columns = unless_slow(name, 300_000, 100_000);
        let (next_n, k) = (2, 2048);
        let rows = some(NORMAL, columns, batch * next_n, 54);
        let longest = columns as i64 - 999;
        let lengths: Vec<i64> = (0..batch as i64).map(|b| longest - b * 70_000).collect();
        let windows: Vec<_> = (0..batch * next_n)
            .map(|row| window(0, lengths[row / 2] - 1 + (row % 2) as i64, columns))
            .collect();
        let logits = rows.tensor(batch * next_n, device);
        let ids = top_k_per_row_decode(logits, int32(&lengths, [batch], device), next_n, k)
            .expect("arguments that fit");
        assert_ids(ids, &rows.ids(&windows, k), name);
    });
}

fn a_whole_vocabulary() {
    let counts: [&[usize]; 2] = [&[1, 32, 64, 2048], &[1, 5]];
    sized(counts[0], counts[1], |name, device, counts| {
        for &count in unless_slow(name, counts, &[2]) {
            for distribution in [NORMAL, TEN_LOW_BITS] {
                let rows = some(distribution, 129_280, count, 55);
                let what = format!("{name} {} {count} rows", distribution.0);
                rows.check(count, 1024, device, &what);
            }
        }
    });
}

fn widths_one_above_and_below_a_power_of_two() {
    let counts: [&[usize]; 2] = [&[4, 16_383], &[4, 131]];
    sized(counts[0], counts[1], |name, device, counts| {
        for &count in counts {
            for columns in [4095, 8193] {
                let rows = some(NORMAL, columns, count, 56);
                rows.check(count, 512, device, &format!("{name} [{count}, {columns}]"));
            }
        }
    });
}

fn windows_that_start_and_end_anywhere() {
    sized(500, 12, |name, device, count| {
        let columns = 50_000;
        let rows = some(NORMAL, columns, count, 57);
        let mut random = Random::new(58);
        let windows: Vec<_> = (0..count)
            .map(|_| {
                let start = random.index(columns / 2);
                let end = start + random.index(columns);
                window(start as u64, end as u64, columns)
            })
            .collect();
        rows.check_windows(&windows, 1024, device, name);
    });
}

fn more_wanted_than_there_are() {
    sized(2048, 32, |name, device, count| {
        some(NORMAL, 257, count, 59).check(count, 512, device, name);
    });
}

fn rows_far_apart() {
    type Size = &'static [(usize, usize, usize)];
    // Rows, their distance, and the columns that count.
    let on_gpu: Size = &[
        (600, 8456, 8193),
        (2050, 65_536, 50_001),
        (64, 1 << 20, 200_003),
    ];
    let elsewhere: Size = &[(40, 8456, 8193), (6, 65_536, 50_001), (2, 1 << 20, 200_003)];
    // More rows than are divided into segments, and fewer.
    let slow: Size = &[(17, 8456, 8193), (2, 1 << 18, 200_003)];
    sized(on_gpu, elsewhere, |name, device, sizes| {
        for &(count, stride, columns) in unless_slow(name, sizes, slow) {
            let wide = some(NORMAL, stride, count, 60);
            let logits = wide.tensor(count, device).slice([0..count, 0..columns]);
            let windows = vec![0..columns; count];
            let ids = top_k_ids(logits, Windows::All, 2048).expect("arguments that fit");
            let what = format!("{name} [{count}, {columns}] of {stride}");
            assert_ids(ids, &wide.ids(&windows, 2048), &what);
        }
    });
}

fn the_largest_k() {
    let counts: [&[usize]; 2] = [&[1, 3, 300], &[1, 3]];
    sized(counts[0], counts[1], |name, device, counts| {
        let kinds = [NORMAL, TEN_LOW_BITS, ASCENDING];
        let rows = Rows::new(100_000, rows(&kinds, 100_000, 61));
        for &count in counts {
            rows.check(count, MAX_K, device, &format!("{name} {count} rows"));
        }
    });
}

fn more_candidates_than_any_buffer_holds() {
    sized(1 << 20, 1 << 18, |name, device, columns| {
        let columns = unless_slow(name, columns, 1 << 16);
        let mut data = Vec::new();
        let powers = (13..20).map(|shift| 1 << shift);
        let candidates: Vec<usize> = powers.filter(|&count| count <= columns / 2).collect();
        for &equal in &candidates {
            // Equal to the k-th largest and spread evenly, with few that are larger.
            let step = columns / equal;
            data.extend((0..columns).map(|column| match column {
                _ if column % 4099 == 1 => 2.0,
                _ if column % step == 0 => 1.0,
                _ => -1.0,
            }));
        }
        let rows = Rows::new(columns, data);
        for k in [512, 2048] {
            let what = format!("{name} k {k}, {candidates:?} candidates");
            rows.check(rows.distinct(), k, device, &what);
        }
    });
}

fn rows_of_a_million_columns_and_more() {
    type Size = (&'static [usize], &'static [Distribution]);
    let on_gpu: Size = (&[1 << 20, MAX_COLUMNS], DISTRIBUTIONS);
    let elsewhere: Size = (&[1 << 20], &[NORMAL, TEN_LOW_BITS, ALL_EQUAL, DESCENDING]);
    sized(on_gpu, elsewhere, |name, device, (sizes, kinds)| {
        for &columns in sizes {
            let kinds: Vec<_> = kinds.iter().enumerate().collect();
            for &(seed, &kind) in common::some(name, &kinds, 2) {
                let rows = Rows::new(columns, row(kind, columns, seed as u64));
                let what = format!("{name} {} {columns} columns", kind.0);
                rows.check(1, 2048, device, &what);
            }
        }
    });
}

fn several_rows_of_a_million_columns() {
    sized(64, 3, |name, device, count| {
        // A software driver has one row of a million in the test above.
        let columns = unless_slow(name, 1 << 20, 1 << 18);
        let kinds = [NORMAL, ALL_EQUAL, TEN_LOW_BITS];
        let rows = Rows::new(columns, rows(&kinds, columns, 62));
        rows.check(count, 2048, device, name);
        let windows: Vec<_> = (0..count)
            .map(|row| row * 9973 + 1..columns - row * 4999)
            .collect();
        rows.check_windows(&windows, 2048, device, &format!("{name} in windows"));
    });
}

catalogue![
    the_causal_rows_of_a_prefill,
    a_decode_step_of_many_sequences,
    a_decode_step_over_a_long_text,
    a_whole_vocabulary,
    widths_one_above_and_below_a_power_of_two,
    windows_that_start_and_end_anywhere,
    more_wanted_than_there_are,
    rows_far_apart,
    the_largest_k,
    more_candidates_than_any_buffer_holds,
    rows_of_a_million_columns_and_more,
    several_rows_of_a_million_columns,
];
