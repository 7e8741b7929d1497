//! The gated delta rule against an `f64` oracle, over its shapes, dtypes and layouts.

use burn::tensor::{FloatDType, Tensor};
use burn_ds4_ops::gated_delta::{GatedDelta, GatedDeltaOptions, StateUpdate};

use super::common::{
    FLOATS, assert_close, devices, every_dtype, floats, narrow, noise, some, values,
};
use super::delta::{Case, OUTPUTS, Rule, STATES, Sizes, oracle, read, tolerance};

/// Compares outputs and written states with the oracle; sequence `i` is read from and written to
/// `slots[i]`.
fn check(case: &Case, result: GatedDelta, slots: &[i64], rule: Rule, what: &str) {
    let (size, count) = (case.sizes.state(), case.sizes.outputs());
    assert_eq!(result.out.dims(), case.inputs.v.dims(), "{what}");
    assert_eq!(result.out.dtype(), case.inputs.v.dtype(), "{what}");
    assert_eq!(result.pool.dims(), case.pool.dims(), "{what}");
    assert_eq!(result.pool.dtype(), case.pool.dtype(), "{what}");
    let (out, pool) = (read(&result.out), read(&result.pool));
    for (sequence, &slot) in slots.iter().enumerate() {
        let slot = slot as usize;
        let expected = oracle(case, sequence, slot, rule);
        assert_close(
            &out[sequence * count..][..count],
            &narrow(&expected.outputs),
            tolerance(result.out.dtype().into(), OUTPUTS),
            &format!("{what}, outputs of sequence {sequence}"),
        );
        assert_close(
            &pool[slot * size..][..size],
            &narrow(expected.states.last().expect("a token")),
            tolerance(result.pool.dtype().into(), STATES),
            &format!("{what}, state of sequence {sequence}"),
        );
    }
}

fn batches_drafts_and_heads_of_any_number_agree_with_the_oracle() {
    let places: Vec<(usize, usize)> = (0..3)
        .flat_map(|row| [0, 1, 2, 3, 4].map(|column| (row, column)))
        .collect();
    for (name, device) in devices() {
        // Every fourth: both widths, one token and several.
        for &(row, column) in some(name, &places, 4) {
            let (turn, ratio) = (row + column, [1, 2, 4][(row + column) % 3]);
            let batch = [1, 2, 5][row];
            let sizes = Sizes {
                batch,
                tokens: [1, 2, 4, 8, 16][column],
                heads: 1 + turn % 2,
                value_heads: (1 + turn % 2) * ratio,
                width: [64, 128][column % 2],
                channels: [128, 64, 64][(row + column / 2) % 3],
                slots: batch + 1,
            };
            let case = Case::f32(sizes, device);
            let slots: Vec<i64> = (0..batch as i64).rev().collect();
            let result = case.run(&slots, None, &GatedDeltaOptions::new());
            check(
                &case,
                result,
                &slots,
                Rule::of(sizes),
                &format!("{name} {sizes:?}"),
            );
        }
    }
}

fn heads_of_128_by_128_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        let sizes = Sizes {
            heads: 2,
            value_heads: 8,
            width: 128,
            channels: 128,
            slots: 3,
            ..Sizes::small(2, 3)
        };
        let case = Case::new(sizes, dtype, dtype, device);
        let result = case.run(&[2, 0], None, &GatedDeltaOptions::new());
        check(&case, result, &[2, 0], Rule::of(sizes), name);
    });
}

fn values_and_pool_have_dtypes_of_their_own() {
    every_dtype(|name, device, dtype| {
        for pool_dtype in FLOATS.into_iter().filter(|of| device.supports_dtype(*of)) {
            let sizes = Sizes::small(3, 4);
            let case = Case::new(sizes, dtype, pool_dtype, device);
            let result = case.run(&[7, 0, 11], None, &GatedDeltaOptions::new());
            let what = format!("{name}, pool in {pool_dtype:?}");
            check(&case, result, &[7, 0, 11], Rule::of(sizes), &what);
        }
    });
}

fn gates_may_be_in_another_dtype_than_queries() {
    every_dtype(|name, device, dtype| {
        let sizes = Sizes::small(2, 2);
        let mut case = Case::f32(sizes, device);
        case.inputs.a = case.inputs.a.cast(dtype);
        case.inputs.b = case.inputs.b.cast(dtype);
        case.inputs.dt_bias = case.inputs.dt_bias.cast(dtype);
        let result = case.run(&[1, 2], None, &GatedDeltaOptions::new());
        check(&case, result, &[1, 2], Rule::of(sizes), name);
    });
}

