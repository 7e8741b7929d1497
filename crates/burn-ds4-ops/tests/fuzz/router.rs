//! Routing of tokens to experts.

use burn::tensor::{Bool, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::router::{HashWeights, activation_topk, dense_router, hash_route, topk_select};

use super::super::common::{integer_values, values, wide};
use super::super::routing::{
    FROM_LOGITS, FROM_PRODUCTS, Precision, assert_routed, assert_weights, products,
};
use super::draw::Draw;

pub fn router(data: &[u8]) {
    let draw = &mut Draw::new(data);
    match draw.below(4) {
        0 => selected(draw),
        1 => hashed(draw),
        _ => scored(draw),
    }
}

fn selected(draw: &mut Draw) {
    let (rows, columns) = (draw.size(5), draw.size(9));
    let k = draw.below(columns + 2);
    let scores = draw.rows(rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&scores.values, [rows, columns], dtype);
    let selected = topk_select(tensor, k);
    let Some((best, ids)) = draw.settle(selected, (1..=columns).contains(&k)) else {
        return;
    };
    assert_eq!([best.dims(), ids.dims()], [[rows, k]; 2]);
    assert_eq!(best.dtype(), dtype.into());
    let ids = integer_values(ids);
    assert_distinct(&ids, k, columns);
    let best = values(best.cast(FloatDType::F32));
    for row in (0..rows).filter(|&row| scores.tame[row]) {
        let held = &held[row * columns..][..columns];
        let mut order: Vec<usize> = (0..columns).collect();
        // The sort is stable.
        order.sort_by(|&a, &b| held[b].partial_cmp(&held[a]).expect("tame"));
        for (slot, &column) in (row * k..).zip(&order[..k]) {
            assert_eq!((ids[slot], best[slot]), (column as i64, held[column]));
        }
    }
}

/// That the ids of each row are different experts.
fn assert_distinct(ids: &[i64], k: usize, experts: usize) {
    for ids in ids.chunks(k.max(1)) {
        let inside = |id: &i64| (0..experts as i64).contains(id);
        let distinct = (1..ids.len()).all(|slot| !ids[..slot].contains(&ids[slot]));
        assert!(ids.iter().all(inside) && distinct, "{ids:?}");
    }
}

fn padding(draw: &mut Draw, tokens: usize) -> Vec<bool> {
    (0..tokens).map(|_| draw.one_in(4)).collect()
}

fn flags(flags: &[bool]) -> Tensor<1, Bool> {
    Tensor::from_data(
        TensorData::new(flags.to_vec(), [flags.len()]),
        &Device::flex(),
    )
}

fn scored(draw: &mut Draw) {
    let (tokens, experts, d_model) = (draw.size(5), draw.size(9), draw.size(6));
    let k = draw.below(experts + 2);
    let scale = draw.pick(&[1.0, 2.5, 0.0]);
    let bias = draw.one_in(2).then(|| draw.rows(1, experts));
    let padded = padding(draw, tokens);
    let by_product = draw.one_in(2);
    let (rows, columns) = (tokens, if by_product { d_model } else { experts });
    let x = draw.rows(rows, columns);
    let gate = draw.tame_values(experts * d_model);
    let dtype = draw.dtype();
    let (given, held) = draw.tensor(&x.values, [rows, columns], dtype);
    let held_bias = bias
        .as_ref()
        .map_or(vec![0.0; experts], |bias| wide(&bias.values));
    let bias_is_tame = bias.as_ref().is_none_or(|bias| bias.tame[0]);
    let bias = bias.map(|bias| draw.tensor(&bias.values, [experts], FloatDType::F32).0);
    let mask = Some(flags(&padded));
    let (routed, logits, precision) = if by_product {
        let of = draw.dtype();
        let (gate, held_gate) = draw.tensor(&gate, [experts, d_model], of);
        let logits = match d_model {
            0 => vec![0.0; tokens * experts],
            _ => products(&wide(&held), &wide(&held_gate), d_model),
        };
        let routed = dense_router(given, gate, bias, mask, k, scale);
        (routed, logits, FROM_PRODUCTS)
    } else {
        let routed = activation_topk(given, bias, mask, k, scale);
        (routed, wide(&held), FROM_LOGITS)
    };
    let Some((weights, ids)) = draw.settle(routed, (1..=experts).contains(&k)) else {
        return;
    };
    assert_eq!([weights.dims(), ids.dims()], [[tokens, k]; 2]);
    let (weights, ids) = (values(weights), integer_values(ids));
    for token in 0..tokens {
        let row = token * k..(token + 1) * k;
        let (ids, weights) = (&ids[row.clone()], &weights[row]);
        if padded[token] {
            assert_padding(ids, weights);
            continue;
        }
        assert_distinct(ids, k, experts);
        if x.tame[token] && bias_is_tame {
            let logits = &logits[token * experts..][..experts];
            let routed = (ids, weights);
            assert_routed(logits, &held_bias, routed, (k, scale), precision, "fuzz");
        }
    }
}

fn assert_padding(ids: &[i64], weights: &[f32]) {
    assert!(ids.iter().all(|id| *id == -1), "{ids:?}");
    assert!(weights.iter().all(|weight| *weight == 0.0), "{weights:?}");
}

fn hashed(draw: &mut Draw) {
    let (tokens, vocabulary, k) = (draw.size(5), draw.size(6), draw.size(4));
    let experts = draw.size(9);
    let scale = draw.pick(&[1.0, 2.5, 0.0]);
    let token_ids: Vec<i64> = (0..tokens).map(|_| draw.index(vocabulary)).collect();
    let table: Vec<i64> = (0..vocabulary * k).map(|_| draw.index(experts)).collect();
    let logits = draw.one_in(2).then(|| draw.rows(tokens, experts));
    let dtype = draw.dtype();
    let (weights, held) = match &logits {
        Some(logits) => {
            let (tensor, held) = draw.tensor(&logits.values, [tokens, experts], dtype);
            (HashWeights::Scored(tensor), wide(&held))
        }
        None => (
            HashWeights::Uniform { experts },
            vec![0.0; tokens * experts],
        ),
    };
    let ids: Tensor<1, Int> = draw.integers(&token_ids, [tokens]);
    let entries = draw.integers(&table, [vocabulary, k]);
    let routed = hash_route(ids, entries, weights, scale);
    let Some((weights, ids)) = draw.settle(routed, ![vocabulary, k, experts].contains(&0)) else {
        return;
    };
    assert_eq!([weights.dims(), ids.dims()], [[tokens, k]; 2]);
    let (weights, ids) = (values(weights), integer_values(ids));
    for (token, &of) in token_ids.iter().enumerate() {
        let row = token * k..(token + 1) * k;
        let (ids, weights) = (&ids[row.clone()], &weights[row]);
        let Ok(of) = usize::try_from(of) else {
            assert_padding(ids, weights);
            continue;
        };
        let entries = &table[of.min(vocabulary - 1) * k..][..k];
        let nearest = |id: &i64| (*id).clamp(0, experts as i64 - 1);
        assert_eq!(ids, entries.iter().map(nearest).collect::<Vec<_>>());
        if logits.as_ref().is_none_or(|logits| logits.tame[token]) {
            let logits = &held[token * experts..][..experts];
            let precision: Precision = FROM_LOGITS;
            assert_weights(
                logits,
                experts,
                (ids, weights),
                (k, scale),
                precision,
                "fuzz",
            );
        }
    }
}
