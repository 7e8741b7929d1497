//! Linear maps by two matrices at once, and by two and some dense ones, each against the product
//! with it alone, which has tests of its own.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_ds4_ops::matmul::SmallMOptions;
use burn_ds4_ops::quant::{Activations, Weights, quant_linear_group, quant_linear_pair};

use super::common::{devices, every_dtype, is_gpu, skip, some};
use super::linear::{Input, linear, read_product};
use super::packing::{FP4, FP8, FP8_PAIR, Format, Packed, REPACKED_FP4};
use super::products::{Product, assert_same_bits, options, outputs, product};

const F32: FloatDType = FloatDType::F32;
/// On both sides of the most that are one launch, and of the most that are invariant.
const ROWS: [usize; 7] = [1, 2, 5, 8, 9, 16, 17];
/// Columns of which packed and dense weights need cubes of as many planes, so that they can be one
/// launch. Neither number is one of whole K-blocks.
const COLUMNS: usize = 992;
const FEW_COLUMNS: usize = 480;
/// A device that compiles slowly takes every so many of them: there, nothing is one launch.
const FEW: usize = 4;

/// Formats that are one launch, where the device has one for them.
const ALIKE: [[Format; 2]; 5] = [
    [FP8, FP8],
    [FP4, FP4],
    [REPACKED_FP4, REPACKED_FP4],
    [FP8_PAIR, FP8],
    [FP8, FP8_PAIR],
];

/// Reads back what `quant_linear_group` gives, or without dense weights `quant_linear_pair`.
#[track_caller]
fn group<const D: usize>(
    x: Tensor<D>,
    weights: [&Weights; 2],
    dense: &[Tensor<2>],
    options: SmallMOptions,
) -> ([Vec<f32>; 2], Vec<Vec<f32>>) {
    let (shape, dtype) = (x.dims(), x.dtype());
    let output = if options.f32_output {
        DType::F32
    } else {
        dtype
    };
    let results = match dense {
        [] => quant_linear_pair(x, weights).map(|pair| (pair, vec![])),
        _ => quant_linear_group(x, weights, dense, options),
    };
    let (pair, products) = results.expect("they fit");
    let [first, second] = pair;
    let pair = [(first, weights[0]), (second, weights[1])];
    assert_eq!(products.len(), dense.len());
    let products = products.into_iter().zip(dense);
    (
        pair.map(|(y, weights)| read_product(y, shape, weights.dims()[1], dtype)),
        products
            .map(|(y, weights)| read_product(y, shape, weights.dims()[0], output))
            .collect(),
    )
}

/// Compares with the products one by one, and those of the pair alone with them.
#[track_caller]
fn check<const D: usize>(
    x: &Tensor<D>,
    weights: [&Weights; 2],
    dense: &[Tensor<2>],
    options: SmallMOptions,
    what: &str,
) {
    let what = format!("{what} {:?}", x.dims());
    let (pair, products) = group(x.clone(), weights, dense, options);
    let (of_two, _) = group(x.clone(), weights, &[], options);
    for (of, weights) in weights.into_iter().enumerate() {
        let alone = linear(x.clone(), weights);
        let what = format!("{what} · {:?}", weights.dims());
        assert_same_bits(&pair[of], &alone, &what);
        assert_same_bits(&of_two[of], &alone, &format!("{what} of two"));
    }
    let columns = x.dims()[D - 1];
    let rows: usize = x.dims()[..D - 1].iter().product();
    for (together, weights) in products.iter().zip(dense) {
        let x = x.clone().reshape([rows, columns]);
        let alone = product(x, weights.clone(), options);
        assert_same_bits(together, &alone, &format!("{what} · {:?}", weights.dims()));
    }
}

fn each_has_the_bits_that_it_has_alone() {
    every_dtype(|name, device, dtype| {
        let formats = [&ALIKE[..], &[[FP8, FP4]]].concat();
        for formats in some(name, &formats, 3) {
            // No whole tiles, and more of them in one part than in the other.
            let sizes: [([usize; 2], &[usize]); 4] = [
                ([130, 34], &[24, 1, 70]),
                ([2, 720], &[5]),
                ([2, 6], &[600]),
                ([720, 16], &[8, 8, 8, 8, 8]),
            ];
            for (outputs_of, dense) in some(name, &sizes, sizes.len()) {
                let [first, second] = [0, 1].map(|of| {
                    let shape = [1, outputs_of[of], COLUMNS];
                    Packed::random(formats[of], shape, of as u64).on(device)
                });
                let dense: Vec<_> = dense
                    .iter()
                    .map(|&out| Input::random([out, COLUMNS], dtype, out as u64).on(device))
                    .collect();
                for &rows in some(name, &ROWS, FEW) {
                    let x = Input::random([rows, COLUMNS], dtype, rows as u64).on(device);
                    for output in outputs(dtype) {
                        let what = format!("{name} -> {output:?}, {formats:?}");
                        check(&x, [&first, &second], &dense, options(output), &what);
                    }
                }
            }
        }
    });
}

