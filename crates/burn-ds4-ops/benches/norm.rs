//! Norms and hyper-connections at the sizes of the released models.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::hyper_connection::{Streams, expand};
use burn_ds4_ops::norm::rms_norm;

use crate::{
    harness::{Case, Prepared},
    tests::common::{Tolerance, absolute, assert_close, floats, narrow, noise, values, wide},
    tests::mixing::{Case as Mixed, SINKHORN},
};

const EPSILON: f64 = 1e-6;
const TOKENS: [usize; 4] = [1, 2, 16, 4096];
/// Tokens of a step, at most those that one launch takes.
const FEW: [usize; 4] = [1, 2, 5, 16];
/// `d_model` of the released models.
const WIDTHS: [usize; 2] = [4096, 7168];
/// The queries of one token.
const QUERIES: (usize, usize) = (64, 512);
/// Streams of a token.
const STREAMS: usize = 4;
/// Coefficients of a token.
const COEFFICIENTS: usize = (2 + STREAMS) * STREAMS;
/// Tokens that are checked at most.
const CHECKED: usize = 8;
/// Bytes of a bf16 and of an f32.
const HALF: usize = 2;
const WORD: usize = 4;
/// One rounding to bf16.
const ROUNDED: Tolerance = Tolerance {
    absolute: 2e-5,
    relative: 1.0 / 256.0,
};

/// The norm of what has been rounded to bf16, rounded again.
const TWICE_ROUNDED: Tolerance = Tolerance {
    absolute: 1e-2,
    relative: 2.0 / 256.0,
};

pub fn cases() -> Vec<Case> {
    let sizes = || WIDTHS.map(|width| TOKENS.map(|tokens| (tokens, width)));
    let sizes = || sizes().into_iter().flatten();
    let norms = sizes().chain([QUERIES]).map(norm_case);
    let collapses = sizes().map(collapse_case);
    let expansions = sizes().map(expand_case);
    let ways = [
        Way::Mix { spread: false },
        Way::Mix { spread: true },
        Way::Head,
    ];
    let fused = ways
        .into_iter()
        .flat_map(|way| FEW.map(|tokens| fused_case(way, tokens, WIDTHS[0])));
    norms
        .chain(collapses)
        .chain(expansions)
        .chain(fused)
        .collect()
}

/// Tokens spread over all: the oracles are slow.
fn checked(tokens: usize) -> Vec<usize> {
    let count = CHECKED.min(tokens);
    (0..count).map(|i| i * tokens / count).collect()
}

fn picked(all: &[f32], tokens: usize) -> Vec<f32> {
    let width = all.len() / tokens;
    let rows = checked(tokens).into_iter();
    rows.flat_map(|row| all[row * width..(row + 1) * width].to_vec())
        .collect()
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    values(tensor.cast(FloatDType::F32))
}

fn norm_case((rows, columns): (usize, usize)) -> Case {
    // Queries have no weight.
    let weighted = (rows, columns) != QUERIES;
    let inputs = rows * columns * HALF + if weighted { columns * WORD } else { 0 };
    Case {
        op: "rms_norm",
        shape: vec![("N", rows), ("H", columns)],
        variant: if weighted { "weighted" } else { "plain" },
        dtype: DType::BF16,
        bytes: inputs + rows * columns * HALF,
        flops: None,
        input_bytes: inputs,
        build: Box::new(move |device, seed| {
            let x = floats(&noise(rows * columns, seed), [rows, columns], device);
            let x = x.cast(FloatDType::BF16);
            let weights = noise(columns, !seed);
            let weight = weighted.then(|| floats(&weights, [columns], device));
            let held = x.clone();
            Prepared::new(
                move || rms_norm(x.clone(), weight.clone(), EPSILON).expect("floats that fit"),
                move |normalized| {
                    let held = wide(&picked(&read(held.clone()), rows));
                    let expected = held.chunks(columns).flat_map(|row| {
                        let mean = row.iter().map(|v| v * v).sum::<f64>() / columns as f64;
                        let rms = (mean + EPSILON).sqrt();
                        let weight = |column: usize| match weighted {
                            true => f64::from(weights[column]),
                            false => 1.0,
                        };
                        let scaled = row.iter().enumerate();
                        scaled.map(move |(column, v)| v / rms * weight(column))
                    });
                    let expected = narrow(&expected.collect::<Vec<_>>());
                    let actual = picked(&read(normalized), rows);
                    assert_close(&actual, &expected, ROUNDED, "rms_norm");
                },
            )
        }),
    }
}

/// A case with streams in bf16, and what they are after rounding for the tokens that are checked.
fn mixed(tokens: usize, width: usize, seed: u32, device: &Device) -> (Mixed, Tensor<3>) {
    let mut case = Mixed::new(1, STREAMS, width, 1.0);
    let shape = [tokens, STREAMS, width];
    let streams = floats(&noise(tokens * STREAMS * width, seed), shape, device);
    let streams = streams.cast(FloatDType::BF16);
    case.streams = picked(&read(streams.clone()), tokens);
    case.tokens = CHECKED.min(tokens);
    (case, streams)
}

