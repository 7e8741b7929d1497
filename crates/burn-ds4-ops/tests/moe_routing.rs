//! Which experts a token may have, and with which weights.

use burn::tensor::{FloatDType, IntDType};

use super::common::{
    EXACT, assert_close, compiles_slowly, devices, every_dtype, is_gpu, skip, some, some_of_half,
};
use super::experts::{Layer, few_and_many, size};
use super::packing::{FP4, FP8_PAIR, Format, REPACKED_FP4};
use super::ranking::typed;

const F32: Format = Format::Dense(FloatDType::F32);

fn one_expert_may_get_everything() {
    every_dtype(|name, device, dtype| {
        for &tokens in some_of_half(name, dtype, &[5, 16, 130], 3) {
            for expert in [0, 4] {
                let mut layer = Layer::exact(size([tokens, 1, 5, 96, 72]), FP4, dtype, 1);
                layer.ids.fill(expert);
                layer.check(&format!("{name} expert {expert}"), device);
            }
        }
    });
}

/// The hidden layer of so many pairs does not fit shared memory, and a matrix with one or two of
/// them is multiplied otherwise than one with more. On a GPU, every token has the bits that it has
/// alone.
fn experts_with_one_pair_and_with_many_at_once() {
    let sizes = [1, 2, 3, 9, 17].into_iter().enumerate();
    let experts = sizes.flat_map(|(id, pairs)| std::iter::repeat_n(id as i64, pairs));
    let experts: Vec<i64> = experts.collect();
    every_dtype(|name, device, dtype| {
        // Whole K-blocks, and ones that end early or are past the end.
        let cases = [(FP4, 2048), (FP8_PAIR, 1056), (FP4, 1056), (FP8_PAIR, 2048)];
        for &(format, inner) in some_of_half(name, dtype, &cases, 4) {
            let mut layer = Layer::random(size([16, 2, 5, 40, inner]), format, dtype, 5);
            for (pair, id) in layer.ids.iter_mut().enumerate() {
                *id = experts[pair * 7 % 32];
            }
            let stacks = layer.stacks(device);
            let together = layer.run_with(&stacks, device);
            let what = format!("{name} {format:?} {inner}");
            layer.check_output(&together, &what);
            if is_gpu(name) {
                let alone = (0..16).map(|t| layer.tokens(t..t + 1).run_with(&stacks, device));
                let alone: Vec<f32> = alone.flatten().collect();
                assert_close(&together, &alone, EXACT, &what);
            }
        }
    });
}

/// With so few pairs each, the weights of experts are streamed, for 8 or 16 pairs at a time: one, a
/// few that have more, and one that has all.
fn experts_with_few_pairs_each_are_exact_for_any_number_of_tokens() {
    every_dtype(|name, device, dtype| {
        let cases = [
            (17, FP4),
            (31, FP8_PAIR),
            (33, REPACKED_FP4),
            (63, FP8_PAIR),
            (65, FP4),
            (255, REPACKED_FP4),
            (257, FP8_PAIR),
        ];
        for &(tokens, format) in some_of_half(name, dtype, &cases, 7) {
            let shape = size([tokens, 2, 64, 520, 136]);
            let mut layer = Layer::exact(shape, format, dtype, tokens as u64);
            layer.check(&format!("{name} {tokens} tokens {format:?}"), device);
            layer.ids.fill(63);
            layer.check(&format!("{name} one expert {tokens} tokens"), device);
        }
    });
}

/// Kernels keep a row for every pair, and so take no more than 65536 of them at a time.
fn more_pairs_than_are_multiplied_at_a_time() {
    for (name, device) in devices() {
        // A software driver would take long for wider rows.
        let width = if compiles_slowly(name) { 8 } else { 32 };
        let size = size([32_771, 2, 3, width, width]);
        let layer = Layer::exact(size, FP4, FloatDType::F32, 3);
        layer.check(name, device);
    }
}

fn experts_that_nobody_chose_may_hold_nan() {
    every_dtype(|name, device, dtype| {
        for &format in some_of_half(name, dtype, &[FP4, FP8_PAIR, F32], 3) {
            for layer in some(name, &few_and_many(format, dtype), 2) {
                let mut layer = layer.clone();
                for id in &mut layer.ids {
                    *id = [1, 4][*id as usize % 2];
                }
                for expert in [0, 2, 3, 5] {
                    layer.gate_up.poison(expert);
                    layer.down.poison(expert);
                }
                layer.check(&format!("{name} {format:?}"), device);
            }
        }
    });
}

fn padding_adds_nothing_whatever_its_weight() {
    every_dtype(|name, device, dtype| {
        for &format in some_of_half(name, dtype, &[FP4, FP8_PAIR], 2) {
            for layer in some(name, &few_and_many(format, dtype), 2) {
                let mut layer = layer.clone();
                // An id of -1 that is clamped would land here.
                layer.gate_up.poison(0);
                layer.down.poison(5);
                for (pair, id) in layer.ids.iter_mut().enumerate() {
                    *id = *id % 4 + 1;
                    // Every third slot, and the fourth token as a whole.
                    if pair % 3 == 1 || pair / 2 == 3 {
                        *id = [-1, i64::from(i32::MIN)][pair % 2];
                        layer.weights[pair] = [f32::NAN, f32::INFINITY, 1e30][pair % 5 % 3];
                    }
                }
                let what = format!("{name} {format:?}");
                let actual = layer.run(device);
                layer.check_output(&actual, &what);
                if layer.size.tokens > 3 {
                    assert_eq!(actual[3 * 136..4 * 136], [0.0; 136], "{what}");
                }
            }
        }
    });
}

