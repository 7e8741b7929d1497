//! The choice of tokens on the host, which waits for the device: tensor operations cannot express
//! exact sums in the order of a row. The other operators are tensor operations.

mod log_probs;
mod penalties;

use std::cmp::Reverse;

use super::layout::{SEED, WIDTH};
use super::weight::{WeightFilter, weight};
use crate::dims::Dims;
use crate::random::philox;
use crate::reference::prelude::*;

pub(super) use log_probs::log_probs;
pub(super) use penalties::{apply_penalties, count_tokens};

/// The token of a row without candidates.
const NONE: i32 = -1;

/// Chooses a token for each row by the parameters of its lane.
pub(super) fn sample<B: Backend>(
    logits: FloatTensor<B>,
    floats: FloatTensor<B>,
    words: IntTensor<B>,
    positions: IntTensor<B>,
) -> IntTensor<B> {
    let device = logits.device();
    let [rows, columns] = logits.dims();
    let (logits, floats) = (read_floats::<B>(logits), read_floats::<B>(floats));
    let (words, positions) = (read_words::<B>(words), read_words::<B>(positions));
    let lane_rows = rows / positions.len();
    let tokens = logits.chunks(columns).enumerate().map(|(row, logits)| {
        let lane = row / lane_rows;
        let position = positions[lane].wrapping_add((row % lane_rows) as u32);
        let table = lane * WIDTH..(lane + 1) * WIDTH;
        let (floats, words) = (&floats[table.clone()], &words[table]);
        let filter = WeightFilter::of_lane(floats, words);
        let seed = SEED.map(|column| words[column]);
        choose(logits, filter, position, seed).map_or(NONE, |token| token as i32)
    });
    let tokens = TensorData::new(tokens.collect::<Vec<i32>>(), [rows]);
    B::int_from_data(tokens, &device)
}

fn read_floats<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    let data = B::float_into_data(as_f32::<B>(tensor));
    let data = read_sync(data).expect("floats that can be read");
    data.iter().collect()
}

/// The low words of integers.
fn read_words<B: Backend>(tensor: IntTensor<B>) -> Vec<u32> {
    let data = read_sync(B::int_into_data(tensor)).expect("integers that can be read");
    data.iter::<i64>().map(|word| word as u32).collect()
}

/// A token and its distance to the most likely one.
struct Candidate {
    id: usize,
    logit: f32,
    exponent: u32,
}

/// Chooses a token by a filter, or the highest logit without one.
fn choose(
    logits: &[f32],
    filter: Option<WeightFilter>,
    position: u32,
    seed: [u32; 2],
) -> Option<usize> {
    // NaN is not larger than anything.
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if highest == f32::NEG_INFINITY {
        return None;
    }
    let Some(filter) = filter else {
        return logits.iter().position(|&logit| logit == highest);
    };
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
    if filter.has_top_p() {
        candidates.sort_unstable_by_key(|candidate| (candidate.exponent, candidate.id));
        let total = total(&candidates);
        let target = (u128::from(total) * u128::from(filter.top_p)).div_ceil(1 << 32) as u64;
        let mut mass = 0;
        let kept = candidates.iter().take_while(|candidate| {
            let is_kept = mass < target;
            mass += weight(candidate.exponent);
            is_kept
        });
        let kept = kept.count();
        candidates.truncate(kept);
    }
    candidates.retain(|candidate| candidate.exponent <= filter.last);
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
    let [lanes, count] = drafts.dims();
    let dtype = bool_dtype::<B>(&device);
    let tokens = B::int_cast(tokens, INT);
    let tokens = int_reshape::<B>(tokens, [lanes, count + 1]);
    let compared = int_slice::<B>(tokens.clone(), 1, 0..count);
    // Compared in the dtype of the drafts, as a wider integer may be out of the range of a token.
    let wide = B::int_cast(compared.clone(), drafts.dtype().into());
    let matches = B::bool_and(
        B::int_equal(wide, drafts, dtype),
        B::int_greater_equal_elem(compared, 0.into(), dtype),
    );
    let mismatches = B::bool_into_int(B::bool_not(matches), INT);
    let rejected = B::int_cumsum(mismatches, 1);
    let accepted_prefix = B::bool_into_int(B::int_equal_elem(rejected, 0.into(), dtype), INT);
    let accepted = B::int_sum_dim(accepted_prefix, 1);
    let shape = [lanes, count + 1];
    let column = numbers::<B>(0..count as i64 + 1, 1, shape, &device);
    let surplus = B::int_greater(column, B::int_expand(accepted.clone(), shape.into()), dtype);
    let tokens = B::int_mask_fill(tokens, surplus, i64::from(NONE).into());
    (tokens, int_reshape::<B>(accepted, [lanes]))
}
