//! Products of a few rows against sums in f64: every pair of dtypes, shapes that fit no tile,
//! values at the ends of the range.

use burn::tensor::FloatDType;

use super::common::{EXACT, FLOATS, assert_close, compiles_slowly, devices, some};
use super::linear::Input;
use super::products::{Pair, Product, every_pair, outputs, pairs};

const F32: FloatDType = FloatDType::F32;
const ROWS: [usize; 14] = [0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 64, 65, 300];
const SIZES: [usize; 6] = [1, 7, 24, 127, 129, 1000];
/// Products that the oracle works out for one shape at most: it is slow.
const MAX_PRODUCTS: usize = 1 << 22;
/// Has no divisor in common with how many pairs of sizes, of dtypes or numbers of rows there are.
const SOME: usize = 17;

/// Every pair of a number of weight rows and one of columns, with the numbers of rows of x in turn.
fn shapes() -> impl Iterator<Item = [usize; 3]> {
    let count = SIZES.len() * SIZES.len() * ROWS.len();
    let shape = |i: usize| {
        let (row, rest) = (i % ROWS.len(), i / ROWS.len());
        [
            ROWS[row],
            SIZES[rest % SIZES.len()],
            SIZES[rest / SIZES.len()],
        ]
    };
    (0..count)
        .map(shape)
        .filter(|shape| shape.iter().product::<usize>() <= MAX_PRODUCTS)
}

/// Each with the pairs of dtypes and the dtypes of the output in turn. A software driver of wgpu
/// compiles kernels for longer than they run, and gets fewer.
fn products_of_any_shape_are_exact() {
    for (name, device) in devices() {
        let pairs = pairs(name, device);
        for (i, shape) in shapes().enumerate() {
            if compiles_slowly(name) && i % SOME != 0 {
                continue;
            }
            let pair = pairs[i % pairs.len()];
            let product = Product::exact(shape, pair, i as u64);
            let outputs = outputs(pair.0);
            let output = outputs[i / pairs.len() % outputs.len()];
            product.check_exact(
                &product.run(device, output),
                output,
                &format!("{name} {pair:?}"),
            );
        }
    }
}

fn every_pair_of_dtypes_gives_what_f32_sums_can_be() {
    every_pair(|name, device, pair| {
        let shapes = [
            [1, 130, 513],
            [3, 96, 512],
            [16, 33, 1000],
            [40, 130, 384],
            [70, 64, 129],
        ];
        let shapes: Vec<_> = shapes.into_iter().enumerate().collect();
        // Few rows and many, and more of them where both are of one dtype.
        let step = if pair.0 == pair.1 { 2 } else { 4 };
        for &(i, shape) in some(name, &shapes, step) {
            let product = Product::random(shape, pair, i as u64);
            for output in outputs(pair.0) {
                product.check(&product.run(device, output), output, name);
            }
        }
    });
}

fn a_long_sum_stays_close() {
    every_pair(|name, device, pair| {
        // Few rows, and where both are of one dtype many.
        let step = if pair.0 == pair.1 { 2 } else { 3 };
        for &rows in some(name, &[8, 1, 20], step) {
            let product = Product::random([rows, 24, 16_384], pair, rows as u64);
            product.check(&product.run(device, F32), F32, name);
        }
    });
}

fn no_columns_give_zeros_and_nothing_in_gives_nothing() {
    every_pair(|name, device, pair| {
        for [m, n, k] in [
            [3, 5, 0],
            [300, 5, 0],
            [0, 5, 7],
            [3, 0, 7],
            [0, 0, 0],
            [0, 5, 0],
        ] {
            let product = Product::exact([m, n, k], pair, 1);
            for output in outputs(pair.0) {
                assert_close(&product.run(device, output), &vec![0.0; m * n], EXACT, name);
            }
        }
    });
}

