//! The gated delta rule at the sizes that kernels are written for, where several kernels and many
//! cubes take part.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaOptions, StateSlots, StateUpdate, gated_delta_rule,
};

use super::common::{
    assert_close, compiles_slowly, devices, every_dtype, integers, narrow, skip, some, some_of_half,
};
use super::delta::{Case, OUTPUTS, Rule, STATES, Sizes, oracle, read, tolerance};

const fn sized(tokens: usize, width: usize, channels: usize) -> Sizes {
    Sizes {
        width,
        channels,
        slots: 3,
        ..Sizes::small(2, tokens)
    }
}

/// Compares a sequence's outputs with the oracle, and the state that went to `to`.
fn check(case: &Case, result: &GatedDelta, sequence: usize, from: usize, to: usize, what: &str) {
    let expected = oracle(case, sequence, from, Rule::of(case.sizes));
    let size = case.sizes.outputs();
    let out = read(&result.out.clone().slice_dim(0, sequence..sequence + 1));
    assert_eq!(out.len(), size, "{what}");
    let close = tolerance(result.out.dtype().into(), OUTPUTS);
    assert_close(
        &out,
        &narrow(&expected.outputs),
        close,
        &format!("{what}, outputs"),
    );
    let state = read(&result.pool.clone().slice_dim(0, to..to + 1));
    let close = tolerance(result.pool.dtype().into(), STATES);
    let last = narrow(expected.states.last().expect("a token"));
    assert_close(&state, &last, close, &format!("{what}, state"));
}

fn states_of_every_size_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        let sizes = [64, 128, 256]
            .into_iter()
            .flat_map(|width| [64, 128, 256].map(|channels| (width, channels)));
        let sizes: Vec<_> = sizes.zip([1, 3, 8, 9, 2, 16, 5, 4, 7]).collect();
        // Every fourth: each width once.
        let step = if dtype == FloatDType::F32 { 4 } else { 8 };
        for &((width, channels), tokens) in some(name, &sizes, step) {
            let case = Case::new(sized(tokens, width, channels), dtype, dtype, device);
            let result = case.run(&[2, 0], None, &GatedDeltaOptions::new());
            for (sequence, slot) in [(0, 2), (1, 0)] {
                let what = format!("{name} {width} {channels} {tokens}, sequence {sequence}");
                check(&case, &result, sequence, slot, slot, &what);
            }
        }
    });
}

fn sizes_that_fill_no_vector_or_plane_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        let sizes = [
            (5, 3, 3),
            (20, 7, 2),
            (33, 65, 9),
            (1, 1, 2),
            (96, 48, 4),
            (1024, 3, 1),
        ];
        // Neither 33 nor 1024 columns have a kernel of ours, and the plain operations that take
        // them are many kernels. Every second shape has one of the two.
        let step = if dtype == FloatDType::F32 { 2 } else { 4 };
        for &(width, channels, tokens) in some(name, &sizes, step) {
            let case = Case::new(sized(tokens, width, channels), dtype, dtype, device);
            let result = case.run(&[2, 0], None, &GatedDeltaOptions::new());
            let what = format!("{name} {width} {channels} {tokens}");
            check(&case, &result, 1, 0, 0, &what);
        }
    });
}

fn every_number_of_tokens_agrees_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        let numbers: Vec<usize> = (1..=16).collect();
        for &tokens in some_of_half(name, dtype, &numbers, 5) {
            let case = Case::new(sized(tokens, 64, 32), dtype, dtype, device);
            let result = case.run(&[1, 2], None, &GatedDeltaOptions::new());
            check(&case, &result, 0, 1, 1, &format!("{name} {tokens}"));
        }
    });
}

