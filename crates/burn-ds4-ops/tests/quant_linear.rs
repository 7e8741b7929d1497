//! The product with packed weights against sums in f64, at shapes that fit no tile.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::quant::{Fp4Layout, Weights};

use super::common::{
    EXACT, FLOATS, assert_close, compiles_slowly, devices, dtypes, every_dtype, is_gpu, seeded,
    skip, some,
};
use super::drawn::bits;
use super::linear::{Input, linear};
use super::packing::{
    FP4, FP8, FP8_BLOCKS32, FP8_BLOCKS32_PAIR, FP8_PAIR, Format, Packed, REPACKED_FP4,
    every_format, fp8_blocks,
};

const OUTPUTS: [usize; 7] = [1, 7, 15, 16, 17, 130, 257];
const INPUTS: [usize; 12] = [1, 3, 31, 32, 33, 127, 128, 129, 511, 513, 1000, 4104];
const ROWS: [usize; 12] = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 40, 130];
/// Products that the oracle works out for one shape at most: it is slow.
const MAX_PRODUCTS: usize = 1 << 21;
/// Has no divisor in common with how many numbers of outputs, or inputs, there are.
const SOME: usize = 5;

/// Every pair of a number of outputs and one of inputs, with all numbers of rows in turn.
fn shapes() -> impl Iterator<Item = (usize, [usize; 3])> {
    (0..OUTPUTS.len() * INPUTS.len()).map(|i| {
        let (outputs, inputs) = (OUTPUTS[i % 7], INPUTS[i * 5 % 12]);
        let rows = ROWS.into_iter();
        let rows: Vec<usize> = rows
            .filter(|r| r * outputs * inputs <= MAX_PRODUCTS)
            .collect();
        (i, [rows[(i + i / 12) % rows.len()], outputs, inputs])
    })
}

/// Every pair where `all`, or as many as it takes for every number to be among them; a software
/// driver of wgpu compiles kernels for longer than they run, and gets fewer. It gets fewer still by
/// dense weights, where most pairs have kernels of their own and the products other tests.
fn products_of_any_shape_are_exact(format: Format, all: bool) {
    for (i, [rows, outputs, inputs]) in shapes() {
        if [FP8_PAIR, FP8_BLOCKS32_PAIR].contains(&format) && outputs % 2 != 0 {
            continue;
        }
        let weights = Packed::exact(format, [1, outputs, inputs], 0, i as u64);
        for (name, device) in devices() {
            let step = match (format, compiles_slowly(name)) {
                (Format::Dense(_), true) => 3 * SOME,
                (_, false) if all => 1,
                _ => SOME,
            };
            if i % step != 0 {
                continue;
            }
            // Every dtype that the device has takes its turn.
            let dtypes = dtypes(name, device);
            let dtype = dtypes[i % dtypes.len()];
            let x = Input::exact([rows, inputs], dtype, i as u64);
            let y = linear(x.on(device), &weights.on(device));
            x.check_exact(&weights, &y, &format!("{name} {dtype:?}"));
        }
    }
}

fn fp4_products_of_any_shape_are_exact() {
    products_of_any_shape_are_exact(FP4, true);
}

fn repacked_fp4_products_of_any_shape_are_exact() {
    products_of_any_shape_are_exact(REPACKED_FP4, true);
}

fn fp8_products_of_any_shape_are_exact() {
    products_of_any_shape_are_exact(FP8, true);
}

fn fp8_products_of_matrices_in_two_parts_are_exact() {
    products_of_any_shape_are_exact(FP8_PAIR, false);
}

fn fp8_products_in_blocks_of_32_are_exact() {
    products_of_any_shape_are_exact(FP8_BLOCKS32, false);
}

fn fp8_products_in_blocks_of_32_of_matrices_in_two_parts_are_exact() {
    products_of_any_shape_are_exact(FP8_BLOCKS32_PAIR, false);
}

