//! Top-k of rows that are hard on a selection, at sizes that choose between the ways there are to
//! select.

use super::common::{devices, integer_values, some, values};
use super::distributions::{
    ASCENDING, DISTRIBUTIONS, NORMAL, Periodic, Random, TEN_LOW_BITS, row, rows,
};
use super::ranking::{Rows, ranges, window};
use burn_ds4_ops::topk::{MAX_K, Order, Windows, top_k, top_k_ids, top_k_mask};

/// `(columns, k)` of rows that fit in shared memory, that do on large devices only, and that never
/// do; the last are longer than what is put in order at once on small devices, with few enough
/// candidates for their shared memory.
const SHAPES: [(usize, usize); 5] = [
    (1500, 64),
    (6000, 512),
    (20_000, 512),
    (20_000, 2048),
    (40_000, 200),
];

fn hard_rows(columns: usize) -> Rows {
    Rows::new(columns, rows(DISTRIBUTIONS, columns, 21))
}

fn hard_rows_together() {
    for (columns, k) in SHAPES {
        let rows = hard_rows(columns);
        for (name, device) in devices() {
            let what = format!("{name} {columns} columns, k {k}");
            rows.check(rows.distinct(), k, device, &what);
        }
    }
}

fn hard_rows_one_at_a_time() {
    for (columns, k) in SHAPES {
        for &distribution in DISTRIBUTIONS {
            let rows = Rows::new(columns, row(distribution, columns, 22));
            for (name, device) in devices() {
                let what = format!("{name} {} {columns} columns, k {k}", distribution.0);
                rows.check(1, k, device, &what);
            }
        }
    }
}

fn hard_rows_by_the_hundred() {
    let (columns, k) = (10_000, 512);
    let rows = hard_rows(columns);
    for (name, device) in devices() {
        for count in [65, 200] {
            rows.check(count, k, device, &format!("{name} {count} rows"));
        }
    }
}

fn hard_rows_within_windows() {
    for (columns, k) in [(6000, 64), (20_000, 512)] {
        let rows = hard_rows(columns);
        let mut random = Random::new(23);
        for round in 0..3 {
            let windows: Vec<_> = (0..rows.distinct())
                .map(|_| {
                    let start = random.index(columns / 3);
                    let end = start + random.index(columns);
                    window(start as u64, end as u64, columns)
                })
                .collect();
            for (name, device) in devices() {
                let what = format!("{name} {columns} columns, k {k}, round {round}");
                rows.check_windows(&windows, k, device, &what);
            }
        }
    }
}

/// A sample that keeps the period of one of these sees nothing but large values, or none.
fn periods(columns: usize) -> Vec<Periodic> {
    let mut periods = Vec::new();
    for run in [1, 4, 32] {
        for times in [2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 1024] {
            let last = (times - 1) * run;
            for (phase, inverse) in [(0, false), (0, true), (last, false), (run, true)] {
                periods.push(Periodic {
                    period: times * run,
                    phase,
                    run,
                    inverse,
                });
            }
        }
    }
    // Runs at even distances over the row, at multiples of a vector.
    for groups in [8, 16, 32, 64, 128, 256, 512] {
        let period = columns / 4 / groups * 4;
        for run in [4, 32, 128].into_iter().filter(|run| 2 * run < period) {
            for inverse in [false, true] {
                periods.push(Periodic {
                    period,
                    phase: 0,
                    run,
                    inverse,
                });
            }
        }
    }
    periods
}

fn periods_that_a_sample_may_follow() {
    let columns = 20_000;
    let mut random = Random::new(24);
    let periods = periods(columns);
    let data = periods
        .iter()
        .flat_map(|periodic| periodic.row(columns, &mut random));
    let data = data.collect();
    let all = Rows::new(columns, data);
    let numbers: Vec<usize> = (0..periods.len()).step_by(5).collect();
    for (name, device) in devices() {
        for &k in some(name, &[512, 2048], 2) {
            all.check(all.distinct(), k, device, &format!("{name} k {k}"));
        }
        for &row in some(name, &numbers, 5) {
            let alone = Rows::new(columns, all.row(row).to_vec());
            let periodic = &periods[row];
            alone.check(1, 512, device, &format!("{name} {periodic:?} alone"));
        }
    }
}

/// So many entries are equal to the k-th largest, with `above` larger ones among them and all
/// others smaller.
fn tied(columns: usize, equal: usize, above: usize, random: &mut Random) -> Vec<f32> {
    let mut row: Vec<f32> = (0..columns)
        .map(|rank| match rank {
            _ if rank < above => 2.0 + random.unit(),
            _ if rank < above + equal => 1.0,
            _ => random.unit() * 0.999,
        })
        .collect();
    for column in (1..columns).rev() {
        row.swap(column, random.index(column + 1));
    }
    row
}

