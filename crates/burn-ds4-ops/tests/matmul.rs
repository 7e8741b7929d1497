//! The matrix product, against a product in f64.

use super::common::{
    EXACT, Tolerance, absolute, assert_close, assert_on_another_device, assert_refused, devices,
    every_dtype, floats, noise, read, some, two_devices, values,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::matmul::matmul;

/// `[m, k] · [n, k]ᵀ`, summed in f64.
fn oracle(lhs: &[f32], rhs_rows: &[f32], k: usize) -> Vec<f32> {
    lhs.chunks(k)
        .flat_map(|left| {
            rhs_rows.chunks(k).map(|right| {
                let products = left
                    .iter()
                    .zip(right)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b));
                products.sum::<f64>() as f32
            })
        })
        .collect()
}

fn transposed(rows: &[f32], columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| rows.iter().skip(column).step_by(columns).copied())
        .collect()
}

fn products_of_any_shape_equal_the_oracle() {
    for (name, device) in devices() {
        // Every layout of every shape is a kernel. Of those that all devices have, one is a row and
        // one fills nothing; the products of the other tests fill vectors.
        let shapes = [
            (1, 7, 5),
            (2, 64, 33),
            (3, 256, 40),
            (37, 129, 65),
            (4, 5, 128),
            (5, 64, 33),
        ];
        for &(m, k, n) in some(name, &shapes, 3) {
            let (lhs, rhs) = (noise(m * k, 1), noise(n * k, 2));
            let expected = oracle(&lhs, &rhs, k);
            let tolerance = absolute(1e-7 * k as f64 + 1e-6);
            let left = floats(&lhs, [m, k], device);
            let view = floats(&rhs, [n, k], device).transpose();
            let dense = floats(&transposed(&rhs, k), [k, n], device);
            for (right, layout) in [(view, "transposed view"), (dense, "dense")] {
                let actual = values(matmul(left.clone(), right).expect("arguments that fit"));
                assert_close(
                    &actual,
                    &expected,
                    tolerance,
                    &format!("{name}: {m}x{k}x{n}, {layout}"),
                );
            }
        }
    }
}

fn every_batch_has_its_own_product() {
    let (batch, m, k, n) = (3, 2, 16, 9);
    let (lhs, rhs) = (noise(batch * m * k, 3), noise(batch * n * k, 4));
    let expected: Vec<f32> = lhs
        .chunks(m * k)
        .zip(rhs.chunks(n * k))
        .flat_map(|(lhs, rhs)| oracle(lhs, rhs, k))
        .collect();
    for (name, device) in devices() {
        let left = floats(&lhs, [batch, m, k], device);
        let right = floats(&rhs, [batch, n, k], device).swap_dims(1, 2);
        assert_close(
            &values(matmul(left, right).expect("arguments that fit")),
            &expected,
            absolute(1e-5),
            name,
        );
    }
}

fn f32_operands_keep_all_their_bits() {
    // (1 + 2^-12)² = 1 + 2^-11 + 2^-24. TF32 has ten bits of mantissa and would make it 1.
    let (m, k, n) = (64, 32, 64);
    let value = 1.0 + 2f32.powi(-12);
    let tolerance = Tolerance {
        absolute: 0.0,
        relative: 1e-6,
    };
    for (name, device) in devices() {
        let left = Tensor::<2>::full([m, k], value, device);
        let right = Tensor::<2>::full([k, n], value, device);
        let expected = vec![k as f32 * value * value; m * n];
        assert_close(
            &values(matmul(left, right).expect("arguments that fit")),
            &expected,
            tolerance,
            name,
        );
    }
}

#[cfg(feature = "flex")]
#[test]
fn on_the_cpu_a_row_of_few_does_not_depend_on_the_others() {
    let (k, n) = (256, 96);
    let device = Device::flex();
    let (lhs, rhs) = (noise(16 * k, 5), noise(n * k, 6));
    let right = floats(&rhs, [n, k], &device).transpose();
    for m in [2, 3, 5, 16] {
        let together = values(
            matmul(floats(&lhs[..m * k], [m, k], &device), right.clone())
                .expect("arguments that fit"),
        );
        for row in 0..m {
            let alone = floats(&lhs[row * k..(row + 1) * k], [1, k], &device);
            let alone = values(matmul(alone, right.clone()).expect("arguments that fit"));
            assert_close(
                &together[row * n..(row + 1) * n],
                &alone,
                EXACT,
                &format!("row {row} of {m}"),
            );
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let device = &devices()[0].1;
    let zeros = |shape| Tensor::<2>::zeros(shape, (device, DType::F32));
    let message = "`rhs` has shape [4, 5], expected [3, 5]";
    assert_refused(matmul(zeros([2, 3]), zeros([4, 5])), message);
    let half = zeros([3, 5]).cast(FloatDType::BF16);
    let message = "`rhs` has dtype BF16, expected that of `lhs`";
    assert_refused(matmul(zeros([2, 3]), half), message);
    let (one, two) = (zeros([2, 3]).reshape([1, 2, 3]), zeros([6, 5]));
    let message = "`rhs` has shape [2, 3, 5], expected [1, 3, 5]";
    assert_refused(matmul::<3>(one, two.reshape([2, 3, 5])), message);
    let row = || Tensor::<1>::zeros([3], device);
    let message = "`dimensions of lhs` is 1, expected at least 2";
    assert_refused(matmul(row(), row()), message);
    let wide = || zeros([2, 2]).cast(FloatDType::F64);
    let message = "`lhs` has dtype F64, expected F32, F16 or BF16";
    assert_refused(matmul(wide(), wide()), message);
}

#[test]
fn operands_on_two_devices_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let zeros = |device| Tensor::<2>::zeros([2, 2], (device, DType::F32));
    assert_on_another_device(matmul(zeros(first), zeros(second)), ["rhs", "lhs"]);
}

/// Products that need more bits than the dtype has, and cancel each other.
fn sums_of_every_dtype_are_in_f32() {
    every_dtype(|name, device, dtype| {
        let unit = match dtype {
            FloatDType::BF16 => 2f32.powi(-7),
            _ => 2f32.powi(-10),
        };
        let (a, b) = (1.0 + unit, 1.0 + 2.0 * unit);
        let [lhs, rhs] = [[a, -1.0, -1.0, a], [a, b, b, a]];
        let [lhs, rhs] = [lhs, rhs].map(|rows| floats(&rows, [2, 2], device).cast(dtype));
        let product = matmul(lhs, rhs).expect("arguments that fit");
        // What a square has more than b, and what a product with b has more than a.
        let (square, other) = (unit * unit, 2.0 * unit * a);
        assert_close(
            &read(&product),
            &[square, other, other, square],
            EXACT,
            name,
        );
    });
}

catalogue![
    products_of_any_shape_equal_the_oracle,
    every_batch_has_its_own_product,
    f32_operands_keep_all_their_bits,
    sums_of_every_dtype_are_in_f32,
];
