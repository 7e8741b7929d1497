//! Sampling, verification of drafts, penalties and log-probabilities at the vocabulary of the
//! released models.

use std::cell::RefCell;

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::sampling::{
    BatchParams, LaneParams, Penalties, SamplingParams, TokenCounts, apply_penalties, log_probs,
    sample, verify,
};

use super::{
    super::common::{EXACT, absolute, assert_close, integer_values, values},
    super::tokens::{self, Oracle, draws, positions, uniform},
    harness::{Case, Prepared},
};

const COLUMNS: usize = 129_280;
const ROWS: [usize; 3] = [1, 16, 64];
/// Lanes, and drafts of each.
const DRAFTS: [(usize, usize); 4] = [(1, 1), (1, 4), (16, 1), (64, 1)];
const DTYPES: [FloatDType; 2] = [FloatDType::F32, FloatDType::BF16];
const VARIANTS: [(&str, SamplingParams); 5] = [
    ("greedy", of(0.0, 0, 1.0, 0.0)),
    ("plain", of(1.0, 0, 1.0, 0.0)),
    ("top_k", of(1.0, 50, 1.0, 0.0)),
    ("top_p", of(1.0, 0, 0.95, 0.0)),
    ("all", of(0.7, 50, 0.95, 0.05)),
];
/// Most rows that are checked: one of each variant where lanes take turns.
const CHECKED: usize = VARIANTS.len();
/// Fraction of the total weight by which rounding may move a token's bounds.
const TOLERANCE: f64 = 1e-5;
/// Bytes of an i32.
const WORD: usize = 4;
/// Words that are read of a lane: five of its filter, two of its seed, and its position.
const LANE_WORDS: usize = 8;
/// Tokens of a text, in the prompt and in the output.
const TEXT: u32 = 2000;
/// The most likely tokens that are listed.
const TOP: usize = 20;

const fn of(temperature: f32, top_k: usize, top_p: f32, min_p: f32) -> SamplingParams {
    SamplingParams {
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
            cases.extend(ROWS.map(|rows| sample_case(rows, variant, vec![sampling], dtype)));
            cases.extend(DRAFTS.map(|size| verify_case(size, variant, sampling, dtype)));
        }
    }
    // The slowest first, for one row.
    let mixed: Vec<SamplingParams> = VARIANTS.iter().rev().map(|variant| variant.1).collect();
    for rows in ROWS {
        cases.push(sample_case(rows, "mixed", mixed.clone(), FloatDType::F32));
        cases.push(penalties_case(rows, "neutral", Penalties::default()));
        let penalties = Penalties {
            repetition: 1.1,
            presence: 0.5,
            frequency: 0.1,
        };
        cases.push(penalties_case(rows, "penalised", penalties));
        cases.push(log_probs_case(rows));
    }
    cases
}

fn batch(lanes: usize, device: &Device, params: impl Fn(usize) -> LaneParams) -> BatchParams {
    let params: Vec<LaneParams> = (0..lanes).map(params).collect();
    tokens::batch(&params, COLUMNS, device)
}

/// Each call penalises what the call before has left, in place.
fn penalties_case(rows: usize, variant: &'static str, penalties: Penalties) -> Case {
    let logits = rows * COLUMNS * DType::F32.size();
    let neutral = penalties == Penalties::default();
    Case {
        op: "apply_penalties",
        shape: vec![("R", rows), ("V", COLUMNS)],
        variant,
        dtype: DType::F32,
        bytes: if neutral { rows * WORD } else { logits },
        flops: None,
        input_bytes: 2 * logits,
        build: Box::new(move |device, seed| {
            let logits = inputs(rows, DType::F32, device, seed);
            let logits = logits.reshape([rows, 1, COLUMNS]);
            let params = batch(rows, device, |_| LaneParams {
                penalties,
                ..LaneParams::default()
            });
            let mut counts = TokenCounts::new(rows, COLUMNS, device);
            let text: Vec<u32> = (0..TEXT).map(|i| i * 61 % COLUMNS as u32).collect();
            for row in 0..rows {
                counts.reset_lane(row, &text, &text).expect("a lane");
            }
            let drafts: Tensor<2, Int> = Tensor::zeros([rows, 0], device);
            let penalise = move |logits| {
                let penalised = apply_penalties(logits, drafts.clone(), &params, &counts);
                penalised.expect("arguments that fit")
            };
            let once = penalise.clone();
            // Computed, so that nobody else holds it.
            let state = RefCell::new(Some(logits.clone().mul_scalar(1.0)));
            Prepared::new(
                move || {
                    let held = state.take().expect("what the last call left");
                    state.replace(Some(penalise(held)));
                },
                // Whatever the calls have left, one more has this result.
                move |()| {
                    let mut expected = values(logits.clone());
                    for row in expected.chunks_mut(COLUMNS) {
                        for &token in &text {
                            let x = &mut row[token as usize];
                            let Penalties {
                                repetition,
                                presence,
                                frequency,
                            } = penalties;
                            *x = if *x > 0.0 {
                                *x / repetition
                            } else {
                                *x * repetition
                            };
                            *x = *x - frequency - presence;
                        }
                    }
                    assert_close(&values(once(logits.clone())), &expected, EXACT, variant);
                },
            )
        }),
    }
}

