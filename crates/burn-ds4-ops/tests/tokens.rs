//! Which token a row of logits gives, in f64, for the tests and the benchmarks of sampling.

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{
    BatchParams, LaneParams, SamplingParams, VerifiedDrafts, sample, verify,
};

use super::common::{floats, integer_values, integers};

/// What a row is drawn from.
pub struct Oracle {
    /// Ids that can be drawn, ascending, with their probabilities.
    pub kept: Vec<(usize, f64)>,
    /// How far the nearest decision was from being another, as a share of all.
    pub margin: f64,
}

impl Oracle {
    pub fn of(logits: &[f32], sampling: &SamplingParams) -> Self {
        let highest = logits
            .iter()
            .copied()
            .filter(|x| !x.is_nan())
            .fold(f32::NEG_INFINITY, f32::max);
        let weight = |x: f32| match x == highest {
            true => 1.0,
            false => ((f64::from(x) - f64::from(highest)) / f64::from(sampling.temperature)).exp(),
        };
        let mut entries: Vec<(usize, f32, f64)> = logits
            .iter()
            .enumerate()
            .filter(|(_, x)| !x.is_nan() && **x > f32::NEG_INFINITY)
            .map(|(id, &x)| (id, x, weight(x)))
            .filter(|(_, x, _)| highest < f32::INFINITY || *x == highest)
            .collect();
        entries.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("no NaN").then(a.0.cmp(&b.0)));
        if sampling.top_k > 0 {
            entries.truncate(sampling.top_k);
        }
        let sum = |entries: &[(usize, f32, f64)]| entries.iter().map(|entry| entry.2).sum::<f64>();
        let mut margin = f64::INFINITY;
        if sampling.top_p < 1.0 {
            let total = sum(&entries);
            let target = f64::from(sampling.top_p) * total;
            let mut mass = 0.0;
            let mut count = 0;
            while count < entries.len() && mass < target {
                mass += entries[count].2;
                margin = margin.min((mass - target).abs() / total);
                count += 1;
            }
            entries.truncate(count);
        }
        let least = f64::from(sampling.min_p);
        for entry in &entries {
            if entry.2 < 1.0 && least > 0.0 {
                margin = margin.min((entry.2 / least - 1.0).abs());
            }
        }
        entries.retain(|entry| entry.2 >= least);
        let total = sum(&entries);
        entries.sort_by_key(|entry| entry.0);
        Self {
            kept: entries
                .iter()
                .map(|entry| (entry.0, entry.2 / total))
                .collect(),
            margin,
        }
    }

    /// Whether a token may be the one at `u`: rounding may move the ends of its share by
    /// `tolerance`.
    pub fn allows(&self, token: i64, u: f64, tolerance: f64) -> bool {
        let mut before = 0.0;
        for &(id, probability) in &self.kept {
            if id as i64 == token {
                return before - tolerance <= u && u <= before + probability + tolerance;
            }
            before += probability;
        }
        false
    }
}

/// The number in 0..1 that a seed has at a position: Philox-4x32-10, its first 64 bits.
pub fn uniform(seed: u64, position: u32) -> f64 {
    let mut words = [u128::from(position), 0, 0, 0];
    for round in 0..10u128 {
        let key = |word: u128, step: u128| (word + round * step) % (1 << 32);
        let (low, high) = (u128::from(seed) % (1 << 32), u128::from(seed) >> 32);
        let a = words[0] * 0xD251_1F53;
        let b = words[2] * 0xCD9E_8D57;
        words = [
            (b >> 32) ^ words[1] ^ key(low, 0x9E37_79B9),
            b % (1 << 32),
            (a >> 32) ^ words[3] ^ key(high, 0xBB67_AE85),
            a % (1 << 32),
        ];
    }
    (words[0] + (words[1] << 32)) as f64 / 2f64.powi(64)
}

/// Which random number a lane has: its seed, and the position at which it draws.
pub type Draw = (u64, u32);

/// The same seed for so many lanes, at positions that follow each other.
pub fn draws(seed: u64, first: u32, lanes: usize) -> Vec<Draw> {
    let positions = (first..).take(lanes);
    positions.map(|position| (seed, position)).collect()
}

/// The positions of lanes on a device, as an i32 has them.
pub fn positions(draws: &[Draw], device: &Device) -> Tensor<1, Int> {
    let positions: Vec<i64> = draws.iter().map(|draw| i64::from(draw.1 as i32)).collect();
    integers(&positions, [draws.len()], device)
}

/// The parameters of lanes on a device.
pub fn batch(params: &[LaneParams], columns: usize, device: &Device) -> BatchParams {
    BatchParams::new(params, columns, device).expect("parameters in range")
}

/// Lanes that differ in their seeds alone.
pub fn alike(
    sampling: &SamplingParams,
    draws: &[Draw],
    columns: usize,
    device: &Device,
) -> BatchParams {
    let lane = |&(seed, _): &Draw| LaneParams {
        sampling: *sampling,
        seed,
        ..LaneParams::default()
    };
    let params: Vec<LaneParams> = draws.iter().map(lane).collect();
    batch(&params, columns, device)
}

/// A tensor with this row over and over.
pub fn repeated(row: &[f32], rows: usize, device: &Device) -> Tensor<2> {
    floats(row, [1, row.len()], device).expand([rows, row.len()])
}

/// What comes out for lanes that differ in their draws alone.
pub fn sampled(logits: Tensor<2>, sampling: &SamplingParams, draws: &[Draw]) -> Vec<i64> {
    let ([_, columns], device) = (logits.dims(), logits.device());
    let params = alike(sampling, draws, columns, &device);
    let tokens = sample(logits, &params, positions(draws, &device));
    integer_values(tokens.expect("arguments that fit"))
}

/// The tokens of each lane, and how many drafts are accepted.
pub type Verdict = (Vec<i64>, Vec<i64>);

/// Reads a verdict back.
pub fn verdict(drafts: VerifiedDrafts) -> Verdict {
    let VerifiedDrafts { tokens, accepted } = drafts;
    let [lanes, _] = tokens.dims();
    assert_eq!(accepted.dims(), [lanes]);
    (integer_values(tokens), integer_values(accepted))
}

/// The verdict on the drafts of lanes that differ in their draws alone.
pub fn verified(
    logits: Tensor<3>,
    drafts: &[i64],
    sampling: &SamplingParams,
    draws: &[Draw],
) -> Verdict {
    let ([lanes, rows, columns], device) = (logits.dims(), logits.device());
    let params = alike(sampling, draws, columns, &device);
    let drafts = integers(drafts, [lanes, rows - 1], &device);
    let verified = verify(logits, drafts, &params, positions(draws, &device));
    let verified = verified.expect("arguments that fit");
    assert_eq!(verified.tokens.dims(), [lanes, rows]);
    verdict(verified)
}

/// How often each id was drawn for a row.
pub fn counts(row: &[f32], sampling: &SamplingParams, times: usize, device: &Device) -> Vec<usize> {
    let mut counts = vec![0; row.len()];
    let draws = draws(7, 0, times);
    for token in sampled(repeated(row, times, device), sampling, &draws) {
        counts[usize::try_from(token).expect("a token")] += 1;
    }
    counts
}
