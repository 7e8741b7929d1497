//! Rows of a product that must not know of each other: the same bits alone and among others, NaN
//! and infinity in their places.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::matmul::SmallMOptions;

use super::common::{EXACT, assert_close, compiles_slowly, some};
use super::products::{Pair, Product, assert_same_bits, every_pair, options, outputs, product};

/// Rows of the weights and columns, odd and even, below a plane's and beyond.
const SIZES: [[usize; 2]; 5] = [[130, 520], [33, 1000], [7, 129], [24, 4100], [257, 31]];
const F32: FloatDType = FloatDType::F32;

/// `size`, or where kernels compile slowly the first of [`SIZES`], whose kernels there are already.
fn size_for(name: &str, size: [usize; 2]) -> [usize; 2] {
    if compiles_slowly(name) {
        SIZES[0]
    } else {
        size
    }
}

/// What each row gives alone, one after the other.
fn alone(whole: &Product, device: &Device, options: SmallMOptions) -> Vec<f32> {
    let rows = 0..whole.x.shape[0];
    let weights = whole.weights.on(device);
    rows.flat_map(|row| {
        product(
            whole.x.rows(row..row + 1).on(device),
            weights.clone(),
            options,
        )
    })
    .collect()
}

fn the_same_alone_and_among(
    most: usize,
    numbers: &[usize],
    options: impl Fn(FloatDType) -> SmallMOptions,
) {
    every_pair(|name, device, pair| {
        // Where kernels compile slowly: vectors of one element in f32 alone, and no rounded output,
        // which would hide what differs.
        let step = if pair == (F32, F32) { 4 } else { SIZES.len() };
        let sizes: Vec<_> = SIZES.into_iter().enumerate().collect();
        for &(i, [n, k]) in some(name, &sizes, step) {
            let whole = Product::random([most, n, k], pair, i as u64);
            let weights = whole.weights.on(device);
            for &output in some(name, &outputs(pair.0), 2) {
                let options = options(output);
                let alone = alone(&whole, device, options);
                for &rows in numbers {
                    let x = whole.x.rows(0..rows).on(device);
                    let together = product(x, weights.clone(), options);
                    let what = format!("{name} -> {output:?}, {rows} rows x [{n}, {k}]");
                    assert_same_bits(&together, &alone[..rows * n], &what);
                }
            }
        }
    });
}

fn up_to_16_rows_have_the_bits_that_each_has_alone() {
    let numbers: Vec<usize> = (2..=16).collect();
    the_same_alone_and_among(16, &numbers, options);
}

fn up_to_64_rows_do_where_that_is_asked_for() {
    the_same_alone_and_among(64, &[16, 17, 33, 48, 63, 64], |output| SmallMOptions {
        invariant_rows: 64,
        ..options(output)
    });
}

fn a_row_does_not_depend_on_where_it_is() {
    every_pair(|name, device, pair| {
        let [m, n, k] = [16, 130, 520];
        let whole = Product::random([m, n, k], pair, 3);
        let weights = whole.weights.on(device);
        let expected = product(
            whole.x.rows(3..4).on(device),
            weights.clone(),
            options(FloatDType::F32),
        );
        let x = whole.x.on(device).slice([3..4, 0..k]).expand([m, k]);
        let rows = product(x, weights, options(FloatDType::F32));
        assert_same_bits(&rows, &expected.repeat(m), name);
    });
}

fn two_runs_give_the_same_bits() {
    every_pair(|name, device, pair| {
        let [n, k] = size_for(name, [257, 1000]);
        for rows in [1, 7, 16, 17, 130] {
            let whole = Product::random([rows, n, k], pair, 3);
            let [first, second] = [0, 1].map(|_| whole.run(device, FloatDType::F32));
            assert_same_bits(&second, &first, &format!("{name} {rows} rows"));
        }
    });
}

/// A clean product and the same with NaN and infinity in rows 1 and 2 of x, or of the weights.
fn spoilt(shape: [usize; 3], pair: Pair, of_weights: bool) -> [Product; 2] {
    let [clean, mut spoilt] = [0, 1].map(|_| Product::exact(shape, pair, 8));
    let input = if of_weights {
        &mut spoilt.weights
    } else {
        &mut spoilt.x
    };
    let k = shape[2];
    input.values[2 * k - 1] = f32::NAN;
    input.values[2 * k] = f32::INFINITY;
    [clean, spoilt]
}

/// Infinity times the sign of each value; NaN where that is zero.
fn infinite(values: impl Iterator<Item = f32>) -> Vec<f32> {
    values.map(|value| f32::INFINITY * value).collect()
}

fn what_is_not_finite_in_x_stays_in_its_row() {
    every_pair(|name, device, pair| {
        let [n, k] = size_for(name, [130, 513]);
        for rows in [4, 16, 40] {
            let [clean, spoilt] = spoilt([rows, n, k], pair, false);
            let [expected, actual] = [&clean, &spoilt].map(|p| p.run(device, FloatDType::F32));
            let what = format!("{name} {rows} rows");
            assert_close(&actual[..n], &expected[..n], EXACT, &what);
            assert_close(&actual[3 * n..], &expected[3 * n..], EXACT, &what);
            assert!(
                actual[n..2 * n].iter().all(|value| value.is_nan()),
                "{what}: NaN"
            );
            let first = infinite(clean.weights.values.iter().step_by(k).copied());
            assert_close(
                &actual[2 * n..3 * n],
                &first,
                EXACT,
                &format!("{what}: infinity"),
            );
        }
    });
}

fn what_is_not_finite_in_a_row_of_the_weights_stays_in_its_column() {
    every_pair(|name, device, pair| {
        let [n, k] = size_for(name, [130, 513]);
        for rows in [1, 5, 16, 40] {
            let [clean, spoilt] = spoilt([rows, n, k], pair, true);
            let [expected, actual] = [&clean, &spoilt].map(|p| p.run(device, FloatDType::F32));
            let first = infinite(clean.x.values.iter().step_by(k).copied());
            for row in 0..rows {
                let what = format!("{name} row {row} of {rows}");
                let (expected, actual) = (
                    &expected[row * n..(row + 1) * n],
                    &actual[row * n..(row + 1) * n],
                );
                assert_close(&actual[..1], &expected[..1], EXACT, &what);
                assert_close(&actual[3..], &expected[3..], EXACT, &what);
                assert!(actual[1].is_nan(), "{what}: NaN");
                assert_close(
                    &actual[2..3],
                    &first[row..row + 1],
                    EXACT,
                    &format!("{what}: infinity"),
                );
            }
        }
    });
}

catalogue![
    up_to_16_rows_have_the_bits_that_each_has_alone,
    up_to_64_rows_do_where_that_is_asked_for,
    a_row_does_not_depend_on_where_it_is,
    two_runs_give_the_same_bits,
    what_is_not_finite_in_x_stays_in_its_row,
    what_is_not_finite_in_a_row_of_the_weights_stays_in_its_column,
];
