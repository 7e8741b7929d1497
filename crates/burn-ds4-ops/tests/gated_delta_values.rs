//! What the gated delta rule makes of extreme gates, of ties in rounding, and of values that are no
//! numbers.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::gated_delta::GatedDeltaOptions;

use super::common::{EXACT, assert_close, devices, every_dtype, floats, narrow, values};
use super::delta::{Case, OUTPUTS, Rule, STATES, Sizes, oracle, read, tolerance};

/// One head with one key of width 2, which is the first unit vector, and no norm: the first column
/// of the state changes.
fn unit(device: &Device) -> (Case, GatedDeltaOptions) {
    let sizes = Sizes::single(1, 2, 4);
    let mut case = Case::f32(sizes, device);
    case.inputs.k = floats(&[1.0, 0.0], [1, 1, 1, 2], device);
    // exp(-exp(-200)) is 1: no decay.
    case.inputs.a_log = floats(&[-200.0], [1], device);
    case.inputs.dt_bias = floats(&[0.0], [1], device);
    (case, GatedDeltaOptions::new().with_l2_norm(false))
}

fn softplus_is_the_identity_beyond_the_threshold() {
    for (name, device) in devices() {
        let next = f32::from_bits(1f32.to_bits() + 1);
        let x = [1.0, next, -1.0, 0.0];
        let mut case = Case::f32(Sizes::small(1, 1), device);
        case.inputs.a = floats(&x, [1, 1, 4], device);
        case.inputs.dt_bias = Tensor::zeros([4], (device, DType::F32));
        let options = GatedDeltaOptions::new().with_softplus_threshold(1.0);
        let result = case.run(&[2], None, &options);
        let rule = Rule {
            threshold: 1.0,
            ..Rule::of(case.sizes)
        };
        let expected = oracle(&case, 0, 2, rule);
        // At the threshold and one unit beyond, softplus is 1.31 and 1.
        let close = tolerance(FloatDType::F32, STATES);
        let size = case.sizes.state();
        let state = &values(result.pool)[2 * size..][..size];
        assert_close(state, &narrow(&expected.states[1]), close, name);
        let out = tolerance(FloatDType::F32, OUTPUTS);
        assert_close(&values(result.out), &narrow(&expected.outputs), out, name);
    }
}

fn gates_of_any_size_give_the_decay_that_they_should() {
    for (name, device) in devices() {
        let beyond = f32::from_bits(20f32.to_bits() + 1);
        for x in [20.0, beyond, 100.0, 3e38, -20.0, -100.0, f32::NEG_INFINITY] {
            let (mut case, options) = unit(device);
            case.inputs.a = floats(&[x], [1, 1, 1], device);
            // Large enough for a softplus of 2e-9 to count.
            let rate = if x < 0.0 { 18.0 } else { -4.0 };
            case.inputs.a_log = floats(&[rate], [1], device);
            case.inputs.b = floats(&[-200.0], [1, 1, 1], device);
            case.pool = Tensor::ones([1, 1, 4, 2], (device, DType::F32));
            let x = f64::from(x);
            let softplus = if x <= 20.0 { x.exp().ln_1p() } else { x };
            let expected = (-f64::from(rate).exp() * softplus).exp() as f32;
            let close = tolerance(FloatDType::F32, 1e-6);
            let pool = values(case.run(&[0], None, &options).pool);
            assert_close(&pool, &[expected; 8], close, &format!("{name} {x}"));
        }
    }
}

fn a_beta_of_zero_or_one_keeps_or_replaces_what_the_key_recalls() {
    for (name, device) in devices() {
        for (b, keeps) in [
            (-200.0, true),
            (f32::NEG_INFINITY, true),
            (200.0, false),
            (f32::INFINITY, false),
        ] {
            let (mut case, options) = unit(device);
            case.inputs.b = floats(&[b], [1, 1, 1], device);
            case.inputs.v = floats(&[8.0, 2.0, 3.0, 4.0], [1, 1, 1, 4], device);
            let held = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0];
            case.pool = floats(&held, [1, 1, 4, 2], device);
            let replaced = [8.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0];
            let expected = if keeps { held } else { replaced };
            let pool = values(case.run(&[0], None, &options).pool);
            assert_close(&pool, &expected, EXACT, &format!("{name} {b}"));
        }
    }
}