/// The table of a product, the same for every row of x, on every device that has the dtypes.
fn expect_rows(x: &[f32], weights: &[f32], expected: &[f32], output: FloatDType, pair: Pair) {
    let (k, n) = (x.len(), weights.len() / x.len());
    for (name, device) in devices() {
        let held = |dtype| pairs(name, device).iter().any(|held| held.0 == dtype);
        if !(held(pair.0) && held(pair.1)) {
            continue;
        }
        // Few rows and many.
        for &rows in some(name, &[2, 1, 16, 70, 17], 3) {
            let product = Product {
                x: Input::new([rows, k], pair.0, &x.repeat(rows)),
                weights: Input::new([n, k], pair.1, weights),
            };
            let what = format!("{name} {pair:?} -> {output:?}, {rows} rows");
            assert_close(
                &product.run(device, output),
                &expected.repeat(rows),
                EXACT,
                &what,
            );
        }
    }
}

fn a_table_worked_out_by_hand_comes_out() {
    let weights = [1., 1., 1., 0., -2., 0.25, 8., -4., 2., 0.5, 0.5, 0.];
    for pair in FLOATS
        .into_iter()
        .flat_map(|x| FLOATS.map(|weights| (x, weights)))
    {
        for output in outputs(pair.0) {
            expect_rows(&[1., 2., 3.], &weights, &[6., -3.25, 6., 1.5], output, pair);
            expect_rows(
                &[-1., 0.5, 4.],
                &weights,
                &[3.5, 0., -2., -0.25],
                output,
                pair,
            );
        }
    }
}

fn sums_are_made_in_f32_and_rounded_once_to_even() {
    let (f16, bf16) = (FloatDType::F16, FloatDType::BF16);
    // Halfway between neighbours of the output.
    let weights = [1., 1., 1., 3.];
    expect_rows(&[2048., 1.], &weights, &[2048., 2052.], f16, (f16, f16));
    expect_rows(&[2048., 1.], &weights, &[2049., 2051.], F32, (f16, f16));
    expect_rows(&[256., 1.], &weights, &[256., 260.], bf16, (bf16, bf16));
    expect_rows(&[256., 1.], &weights, &[257., 259.], F32, (bf16, bf16));
    // A sum in the dtype of x would stop at 2048, or at 256.
    let ones = [1.0; 5000];
    expect_rows(&ones, &ones, &[5000.], f16, (f16, f16));
    expect_rows(&ones, &ones, &[4992.], bf16, (bf16, bf16));
    expect_rows(&ones, &ones, &[5000.], F32, (bf16, f16));
}

fn f32_values_keep_all_their_bits() {
    // (1 + 2^-12)² = 1 + 2^-11 + 2^-24. TF32 has ten bits of mantissa and would make it 1, bf16
    // seven.
    let value = 1.0 + 2f32.powi(-12);
    let exact = 16.0 + 2f32.powi(-7) + 2f32.powi(-20);
    expect_rows(&[value; 16], &[value; 16], &[exact], F32, (F32, F32));
    for weights in [FloatDType::F16, FloatDType::BF16] {
        expect_rows(
            &[value; 16],
            &[1.0; 16],
            &[16.0 * value],
            F32,
            (F32, weights),
        );
        expect_rows(
            &[1.0; 16],
            &[value; 16],
            &[16.0 * value],
            F32,
            (weights, F32),
        );
    }
}

