//! The layer of the `gated_delta_net` example: against plain loops in `f64`, and against itself.

#[path = "../../../examples/gated_delta_net/layer/mod.rs"]
mod layer;
mod oracle;
mod values;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_ds4_ops::device::DeviceSpec;

use self::layer::{GatedDeltaNet, GatedDeltaNetConfig, GatedDeltaNetState};
use self::oracle::drawn;
use crate::common::{absolute, assert_close, devices, every_dtype, floats, integers, noise, read};

const D_MODEL: usize = 20;
const SLOTS: usize = 6;
const F32: FloatDType = FloatDType::F32;

/// Three value heads for each head, and sizes that are all different.
fn config() -> GatedDeltaNetConfig {
    GatedDeltaNetConfig::new(D_MODEL, 2, 6)
        .with_width(16)
        .with_channels(8)
}

fn inputs(shape: [usize; 2], seed: u32, dtype: FloatDType, device: &Device) -> Tensor<3> {
    let [batch, tokens] = shape;
    let values = noise(batch * tokens * D_MODEL, seed);
    floats(&values, [batch, tokens, D_MODEL], device).cast(dtype)
}

fn slots(slots: &[i64], device: &Device) -> Tensor<1, Int> {
    integers(slots, [slots.len()], device)
}

/// A layer, and a state in which every slot has seen some tokens. The state's recurrence is in f32.
fn begun(dtype: FloatDType, device: &Device) -> (GatedDeltaNet, GatedDeltaNetState) {
    let layer = drawn(&config(), dtype, device);
    let state = GatedDeltaNetState::zeros(&config(), SLOTS, dtype, F32, device);
    let all: Vec<i64> = (0..SLOTS as i64).collect();
    let x = inputs([SLOTS, 3], 90, dtype, device);
    let (_, state) = layer.forward(x, state, slots(&all, device));
    (layer, state)
}

/// The convolution's and the recurrence's state of one slot.
fn slot(state: &GatedDeltaNetState, slot: usize) -> [Vec<f32>; 2] {
    [
        read(&state.convolution.clone().slice_dim(0, slot..slot + 1)),
        read(&state.recurrent.clone().slice_dim(0, slot..slot + 1)),
    ]
}

#[track_caller]
fn assert_same_slots(a: &GatedDeltaNetState, b: &GatedDeltaNetState, which: &[usize], what: &str) {
    for &index in which {
        assert_eq!(slot(a, index), slot(b, index), "{what}: slot {index}");
    }
}

#[test]
fn several_tokens_at_once_are_single_steps() {
    every_dtype(|name, device, dtype| {
        let (layer, begun) = begun(dtype, device);
        for (places, tokens) in [(&[3_i64][..], 16), (&[1, 4, 0], 5), (&[2, 5], 16)] {
            let what = format!("{name}, {tokens} tokens of {places:?}");
            let x = inputs([places.len(), tokens], 20, dtype, device);
            let (whole, after) = layer.forward(x.clone(), begun.clone(), slots(places, device));
            let mut state = begun.clone();
            let mut steps = Vec::new();
            for token in 0..tokens {
                let step = x.clone().slice_dim(1, token..token + 1);
                let y;
                (y, state) = layer.forward(step, state, slots(places, device));
                steps.push(y);
            }
            let steps = read(&Tensor::cat(steps, 1));
            if places.len() * tokens <= 16 {
                assert_eq!(read(&whole), steps, "{what}");
                let all: Vec<usize> = (0..SLOTS).collect();
                assert_same_slots(&after, &state, &all, &what);
            } else if dtype == F32 {
                // More rows than the products keep apart: their sums may be in another order.
                assert_close(&read(&whole), &steps, absolute(1e-5), &what);
            }
        }
    });
}

#[test]
fn sequences_of_a_batch_do_not_mix() {
    for (name, device) in devices() {
        let (layer, begun) = begun(F32, device);
        let x = inputs([2, 4], 30, F32, device);
        let one = |index: usize| x.clone().slice_dim(0, index..index + 1);
        let (both, after) = layer.forward(x.clone(), begun.clone(), slots(&[5, 2], device));
        for (index, place) in [5, 2].into_iter().enumerate() {
            let (alone, state) = layer.forward(one(index), begun.clone(), slots(&[place], device));
            let own = both.clone().slice_dim(0, index..index + 1);
            assert_eq!(read(&own), read(&alone), "{name}: slot {place}");
            assert_same_slots(&after, &state, &[place as usize], name);
        }
        assert_same_slots(&after, &begun, &[0, 1, 3, 4], name);

        let nan = Tensor::full([1, 4, D_MODEL], f32::NAN, device);
        let x = Tensor::cat(vec![nan, one(1)], 0);
        let (y, state) = layer.forward(x, begun, slots(&[5, 2], device));
        let rows = |y: &Tensor<3>| read(&y.clone().slice_dim(0, 1..2));
        assert_eq!(rows(&y), rows(&both), "{name}: next to NaN");
        assert_same_slots(&state, &after, &[0, 1, 2, 3, 4], name);
        assert!(
            slot(&state, 5).concat().iter().any(|x| x.is_nan()),
            "{name}"
        );
    }
}

