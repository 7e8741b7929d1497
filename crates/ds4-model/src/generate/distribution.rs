//! Sparse probability distributions over token ids.

use super::error::GenerateError;

/// A probability distribution over token ids: the ids that can occur, in ascending order, with their probabilities.
///
/// Probabilities are positive and sum to 1 (up to `f64` rounding); an id that is not listed has probability 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    ids: Vec<u32>,
    probabilities: Vec<f64>,
}

impl Distribution {
    /// All mass on one token.
    pub fn one_hot(id: u32) -> Self {
        Self {
            ids: vec![id],
            probabilities: vec![1.0],
        }
    }

    /// The distribution proportional to non-negative weights; weights of 0 are dropped.
    ///
    /// # Errors
    /// [`GenerateError::Distribution`] for a weight that is negative or not finite, an id that occurs twice, or weights
    /// whose sum is 0 or not finite.
    pub fn from_weights(
        weights: impl IntoIterator<Item = (u32, f64)>,
    ) -> Result<Self, GenerateError> {
        let mut entries = Vec::new();
        for (id, weight) in weights {
            if !(weight.is_finite() && weight >= 0.0) {
                let reason = format!("the weight of token {id} is {weight}");
                return Err(GenerateError::Distribution { reason });
            }
            entries.push((id, weight));
        }
        entries.sort_unstable_by_key(|entry| entry.0);
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let reason = format!("token {} occurs twice", pair[0].0);
            return Err(GenerateError::Distribution { reason });
        }
        let total = total(&entries);
        Self::normalised(entries).ok_or_else(|| GenerateError::Distribution {
            reason: format!("the weights sum to {total}"),
        })
    }

    /// Normalises ascending entries with non-negative finite weights; `None` where there is no mass to normalise.
    pub(super) fn normalised(entries: Vec<(u32, f64)>) -> Option<Self> {
        let total = total(&entries);
        if !(total > 0.0 && total.is_finite()) {
            return None;
        }
        // A quotient may underflow although its weight was positive; such a token could never be drawn.
        let (ids, probabilities) = entries
            .into_iter()
            .map(|(id, weight)| (id, weight / total))
            .filter(|entry| entry.1 > 0.0)
            .unzip();
        Some(Self { ids, probabilities })
    }

    /// The ids that can occur, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The probabilities of [`ids`](Self::ids), in the same order.
    pub fn probabilities(&self) -> &[f64] {
        &self.probabilities
    }

    /// Ids with their probabilities, ids ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        self.ids
            .iter()
            .copied()
            .zip(self.probabilities.iter().copied())
    }

    /// Probability of one id, 0 where it cannot occur.
    pub fn probability(&self, id: u32) -> f64 {
        self.ids
            .binary_search(&id)
            .map_or(0.0, |index| self.probabilities[index])
    }

    /// The most probable id; of equally probable ones the lowest.
    pub fn argmax(&self) -> u32 {
        let mut best = (self.ids[0], self.probabilities[0]);
        for (id, probability) in self.iter() {
            if probability > best.1 {
                best = (id, probability);
            }
        }
        best.0
    }

    /// The id at cumulative probability `u`, for `u` in `[0, 1)`.
    pub(super) fn quantile(&self, u: f64) -> u32 {
        let mut remaining = u;
        for (id, probability) in self.iter() {
            remaining -= probability;
            if remaining < 0.0 {
                return id;
            }
        }
        // The probabilities may sum to a little less than 1.
        self.ids[self.ids.len() - 1]
    }

    /// This distribution with one id removed, renormalised; `None` where nothing else can occur.
    pub(super) fn without(&self, id: u32) -> Option<Self> {
        Self::normalised(self.iter().filter(|entry| entry.0 != id).collect())
    }

    /// `max(self - other, 0)`, renormalised; `None` where `other` covers all of it.
    pub(super) fn residual(&self, other: &Self) -> Option<Self> {
        Self::normalised(
            self.iter()
                .map(|(id, p)| (id, (p - other.probability(id)).max(0.0)))
                .collect(),
        )
    }
}

fn total(entries: &[(u32, f64)]) -> f64 {
    entries.iter().fold(0.0, |sum, entry| sum + entry.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quarters() -> Distribution {
        Distribution::from_weights([(9, 1.0), (2, 2.0), (4, 1.0)]).unwrap()
    }

    #[test]
    fn weights_become_probabilities_in_ascending_order_of_ids() {
        assert_eq!(quarters().ids(), [2, 4, 9]);
        assert_eq!(quarters().probabilities(), [0.5, 0.25, 0.25]);
        assert_eq!(quarters().probability(9), 0.25);
        assert_eq!(quarters().probability(3), 0.0);
    }

    #[test]
    fn zero_weights_are_dropped() {
        let distribution = Distribution::from_weights([(1, 0.0), (5, 3.0)]).unwrap();
        assert_eq!(distribution, Distribution::one_hot(5));
    }

    #[test]
    fn argmax_prefers_the_lower_id_of_a_tie() {
        let distribution = Distribution::from_weights([(7, 1.0), (3, 1.0), (1, 0.5)]).unwrap();
        assert_eq!(distribution.argmax(), 3);
    }

    #[test]
    fn quantiles_split_the_unit_interval_at_the_cumulative_probabilities() {
        let expected = [
            (0.0, 2),
            (0.49, 2),
            (0.5, 4),
            (0.74, 4),
            (0.75, 9),
            (0.999_999, 9),
        ];
        for (u, id) in expected {
            assert_eq!(quarters().quantile(u), id, "u = {u}");
        }
    }

    #[test]
    fn a_quantile_past_the_rounded_sum_is_the_last_id() {
        let distribution = Distribution {
            ids: vec![3, 8],
            probabilities: vec![0.4, 0.5],
        };
        assert_eq!(distribution.quantile(0.95), 8);
    }

    #[test]
    fn removing_an_id_leaves_the_others_in_proportion() {
        let rest = quarters().without(4).unwrap();
        assert_eq!(rest.ids(), [2, 9]);
        assert!((rest.probability(2) - 2.0 / 3.0).abs() < 1e-15);
        assert_eq!(Distribution::one_hot(6).without(6), None);
    }

    #[test]
    fn the_residual_keeps_what_the_proposal_does_not_cover() {
        let proposal = Distribution::from_weights([(2, 1.0), (4, 3.0)]).unwrap();
        let residual = quarters().residual(&proposal).unwrap();
        assert_eq!(residual.ids(), [2, 9]);
        assert_eq!(residual.probabilities(), [0.5, 0.5]);
        assert_eq!(quarters().residual(&quarters()), None);
    }

    #[test]
    fn bad_weights_are_named() {
        let bad: [(&[(u32, f64)], &str); 6] = [
            (&[], "sum to 0"),
            (&[(1, 0.0)], "sum to 0"),
            (&[(1, -0.5)], "token 1 is -0.5"),
            (&[(1, f64::NAN)], "token 1 is NaN"),
            (&[(1, f64::MAX), (2, f64::MAX)], "sum to inf"),
            (&[(4, 1.0), (4, 1.0)], "token 4 occurs twice"),
        ];
        for (weights, expected) in bad {
            let message = Distribution::from_weights(weights.iter().copied())
                .unwrap_err()
                .to_string();
            assert!(message.contains(expected), "{weights:?}: {message}");
        }
    }
}
