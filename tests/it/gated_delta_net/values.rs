//! What the layer computes, against plain loops in `f64`.

use burn::tensor::{Device, FloatDType};

use super::layer::{GatedDeltaNetConfig, GatedDeltaNetState};
use super::oracle::{Memory, Oracle, drawn};
use super::{D_MODEL, F32, SLOTS, config, inputs, slot, slots};
use crate::common::{Tolerance, absolute, assert_close, every_dtype, narrow, read, wide};

/// Several calls over a batch, compared with the oracle after each.
fn check_against_oracle(
    config: &GatedDeltaNetConfig,
    dtypes: [FloatDType; 2],
    device: &Device,
    [outputs, convolutions, states]: [Tolerance; 3],
    what: &str,
) {
    let [weights, activations] = dtypes;
    let layer = drawn(config, weights, device);
    let oracle = Oracle::new(config, &layer);
    let places = [4, 0, 5];
    let mut memories = vec![oracle.memory(); places.len()];
    let mut state = GatedDeltaNetState::zeros(config, SLOTS, activations, F32, device);
    for (call, tokens) in [1, 5, 2, 16].into_iter().enumerate() {
        let what = format!("{what}, call {call}");
        let x = inputs(
            [places.len(), tokens],
            10 + call as u32,
            activations,
            device,
        );
        let rows = wide(&read(&x));
        let expected: Vec<f64> = rows
            .chunks(tokens * D_MODEL)
            .zip(&mut memories)
            .flat_map(|(rows, memory)| sequence(&oracle, rows, memory))
            .collect();
        let y;
        (y, state) = layer.forward(x, state, slots(&places, device));
        assert_eq!(y.dims(), [places.len(), tokens, D_MODEL], "{what}");
        assert_eq!(y.dtype(), activations.into(), "{what}");
        assert_close(&read(&y), &narrow(&expected), outputs, &what);
        for (place, memory) in places.into_iter().zip(&memories) {
            let [convolution, recurrent] = slot(&state, place as usize);
            let what = format!("{what}: slot {place}");
            let expected = narrow(&memory.convolution);
            assert_close(&convolution, &expected, convolutions, &what);
            assert_close(&recurrent, &narrow(&memory.recurrent), states, &what);
        }
    }
}

fn sequence(oracle: &Oracle, rows: &[f64], memory: &mut Memory) -> Vec<f64> {
    let rows = rows.chunks(D_MODEL);
    rows.flat_map(|x| oracle.step(x, memory)).collect()
}

#[test]
fn outputs_and_states_are_those_of_plain_loops_whatever_the_weights_are_in() {
    every_dtype(|name, device, dtype| {
        for kernel in [2, 4] {
            let config = config().with_kernel(kernel);
            let what = format!("{name}, kernel {kernel}");
            let close = [absolute(1e-5), absolute(1e-6), absolute(2e-6)];
            check_against_oracle(&config, [dtype, F32], device, close, &what);
        }
    });
}

#[test]
fn activations_of_16_bits_are_as_far_off_as_their_rounding() {
    every_dtype(|name, device, dtype| {
        let unit = match dtype {
            FloatDType::F16 => 2f64.powi(-10),
            FloatDType::BF16 => 2f64.powi(-7),
            _ => return,
        };
        let rounded = Tolerance {
            absolute: unit,
            relative: unit,
        };
        // An output adds up 48 products of about 0.2, each with three roundings.
        let close = [absolute(8.0 * unit), rounded, absolute(2.0 * unit)];
        check_against_oracle(&config(), [dtype, dtype], device, close, name);
    });
}