fn collapse_case((tokens, width): (usize, usize)) -> Case {
    let streams = tokens * STREAMS * width * HALF;
    let parameters = COEFFICIENTS * (STREAMS * width + 2) * WORD;
    Case {
        op: "collapse",
        shape: vec![("N", tokens), ("H", width)],
        variant: "sinkhorn",
        dtype: DType::BF16,
        bytes: streams + parameters + tokens * (width * HALF + COEFFICIENTS * WORD),
        flops: Some(2 * (tokens * COEFFICIENTS * STREAMS * width) as u64),
        input_bytes: streams + parameters,
        build: Box::new(move |device, seed| {
            let (case, streams) = mixed(tokens, width, seed, device);
            let parameters = case.parameters(device);
            let expected = case.oracle(SINKHORN);
            Prepared::new(
                move || {
                    let (input, coefficients) = parameters.collapse(streams.clone(), SINKHORN);
                    (input, coefficients.packed())
                },
                move |(input, coefficients)| {
                    let input = picked(&read(input), tokens);
                    assert_close(&input, &narrow(&expected.input), ROUNDED, "input");
                    let coefficients = picked(&values(coefficients), tokens);
                    let packed = narrow(&expected.packed());
                    assert_close(&coefficients, &packed, absolute(2e-5), "coefficients");
                },
            )
        }),
    }
}

fn expand_case((tokens, width): (usize, usize)) -> Case {
    let streams = tokens * STREAMS * width * HALF;
    let inputs = streams + tokens * (width * HALF + COEFFICIENTS * WORD);
    Case {
        op: "expand",
        shape: vec![("N", tokens), ("H", width)],
        variant: "streams",
        dtype: DType::BF16,
        bytes: inputs + streams,
        flops: None,
        input_bytes: inputs,
        build: Box::new(move |device, seed| {
            let (case, streams) = mixed(tokens, width, seed, device);
            let (_, coefficients) = case.parameters(device).collapse(streams.clone(), SINKHORN);
            let output = floats(&noise(tokens * width, !seed), [tokens, width], device);
            let output = output.cast(FloatDType::BF16);
            let held = wide(&picked(&read(output.clone()), tokens));
            let expected = narrow(&case.expanded(&held, &case.oracle(SINKHORN)));
            Prepared::new(
                move || {
                    expand(output.clone(), streams.clone(), &coefficients).expect("parts that fit")
                },
                move |expanded| {
                    let expanded = picked(&read(expanded), tokens);
                    assert_close(&expanded, &expected, ROUNDED, "expand");
                },
            )
        }),
    }
}

/// How an operator that joins several is called.
#[derive(Clone, Copy)]
enum Way {
    /// Before a sub-layer, with or without the last one's output to be spread.
    Mix { spread: bool },
    /// At the end of a model.
    Head,
}

fn fused_case(way: Way, tokens: usize, width: usize) -> Case {
    let spread = !matches!(way, Way::Mix { spread: false });
    let rows = match way {
        Way::Mix { .. } => COEFFICIENTS,
        Way::Head => STREAMS,
    };
    let streams = tokens * STREAMS * width * HALF;
    let row = tokens * width * HALF;
    let coefficients = tokens * COEFFICIENTS * WORD;
    let parameters = rows * (STREAMS * width + 2) * WORD + width * WORD;
    let pending = if spread { row + coefficients } else { 0 };
    let inputs = streams + pending + parameters;
    // The head's streams are nobody's.
    let outputs = match way {
        Way::Mix { spread: true } => streams + 2 * row + coefficients,
        Way::Mix { spread: false } => 2 * row + coefficients,
        Way::Head => row,
    };
    Case {
        op: match way {
            Way::Mix { .. } => "collapse_norm",
            Way::Head => "head_norm",
        },
        shape: vec![("N", tokens), ("H", width)],
        variant: if spread { "pending" } else { "ready" },
        dtype: DType::BF16,
        bytes: inputs + outputs,
        flops: Some(2 * (tokens * rows * STREAMS * width) as u64),
        input_bytes: inputs,
        build: Box::new(move |device, seed| {
            let (case, streams) = mixed(tokens, width, seed, device);
            let parameters = case.parameters(device);
            let (_, coefficients) = parameters.collapse(streams.clone(), SINKHORN);
            let output = floats(&noise(tokens * width, !seed), [tokens, width], device);
            let output = output.cast(FloatDType::BF16);
            let ready = match spread {
                true => expand(output.clone(), streams.clone(), &coefficients),
                false => Ok(streams.clone()),
            };
            // What is mixed is what has been rounded.
            let ready = ready.expect("parts that fit");
            let mut after = Mixed::new(1, STREAMS, width, 1.0);
            after.streams = picked(&read(ready), tokens);
            after.tokens = CHECKED.min(tokens);
            let collapsed = match way {
                Way::Mix { .. } => after.oracle(SINKHORN).input,
                Way::Head => after.headed(EPSILON, EPSILON),
            };
            let expected = narrow(&after.normed(&collapsed));
            Prepared::new(
                move || {
                    let streams = match spread {
                        true => Streams::Pending {
                            output: output.clone(),
                            streams: streams.clone(),
                            coefficients: coefficients.clone(),
                        },
                        false => streams.clone().into(),
                    };
                    match way {
                        Way::Mix { .. } => parameters.collapse_norm(streams, SINKHORN).normed,
                        Way::Head => parameters.head_norm(streams, EPSILON, EPSILON),
                    }
                },
                move |normed| {
                    let normed = picked(&read(normed), tokens);
                    assert_close(&normed, &expected, TWICE_ROUNDED, "norm");
                },
            )
        }),
    }
}
