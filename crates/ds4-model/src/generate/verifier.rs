//! Speculative verification: which drafts stand, and the token that follows them.
//!
//! The rule of Leviathan et al. and Chen et al.: a draft `d` that was drawn from `q` stands with probability
//! `min(1, p(d) / q(d))`; at the first draft that falls, the token is drawn from `max(p - q, 0)`, renormalised. Each token
//! is then distributed exactly as `p`. A deterministic draft, such as the argmax of a multi-token-prediction head, is
//! the case of a one-hot `q`: it stands with probability `p(d)`, and falls to `p` without `d`.

use super::distribution::Distribution;
use super::error::GenerateError;
use super::sampler::Sampler;

/// The outcome of one round of verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Number of drafts that stand.
    pub accepted: usize,
    /// The accepted drafts and one token more: the correction of the first draft that fell or, where all stand, the token
    /// after the last.
    pub tokens: Vec<u32>,
}

/// Verifies deterministic drafts, as [`verify_with_proposals`] does with one-hot proposals.
///
/// Drafts that were sampled may be verified like this too: the target distribution is kept whatever the drafts are, but
/// fewer of them stand than with their proposals.
///
/// # Errors
/// Those of `targets`.
pub fn verify<E>(
    drafts: &[u32],
    targets: impl FnMut(usize, &[u32]) -> Result<Distribution, E>,
    sampler: &mut Sampler,
) -> Result<Verdict, E> {
    judge(drafts, |_| None, targets, sampler)
}

/// Verifies drafts against the target distributions.
///
/// `proposals` holds, for each draft, the distribution it was drawn from, or `None` for a deterministic draft. A draft that
/// its own proposal gives no probability falls.
///
/// `targets(i, accepted)` returns the target distribution of the token that follows the first `i` drafts, which are
/// `accepted`: drafts behind the first that falls never reach it. It is called in order, at most once for each `i` up to
/// the number of drafts.
///
/// # Errors
/// [`GenerateError::ProposalCount`] unless there is one entry of `proposals` per draft, and those of `targets`.
pub fn verify_with_proposals<E: From<GenerateError>>(
    drafts: &[u32],
    proposals: &[Option<Distribution>],
    targets: impl FnMut(usize, &[u32]) -> Result<Distribution, E>,
    sampler: &mut Sampler,
) -> Result<Verdict, E> {
    if drafts.len() != proposals.len() {
        return Err(GenerateError::ProposalCount {
            drafts: drafts.len(),
            proposals: proposals.len(),
        }
        .into());
    }
    judge(drafts, |index| proposals[index].as_ref(), targets, sampler)
}

fn judge<'a, E>(
    drafts: &[u32],
    proposal: impl Fn(usize) -> Option<&'a Distribution>,
    mut targets: impl FnMut(usize, &[u32]) -> Result<Distribution, E>,
    sampler: &mut Sampler,
) -> Result<Verdict, E> {
    for (accepted, &draft) in drafts.iter().enumerate() {
        let target = targets(accepted, &drafts[..accepted])?;
        let proposal = proposal(accepted);
        let drafted = proposal.map_or(1.0, |q| q.probability(draft));
        // Strict, so that u = 0 does not accept a draft that the target excludes.
        if sampler.uniform() * drafted < target.probability(draft) && drafted > 0.0 {
            continue;
        }
        let residual = match proposal {
            Some(proposal) => target.residual(proposal),
            None => target.without(draft),
        };
        // A residual is empty only where rounding alone separates target and proposal.
        let token = sampler.sample(residual.as_ref().unwrap_or(&target));
        return Ok(verdict(&drafts[..accepted], token));
    }
    let token = sampler.sample(&targets(drafts.len(), drafts)?);
    Ok(verdict(drafts, token))
}

fn verdict(accepted: &[u32], token: u32) -> Verdict {
    Verdict {
        accepted: accepted.len(),
        tokens: accepted.iter().copied().chain([token]).collect(),
    }
}

/// Drafts made and accepted at one position of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PositionStats {
    /// Rounds that drafted at this position.
    pub drafted: usize,
    /// Rounds in which the draft at this position was accepted.
    pub accepted: usize,
}

/// Counts over the rounds of speculative decoding.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SpeculativeStats {
    /// Rounds of verification.
    pub rounds: usize,
    /// Drafts made.
    pub drafted: usize,
    /// Drafts accepted.
    pub accepted: usize,
    /// The same by position in the round, the first draft first.
    pub per_position: Vec<PositionStats>,
}

impl SpeculativeStats {
    /// Counts one round in which the first `accepted` of `drafted` drafts were accepted.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        let accepted = accepted.min(drafted);
        self.rounds += 1;
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

    /// Share of the drafts that were accepted, 0 where none were made.
    pub fn acceptance(&self) -> f64 {
        if self.drafted == 0 {
            0.0
        } else {
            self.accepted as f64 / self.drafted as f64
        }
    }
}

#[cfg(test)]
#[path = "verifier_tests.rs"]
mod tests;
