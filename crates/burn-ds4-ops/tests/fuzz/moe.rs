//! Experts.

use burn::tensor::{DType, Device, FloatDType};
use burn_ds4_ops::moe::{expert_ffn, swiglu};

use super::super::common::{assert_within, half_unit, narrow, read, values};
use super::super::experts::{Layer, Size};
use super::super::packing::{DENSE, FP4, FP8_PAIR, REPACKED_FP4};
use super::super::sums::smallest;
use super::draw::Draw;

pub(super) const LIMITS: [Option<f64>; 7] = [
    None,
    Some(10.0),
    Some(0.5),
    Some(0.0),
    Some(f64::INFINITY),
    Some(-1.0),
    Some(f64::NAN),
];

pub fn moe(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let limit = draw.pick(&LIMITS);
    let fits = limit.is_none_or(|limit| limit >= 0.0);
    match draw.one_in(3) {
        true => activated(draw, limit, fits),
        false => mixed(draw, limit, fits),
    }
}

pub(super) fn any_size(draw: &mut Draw) -> Size {
    Size {
        tokens: draw.size(5),
        k: draw.size(3),
        experts: draw.size(4),
        d: draw.size(40),
        inner: draw.size(10),
    }
}

fn mixed(draw: &mut Draw, limit: Option<f64>, mut fits: bool) {
    let size = any_size(draw);
    let format = draw.pick(&[FP4, REPACKED_FP4, FP8_PAIR, DENSE[0], DENSE[1], DENSE[2]]);
    let dtype = draw.dtype();
    let mut layer = Layer::random(size, format, dtype, draw.seed() >> 1);
    layer.limit = limit;
    let Size {
        tokens,
        k,
        experts,
        d,
        inner,
    } = size;
    let x = draw.rows(tokens, d);
    let pairs = tokens * k;
    // Some of them are padding, and now and then one is no expert's.
    layer.ids = (0..pairs)
        .map(|_| draw.below(experts + 1) as i64 - 1)
        .collect();
    if pairs > 0 && draw.one_in(8) {
        layer.ids[0] = draw.index(experts);
    }
    fits &= layer.ids.iter().all(|id| *id < experts as i64);
    let device = Device::flex();
    let stacks = layer.stacks(&device);
    let (given, held) = draw.tensor(&x.values, [tokens, d], dtype);
    let ids = draw.integers(&layer.ids, [tokens, k]);
    let weights = draw.tensor(&layer.weights, [tokens, k], FloatDType::F32).0;
    let output = expert_ffn(given, ids, weights, &stacks.gate_up, &stacks.down, limit);
    let Some(output) = draw.settle(output, fits) else {
        return;
    };
    assert_eq!((output.dims(), output.dtype()), ([tokens, d], DType::F32));
    let actual = values(output);
    if [tokens, k, experts, d, inner].contains(&0) {
        assert!(actual.iter().all(|value| *value == 0.0));
        return;
    }
    layer.x = held;
    for token in (0..tokens).filter(|&token| x.tame[token]) {
        let expected = layer.tokens(token..token + 1).expected();
        let (expected, allowed): (Vec<f64>, Vec<f64>) = expected.into_iter().unzip();
        // Factors of the hidden layer that are themselves below the normal range.
        let allowed = |at: usize| allowed[at] + 8.0 * smallest(dtype);
        assert_within(
            &actual[token * d..][..d],
            &narrow(&expected),
            allowed,
            "experts",
        );
    }
}

fn activated(draw: &mut Draw, limit: Option<f64>, fits: bool) {
    let (rows, columns) = (draw.size(4), draw.size(9));
    let (gate, up) = (draw.rows(rows, columns), draw.rows(rows, columns));
    let dtype = draw.dtype();
    let (gates, held_gate) = draw.tensor(&gate.values, [rows, columns], dtype);
    let (ups, held_up) = draw.tensor(&up.values, [rows, columns], dtype);
    let Some(activated) = draw.settle(swiglu(gates, ups, limit), fits) else {
        return;
    };
    assert_eq!(
        (activated.dims(), activated.dtype()),
        ([rows, columns], dtype.into())
    );
    let limit = limit.unwrap_or(f64::INFINITY);
    let actual = read(&activated);
    for row in (0..rows).filter(|&row| gate.tame[row] && up.tame[row]) {
        let slots = row * columns..(row + 1) * columns;
        let pairs = held_gate[slots.clone()].iter().zip(&held_up[slots.clone()]);
        let expected = pairs.map(|(gate, up)| {
            let (gate, up) = (f64::from(*gate).min(limit), f64::from(*up));
            gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit)
        });
        let expected = narrow(&expected.collect::<Vec<_>>());
        let allowed = |at: usize| {
            let size = f64::from(expected[at]).abs();
            // Sigmoid, SiLU and product are rounded one by one.
            1e-6 + (4e-6 + 3.0 * half_unit(dtype)) * size
        };
        assert_within(&actual[slots], &expected, allowed, "swiglu");
    }
}