fn dense_products_of_any_shape_are_exact() {
    products_of_any_shape_are_exact(Format::Dense(FloatDType::F32), false);
}

fn any_weights_times_any_x_are_what_f32_sums_can_be() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            for dtype in FLOATS.into_iter().filter(|&d| device.supports_dtype(d)) {
                let shapes = [[1, 130, 513], [6, 96, 512], [40, 130, 384]];
                for (i, &[rows, outputs, inputs]) in some(name, &shapes, 2).enumerate() {
                    let weights = Packed::random(format, [1, outputs, inputs], i as u64);
                    let x = Input::random([rows, inputs], dtype, i as u64 + 9);
                    let y = linear(x.on(device), &weights.on(device));
                    x.check(&weights, &y, &format!("{name} {dtype:?}"));
                }
            }
        });
    }
}

fn a_long_sum_stays_close() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, FP8] {
            let weights = Packed::random(format, [1, 16, 20_000], 5);
            for rows in [1, 3, 20] {
                let x = Input::random([rows, 20_000], dtype, 6);
                x.check(&weights, &linear(x.on(device), &weights.on(device)), name);
            }
        }
    });
}

/// Where columns of a block have one scale, the largest of them has no weight here.
fn what_is_small_next_to_what_is_large_counts() {
    every_dtype(|name, device, dtype| {
        let (outputs, inputs) = (17, 384);
        let codes = (0..outputs * inputs).map(|i| if i % 128 == 5 { 0 } else { 0x38 });
        let scales = vec![1.0; fp8_blocks([1, outputs, inputs], 1).iter().product()];
        let weights = Packed::fp8([1, outputs, inputs], 1, codes.collect(), scales);
        let exponents: &[i32] = match dtype {
            FloatDType::F16 => &[0, 3, -5],
            _ => &[0, 60, -90],
        };
        let values: Vec<f32> = exponents
            .iter()
            .flat_map(|&exponent| {
                let small = 2.0_f32.powi(exponent - 8);
                let large = small * 2.0_f32.powi(20);
                (0..inputs).map(move |i| if i % 128 == 5 { large } else { small })
            })
            .collect();
        let x = Input::new([exponents.len(), inputs], dtype, &values);
        for rows in 1..=exponents.len() {
            let x = x.rows(exponents.len() - rows..exponents.len());
            let y = linear(x.on(device), &weights.on(device));
            x.check_exact(&weights, &y, &format!("{name} {dtype:?} {rows} rows"));
        }
    });
}

/// More than one launch takes.
fn as_many_rows_as_a_long_text_has_tokens() {
    let weights = Packed::exact(FP4, [1, 3, 32], 0, 1);
    let x = Input::exact([131_075, 32], FloatDType::F32, 2);
    for (name, device) in devices() {
        x.check_exact(&weights, &linear(x.on(device), &weights.on(device)), name);
    }
}

fn weights_may_be_any_view() {
    for (name, device) in devices() {
        // Columns 2 to 9 of 11 words, in the second of three matrices.
        let words = seeded(device, 5, || bits([3, 40, 11], device));
        let words = words.slice_dim(0, 1..2).slice_dim(2, 2..9);
        let unit = Tensor::<2, Int>::full([3, 20], 0x7f7f_7f7f, (device, DType::U32));
        let unit = unit.slice_dim(0, 1..2);
        let dense = Weights::fp4(words.clone(), unit.clone(), 56, Fp4Layout::Plain).unwrap();
        let dense = dense.dequantize(FloatDType::F32).unwrap();
        let copy = Tensor::from_data(words.to_data(), (device, DType::U32));
        let turned = Tensor::<3>::from_data(dense.clone().swap_dims(1, 2).to_data(), device);
        let x = Input::exact([3, 56], FloatDType::F32, 4);
        let products = [
            Weights::fp4(copy, unit.clone(), 56, Fp4Layout::Plain),
            Weights::fp4(words, unit, 56, Fp4Layout::Plain),
            Weights::dense(dense),
            Weights::dense(turned.swap_dims(1, 2)),
        ]
        .map(|weights| linear(x.on(device), &weights.unwrap()));
        assert!(products[0].iter().any(|&product| product != 0.0));
        for product in &products[1..] {
            assert_close(product, &products[0], EXACT, name);
        }
    }
}

