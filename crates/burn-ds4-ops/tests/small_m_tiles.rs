//! Matrices of more tiles than a launch takes at a time, and of columns that tensor cores multiply:
//! every part must be found again.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, f16};
use burn_ds4_ops::matmul::small_m_matmul_group;

use super::common::{is_gpu, some, values};
use super::products::{Product, assert_same_bits, every_pair, options, product};

/// Rows of weights that large matrices repeat: no multiple of a tile, so that each comes in every
/// place of one.
const BASE: usize = 97;

/// The weights again and again.
fn repeated(whole: &Product, times: usize, device: &Device) -> Tensor<2> {
    whole.weights.on(device).repeat_dim(0, times)
}

/// What they give: `once` for each row of x, again and again. Sums are exact, and so the same for a
/// matrix of any size.
fn expected(once: &[f32], times: usize) -> Vec<f32> {
    let rows = once.chunks(BASE);
    rows.flat_map(|row| std::iter::repeat_n(row, times).flatten().copied())
        .collect()
}

fn many_tiles_give_what_each_gives_alone() {
    every_pair(|name, device, pair| {
        // Elsewhere, rows are many from 1024 on.
        let (few, many) = if is_gpu(name) { (62, 413) } else { (13, 25) };
        let sizes = [(few, 520), (few, 1000), (many, 24), (many, 128)];
        // Planes that split K, and where both are of one dtype one plane.
        let step = if pair.0 == pair.1 { 2 } else { 4 };
        for &(times, k) in some(name, &sizes, step) {
            for &m in some(name, &[9, 16, 1], 2) {
                let whole = Product::exact([m, BASE, k], pair, (m * k) as u64);
                let once = whole.run(device, FloatDType::F32);
                let weights = repeated(&whole, times, device);
                let all = product(whole.x.on(device), weights, options(FloatDType::F32));
                let what = format!("{name}, {m} rows x [{BASE} x {times}, {k}]");
                assert_same_bits(&all, &expected(&once, times), &what);
            }
        }
    });
}

fn a_group_of_many_tiles_gives_what_each_gives_alone() {
    every_pair(|name, device, pair| {
        for &m in some(name, &[9, 1], 2) {
            let whole = Product::exact([m, BASE, 520], pair, m as u64);
            let once = whole.run(device, FloatDType::F32);
            // A kernel has code for each matrix: where it compiles slowly, three of them.
            let times: Vec<usize> = some(name, &[25, 2, 1, 13, 40], 2).copied().collect();
            let weights = times.iter().map(|times| repeated(&whole, *times, device));
            let weights: Vec<_> = weights.collect();
            let x = whole.x.on(device);
            let group = small_m_matmul_group(x, &weights, options(FloatDType::F32));
            for (product, times) in group.expect("arguments that fit").into_iter().zip(times) {
                let what = format!("{name}, {m} rows, {times} times");
                assert_same_bits(&values(product), &expected(&once, times), &what);
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_row_and_column() {
    every_pair(|name, device, pair| {
        for k in [512, 520] {
            let [m, n] = [9, 40];
            let clean = Product::random([m, n, k], pair, k as u64);
            let before = clean.run(device, FloatDType::F32);
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut broken = Product::random([m, n, k], pair, k as u64);
                let (row, column) = (4, 21);
                broken.x.values[row * k + k - 1] = value;
                broken.weights.values[column * k + 3] = value;
                let after = broken.run(device, FloatDType::F32);
                for (at, (after, before)) in after.iter().zip(&before).enumerate() {
                    let reached = at / n == row || at % n == column;
                    let what =
                        format!("{name}, {value} over {k} columns, [{}, {}]", at / n, at % n);
                    if reached {
                        assert!(!after.is_finite(), "{what}: {after}");
                    } else {
                        assert_eq!(after.to_bits(), before.to_bits(), "{what}");
                    }
                }
            }
        }
    });
}

/// What makes these NaN is in the bits that a weight's upper part leaves out.
fn every_nan_of_an_f16_weight_is_one() {
    every_pair(|name, device, pair| {
        if pair.1 != FloatDType::F16 {
            return;
        }
        let k = 128;
        let whole = Product::random([3, 8, k], pair, 5);
        let mut bits: Vec<u16> = (whole.weights.values.iter())
            .map(|value| f16::from_f32(*value).to_bits())
            .collect();
        for row in 0..7 {
            let sign = if row % 2 == 0 { 0 } else { 0x8000 };
            bits[row * k + 17 * row] = sign | (0x7c01 + row as u16);
        }
        let weights: Vec<f16> = bits.into_iter().map(f16::from_bits).collect();
        let data = TensorData::new(weights, [8, k]);
        let weights = Tensor::<2>::from_data(data, (device, DType::F16));
        let y = product(whole.x.on(device), weights, options(FloatDType::F32));
        for (at, value) in y.iter().enumerate() {
            let nan = at % 8 < 7;
            assert_eq!(
                value.is_nan(),
                nan,
                "{name}, [{}, {}]: {value}",
                at / 8,
                at % 8
            );
        }
    });
}

catalogue![
    many_tiles_give_what_each_gives_alone,
    a_group_of_many_tiles_gives_what_each_gives_alone,
    what_is_not_finite_stays_in_its_row_and_column,
    every_nan_of_an_f16_weight_is_one,
];
