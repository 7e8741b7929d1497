//! Steps that decode texts.

use super::group::Group;
use super::lanes::Wanted;
use super::recorder;
use super::results::Outcome;
use super::scheduler::GroupId;
use super::state::Engine;
use super::text::Text;
use crate::generate::error::GenerateError;
use crate::generate::request_id::RequestId;

impl Engine<'_> {
    /// A step of one group.
    pub(super) fn decode(&mut self, id: GroupId) -> Result<(), GenerateError> {
        // Its lanes may have been refused.
        let Some(group) = self.groups.iter().find(|group| group.id == id) else {
            return Ok(());
        };
        let texts = || group.texts(&self.texts).map(|(_, text)| text);
        let Some(tokens) = texts().map(Text::wanted).max() else {
            return Ok(());
        };
        let drafts = texts().map(Text::useful_drafts).max().unwrap_or(0);
        let wanted = Wanted { tokens, drafts };
        let mut outcome = None;
        let (mut own, mut others): (Vec<_>, Vec<_>) =
            self.groups.iter_mut().partition(|group| group.id == id);
        let mut catch_up = || others.iter_mut().for_each(|group| group.lanes.catch_up());
        for group in &mut own {
            outcome = group.lanes.advance(&self.setup, wanted, &mut catch_up)?;
        }
        let Some(outcome) = outcome else {
            return self.start_over(id);
        };
        self.spoiled = None;
        self.take(id, &outcome)?;
        if self
            .group(id)
            .texts(&self.texts)
            .any(|(_, text)| text.ended)
        {
            self.settle(id)?;
        }
        Ok(())
    }

    /// Hands the tokens of a step to the texts of a group.
    pub(super) fn take(&mut self, id: GroupId, outcome: &Outcome) -> Result<(), GenerateError> {
        if outcome.has_failures() {
            // Devices that have waited in vain for others compute no numbers. Recordings of other
            // engines would go on like that.
            let checked = self.setup.model.check_group();
            checked.inspect_err(|_| recorder::forget_what_is_kept())?;
        }
        let model = self.setup.model.config();
        let longest = self.setup.config.longest(model);
        let index = self.index(id);
        let Group { lanes, texts, .. } = &mut self.groups[index];
        for (lane, id) in texts.iter().enumerate() {
            let text = id.and_then(|id| self.texts.get_mut(&id));
            let Some(text) = text.filter(|text| !text.ended) else {
                continue;
            };
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

    /// Counts all steps of a group that are ahead, and makes the lanes of texts vacant that have
    /// ended.
    pub(super) fn settle(&mut self, id: GroupId) -> Result<(), GenerateError> {
        let index = self.index(id);
        while let Some(outcome) = self.groups[index].lanes.drain(&self.setup)? {
            self.take(id, &outcome)?;
        }
        let mut is_any = false;
        let group = &mut self.groups[index];
        group.lanes.catch_up();
        for lane in 0..group.texts.len() {
            let has_ended = |id: &RequestId| self.texts.get(id).is_none_or(|text| text.ended);
            let Some(request) = group.texts[lane].filter(has_ended) else {
                continue;
            };
            self.scheduler.remove(request);
            if let Some(text) = self.texts.remove(&request) {
                self.prefixes.keep(&self.setup, text, &group.lanes, lane)?;
            }
            group.texts[lane] = None;
            group.settled().vacate(lane)?;
            is_any = true;
        }
        match is_any {
            true => self.refresh(id, &[]),
            false => Ok(()),
        }
    }

    /// Tells the lanes of a group what the next step has to do, and some of them, or all where that
    /// changes, how their tokens are chosen.
    pub(super) fn refresh(&mut self, id: GroupId, changed: &[usize]) -> Result<(), GenerateError> {
        let index = self.index(id);
        let group = &mut self.groups[index];
        let kind = group.kind(&self.setup, &self.texts);
        let texts = group.texts.clone();
        let mut lanes = group.settled();
        let all: Vec<usize> = (0..texts.len()).collect();
        let changed = match lanes.set_kind(&self.setup, kind) {
            true => &all,
            false => changed,
        };
        for &lane in changed {
            let text = texts[lane].and_then(|id| self.texts.get(&id));
            if let Some(text) = text {
                let params = text.request.sampling.lane_params();
                lanes.set_params(lane, &params, text.history())?;
            }
        }
        Ok(())
    }
}
