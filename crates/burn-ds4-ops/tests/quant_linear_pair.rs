//! Linear maps by two matrices at once, each against the product with it alone, which has tests of
//! its own.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::quant::{Weights, quant_linear_pair};

use super::common::{EXACT, assert_close, devices, every_dtype, is_gpu, skip, some, two_devices};
use super::linear::{Input, linear, read_product};
use super::packing::{FP4, FP8, FP8_PAIR, Format, Packed, REPACKED_FP4};
use super::products::assert_same_bits;

const F32: FloatDType = FloatDType::F32;
/// On both sides of the most that are one launch.
const ROWS: [usize; 5] = [1, 2, 5, 16, 17];
/// A device that compiles slowly takes every so many of them: it has no tensor cores, so two
/// products are two launches for any number of rows.
const FEW: usize = 4;
/// Formats that are one launch, where the device has one for them.
pub const ALIKE: [[Format; 2]; 5] = [
    [FP8, FP8],
    [FP4, FP4],
    [REPACKED_FP4, REPACKED_FP4],
    [FP8_PAIR, FP8],
    [FP8, FP8_PAIR],
];

/// Reads back what `quant_linear_pair` gives.
#[track_caller]
fn pair<const D: usize>(x: Tensor<D>, weights: [&Weights; 2]) -> [Vec<f32>; 2] {
    let (shape, dtype) = (x.dims(), x.dtype());
    let products = quant_linear_pair(x, weights).expect("arguments that fit");
    let [first, second] = products;
    [(first, weights[0]), (second, weights[1])]
        .map(|(y, weights)| read_product(y, shape, weights.dims()[1], dtype))
}

/// Compares with the products one by one.
#[track_caller]
fn check<const D: usize>(x: &Tensor<D>, weights: [&Weights; 2], what: &str) {
    let products = pair(x.clone(), weights);
    for (index, (product, weights)) in products.iter().zip(weights).enumerate() {
        let alone = linear(x.clone(), weights);
        let [_, out, columns] = weights.dims();
        let what = format!(
            "{what}, weights[{index}] of {out} x {columns}, x {:?}",
            x.dims()
        );
        assert_same_bits(product, &alone, &what);
    }
}

fn each_of_two_has_the_bits_that_it_has_alone() {
    every_dtype(|name, device, dtype| {
        for formats in ALIKE {
            // Fewer rows than a tile has, no whole tiles, and one that is far larger than the
            // other.
            let sizes = [[130, 34], [2, 6], [16, 2], [2, 720]];
            for &outputs in some(name, &sizes, sizes.len()) {
                let columns = 1040;
                let [first, second] = [0, 1].map(|of| {
                    let shape = [1, outputs[of], columns];
                    Packed::random(formats[of], shape, of as u64).on(device)
                });
                for &rows in some(name, &ROWS, FEW) {
                    let x = Input::random([rows, columns], dtype, rows as u64).on(device);
                    check(&x, [&first, &second], &format!("{name} {formats:?}"));
                }
            }
        }
    });
}

fn columns_need_not_be_whole_k_blocks() {
    every_dtype(|name, device, dtype| {
        for format in [FP8, FP4] {
            // Some are no multiple of what tensor cores read at a time.
            let widths = [1, 16, 33, 128, 250, 256, 272, 512, 1000, 4128];
            for &columns in some(name, &widths, 4) {
                let [first, second] = [7, 21].map(|outputs| {
                    let shape = [1, outputs, columns];
                    Packed::random(format, shape, outputs as u64).on(device)
                });
                for rows in [1, 5] {
                    let x = Input::random([rows, columns], dtype, 3).on(device);
                    check(&x, [&first, &second], &format!("{name} {format:?}"));
                }
            }
        }
    });
}

fn formats_may_differ_and_be_dense() {
    every_dtype(|name, device, dtype| {
        let dense = Format::Dense(dtype);
        for formats in [
            [FP8, FP4],
            [FP4, FP8],
            [dense, FP8],
            [FP4, dense],
            [FP4, REPACKED_FP4],
            [dense, dense],
        ] {
            let [first, second] = [0, 1].map(|of| {
                let shape = [1, [40, 9][of], 520];
                Packed::random(formats[of], shape, of as u64).on(device)
            });
            // Dense weights have a kernel for each dtype and number of rows.
            let few = if dtype == F32 { FEW } else { ROWS.len() };
            for &rows in some(name, &ROWS, few) {
                let x = Input::random([rows, 520], dtype, 4).on(device);
                check(&x, [&first, &second], &format!("{name} {formats:?}"));
            }
        }
    });
}