fn columns_need_not_be_whole_k_blocks() {
    every_dtype(|name, device, dtype| {
        // Some are no multiple of what tensor cores read at a time.
        let widths = [
            1, 16, 33, 128, 250, 256, 272, 512, COLUMNS, 1000, 4096, 4128,
        ];
        for &columns in some(name, &widths, 4) {
            let dense = [Input::random([33, columns], dtype, 3).on(device)];
            for format in [FP8, FP4] {
                let [first, second] = [7, 21].map(|outputs| {
                    let shape = [1, outputs, columns];
                    Packed::random(format, shape, outputs as u64).on(device)
                });
                for rows in [1, 5] {
                    let x = Input::random([rows, columns], dtype, 4).on(device);
                    check(&x, [&first, &second], &dense, options(F32), name);
                }
            }
        }
    });
}

/// Those of a released layer where the device is fast enough.
fn the_projections_of_a_released_layer_come_out() {
    for (name, device) in devices() {
        let parts = if is_gpu(name) { 1 } else { 16 };
        let columns = 4096 / parts;
        let [first, second] = [1024, 512].map(|outputs| {
            let shape = [1, outputs / parts, columns];
            Packed::random(FP8, shape, outputs as u64).on(device)
        });
        for dtype in [F32, FloatDType::BF16] {
            if !device.supports_dtype(dtype) {
                skip(name, "bf16");
                continue;
            }
            // Whatever the dtype of `x`, released ones are `bf16`.
            let mut of_dense = vec![dtype, FloatDType::BF16];
            of_dense.retain(|dtype| device.supports_dtype(*dtype));
            of_dense.dedup();
            for of in of_dense {
                for heights in [&[2048, 512, 64][..], &[1024][..]] {
                    let dense = heights.iter().map(|out| {
                        let shape = [out / parts, columns];
                        Input::random(shape, of, *out as u64).on(device)
                    });
                    let dense: Vec<_> = dense.collect();
                    for rows in [1, 2, 5, 8, 16] {
                        let x = Input::random([rows, columns], dtype, 6).on(device);
                        let what = format!("{name} {dtype:?} by {of:?}");
                        check(&x, [&first, &second], &dense, options(F32), &what);
                    }
                }
            }
        }
    }
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
                    check(&x, [&first, &second], &[], options(F32), name);
                    check(&x, [&second, &first], &[], options(F32), name);
                }
            }
        }
    }
}

/// Against the oracles of the products: the bits could be the same and wrong.
fn products_with_all_are_exact() {
    every_dtype(|name, device, dtype| {
        for formats in ALIKE {
            let packed = [0, 1].map(|of| {
                let shape = [1, [50, 150][of], COLUMNS];
                Packed::exact(formats[of], shape, 0, of as u64)
            });
            let [first, second] = packed.each_ref().map(|packed| packed.on(device));
            for &rows in some(name, &ROWS, FEW) {
                let dense = Product::exact([rows, 40, COLUMNS], (dtype, dtype), 5);
                let weights = [dense.weights.on(device)];
                for weights in [&[][..], &weights] {
                    let x = dense.x.on(device);
                    let (pair, products) = group(x, [&first, &second], weights, options(F32));
                    for (packed, product) in packed.iter().zip(&pair) {
                        dense.x.check_exact(packed, product, name);
                    }
                    for product in products {
                        dense.check_exact(&product, F32, name);
                    }
                }
            }
        }
    });
}

fn dense_weights_may_be_none_many_or_of_several_dtypes() {
    every_dtype(|name, device, dtype| {
        let [first, second] =
            [40, 9].map(|out| Packed::random(FP8, [1, out, FEW_COLUMNS], out as u64).on(device));
        let weights = |out, of| Input::random([out, FEW_COLUMNS], of, out as u64).on(device);
        let groups = [
            vec![],
            (1..=7).map(|out| weights(out, dtype)).collect(),
            vec![weights(24, dtype), weights(0, dtype), weights(5, dtype)],
            vec![weights(24, dtype), weights(16, F32)],
            vec![weights(24, F32)],
        ];
        for dense in &groups {
            for &rows in some(name, &[1, 3, 16, 40], 3) {
                let x = Input::random([rows, FEW_COLUMNS], dtype, 4).on(device);
                check(&x, [&first, &second], dense, options(F32), name);
            }
        }
    });
}

