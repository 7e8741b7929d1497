//! Tensors of another shape, type or content than they should have.

use crate::checkpoint::*;

use super::*;

#[test]
fn an_fp8_weight_without_scale_misses_it() {
    let errors = report(
        &[stored("w.weight", "F8_E4M3", &[1, 2], &[0; 2])],
        |loader| loader.linear("w", 1, 2),
    );
    assert_eq!(errors.missing, [missing("w.scale", &[1, 1])]);
}

#[test]
fn a_dense_weight_has_no_scale() {
    let tensors = [
        stored_f32("w.weight", &[1, 1], &[1.0]),
        stored_f32("w.scale", &[1, 1], &[1.0]),
    ];
    let checkpoint = checkpoint_of(&tensors);
    let mut loader = Loader::new(&checkpoint);
    let linear = loader.linear("w", 1, 1);
    let Err(CheckpointError::Weights(errors)) = loader.finish(linear) else {
        panic!("loaded");
    };
    assert_eq!(errors.unexpected.len(), 1);
    assert_eq!(errors.unexpected[0].name, "w.scale");
}

#[test]
fn quantised_weights_and_scales_must_have_the_shapes_of_their_formats() {
    let tensors = [
        stored("fp8.weight", "F8_E4M3", &[129, 2], &[0; 258]),
        stored("fp8.scale", "F8_E8M0", &[1, 1], &[127]),
        stored("fp4.weight", "I8", &[1, 32], &[0; 32]),
        stored("fp4.scale", "F8_E8M0", &[1, 2], &[127; 2]),
    ];
    let errors = report(&tensors, |loader| {
        let fp8 = loader.linear("fp8", 129, 2);
        // The stored width of FP4 counts bytes: 32 columns are 16.
        let fp4 = loader.linear("fp4", 1, 32);
        fp8.zip(fp4)
    });
    assert_eq!(
        errors.mis_shaped,
        [
            mis_shaped("fp4.scale", &[1, 1], &[1, 2]),
            mis_shaped("fp4.weight", &[1, 16], &[1, 32]),
            mis_shaped("fp8.scale", &[2, 1], &[1, 1]),
        ]
    );
}

#[test]
fn weights_and_scales_of_other_types_are_refused() {
    let tensors = [
        stored("f64.weight", "F64", &[1, 1], &[0; 8]),
        stored("fp4.weight", "I8", &[1, 16], &[0; 16]),
        stored("fp4.scale", "F16", &[1, 1], &[0; 2]),
        stored("fp8.weight", "F8_E4M3", &[1, 1], &[0]),
        stored("fp8.scale", "F16", &[1, 1], &[0; 2]),
        stored("ids", "U8", &[1], &[0]),
    ];
    let errors = report(&tensors, |loader| {
        let f64 = loader.linear("f64", 1, 1);
        let fp4 = loader.linear("fp4", 1, 32);
        let fp8 = loader.linear("fp8", 1, 1);
        let ids = loader.ids("ids", &[1], 1);
        Some((f64?, fp4?, fp8?, ids?))
    });
    let dtype = |actual, expected| InvalidReason::Dtype { actual, expected };
    assert_eq!(
        errors.invalid,
        [
            invalid(
                "f64.weight",
                dtype(Dtype::F64, "F8_E4M3, I8, U8 or F4 (FP4), BF16, F16 or F32")
            ),
            invalid(
                "fp4.scale",
                dtype(Dtype::F16, "F8_E8M0, U8, F8_E4M3, F32 or BF16")
            ),
            invalid("fp8.scale", dtype(Dtype::F16, "F8_E8M0, F32 or BF16")),
            invalid("ids", dtype(Dtype::U8, "I64 or I32")),
        ]
    );
    assert_eq!(errors.unexpected, []);
}

#[test]
fn scales_that_are_not_finite_are_refused_in_every_format() {
    let tensors = [
        stored("fp4.weight", "I8", &[3, 1], &[0; 3]),
        stored("fp4.scale", "F8_E8M0", &[3, 1], &[254, 255, 255]),
        stored("base.weight", "F8_E4M3", &[1, 300], &[0; 300]),
        stored_f32("base.scale", &[1, 3], &[1.0, f32::INFINITY, f32::NAN]),
    ];
    let errors = report(&tensors, |loader| {
        let fp4 = loader.linear("fp4", 3, 2);
        let base = loader.linear("base", 1, 300);
        fp4.zip(base)
    });
    let reason = InvalidReason::NonFiniteScales { count: 2, first: 1 };
    assert_eq!(
        errors.invalid,
        [
            invalid("base.scale", reason.clone()),
            invalid("fp4.scale", reason)
        ]
    );
}