/// Against the oracle of the product: the bits could be the same and wrong.
fn products_with_both_are_exact() {
    every_dtype(|name, device, dtype| {
        for formats in ALIKE {
            let packed = [0, 1].map(|of| {
                let shape = [1, [50, 150][of], 528];
                Packed::exact(formats[of], shape, 0, of as u64)
            });
            let [first, second] = packed.each_ref().map(|packed| packed.on(device));
            for &rows in some(name, &ROWS, FEW) {
                let x = Input::exact([rows, 528], dtype, 5);
                let products = pair(x.on(device), [&first, &second]);
                for (packed, product) in packed.iter().zip(&products) {
                    x.check_exact(packed, product, name);
                }
            }
        }
    });
}

/// The widths of a released layer where the device is fast enough: more tiles than cubes, and
/// fewer.
fn the_pairs_of_a_released_layer_come_out() {
    for (name, device) in devices() {
        for (outputs, columns) in [([1024, 512], 4096), ([32_768, 8192], 1024)] {
            let parts = if is_gpu(name) { 1 } else { 64 };
            let columns = if is_gpu(name) { columns } else { columns / 4 };
            let [first, second] = outputs.map(|outputs| {
                let shape = [1, outputs / parts, columns];
                Packed::random(FP8, shape, outputs as u64).on(device)
            });
            for dtype in [F32, FloatDType::BF16] {
                if !device.supports_dtype(dtype) {
                    skip(name, "bf16");
                    continue;
                }
                for rows in [1, 2, 16] {
                    let x = Input::random([rows, columns], dtype, 6).on(device);
                    check(&x, [&first, &second], name);
                    check(&x, [&second, &first], name);
                }
            }
        }
    }
}

fn both_may_be_the_same_matrix() {
    every_dtype(|name, device, dtype| {
        let weights = Packed::random(FP8, [1, 40, 256], 1).on(device);
        let x = Input::random([3, 256], dtype, 2).on(device);
        check(&x, [&weights, &weights], name);
    });
}

fn x_may_be_any_view() {
    every_dtype(|name, device, dtype| {
        for format in [FP8, FP4] {
            let [first, second] = [33, 18]
                .map(|outputs| Packed::random(format, [1, outputs, 288], outputs as u64))
                .map(|packed| packed.on(device));
            let both = [&first, &second];
            let x = Input::random([4, 288], dtype, 3).on(device);
            let turned = x.clone().transpose().mul_scalar(1.0).transpose();
            check(&turned, both, &format!("{name} transposed"));
            let wider = Tensor::cat(vec![x.clone().slice([0..4, 0..1]), x.clone()], 1);
            let odd = wider.slice([0..4, 1..289]);
            check(&odd, both, &format!("{name} columns from an odd one on"));
            let above = Tensor::cat(vec![x.clone().neg(), x.clone()], 0);
            let below = above.slice([4..8, 0..288]);
            check(&below, both, &format!("{name} rows of a higher matrix"));
            let more = x.clone().reshape([2, 1, 2, 288]);
            check(&more, both, &format!("{name} four dimensions"));
            let one = x.slice([0..1, 0..288]).reshape([288]);
            check(&one, both, &format!("{name} vector"));
        }
    });
}

fn a_row_does_not_depend_on_the_rows_next_to_it() {
    every_dtype(|name, device, dtype| {
        for format in [FP8, FP4] {
            let [first, second] = [66, 20]
                .map(|outputs| Packed::random(format, [1, outputs, 544], outputs as u64))
                .map(|packed| packed.on(device));
            let x = Input::random([16, 544], dtype, 4);
            let alone: Vec<[Vec<f32>; 2]> = (0..16)
                .map(|row| pair(x.rows(row..row + 1).on(device), [&first, &second]))
                .collect();
            for rows in [2, 5, 9, 16] {
                let together = pair(x.rows(0..rows).on(device), [&first, &second]);
                for (of, together) in together.iter().enumerate() {
                    let alone: Vec<f32> = alone[..rows]
                        .iter()
                        .flat_map(|products| products[of].clone())
                        .collect();
                    let what = format!("{name} {format:?} {rows} rows");
                    assert_same_bits(together, &alone, &what);
                }
            }
        }
    });
}