fn the_pair_may_be_dense_or_of_two_formats() {
    every_dtype(|name, device, dtype| {
        let of_floats = Format::Dense(dtype);
        let dense = [Input::random([24, FEW_COLUMNS], dtype, 1).on(device)];
        for formats in [
            [FP8, FP4],
            [FP4, FP8],
            [FP4, REPACKED_FP4],
            [of_floats, FP8],
            [FP4, of_floats],
            [of_floats; 2],
        ] {
            let [first, second] = [0, 1].map(|of| {
                let shape = [1, [40, 9][of], FEW_COLUMNS];
                Packed::random(formats[of], shape, of as u64).on(device)
            });
            for &rows in some(name, &[3, 1, 16, 17], 4) {
                let x = Input::random([rows, FEW_COLUMNS], dtype, 4).on(device);
                let what = format!("{name} {formats:?}");
                check(&x, [&first, &second], &dense, options(F32), &what);
            }
        }
    });
}

fn both_may_be_the_same_matrix() {
    every_dtype(|name, device, dtype| {
        let weights = Packed::random(FP8, [1, 40, 256], 1).on(device);
        let x = Input::random([3, 256], dtype, 2).on(device);
        check(&x, [&weights, &weights], &[], options(F32), name);
    });
}

fn rounded_activations_are_those_of_the_pair() {
    every_dtype(|name, device, dtype| {
        let [first, second] = [40, 9].map(|out| {
            let weights = Packed::random(FP8, [1, out, 512], out as u64).on(device);
            weights.with_activations(Activations::Released)
        });
        let exact = first.clone().with_activations(Activations::Exact);
        let dense = [Input::random([24, 512], dtype, 1).on(device)];
        let x = Input::random([3, 512], dtype, 4).on(device);
        check(&x, [&first, &second], &dense, options(F32), name);
        check(&x, [&exact, &second], &dense, options(F32), name);
    });
}

fn x_may_be_any_view() {
    every_dtype(|name, device, dtype| {
        // Weights that are a view, too.
        let wide = Input::random([FEW_COLUMNS, 24], dtype, 1).on(device);
        let dense = [wide.transpose()];
        let x = Input::random([4, FEW_COLUMNS], dtype, 3).on(device);
        for format in [FP8, FP4] {
            let [first, second] = [33, 18]
                .map(|out| Packed::random(format, [1, out, FEW_COLUMNS], out as u64).on(device));
            let both = [&first, &second];
            let what = |view| format!("{name} {view}");
            let turned = x.clone().transpose().mul_scalar(1.0).transpose();
            check(&turned, both, &dense, options(F32), &what("transposed"));
            let wider = Tensor::cat(vec![x.clone().slice([0..4, 0..1]), x.clone()], 1);
            let odd = wider.slice([0..4, 1..FEW_COLUMNS + 1]);
            check(
                &odd,
                both,
                &dense,
                options(F32),
                &what("from an odd column on"),
            );
            let above = Tensor::cat(vec![x.clone().neg(), x.clone()], 0);
            let below = above.slice([4..8, 0..FEW_COLUMNS]);
            check(
                &below,
                both,
                &dense,
                options(F32),
                &what("rows of a higher matrix"),
            );
            let more = x.clone().reshape([2, 1, 2, FEW_COLUMNS]);
            check(&more, both, &dense, options(F32), &what("four dimensions"));
            let one = x.clone().slice([0..1, 0..FEW_COLUMNS]);
            let one = one.reshape([FEW_COLUMNS]);
            check(&one, both, &dense, options(F32), &what("vector"));
        }
    });
}

fn a_row_does_not_depend_on_the_rows_next_to_it() {
    every_dtype(|name, device, dtype| {
        let [first, second] = [66, 20].map(|out| Packed::random(FP8, [1, out, 1024], out as u64));
        let [first, second] = [first, second].map(|packed| packed.on(device));
        let [third, fourth] = [66, 20].map(|out| Packed::random(FP4, [1, out, 1024], out as u64));
        let [third, fourth] = [third, fourth].map(|packed| packed.on(device));
        let dense = [50, 9].map(|out| Input::random([out, 1024], dtype, out as u64).on(device));
        let x = Input::random([16, 1024], dtype, 4);
        let run = |rows: std::ops::Range<usize>| {
            let x = x.rows(rows).on(device);
            let (pair, products) = group(x.clone(), [&first, &second], &dense, options(F32));
            let (of_two, _) = group(x.clone(), [&first, &second], &[], options(F32));
            let (of_fp4, _) = group(x, [&third, &fourth], &[], options(F32));
            let pairs = pair.into_iter().chain(of_two).chain(of_fp4);
            pairs.chain(products).collect::<Vec<_>>()
        };
        let alone: Vec<_> = (0..16).map(|row| run(row..row + 1)).collect();
        for &rows in some(name, &[2, 5, 8, 9, 16], 3) {
            for (of, together) in run(0..rows).into_iter().enumerate() {
                let alone = alone[..rows]
                    .iter()
                    .flat_map(|products| products[of].clone());
                let what = format!("{name} {rows} rows, product {of}");
                assert_same_bits(&together, &alone.collect::<Vec<_>>(), &what);
            }
        }
    });
}

