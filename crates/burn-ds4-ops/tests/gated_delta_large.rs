//! The gated delta rule where offsets do not fit in 32 bits: on a GPU, and with little elsewhere.

use burn::tensor::{FloatDType, Tensor};
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaInputs, GatedDeltaOptions, StateSlots, StateUpdate, gated_delta_rule,
};

use super::common::{FLOATS, compiles_slowly, integers, sized, skip};
use super::delta::{Case, Sizes, read};

/// Half a mebi of elements to a slot: 4096 of them are 2^31.
const SIZES: Sizes = Sizes {
    batch: 2,
    tokens: 8,
    heads: 16,
    value_heads: 32,
    width: 128,
    channels: 128,
    slots: 2,
};
/// Where a software driver would take long for so many heads.
const FEWER_HEADS: Sizes = Sizes {
    heads: 1,
    value_heads: 2,
    ..SIZES
};

fn run(
    case: &Case,
    inputs: GatedDeltaInputs,
    pool: Tensor<4>,
    slots: &[i64],
    update: StateUpdate,
) -> GatedDelta {
    let slots = StateSlots::in_place(integers(slots, [slots.len()], &case.device));
    let options = GatedDeltaOptions::new().with_update(update);
    gated_delta_rule(inputs, pool, slots, &options).expect("arguments that fit")
}

/// A case of two sequences with the two states of a small pool, if the device has the dtype.
fn each(test: impl Fn(&str, &Case, usize)) {
    sized(4100, 5, |name, device, count| {
        let sizes = if compiles_slowly(name) {
            FEWER_HEADS
        } else {
            SIZES
        };
        for dtype in FLOATS {
            if device.supports_dtype(dtype) {
                let case = Case::new(sizes, dtype, dtype, device);
                test(&format!("{name} {dtype:?}"), &case, count);
            } else {
                skip(name, &format!("{dtype:?}").to_lowercase());
            }
        }
    });
}

fn slots_past_the_4096th_are_read_and_written() {
    each(|what, case, slots| {
        let alone = run(
            case,
            case.inputs.clone(),
            case.pool.clone(),
            &[0, 1],
            StateUpdate::Last,
        );
        let dtype: FloatDType = case.pool.dtype().into();
        // The last slot and the first have the two states, and all others zeros.
        let [_, heads, channels, width] = case.pool.dims();
        let zeros = Tensor::<4>::zeros(
            [slots, heads, channels, width],
            (&case.device, case.pool.dtype()),
        );
        let slot = |pool: &Tensor<4>, index: usize| pool.clone().slice_dim(0, index..index + 1);
        let last = slots - 1;
        let pool = zeros
            .slice_assign([last..slots, 0..heads], slot(&case.pool, 0))
            .slice_assign([0..1, 0..heads], slot(&case.pool, 1));
        let result = run(
            case,
            case.inputs.clone(),
            pool,
            &[last as i64, 0],
            StateUpdate::Last,
        );
        assert_eq!(read(&result.out), read(&alone.out), "{what}: outputs");
        for (index, of) in [(last, 0), (0, 1)] {
            let (actual, expected) = (slot(&result.pool, index), slot(&alone.pool, of));
            assert_eq!(read(&actual), read(&expected), "{what}: slot {index}");
        }
        for index in [1, slots / 2, last - 1] {
            let untouched = read(&slot(&result.pool, index));
            assert!(
                untouched.iter().all(|&x| x == 0.0),
                "{what}: slot {index}, {dtype:?}"
            );
        }
    });
}

fn states_past_the_2_to_the_31st_element_are_kept() {
    each(|what, case, count| {
        let every = || StateUpdate::Intermediate;
        let alone = run(
            case,
            case.inputs.clone(),
            case.pool.clone(),
            &[0, 1],
            every(),
        );
        // Both sequences over and over: 8 tokens each.
        let pairs = count.div_ceil(2 * SIZES.tokens);
        let four = |tensor: &Tensor<4>| tensor.clone().repeat_dim(0, pairs);
        let three = |tensor: &Tensor<3>| tensor.clone().repeat_dim(0, pairs);
        let inputs = GatedDeltaInputs {
            q: four(&case.inputs.q),
            k: four(&case.inputs.k),
            v: four(&case.inputs.v),
            a: three(&case.inputs.a),
            b: three(&case.inputs.b),
            ..case.inputs.clone()
        };
        let slots: Vec<i64> = (0..2 * pairs as i64).map(|sequence| sequence % 2).collect();
        let result = run(case, inputs, case.pool.clone(), &slots, every());
        let states = |result: &GatedDelta, first: usize| {
            let states = result.intermediate.clone().expect("asked for");
            read(&states.slice_dim(0, first..first + 2))
        };
        let expected = states(&alone, 0);
        for first in [0, pairs / 2 * 2, 2 * pairs - 2] {
            assert!(
                states(&result, first) == expected,
                "{what}: states of {first}"
            );
            let out = result.out.clone().slice_dim(0, first..first + 2);
            assert_eq!(read(&out), read(&alone.out), "{what}: outputs of {first}");
        }
    });
}

catalogue![
    slots_past_the_4096th_are_read_and_written,
    states_past_the_2_to_the_31st_element_are_kept,
];
