//! Experts of a token's own and the one that all share, in every mix of formats, against the oracle
//! of both.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::moe::moe_ffn;
use burn_ds4_ops::quant::{Fp4Layout, Weights};

use super::common::{
    EXACT, absolute, assert_close, devices, dtypes, every_dtype, floats, half_unit, integers,
    is_gpu, read, some, values,
};
use super::experts::{Size, Stacks, size};
use super::packing::{FP4, FP8_PAIR, Format, REPACKED_FP4, rounded};
use super::sharing::{Both, experts};

/// Next to the inner width of the shared expert: that of several, in one.
const SIZES: [(Size, usize); 8] = [
    (size([1, 1, 1, 40, 24]), 8),
    (size([1, 6, 16, 96, 64]), 128),
    (size([2, 6, 16, 544, 160]), 160),
    (size([3, 2, 5, 96, 64]), 520),
    (size([5, 6, 8, 96, 288]), 32),
    (size([16, 8, 5, 288, 64]), 64),
    (size([17, 2, 5, 96, 64]), 64),
    (size([40, 2, 5, 40, 24]), 16),
];
/// Sizes that a software driver would take too long for.
const LARGER: [(Size, usize); 3] = [
    (size([1, 6, 16, 4096, 2048]), 2048),
    (size([2, 6, 16, 2080, 3072]), 1088),
    (size([16, 8, 16, 1056, 544]), 4096),
];
/// Enough rows for warpgroups by the shared expert, in one tile and in several.
const MANY: [(Size, usize); 3] = [
    (size([35, 2, 5, 416, 64]), 256),
    (size([130, 1, 2, 544, 160]), 384),
    (size([300, 2, 5, 160, 128]), 224),
];

/// Every mix of formats of which a device has the dtypes.
fn mixes(name: &str, device: &Device) -> Vec<[Format; 2]> {
    let dtypes = dtypes(name, device);
    let has = |format: &Format| match format {
        Format::Dense(dtype) => dtypes.contains(dtype),
        _ => true,
    };
    let formats = [
        Format::Fp4(Fp4Layout::fastest_on(device)),
        FP8_PAIR,
        Format::Dense(FloatDType::F32),
        Format::Dense(FloatDType::BF16),
    ];
    let formats: Vec<Format> = formats.into_iter().filter(has).collect();
    let mixes = |&own: &Format| formats.iter().map(move |&shared| [own, shared]);
    formats.iter().flat_map(mixes).collect()
}

fn sums_of_any_mix_of_formats_are_exact_at_any_size() {
    for (name, device) in devices() {
        let larger = if is_gpu(name) { &LARGER[..] } else { &[] };
        let (mixes, dtypes) = (mixes(name, device), dtypes(name, device));
        let mut cases = Vec::new();
        for (i, &size) in SIZES.iter().chain(larger).enumerate() {
            for (turn, &formats) in mixes.iter().enumerate() {
                for (of, &dtype) in dtypes.iter().enumerate() {
                    // Kernels compile slowly, and the oracle is slow. Every mix has every dtype at
                    // some of the sizes.
                    if of == (i + turn) % dtypes.len() {
                        cases.push((i, size, formats, dtype));
                    }
                }
            }
        }
        // Without bf16, every 20th has 1, 12 and 30 pairs and more than 16 tokens, all in f32, and
        // every format for a token's own experts and for the shared one.
        for &(i, size, formats, dtype) in some(name, &cases, 20) {
            let both = Both::exact(size, formats, dtype, i as u64);
            both.check(&format!("{name} {dtype:?}"), device);
        }
    }
}

fn a_shared_expert_of_many_tokens_is_exact() {
    for (name, device) in devices() {
        let mut cases = Vec::new();
        for (i, &size) in MANY.iter().enumerate() {
            for formats in mixes(name, device) {
                // Those of a token's own go another way.
                if matches!(formats[0], Format::Fp4(_)) {
                    let dtypes = dtypes(name, device).into_iter();
                    cases.extend(dtypes.map(|dtype| (i, size, formats, dtype)));
                }
            }
        }
        // Where kernels compile slowly, the first size and the second.
        for &(i, size, formats, dtype) in some(name, &cases, 9) {
            let both = Both::exact(size, formats, dtype, 7 + i as u64);
            both.check(&format!("{name} {dtype:?}"), device);
        }
    }
}

