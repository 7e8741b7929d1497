//! Products of one x with several weights at once.

use burn::tensor::{FloatDType, Tensor};
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul_group};

use super::common::{compiles_slowly, every_dtype, some, values};
use super::linear::Input;
use super::products::{assert_same_bits, options, outputs, pairs, product};

const F32: FloatDType = FloatDType::F32;

/// What the group gives, read back.
#[track_caller]
fn group(x: Tensor<2>, weights: Vec<Tensor<2>>, options: SmallMOptions) -> Vec<Vec<f32>> {
    let rows = x.dims()[0];
    let outputs: Vec<usize> = weights.iter().map(|weights| weights.dims()[0]).collect();
    let products = small_m_matmul_group(x, &weights, options).expect("arguments that fit");
    assert_eq!(products.len(), weights.len());
    let products = products.into_iter().zip(outputs);
    products
        .map(|(y, out)| {
            assert_eq!(y.dims(), [rows, out]);
            values(y.cast(F32))
        })
        .collect()
}

fn each_of_a_group_has_the_bits_that_it_has_alone() {
    every_dtype(|name, device, dtype| {
        // Where kernels compile slowly, columns and rows of which each product alone is compiled
        // by others. What finds the weights of a group knows nothing of columns.
        for &k in some(name, &[520, 7, 1000], 3) {
            for &rows in some(name, &[5, 1, 2, 16, 17, 40], 3) {
                let x = Input::random([rows, k], dtype, 1).on(device);
                for output in outputs(dtype) {
                    let options = options(output);
                    let weights = [130, 1, 33, 256].map(|n| Input::random([n, k], dtype, n as u64));
                    let weights = weights.map(|weights| weights.on(device));
                    let together = group(x.clone(), weights.to_vec(), options);
                    for (weights, together) in weights.into_iter().zip(together) {
                        let n = weights.dims()[0];
                        let alone = product(x.clone(), weights, options);
                        let what = format!("{name} -> {output:?}, [{rows}, {k}] x {n}");
                        assert_same_bits(&together, &alone, &what);
                    }
                }
            }
        }
    });
}

fn weights_of_a_group_may_differ_in_dtype() {
    every_dtype(|name, device, dtype| {
        let base = name.split(' ').next().unwrap_or_default();
        let dtypes: Vec<FloatDType> = pairs(base, device)
            .into_iter()
            .filter_map(|(x, weights)| (x == dtype).then_some(weights))
            .collect();
        // A group, and too many rows for one.
        for &rows in some(name, &[3, 1, 16, 40], 3) {
            let x = Input::random([rows, 520], dtype, 2).on(device);
            // Every dtype twice, never next to itself.
            let weights = dtypes.iter().chain(&dtypes).enumerate();
            let weights: Vec<Tensor<2>> = weights
                .map(|(i, &dtype)| Input::random([24 + i, 520], dtype, i as u64).on(device))
                .collect();
            let together = group(x.clone(), weights.clone(), options(F32));
            for (weights, together) in weights.into_iter().zip(together) {
                let what = format!("{name} x {:?}, {rows} rows", weights.dtype());
                let alone = product(x.clone(), weights, options(F32));
                assert_same_bits(&together, &alone, &what);
            }
        }
    });
}

fn a_group_may_be_empty_or_of_one() {
    every_dtype(|name, device, dtype| {
        let x = Input::random([3, 40], dtype, 4).on(device);
        assert!(
            group(x.clone(), Vec::new(), options(F32)).is_empty(),
            "{name}"
        );
        let weights = Input::random([33, 40], dtype, 5).on(device);
        let alone = product(x.clone(), weights.clone(), options(F32));
        let together = group(x, vec![weights], options(F32));
        assert_same_bits(&together[0], &alone, name);
    });
}

fn weights_without_rows_give_nothing_and_leave_the_others_alone() {
    every_dtype(|name, device, dtype| {
        for &rows in some(name, &[0, 1, 40, 16], 3) {
            for k in [0, 40] {
                let x = Input::random([rows, k], dtype, 6).on(device);
                let weights = [5, 0, 7].map(|n| Input::random([n, k], dtype, 7).on(device));
                let together = group(x.clone(), weights.to_vec(), options(F32));
                for (weights, together) in weights.into_iter().zip(together) {
                    let what = format!("{name} [{rows}, {k}] x {}", weights.dims()[0]);
                    let alone = product(x.clone(), weights, options(F32));
                    assert_same_bits(&together, &alone, &what);
                }
            }
        }
    });
}

fn rows_of_a_group_do_not_depend_on_each_other() {
    every_dtype(|name, device, dtype| {
        let x = Input::random([16, 1000], dtype, 8);
        let weights = [130, 24, 64].map(|n| Input::random([n, 1000], dtype, n as u64).on(device));
        let run = |rows: std::ops::Range<usize>| {
            group(x.rows(rows).on(device), weights.to_vec(), options(F32))
        };
        let alone: Vec<Vec<Vec<f32>>> = (0..16).map(|row| run(row..row + 1)).collect();
        for &rows in some(name, &[9, 2, 5, 8, 16], 5) {
            for (i, together) in run(0..rows).into_iter().enumerate() {
                let each = alone[..rows].iter().flat_map(|row| row[i].clone());
                let each: Vec<f32> = each.collect();
                assert_same_bits(
                    &together,
                    &each,
                    &format!("{name} {rows} rows, weights {i}"),
                );
            }
        }
    });
}

fn many_weights_share_an_x() {
    every_dtype(|name, device, dtype| {
        // The host divides weights into groups, whatever their dtype.
        if compiles_slowly(name) && dtype != F32 {
            return;
        }
        let x = Input::random([2, 96], dtype, 9).on(device);
        let weights: Vec<Tensor<2>> = (1..=21)
            .map(|n| Input::random([n, 96], dtype, n as u64).on(device))
            .collect();
        let together = group(x.clone(), weights.clone(), options(F32));
        for (weights, together) in weights.into_iter().zip(together) {
            let alone = product(x.clone(), weights, options(F32));
            assert_same_bits(&together, &alone, name);
        }
    });
}

catalogue![
    each_of_a_group_has_the_bits_that_it_has_alone,
    weights_of_a_group_may_differ_in_dtype,
    a_group_may_be_empty_or_of_one,
    weights_without_rows_give_nothing_and_leave_the_others_alone,
    rows_of_a_group_do_not_depend_on_each_other,
    many_weights_share_an_x,
];