#[test]
fn padding_puts_out_zeros_and_leaves_every_slot_alone() {
    for (name, device) in devices() {
        let (layer, begun) = begun(F32, device);
        let all: Vec<usize> = (0..SLOTS).collect();
        let x = inputs([1, 3], 40, F32, device);
        let (alone, after) = layer.forward(x.clone(), begun.clone(), slots(&[0], device));
        // Twice: what padding leaves behind has no part in the padding of the next call.
        let mut state = begun.clone();
        for _ in 0..2 {
            let nan = Tensor::full([2, 3, D_MODEL], f32::NAN, device);
            let y;
            (y, state) = layer.forward(nan, state, slots(&[-1, -7], device));
            assert_eq!(read(&y), [0.0; 2 * 3 * D_MODEL], "{name}");
            assert_same_slots(&state, &begun, &all, name);
        }
        let nan = Tensor::full([1, 3, D_MODEL], f32::NAN, device);
        let mixed = Tensor::cat(vec![nan.clone(), x, nan], 0);
        let (y, state) = layer.forward(mixed, state, slots(&[-1, 0, -1], device));
        let y = read(&y);
        let padding = vec![0.0; 3 * D_MODEL];
        let expected = [padding.clone(), read(&alone), padding].concat();
        assert_eq!(y, expected, "{name}");
        assert_same_slots(&state, &after, &all, name);
    }
}

#[test]
fn a_draft_of_which_a_part_is_accepted_is_that_part() {
    every_dtype(|name, device, dtype| {
        let (layer, begun) = begun(dtype, device);
        let all: Vec<usize> = (0..SLOTS).collect();
        let places = [3, -1, 0, 5];
        let x = inputs([4, 4], 50, dtype, device);
        let next = inputs([4, 1], 51, dtype, device);
        let (whole, _) = layer.forward(x.clone(), begun.clone(), slots(&places, device));
        let (y, draft) = layer.verify(x.clone(), &begun, slots(&places, device));
        assert_eq!(read(&y), read(&whole), "{name}: the outputs");
        for accepted in [[2, 2, 2, 2], [0, 4, 1, 4], [3, 0, 4, 0]] {
            let what = format!("{name}, accepted {accepted:?}");
            let state = begun.clone();
            let state = state.accept(draft.clone(), slots(&accepted, device));
            let (after_draft, state) = layer.forward(next.clone(), state, slots(&places, device));
            // Plainly: each sequence has its own number of tokens, so each is alone.
            let mut plain = begun.clone();
            for (index, (&place, &count)) in places.iter().zip(&accepted).enumerate() {
                let own = |x: &Tensor<3>| x.clone().slice_dim(0, index..index + 1);
                if count > 0 {
                    let x = own(&x).slice_dim(1, 0..count as usize);
                    plain = layer.forward(x, plain, slots(&[place], device)).1;
                }
                let y;
                (y, plain) = layer.forward(own(&next), plain, slots(&[place], device));
                assert_eq!(read(&own(&after_draft)), read(&y), "{what}: slot {place}");
            }
            assert_same_slots(&state, &plain, &all, &what);
        }
    });
}

#[test]
fn verifying_a_draft_leaves_the_states_alone() {
    for (name, device) in devices() {
        let (layer, begun) = begun(F32, device);
        let held = [read(&begun.convolution), read(&begun.recurrent)];
        let x = inputs([2, 4], 60, F32, device);
        let (_, draft) = layer.verify(x, &begun, slots(&[1, 4], device));
        assert_eq!([read(&begun.convolution), read(&begun.recurrent)], held);
        let state = begun.clone().accept(draft, slots(&[0, 3], device));
        assert_same_slots(&state, &begun, &[0, 1, 2, 3, 5], name);
        let [before, after] = [&begun, &state].map(|state| slot(state, 4));
        for (before, after) in before.iter().zip(&after) {
            assert_ne!(before, after, "{name}: what is accepted");
        }
    }
}

#[test]
fn a_slot_that_is_reset_begins_anew() {
    for (name, device) in devices() {
        let (layer, begun) = begun(F32, device);
        let fresh = GatedDeltaNetState::zeros(&config(), SLOTS, F32, F32, device);
        let state = begun.clone().reset(2);
        assert_same_slots(&state, &fresh, &[2], name);
        assert_same_slots(&state, &begun, &[0, 1, 3, 4, 5], name);
        let x = inputs([1, 4], 70, F32, device);
        let outputs = |state| read(&layer.forward(x.clone(), state, slots(&[2], device)).0);
        assert_eq!(outputs(state), outputs(fresh), "{name}");
        assert_ne!(
            outputs(begun.clone().reset(1)),
            outputs(begun.reset(2)),
            "{name}"
        );
    }
}

#[test]
#[should_panic(expected = "tokens of q")]
fn more_tokens_than_the_recurrence_takes_are_refused() {
    let (_, device) = &devices()[0];
    let (layer, state) = begun(F32, device);
    let x = inputs([1, 17], 80, F32, device);
    layer.forward(x, state, slots(&[0], device));
}

#[test]
#[should_panic(expected = "less than 6, the number of slots")]
fn a_slot_that_is_not_there_is_refused_where_the_host_sees_it() {
    let device = DeviceSpec::Flex
        .init()
        .expect("a device that is always there");
    let (layer, state) = begun(F32, &device);
    let x = inputs([1, 2], 81, F32, &device);
    layer.forward(x, state, slots(&[6], &device));
}
