//! Clustered heads, and the two stages in f64 on what they hold.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::flash_head::{FlashHead, FlashHeadCandidates, FlashHeadOptions};
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul};

use super::common::{
    EXACT, assert_close, floats, integer_values, narrow, noise, read, values, wide,
};

/// Scores closer than this may swap places in f32.
const MARGIN: f64 = 1e-5;

/// A head and what it was made of.
pub struct Case {
    pub head: FlashHead,
    pub lm_head: Tensor<2>,
    pub rows: Vec<Vec<f64>>,
    pub assignments: Vec<u32>,
}

/// `[vocabulary, width]` and the number of clusters.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub vocabulary: usize,
    pub width: usize,
    pub clusters: usize,
}

/// Clusters of one size whose members are anywhere.
pub fn shuffled(vocabulary: usize, clusters: usize, seed: u32) -> Vec<u32> {
    let keys = noise(vocabulary, seed);
    let mut order: Vec<usize> = (0..vocabulary).collect();
    order.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
    let mut assignments = vec![0; vocabulary];
    for (place, id) in order.into_iter().enumerate() {
        assignments[id] = (place % clusters) as u32;
    }
    assignments
}

/// Small whole numbers, whose products add up exactly in any order.
pub fn whole(count: usize, seed: u32) -> Vec<f32> {
    let noise = noise(count, seed);
    noise.iter().map(|x| (2.5 * x).round()).collect()
}

impl Case {
    /// Clusters at random around their means.
    pub fn new(
        data: &[f32],
        sizes: Sizes,
        dtype: FloatDType,
        special: &[u32],
        device: &Device,
    ) -> Self {
        let assignments = shuffled(sizes.vocabulary, sizes.clusters, 77);
        Self::with_assignments(data, sizes, assignments, dtype, special, device)
    }

    pub fn with_assignments(
        data: &[f32],
        sizes: Sizes,
        assignments: Vec<u32>,
        dtype: FloatDType,
        special: &[u32],
        device: &Device,
    ) -> Self {
        let Sizes {
            vocabulary,
            width,
            clusters,
        } = sizes;
        let lm_head = floats(data, [vocabulary, width], device).cast(dtype);
        let rows: Vec<Vec<f64>> = wide(&read(&lm_head))
            .chunks(width)
            .map(<[f64]>::to_vec)
            .collect();
        let means: Vec<f64> = (0..clusters)
            .flat_map(|cluster| mean(&rows, &assignments, cluster))
            .collect();
        let means = narrow(&means)
            .into_iter()
            .map(|x| if x.is_finite() { x } else { 0.5 })
            .collect::<Vec<_>>();
        let means = floats(&means, [clusters, width], device);
        let options = FlashHeadOptions {
            special_tokens: special.to_vec(),
            norms: None,
        };
        let head =
            FlashHead::new(lm_head.clone(), &assignments, means, options).expect("parts that fit");
        Self {
            head,
            lm_head,
            rows,
            assignments,
        }
    }

    /// Exact logits of all ids.
    pub fn logits(&self, h: &[f64]) -> Vec<f64> {
        self.rows.iter().map(|row| dot(row, h)).collect()
    }

    /// The scores of the clusters, on the centroids that the head holds.
    pub fn scores(&self, h: &[f64]) -> Vec<f64> {
        let centroids = wide(&read(&self.head.centroids()));
        centroids.chunks(h.len()).map(|c| dot(c, h)).collect()
    }

    /// The ids that are candidates, in their order, and padding, if these clusters are chosen.
    pub fn ids(&self, chosen: &[usize]) -> Vec<i64> {
        let mut ids = Vec::new();
        for &cluster in chosen {
            let of = |id: &usize| self.assignments[*id] as usize == cluster;
            let members = (0..self.assignments.len()).filter(of);
            let end = ids.len() + self.head.capacity();
            ids.extend(members.map(|id| id as i64));
            ids.resize(end, -1);
        }
        for &token in self.head.special_tokens() {
            let cluster = self.assignments[token as usize] as usize;
            let inside = chosen.contains(&cluster);
            ids.push(if inside { -1 } else { i64::from(token) });
        }
        ids
    }