fn nothing_in_gives_nothing_and_no_inputs_give_zeros() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, FP8, Format::Dense(F32)] {
            for (rows, outputs, columns) in [
                (0, [6, 3], 32),
                (3, [0, 3], 32),
                (3, [6, 0], 32),
                (3, [0, 0], 32),
                (3, [6, 3], 0),
                (0, [0, 0], 0),
            ] {
                let packed =
                    outputs.map(|outputs| Packed::exact(format, [1, outputs, columns], 0, 1));
                let [first, second] = packed.each_ref().map(|packed| packed.on(device));
                let x = Input::exact([rows, columns], dtype, 2);
                let products = pair(x.on(device), [&first, &second]);
                for (packed, product) in packed.iter().zip(&products) {
                    x.check_exact(packed, product, name);
                }
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_row_and_matrix() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, FP8] {
            let mut packed = [34, 50].map(|outputs| Packed::exact(format, [1, outputs, 96], 0, 7));
            for rows in [3, 16] {
                let mut x = Input::exact([rows, 96], dtype, 8);
                x.values[96 + 7] = f32::NAN;
                let [first, second] = packed.each_ref().map(|packed| packed.on(device));
                let products = pair(x.on(device), [&first, &second]);
                for (product, outputs) in products.iter().zip([34, 50]) {
                    for (row, product) in product.chunks(outputs).enumerate() {
                        let spoilt = row == 1;
                        assert!(product.iter().all(|v| v.is_nan() == spoilt), "{name} {row}");
                    }
                }
            }
            let x = Input::exact([3, 96], dtype, 8);
            let second = packed[1].on(device);
            let expected = linear(x.on(device), &second);
            packed[0].poison(0);
            let [first, product] = pair(x.on(device), [&packed[0].on(device), &second]);
            assert!(first.iter().all(|v| v.is_nan()), "{name}");
            assert_close(&product, &expected, EXACT, name);
        }
    });
}

fn a_pair_refuses_what_does_not_fit_by_name() {
    for (name, device) in devices() {
        let of = |shape| Weights::dense(Tensor::zeros(shape, (device, DType::F32))).unwrap();
        let refused = |first: [usize; 3], second: [usize; 3]| {
            let x = Tensor::<2>::zeros([3, 4], (device, DType::F32));
            let result = quant_linear_pair(x, [&of(first), &of(second)]);
            result.expect_err(name).to_string()
        };
        assert_eq!(
            refused([1, 5, 3], [1, 5, 4]),
            "`weights[0]` has shape [1, 5, 3], expected [1, 5, 4]"
        );
        assert_eq!(
            refused([1, 6, 4], [1, 5, 3]),
            "`weights[1]` has shape [1, 5, 3], expected [1, 5, 4]"
        );
        assert_eq!(
            refused([1, 6, 4], [2, 5, 4]),
            "`weights[1]` has shape [2, 5, 4], expected [1, 5, 4]"
        );
        assert_eq!(
            refused([0, 6, 4], [1, 5, 4]),
            "`weights[0]` has shape [0, 6, 4], expected [1, 6, 4]"
        );
    }
    let device = &devices()[0].1;
    let x = Tensor::<2>::zeros([3, 4], (device, DType::F64));
    let weights = Packed::exact(FP8, [1, 5, 4], 0, 1).on(device);
    let error = quant_linear_pair(x, [&weights, &weights]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`x` has dtype F64, expected F32, F16 or BF16"
    );
}

fn a_pair_refuses_weights_on_another_device() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let packed = Packed::exact(FP8, [1, 5, 4], 0, 1);
    let (here, there) = (packed.on(first), packed.on(second));
    for (weights, named) in [
        ([&there, &here], "weights[0]"),
        ([&here, &there], "weights[1]"),
    ] {
        let x = Tensor::<2>::zeros([3, 4], (first, DType::F32));
        let result = quant_linear_pair(x, weights);
        assert!(
            matches!(
                result,
                Err(OpError::DeviceMismatch {
                    argument,
                    other: "x",
                    ..
                }) if argument == named
            ),
            "{result:?}"
        );
    }
}

catalogue![
    each_of_two_has_the_bits_that_it_has_alone,
    columns_need_not_be_whole_k_blocks,
    formats_may_differ_and_be_dense,
    products_with_both_are_exact,
    the_pairs_of_a_released_layer_come_out,
    both_may_be_the_same_matrix,
    x_may_be_any_view,
    a_row_does_not_depend_on_the_rows_next_to_it,
    nothing_in_gives_nothing_and_no_inputs_give_zeros,
    what_is_not_finite_stays_in_its_row_and_matrix,
    a_pair_refuses_what_does_not_fit_by_name,
    a_pair_refuses_weights_on_another_device,
];
