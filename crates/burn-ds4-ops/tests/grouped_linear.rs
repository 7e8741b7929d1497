//! Linear maps of groups of channels, each against the product of one group alone, which has tests
//! of its own.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::quant::{Weights, grouped_linear};

use super::common::{
    EXACT, FLOATS, assert_close, compiles_slowly, devices, dtypes, every_dtype, is_gpu, some,
    values,
};
use super::linear::{Input, linear};
use super::packing::{FP4, FP8, FP8_PAIR, Format, Packed, REPACKED_FP4, every_format};
use super::products::assert_same_bits;

const F32: FloatDType = FloatDType::F32;
/// Every third number: one token, and more than 16.
const TOKENS: [usize; 6] = [1, 0, 5, 17, 16, 100];

/// Reads back what `grouped_linear` gives.
#[track_caller]
fn grouped<const D: usize>(x: Tensor<D>, weights: &Weights) -> Vec<f32> {
    let (mut shape, dtype) = (x.dims(), x.dtype());
    let y = grouped_linear(x, weights).expect("arguments that fit");
    shape[D - 1] = weights.dims()[1];
    assert_eq!((y.dims(), y.dtype()), (shape, dtype));
    values(y.cast(F32))
}

/// Tokens and their groups one after the other: `[tokens, groups, columns]`.
fn on(x: &Input, groups: usize, device: &Device) -> Tensor<3> {
    let [rows, columns] = x.shape;
    x.on(device).reshape([rows / groups, groups, columns])
}

/// Whether the kernels of products with such weights depend on the shape. All packed weights of one
/// format share theirs.
fn is_dense(format: Format) -> bool {
    matches!(format, Format::Dense(_))
}

/// Whether a test that takes any format leaves one out on a device that compiles slowly: floats of
/// another dtype than `x`.
fn is_left_out(name: &str, format: Format, dtype: FloatDType) -> bool {
    compiles_slowly(name) && is_dense(format) && format != Format::Dense(dtype)
}

/// The elements of one group of `[tokens, groups, width]`.
fn of_group(all: &[f32], groups: usize, width: usize, group: usize) -> Vec<f32> {
    let rows = all.chunks(width.max(1)).skip(group).step_by(groups);
    rows.flatten().copied().collect()
}

/// A stack of one of the matrices, of exact values.
fn matrix(stack: &Packed, group: usize) -> Packed {
    let [_, out, columns] = stack.shape();
    let values: Vec<f32> = stack
        .matrix(group)
        .iter()
        .map(|&value| value as f32)
        .collect();
    Packed::dense([1, out, columns], F32, &values)
}

fn every_group_is_multiplied_by_its_own_matrix() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            for dtype in dtypes(name, device) {
                let shapes = [(8, [40, 264]), (1, [34, 96]), (16, [6, 40])];
                let shapes: Vec<_> = shapes.into_iter().enumerate().collect();
                let step = if is_dense(format) || dtype != F32 {
                    3
                } else {
                    1
                };
                for &(i, (groups, [out, columns])) in some(name, &shapes, step) {
                    let stack = Packed::exact(format, [groups, out, columns], 0, i as u64);
                    let weights = stack.on(device);
                    for &tokens in some(name, &TOKENS, step) {
                        let x = Input::exact([tokens * groups, columns], dtype, tokens as u64);
                        let y = grouped(on(&x, groups, device), &weights);
                        for group in 0..groups {
                            let own = of_group(&x.values, groups, columns, group);
                            let own = Input::new([tokens, columns], dtype, &own);
                            let y = of_group(&y, groups, out, group);
                            let what = format!("{name} {format:?} {dtype:?} group {group}");
                            own.check_exact(&matrix(&stack, group), &y, &what);
                        }
                    }
                }
            }
        });
    }
}

/// Blocks of rows start anew in every matrix, so that a rank that is no multiple of 128 has a
/// partial one.
fn blocks_of_fp8_are_those_of_each_matrix() {
    for (name, device) in devices() {
        for out in [1, 64, 100, 128, 129, 300] {
            let stack = Packed::exact(FP8, [3, out, 260], 0, out as u64);
            for tokens in [1, 17] {
                let x = Input::exact([tokens * 3, 260], F32, 2);
                let y = grouped(on(&x, 3, device), &stack.on(device));
                for group in 0..3 {
                    let own = of_group(&x.values, 3, 260, group);
                    let own = Input::new([tokens, 260], F32, &own);
                    let y = of_group(&y, 3, out, group);
                    own.check_exact(&matrix(&stack, group), &y, &format!("{name} group {group}"));
                }
            }
        }
    }
}

