//! Hyper-connections.

use burn::tensor::FloatDType;
use burn_ds4_ops::hyper_connection::{Sinkhorn, collapse, expand};

use super::super::common::{
    absolute, assert_close, assert_within, half_unit, narrow, read, values,
};
use super::super::mixing::Case;
use super::draw::Draw;

pub fn hyper_connection(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let (tokens, n, d) = (draw.size(4), draw.size(4), draw.size(12));
    let epsilons = [1e-6, 1e-6, 1e-3, -1.0, f64::NAN];
    let sinkhorn = Sinkhorn {
        iterations: draw.pick(&[20, 1, 2, 0]),
        epsilon: draw.pick(&epsilons),
        norm_epsilon: draw.pick(&epsilons),
    };
    let fits = n * d > 0
        && sinkhorn.iterations > 0
        && sinkhorn.epsilon >= 0.0
        && sinkhorn.norm_epsilon >= 0.0;
    if n * d == 0 {
        return nothing(draw, [tokens, n, d], sinkhorn);
    }
    let mut case = Case::new(tokens, n, d, 1.0);
    let streams = draw.rows(tokens, n * d);
    let (dtype, of_function) = (draw.dtype(), draw.dtype());
    let count = case.base.len();
    let (given, held) = draw.tensor(&streams.values, [tokens, n, d], dtype);
    let (function, held_function) = draw.tensor(&case.function, [count, n * d], of_function);
    let base = draw.tensor(&case.base, [count], FloatDType::F32).0;
    let scale = draw.tensor(&case.scale, [count], FloatDType::F32).0;
    let collapsed = collapse(given.clone(), function, base, scale, sinkhorn);
    let Some((input, coefficients)) = draw.settle(collapsed, fits) else {
        return;
    };
    assert_eq!((input.dims(), input.dtype()), ([tokens, d], dtype.into()));
    let output = draw.rows(tokens, d);
    let of_output = draw.dtype();
    let (spread, held_output) = draw.tensor(&output.values, [tokens, d], of_output);
    let expanded = draw.settle(expand(spread, given, &coefficients), true);
    if let Some(expanded) = &expanded {
        assert_eq!(
            (expanded.dims(), expanded.dtype()),
            ([tokens, n, d], dtype.into())
        );
    }
    let packed = values(coefficients.packed());
    let (input, expanded) = (read(&input), expanded.map(|expanded| read(&expanded)));
    (case.function, case.tokens) = (held_function, 1);
    for token in (0..tokens).filter(|&token| streams.tame[token]) {
        case.streams = held[token * n * d..][..n * d].to_vec();
        let oracle = case.oracle(sinkhorn);
        let actual = &packed[token * count..][..count];
        assert_close(
            actual,
            &narrow(&oracle.packed()),
            absolute(2e-5),
            "coefficients",
        );
        let expected = narrow(&oracle.input);
        let rounding = |size: f32| 1e-3 + half_unit(dtype) * f64::from(size).abs();
        let allowed = |at: usize| rounding(expected[at]);
        assert_within(&input[token * d..][..d], &expected, allowed, "input");
        if let Some(expanded) = expanded.as_ref().filter(|_| output.tame[token]) {
            let output: Vec<f64> = held_output[token * d..][..d]
                .iter()
                .map(|v| (*v).into())
                .collect();
            let expected = narrow(&case.expanded(&output, &oracle));
            let allowed = |at: usize| rounding(expected[at]);
            assert_within(
                &expanded[token * n * d..][..n * d],
                &expected,
                allowed,
                "expanded",
            );
        }
    }
}

/// Streams without channels are refused.
fn nothing(draw: &mut Draw, [tokens, n, d]: [usize; 3], sinkhorn: Sinkhorn) {
    let count = (2 + n) * n;
    let streams = draw.tensor(&[], [tokens, n, d], FloatDType::F32).0;
    let function = draw.tensor(&[], [count, n * d], FloatDType::F32).0;
    let base = draw.tensor(&vec![0.0; count], [count], FloatDType::F32).0;
    let collapsed = collapse(streams, function, base.clone(), base, sinkhorn);
    assert!(draw.settle(collapsed, false).is_none());
}