    /// Compares candidates with those of the chosen clusters of each hidden state, and their logits
    /// with exact ones.
    pub fn check(
        &self,
        result: FlashHeadCandidates,
        h: &Tensor<2>,
        chosen: &[Vec<usize>],
        what: &str,
    ) {
        let [tokens, width] = h.dims();
        let (ids, logits) = (integer_values(result.ids), values(result.logits));
        let h = wide(&read(h));
        let count = ids.len() / tokens;
        assert_eq!(logits.len(), ids.len(), "{what}");
        for token in 0..tokens {
            let ids = &ids[token * count..][..count];
            assert_eq!(ids, self.ids(&chosen[token]), "{what}, ids of {token}");
            let h = &h[token * width..][..width];
            for (&id, &logit) in ids.iter().zip(&logits[token * count..]) {
                if id < 0 {
                    assert_eq!(logit, f32::NEG_INFINITY, "{what}, padding");
                    continue;
                }
                let row = &self.rows[id as usize];
                let size: f64 = row.iter().zip(h).map(|(a, b)| (a * b).abs()).sum();
                let error = (f64::from(logit) - dot(row, h)).abs();
                assert!(error <= 1e-6 * size, "{what}: logit {logit} of {id}");
            }
        }
    }

    /// Compares logits of the whole vocabulary (`[tokens, vocabulary]`) with those of candidates,
    /// to the bit.
    pub fn check_all(&self, all: Tensor<2>, candidates: FlashHeadCandidates, what: &str) {
        let [tokens, vocabulary] = all.dims();
        let number = candidates.ids.dims()[1];
        let mut expected = vec![f32::NEG_INFINITY; tokens * vocabulary];
        let (ids, logits) = (candidates.ids, values(candidates.logits));
        for (at, (id, logit)) in integer_values(ids).into_iter().zip(logits).enumerate() {
            if let Ok(id) = usize::try_from(id) {
                expected[at / number * vocabulary + id] = logit;
            }
        }
        assert_close(&values(all), &expected, EXACT, what);
    }

    /// The greedy token of the dense head on the same device: ties to the smallest id.
    pub fn dense(&self, h: &Tensor<2>) -> Vec<i64> {
        let options = SmallMOptions {
            f32_output: true,
            ..Default::default()
        };
        let logits = small_m_matmul(h.clone(), self.lm_head.clone(), options).expect("a product");
        let logits = wide(&values(logits));
        logits.chunks(self.rows.len()).map(first_largest).collect()
    }
}

/// The mean of the rows of a cluster.
pub fn mean(rows: &[Vec<f64>], assignments: &[u32], cluster: usize) -> Vec<f64> {
    let members: Vec<_> = rows
        .iter()
        .zip(assignments)
        .filter(|(_, of)| **of as usize == cluster)
        .map(|(row, _)| row)
        .collect();
    let sum = |column: usize| members.iter().map(|row| row[column]).sum::<f64>();
    let width = rows[0].len();
    (0..width)
        .map(|column| sum(column) / members.len() as f64)
        .collect()
}

/// The index of the largest number; NaN is none.
pub fn first_largest(values: &[f64]) -> i64 {
    let mut best = None;
    for (index, value) in values.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
        if best.is_none_or(|(_, most)| *value > most) {
            best = Some((index, *value));
        }
    }
    best.map_or(0, |(index, _)| index as i64)
}

/// The indices of the `count` highest scores, ascending, which must be clearly apart from the
/// others.
pub fn highest(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    if let Some(&next) = order.get(count) {
        let last = scores[order[count - 1]];
        assert!(last - scores[next] > MARGIN, "data without near ties");
    }
    order.truncate(count);
    order.sort_unstable();
    order
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
