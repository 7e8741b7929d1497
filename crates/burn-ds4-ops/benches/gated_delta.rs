//! The gated delta rule at the sizes of Qwen3.5's layers, in bf16.

use std::cell::RefCell;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaInputs, GatedDeltaOptions, StateSlots, StateUpdate, gated_delta_rule,
};

use super::{
    super::common::{assert_close, floats, integers, narrow, noise},
    super::delta::{Case as Problem, OUTPUTS, Rule, STATES, Sizes, oracle, read, tolerance},
    harness::{Case, Prepared},
};

const BATCHES: [usize; 8] = [1, 4, 8, 16, 32, 64, 128, 256];
const TOKENS: [usize; 4] = [1, 2, 4, 8];
const VALUE_HEADS: [usize; 2] = [64, 32];
const HEADS: usize = 16;
/// Rows and columns of a state.
const WIDTH: usize = 128;
/// Bytes of a bf16 and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;
/// Makes a head forget its state. Every other head has it, so that its outputs depend only on the
/// tokens of the call.
const FORGET_GATE: f32 = 60.0;

pub fn cases() -> Vec<Case> {
    let sizes = VALUE_HEADS.into_iter().flat_map(move |heads| {
        BATCHES
            .into_iter()
            .flat_map(move |batch| TOKENS.map(|tokens| (heads, batch, tokens)))
    });
    sizes
        .flat_map(|(heads, batch, tokens)| {
            [false, true].map(|every_state| case(heads, batch, tokens, every_state))
        })
        .collect()
}

fn case(value_heads: usize, batch: usize, tokens: usize, every_state: bool) -> Case {
    let state = batch * value_heads * WIDTH * WIDTH * BF16_BYTES;
    let keys = 2 * batch * tokens * HEADS * WIDTH * BF16_BYTES;
    let values = batch * tokens * value_heads * WIDTH * BF16_BYTES;
    let gates = 2 * batch * tokens * value_heads * BF16_BYTES + 2 * value_heads * F32_BYTES;
    let written = if every_state { tokens * state } else { state };
    Case {
        op: "gated_delta_rule",
        shape: vec![("HV", value_heads), ("B", batch), ("T", tokens)],
        variant: if every_state { "every" } else { "final" },
        dtype: DType::BF16,
        bytes: state + written + keys + 2 * values + gates,
        flops: Some((8 * tokens * batch * value_heads * WIDTH * WIDTH) as u64),
        input_bytes: state + keys + values + gates,
        build: Box::new(move |device, seed| {
            let sizes = Sizes {
                batch,
                tokens,
                heads: HEADS,
                value_heads,
                width: WIDTH,
                channels: WIDTH,
                slots: batch,
            };
            if every_state {
                prepare_every_state(sizes, seed, device)
            } else {
                prepare_final_state(sizes, seed, device)
            }
        }),
    }
}

/// Slots in another order than the batch.
fn slots(problem: &Problem) -> StateSlots {
    let batch = problem.sizes.batch;
    let slots: Vec<i64> = (0..batch as i64).rev().collect();
    StateSlots::in_place(integers(&slots, [batch], &problem.device))
}

/// Makes a case on the device: pools are too large to be made on the host.
fn problem(sizes: Sizes, seed: u32, device: &Device) -> Problem {
    let Sizes {
        batch,
        tokens,
        value_heads,
        slots,
        ..
    } = sizes;
    let one = Sizes {
        batch: 1,
        slots: 1,
        ..sizes
    };
    let bf16 = FloatDType::BF16;
    let single = Problem::new(one, bf16, bf16, device);
    let factors = |count: usize| {
        let factors: Vec<f32> = noise(count, seed ^ 9)
            .iter()
            .map(|x| 0.75 + x / 4.0)
            .collect();
        floats(&factors, [count, 1, 1, 1], device).cast(bf16)
    };
    let spread = |tensor: &Tensor<4>, count: usize| {
        let [_, b, c, d] = tensor.dims();
        tensor.clone().expand([count, b, c, d]) * factors(count)
    };
    let gate = |tensor: &Tensor<3>| {
        tensor.clone().expand([batch, tokens, value_heads]) * factors(batch).reshape([batch, 1, 1])
    };
    let forgetful: Vec<f32> = (0..value_heads)
        .map(|head| (head % 2) as f32 * FORGET_GATE)
        .collect();
    let forgetful = floats(&forgetful, [1, 1, value_heads], device).cast(bf16);
    let inputs = &single.inputs;
    let inputs = GatedDeltaInputs {
        q: spread(&inputs.q, batch),
        k: spread(&inputs.k, batch),
        v: spread(&inputs.v, batch),
        a: gate(&inputs.a) + forgetful,
        b: gate(&inputs.b),
        ..inputs.clone()
    };
    Problem {
        sizes,
        inputs,
        pool: spread(&single.pool, slots),
        device: device.clone(),
    }
}

