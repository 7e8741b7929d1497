//! Products that round what they take to FP8, against products of what the oracle rounds.

use burn::tensor::{FloatDType, Tensor};
use burn_ds4_ops::matmul::SmallMOptions;
use burn_ds4_ops::quant::{
    Activations, FP8_BLOCK, fp8_roundtrip, grouped_linear, quant_linear_group,
};

use super::common::{
    EXACT, assert_close, compiles_slowly, devices, dtypes, every_dtype, some, values,
};
use super::experts::{Layer, size};
use super::linear::{Input, linear};
use super::packing::{
    FP4, FP8_BLOCKS32, FP8_BLOCKS32_PAIR, FP8_PAIR, Format, Packed, every_format,
};
use super::sharing::Both;

const RELEASED: Activations = Activations::Released;

/// The ways to round that products by a format have: those of V4.1 are by its own formats.
fn modes(format: Format) -> Vec<Activations> {
    match format {
        FP8_BLOCKS32 | FP8_BLOCKS32_PAIR => vec![Activations::Released32],
        FP4 => vec![RELEASED, Activations::Released32],
        _ => vec![RELEASED],
    }
}

fn rows_of_16_bits_are_rounded_as_those_of_32() {
    every_dtype(|name, device, dtype| {
        for &(rows, columns) in some(name, &[(3, 256), (5, 200), (1, 7), (40, 1024)], 2) {
            let x = Input::random([rows, columns], dtype, columns as u64);
            let actual = fp8_roundtrip(x.on(device), FP8_BLOCK).expect("arguments that fit");
            let actual = values(actual.cast(FloatDType::F32));
            let what = format!("{name} {dtype:?} {rows} x {columns}");
            assert_close(&actual, &x.rounded(FP8_BLOCK).values, EXACT, &what);
        }
    });
}

fn linear_maps_round_their_input() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            for dtype in dtypes(name, device) {
                if compiles_slowly(name) && dtype != FloatDType::F32 {
                    continue;
                }
                let shapes = [
                    [1, 130, 200],
                    [9, 24, 512],
                    [40, 130, 384],
                    [70, 64, 136],
                    [200, 264, 640],
                ];
                for (i, &[rows, outputs, inputs]) in some(name, &shapes, 2).enumerate() {
                    let weights = Packed::random(format, [1, outputs, inputs], i as u64);
                    let x = Input::random([rows, inputs], dtype, i as u64 + 9);
                    let on_device = weights.on(device);
                    for mode in modes(format) {
                        let y = linear(x.on(device), &on_device.clone().with_activations(mode));
                        let x = x.rounded(mode.block().expect("a mode that rounds"));
                        x.check(&weights, &y, &format!("{name} {dtype:?} {mode:?}"));
                    }
                }
            }
        });
    }
}

/// Where tensor cores multiply FP8, their sums of small integers are exact. So a weight, a row or a
/// scale that is left out shows.
fn products_of_small_integers_are_exact() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            let shapes = [
                [33, 40, 128],
                [150, 264, 640],
                [300, 136, 1024],
                [70, 1100, 272],
            ];
            for (i, &[rows, outputs, inputs]) in some(name, &shapes, 2).enumerate() {
                for dtype in dtypes(name, device) {
                    let weights = Packed::exact(format, [1, outputs, inputs], 0, i as u64);
                    let x = Input::exact([rows, inputs], dtype, i as u64 + 9);
                    let on_device = weights.on(device).with_activations(RELEASED);
                    let y = linear(x.on(device), &on_device);
                    x.check_exact(&weights, &y, &format!("{name} {dtype:?}"));
                }
            }
        });
    }
}

fn what_is_not_finite_stays_in_its_row() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            for dtype in dtypes(name, device) {
                let weights = Packed::exact(format, [1, 40, 256], 0, 1);
                let weights = weights.on(device).with_activations(RELEASED);
                let mut x = Input::exact([64, 256], dtype, 2);
                let finite = linear(x.on(device), &weights);
                x.values[3 * 256 + 7] = f32::NAN;
                x.values[20 * 256 + 200] = f32::INFINITY;
                let y = linear(x.on(device), &weights);
                for (i, (actual, finite)) in y.into_iter().zip(finite).enumerate() {
                    let what = format!("{name} {dtype:?} row {}: {actual}", i / 40);
                    match i / 40 {
                        3 => assert!(actual.is_nan(), "{what}"),
                        20 => assert!(!actual.is_finite(), "{what}"),
                        _ => assert_eq!(actual, finite, "{what}"),
                    }
                }
            }
        });
    }
}

