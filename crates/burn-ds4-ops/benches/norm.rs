//! Norms and hyper-connections at the sizes of the released models.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::hyper_connection::{Streams, expand};
use burn_ds4_ops::norm::rms_norm;

use super::{
    super::common::{Tolerance, absolute, assert_close, floats, narrow, noise, values, wide},
    super::mixing::{Case as Mixed, SINKHORN},
    harness::{Case, Prepared},
};

const EPSILON: f64 = 1e-6;
const TOKENS: [usize; 4] = [1, 2, 16, 4096];
/// Tokens of a decode step, at most as many as one launch takes.
const STEP_TOKENS: [usize; 9] = [1, 2, 5, 16, 32, 128, 256, 2048, 4096];
/// `d_model` of the released models.
const WIDTHS: [usize; 2] = [4096, 7168];
/// The queries of one token.
const QUERIES: (usize, usize) = (64, 512);
/// Streams of a token.
const STREAMS: usize = 4;
/// Coefficients of a token.
const COEFFICIENTS: usize = (2 + STREAMS) * STREAMS;
/// Most tokens that are checked.
const CHECKED: usize = 8;
/// Bytes of a bf16 and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;
/// Error of one rounding to bf16.
const ROUNDED: Tolerance = Tolerance {
    absolute: 2e-5,
    relative: 1.0 / 256.0,
};

/// Error of the norm of values that were rounded to bf16, rounded again.
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
    let ops = [
        FusedOp::Mix { pending: false },
        FusedOp::Mix { pending: true },
        FusedOp::Head,
    ];
    let fused = ops
        .into_iter()
        .flat_map(|op| STEP_TOKENS.map(|tokens| fused_case(op, tokens, WIDTHS[0])));
    norms
        .chain(collapses)
        .chain(expansions)
        .chain(fused)
        .collect()
}

/// Tokens that are spread evenly, as the oracles are slow.
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
    let inputs = rows * columns * BF16_BYTES + if weighted { columns * F32_BYTES } else { 0 };
    Case {
        op: "rms_norm",
        shape: vec![("N", rows), ("H", columns)],
        variant: if weighted { "weighted" } else { "plain" },
        dtype: DType::BF16,
        bytes: inputs + rows * columns * BF16_BYTES,
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

/// A case with streams in bf16 and, for the tokens that are checked, their values after rounding.
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
    let streams = tokens * STREAMS * width * BF16_BYTES;
    let parameters = COEFFICIENTS * (STREAMS * width + 2) * F32_BYTES;
    Case {
        op: "collapse",
        shape: vec![("N", tokens), ("H", width)],
        variant: "sinkhorn",
        dtype: DType::BF16,
        bytes: streams + parameters + tokens * (width * BF16_BYTES + COEFFICIENTS * F32_BYTES),
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
    let streams = tokens * STREAMS * width * BF16_BYTES;
    let inputs = streams + tokens * (width * BF16_BYTES + COEFFICIENTS * F32_BYTES);
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

/// A fused operator and its variants.
#[derive(Clone, Copy)]
enum FusedOp {
    /// Before a sub-layer. `pending`: the last sub-layer's output is still to be spread over the
    /// streams.
    Mix { pending: bool },
    /// At the end of a model.
    Head,
}

fn fused_case(op: FusedOp, tokens: usize, width: usize) -> Case {
    let pending = !matches!(op, FusedOp::Mix { pending: false });
    let rows = match op {
        FusedOp::Mix { .. } => COEFFICIENTS,
        FusedOp::Head => STREAMS,
    };
    let streams = tokens * STREAMS * width * BF16_BYTES;
    let row = tokens * width * BF16_BYTES;
    let coefficients = tokens * COEFFICIENTS * F32_BYTES;
    let parameters = rows * (STREAMS * width + 2) * F32_BYTES + width * F32_BYTES;
    let pending_bytes = if pending { row + coefficients } else { 0 };
    let inputs = streams + pending_bytes + parameters;
    // The head does not write streams.
    let outputs = match op {
        FusedOp::Mix { pending: true } => streams + 2 * row + coefficients,
        FusedOp::Mix { pending: false } => 2 * row + coefficients,
        FusedOp::Head => row,
    };
    Case {
        op: match op {
            FusedOp::Mix { .. } => "collapse_norm",
            FusedOp::Head => "head_norm",
        },
        shape: vec![("N", tokens), ("H", width)],
        variant: if pending { "pending" } else { "ready" },
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
            let ready = match pending {
                true => expand(output.clone(), streams.clone(), &coefficients),
                false => Ok(streams.clone()),
            };
            // The operator mixes rounded streams.
            let ready = ready.expect("parts that fit");
            let mut after = Mixed::new(1, STREAMS, width, 1.0);
            after.streams = picked(&read(ready), tokens);
            after.tokens = CHECKED.min(tokens);
            let collapsed = match op {
                FusedOp::Mix { .. } => after.oracle(SINKHORN).input,
                FusedOp::Head => after.headed(EPSILON, EPSILON),
            };
            let expected = narrow(&after.normed(&collapsed));
            Prepared::new(
                move || {
                    let streams = match pending {
                        true => Streams::Pending {
                            output: output.clone(),
                            streams: streams.clone(),
                            coefficients: coefficients.clone(),
                        },
                        false => streams.clone().into(),
                    };
                    match op {
                        FusedOp::Mix { .. } => parameters.collapse_norm(streams, SINKHORN).normed,
                        FusedOp::Head => parameters.head_norm(streams, EPSILON, EPSILON),
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
