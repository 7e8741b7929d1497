//! Top-k of rows of every float dtype, and of views whose rows are apart, start anywhere or are not
//! contiguous.

use super::common::{devices, every_dtype, floats, integer_values, some, some_of_half, values};
use super::distributions::{DISTRIBUTIONS, NORMAL, Random, TEN_LOW_BITS, row, rows};
use super::ranking::{Ranking, Rows, assert_ids, int32, ranges, window};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::topk::{Order, Windows, top_k, top_k_ids, top_k_mask, top_k_per_row};

fn every_float_dtype_is_ranked_as_it_is() {
    every_dtype(|name, device, dtype| {
        for &(columns, k) in some_of_half(name, dtype, &[(700, 64), (5000, 512), (20_000, 512)], 2)
        {
            let data = rows(DISTRIBUTIONS, columns, 41);
            let rows = Rows::of_dtype(columns, data, dtype);
            let what = format!("{name} {columns} columns, k {k}");
            rows.check(rows.distinct(), k, device, &what);
            rows.check(1, k, device, &format!("{what}, one row"));
        }
    });
}

fn all_numbers_of_sixteen_bits_are_told_apart() {
    every_dtype(|name, device, dtype| {
        // The upper bits of an f32 are those of a bf16; rounded to f16, they are fewer and tied.
        let mut data: Vec<f32> = (0..1 << 16)
            .map(|bits| f32::from_bits(bits << 16))
            .collect();
        let mut random = Random::new(42);
        for column in (1..data.len()).rev() {
            data.swap(column, random.index(column + 1));
        }
        let columns = data.len();
        let rows = Rows::of_dtype(columns, data, dtype);
        rows.check(1, 4096, device, name);
        // Short enough to be worst among the rest, so that all of the lower half is ranked as well.
        let windows: Vec<_> = (0..16).map(|part| part * 4096..(part + 1) * 4096).collect();
        rows.check_windows(&windows, 4000, device, &format!("{name} in parts"));
    });
}

fn values_are_of_the_dtype_of_the_logits() {
    every_dtype(|name, device, dtype| {
        let columns = 700;
        let rows = Rows::of_dtype(columns, rows(DISTRIBUTIONS, columns, 43), dtype);
        for order in [Order::Column, Order::Value] {
            let logits = rows.tensor(rows.distinct(), device);
            let (best, ids) =
                top_k(logits.clone(), Windows::All, 64, order).expect("arguments that fit");
            assert_eq!(best.dtype(), logits.dtype(), "{name}");
            let (best, ids) = (values(best), integer_values(ids));
            assert_eq!((best.len(), ids.len()), (rows.distinct() * 64, best.len()));
            for (row, (best, ids)) in best.chunks(64).zip(ids.chunks(64)).enumerate() {
                let mut expected = rows.ranking(row).best(&(0..columns), 64);
                if order == Order::Column {
                    expected.sort_unstable();
                }
                assert_eq!(ids, expected, "{name} {order:?} row {row}");
                for (&value, &id) in best.iter().zip(ids) {
                    let held = rows.row(row)[id as usize];
                    assert!(
                        value == held || value.is_nan() && held.is_nan(),
                        "{name} {order:?} row {row} column {id}: {value:e} is not {held:e}"
                    );
                }
            }
        }
    });
}

fn masks_take_every_float_dtype() {
    every_dtype(|name, device, dtype| {
        let columns = 700;
        let rows = Rows::of_dtype(columns, rows(DISTRIBUTIONS, columns, 44), dtype);
        let mask =
            top_k_mask(rows.tensor(rows.distinct(), device), 64).expect("arguments that fit");
        let mask = integer_values(mask.int());
        assert_eq!(mask.len(), rows.distinct() * columns);
        for (row, mask) in mask.chunks(columns).enumerate() {
            let marked = (0..columns).filter(|&c| mask[c] == 1).map(|c| c as i64);
            let marked: Vec<i64> = marked.collect();
            let expected = rows.ranking(row).ids(&(0..columns), 64);
            assert_eq!(marked, expected, "{name} row {row}");
        }
    });
}

/// Compares the result for a view, with and without windows, with that for its elements.
#[track_caller]
fn check_view(view: Tensor<2>, k: usize, device: &Device, what: &str) {
    let [rows, columns] = view.dims();
    // A copy that is laid out anew could not be wrong about strides.
    let data = values(view.clone());
    let rankings: Vec<Ranking> = data.chunks(columns).map(Ranking::of).collect();
    let mut random = Random::new(45);
    let windows: Vec<_> = (0..rows)
        .map(|_| {
            let start = random.index(columns);
            window(
                start as u64,
                (start + random.index(columns)) as u64,
                columns,
            )
        })
        .collect();
    let all = vec![0..columns; rows];
    for (windows, on_device) in [(&all, Windows::All), (&windows, ranges(&windows, device))] {
        let expected: Vec<i64> = rankings
            .iter()
            .zip(windows)
            .flat_map(|(ranking, window)| ranking.ids(window, k))
            .collect();
        let ids = top_k_ids(view.clone(), on_device, k).expect("arguments that fit");
        assert_ids(ids, &expected, what);
    }
}

