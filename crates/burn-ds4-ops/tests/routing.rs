//! What a right routing is, worked out in f64, for the tests and the benchmarks of the router.

use super::common::{Tolerance, assert_close, narrow};

/// How close a kernel comes to the oracle.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Of the biased scores. Who is closer than that to another may stand in its place.
    pub scores: Tolerance,
    /// Of the weights, given the choice.
    pub weights: Tolerance,
}

/// What f32 makes of logits that are given as f32: some units in the last place.
pub const FROM_LOGITS: Precision = Precision {
    scores: Tolerance {
        absolute: 2e-6,
        relative: 1e-6,
    },
    weights: Tolerance {
        // A device may flush what lies below the normal range.
        absolute: f32::MIN_POSITIVE as f64,
        relative: 1e-5,
    },
};

/// What f32 makes of logits that it sums up itself from some thousand products.
pub const FROM_PRODUCTS: Precision = Precision {
    scores: Tolerance {
        absolute: 2e-5,
        relative: 2e-5,
    },
    weights: Tolerance {
        absolute: 1e-6,
        relative: 1e-4,
    },
};

pub fn sqrt_softplus(x: f64) -> f64 {
    (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()
}

/// `x · gateᵀ`, rows of `d_model`.
pub fn products(x: &[f64], gate: &[f64], d_model: usize) -> Vec<f64> {
    let dot = |row: &[f64], expert: &[f64]| row.iter().zip(expert).map(|(a, b)| a * b).sum();
    x.chunks(d_model)
        .flat_map(|row| gate.chunks(d_model).map(move |expert| dot(row, expert)))
        .collect()
}

/// That each rank has an expert of its own whose biased score is that rank's, and the weight that
/// goes with it.
#[track_caller]
pub fn assert_routed(
    logits: &[f64],
    bias: &[f64],
    (ids, weights): (&[i64], &[f32]),
    (k, scale): (usize, f64),
    precision: Precision,
    what: &str,
) {
    let rows = logits.len() / bias.len();
    assert_eq!((ids.len(), weights.len()), (rows * k, rows * k), "{what}");
    let (mut expected, mut actual) = (Vec::new(), Vec::new());
    for (logits, ids) in logits.chunks(bias.len()).zip(ids.chunks(k)) {
        let scores = logits.iter().zip(bias).map(|(&x, b)| sqrt_softplus(x) + b);
        let scores: Vec<f64> = scores.collect();
        actual.extend(ids.iter().enumerate().map(|(rank, id)| {
            let score = usize::try_from(*id).ok().and_then(|id| scores.get(id));
            let taken = ids[..rank].contains(id);
            score.filter(|_| !taken).copied().unwrap_or(f64::NAN)
        }));
        let mut sorted = scores;
        sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        sorted[..k].sort_by(|a, b| b.total_cmp(a));
        expected.extend_from_slice(&sorted[..k]);
    }
    assert_close(
        &narrow(&actual),
        &narrow(&expected),
        precision.scores,
        &format!("{what}: scores of the chosen experts (NaN: out of range or chosen twice)"),
    );
    assert_weights(
        logits,
        bias.len(),
        (ids, weights),
        (k, scale),
        precision,
        what,
    );
}

/// That the weights are those of the experts that were chosen.
#[track_caller]
pub fn assert_weights(
    logits: &[f64],
    experts: usize,
    (ids, weights): (&[i64], &[f32]),
    (k, scale): (usize, f64),
    precision: Precision,
    what: &str,
) {
    let mut expected = Vec::new();
    for (logits, ids) in logits.chunks(experts).zip(ids.chunks(k)) {
        let chosen = ids.iter().map(|&id| sqrt_softplus(logits[id as usize]));
        let sum: f64 = chosen.clone().sum();
        expected.extend(chosen.map(|score| score / (sum + 1e-20) * scale));
    }
    let what = format!("{what}: weights");
    assert_close(weights, &narrow(&expected), precision.weights, &what);
}