fn ties_of_any_number_at_the_last_place() {
    let (columns, k) = (40_000, 512);
    let mut random = Random::new(25);
    let mut data = Vec::new();
    for above in [0, 1, 300, 511] {
        for equal in [
            512 - above,
            513 - above,
            1000,
            2047,
            2600,
            3072,
            3073,
            4097,
            8192,
            20_000,
            39_000,
        ] {
            data.extend(tied(columns, equal, above, &mut random));
        }
    }
    let rows = Rows::new(columns, data);
    for (name, device) in devices() {
        rows.check(rows.distinct(), k, device, name);
        for row in [0, 10, 21, 30, 43] {
            let alone = Rows::new(columns, rows.row(row).to_vec());
            alone.check(1, k, device, &format!("{name} row {row} alone"));
        }
    }
}

fn any_k_up_to_the_limit() {
    let numbers = [
        1, 2, 3, 31, 33, 100, 511, 1000, 1024, 1025, 2047, 3000, 4095, MAX_K,
    ];
    // One kernel takes rows of 8000 columns whatever `k` is; those of longer rows are made for it.
    for (columns, step) in [(8000, 1), (9000, 4)] {
        let rows = Rows::new(
            columns,
            rows(&[NORMAL, TEN_LOW_BITS, ASCENDING], columns, 26),
        );
        for (name, device) in devices() {
            for &k in some(name, &numbers, step) {
                rows.check(3, k, device, &format!("{name} {columns} columns, k {k}"));
            }
        }
    }
}

fn any_number_of_columns() {
    let numbers = [
        2, 33, 255, 1024, 2047, 2048, 2049, 4095, 4097, 8191, 8192, 8193, 16_385,
    ];
    for (name, device) in devices() {
        for &columns in some(name, &numbers, 2) {
            let rows = Rows::new(
                columns,
                rows(&[NORMAL, TEN_LOW_BITS, ASCENDING], columns, 27),
            );
            rows.check(3, 100, device, &format!("{name} {columns} columns"));
        }
    }
}

fn more_rows_than_a_grid_is_wide() {
    let rows = Rows::new(7, rows(DISTRIBUTIONS, 7, 28));
    for (name, device) in devices() {
        // Vulkan and CUDA both stop at 65,535 in some direction.
        rows.check(70_001, 3, device, name);
    }
}

fn the_mask_marks_what_is_taken() {
    for (columns, k) in [(1500, 64), (6000, 512)] {
        let rows = hard_rows(columns);
        let count = rows.distinct();
        for (name, device) in devices() {
            let mask = integer_values(
                top_k_mask(rows.tensor(count, device), k)
                    .expect("arguments that fit")
                    .int(),
            );
            assert_eq!(mask.len(), count * columns);
            for (row, mask) in mask.chunks(columns).enumerate() {
                let marked = (0..columns).filter(|&c| mask[c] == 1).map(|c| c as i64);
                let marked: Vec<i64> = marked.collect();
                let expected = rows.ranking(row).ids(&(0..columns), k);
                assert_eq!(marked, expected, "{name} {} k {k}", DISTRIBUTIONS[row].0);
            }
        }
    }
}

fn every_device_gives_the_same_every_time_and_leaves_the_logits_alone() {
    for (columns, k) in [(1500, 64), (20_000, 512)] {
        let rows = hard_rows(columns);
        let count = rows.distinct();
        let first = &devices()[0].1;
        let reference = integer_values(
            top_k_ids(rows.tensor(count, first), Windows::All, k).expect("arguments that fit"),
        );
        // What is outside of a window is not to be touched either.
        let mut random = Random::new(31);
        let windows: Vec<_> = (0..count)
            .map(|_| {
                let start = random.index(columns);
                start..start + random.index(columns - start)
            })
            .collect();
        for (name, device) in devices() {
            let logits = rows.tensor(count, device);
            let before: Vec<u32> = values(logits.clone()).iter().map(|v| v.to_bits()).collect();
            for run in 0..3 {
                let ids = integer_values(
                    top_k_ids(logits.clone(), Windows::All, k).expect("arguments that fit"),
                );
                assert!(ids == reference, "{name} {columns} columns, run {run}");
                top_k_ids(logits.clone(), ranges(&windows, device), k).expect("arguments that fit");
                top_k(logits.clone(), ranges(&windows, device), k, Order::Value)
                    .expect("arguments that fit");
            }
            let after: Vec<u32> = values(logits).iter().map(|v| v.to_bits()).collect();
            assert!(before == after, "{name} {columns} columns: logits changed");
        }
    }
}

catalogue![
    hard_rows_together,
    hard_rows_one_at_a_time,
    hard_rows_by_the_hundred,
    hard_rows_within_windows,
    periods_that_a_sample_may_follow,
    ties_of_any_number_at_the_last_place,
    any_k_up_to_the_limit,
    any_number_of_columns,
    more_rows_than_a_grid_is_wide,
    the_mask_marks_what_is_taken,
    every_device_gives_the_same_every_time_and_leaves_the_logits_alone,
];