fn values_of_any_kind_are_what_f32_sums_can_be() {
    every_dtype(|name, device, dtype| {
        let cases = [
            (2, [None, Some(1.0)]),
            (16, [Some(1.0), None]),
            (18, [None; 2]),
        ];
        // Without bf16, every fourth mix is of one format.
        let step = if dtype == FloatDType::F32 { 4 } else { 9 };
        for &formats in some(name, &mixes(name, device), step) {
            for &(tokens, limits) in some(name, &cases, 3) {
                let size = (size([tokens, 3, 5, 160, 96]), 192);
                let mut both = Both::random(size, formats, dtype, tokens as u64);
                [both.own.limit, both.shared.limit] = limits;
                both.check(name, device);
            }
        }
    });
}

fn a_token_has_the_same_bits_whatever_is_next_to_it() {
    every_dtype(|name, device, dtype| {
        // Where kernels compile slowly, those for 6 pairs and for 96.
        let mixes = [[REPACKED_FP4, FP8_PAIR], [FP8_PAIR, FP4]];
        for &formats in some(name, &mixes, 2) {
            let both = Both::random((size([16, 6, 12, 288, 160]), 576), formats, dtype, 3);
            let stacks = both.stacks(device);
            let alone = (0..16).map(|t| both.tokens(t..t + 1).run_with(&stacks, device));
            let alone: Vec<f32> = alone.flatten().collect();
            for &tokens in some(name, &[16, 2, 3, 5, 8, 9], 6) {
                let together = both.tokens(0..tokens).run_with(&stacks, device);
                let what = format!("{name} {formats:?} {tokens} tokens");
                assert_close(&together, &alone[..tokens * 288], EXACT, &what);
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_token() {
    every_dtype(|name, device, dtype| {
        for &tokens in some(name, &[4, 20], 2) {
            let size = (size([tokens, 2, 5, 96, 64]), 128);
            let mut both = Both::random(size, [FP4, FP8_PAIR], dtype, 4);
            let expected = both.run(device);
            both.own.x[96 + 7] = f32::NAN;
            let actual = both.run(device);
            let what = format!("{name} {tokens} tokens");
            assert_close(&actual[..96], &expected[..96], EXACT, &what);
            assert_close(&actual[192..], &expected[192..], EXACT, &what);
            assert!(actual[96..192].iter().all(|v| v.is_nan()), "{what}");
        }
    });
}

fn a_token_of_padding_has_the_shared_expert_alone() {
    for (name, device) in devices() {
        for &tokens in some(name, &[3, 20], 2) {
            let size = (size([tokens, 2, 5, 96, 64]), 64);
            let mut both = Both::exact(size, [FP4, FP8_PAIR], FloatDType::F32, 5);
            both.own.ids.fill(-1);
            both.own.weights.fill(f32::NAN);
            both.own.gate_up.poison(0);
            both.own.ids[3] = 2;
            both.own.weights[3] = 0.5;
            both.check(name, device);
        }
    }
}

fn slots_come_first_in_their_order_then_the_shared_expert_and_one_rounding() {
    every_dtype(|name, device, dtype| {
        // 64 is its own SiLU. The slots are 2048 and 1, the shared expert is -2048: 1, unless
        // something is added up in another order, or rounded before the end.
        let dense = |values: &[f32], shape| {
            Weights::dense(floats(values, shape, device).cast(dtype)).unwrap()
        };
        let big = if dtype == FloatDType::F32 {
            2f32.powi(24)
        } else {
            2048.0
        };
        let own = [
            dense(&[64.0, 1.0, 64.0, 1.0], [2, 2, 1]),
            dense(&[big / 64.0, 1.0], [2, 1, 1]),
        ];
        let shared = [
            dense(&[64.0, 1.0], [1, 2, 1]),
            dense(&[-big / 64.0], [1, 1, 1]),
        ];
        let all = |[gate_up, down]: &[Weights; 2]| {
            let (gate_up, down) = (gate_up.clone(), down.clone());
            Stacks { gate_up, down }
        };
        let (own, shared) = (all(&own), all(&shared));
        let output = moe_ffn(
            floats(&[1.0], [1, 1], device).cast(dtype),
            integers(&[0, 1], [1, 2], device),
            floats(&[1.0, 1.0 / 64.0], [1, 2], device),
            experts(&own, None),
            experts(&shared, None),
        );
        // In f32, 1 is lost next to the first slot: the sum with the shared expert first would have
        // kept it.
        let expected = if dtype == FloatDType::F32 { 0.0 } else { 1.0 };
        assert_close(&read(&output.unwrap()), &[expected], EXACT, name);
    });
}

fn it_is_both_kinds_of_experts_added_up() {
    every_dtype(|name, device, dtype| {
        for &tokens in some(name, &[1, 7, 30], 3) {
            let size = (size([tokens, 2, 5, 136, 72]), 200);
            let both = Both::random(size, [FP4, FP8_PAIR], dtype, tokens as u64);
            let stacks = both.stacks(device);
            let apart = [(&both.own, &stacks.own), (&both.shared, &stacks.shared)];
            let [own, shared] = apart.map(|(layer, stacks)| layer.run_with(stacks, device));
            let sum: Vec<f32> = own.iter().zip(&shared).map(|(a, b)| a + b).collect();
            let sum = rounded(&sum, dtype);
            let largest = sum.iter().fold(0f32, |most, v| most.max(v.abs()));
            let close = absolute(f64::from(largest) * (1e-6 + 2.0 * half_unit(dtype)));
            let what = format!("{name} {tokens} tokens");
            assert_close(&both.run_with(&stacks, device), &sum, close, &what);
        }
    });
}

fn without_slots_there_is_the_shared_expert_and_without_tokens_nothing() {
    for (name, device) in devices() {
        let size = (size([3, 2, 5, 96, 64]), 64);
        let both = Both::exact(size, [FP4, FP8_PAIR], FloatDType::F32, 6);
        let stacks = both.stacks(device);
        let run = |x: Tensor<2>, ids: Tensor<2, Int>| {
            let weights = Tensor::<2>::ones(ids.dims(), (device, DType::F32));
            let (routed, shared) = (
                experts(&stacks.own, None),
                experts(&stacks.shared, Some(64.0)),
            );
            moe_ffn(x, ids, weights, routed, shared).unwrap()
        };
        let x = both.own.x(device);
        let none = run(x.clone(), integers(&[], [3, 0], device));
        let alone = both.shared.run_with(&stacks.shared, device);
        assert_close(&values(none), &alone, EXACT, name);
        let nothing = run(x.slice([0..0, 0..96]), integers(&[], [0, 2], device));
        assert_eq!(nothing.dims(), [0, 96], "{name}");
    }
}

#[test]
fn the_exact_cases_have_parts_of_both_kinds_in_most_sums() {
    let size = (size([2, 2, 5, 96, 64]), 64);
    let both = Both::exact(size, [FP4, FP8_PAIR], FloatDType::F32, 1);
    for layer in [&both.own, &both.shared] {
        let sums = layer.expected();
        let some = sums.iter().filter(|(value, _)| value.abs() > 1e-3).count();
        assert!(some > sums.len() / 2, "only {some}");
    }
}

catalogue![
    sums_of_any_mix_of_formats_are_exact_at_any_size,
    a_shared_expert_of_many_tokens_is_exact,
    values_of_any_kind_are_what_f32_sums_can_be,
    a_token_has_the_same_bits_whatever_is_next_to_it,
    what_is_not_finite_stays_in_its_token,
    a_token_of_padding_has_the_shared_expert_alone,
    slots_come_first_in_their_order_then_the_shared_expert_and_one_rounding,
    it_is_both_kinds_of_experts_added_up,
    without_slots_there_is_the_shared_expert_and_without_tokens_nothing,
];