fn pairs_and_groups_round_as_single_maps_do() {
    for (name, device) in devices() {
        let [first, second] = [0, 1].map(|seed| {
            let weights = Packed::random(FP4, [1, 40, 256], seed);
            weights.on(device)
        });
        let x = Input::random([3, 256], FloatDType::F32, 5).on(device);
        for modes in [[RELEASED; 2], [RELEASED, Activations::Exact]] {
            let [first, second] = [(&first, modes[0]), (&second, modes[1])]
                .map(|(weights, mode)| weights.clone().with_activations(mode));
            let options = SmallMOptions::default();
            let products = quant_linear_group(x.clone(), [&first, &second], &[], options);
            let (pair, _) = products.expect("they fit");
            for (actual, weights) in pair.into_iter().zip([&first, &second]) {
                let alone = linear(x.clone(), weights);
                assert_close(&values(actual), &alone, EXACT, &format!("{name} {modes:?}"));
            }
        }
        let groups = Packed::random(FP4, [2, 40, 256], 7).on(device);
        let x: Tensor<3> = Tensor::stack(vec![x.clone(), x * 3.0], 1);
        let rounded = fp8_roundtrip(x.clone(), FP8_BLOCK).expect("arguments that fit");
        let expected = grouped_linear(rounded, &groups).expect("arguments that fit");
        let actual = grouped_linear(x, &groups.with_activations(RELEASED));
        let actual = values(actual.expect("arguments that fit"));
        assert_close(&actual, &values(expected), EXACT, name);
    }
}

fn experts_round_what_both_of_their_matrices_take() {
    for (name, device) in devices() {
        let sizes = [
            size([1, 2, 5, 96, 264]),
            size([7, 6, 5, 96, 72]),
            size([16, 1, 5, 520, 136]),
            size([17, 2, 5, 40, 136]),
            size([300, 2, 5, 136, 264]),
            size([300, 6, 5, 256, 256]),
        ];
        let formats = [
            FP4,
            FP8_PAIR,
            FP8_BLOCKS32_PAIR,
            Format::Dense(FloatDType::F32),
        ];
        let all = formats.into_iter().flat_map(|format| {
            let modes = modes(format).into_iter();
            modes.map(move |mode| (format, mode))
        });
        for (format, mode) in all {
            for dtype in dtypes(name, device) {
                let step = if dtype == FloatDType::F32 { 3 } else { 6 };
                for (i, &size) in some(name, &sizes, step).enumerate() {
                    let mut layer = Layer::exact(size, format, dtype, i as u64).rounding(mode);
                    layer.limit = Some(64.0);
                    layer.check(&format!("{name} {format:?} {dtype:?} {mode:?}"), device);
                }
            }
        }
    }
}

fn a_shared_expert_rounds_for_itself() {
    for (name, device) in devices() {
        let formats = [FP4, FP8_PAIR];
        for dtype in dtypes(name, device) {
            if compiles_slowly(name) && dtype != FloatDType::F32 {
                continue;
            }
            for &tokens in some(name, &[3, 40], 2) {
                let sizes = (size([tokens, 2, 5, 96, 264]), 136);
                let mut both = Both::exact(sizes, formats, dtype, 3);
                both.own = both.own.rounding(RELEASED);
                both.check(&format!("{name} {dtype:?} own"), device);
                both.shared = both.shared.rounding(RELEASED);
                both.check(&format!("{name} {dtype:?} both"), device);
                let mut v41 = Both::exact(sizes, [FP4, FP8_BLOCKS32_PAIR], dtype, 3);
                v41.own = v41.own.rounding(Activations::Released32);
                v41.shared = v41.shared.rounding(Activations::Released32);
                v41.check(&format!("{name} {dtype:?} V4.1"), device);
            }
        }
    }
}

catalogue![
    rows_of_16_bits_are_rounded_as_those_of_32,
    linear_maps_round_their_input,
    products_of_small_integers_are_exact,
    what_is_not_finite_stays_in_its_row,
    pairs_and_groups_round_as_single_maps_do,
    experts_round_what_both_of_their_matrices_take,
    a_shared_expert_rounds_for_itself,
];