fn batches_of_many_states_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        // A software driver would take long for so many heads.
        let heads = if compiles_slowly(name) { 2 } else { 16 };
        for &(batch, tokens) in some_of_half(name, dtype, &[(9, 1), (16, 3)], 2) {
            let sizes = Sizes {
                heads,
                value_heads: 2 * heads,
                ..Sizes::small(batch, tokens)
            };
            let sizes = Sizes {
                width: 128,
                channels: 64,
                slots: batch + 2,
                ..sizes
            };
            let case = Case::new(sizes, dtype, dtype, device);
            let slots: Vec<i64> = (1..=batch as i64).rev().collect();
            let result = case.run(&slots, None, &GatedDeltaOptions::new());
            for sequence in [0, batch / 2, batch - 1] {
                let slot = batch - sequence;
                check(
                    &case,
                    &result,
                    sequence,
                    slot,
                    slot,
                    &format!("{name} {sequence}"),
                );
            }
            for untouched in [0, batch + 1] {
                let slot =
                    |pool: &Tensor<4>| read(&pool.clone().slice_dim(0, untouched..untouched + 1));
                assert_eq!(slot(&result.pool), slot(&case.pool), "{name} {untouched}");
            }
        }
    });
}

fn large_states_go_where_they_are_sent() {
    every_dtype(|name, device, dtype| {
        let sizes = Sizes {
            batch: 4,
            slots: 9,
            ..sized(5, 128, 128)
        };
        let case = Case::new(sizes, dtype, dtype, device);
        let (from, to) = ([8, -1, 0, 3], [1, 2, -1, 7]);
        let steps = integers(&[2, 1, 5, 0], [4], device);
        let options = GatedDeltaOptions::new().with_update(StateUpdate::Accepted(steps));
        let result = case.run(&from, Some(&to), &options);
        let slot = |pool: &Tensor<4>, slot: usize| read(&pool.clone().slice_dim(0, slot..slot + 1));
        let states =
            |sequence: usize, slot: usize| oracle(&case, sequence, slot, Rule::of(sizes)).states;
        let close = tolerance(dtype, STATES);
        let accepted = narrow(&states(0, 8)[2]);
        assert_close(
            &slot(&result.pool, 1),
            &accepted,
            close,
            &format!("{name}: slot 1"),
        );
        // None accepted: as read, to the bit.
        assert_eq!(slot(&result.pool, 7), slot(&case.pool, 3), "{name}: slot 7");
        for untouched in [0, 2, 3, 4, 5, 6, 8] {
            let what = format!("{name}: slot {untouched}");
            assert_eq!(
                slot(&result.pool, untouched),
                slot(&case.pool, untouched),
                "{what}"
            );
        }
        let skipped = read(&result.out.slice_dim(0, 1..2));
        assert!(
            skipped.iter().all(|&x| x == 0.0),
            "{name}: outputs of padding"
        );
    });
}

fn every_large_state_is_kept_and_the_pool_is_not_changed() {
    every_dtype(|name, device, dtype| {
        for &tokens in some_of_half(name, dtype, &[4, 1, 11], 3) {
            let case = Case::new(sized(tokens, 128, 64), dtype, dtype, device);
            let options = GatedDeltaOptions::new().with_update(StateUpdate::Intermediate);
            let result = case.run(&[-1, 2], None, &options);
            let states = result.intermediate.expect("asked for");
            let own = |index: usize| read(&states.clone().slice_dim(0, index..index + 1));
            let what = format!("{name} {tokens}");
            assert!(
                own(0).iter().all(|&x| x == 0.0),
                "{what}: states of padding"
            );
            let expected = oracle(&case, 1, 2, Rule::of(case.sizes)).states[1..].concat();
            assert_close(&own(1), &narrow(&expected), tolerance(dtype, STATES), &what);
            assert_eq!(read(&result.pool), read(&case.pool), "{what}: the pool");
        }
    });
}

