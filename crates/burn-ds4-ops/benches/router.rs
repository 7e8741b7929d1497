//! Routing at the sizes of the released models.

use burn::tensor::DType;
use burn_ds4_ops::router::{activation_topk, hash_route};

use crate::{
    harness::{Case, Prepared},
    tests::common::{
        Tolerance, assert_close, floats, integer_values, integers, narrow, noise, values, wide,
    },
};

/// Experts per token.
const K: usize = 6;
const SCALE: f64 = 2.5;
const VOCABULARY: usize = 129_280;
const TOKENS: [usize; 7] = [1, 2, 8, 64, 512, 4096, 16384];
const EXPERTS: [usize; 2] = [256, 384];
/// Bytes of an f32 or an i32.
const WORD: usize = 4;

/// What f32 makes of a score, some units in the last place: closer ones may be taken in either order.
const SCORES: Tolerance = Tolerance {
    absolute: 2e-6,
    relative: 1e-6,
};
const WEIGHTS: Tolerance = Tolerance {
    absolute: 0.0,
    relative: 1e-5,
};

pub fn cases() -> Vec<Case> {
    let sizes = || EXPERTS.map(|experts| TOKENS.map(|tokens| (tokens, experts)));
    let sizes = || sizes().into_iter().flatten();
    let topk = sizes().map(|(tokens, experts)| topk_case(tokens, experts));
    let hash = sizes().map(|(tokens, experts)| hash_case(tokens, experts));
    topk.chain(hash).collect()
}

fn topk_case(tokens: usize, experts: usize) -> Case {
    let inputs = (tokens + 1) * experts * WORD;
    Case {
        op: "activation_topk",
        shape: vec![("N", tokens), ("E", experts)],
        variant: "topk",
        dtype: DType::F32,
        bytes: inputs + 2 * tokens * K * WORD,
        flops: None,
        input_bytes: inputs,
        build: Box::new(move |device, seed| {
            let (logits, bias) = (logits(tokens * experts, seed), noise(experts, !seed));
            let on_device = floats(&logits, [tokens, experts], device);
            let bias_on_device = floats(&bias, [experts], device);
            Prepared::new(
                move || {
                    let bias = Some(bias_on_device.clone());
                    activation_topk(on_device.clone(), bias, K, SCALE)
                },
                move |(weights, ids)| {
                    let ids = integer_values(ids);
                    assert_best(&wide(&logits), &wide(&bias), &ids, SCORES);
                    assert_weights(&wide(&logits), experts, &ids, &values(weights));
                },
            )
        }),
    }
}

fn hash_case(tokens: usize, experts: usize) -> Case {
    let gathered = tokens * K * WORD;
    Case {
        op: "hash_route",
        shape: vec![("N", tokens), ("E", experts)],
        variant: "hash",
        dtype: DType::F32,
        // Token ids, their rows of the table, the logits these name; weights and ids.
        bytes: tokens * WORD + 4 * gathered,
        flops: None,
        input_bytes: (tokens * (experts + 1) + VOCABULARY * K) * WORD,
        build: Box::new(move |device, seed| {
            let logits = logits(tokens * experts, seed);
            let token_ids = indices(tokens, VOCABULARY, seed ^ 1);
            let table = indices(VOCABULARY * K, experts, seed ^ 2);
            let on_device = (
                integers(&token_ids, [tokens], device),
                integers(&table, [VOCABULARY, K], device),
                floats(&logits, [tokens, experts], device),
            );
            let rows = token_ids.iter().map(|&token| token as usize * K);
            let expected: Vec<i64> = rows.flat_map(|row| table[row..row + K].to_vec()).collect();
            Prepared::new(
                move || {
                    let (token_ids, table, logits) = on_device.clone();
                    hash_route(token_ids, table, logits, SCALE)
                },
                move |(weights, ids)| {
                    let ids = integer_values(ids);
                    assert!(ids == expected, "hash_route: other ids than the table's");
                    assert_weights(&wide(&logits), experts, &ids, &values(weights));
                },
            )
        }),
    }
}

fn logits(count: usize, seed: u32) -> Vec<f32> {
    noise(count, seed).into_iter().map(|v| v * 8.0).collect()
}

/// Values in `0..below` without a pattern.
fn indices(count: usize, below: usize, seed: u32) -> Vec<i64> {
    let uniform = noise(count, seed).into_iter();
    uniform
        .map(|v| ((f64::from(v) + 1.0) / 2.0 * below as f64) as i64)
        .collect()
}

fn sqrt_softplus(x: f64) -> f64 {
    (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()
}

/// That each rank has an expert of its own whose score is that rank's. `tolerance` is what rounding does to scores: by the
/// oracle's own scores, whoever is closer than that to another may stand in its place.
fn assert_best(logits: &[f64], bias: &[f64], ids: &[i64], tolerance: Tolerance) {
    let (mut expected, mut actual) = (Vec::new(), Vec::new());
    for (logits, ids) in logits.chunks(bias.len()).zip(ids.chunks(K)) {
        let scores = logits.iter().zip(bias).map(|(&x, b)| sqrt_softplus(x) + b);
        let scores: Vec<f64> = scores.collect();
        actual.extend(ids.iter().enumerate().map(|(rank, id)| {
            let score = usize::try_from(*id).ok().and_then(|id| scores.get(id));
            let taken = ids[..rank].contains(id);
            score.filter(|_| !taken).copied().unwrap_or(f64::NAN)
        }));
        let mut sorted = scores;
        sorted.select_nth_unstable_by(K - 1, |a, b| b.total_cmp(a));
        sorted[..K].sort_by(|a, b| b.total_cmp(a));
        expected.extend_from_slice(&sorted[..K]);
    }
    let what = "scores of the chosen experts (NaN: out of range or chosen twice)";
    assert_close(&narrow(&actual), &narrow(&expected), tolerance, what);
}

/// That the weights are those of the experts that were chosen.
fn assert_weights(logits: &[f64], experts: usize, ids: &[i64], weights: &[f32]) {
    let mut expected = Vec::new();
    for (logits, ids) in logits.chunks(experts).zip(ids.chunks(K)) {
        let chosen = ids.iter().map(|&id| sqrt_softplus(logits[id as usize]));
        let sum: f64 = chosen.clone().sum();
        expected.extend(chosen.map(|score| score / sum * SCALE));
    }
    assert_close(weights, &narrow(&expected), WEIGHTS, "weights");
}
