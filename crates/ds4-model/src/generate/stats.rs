//! How many drafts are accepted.

/// Drafts made and accepted at one position of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PositionStats {
    /// Steps that drafted at this position.
    pub drafted: usize,
    /// Steps in which the draft at this position was accepted.
    pub accepted: usize,
}

/// Counts over the steps of speculative decoding.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SpeculativeStats {
    /// Steps of texts that had drafts to verify, or could have had.
    pub steps: usize,
    /// Drafts made.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// Drafts that were dropped, because no logit of the drafter was a number above `-inf`, and
    /// those after them: a sign of damaged weights. They do not count as made.
    pub dropped: usize,
    /// Those made and accepted by position in the step, the first draft first.
    pub per_position: Vec<PositionStats>,
}

impl SpeculativeStats {
    /// Counts one step in which the first `accepted` of `drafted` drafts were accepted.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        let accepted = accepted.min(drafted);
        self.steps += 1;
        self.drafted += drafted;
        self.accepted += accepted;
        if self.per_position.len() < drafted {
            self.per_position.resize(drafted, PositionStats::default());
        }
        for (position, stats) in self.per_position[..drafted].iter_mut().enumerate() {
            stats.drafted += 1;
            stats.accepted += usize::from(position < accepted);
        }
    }

    /// Fraction of the drafts that were accepted, 0 where none were made.
    pub fn acceptance(&self) -> f64 {
        if self.drafted == 0 {
            0.0
        } else {
            self.accepted as f64 / self.drafted as f64
        }
    }
}