fn tokens_that_are_not_accepted_leave_no_trace() {
    every_dtype(|name, device, dtype| {
        let case = Case::new(sized(4, 64, 64), dtype, dtype, device);
        let mut spoilt = case.clone();
        let nan = Tensor::<4>::full([1, 1, 2, 64], f32::NAN, (device, DType::F32)).cast(dtype);
        let at = [0..1, 2..3];
        spoilt.inputs.k = case.inputs.k.clone().slice_assign(at.clone(), nan.clone());
        spoilt.inputs.q = case.inputs.q.clone().slice_assign(at, nan);
        let steps = integers(&[2, 4], [2], device);
        let accepted = GatedDeltaOptions::new().with_update(StateUpdate::Accepted(steps));
        let every = GatedDeltaOptions::new().with_update(StateUpdate::Intermediate);
        let pools = [&case, &spoilt].map(|case| read(&case.run(&[2, 0], None, &accepted).pool));
        assert_eq!(pools[0], pools[1], "{name}: the pool");
        let [clean, reached] = [&case, &spoilt].map(|case| {
            let result = case.run(&[2, 0], None, &every);
            let states = result.intermediate.expect("asked for");
            [
                read(&states.clone().slice([0..1, 0..2])),
                read(&result.out.clone().slice([0..1, 0..2])),
                read(&states.slice_dim(0, 1..2)),
                read(&result.out.slice_dim(0, 1..2)),
            ]
        });
        assert_eq!(
            clean, reached,
            "{name}: what comes before, and the other sequence"
        );
    });
}

fn a_pool_with_gaps_that_nobody_else_holds_is_updated() {
    every_dtype(|name, device, dtype| {
        let case = Case::new(sized(2, 128, 64), dtype, dtype, device);
        let expected = case.run(&[2, 0], None, &GatedDeltaOptions::new());
        // As much again lies between the slots, and nobody else holds any of it.
        let twice = Tensor::cat(vec![case.pool.clone(), case.pool.clone()], 1);
        let pool = twice.slice_dim(1, 0..4);
        let slots = StateSlots::in_place(integers(&[2, 0], [2], device));
        let inputs = case.inputs.clone();
        let result = gated_delta_rule(inputs, pool, slots, &GatedDeltaOptions::new()).unwrap();
        assert_eq!(read(&result.out), read(&expected.out), "{name}: outputs");
        assert_eq!(read(&result.pool), read(&expected.pool), "{name}: the pool");
    });
}

fn a_pool_that_somebody_else_holds_is_not_changed() {
    for (name, device) in devices() {
        let case = Case::f32(sized(1, 64, 64), device);
        let before = read(&case.pool);
        let result = case.run(&[0, 2], None, &GatedDeltaOptions::new());
        assert_eq!(read(&case.pool), before, "{name}");
        assert_ne!(read(&result.pool), before, "{name}: nothing was written");
        // One state seen as several slots.
        let one = case.pool.clone().slice_dim(0, 0..1);
        let mut shared = case.clone();
        shared.pool = one.expand([3, 4, 64, 64]);
        let result = shared.run(&[0, 2], None, &GatedDeltaOptions::new());
        let middle = read(&result.pool.clone().slice_dim(0, 1..2));
        assert_eq!(
            middle,
            before[..middle.len()],
            "{name}: a slot that nobody writes"
        );
        check(&shared, &result, 1, 2, 2, name);
    }
}

fn pools_and_values_of_different_dtypes_agree_with_the_oracle() {
    for (name, device) in devices() {
        if !device.supports_dtype(FloatDType::F16) {
            skip(name, "f16");
            continue;
        }
        for (dtype, pool) in [
            (FloatDType::F32, FloatDType::F16),
            (FloatDType::F16, FloatDType::F32),
        ] {
            let case = Case::new(sized(3, 128, 64), dtype, pool, device);
            let result = case.run(&[2, 0], None, &GatedDeltaOptions::new());
            check(
                &case,
                &result,
                0,
                2,
                2,
                &format!("{name} {dtype:?} {pool:?}"),
            );
        }
    }
}

catalogue![
    states_of_every_size_agree_with_the_oracle,
    sizes_that_fill_no_vector_or_plane_agree_with_the_oracle,
    every_number_of_tokens_agrees_with_the_oracle,
    batches_of_many_states_agree_with_the_oracle,
    large_states_go_where_they_are_sent,
    every_large_state_is_kept_and_the_pool_is_not_changed,
    tokens_that_are_not_accepted_leave_no_trace,
    a_pool_with_gaps_that_nobody_else_holds_is_updated,
    a_pool_that_somebody_else_holds_is_not_changed,
    pools_and_values_of_different_dtypes_agree_with_the_oracle,
];