/// Of 13 rows, normal or of ten low bits in turn.
fn source(columns: usize, dtype: FloatDType, device: &Device) -> Tensor<2> {
    let kinds: Vec<_> = [NORMAL, TEN_LOW_BITS]
        .into_iter()
        .cycle()
        .take(13)
        .collect();
    Rows::of_dtype(columns, rows(&kinds, columns, 46), dtype).tensor(13, device)
}

fn rows_may_be_apart_and_start_anywhere() {
    every_dtype(|name, device, dtype| {
        for &(columns, k) in some_of_half(name, dtype, &[(700, 64), (9000, 512)], 2) {
            let source = source(columns, dtype, device);
            let cuts = [(1, 0), (2, 1), (3, 3), (4, 8), (7, 2), (8, 8), (64, 63)];
            for &(from, to) in some(name, &cuts, 3) {
                let view = source.clone().slice([0..13, from..columns - to]);
                let what = format!("{name} {columns} columns from {from} to -{to}");
                check_view(view, k, device, &what);
            }
            let one = source.clone().slice([7..8, 5..columns - 6]);
            check_view(
                one,
                k,
                device,
                &format!("{name} {columns} columns, one row"),
            );
            let part = source.slice([3..12, 0..columns]);
            check_view(
                part,
                k,
                device,
                &format!("{name} {columns} columns, 9 rows"),
            );
        }
    });
}

fn rows_may_be_columns_of_another_tensor() {
    every_dtype(|name, device, dtype| {
        for &(columns, k) in some_of_half(name, dtype, &[(4000, 512), (300, 64)], 2) {
            let source = source(columns, dtype, device);
            // Laid out column by column, and seen row by row.
            let upright = source
                .transpose()
                .reshape([columns * 13])
                .reshape([columns, 13]);
            let what = format!("{name} {columns} columns");
            check_view(upright.clone().transpose(), k, device, &what);
            let part = upright.transpose().slice([2..11, 5..columns - 1]);
            check_view(part, k, device, &format!("{what}, a part"));
        }
    });
}

fn rows_may_be_steps_apart_or_one_and_the_same() {
    every_dtype(|name, device, dtype| {
        for &(columns, k) in some_of_half(name, dtype, &[(9000, 512), (700, 64)], 2) {
            let source = source(columns, dtype, device);
            let cube = source.clone().slice([0..12, 0..columns]);
            let cube: Tensor<3> = cube.reshape([4, 3, columns]);
            let second = cube.slice([0..4, 1..2, 0..columns]).squeeze_dim::<2>(1);
            check_view(
                second,
                k,
                device,
                &format!("{name} every third row of {columns}"),
            );
            let same = source.slice([5..6, 0..columns]).expand([6, columns]);
            check_view(
                same,
                k,
                device,
                &format!("{name} the same row of {columns}"),
            );
        }
    });
}

fn bounds_may_be_views() {
    let (columns, k) = (9000, 64);
    let logits = row(NORMAL, columns, 47);
    let rows = Rows::new(columns, logits.repeat(5));
    let bounds = [0, 9000, 17, 5000, 8000, 8100, 4, 3, 100, 99_999];
    let windows: Vec<_> = bounds
        .chunks(2)
        .map(|w| window(w[0], w[1], columns))
        .collect();
    for (name, device) in devices() {
        let logits = floats(&logits.repeat(5), [5, columns], device);
        let pairs = int32(&bounds, [5, 2], device);
        let bound = |which: usize| pairs.clone().slice([0..5, which..which + 1]).squeeze_dim(1);
        let ids = top_k_per_row(logits, bound(0), bound(1), k).expect("arguments that fit");
        assert_ids(ids, &rows.ids(&windows, k), name);
    }
}

catalogue![
    every_float_dtype_is_ranked_as_it_is,
    all_numbers_of_sixteen_bits_are_told_apart,
    values_are_of_the_dtype_of_the_logits,
    masks_take_every_float_dtype,
    rows_may_be_apart_and_start_anywhere,
    rows_may_be_columns_of_another_tensor,
    rows_may_be_steps_apart_or_one_and_the_same,
    bounds_may_be_views,
];