fn nothing_in_gives_nothing_and_no_inputs_give_zeros() {
    for (name, device) in devices() {
        for format in [FP4, FP8, FP8_PAIR, Format::Dense(FloatDType::F32)] {
            for [rows, outputs, inputs] in [[0, 6, 40], [3, 0, 40], [3, 6, 0], [0, 0, 0]] {
                let weights = Packed::exact(format, [1, outputs, inputs], 0, 1);
                let x = Input::exact([rows, inputs], FloatDType::F32, 2);
                let y = linear(x.on(device), &weights.on(device));
                assert_close(&y, &vec![0.0; rows * outputs], EXACT, name);
            }
        }
    }
}

/// Compares rows next to others with each row alone.
fn rows_are_as_alone(
    (name, device, dtype): (&str, &Device, FloatDType),
    format: Format,
    [outputs, inputs]: [usize; 2],
    numbers_of_rows: impl IntoIterator<Item = usize>,
) {
    let weights = Packed::random(format, [1, outputs, inputs], 3).on(device);
    let x = Input::random([16, inputs], dtype, 4);
    let alone: Vec<f32> = (0..16)
        .flat_map(|row| linear(x.rows(row..row + 1).on(device), &weights))
        .collect();
    for rows in numbers_of_rows {
        let together = linear(x.rows(0..rows).on(device), &weights);
        let what = format!("{name} {format:?} [{outputs}, {inputs}] {rows} rows");
        assert_close(&together, &alone[..rows * outputs], EXACT, &what);
    }
}

fn a_row_does_not_depend_on_the_rows_next_to_it() {
    // On a GPU, also so many inputs that they come to shared memory in parts, and so many outputs
    // that a cube comes to it several times.
    let (all, few) = ([[130, 520], [130, 8200], [8500, 2600]], [[130, 520]]);
    every_dtype(|name, device, dtype| {
        let shapes = if is_gpu(name) { &all[..] } else { &few };
        for format in [FP4, REPACKED_FP4, FP8] {
            for &shape in shapes {
                rows_are_as_alone((name, device, dtype), format, shape, 1..=16);
            }
        }
    });
}

/// FP8 of whole blocks of columns, which a GPU may multiply by rows in registers: one block to a
/// plane and several, and more outputs than a cube comes to at a time.
fn a_row_of_whole_blocks_does_not_depend_on_the_rows_next_to_it() {
    let (all, few) = ([[130, 4096], [130, 7168], [5000, 8192]], [[17, 256]]);
    every_dtype(|name, device, dtype| {
        let shapes = if is_gpu(name) { &all[..] } else { &few };
        for &shape in shapes {
            rows_are_as_alone((name, device, dtype), FP8, shape, [2, 5, 8, 9, 16]);
        }
    });
}

