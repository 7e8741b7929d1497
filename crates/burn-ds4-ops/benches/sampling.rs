//! Choice of tokens and verification of drafts at the vocabulary of the released models.

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::sampling::{Draws, Sampling, sample, verify};

use crate::{
    harness::{Case, Prepared},
    tests::common::{integer_values, values},
    tests::tokens::{Oracle, draws, uniform},
};

const COLUMNS: usize = 129_280;
const ROWS: [usize; 3] = [1, 16, 64];
/// Sequences and drafts of each.
const DRAFTS: [(usize, usize); 4] = [(1, 1), (1, 4), (16, 1), (64, 1)];
const DTYPES: [FloatDType; 2] = [FloatDType::F32, FloatDType::BF16];
const VARIANTS: [(&str, Sampling); 5] = [
    ("greedy", of(0.0, 0, 1.0, 0.0)),
    ("plain", of(1.0, 0, 1.0, 0.0)),
    ("top_k", of(1.0, 50, 1.0, 0.0)),
    ("top_p", of(1.0, 0, 0.95, 0.0)),
    ("all", of(0.7, 50, 0.95, 0.05)),
];
/// Rows that are checked at most.
const CHECKED: usize = 4;
/// Share of all by which rounding may move what a token has.
const TOLERANCE: f64 = 1e-5;
/// Bytes of an i32.
const WORD: usize = 4;

const fn of(temperature: f32, top_k: usize, top_p: f32, min_p: f32) -> Sampling {
    Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for (variant, sampling) in VARIANTS {
            cases.extend(ROWS.map(|rows| sample_case(rows, variant, sampling, dtype)));
            cases.extend(DRAFTS.map(|size| verify_case(size, variant, sampling, dtype)));
        }
    }
    cases
}

fn sample_case(rows: usize, variant: &'static str, sampling: Sampling, dtype: FloatDType) -> Case {
    let dtype = DType::from(dtype);
    let logits = rows * COLUMNS * dtype.size();
    Case {
        op: "sample",
        shape: vec![("R", rows), ("V", COLUMNS)],
        variant,
        dtype,
        bytes: logits + 4 * rows * WORD,
        flops: None,
        input_bytes: logits,
        build: Box::new(move |device, seed| {
            let (logits, draws) = inputs(rows, rows, dtype, device, seed);
            let checked = logits.clone();
            Prepared::new(
                move || {
                    sample(logits.clone(), &sampling, draws.clone()).expect("arguments that fit")
                },
                move |tokens: Tensor<1, Int>| {
                    let tokens = integer_values(tokens);
                    for row in (0..CHECKED.min(rows)).map(|i| i * rows / CHECKED.min(rows)) {
                        check(&checked, row, tokens[row], &sampling, seed, row as u32);
                    }
                },
            )
        }),
    }
}

fn verify_case(
    (sequences, drafts): (usize, usize),
    variant: &'static str,
    sampling: Sampling,
    dtype: FloatDType,
) -> Case {
    let dtype = DType::from(dtype);
    let rows = sequences * (drafts + 1);
    let logits = rows * COLUMNS * dtype.size();
    Case {
        op: "verify",
        shape: vec![("S", sequences), ("k", drafts), ("V", COLUMNS)],
        variant,
        dtype,
        bytes: logits + (4 * sequences + sequences * drafts + rows) * WORD,
        flops: None,
        input_bytes: logits,
        build: Box::new(move |device, seed| {
            let (logits, draws) = inputs(rows, sequences, dtype, device, seed);
            let checked = logits.clone();
            let rows = logits.reshape([sequences, drafts + 1, COLUMNS]);
            // No draft stands, except by chance.
            let guesses: Tensor<2, Int> = Tensor::zeros([sequences, drafts], device);
            Prepared::new(
                move || {
                    let (rows, guesses) = (rows.clone(), guesses.clone());
                    let verdict = verify(rows, guesses, &sampling, draws.clone());
                    let verdict = verdict.expect("arguments that fit");
                    (verdict.tokens, verdict.accepted)
                },
                move |(tokens, accepted): (Tensor<2, Int>, Tensor<1, Int>)| {
                    let (tokens, accepted) = (integer_values(tokens), integer_values(accepted));
                    for (sequence, &accepted) in accepted.iter().enumerate().take(CHECKED) {
                        let first = sequence * (drafts + 1);
                        let tokens = &tokens[first..first + drafts + 1];
                        let stand = tokens.iter().take(drafts).take_while(|&&id| id == 0);
                        assert_eq!(accepted, stand.count() as i64);
                        check(&checked, first, tokens[0], &sampling, seed, sequence as u32);
                    }
                },
            )
        }),
    }
}

/// Logits of a peaked distribution, and draws of the sequences.
fn inputs(
    rows: usize,
    sequences: usize,
    dtype: DType,
    device: &Device,
    seed: u32,
) -> (Tensor<2>, Draws) {
    device.seed(u64::from(seed));
    let normal = Distribution::Normal(0.0, 3.0);
    let logits = Tensor::<2>::random([rows, COLUMNS], normal, (device, DType::F32));
    let draws = draws(u64::from(seed), 0, sequences, device);
    (logits.cast(dtype), draws)
}

fn check(
    logits: &Tensor<2>,
    row: usize,
    token: i64,
    sampling: &Sampling,
    seed: u32,
    position: u32,
) {
    let logits = logits.clone().slice([row..row + 1, 0..COLUMNS]);
    let logits = values(logits.cast(FloatDType::F32));
    if sampling.temperature == 0.0 {
        let highest = logits.iter().copied().fold(f32::MIN, f32::max);
        let first = logits.iter().position(|&x| x == highest);
        assert_eq!(Some(token), first.map(|id| id as i64), "row {row}");
        return;
    }
    let oracle = Oracle::of(&logits, sampling);
    let u = uniform(u64::from(seed), position);
    assert!(
        oracle.margin < TOLERANCE || oracle.allows(token, u, TOLERANCE),
        "row {row}: {token} at {u}"
    );
}
