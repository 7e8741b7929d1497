//! Activation round trips and the Hadamard transform against `f64` oracles: exhaustive search of
//! the code tables, and the matrix written out.

use super::common::{EXACT, absolute, assert_close, compiles_slowly, devices, skip, some, values};
use super::round_trips::{FP4, FP8};
use super::tables::E4M3;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_ds4_ops::quant::{fp4_roundtrip, fp8_roundtrip, hadamard};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

fn floats<const D: usize>(data: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data, shape), (device, DType::F32))
}

/// A device that flushes denormals gives zero where the result or the input lies below the normal
/// range.
fn forgive_flushed(actual: &mut [f32], expected: &[f32], x: &[f32]) {
    for ((actual, expected), x) in actual.iter_mut().zip(expected).zip(x) {
        if *actual == 0.0 && (expected.abs() < f32::MIN_POSITIVE || x.abs() < f32::MIN_POSITIVE) {
            *actual = *expected;
        }
    }
}

fn check(x: &[f32], columns: usize, block: usize) {
    for (name, device) in devices() {
        check_on(name, device, x, columns, block);
    }
}

fn check_on(name: &str, device: &Device, x: &[f32], columns: usize, block: usize) {
    let input = || floats(x.to_vec(), [x.len() / columns, columns], device);
    for (format, oracle, actual) in [
        ("fp8", &FP8, fp8_roundtrip(input(), block)),
        ("fp4", &FP4, fp4_roundtrip(input(), block)),
    ] {
        let expected = oracle.rows(x, columns, block);
        let mut actual = values(actual.unwrap());
        forgive_flushed(&mut actual, &expected, x);
        let what = format!("{name} {format} columns {columns} block {block}");
        assert_close(&actual, &expected, EXACT, &what);
    }
}

/// The devices that take rows of so many columns. A round trip is a hundred operations, which a
/// software device takes long for: it takes a fifth of all lengths, among them odd ones.
fn devices_for(columns: usize) -> impl Iterator<Item = &'static (String, Device)> {
    let taken = columns.is_multiple_of(5);
    devices()
        .iter()
        .filter(move |(name, _)| taken || !compiles_slowly(name))
}

fn fp8_values_round_to_the_nearest_code_with_ties_to_even() {
    // 448 in the block fixes the scale at 1.
    let cases = [
        (448.0, 448.0),
        (440.0, 448.0),
        (432.0, 448.0), // tie between 416 (code 0x7d) and 448 (code 0x7e)
        (17.0, 16.0),   // tie between 16 and 18
        (19.0, 20.0),   // tie between 18 and 20
        (-19.0, -20.0),
        (1.0625, 1.0),
        (1.1875, 1.25),
        (0.015625, 0.015625),       // smallest normal
        (0.0146484375, 0.015625),   // tie between the largest subnormal and the smallest normal
        (0.001953125, 0.001953125), // smallest subnormal
        (0.0029296875, 0.00390625), // tie between the subnormals 1 and 2
        (0.0009765625, 0.0),        // tie between zero and the smallest subnormal
        (0.0009766, 0.001953125),   // just above that tie
        (-0.0009, 0.0),
        (0.0, 0.0),
    ];
    let expected: Vec<f32> = cases.iter().map(|case| case.1).collect();
    for (name, device) in devices() {
        let x = floats(cases.iter().map(|case| case.0).collect(), [16], device);
        assert_close(
            &values(fp8_roundtrip(x, 64).unwrap()),
            &expected,
            EXACT,
            name,
        );
    }
}

fn fp4_values_round_to_the_nearest_code_with_ties_to_even() {
    // 6 in the block fixes the scale at 1.
    let x = [
        6.0, 5.0, 5.1, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.26, -0.75, -5.0, -2.6,
    ];
    let expected = [
        6.0, 4.0, 6.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.5, -1.0, -4.0, -3.0,
    ];
    for (name, device) in devices() {
        let x = floats(x.to_vec(), [13], device);
        assert_close(
            &values(fp4_roundtrip(x, 32).unwrap()),
            &expected,
            EXACT,
            name,
        );
    }
}