fn two_runs_give_the_same_bits() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, REPACKED_FP4, FP8] {
            let weights = Packed::random(format, [1, 257, 1000], 3).on(device);
            for rows in [1, 7, 130] {
                let x = Input::random([rows, 1000], dtype, 4);
                let [first, second] = [0, 1].map(|_| linear(x.on(device), &weights));
                let bits = |y: Vec<f32>| y.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert!(bits(first) == bits(second), "{name} {format:?} {rows} rows");
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_row() {
    every_dtype(|name, device, dtype| {
        // On a GPU, also whole blocks of columns, for which rows may be in registers.
        let widths = if is_gpu(name) {
            &[513, 4096][..]
        } else {
            &[513]
        };
        for (format, &inputs) in [FP4, FP8]
            .into_iter()
            .flat_map(|f| widths.iter().map(move |w| (f, w)))
        {
            let outputs = 130;
            let packed = Packed::exact(format, [1, outputs, inputs], 0, 7);
            let first = packed.matrix(0);
            let weights = packed.on(device);
            for rows in [4, 40] {
                let clean = Input::random([rows, inputs], dtype, 8);
                let mut spoilt = Input::random([rows, inputs], dtype, 8);
                spoilt.values[inputs + inputs - 1] = f32::NAN;
                spoilt.values[2 * inputs] = f32::INFINITY;
                let expected = linear(clean.on(device), &weights);
                let actual = linear(spoilt.on(device), &weights);
                let what = format!("{name} {format:?} {rows} rows");
                assert_close(&actual[..outputs], &expected[..outputs], EXACT, &what);
                let after = 3 * outputs..rows * outputs;
                assert_close(&actual[after.clone()], &expected[after], EXACT, &what);
                let nan = &actual[outputs..2 * outputs];
                assert!(nan.iter().all(|v| v.is_nan()), "{what}: NaN");
                // Infinity times the sign of a weight, NaN where that is zero.
                let infinite = (0..outputs).map(|row| {
                    let weight = first[row * inputs];
                    (f64::INFINITY * weight) as f32
                });
                let infinite: Vec<f32> = infinite.collect();
                let actual = &actual[2 * outputs..3 * outputs];
                assert_close(actual, &infinite, EXACT, &format!("{what}: infinity"));
            }
        }
    });
}

fn x_may_be_any_view() {
    every_dtype(|name, device, dtype| {
        let inputs = 264;
        for format in [FP4, FP8, Format::Dense(FloatDType::F32)] {
            let weights = Packed::exact(format, [1, 33, inputs], 0, 1);
            let on_device = weights.on(device);
            // Dense weights have kernels for each number of rows, and other tests of views.
            let step = match format {
                Format::Dense(_) => 3,
                _ => 1,
            };
            for &rows in some(name, &[6, 1, 40], step) {
                let x = Input::exact([rows, inputs], dtype, 2);
                let check = |y: Vec<f32>, view| {
                    x.check_exact(&weights, &y, &format!("{name} {view}"));
                };
                let dense = x.on(device);
                let column_major = dense.clone().transpose().mul_scalar(1.0).transpose();
                check(linear(column_major, &on_device), "transposed");
                let rows_of_more = Tensor::cat(vec![dense.clone().neg(), dense.clone()], 1);
                let tail = rows_of_more.slice([0..rows, inputs..2 * inputs]);
                check(linear(tail, &on_device), "columns of a wider matrix");
                let odd = Tensor::cat(vec![dense.clone().slice([0..rows, 0..1]), dense.clone()], 1);
                let odd = odd.slice([0..rows, 1..inputs + 1]);
                check(linear(odd, &on_device), "columns from an odd one on");
                let above = Tensor::cat(vec![dense.clone().neg(), dense.clone()], 0);
                let below = above.slice([rows..2 * rows, 0..inputs]);
                check(linear(below, &on_device), "rows of a higher matrix");
                let cube = dense.clone().reshape([rows, 1, inputs]);
                check(linear(cube, &on_device), "three dimensions");
                let swapped = dense.clone().reshape([1, rows, inputs]).swap_dims(0, 1);
                check(linear(swapped, &on_device), "three dimensions, swapped");
            }
            let one = Input::exact([1, inputs], dtype, 5);
            let vector = one.on(device).reshape([inputs]);
            let y = linear(vector, &on_device);
            one.check_exact(&weights, &y, &format!("{name} vector"));
            let expanded = one.on(device).expand([5, inputs]);
            let y = linear(expanded, &on_device);
            for y in y.chunks(33) {
                one.check_exact(&weights, y, &format!("{name} expanded"));
            }
        }
    });
}

fn values_at_the_ends_of_the_range_come_through() {
    for (name, device) in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            if !device.supports_dtype(dtype) {
                skip(name, "bf16");
                continue;
            }
            for (format, factor) in [(FP4, 1e30_f32), (FP8, 1e30), (FP8, 1e-30)] {
                let weights = Packed::exact(format, [1, 40, 513], 0, 1);
                for rows in [1, 4, 20] {
                    let x = Input::random([rows, 513], dtype, 2);
                    let values: Vec<f32> = x.values.iter().map(|v| v * factor).collect();
                    let x = Input::new([rows, 513], dtype, &values);
                    let what = format!("{name} {dtype:?} times {factor:e}");
                    x.check(&weights, &linear(x.on(device), &weights.on(device)), &what);
                }
            }
        }
    }
}