fn stored_states_are_rounded_to_nearest_even() {
    every_dtype(|name, device, dtype| {
        let unit_of_one = match dtype {
            FloatDType::F16 => 2f32.powi(-10),
            FloatDType::BF16 => 2f32.powi(-7),
            _ => return,
        };
        let (mut case, options) = unit(device);
        case.inputs.b = floats(&[200.0], [1, 1, 1], device);
        let tie = |units: f32| 1.0 + unit_of_one * units;
        let stored = [tie(0.5), tie(1.5), -tie(0.5), tie(0.51)];
        case.inputs.v = floats(&stored, [1, 1, 1, 4], device);
        case.pool = Tensor::<4>::zeros([1, 1, 4, 2], (device, DType::F32)).cast(dtype);
        let pool = read(&case.run(&[0], None, &options).pool);
        let expected = [1.0, 0.0, tie(2.0), 0.0, -1.0, 0.0, tie(1.0), 0.0];
        assert_close(&pool, &expected, EXACT, name);
    });
}

fn keys_and_queries_of_zeros_are_no_division_by_zero() {
    for (name, device) in devices() {
        let mut case = Case::f32(Sizes::small(1, 2), device);
        case.inputs.q = Tensor::zeros([1, 2, 2, 16], (device, DType::F32));
        case.inputs.k = Tensor::zeros([1, 2, 2, 16], (device, DType::F32));
        let result = case.run(&[1], None, &GatedDeltaOptions::new());
        assert_close(&values(result.out), &[0.0; 64], EXACT, name);
        let expected = oracle(&case, 0, 1, Rule::of(case.sizes));
        let size = case.sizes.state();
        let state = &values(result.pool)[size..2 * size];
        let close = tolerance(FloatDType::F32, STATES);
        assert_close(state, &narrow(&expected.states[2]), close, name);
    }
}

fn nan_stays_in_its_sequence_and_head() {
    for (name, device) in devices() {
        let clean = Case::f32(Sizes::small(2, 2), device);
        let options = GatedDeltaOptions::new();
        let expected = values(clean.run(&[3, 5], None, &options).out);
        // The value heads of the second sequence that a NaN reaches, for one in its second query or
        // key head, or third value head.
        let nan = |rank: usize| -> Tensor<4> {
            let shape = if rank == 0 {
                [1, 1, 1, 16]
            } else {
                [1, 1, 1, 8]
            };
            Tensor::full(shape, f32::NAN, (device, DType::F32))
        };
        let mut cases = [clean.clone(), clean.clone(), clean.clone(), clean.clone()];
        let at = [1..2, 0..1, 1..2];
        cases[0].inputs.q = clean.inputs.q.clone().slice_assign(at.clone(), nan(0));
        cases[1].inputs.k = clean.inputs.k.clone().slice_assign(at, nan(0));
        cases[2].inputs.v = clean
            .inputs
            .v
            .clone()
            .slice_assign([1..2, 0..1, 2..3], nan(1));
        let gate = Tensor::<3>::full([1, 1, 1], f32::NAN, (device, DType::F32));
        cases[3].inputs.a = clean
            .inputs
            .a
            .clone()
            .slice_assign([1..2, 0..1, 2..3], gate);
        // A query leaves no trace in the state, and its NaN is gone with the next token.
        let reached = [(0..1, 2..4), (0..2, 2..4), (0..2, 2..3), (0..2, 2..3)];
        for ((case, (tokens, heads)), argument) in
            cases.iter().zip(reached).zip(["q", "k", "v", "a"])
        {
            let out = values(case.run(&[3, 5], None, &options).out);
            let mut expected = expected.clone();
            for (index, value) in expected.iter_mut().enumerate() {
                let (sequence, token, head) = (index / 64, index / 32 % 2, index / 8 % 4);
                if sequence == 1 && tokens.contains(&token) && heads.contains(&head) {
                    *value = f32::NAN;
                }
            }
            assert_close(
                &out,
                &expected,
                EXACT,
                &format!("{name}, NaN in {argument}"),
            );
        }
    }
}

catalogue![
    softplus_is_the_identity_beyond_the_threshold,
    gates_of_any_size_give_the_decay_that_they_should,
    a_beta_of_zero_or_one_keeps_or_replaces_what_the_key_recalls,
    stored_states_are_rounded_to_nearest_even,
    keys_and_queries_of_zeros_are_no_division_by_zero,
    nan_stays_in_its_sequence_and_head,
];