#[test]
fn values_that_are_not_finite_are_refused_in_every_dtype() {
    let bits = |bits: [u16; 4]| bits.map(u16::to_le_bytes).concat();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let tensors = [
        stored_f32("bias", &[4], &[0.0, nan, -nan, 1.0]),
        stored_f32("sink", &[1, 2], &[-inf, 1.0]),
        // Quiet and signalling NaN, and infinities of either sign.
        stored("bf16", "BF16", &[4], &bits([0, 0x7fc0, 0xff81, 0x3f80])),
        stored("f16", "F16", &[4], &bits([0, 0x7c00, 0xfc00, 0x7c01])),
        stored("w.weight", "BF16", &[2, 2], &bits([0, 0, 0, 0xff80])),
        stored("experts.0.w2.weight", "F16", &[2, 2], &[0; 8]),
        stored(
            "experts.1.w2.weight",
            "F16",
            &[2, 2],
            &bits([0, 0, 0x7e00, 0]),
        ),
    ];
    let errors = report(&tensors, |loader| {
        let bias = loader.dense("bias", &[4]);
        let sink = loader.dense("sink", &[1, 2]);
        let (bf16, f16) = (loader.dense("bf16", &[4]), loader.dense("f16", &[4]));
        let linear = loader.linear("w", 2, 2);
        let experts = loader.experts_down("experts", 2, 2, 2);
        Some((bias?, sink?, bf16?, f16?, linear?, experts?))
    });
    let not_finite = |name, count, first| invalid(name, InvalidReason::NonFinite { count, first });
    assert_eq!(
        errors.invalid,
        [
            not_finite("bf16", 2, 1),
            not_finite("bias", 2, 1),
            not_finite("experts.1.w2.weight", 1, 2),
            not_finite("f16", 3, 1),
            not_finite("sink", 1, 0),
            not_finite("w.weight", 1, 3),
        ]
    );
    let text = errors.to_string();
    let line = "bias has 2 values that are not finite, the first at element 1";
    assert!(text.contains(line), "{text}");
}

#[test]
fn the_largest_and_smallest_values_are_finite() {
    let bits = |bits: [u16; 4]| bits.map(u16::to_le_bytes).concat();
    let extremes = [f32::MAX, f32::MIN, f32::from_bits(1), -0.0];
    let tensors = [
        // Off any alignment.
        stored("byte", "I8", &[1], &[0]),
        stored_f32("f32", &[4], &extremes),
        stored("bf16", "BF16", &[4], &bits([0x7f7f, 0xff7f, 1, 0x8000])),
        stored("f16", "F16", &[4], &bits([0x7bff, 0xfbff, 1, 0x8000])),
    ];
    let checkpoint = checkpoint_of(&tensors);
    let mut loader = Loader::new(&checkpoint);
    loader.skip_prefix("byte");
    let all = load_all(["f32", "bf16", "f16"].map(|name| loader.dense(name, &[4])));
    loader.finish(all).unwrap();
}

#[test]
fn ids_out_of_range_are_refused() {
    let long = |ids: [i64; 4]| ids.map(i64::to_le_bytes).concat();
    let short = |ids: [i32; 4]| ids.map(i32::to_le_bytes).concat();
    let tensors = [
        stored("above", "I64", &[4], &long([0, 7, 8, 9])),
        stored("below", "I32", &[4], &short([0, 1, 2, -1])),
        // Truncated to 32 bits this would be 1.
        stored("wide", "I64", &[4], &long([0, 0, 0, (1 << 32) + 1])),
    ];
    let errors = report(&tensors, |loader| {
        let above = loader.ids("above", &[4], 8);
        let below = loader.ids("below", &[4], 8);
        let wide = loader.ids("wide", &[4], 8);
        Some((above?, below?, wide?))
    });
    let ids = |count, first, value| InvalidReason::Ids {
        count,
        first,
        value,
        upper_bound: 8,
    };
    assert_eq!(
        errors.invalid,
        [
            invalid("above", ids(2, 2, 8)),
            invalid("below", ids(1, 3, -1)),
            invalid("wide", ids(1, 3, (1 << 32) + 1)),
        ]
    );
}
