//! The rows that clusters start from: far from each other, as in k-means++, but many at a time.

use burn::tensor::Tensor;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::head::{integers, read, rows_at_once};
use crate::OpError;
use crate::matmul::matmul;

/// The number of times that rows are drawn. Rows of one draw may be close to each other. Up to this
/// many clusters, rows are drawn one by one.
const ROUNDS: usize = 16;

/// Draws distinct rows. The probability of a row is proportional to its distance from the rows of
/// earlier rounds: one minus the cosine, which is half the square of the distance of the
/// directions. Rows of length 0 come last.
pub(super) fn seeds(
    rows: &Tensor<2>,
    lengths: &[f32],
    count: usize,
    seed: u64,
) -> Result<Vec<i32>, OpError> {
    let device = rows.device();
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    let mut distances: Vec<f64> = lengths
        .iter()
        .map(|&length| f64::from(u8::from(length > 0.0)))
        .collect();
    let mut chosen: Vec<i32> = Vec::new();
    let rounds = ROUNDS.min(count);
    for round in 1..=rounds {
        let wanted = count * round / rounds - chosen.len();
        let found = draw(&distances, &chosen, wanted, &mut random);
        if round < rounds {
            let seeds = rows.clone().select(0, integers(found.clone(), &device));
            shorten(&mut distances, rows, seeds)?;
        }
        chosen.extend(found);
    }
    Ok(chosen)
}

/// Draws `count` rows that are not taken, without replacement: those whose exponential variables,
/// with the distances as rates, come first.
fn draw(distances: &[f64], taken: &[i32], count: usize, random: &mut ChaCha12Rng) -> Vec<i32> {
    let mut free = vec![true; distances.len()];
    for &row in taken {
        free[row as usize] = false;
    }
    let mut arrivals: Vec<(f64, i32)> = distances
        .iter()
        .zip(0..)
        .map(|(&distance, row)| {
            let uniform = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
            let exponential = -(1.0 - uniform).ln();
            let arrival = match distance > 0.0 {
                true => exponential / distance,
                false => f64::INFINITY,
            };
            (arrival, row)
        })
        .filter(|&(_, row)| free[row as usize])
        .collect();
    arrivals.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    arrivals.truncate(count);
    arrivals.into_iter().map(|(_, row)| row).collect()
}

/// Lowers the distances to take new seeds into account.
fn shorten(distances: &mut [f64], rows: &Tensor<2>, seeds: Tensor<2>) -> Result<(), OpError> {
    let [count, width] = seeds.dims();
    let seeds = seeds.transpose();
    let rows_per_part = rows_at_once(count.max(width));
    for (distances, number) in distances.chunks_mut(rows_per_part).zip(0..) {
        let start = number * rows_per_part;
        let rows = rows.clone().slice_dim(0, start..start + distances.len());
        let nearest = read(matmul(rows, seeds.clone())?.max_dim(1));
        for (distance, similarity) in distances.iter_mut().zip(nearest) {
            *distance = distance.min(f64::from(1.0 - similarity).max(0.0));
        }
    }
    Ok(())
}