fn every_scale_exponent_is_exact_at_and_around_its_boundary() {
    // One block a row: a maximum at max * 2^e exactly, one ulp below and one above, beside values
    // just above half of the smallest FP4 and FP8 code: with the scale twice as large they would be
    // zero.
    for (max, lowest) in [(448.0_f32, -22), (6.0, -126)] {
        let x: Vec<f32> = (lowest..126)
            .map(|e| max * 2f32.powi(e))
            .filter(|top| top.is_finite())
            .flat_map(|top| [top, top.next_down(), top.next_up()])
            .flat_map(|top| [top, 0.043 * top, 2.2e-6 * top, -top / 7.0])
            .collect();
        check(&x, 4, 4);
    }
}

fn blocks_below_the_floor_keep_the_scale_of_the_floor() {
    let x = [1e-4, 1e-5, -3e-6, 1e-7, 1e-9, 1e-20, 1e-37, 0.0];
    check(&x, 8, 8);
    check(&[0.0; 64], 64, 32);
    check(&[f32::MAX, -f32::MAX / 2.0, 1.0, f32::MIN_POSITIVE], 4, 4);
}

fn nan_and_infinity_come_out_unchanged_and_do_not_touch_their_block() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x: Vec<f32> = (0..128).map(|i| (i as f32 - 60.0) * 0.37).collect();
        x[5] = special;
        x[127] = special;
        check(&x, 128, 64);
        check(&[special; 8], 4, 4);
    }
}

fn a_last_block_may_be_partial_and_a_block_larger_than_the_row_is_one_block() {
    let x: Vec<f32> = (0..3 * 70)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) * 1.7f32.powi(i % 11))
        .collect();
    let shapes = [(70, 64), (70, 32), (70, 128), (70, usize::MAX), (1, 64)];
    for (name, device) in devices() {
        for &(columns, block) in some(name, &shapes, 3) {
            check_on(name, device, &x, columns, block);
        }
    }
}

fn the_shape_and_dtype_of_the_input_are_kept() {
    for (name, device) in devices() {
        let x = floats((0..48).map(|i| i as f32 / 8.0).collect(), [2, 3, 8], device);
        let full = values(fp8_roundtrip(x.clone(), 4).unwrap());
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            if !device.supports_dtype(dtype) {
                skip(name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            // Every input is exact in both dtypes, and so is every E4M3 value near it.
            let half = fp8_roundtrip(x.clone().cast(dtype), 4).unwrap();
            assert_eq!(
                (half.dims(), half.dtype()),
                ([2, 3, 8], dtype.into()),
                "{name}"
            );
            assert_close(&values(half.cast(FloatDType::F32)), &full, EXACT, name);
            assert_eq!(
                hadamard(x.clone().cast(dtype)).unwrap().dtype(),
                dtype.into()
            );
        }
        assert_eq!(hadamard(x.clone()).unwrap().dims(), [2, 3, 8]);
        assert_eq!(fp4_roundtrip(x, 3).unwrap().dims(), [2, 3, 8]);
        let empty = || Tensor::<2>::empty([0, 8], (device, DType::F32));
        assert_eq!(fp8_roundtrip(empty(), 4).unwrap().dims(), [0, 8], "{name}");
        assert_eq!(hadamard(empty()).unwrap().dims(), [0, 8], "{name}");
    }
}

fn a_transposed_input_is_read_along_its_own_last_dimension() {
    let x: Vec<f32> = (0..12).map(|i| 1.3 * i as f32).collect();
    let transposed: Vec<f32> = (0..12).map(|i| x[i % 4 * 3 + i / 4]).collect();
    for (name, device) in devices() {
        let view = floats(x.clone(), [4, 3], device).transpose();
        let plain = floats(transposed.clone(), [3, 4], device);
        for (actual, expected) in [
            (
                fp8_roundtrip(view.clone(), 2),
                fp8_roundtrip(plain.clone(), 2),
            ),
            (
                fp4_roundtrip(view.clone(), 2),
                fp4_roundtrip(plain.clone(), 2),
            ),
            (hadamard(view), hadamard(plain)),
        ] {
            let (actual, expected) = (values(actual.unwrap()), values(expected.unwrap()));
            assert_close(&actual, &expected, EXACT, name);
        }
    }
}

fn bad_arguments_are_named_with_their_value() {
    for (_, device) in devices() {
        let x = || floats(vec![1.0; 6], [2, 3], device);
        let message = fp8_roundtrip(x(), 0).unwrap_err().to_string();
        assert_eq!(message, "`block` is 0, expected at least 1");
        let message = hadamard(x()).unwrap_err().to_string();
        assert_eq!(
            message,
            "`last dimension of x` is 3, expected a power of two"
        );
    }
    let (_, flex) = &devices()[0];
    let x = Tensor::<1>::zeros([4], (flex, DType::F64));
    let message = fp4_roundtrip(x, 4).unwrap_err().to_string();
    assert_eq!(message, "`x` has dtype F64, expected F32, F16 or BF16");
}

fn the_hadamard_transform_is_the_sylvester_matrix() {
    let sizes = [1_usize, 2, 4, 32, 128];
    for n in sizes {
        let x: Vec<f32> = (0..3 * n)
            .map(|i| ((i * 29 % 31) as f32 - 15.0) / 3.0)
            .collect();
        let expected: Vec<f32> = (0..3 * n)
            .map(|i| {
                let (row, column) = (i / n, i % n);
                let terms = (0..n).map(|j| {
                    let sign = if (j & column).count_ones() % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    };
                    sign * f64::from(x[row * n + j])
                });
                (terms.sum::<f64>() / (n as f64).sqrt()) as f32
            })
            .collect();
        for (name, device) in devices() {
            // The largest has every step of the others.
            if !some(name, &sizes, 4).any(|&size| size == n) {
                continue;
            }
            let once = hadamard(floats(x.clone(), [3, n], device)).unwrap();
            let what = format!("{name} n {n}");
            assert_close(&values(once.clone()), &expected, absolute(1e-5), &what);
            let twice = hadamard(once).unwrap();
            assert_close(&values(twice), &x, absolute(1e-5), &what);
        }
    }
}

