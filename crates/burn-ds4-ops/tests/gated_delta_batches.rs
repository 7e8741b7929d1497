//! Many states in one call of the gated delta rule: more than a GPU's kernels begin with, so that
//! they go on from one to the next.
//!
//! Every sequence is compared with itself alone, to the bit where one kernel does both: no way to
//! divide the work changes what is added up in which order.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaInputs, GatedDeltaOptions, NegativeSlots, StateUpdate,
};

use super::common::{Tolerance, assert_close, every_dtype, integers, is_gpu, narrow, some};
use super::delta::{Case, OUTPUTS, Rule, STATES, Sizes, oracle, read, tolerance};

/// Sizes whose states are more than a few for every multiprocessor: 32 heads of a few sequences.
fn sized(name: &str, (width, channels): (usize, usize), batch: usize, tokens: usize) -> Sizes {
    // Elsewhere, as many sequences of fewer heads.
    let (heads, value_heads) = if is_gpu(name) { (16, 32) } else { (1, 2) };
    Sizes {
        batch,
        tokens,
        heads,
        value_heads,
        width,
        channels,
        slots: batch + 3,
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn slot(pool: &Tensor<4>, slot: usize) -> Vec<u32> {
    bits(&read(&pool.clone().slice_dim(0, slot..slot + 1)))
}

fn outputs(result: &GatedDelta, index: usize) -> Vec<u32> {
    bits(&read(&result.out.clone().slice_dim(0, index..index + 1)))
}

fn every_sequence_of_a_large_batch_is_as_alone() {
    every_dtype(|name, device, dtype| {
        // More than four times 132 parts of states, and no multiple of what goes on at the same
        // time.
        let shapes = [((128, 128), 19), ((256, 64), 18), ((64, 192), 21)];
        let sizes: Vec<_> = shapes
            .into_iter()
            .flat_map(|shape| [3, 8, 11].map(|tokens| (shape, tokens)))
            .collect();
        // To run each sequence alone takes a software driver long. It has every shape in f32 with
        // another number of tokens, and two of them in other dtypes.
        let step = if dtype == FloatDType::F32 { 4 } else { 8 };
        for &((shape, batch), tokens) in some(name, &sizes, step) {
            let sizes = sized(name, shape, batch, tokens);
            let case = Case::new(sizes, dtype, dtype, device);
            let slots: Vec<i64> = (1..=batch as i64).rev().collect();
            let options = GatedDeltaOptions::new();
            let result = case.run(&slots, None, &options);
            let what = format!("{name} {sizes:?}");
            for (index, &place) in slots.iter().enumerate() {
                let expected = case.alone(index).run(&[place], None, &options);
                let place = place as usize;
                assert!(
                    outputs(&result, index) == outputs(&expected, 0),
                    "{what}: outputs of {index}"
                );
                assert!(
                    slot(&result.pool, place) == slot(&expected.pool, place),
                    "{what}: state of {index}"
                );
            }
            for place in [0, batch + 1, batch + 2] {
                assert!(
                    slot(&result.pool, place) == slot(&case.pool, place),
                    "{what}: slot {place} changed"
                );
            }
            let last = batch - 1;
            let expected = oracle(&case, last, 1, Rule::of(sizes));
            let actual = read(&result.out.clone().slice_dim(0, last..batch));
            let close = tolerance(dtype, OUTPUTS);
            assert_close(&actual, &narrow(&expected.outputs), close, &what);
            let actual = read(&result.pool.clone().slice_dim(0, 1..2));
            let state = expected.states.last().expect("a token");
            assert_close(&actual, &narrow(state), tolerance(dtype, STATES), &what);
        }
    });
}

fn a_token_of_a_large_batch_is_as_alone_but_for_rounding() {
    every_dtype(|name, device, dtype| {
        // On either side of where another kernel begins, for one token and for two. Only tensor
        // cores have another one.
        let numbers = [(3, 2), (1, 2), (35, 1), (32, 1)];
        let step = if dtype == FloatDType::F32 { 2 } else { 4 };
        for &(batch, tokens) in some(name, &numbers, step) {
            let sizes = sized(name, (128, 128), batch, tokens);
            let case = Case::new(sizes, dtype, dtype, device);
            let slots: Vec<i64> = (1..=batch as i64).rev().collect();
            let options = GatedDeltaOptions::new();
            let result = case.run(&slots, None, &options);
            let what = format!("{name} {sizes:?}");
            for (index, &place) in slots.iter().enumerate() {
                let expected = case.alone(index).run(&[place], None, &options);
                let own = place as usize..place as usize + 1;
                let parts = |result: &GatedDelta, index: usize| {
                    let outputs = read(&result.out.clone().slice_dim(0, index..index + 1));
                    (
                        outputs,
                        read(&result.pool.clone().slice_dim(0, own.clone())),
                    )
                };
                let (actual, expected) = (parts(&result, index), parts(&expected, 0));
                // Both of them are rounded.
                let twice = |single: Tolerance| Tolerance {
                    absolute: single.absolute,
                    relative: 2.0 * single.relative,
                };
                let close = twice(tolerance(dtype, OUTPUTS));
                let near = twice(tolerance(dtype, STATES));
                assert_close(&actual.0, &expected.0, close, &what);
                assert_close(&actual.1, &expected.1, near, &what);
            }
            let expected = oracle(&case, 0, batch, Rule::of(sizes));
            let actual = read(&result.out.clone().slice_dim(0, 0..1));
            let close = tolerance(dtype, OUTPUTS);
            assert_close(&actual, &narrow(&expected.outputs), close, &what);
        }
    });
}

/// Puts NaN in all that a sequence is given.
fn spoil(case: &mut Case, index: usize, dtype: FloatDType, device: &Device) {
    let nan = |shape: [usize; 4]| -> Tensor<4> {
        Tensor::<4>::full(shape, f32::NAN, (device, DType::F32)).cast(dtype)
    };
    let inputs = &mut case.inputs;
    for tensor in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
        let [_, tokens, heads, width] = tensor.dims();
        let at = [index..index + 1, 0..tokens];
        *tensor = tensor
            .clone()
            .slice_assign(at, nan([1, tokens, heads, width]));
    }
    for tensor in [&mut inputs.a, &mut inputs.b] {
        let [_, tokens, heads] = tensor.dims();
        let at = [index..index + 1, 0..tokens];
        let nan = nan([1, tokens, heads, 1]).reshape([1, tokens, heads]);
        *tensor = tensor.clone().slice_assign(at, nan);
    }
}

fn slots_of_every_kind_mix_in_a_large_batch() {
    every_dtype(|name, device, dtype| {
        for &tokens in some(name, &[4, 12], 2) {
            let batch = 20;
            let sizes = Sizes {
                slots: 2 * batch,
                ..sized(name, (128, 128), batch, tokens)
            };
            let mut case = Case::new(sizes, dtype, dtype, device);
            // Padding, with NaN; states that move, that stay, and that go nowhere; and all numbers
            // of accepted tokens.
            let read: Vec<i64> = (0..batch as i64)
                .map(|index| if index % 5 == 2 { -1 } else { index })
                .collect();
            let write: Vec<i64> = (0..batch as i64)
                .map(|index| match index % 4 {
                    0 => index,
                    1 => -1,
                    _ => batch as i64 + index,
                })
                .collect();
            let steps: Vec<i64> = (0..batch as i64)
                .map(|index| index % (tokens as i64 + 1))
                .collect();
            for index in (2..batch).step_by(5) {
                spoil(&mut case, index, dtype, device);
            }
            let accept = |steps: &[i64]| {
                let steps = integers(steps, [steps.len()], device);
                GatedDeltaOptions::new().with_update(StateUpdate::Accepted(steps))
            };
            let result = case.run(&read, Some(&write), &accept(&steps));
            let what = format!("{name} {tokens}");
            let mut written = vec![false; sizes.slots];
            for index in 0..batch {
                let own = index..index + 1;
                let single = case.alone(index);
                let expected = single.run(
                    &read[own.clone()],
                    Some(&write[own.clone()]),
                    &accept(&steps[own]),
                );
                assert!(
                    outputs(&result, index) == outputs(&expected, 0),
                    "{what}: outputs of {index}"
                );
                if read[index] < 0 || write[index] < 0 {
                    continue;
                }
                let (from, to) = (read[index] as usize, write[index] as usize);
                written[to] = true;
                assert!(
                    slot(&result.pool, to) == slot(&expected.pool, to),
                    "{what}: state of {index}"
                );
                let kept = steps[index] as usize;
                if kept == 0 {
                    assert!(
                        slot(&result.pool, to) == slot(&case.pool, from),
                        "{what}: {index}"
                    );
                } else if index < 5 {
                    let state = &oracle(&case, index, from, Rule::of(sizes)).states[kept];
                    let actual = super::delta::read(&result.pool.clone().slice_dim(0, to..to + 1));
                    assert_close(&actual, &narrow(state), tolerance(dtype, STATES), &what);
                }
            }
            for place in (0..sizes.slots).filter(|&place| !written[place]) {
                assert!(
                    slot(&result.pool, place) == slot(&case.pool, place),
                    "{what}: slot {place} changed"
                );
            }
        }
    });
}

fn options_hold_for_large_states() {
    every_dtype(|name, device, dtype| {
        let sizes = sized(name, (64, 64), 3, 5);
        let mut case = Case::new(sizes, dtype, dtype, device);
        let slots = [4, 0, 2];
        let scaled = GatedDeltaOptions::new()
            .with_scale(0.25)
            .with_l2_norm(false)
            .with_softplus_threshold(0.5);
        // Without the norm, keys must be short for the rule not to grow.
        case.inputs.k = case.inputs.k.clone() * 0.125;
        let rule = Rule {
            scale: 0.25,
            l2_norm: false,
            threshold: 0.5,
        };
        let result = case.run(&slots, None, &scaled);
        for (index, &place) in slots.iter().enumerate() {
            let expected = oracle(&case, index, place as usize, rule);
            let actual = read(&result.out.clone().slice_dim(0, index..index + 1));
            let close = tolerance(dtype, 1e-4);
            assert_close(&actual, &narrow(&expected.outputs), close, name);
        }
        let discard = scaled.clone().with_update(StateUpdate::Discard);
        let discarded = case.run(&slots, None, &discard);
        assert_eq!(read(&discarded.out), read(&result.out), "{name}: outputs");
        assert_eq!(read(&discarded.pool), read(&case.pool), "{name}: the pool");
        let null = scaled.with_negative_slots(NegativeSlots::NullSlot0);
        let redirected = case.run(&[4, -1, 2], None, &null);
        assert_eq!(read(&redirected.out), read(&result.out), "{name}: slot 0");
        assert_eq!(read(&redirected.pool), read(&result.pool), "{name}: slot 0");
    });
}

fn parts_of_one_projection_are_read_where_they_are() {
    every_dtype(|name, device, dtype| {
        let sizes = Sizes {
            batch: 3,
            ..sized(name, (64, 64), 3, 4)
        };
        let case = Case::new(sizes, dtype, dtype, device);
        let expected = case.run(&[3, 1, 0], None, &GatedDeltaOptions::new());
        let inputs = &case.inputs;
        let flat = |tensor: &Tensor<4>| -> Tensor<3> {
            let [batch, tokens, heads, width] = tensor.dims();
            tensor.clone().reshape([batch, tokens, heads * width])
        };
        let parts = [
            flat(&inputs.q),
            flat(&inputs.k),
            flat(&inputs.v),
            inputs.a.clone(),
            inputs.b.clone(),
        ];
        let ends: Vec<usize> = parts
            .iter()
            .scan(0, |end, part| {
                *end += part.dims()[2];
                Some(*end)
            })
            .collect();
        let all = Tensor::cat(parts.to_vec(), 2);
        let part = |index: usize| {
            let first = if index == 0 { 0 } else { ends[index - 1] };
            all.clone().slice_dim(2, first..ends[index])
        };
        let mut cut = case.clone();
        cut.inputs = GatedDeltaInputs {
            q: part(0).reshape(inputs.q.dims()),
            k: part(1).reshape(inputs.k.dims()),
            v: part(2).reshape(inputs.v.dims()),
            a: part(3),
            b: part(4),
            ..inputs.clone()
        };
        let result = cut.run(&[3, 1, 0], None, &GatedDeltaOptions::new());
        assert_eq!(read(&result.out), read(&expected.out), "{name}: outputs");
        assert_eq!(read(&result.pool), read(&expected.pool), "{name}: the pool");
    });
}

fn what_is_learned_keeps_its_last_bits() {
    every_dtype(|name, device, dtype| {
        // One head, unit keys, no decay, and values that replace what was known: the second
        // correction has 18 digits, which the state, 1 after the first, takes away but for the
        // last. The third learns nothing.
        let sizes = Sizes::single(3, 32, 16);
        let mut case = Case::new(sizes, dtype, dtype, device);
        let full = |shape: [usize; 4], value: f32| {
            Tensor::<4>::full(shape, value, (device, DType::F32)).cast(dtype)
        };
        let unit = Tensor::cat(vec![full([1, 3, 1, 1], 1.0), full([1, 3, 1, 31], 0.0)], 3);
        let small = 2f32.powi(-18);
        case.inputs = GatedDeltaInputs {
            q: unit.clone(),
            k: unit,
            v: Tensor::cat(
                vec![full([1, 1, 1, 16], 1.0), full([1, 2, 1, 16], small)],
                1,
            ),
            a: full([1, 3, 1, 1], -30000.0).reshape([1, 3, 1]),
            b: full([1, 3, 1, 1], 30000.0).reshape([1, 3, 1]),
            ..case.inputs
        };
        case.pool = full([1, 1, 16, 32], 0.0);
        let options = GatedDeltaOptions::new().with_l2_norm(false);
        let state = read(&case.run(&[0], None, &options).pool);
        let expected: Vec<f32> = (0..16 * 32)
            .map(|at| if at % 32 == 0 { small } else { 0.0 })
            .collect();
        assert_eq!(state, expected, "{name}");
    });
}

catalogue![
    every_sequence_of_a_large_batch_is_as_alone,
    a_token_of_a_large_batch_is_as_alone_but_for_rounding,
    slots_of_every_kind_mix_in_a_large_batch,
    options_hold_for_large_states,
    parts_of_one_projection_are_read_where_they_are,
    what_is_learned_keeps_its_last_bits,
];
