//! Tokens from logits.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::sampling::{
    BatchParams, LaneParams, SamplingParams, TokenCounts, apply_penalties, log_probs, sample,
    verify,
};

use super::super::common::{integer_values, values};
use super::super::tokens::{Oracle, uniform};
use super::draw::Draw;

const FRACTIONS: [f32; 9] = [1.0, 0.9, 0.5, 1e-30, 0.0, -0.0, -1.0, 1.1, f32::NAN];

/// Parameters that are mostly in range, and whether they are.
fn lane(draw: &mut Draw, columns: usize) -> (LaneParams, bool) {
    let mut params = LaneParams {
        sampling: SamplingParams {
            temperature: draw.pick(&[0.0, 1.0, 0.7, 1.0, 1e-30, 1e30, 1e-45]),
            top_k: draw.pick(&[0, 1, 2, 5, usize::MAX]),
            top_p: draw.pick(&FRACTIONS[..4]),
            min_p: draw.pick(&FRACTIONS[..5]),
        },
        seed: draw.seed(),
        ..LaneParams::default()
    };
    if draw.one_in(4) {
        params.penalties.repetition = draw.pick(&[1.3, 0.5, 1e30]);
        params.penalties.presence = draw.pick(&[-2.0, 0.5, 2.0]);
        params.penalties.frequency = draw.pick(&[-2.0, 0.5, 2.0]);
    }
    if draw.one_in(4) && columns > 0 {
        let bias = draw.pick(&[5.0, -100.0, f32::NEG_INFINITY, f32::MAX]);
        params.logit_bias = vec![(draw.below(columns) as u32, bias)];
    }
    if !draw.one_in(16) {
        return (params, true);
    }
    match draw.below(7) {
        0 => params.sampling.temperature = draw.pick(&[-1.0, f32::NAN, f32::INFINITY]),
        1 => params.sampling.top_p = draw.pick(&FRACTIONS[4..]),
        2 => params.sampling.min_p = draw.pick(&FRACTIONS[6..]),
        3 => params.penalties.repetition = draw.pick(&[0.0, -1.0, f32::NAN, f32::INFINITY]),
        4 => params.penalties.presence = draw.pick(&[2.1, f32::NAN]),
        5 => params.logit_bias = vec![(columns as u32, 0.0)],
        _ => params.logit_bias = vec![(0, f32::NAN)],
    }
    (params, false)
}

pub fn sampling(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let (lanes, columns, drafts) = (draw.size(3), draw.size(12), draw.below(3));
    let (device, rows) = (Device::flex(), drafts + 1);
    let drawn: Vec<(LaneParams, bool)> = (0..lanes).map(|_| lane(draw, columns)).collect();
    let (params, valid): (Vec<LaneParams>, Vec<bool>) = drawn.into_iter().unzip();
    let batch = BatchParams::new(&params, columns, &device);
    let valid = valid.into_iter().all(|valid| valid);
    let Some(batch) = draw.settle(batch, valid) else {
        return;
    };
    let logits = draw.rows(lanes * rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&logits.values, [lanes, rows, columns], dtype);
    let guesses: Vec<i64> = (0..lanes * drafts).map(|_| draw.index(columns)).collect();
    let guessed = draw.integers(&guesses, [lanes, drafts]);
    let starts: Vec<i64> = (0..lanes).map(|_| draw.index(100)).collect();
    let positions = draw.integers(&starts, [lanes]);

    let mut counts = TokenCounts::new(lanes, columns, &device);
    draw.settle(counts.count(guessed.clone()), true);
    let changed = apply_penalties(tensor.clone(), guessed.clone(), &batch, &counts);
    if let Some(changed) = draw.settle(changed, true) {
        assert_eq!(
            (changed.dims(), changed.dtype()),
            ([lanes, rows, columns], DType::F32)
        );
        let changed = values(changed);
        for (lane, params) in params.iter().enumerate() {
            let same = LaneParams {
                sampling: params.sampling,
                seed: params.seed,
                ..LaneParams::default()
            };
            let slots = lane * rows * columns..(lane + 1) * rows * columns;
            let pairs = changed[slots.clone()].iter().zip(&held[slots]);
            let equal = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
            assert!(*params != same || pairs.clone().all(equal), "{params:?}");
        }
    }

    let verified = verify(tensor.clone(), guessed, &batch, positions.clone());
    let Some(verified) = draw.settle(verified, true) else {
        return;
    };
    let (tokens, accepted) = (
        integer_values(verified.tokens),
        integer_values(verified.accepted),
    );
    for lane in 0..lanes {
        let tokens = &tokens[lane * rows..][..rows];
        let guesses = &guesses[lane * drafts..][..drafts];
        let accepted = accepted[lane] as usize;
        assert_eq!(tokens[..accepted], guesses[..accepted]);
        assert!(tokens[accepted + 1..].iter().all(|token| *token == -1));
        for (row, token) in tokens[..=accepted].iter().enumerate() {
            let logits = &held[(lane * rows + row) * columns..][..columns];
            let position = (starts[lane] as u32).wrapping_add(row as u32);
            assert_token(*token, logits, &params[lane], position);
        }
        assert!(
            guesses
                .get(accepted)
                .is_none_or(|guess| tokens[accepted] != *guess || *guess < 0)
        );
    }
    if columns > 0 && lanes > 0 {
        alone(&tensor, &batch, &positions, &tokens, draw);
    }
}