fn any_weights_give_what_f32_sums_can_be() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            let is_taken = |&dtype: &FloatDType| {
                device.supports_dtype(dtype) && !is_left_out(name, format, dtype)
            };
            for dtype in FLOATS.into_iter().filter(is_taken) {
                let [groups, out, columns] = [4, 66, 392];
                // Stacks of one, side by side.
                let each = (0..groups).map(|g| Packed::random(format, [1, out, columns], g as u64));
                let each: Vec<Packed> = each.collect();
                for &tokens in some(name, &[1, 5, 17], 2) {
                    let x = Input::random([tokens * groups, columns], dtype, tokens as u64);
                    for (group, packed) in each.iter().enumerate() {
                        let own = of_group(&x.values, groups, columns, group);
                        let own = Input::new([tokens, columns], dtype, &own);
                        let one = own.on(device).reshape([tokens, 1, columns]);
                        let y = grouped(one, &packed.on(device));
                        own.check(packed, &y, &format!("{name} {dtype:?}"));
                    }
                }
            }
        });
    }
}

/// The widths of a released layer where the device is fast enough.
fn the_groups_of_a_released_layer_come_out() {
    for (name, device) in devices() {
        let [groups, out, columns] = if is_gpu(name) {
            [8, 1024, 4096]
        } else {
            [8, 128, 512]
        };
        let stack = Packed::exact(FP8, [groups, out, columns], 0, 5);
        let weights = stack.on(device);
        for dtype in dtypes(name, device) {
            for tokens in [1, 2, 9, 16, 17] {
                let x = Input::exact([tokens * groups, columns], dtype, 6);
                let y = grouped(on(&x, groups, device), &weights);
                for group in [0, groups - 1] {
                    let own = of_group(&x.values, groups, columns, group);
                    let own = Input::new([tokens, columns], dtype, &own);
                    let y = of_group(&y, groups, out, group);
                    own.check_exact(&matrix(&stack, group), &y, &format!("{name} {dtype:?}"));
                }
            }
        }
    }
}

fn up_to_16_tokens_have_the_bits_that_each_has_alone() {
    every_dtype(|name, device, dtype| {
        every_format(
            name.split(' ').next().unwrap_or_default(),
            device,
            |format| {
                if is_left_out(name, format, dtype) {
                    return;
                }
                let step = if is_dense(format) { 15 } else { 7 };
                tokens_are_as_alone((name, device, dtype), format, [5, 66, 392], step);
                if is_gpu(name) && format == FP8 {
                    // Rows may be in registers.
                    tokens_are_as_alone((name, device, dtype), format, [3, 1000, 4096], 7);
                }
            },
        );
    });
}

/// Compares tokens next to others with each token alone.
fn tokens_are_as_alone(
    (name, device, dtype): (&str, &Device, FloatDType),
    format: Format,
    [groups, out, columns]: [usize; 3],
    step: usize,
) {
    let weights = Packed::random(format, [groups, out, columns], 3).on(device);
    let x = Input::random([16 * groups, columns], dtype, 4);
    let run = |tokens: std::ops::Range<usize>| {
        let x = x.rows(tokens.start * groups..tokens.end * groups);
        grouped(on(&x, groups, device), &weights)
    };
    let alone: Vec<f32> = (0..16).flat_map(|token| run(token..token + 1)).collect();
    let numbers: Vec<usize> = (2..=16).rev().collect();
    for &tokens in some(name, &numbers, step) {
        let what = format!("{name} {format:?} {tokens} tokens");
        assert_same_bits(&run(0..tokens), &alone[..tokens * groups * out], &what);
    }
}

fn a_group_of_one_is_a_linear_map() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, REPACKED_FP4, FP8, FP8_PAIR, Format::Dense(F32)] {
            let weights = Packed::exact(format, [1, 66, 392], 0, 3).on(device);
            for &tokens in some(name, &[1, 5, 40], 2) {
                let x = Input::exact([tokens, 392], dtype, 4).on(device);
                let expected = linear(x.clone(), &weights);
                let y = grouped(x.reshape([tokens, 1, 392]), &weights);
                assert_close(&y, &expected, EXACT, &format!("{name} {format:?}"));
            }
        }
    });
}

