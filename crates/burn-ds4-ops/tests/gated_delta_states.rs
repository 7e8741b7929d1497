//! Which states the gated delta rule keeps, and that several tokens at once give what they give one
//! by one.

use burn::tensor::FloatDType;
use burn_ds4_ops::gated_delta::{GatedDeltaOptions, StateUpdate};

use super::common::{
    assert_close, devices, every_dtype, integers, narrow, some, some_of_half, values,
};
use super::delta::{Case, Rule, STATES, Sizes, oracle, read, tolerance};

fn accepted(steps: &[i64], case: &Case) -> GatedDeltaOptions {
    let steps = integers(steps, [steps.len()], &case.device);
    GatedDeltaOptions::new().with_update(StateUpdate::Accepted(steps))
}

fn every_intermediate_state_is_kept_by_sequence() {
    every_dtype(|name, device, dtype| {
        let case = Case::new(Sizes::small(3, 4), dtype, dtype, device);
        let options = GatedDeltaOptions::new().with_update(StateUpdate::Intermediate);
        // By sequence: slots beyond the batch, one of them read by two, and padding.
        for slots in [[9, 0, 9], [-1, 11, 5]] {
            let what = format!("{name} {slots:?}");
            let result = case.run(&slots, None, &options);
            let states = result.intermediate.expect("asked for");
            assert_eq!(states.dims(), [3, 4, 4, 8, 16], "{what}");
            assert_eq!(states.dtype(), dtype.into(), "{what}");
            let (size, states) = (case.sizes.state(), read(&states));
            for (sequence, slot) in slots.into_iter().enumerate() {
                let own = &states[sequence * 4 * size..][..4 * size];
                let Ok(slot) = usize::try_from(slot) else {
                    assert!(own.iter().all(|&x| x == 0.0), "{what}");
                    continue;
                };
                let expected = oracle(&case, sequence, slot, Rule::of(case.sizes)).states;
                let expected = narrow(&expected[1..].concat());
                assert_close(own, &expected, tolerance(dtype, STATES), &what);
            }
            assert_eq!(read(&result.pool), read(&case.pool), "{what}: the pool");
            let discard = GatedDeltaOptions::new().with_update(StateUpdate::Discard);
            let alone = case.run(&slots, None, &discard);
            assert_eq!(read(&result.out), read(&alone.out), "{what}: outputs");
        }
    });
}

fn the_state_after_the_accepted_token_is_written() {
    every_dtype(|name, device, dtype| {
        let case = Case::new(Sizes::small(5, 4), dtype, dtype, device);
        let (slots, to) = ([9, 0, 3, 12, 7], [1, 2, 4, 5, 6]);
        let size = case.sizes.state();
        let whole = case.run(&slots, None, &GatedDeltaOptions::new());
        let rule = Rule::of(case.sizes);
        let states = |(sequence, &slot): (usize, &i64)| {
            let sequence = oracle(&case, sequence, slot as usize, rule);
            sequence.states
        };
        let states: Vec<_> = slots.iter().enumerate().map(states).collect();
        let moves = [
            ([0, 1, 2, 3, 4], Some(&to[..])),
            ([4, 4, 0, 1, -3], None),
            ([0, 1, 2, 3, 4], None),
            ([4, 4, 0, 1, -3], Some(&to[..])),
        ];
        for &(steps, write) in some_of_half(name, dtype, &moves, 4) {
            let what = format!("{name} {steps:?} to {write:?}");
            let result = case.run(&slots, write, &accepted(&steps, &case));
            assert_eq!(read(&result.out), read(&whole.out), "{what}: outputs");
            let pool = read(&result.pool);
            for (sequence, &slot) in write.unwrap_or(&slots).iter().enumerate() {
                let expected = &states[sequence][steps[sequence].max(0) as usize];
                let state = &pool[slot as usize * size..][..size];
                assert_close(state, &narrow(expected), tolerance(dtype, STATES), &what);
                if steps[sequence] <= 0 {
                    assert_eq!(state, narrow(expected), "{what}: as read");
                }
            }
        }
    });
}

fn accepting_as_many_tokens_as_there_are_is_writing_the_last_state() {
    for (name, device) in devices() {
        let case = Case::f32(Sizes::small(3, 4), device);
        let last = case.run(&[9, -1, 3], None, &GatedDeltaOptions::new());
        // More than there are is no error for padding, and clamped where the host cannot see it.
        let most = if name == "flex" { 4 } else { 1000 };
        let result = case.run(&[9, -1, 3], None, &accepted(&[most, 1000, 4], &case));
        assert_eq!(values(result.pool), values(last.pool), "{name}");
    }
}

fn several_tokens_at_once_are_single_steps() {
    every_dtype(|name, device, dtype| {
        for &tokens in some(name, &[5, 2, 16], 3) {
            let sizes = Sizes {
                width: 64,
                channels: 64,
                slots: 4,
                ..Sizes::small(2, tokens)
            };
            let case = Case::new(sizes, dtype, FloatDType::F32, device);
            let what = format!("{name}, {tokens} tokens");
            let options = GatedDeltaOptions::new();
            let whole = case.run(&[3, 1], None, &options);
            let mut pool = case.pool.clone();
            for token in 0..tokens {
                let mut step = case.tokens(token..token + 1);
                step.pool = pool;
                let result = step.run(&[3, 1], None, &options);
                let out = whole.out.clone().slice_dim(1, token..token + 1);
                assert_eq!(read(&result.out), read(&out), "{what}: token {token}");
                pool = result.pool;
            }
            assert_eq!(values(pool), values(whole.pool), "{what}: the pool");
        }
    });
}

fn single_steps_round_the_state_where_several_tokens_do_not() {
    every_dtype(|name, device, dtype| {
        let sizes = Sizes::small(2, 8);
        let case = Case::new(sizes, dtype, dtype, device);
        let options = GatedDeltaOptions::new();
        let whole = read(&case.run(&[3, 1], None, &options).pool);
        let mut step = case.clone();
        for token in 0..sizes.tokens {
            step.inputs = case.tokens(token..token + 1).inputs;
            step.pool = step.run(&[3, 1], None, &options).pool;
        }
        // Each of 8 roundings moves a state of less than 4 by half a unit at most, and no step
        // makes an error grow.
        let unit = tolerance(dtype, 0.0).relative - 1e-5;
        let close = tolerance(dtype, 1e-6 + 8.0 * 4.0 * unit);
        assert_close(&read(&step.pool), &whole, close, name);
    });
}

catalogue![
    every_intermediate_state_is_kept_by_sequence,
    the_state_after_the_accepted_token_is_written,
    accepting_as_many_tokens_as_there_are_is_writing_the_last_state,
    several_tokens_at_once_are_single_steps,
    single_steps_round_the_state_where_several_tokens_do_not,
];
