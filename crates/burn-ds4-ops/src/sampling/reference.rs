//! The choice on the host: what is chosen follows from exact sums and the order of a whole row, which tensor operations have no words
//! for. It waits for the device. Drafts are compared in tensor operations.

use std::cmp::Reverse;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, TensorData, read_sync};

use super::Sampling;
use super::weight::{Filter, weight};
use crate::random::philox;
use crate::reference::bool_dtype;

/// Of tokens and counts.
const INT: IntDType = IntDType::I32;
/// The token of a row without candidates.
const NONE: i32 = -1;

pub(super) fn sample<B: Backend>(
    logits: FloatTensor<B>,
    seeds: IntTensor<B>,
    positions: IntTensor<B>,
    sampling: Sampling,
) -> IntTensor<B> {
    let device = logits.device();
    let [rows, columns] = logits.shape().dims();
    let logits = B::float_into_data(B::float_cast(logits, FloatDType::F32));
    let logits: Vec<f32> = read_sync(logits)
        .expect("logits that can be read")
        .iter()
        .collect();
    let words = |tensor| {
        let data = read_sync(B::int_into_data(tensor)).expect("integers that can be read");
        data.iter::<i64>()
            .map(|word| word as u32)
            .collect::<Vec<_>>()
    };
    let (seeds, positions) = (words(seeds), words(positions));
    let of_sequence = rows / positions.len();
    let tokens = logits.chunks(columns).enumerate().map(|(row, logits)| {
        let sequence = row / of_sequence;
        let position = positions[sequence].wrapping_add((row % of_sequence) as u32);
        let seed = [seeds[2 * sequence], seeds[2 * sequence + 1]];
        choose(logits, &sampling, position, seed).map_or(NONE, |token| token as i32)
    });
    let tokens = TensorData::new(tokens.collect::<Vec<i32>>(), [rows]);
    B::int_from_data(tokens, &device)
}

/// A token and how far it is from the most likely one.
struct Candidate {
    id: usize,
    logit: f32,
    exponent: u32,
}

fn choose(logits: &[f32], sampling: &Sampling, position: u32, seed: [u32; 2]) -> Option<usize> {
    // NaN is above nothing.
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if highest == f32::NEG_INFINITY {
        return None;
    }
    if sampling.temperature == 0.0 {
        return logits.iter().position(|&logit| logit == highest);
    }
    let filter = Filter::of(sampling, logits.len());
    let mut candidates: Vec<Candidate> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| {
            **logit > f32::NEG_INFINITY && (highest.is_finite() || **logit == highest)
        })
        .map(|(id, &logit)| Candidate {
            id,
            logit,
            exponent: filter.exponent(logit, highest),
        })
        .collect();
    if filter.top_k > 0 {
        let rank = |c: &Candidate, d: &Candidate| {
            d.logit
                .partial_cmp(&c.logit)
                .expect("no NaN")
                .then(c.id.cmp(&d.id))
        };
        candidates.sort_unstable_by(rank);
        candidates.truncate(filter.top_k);
    }
    if sampling.top_p < 1.0 {
        candidates.sort_unstable_by_key(|candidate| (candidate.exponent, candidate.id));
        let total = total(&candidates);
        let target = (u128::from(total) * u128::from(filter.top_p)).div_ceil(1 << 32) as u64;
        let mut mass = 0;
        let kept = candidates.iter().take_while(|candidate| {
            let goes_on = mass < target;
            mass += weight(candidate.exponent);
            goes_on
        });
        let kept = kept.count();
        candidates.truncate(kept);
    }
    candidates.retain(|candidate| weight(candidate.exponent) >= filter.minimum);
    candidates.sort_unstable_by_key(|candidate| Reverse(candidate.id));

    let [low, high, ..] = philox([position, 0, 0, 0], seed);
    let drawn = (u64::from(high) << 32) | u64::from(low);
    let mut left = ((u128::from(drawn) * u128::from(total(&candidates))) >> 64) as u64;
    while let Some(candidate) = candidates.pop() {
        match left.checked_sub(weight(candidate.exponent)) {
            Some(rest) => left = rest,
            None => return Some(candidate.id),
        }
    }
    None
}

fn total(candidates: &[Candidate]) -> u64 {
    let weights = candidates
        .iter()
        .map(|candidate| weight(candidate.exponent));
    weights.sum()
}

pub(super) fn verify<B: Backend>(
    tokens: IntTensor<B>,
    drafts: IntTensor<B>,
) -> (IntTensor<B>, IntTensor<B>) {
    let device = tokens.device();
    let [sequences, count] = drafts.shape().dims();
    let dtype = bool_dtype::<B>(&device);
    let tokens = B::int_cast(tokens, INT);
    let tokens = B::int_reshape(tokens, Shape::new([sequences, count + 1]));
    let compared = B::int_slice(tokens.clone(), &[(0..sequences).into(), (0..count).into()]);
    // A wider integer may be out of range of a token.
    let wide = B::int_cast(compared.clone(), drafts.dtype().into());
    let stands = B::bool_and(
        B::int_equal(wide, drafts, dtype),
        B::int_greater_equal_elem(compared, 0.into(), dtype),
    );
    let falls = B::bool_into_int(B::bool_not(stands), INT);
    let fallen = B::int_cumsum(falls, 1);
    let standing = B::bool_into_int(B::int_equal_elem(fallen, 0.into(), dtype), INT);
    let accepted = B::int_sum_dim(standing, 1);
    let column = B::int_arange(0..count as i64 + 1, &device, INT);
    let column = B::int_reshape(column, Shape::new([1, count + 1]));
    let shape = Shape::new([sequences, count + 1]);
    let surplus = B::int_greater(
        B::int_expand(column, shape.clone()),
        B::int_expand(accepted.clone(), shape),
        dtype,
    );
    let tokens = B::int_mask_fill(tokens, surplus, i64::from(NONE).into());
    (tokens, B::int_reshape(accepted, Shape::new([sequences])))
}