fn sums_beyond_the_range_of_the_dtype_are_infinite() {
    every_dtype(|name, device, dtype| {
        let (largest, signs) = match dtype {
            FloatDType::F16 => (6e4, [1.0, -1.0]),
            _ => (3e38, [1.0, -1.0]),
        };
        for rows in [1, 20] {
            // Codes of 4 in one row of weights, of -4 in the other.
            let codes = [[6; 64], [14; 64]].concat();
            let weights = Packed::fp4([1, 2, 64], codes, vec![127; 4]).on(device);
            let x = Input::new([rows, 64], dtype, &vec![largest; rows * 64]);
            let expected = signs.map(|sign| sign * f32::INFINITY).repeat(rows);
            assert_close(&linear(x.on(device), &weights), &expected, EXACT, name);
        }
    });
}

fn zeros_of_either_sign_are_zeros() {
    every_dtype(|name, device, dtype| {
        for rows in [1, 20] {
            let x = vec![-0.0; rows * 64];
            let codes = [[8; 64], [3; 64], [11; 64]].concat();
            let weights = Packed::fp4([1, 3, 64], codes, vec![127; 6]);
            let negative = Input::new([rows, 64], dtype, &x).on(device);
            let y = linear(negative, &weights.on(device));
            assert_close(&y, &vec![0.0; rows * 3], EXACT, name);
            let x = Input::exact([rows, 64], dtype, 3);
            let y = linear(x.on(device), &weights.on(device));
            x.check_exact(&weights, &y, name);
        }
    });
}

#[test]
fn every_number_of_rows_outputs_and_inputs_is_among_the_shapes() {
    for (axis, sizes) in [&ROWS[..], &OUTPUTS, &INPUTS].into_iter().enumerate() {
        for size in sizes {
            assert!(shapes().any(|(_, shape)| shape[axis] == *size), "{size}");
            let few = axis == 0
                || shapes()
                    .step_by(SOME)
                    .any(|(_, shape)| shape[axis] == *size);
            assert!(few, "{size}");
        }
    }
}

catalogue![
    fp4_products_of_any_shape_are_exact,
    repacked_fp4_products_of_any_shape_are_exact,
    fp8_products_of_any_shape_are_exact,
    fp8_products_of_matrices_in_two_parts_are_exact,
    fp8_products_in_blocks_of_32_are_exact,
    fp8_products_in_blocks_of_32_of_matrices_in_two_parts_are_exact,
    dense_products_of_any_shape_are_exact,
    any_weights_times_any_x_are_what_f32_sums_can_be,
    a_long_sum_stays_close,
    what_is_small_next_to_what_is_large_counts,
    as_many_rows_as_a_long_text_has_tokens,
    weights_may_be_any_view,
    nothing_in_gives_nothing_and_no_inputs_give_zeros,
    a_row_does_not_depend_on_the_rows_next_to_it,
    a_row_of_whole_blocks_does_not_depend_on_the_rows_next_to_it,
    two_runs_give_the_same_bits,
    what_is_not_finite_stays_in_its_row,
    x_may_be_any_view,
    values_at_the_ends_of_the_range_come_through,
    sums_beyond_the_range_of_the_dtype_are_infinite,
    zeros_of_either_sign_are_zeros,
];
