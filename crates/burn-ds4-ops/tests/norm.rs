//! The RMS norm against an `f64` oracle, and every row by itself.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::norm::rms_norm;

use super::common::{
    FLOATS, Tolerance, absolute, assert_close, devices, every_dtype, floats, half_unit, narrow,
    noise, read, rounded, sized, some, two_devices, values, wide,
};
use super::products::assert_same_bits;

const EPSILON: f64 = 1e-6;
/// Around the sizes of a vector, a unit, a plane and of what a lane keeps, on any device, and sizes
/// of the released models. Every third, which is what a device that compiles slowly gets, needs
/// one plane or several, vectors or single elements, and does or does not fit registers.
const LENGTHS: [usize; 12] = [40_004, 1, 7168, 4097, 127, 1000, 512, 3, 4096, 8, 128, 1536];

/// Half a unit in the last place, and what f32 sums may be off by.
fn one_rounding(dtype: FloatDType) -> Tolerance {
    Tolerance {
        absolute: 1e-7,
        relative: half_unit(dtype) + 2e-6,
    }
}

fn oracle(x: &[f64], columns: usize, weight: Option<&[f64]>, epsilon: f64) -> Vec<f32> {
    let rows = x.chunks(columns).flat_map(|row| {
        let mean = row.iter().map(|v| v * v).sum::<f64>() / columns as f64;
        let rms = (mean + epsilon).sqrt();
        let weighted = |(column, v): (usize, &f64)| v / rms * weight.map_or(1.0, |w| w[column]);
        row.iter().enumerate().map(weighted).collect::<Vec<_>>()
    });
    narrow(&rows.collect::<Vec<_>>())
}

fn rows_of_any_length_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        let step = if dtype == FloatDType::F32 { 2 } else { 4 };
        for &columns in some(name, &LENGTHS, step) {
            let what = format!("{name} [3, {columns}]");
            let data = noise(3 * columns, columns as u32);
            let (x, held) = rounded(&data, [3, columns], dtype, device);
            let expected = oracle(&held, columns, None, EPSILON);
            let actual = rms_norm(x, None, EPSILON).unwrap();
            assert_eq!(
                (actual.dims(), actual.dtype()),
                ([3, columns], dtype.into())
            );
            assert_close(&read(&actual), &expected, one_rounding(dtype), &what);
        }
    });
}

fn weights_of_any_dtype_multiply_before_the_result_is_rounded() {
    every_dtype(|name, device, dtype| {
        for weight_dtype in FLOATS.into_iter().filter(|of| device.supports_dtype(*of)) {
            // More lengths where nothing is converted.
            let step = if weight_dtype == dtype { 3 } else { 6 };
            for &columns in some(name, &LENGTHS, step) {
                let what = format!("{name} [2, {columns}], {weight_dtype:?} weight");
                let data = noise(2 * columns, columns as u32);
                let (x, held) = rounded(&data, [2, columns], dtype, device);
                let (weight, weights) =
                    rounded(&noise(columns, 7), [columns], weight_dtype, device);
                let expected = oracle(&held, columns, Some(&weights), EPSILON);
                let actual = read(&rms_norm(x, Some(weight), EPSILON).unwrap());
                assert_close(&actual, &expected, one_rounding(dtype), &what);
            }
        }
    });
}

fn rows_made_by_hand() {
    // Mean squares of 25, 1 and 0; with the epsilon 36, 12 and 11.
    let rows = [1.0, 7.0, -1.0, 1.0, 0.0, 0.0];
    for (name, device) in devices() {
        let x = || floats(&rows, [3, 2], device);
        let weight = floats(&[30.0, -6.0], [2], device);
        let third = 12f32.sqrt();
        let expected = [5.0, -7.0, -30.0 / third, -6.0 / third, 0.0, 0.0];
        let actual = values(rms_norm(x(), Some(weight), 11.0).unwrap());
        assert_close(&actual, &expected, absolute(1e-5), name);
        let expected = [0.2, 1.4, -1.0, 1.0, f32::NAN, f32::NAN];
        let actual = values(rms_norm(x(), None, 0.0).unwrap());
        assert_close(&actual, &expected, absolute(1e-6), name);
    }
}