/// That first rows give the same tokens without the others, and tokens their log-probabilities.
fn alone(
    logits: &Tensor<3>,
    batch: &BatchParams,
    positions: &Tensor<1, Int>,
    tokens: &[i64],
    draw: &mut Draw,
) {
    let [lanes, rows, columns] = logits.dims();
    let first = logits.clone().slice([0..lanes, 0..1, 0..columns]);
    let first: Tensor<2> = first.reshape([lanes, columns]);
    let sampled = sample(first.clone(), batch, positions.clone()).expect("arguments that fit");
    let firsts: Vec<i64> = tokens.chunks(rows).map(|tokens| tokens[0]).collect();
    assert_eq!(integer_values(sampled.clone()), firsts);

    let top = draw.pick(&[0, 1, 5, 20, 21]);
    let listed = draw.settle(log_probs(first.clone(), sampled, top), top <= 20);
    let Some(listed) = listed else {
        return;
    };
    let held = values(first.cast(FloatDType::F32));
    let chosen = values(listed.chosen);
    for ((held, token), log_prob) in held.chunks(columns).zip(firsts).zip(chosen) {
        let one = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        let kept = Oracle::of(held, &one).kept;
        let of = kept.iter().find(|(id, _)| *id as i64 == token);
        let expected = of.map_or(f64::NEG_INFINITY, |(_, probability)| probability.ln());
        let error = (f64::from(log_prob) - expected).abs();
        // Probabilities below the range of f64 are not worked out.
        let close = error <= 1e-5 + 1e-6 * expected.abs() || expected == f64::from(log_prob);
        assert!(
            close || expected < -700.0,
            "{log_prob}, expected {expected}"
        );
    }
}

fn assert_token(token: i64, logits: &[f32], params: &LaneParams, position: u32) {
    let candidate = |x: &f32| !x.is_nan() && *x > f32::NEG_INFINITY;
    if !logits.iter().any(candidate) {
        return assert_eq!(token, -1, "{logits:?}");
    }
    let sampling = &params.sampling;
    if sampling.temperature == 0.0 {
        let highest = logits
            .iter()
            .copied()
            .filter(candidate)
            .fold(f32::MIN, f32::max);
        let first = logits.iter().position(|x| *x == highest);
        return assert_eq!(Some(token as usize), first, "{logits:?}");
    }
    let oracle = Oracle::of(logits, sampling);
    let u = uniform(params.seed, position);
    // Weights that differ by less are equal, and then the lower id counts, not the logit. So are
    // logits that differ by next to nothing.
    let least = (1e-6 * sampling.temperature).max(1e-37);
    let near = |a: &f32, b: &f32| a != b && (a - b).abs() < least;
    let near = |a: &f32| logits.iter().any(|b| near(a, b));
    let close = oracle.margin < 1e-6 || logits.iter().any(near);
    assert!(
        close || oracle.allows(token, u, 1e-6),
        "{token} of {logits:?}, {params:?}"
    );
}