fn x_may_be_any_view_and_have_two_dimensions() {
    every_dtype(|name, device, dtype| {
        let [tokens, groups, out, columns] = [3, 4, 34, 96];
        let weights = Packed::exact(FP8, [groups, out, columns], 0, 3).on(device);
        let x = on(
            &Input::exact([tokens * groups, columns], dtype, 4),
            groups,
            device,
        );
        let expected = grouped(x.clone(), &weights);
        let turned = x.clone().swap_dims(0, 1).mul_scalar(1.0).swap_dims(0, 1);
        assert_close(&grouped(turned, &weights), &expected, EXACT, name);
        let wider = Tensor::cat(
            vec![x.clone().slice([0..tokens, 0..groups, 0..1]), x.clone()],
            2,
        );
        let odd = wider.slice([0..tokens, 0..groups, 1..columns + 1]);
        assert_close(&grouped(odd, &weights), &expected, EXACT, name);
        let higher = Tensor::cat(vec![x.clone().neg(), x.clone()], 1);
        let lower = higher.slice([0..tokens, groups..2 * groups, 0..columns]);
        assert_close(&grouped(lower, &weights), &expected, EXACT, name);
        let one = x.clone().slice([1..2, 0..groups, 0..columns]);
        let flat = grouped(one.reshape([groups, columns]), &weights);
        assert_close(
            &flat,
            &expected[groups * out..2 * groups * out],
            EXACT,
            name,
        );
        let more = grouped(x.reshape([1, tokens, groups, columns]), &weights);
        assert_close(&more, &expected, EXACT, name);
    });
}

fn nothing_in_gives_nothing_and_no_columns_give_zeros() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, FP8, Format::Dense(F32)] {
            for [tokens, groups, out, columns] in [
                [0, 2, 6, 40],
                [3, 0, 6, 40],
                [3, 2, 0, 40],
                [3, 2, 6, 0],
                [0, 0, 0, 0],
            ] {
                let weights = Packed::exact(format, [groups, out, columns], 0, 1).on(device);
                let x = Tensor::<3>::ones([tokens, groups, columns], (device, dtype.into()));
                let y = grouped(x, &weights);
                assert_close(&y, &vec![0.0; tokens * groups * out], EXACT, name);
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_token_and_group() {
    every_dtype(|name, device, dtype| {
        for format in [FP4, FP8] {
            let [groups, out, columns] = [3, 34, 96];
            let mut stack = Packed::exact(format, [groups, out, columns], 0, 3);
            for tokens in [3, 16, 40] {
                let clean = Input::exact([tokens * groups, columns], dtype, 4);
                let mut spoilt = Input::exact([tokens * groups, columns], dtype, 4);
                spoilt.values[4 * columns + 7] = f32::NAN;
                let weights = stack.on(device);
                let expected = grouped(on(&clean, groups, device), &weights);
                let actual = grouped(on(&spoilt, groups, device), &weights);
                let what = format!("{name} {format:?} {tokens} tokens");
                for (row, (actual, expected)) in
                    actual.chunks(out).zip(expected.chunks(out)).enumerate()
                {
                    if row == 4 {
                        assert!(actual.iter().all(|value| value.is_nan()), "{what}");
                    } else {
                        assert_close(actual, expected, EXACT, &what);
                    }
                }
            }
            let x = on(
                &Input::exact([5 * groups, columns], dtype, 4),
                groups,
                device,
            );
            let expected = grouped(x.clone(), &stack.on(device));
            stack.poison(1);
            let actual = grouped(x, &stack.on(device));
            for group in [0, 2] {
                let [actual, expected] =
                    [&actual, &expected].map(|y| of_group(y, groups, out, group));
                assert_close(&actual, &expected, EXACT, name);
            }
            assert!(
                of_group(&actual, groups, out, 1)
                    .iter()
                    .all(|value| value.is_nan()),
                "{name}"
            );
        }
    });
}

catalogue![
    every_group_is_multiplied_by_its_own_matrix,
    blocks_of_fp8_are_those_of_each_matrix,
    any_weights_give_what_f32_sums_can_be,
    the_groups_of_a_released_layer_come_out,
    up_to_16_tokens_have_the_bits_that_each_has_alone,
    a_group_of_one_is_a_linear_map,
    x_may_be_any_view_and_have_two_dimensions,
    nothing_in_gives_nothing_and_no_columns_give_zeros,
    what_is_not_finite_stays_in_its_token_and_group,
];