fn every_dimension_but_the_last_is_one_of_rows() {
    for (name, device) in devices() {
        let data = noise(2 * 3 * 5 * 20, 3);
        let expected = oracle(&wide(&data), 20, None, EPSILON);
        let actual = rms_norm(floats(&data, [2, 3, 5, 20], device), None, EPSILON).unwrap();
        assert_eq!(actual.dims(), [2, 3, 5, 20], "{name}");
        assert_close(&values(actual), &expected, absolute(1e-5), name);
        let actual = rms_norm(floats(&data, [600], device), None, EPSILON).unwrap();
        let expected = oracle(&wide(&data), 600, None, EPSILON);
        assert_close(&values(actual), &expected, absolute(1e-5), name);
    }
}

fn views_are_normalised_as_their_copies() {
    for (name, device) in devices() {
        let data = noise(70 * 600, 4);
        let whole = floats(&data, [70, 600], device);
        let views = [
            ("transposed", whole.clone().transpose()),
            ("odd columns", whole.clone().slice([3..9, 5..516])),
            ("even columns", whole.clone().slice([0..70, 64..576])),
            ("rows", whole.clone().slice([31..70, 0..600])),
            ("flipped", whole.clone().flip([1])),
            (
                "broadcast",
                whole.clone().slice([4..5, 0..600]).expand([6, 600]),
            ),
        ];
        let weight = floats(&noise(1000, 5), [1000], device);
        for (view, x) in views {
            let [_, columns] = x.dims();
            let weight = (columns < 700).then(|| weight.clone().narrow(0, 128, columns));
            let weights = weight.clone().map(|weight| wide(&values(weight)));
            let expected = wide(&values(x.clone()));
            let expected = oracle(&expected, columns, weights.as_deref(), EPSILON);
            let actual = values(rms_norm(x, weight, EPSILON).unwrap());
            assert_close(
                &actual,
                &expected,
                absolute(1e-5),
                &format!("{name} {view}"),
            );
        }
    }
}

fn a_row_does_not_depend_on_how_many_there_are() {
    every_dtype(|name, device, dtype| {
        // Where kernels compile slowly, rows of several planes and of one.
        let step = if dtype == FloatDType::F32 { 3 } else { 7 };
        for &columns in some(name, &[512, 127, 1536, 4097, 4096, 20_000, 1], step) {
            let data = noise(100 * columns, columns as u32);
            let x = floats(&data, [100, columns], device).cast(dtype);
            let weight = floats(&noise(columns, 9), [columns], device);
            let normalized = |rows: std::ops::Range<usize>| {
                let x = x.clone().slice([rows, 0..columns]);
                read(&rms_norm(x, Some(weight.clone()), EPSILON).unwrap())
            };
            let together = normalized(0..100);
            for rows in 1..=16 {
                let what = format!("{name} {rows} rows of {columns}");
                assert_same_bits(&normalized(0..rows), &together[..rows * columns], &what);
            }
            for row in (1..16).chain([50, 99]) {
                let what = format!("{name} row {row} of {columns}");
                let expected = &together[row * columns..(row + 1) * columns];
                assert_same_bits(&normalized(row..row + 1), expected, &what);
            }
        }
    });
}

fn a_row_does_not_depend_on_where_it_lies() {
    every_dtype(|name, device, dtype| {
        for columns in [128, 4096] {
            // Rows an odd distance apart, which no vector divides. What is cut off is a multiple of
            // any device's alignment, so that the slice is a view.
            let data = noise(132 * (columns + 1), columns as u32);
            let apart = floats(&data, [132, columns + 1], device).cast(dtype);
            let apart = apart.slice([0..5, 0..columns]);
            let data = read(&apart);
            let x = floats(&data, [5, columns], device).cast(dtype);
            let normalized = |x| read(&rms_norm(x, None, EPSILON).unwrap());
            let what = format!("{name} {columns}");
            assert_same_bits(&normalized(apart), &normalized(x), &what);
        }
    });
}

fn what_is_no_number_stays_in_its_row() {
    for (name, device) in devices() {
        for columns in [7, 512, 4096, 20_000] {
            let mut data = noise(5 * columns, 11);
            let clean = data.clone();
            data[columns] = f32::NAN;
            data[3 * columns - 1] = f32::INFINITY;
            data[3 * columns + 2] = f32::NEG_INFINITY;
            let mut expected = oracle(&wide(&clean), columns, None, EPSILON);
            expected[columns..2 * columns].fill(f32::NAN);
            expected[2 * columns..4 * columns].fill(0.0);
            expected[3 * columns - 1] = f32::NAN;
            expected[3 * columns + 2] = f32::NAN;
            let actual = rms_norm(floats(&data, [5, columns], device), None, EPSILON);
            let what = format!("{name} {columns}");
            assert_close(&values(actual.unwrap()), &expected, absolute(1e-5), &what);
        }
    }
}

