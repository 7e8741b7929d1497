//! Routing at the sizes of the released models.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_ds4_ops::router::{HashWeights, activation_topk, dense_router, hash_route};

use super::{
    super::common::{floats, integer_values, integers, noise, values, wide},
    super::routing::{FROM_LOGITS, FROM_PRODUCTS, assert_routed, assert_weights, products},
    harness::{Case, Prepared},
};

/// Experts per token.
const K: usize = 6;
const SCALE: f64 = 2.5;
const VOCABULARY: usize = 129_280;
const TOKENS: [usize; 7] = [1, 2, 8, 64, 512, 4096, 16384];
const EXPERTS: [usize; 2] = [256, 384];
/// Experts and `d_model` of the released models.
const DENSE: [(usize, usize); 2] = [(256, 4096), (384, 7168)];
const DENSE_TOKENS: [usize; 8] = [1, 2, 8, 16, 64, 512, 4096, 16384];
/// Dtypes of the gate.
const GATES: [(&str, FloatDType); 2] = [
    ("fused", FloatDType::BF16),
    ("fused_f32_gate", FloatDType::F32),
];
/// Most rows that are checked.
const CHECKED: usize = 32;
/// Bytes of an f32 or an i32.
const WORD: usize = 4;

pub fn cases() -> Vec<Case> {
    let sizes = || EXPERTS.map(|experts| TOKENS.map(|tokens| (tokens, experts)));
    let sizes = || sizes().into_iter().flatten();
    let topk = sizes().map(|(tokens, experts)| topk_case(tokens, experts));
    let hash = sizes().map(|(tokens, experts)| hash_case(tokens, experts));
    let dense = DENSE.into_iter().flat_map(|(experts, width)| {
        let tokens = DENSE_TOKENS.into_iter();
        tokens.flat_map(move |tokens| {
            GATES.map(|(variant, gate)| dense_case((tokens, experts, width), variant, gate))
        })
    });
    topk.chain(hash).chain(dense).collect()
}

fn dense_case(
    (tokens, experts, width): (usize, usize, usize),
    variant: &'static str,
    gate_dtype: FloatDType,
) -> Case {
    let inputs = (tokens + experts) * width * 2 + experts * WORD;
    let inputs = inputs + (DType::from(gate_dtype).size() - 2) * experts * width;
    Case {
        op: "dense_router",
        shape: vec![("N", tokens), ("E", experts), ("H", width)],
        variant,
        dtype: DType::BF16,
        bytes: inputs + 2 * tokens * K * WORD,
        flops: Some(2 * (tokens * experts * width) as u64),
        input_bytes: inputs,
        build: Box::new(move |device, seed| {
            let spread = (6.0 / width as f32).sqrt() * 4.0;
            let gate = noise(experts * width, !seed)
                .into_iter()
                .map(|v| v * spread);
            let (x, gate): (_, Vec<f32>) = (noise(tokens * width, seed), gate.collect());
            let bias = noise(experts, seed ^ 3);
            let x_on_device = floats(&x, [tokens, width], device).cast(FloatDType::BF16);
            let gate_on_device = floats(&gate, [experts, width], device)
                .cast(FloatDType::BF16)
                .cast(gate_dtype);
            let bias_on_device = floats(&bias, [experts], device);
            let checked = (x_on_device.clone(), gate_on_device.clone());
            Prepared::new(
                move || {
                    let (x, gate) = (x_on_device.clone(), gate_on_device.clone());
                    dense_router(x, gate, Some(bias_on_device.clone()), None, K, SCALE)
                        .expect("arguments that fit")
                },
                move |(weights, ids)| {
                    // Checks rows that are spread evenly, as the oracle is slow.
                    let rows: Vec<usize> = (0..CHECKED.min(tokens))
                        .map(|i| i * tokens / CHECKED.min(tokens))
                        .collect();
                    let read = |tensor: &Tensor<2>| values(tensor.clone().cast(FloatDType::F32));
                    let (x, gate) = (read(&checked.0), wide(&read(&checked.1)));
                    let x = picked(&x, width, &rows);
                    let ids = picked(&integer_values(ids), K, &rows);
                    let weights = picked(&values(weights), K, &rows);
                    let logits = products(&wide(&x), &gate, width);
                    let routed = (&ids[..], &weights[..]);
                    assert_routed(
                        &logits,
                        &wide(&bias),
                        routed,
                        (K, SCALE),
                        FROM_PRODUCTS,
                        "dense",
                    );
                },
            )
        }),
    }
}

fn picked<T: Copy>(all: &[T], width: usize, rows: &[usize]) -> Vec<T> {
    rows.iter()
        .flat_map(|row| &all[row * width..(row + 1) * width])
        .copied()
        .collect()
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
                    activation_topk(on_device.clone(), bias, None, K, SCALE)
                        .expect("arguments that fit")
                },
                move |(weights, ids)| {
                    let ids = integer_values(ids);
                    let (logits, bias, weights) = (wide(&logits), wide(&bias), values(weights));
                    let routed = (&ids[..], &weights[..]);
                    assert_routed(&logits, &bias, routed, (K, SCALE), FROM_LOGITS, "topk");
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
        // Token ids, their rows of the table, the logits of these experts; weights and ids.
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
                    hash_route(token_ids, table, HashWeights::Scored(logits), SCALE)
                        .expect("arguments that fit")
                },
                move |(weights, ids)| {
                    let ids = integer_values(ids);
                    assert!(ids == expected, "hash_route: other ids than the table's");
                    let (logits, weights) = (wide(&logits), values(weights));
                    let routed = (&ids[..], &weights[..]);
                    assert_weights(&logits, experts, routed, (K, SCALE), FROM_LOGITS, "hash");
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