fn scale_and_norm_are_as_asked() {
    for (name, device) in devices() {
        let sizes = Sizes::small(2, 3);
        let mut case = Case::f32(sizes, device);
        // Without the norm, long keys would let the state grow from token to token.
        case.inputs.k = case.inputs.k * 0.25;
        let plain = GatedDeltaOptions::new().with_l2_norm(false);
        for (options, scale, l2_norm) in [
            (plain.clone(), 0.25, false),
            (plain.with_scale(0.5), 0.5, false),
            (GatedDeltaOptions::new().with_scale(-0.125), -0.125, true),
        ] {
            let rule = Rule {
                scale,
                l2_norm,
                ..Rule::of(sizes)
            };
            let result = case.run(&[1, 2], None, &options);
            check(&case, result, &[1, 2], rule, &format!("{name} {options:?}"));
        }
    }
}

fn a_step_made_by_hand() {
    for (name, device) in devices() {
        let sizes = Sizes::single(1, 2, 1);
        let mut case = Case::f32(sizes, device);
        case.inputs.q = floats(&[2.0, 1.0], [1, 1, 1, 2], device);
        case.inputs.k = floats(&[1.0, 2.0], [1, 1, 1, 2], device);
        case.inputs.v = floats(&[12.0], [1, 1, 1, 1], device);
        // log(1 + exp(0)) is log 2: the state is halved. sigmoid(0) is a half.
        case.inputs.a = floats(&[-1.0], [1, 1, 1], device);
        case.inputs.dt_bias = floats(&[1.0], [1], device);
        case.inputs.a_log = floats(&[0.0], [1], device);
        case.inputs.b = floats(&[0.0], [1, 1, 1], device);
        case.pool = floats(&[8.0, -4.0], [1, 1, 1, 2], device);
        let options = GatedDeltaOptions::new().with_l2_norm(false).with_scale(3.0);
        let result = case.run(&[0], None, &options);
        // Halved: 4, -2, of which the key recalls 0. Half of 12 times the key is added: 10, 10.
        let close = tolerance(FloatDType::F32, 0.0);
        assert_close(&values(result.pool), &[10.0, 10.0], close, name);
        assert_close(&values(result.out), &[90.0], close, name);
    }
}

fn views_are_computed_as_their_copies() {
    for (name, device) in devices() {
        let sizes = Sizes::small(2, 4);
        let twice = Case::f32(Sizes { tokens: 9, ..sizes }, device);
        // Tokens amid more, transposed queries, and a pool with gaps between and within its slots.
        let view = twice.tokens(1..5);
        let mut case = Case { sizes, ..view };
        case.inputs.q = floats(&noise(256, 9), [2, 4, 16, 2], device).swap_dims(2, 3);
        let wide = Sizes {
            width: 20,
            channels: 11,
            slots: 17,
            ..sizes
        };
        let pool = Case::f32(wide, device).pool;
        case.pool = pool.slice([1..9, 0..4, 2..10, 3..19]);
        let result = case.run(&[6, 1], None, &GatedDeltaOptions::new());
        check(&case, result.clone(), &[6, 1], Rule::of(sizes), name);
        let untouched = |pool: &Tensor<4>| values(pool.clone().slice_dim(0, 2..6));
        assert_eq!(untouched(&result.pool), untouched(&case.pool), "{name}");
    }
}

fn an_empty_batch_leaves_the_pool_as_it_is() {
    for (name, device) in devices() {
        let sizes = Sizes {
            slots: 3,
            ..Sizes::small(0, 2)
        };
        let mut full = Case::f32(Sizes { batch: 1, ..sizes }, device);
        full.sizes = sizes;
        let mut case = full.clone();
        case.inputs.q = full.inputs.q.slice_dim(0, 0..0);
        case.inputs.k = full.inputs.k.slice_dim(0, 0..0);
        case.inputs.v = full.inputs.v.slice_dim(0, 0..0);
        case.inputs.a = full.inputs.a.slice_dim(0, 0..0);
        case.inputs.b = full.inputs.b.slice_dim(0, 0..0);
        let result = case.run(&[], None, &GatedDeltaOptions::new());
        assert_eq!(result.out.dims(), [0, 2, 4, 8], "{name}");
        assert_eq!(values(result.pool), values(case.pool.clone()), "{name}");
        assert!(result.intermediate.is_none(), "{name}");
        let options = GatedDeltaOptions::new().with_update(StateUpdate::Intermediate);
        let states = case.run(&[], None, &options).intermediate;
        assert_eq!(states.expect(name).dims(), [0, 2, 4, 8, 16], "{name}");
    }
}

catalogue![
    batches_drafts_and_heads_of_any_number_agree_with_the_oracle,
    heads_of_128_by_128_agree_with_the_oracle,
    values_and_pool_have_dtypes_of_their_own,
    gates_may_be_in_another_dtype_than_queries,
    scale_and_norm_are_as_asked,
    a_step_made_by_hand,
    views_are_computed_as_their_copies,
    an_empty_batch_leaves_the_pool_as_it_is,
];