fn squares_past_the_largest_number_leave_zeros() {
    for (name, device) in devices() {
        let x = floats(&[1e20, -1e20, 1e-30, 1.0], [2, 2], device);
        let actual = values(rms_norm(x, None, 0.0).unwrap());
        let expected = [0.0, 0.0, 0.0, 2f32.sqrt()];
        assert_close(&actual, &expected, absolute(1e-6), name);
    }
}

fn there_may_be_more_rows_than_cubes_in_a_dimension() {
    sized(
        (4_000_000, 4),
        (280_000, 4),
        |name, device, (rows, columns)| {
            let data = noise(rows * columns, 13);
            let expected = oracle(&wide(&data), columns, None, EPSILON);
            let actual = rms_norm(floats(&data, [rows, columns], device), None, EPSILON).unwrap();
            assert_close(&values(actual), &expected, absolute(1e-5), name);
        },
    );
}

fn nothing_normalised_is_nothing() {
    for (name, device) in devices() {
        let none = rms_norm(Tensor::<2>::zeros([0, 5], device), None, EPSILON).unwrap();
        assert_eq!(none.dims(), [0, 5], "{name}");
        let weight = Some(Tensor::zeros([0], device));
        let none = rms_norm(Tensor::<3>::zeros([2, 3, 0], device), weight, EPSILON).unwrap();
        assert_eq!(none.dims(), [2, 3, 0], "{name}");
    }
}

#[track_caller]
fn refused(result: Result<Tensor<2>, OpError>, message: &str) {
    let error = result.expect_err(message);
    assert_eq!(error.to_string(), message);
}

fn a_weight_of_another_length_is_refused() {
    for (_, device) in devices() {
        let x = Tensor::<2>::zeros([2, 4], device);
        refused(
            rms_norm(x, Some(Tensor::ones([1], device)), EPSILON),
            "`weight` has shape [1], expected [4]",
        );
    }
}

fn rows_of_another_dtype_are_refused() {
    let device = &devices()[0].1;
    let x = Tensor::<2>::zeros([2, 4], (device, DType::F64));
    refused(
        rms_norm(x, None, EPSILON),
        "`x` has dtype F64, expected F32, F16 or BF16",
    );
}

fn a_weight_of_another_dtype_is_refused() {
    let device = &devices()[0].1;
    let x = Tensor::<2>::zeros([2, 4], (device, DType::F32));
    refused(
        rms_norm(x, Some(Tensor::ones([4], (device, DType::F64))), EPSILON),
        "`weight` has dtype F64, expected F32, F16 or BF16",
    );
}

fn a_weight_on_another_device_is_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let x = Tensor::<2>::zeros([2, 4], first);
    let result = rms_norm(x, Some(Tensor::ones([4], second)), EPSILON);
    assert!(
        matches!(
            result,
            Err(OpError::DeviceMismatch {
                argument: "weight",
                other: "x",
                ..
            })
        ),
        "{result:?}"
    );
}

fn an_epsilon_below_zero_or_no_number_is_refused() {
    for (_, device) in devices() {
        for (epsilon, named) in [(-1e-6, "-0.000001"), (f64::NAN, "NaN")] {
            let x = Tensor::<2>::zeros([2, 4], device);
            refused(
                rms_norm(x, None, epsilon),
                &format!("`epsilon` is {named}, expected a number that is not negative"),
            );
        }
    }
}

catalogue![
    rows_of_any_length_agree_with_the_oracle,
    weights_of_any_dtype_multiply_before_the_result_is_rounded,
    rows_made_by_hand,
    every_dimension_but_the_last_is_one_of_rows,
    views_are_normalised_as_their_copies,
    a_row_does_not_depend_on_how_many_there_are,
    a_row_does_not_depend_on_where_it_lies,
    what_is_no_number_stays_in_its_row,
    squares_past_the_largest_number_leave_zeros,
    there_may_be_more_rows_than_cubes_in_a_dimension,
    nothing_normalised_is_nothing,
    a_weight_of_another_length_is_refused,
    rows_of_another_dtype_are_refused,
    a_weight_of_another_dtype_is_refused,
    a_weight_on_another_device_is_refused,
    an_epsilon_below_zero_or_no_number_is_refused,
];