/// The last sequence alone, with its state as the whole pool.
fn alone(problem: &Problem) -> Problem {
    let alone = problem.alone(problem.sizes.batch - 1);
    Problem {
        sizes: Sizes {
            slots: 1,
            ..alone.sizes
        },
        pool: alone.pool.slice_dim(0, 0..1),
        ..alone
    }
}

fn run(problem: &Problem, pool: Tensor<4>, slots: &StateSlots, update: StateUpdate) -> GatedDelta {
    let options = GatedDeltaOptions::new().with_update(update);
    gated_delta_rule(problem.inputs.clone(), pool, slots.clone(), &options)
        .expect("arguments that fit")
}

/// Compares the results of a call for the last sequence.
fn check(problem: &Problem, out: Tensor<4>, states: Tensor<5>, every_state: bool) {
    let alone = alone(problem);
    let expected = oracle(&alone, 0, 0, Rule::of(alone.sizes));
    let bf16 = FloatDType::BF16;
    let close = tolerance(bf16, OUTPUTS);
    assert_close(&last(out), &narrow(&expected.outputs), close, "outputs");
    let first = if every_state { 1 } else { alone.sizes.tokens };
    let expected = narrow(&expected.states[first..].concat());
    assert_close(&read(&states), &expected, tolerance(bf16, STATES), "states");
}

/// The outputs of the last sequence.
fn last(out: Tensor<4>) -> Vec<f32> {
    let batch = out.dims()[0];
    read(&out.slice_dim(0, batch - 1..batch))
}

fn prepare_every_state(sizes: Sizes, seed: u32, device: &Device) -> Prepared {
    let problem = problem(sizes, seed, device);
    let (checked, slots) = (problem.clone(), slots(&problem));
    Prepared::new(
        move || {
            let result = run(
                &problem,
                problem.pool.clone(),
                &slots,
                StateUpdate::Intermediate,
            );
            (result.out, result.intermediate.expect("asked for"))
        },
        move |(out, states)| {
            let last = sizes.batch - 1;
            check(&checked, out, states.slice_dim(0, last..last + 1), true);
        },
    )
}

/// Each call continues in place from the state that the previous call left.
fn prepare_final_state(sizes: Sizes, seed: u32, device: &Device) -> Prepared {
    let problem = problem(sizes, seed, device);
    let (checked, slots) = (problem.clone(), slots(&problem));
    let slots_of_check = slots.clone();
    // Computed, so that nobody else holds it.
    let pool = RefCell::new(Some(problem.pool.clone().mul_scalar(1.0)));
    Prepared::new(
        move || {
            let held = pool.take().expect("what the last call left");
            let result = run(&problem, held, &slots, StateUpdate::Last);
            pool.replace(Some(result.pool));
            result.out
        },
        move |out| {
            let result = run(
                &checked,
                checked.pool.clone(),
                &slots_of_check,
                StateUpdate::Last,
            );
            // However often the operator has been called, the heads that forget have the same
            // outputs.
            let alone = last(result.out.clone());
            let actual = last(out);
            let heads = actual.chunks(WIDTH).zip(alone.chunks(WIDTH)).enumerate();
            for (head, (actual, expected)) in heads.filter(|(head, _)| head % 2 == 1) {
                let close = tolerance(FloatDType::BF16, OUTPUTS);
                assert_close(actual, expected, close, &format!("outputs of head {head}"));
            }
            let state = result.pool.slice_dim(0, 0..1).unsqueeze_dim(1);
            check(&checked, result.out, state, false);
        },
    )
}