fn nothing_in_gives_nothing_and_no_inputs_give_zeros() {
    every_dtype(|name, device, dtype| {
        for (rows, outputs, columns) in [
            (0, [6, 3], 32),
            (3, [0, 3], 32),
            (3, [6, 0], 32),
            (3, [0, 0], 32),
            (3, [6, 3], 0),
            (0, [0, 0], 0),
        ] {
            for format in [FP8, FP4, Format::Dense(F32)] {
                let [first, second] =
                    outputs.map(|out| Packed::exact(format, [1, out, columns], 0, 1).on(device));
                let dense = [Input::exact([5, columns], dtype, 1).on(device)];
                let x = Input::exact([rows, columns], dtype, 2).on(device);
                check(&x, [&first, &second], &dense, options(F32), name);
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_row_and_matrix() {
    every_dtype(|name, device, dtype| {
        let mut packed = [34, 50].map(|out| Packed::exact(FP8, [1, out, 256], 0, 7));
        let on = |packed: &[Packed; 2]| packed.each_ref().map(|packed| packed.on(device));
        let mut weights = Input::exact([24, 256], dtype, 3);
        let mut x = Input::exact([3, 256], dtype, 8);
        let finite = group(
            x.on(device),
            on(&packed).each_ref(),
            &[weights.on(device)],
            options(F32),
        );
        packed[0].poison(0);
        weights.values[5 * 256 + 7] = f32::NAN;
        let ([first, second], products) = group(
            x.on(device),
            on(&packed).each_ref(),
            &[weights.on(device)],
            options(F32),
        );
        assert!(first.iter().all(|v| v.is_nan()), "{name}");
        assert_same_bits(&second, &finite.0[1], name);
        for (at, (value, finite)) in products[0].iter().zip(&finite.1[0]).enumerate() {
            match at % 24 {
                5 => assert!(value.is_nan(), "{name} {at}"),
                _ => assert_eq!(value, finite, "{name} {at}"),
            }
        }
        x.values[256 + 9] = f32::INFINITY;
        let (pair, products) = group(
            x.on(device),
            on(&packed).each_ref(),
            &[weights.on(device)],
            options(F32),
        );
        for (product, out) in [(&pair[1], 50), (&products[0], 24)] {
            for (at, value) in product.iter().enumerate() {
                let spoilt = at / out == 1 || (out == 24 && at % 24 == 5);
                assert!(value.is_finite() || spoilt, "{name} {at} of {out}");
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_row_and_matrix_of_two() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, FP8] {
            let mut packed = [34, 50].map(|outputs| Packed::exact(format, [1, outputs, 96], 0, 7));
            for rows in [3, 16] {
                let mut x = Input::exact([rows, 96], dtype, 8);
                x.values[96 + 7] = f32::NAN;
                let [first, second] = packed.each_ref().map(|packed| packed.on(device));
                let (products, _) = group(x.on(device), [&first, &second], &[], options(F32));
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
            let spoilt = packed[0].on(device);
            let (products, _) = group(x.on(device), [&spoilt, &second], &[], options(F32));
            let [first, product] = products;
            assert!(first.iter().all(|v| v.is_nan()), "{name}");
            assert_same_bits(&product, &expected, name);
        }
    });
}

catalogue![
    each_has_the_bits_that_it_has_alone,
    columns_need_not_be_whole_k_blocks,
    the_projections_of_a_released_layer_come_out,
    the_pairs_of_a_released_layer_come_out,
    products_with_all_are_exact,
    dense_weights_may_be_none_many_or_of_several_dtypes,
    the_pair_may_be_dense_or_of_two_formats,
    both_may_be_the_same_matrix,
    rounded_activations_are_those_of_the_pair,
    x_may_be_any_view,
    a_row_does_not_depend_on_the_rows_next_to_it,
    nothing_in_gives_nothing_and_no_inputs_give_zeros,
    what_is_not_finite_stays_in_its_row_and_matrix,
    what_is_not_finite_stays_in_its_row_and_matrix_of_two,
];
