//! Steps that decode texts.

use std::ops::Range;

use super::group::Group;
use super::lanes::Wanted;
use super::recorder;
use super::results::Outcome;
use super::state::Engine;
use super::text::Text;
use crate::generate::error::GenerateError;

impl Engine<'_> {
    /// A step of one group.
    pub(super) fn decode(&mut self, group: usize) -> Result<(), GenerateError> {
        let texts = || self.groups[group].texts();
        let Some(tokens) = texts().map(Text::wanted).max() else {
            return Ok(());
        };
        let drafts = texts().map(Text::useful_drafts).max().unwrap_or(0);
        let wanted = Wanted { tokens, drafts };
        let (before, rest) = self.groups.split_at_mut(group);
        let Some((own, after)) = rest.split_first_mut() else {
            return Ok(());
        };
        let mut others = || {
            let others = before.iter_mut().chain(after.iter_mut());
            others.for_each(|group| group.lanes.catch_up());
        };
        let outcome = own.lanes.advance(&self.setup, wanted, &mut others)?;
        self.take(group, &outcome)?;
        if self.groups[group].texts().any(|text| text.ended) {
            self.settle(group)?;
            self.vacate_ended(group)?;
        }
        Ok(())
    }

    /// Hands the tokens of a step to the texts of a group.
    pub(super) fn take(&mut self, group: usize, outcome: &Outcome) -> Result<(), GenerateError> {
        if outcome.has_failures() {
            // Devices that have waited in vain for others compute no numbers. Recordings of other
            // engines would go on like that.
            let checked = self.setup.model.check_group();
            checked.inspect_err(|_| recorder::forget_what_is_kept())?;
        }
        let model = self.setup.model.config();
        let longest = self.setup.config.longest(model);
        let Group { lanes, texts, .. } = &mut self.groups[group];
        let texts = texts.iter_mut().enumerate();
        for (lane, text) in texts.filter_map(|(lane, text)| Some((lane, text.as_mut()?))) {
            if text.ended {
                continue;
            }
            // The first step of a text has no drafts.
            let has_drafts = self.setup.drafter.is_some() && text.tokens.len() > text.prompt;
            let most = outcome.drafts.min(text.wanted().saturating_sub(1));
            let mut drafts = text.drafts.min(most);
            let mut dropped = text.dropped.min(most - drafts);
            (text.drafts, text.dropped) = outcome.drafted(lane);
            text.last_row = Some(outcome.accepted(lane));
            for (index, token) in outcome.tokens(lane).iter().enumerate() {
                let log_probs = || outcome.log_probs(lane, index);
                let failure = lanes.constraint_failure(lane).filter(|_| *token < 0);
                self.outputs.push(match failure {
                    Some(reason) => text.fail(GenerateError::Constraint {
                        reason: reason.to_owned(),
                    }),
                    None => text.push(*token, log_probs, model, longest),
                });
                if text.ended {
                    // The drafts after it count for nothing.
                    if index < outcome.accepted(lane) {
                        (drafts, dropped) = (drafts.min(index), 0);
                    }
                    break;
                }
            }
            if has_drafts {
                let accepted = outcome.accepted(lane).min(drafts);
                self.stats.record(drafts, accepted);
                if let Some(drafter) = self.setup.drafter.as_ref().filter(|_| dropped > 0) {
                    if self.stats.dropped == 0 {
                        let name = drafter.name();
                        log::warn!("{name} has no numbers to draft by: its drafts are dropped");
                    }
                    self.stats.dropped += dropped;
                }
            }
        }
        Ok(())
    }

    /// Counts all steps of a group that are ahead.
    pub(super) fn settle(&mut self, group: usize) -> Result<(), GenerateError> {
        while let Some(outcome) = self.groups[group].lanes.drain(&self.setup)? {
            self.take(group, &outcome)?;
        }
        self.groups[group].lanes.catch_up();
        Ok(())
    }

    /// Makes the lanes of texts that have ended vacant. No step may be ahead.
    pub(super) fn vacate_ended(&mut self, group: usize) -> Result<(), GenerateError> {
        let Group { lanes, texts, .. } = &mut self.groups[group];
        for (lane, place) in texts.iter_mut().enumerate() {
            let Some(text) = place.take_if(|text| text.ended) else {
                continue;
            };
            self.prefixes.keep(&self.setup, text, lanes, lane)?;
            lanes.vacate(lane)?;
        }
        self.refresh(group, 0..0)
    }

    /// Tells the lanes of a group what the next step has to do, and some of them, or all where that
    /// changes, how their tokens are chosen. No step may be ahead.
    pub(super) fn refresh(
        &mut self,
        group: usize,
        changed: Range<usize>,
    ) -> Result<(), GenerateError> {
        let group = &mut self.groups[group];
        let kind = group.kind(&self.setup);
        let Group { lanes, texts, .. } = group;
        let changed = match lanes.set_kind(&self.setup, kind) {
            true => 0..texts.len(),
            false => changed,
        };
        for lane in changed {
            if let Some(text) = &texts[lane] {
                let params = text.request.sampling.lane_params();
                lanes.set_params(lane, &params, text.history())?;
            }
        }
        Ok(())
    }
}