fn every_device_gives_the_bits_of_the_first() {
    let x: Vec<f32> = (0..4 * 128).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let bits = |device: &Device| -> Vec<u32> {
        let spread = hadamard(floats(x.clone(), [4, 128], device)).unwrap();
        let fp8 = fp8_roundtrip(spread.clone(), 64).unwrap();
        let fp4 = fp4_roundtrip(spread.clone(), 32).unwrap();
        let all = values(Tensor::cat(vec![spread, fp8, fp4], 0));
        all.iter().map(|v| v.to_bits()).collect()
    };
    let (first, rest) = devices().split_first().unwrap();
    let expected = bits(&first.1);
    for (name, device) in rest {
        assert_eq!(bits(device), expected, "{name}");
    }
}

/// Values of all magnitudes, most of them close enough together to share a scale.
fn element() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => -500.0_f32..500.0,
        2 => (-30_i32..30, -1.0_f32..1.0).prop_map(|(e, m)| m * 2f32.powi(e)),
        1 => (0..=126_usize).prop_map(|code| E4M3[code] as f32),
        1 => prop::num::f32::NORMAL,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        rng_seed: RngSeed::Fixed(0),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    fn any_row_rounds_as_an_exhaustive_search_does(
        x in prop::collection::vec(element(), 1..300),
        block in 1..140_usize,
    ) {
        for (name, device) in devices_for(x.len()) {
            check_on(name, device, &x, x.len(), block);
        }
    }

    fn a_second_round_trip_changes_nothing(x in prop::collection::vec(-500.0_f32..500.0, 1..200)) {
        for (name, device) in devices_for(x.len()) {
            let once = fp8_roundtrip(floats(x.clone(), [x.len()], device), 64).unwrap();
            let twice = fp8_roundtrip(once.clone(), 64).unwrap();
            assert_close(&values(twice), &values(once), EXACT, name);
        }
    }
}

catalogue![
    fp8_values_round_to_the_nearest_code_with_ties_to_even,
    fp4_values_round_to_the_nearest_code_with_ties_to_even,
    every_scale_exponent_is_exact_at_and_around_its_boundary,
    blocks_below_the_floor_keep_the_scale_of_the_floor,
    nan_and_infinity_come_out_unchanged_and_do_not_touch_their_block,
    a_last_block_may_be_partial_and_a_block_larger_than_the_row_is_one_block,
    the_shape_and_dtype_of_the_input_are_kept,
    a_transposed_input_is_read_along_its_own_last_dimension,
    bad_arguments_are_named_with_their_value,
    the_hadamard_transform_is_the_sylvester_matrix,
    every_device_gives_the_bits_of_the_first,
    any_row_rounds_as_an_exhaustive_search_does,
    a_second_round_trip_changes_nothing,
];