fn log_probs_case(rows: usize) -> Case {
    let logits = rows * COLUMNS * DType::F32.size();
    Case {
        op: "log_probs",
        shape: vec![("R", rows), ("V", COLUMNS), ("n", TOP)],
        variant: "top",
        dtype: DType::F32,
        bytes: logits + rows * (2 + 2 * TOP) * WORD,
        flops: None,
        input_bytes: logits,
        build: Box::new(move |device, seed| {
            let logits = inputs(rows, DType::F32, device, seed);
            let checked = logits.clone();
            let tokens: Tensor<1, Int> = Tensor::ones([rows], (device, DType::I32));
            Prepared::new(
                move || {
                    let probs = log_probs(logits.clone(), tokens.clone(), TOP);
                    let probs = probs.expect("arguments that fit");
                    (probs.chosen, (probs.top_ids, probs.top))
                },
                move |(chosen, (ids, top)): (Tensor<1>, (Tensor<2, Int>, Tensor<2>))| {
                    let row = values(checked.clone().slice([0..1, 0..COLUMNS]));
                    let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                    let prob = |id: usize| (f64::from(row[id]) - total.ln()) as f32;
                    let mut ranked: Vec<usize> = (0..COLUMNS).collect();
                    ranked.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
                    let ids = &integer_values(ids)[..TOP];
                    let expected: Vec<i64> = ranked[..TOP].iter().map(|&id| id as i64).collect();
                    assert_eq!(ids, expected);
                    let close = absolute(2e-5);
                    assert_close(&values(chosen)[..1], &[prob(1)], close, "chosen");
                    let expected: Vec<f32> = ranked[..TOP].iter().map(|&id| prob(id)).collect();
                    assert_close(&values(top)[..TOP], &expected, close, "top");
                },
            )
        }),
    }
}

/// Lanes that take the parameters in turn.
fn sample_case(
    rows: usize,
    variant: &'static str,
    samplings: Vec<SamplingParams>,
    dtype: FloatDType,
) -> Case {
    let dtype = DType::from(dtype);
    let logits = rows * COLUMNS * dtype.size();
    Case {
        op: "sample",
        shape: vec![("R", rows), ("V", COLUMNS)],
        variant,
        dtype,
        bytes: logits + (LANE_WORDS + 1) * rows * WORD,
        flops: None,
        input_bytes: logits,
        build: Box::new(move |device, seed| {
            let logits = inputs(rows, dtype, device, seed);
            let checked = logits.clone();
            let samplings = samplings.clone();
            let params = batch(rows, device, |row| LaneParams {
                sampling: samplings[row % samplings.len()],
                seed: u64::from(seed),
                ..LaneParams::default()
            });
            let positions = positions(&draws(u64::from(seed), 0, rows), device);
            Prepared::new(
                move || {
                    let (logits, positions) = (logits.clone(), positions.clone());
                    sample(logits, &params, positions).expect("arguments that fit")
                },
                move |tokens: Tensor<1, Int>| {
                    let tokens = integer_values(tokens);
                    let count = CHECKED.min(rows);
                    for row in (0..count).map(|i| i * (rows / count)) {
                        let sampling = &samplings[row % samplings.len()];
                        check(&checked, row, tokens[row], sampling, seed, row as u32);
                    }
                },
            )
        }),
    }
}

fn verify_case(
    (lanes, drafts): (usize, usize),
    variant: &'static str,
    sampling: SamplingParams,
    dtype: FloatDType,
) -> Case {
    let dtype = DType::from(dtype);
    let rows = lanes * (drafts + 1);
    let logits = rows * COLUMNS * dtype.size();
    Case {
        op: "verify",
        shape: vec![("S", lanes), ("k", drafts), ("V", COLUMNS)],
        variant,
        dtype,
        bytes: logits + ((LANE_WORDS + 1) * lanes + lanes * drafts + rows) * WORD,
        flops: None,
        input_bytes: logits,
        build: Box::new(move |device, seed| {
            let logits = inputs(rows, dtype, device, seed);
            let checked = logits.clone();
            let rows = logits.reshape([lanes, drafts + 1, COLUMNS]);
            let places = draws(u64::from(seed), 0, lanes);
            let params = tokens::alike(&sampling, &places, COLUMNS, device);
            let positions = positions(&places, device);
            // No draft is accepted, except by chance.
            let guesses: Tensor<2, Int> = Tensor::zeros([lanes, drafts], device);
            Prepared::new(
                move || {
                    let (rows, guesses) = (rows.clone(), guesses.clone());
                    let verified = verify(rows, guesses, &params, positions.clone());
                    let verified = verified.expect("arguments that fit");
                    (verified.tokens, verified.accepted)
                },
                move |(tokens, accepted): (Tensor<2, Int>, Tensor<1, Int>)| {
                    let (tokens, accepted) = (integer_values(tokens), integer_values(accepted));
                    for (lane, &accepted) in accepted.iter().enumerate().take(CHECKED) {
                        let first = lane * (drafts + 1);
                        let tokens = &tokens[first..first + drafts + 1];
                        let matched = tokens.iter().take(drafts).take_while(|&&id| id == 0);
                        assert_eq!(accepted, matched.count() as i64);
                        check(&checked, first, tokens[0], &sampling, seed, lane as u32);
                    }
                },
            )
        }),
    }
}

/// Logits of a peaked distribution.
fn inputs(rows: usize, dtype: DType, device: &Device, seed: u32) -> Tensor<2> {
    device.seed(u64::from(seed));
    let normal = Distribution::Normal(0.0, 3.0);
    let logits = Tensor::<2>::random([rows, COLUMNS], normal, (device, DType::F32));
    logits.cast(dtype)
}

fn check(
    logits: &Tensor<2>,
    row: usize,
    token: i64,
    sampling: &SamplingParams,
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