fn the_smallest_and_largest_f16_values_are_multiplied_as_they_are() {
    let f16 = FloatDType::F16;
    let (least, most) = (2f32.powi(-24), 65_504.0_f32);
    for other in [f16, F32] {
        // 2^-24, the largest subnormal value, and both ends at once.
        let (x, weights) = (
            [least, 1023.0 * least, most],
            [1., 0., 0., 0., 2., 0., 0., 0., 1.],
        );
        expect_rows(
            &x,
            &weights,
            &[least, 2046.0 * least, most],
            F32,
            (f16, other),
        );
        expect_rows(
            &x,
            &weights,
            &[least, 2046.0 * least, most],
            f16,
            (f16, other),
        );
        expect_rows(&[1.0], &[least, most], &[least, most], F32, (other, f16));
    }
    // Far beyond the dtype, not beyond the sum.
    expect_rows(
        &[most, most],
        &[most, -most, most, 0.],
        &[0., most * most],
        F32,
        (f16, f16),
    );
    expect_rows(
        &[most, most],
        &[1., 1., -1., -1.],
        &[f32::INFINITY, f32::NEG_INFINITY],
        f16,
        (f16, f16),
    );
    expect_rows(
        &[most, most],
        &[1., 1., -1., -1.],
        &[2.0 * most, -2.0 * most],
        F32,
        (f16, f16),
    );
}

fn values_at_the_ends_of_the_f32_range_come_through() {
    let normal = f32::MIN_POSITIVE;
    expect_rows(
        &[1e38, 1e38],
        &[1., 1., 1., -1.],
        &[2e38, 0.],
        F32,
        (F32, F32),
    );
    expect_rows(
        &[f32::MAX],
        &[1., -1., 0.5],
        &[f32::MAX, -f32::MAX, f32::MAX / 2.],
        F32,
        (F32, F32),
    );
    expect_rows(
        &[normal],
        &[1., -2., 4.],
        &[normal, -2. * normal, 4. * normal],
        F32,
        (F32, F32),
    );
    // Products that leave the range, and sums that do.
    expect_rows(
        &[1e30],
        &[1e30, -1e30],
        &[f32::INFINITY, f32::NEG_INFINITY],
        F32,
        (F32, F32),
    );
    expect_rows(
        &[3e38, 3e38],
        &[1., 1., -1., -1.],
        &[f32::INFINITY, f32::NEG_INFINITY],
        F32,
        (F32, F32),
    );
    every_pair(|name, device, pair| {
        if pair.0 == FloatDType::F16 || pair.1 == FloatDType::F16 {
            return;
        }
        for (i, (x, weights)) in [(1e30, 1e-30), (1e-18, 1e-18), (1e19, 1e17)]
            .into_iter()
            .enumerate()
        {
            let mut product = Product::random([5, 40, 513], pair, i as u64);
            let times = |input: &Input, by: f32| {
                let values: Vec<f32> = input.values.iter().map(|value| value * by).collect();
                Input::new(input.shape, input.dtype, &values)
            };
            product.x = times(&product.x, x);
            product.weights = times(&product.weights, weights);
            product.check(
                &product.run(device, F32),
                F32,
                &format!("{name} {x:e} times {weights:e}"),
            );
        }
    });
}

fn zeros_of_either_sign_are_zeros() {
    for dtype in FLOATS {
        expect_rows(&[-0.0; 20], &[1.0; 20], &[0.0], dtype, (dtype, dtype));
        expect_rows(&[3.0; 20], &[-0.0; 20], &[0.0], F32, (dtype, dtype));
    }
}

#[test]
fn every_number_of_rows_and_every_size_is_among_the_shapes() {
    for (axis, sizes) in [&ROWS[..], &SIZES, &SIZES].into_iter().enumerate() {
        for size in sizes {
            let some = shapes().step_by(SOME);
            assert!(some.into_iter().any(|shape| shape[axis] == *size), "{size}");
        }
    }
}

catalogue![
    products_of_any_shape_are_exact,
    every_pair_of_dtypes_gives_what_f32_sums_can_be,
    a_long_sum_stays_close,
    no_columns_give_zeros_and_nothing_in_gives_nothing,
    a_table_worked_out_by_hand_comes_out,
    sums_are_made_in_f32_and_rounded_once_to_even,
    f32_values_keep_all_their_bits,
    the_smallest_and_largest_f16_values_are_multiplied_as_they_are,
    values_at_the_ends_of_the_f32_range_come_through,
    zeros_of_either_sign_are_zeros,
];