fn nothing_but_padding_is_zero_everywhere() {
    every_dtype(|name, device, dtype| {
        for layer in some(name, &few_and_many(FP4, dtype), 2) {
            let mut layer = layer.clone();
            layer.ids.fill(-1);
            layer.weights.fill(f32::NAN);
            let zeros = vec![0.0; layer.x.len()];
            assert_close(&layer.run(device), &zeros, EXACT, name);
        }
    });
}

fn an_expert_may_be_chosen_twice_by_one_token() {
    every_dtype(|name, device, dtype| {
        for &tokens in some_of_half(name, dtype, &[1, 7, 40], 3) {
            let mut layer = Layer::exact(size([tokens, 3, 5, 96, 72]), FP4, dtype, 2);
            for (token, ids) in layer.ids.chunks_mut(3).enumerate() {
                ids[token % 3] = 3;
                ids[(token + 1) % 3] = 3;
            }
            layer.check(name, device);
        }
    });
}

fn padding_may_come_before_the_experts_of_one_token() {
    every_dtype(|name, device, dtype| {
        let mut layer = Layer::exact(size([1, 6, 5, 96, 72]), FP4, dtype, 2);
        layer.ids.copy_from_slice(&[-1, 3, 3, -1, 0, 4]);
        for slot in [0, 3] {
            layer.weights[slot] = f32::NAN;
        }
        layer.check(name, device);
    });
}

fn a_weight_that_is_not_finite_stays_in_its_token() {
    every_dtype(|name, device, dtype| {
        for tokens in [4, 40] {
            let mut layer = Layer::random(size([tokens, 2, 5, 136, 72]), FP4, dtype, 4);
            let expected = layer.run(device);
            layer.weights[2] = f32::NAN;
            let actual = layer.run(device);
            assert_close(&actual[..136], &expected[..136], EXACT, name);
            assert_close(&actual[272..], &expected[272..], EXACT, name);
            assert!(actual[136..272].iter().all(|v| v.is_nan()), "{name}");
        }
    });
}

fn a_weight_of_zero_and_one_below_zero_are_weights_like_any_other() {
    every_dtype(|name, device, dtype| {
        for layer in some(name, &few_and_many(FP4, dtype), 2) {
            let mut layer = layer.clone();
            for (pair, weight) in layer.weights.iter_mut().enumerate() {
                *weight *= [1.0, 0.0, -1.0, -0.0, 2.0][pair % 5];
            }
            layer.check(name, device);
        }
    });
}

fn ids_may_have_any_integer_dtype() {
    for (name, device) in devices() {
        for dtype in [IntDType::I32, IntDType::I64, IntDType::U32] {
            if !device.supports_dtype(dtype) {
                skip(name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            for layer in some(name, &few_and_many(FP4, FloatDType::F32), 2) {
                let shape = [layer.size.tokens, layer.size.k];
                let ids = typed(&layer.ids, shape, dtype, device);
                let actual = layer.run_on(&layer.stacks(device), layer.x(device), ids);
                layer.check_output(&actual, &format!("{name} {dtype:?}"));
            }
        }
    }
}

fn ids_that_32_bits_do_not_hold_are_padding() {
    // Where ids can be looked at, these are errors.
    for (name, device) in devices().iter().filter(|(name, _)| name != "flex") {
        if !device.supports_dtype(IntDType::I64) {
            skip(name, "i64");
            continue;
        }
        for layer in some(name, &few_and_many(FP4, FloatDType::F32), 2) {
            let mut layer = layer.clone();
            let mut wide = layer.ids.clone();
            for (id, wide) in layer.ids.iter_mut().zip(&mut wide).skip(1).step_by(2) {
                *wide += 1 << 32;
                *id = -1;
            }
            let ids = typed(
                &wide,
                [layer.size.tokens, layer.size.k],
                IntDType::I64,
                device,
            );
            let actual = layer.run_on(&layer.stacks(device), layer.x(device), ids);
            layer.check_output(&actual, name);
        }
    }
}

fn no_slots_and_no_columns_are_fine() {
    for (name, device) in devices() {
        for format in [FP4, FP8_PAIR, F32] {
            for case in [
                [3, 0, 5, 40, 24],
                [3, 2, 5, 40, 0],
                [0, 0, 5, 40, 24],
                [3, 2, 5, 0, 24],
            ] {
                let layer = Layer::exact(size(case), format, FloatDType::F32, 1);
                let zeros = vec![0.0; layer.x.len()];
                assert_close(&layer.run(device), &zeros, EXACT, name);
            }
        }
    }
}

catalogue![
    one_expert_may_get_everything,
    experts_with_one_pair_and_with_many_at_once,
    experts_with_few_pairs_each_are_exact_for_any_number_of_tokens,
    more_pairs_than_are_multiplied_at_a_time,
    experts_that_nobody_chose_may_hold_nan,
    padding_adds_nothing_whatever_its_weight,
    nothing_but_padding_is_zero_everywhere,
    an_expert_may_be_chosen_twice_by_one_token,
    padding_may_come_before_the_experts_of_one_token,
    a_weight_that_is_not_finite_stays_in_its_token,
    a_weight_of_zero_and_one_below_zero_are_weights_like_any_other,
    ids_may_have_any_integer_dtype,
    ids_that_32_bits_do_not_hold_are_padding,
    no_slots_and_no_columns_are_fine,
];
