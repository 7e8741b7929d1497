//! Calls over tokens of prompts, after which their texts are in lanes.

use burn::tensor::{Distribution, Int, Tensor, TensorData};

use super::memory::if_fitting;
use super::prefix::PrefixCache;
use super::scheduler::{Call, GroupId, Row};
use super::setup::{Caches, Setup, upload};
use super::state::Engine;
use super::text::Text;
use crate::generate::error::GenerateError;

impl Engine<'_> {
    /// Processes tokens of prompts. Where a device has no memory for their caches, they wait.
    pub(super) fn process(&mut self, mut call: Call) -> Result<(), GenerateError> {
        // Memory may have been refused to a call before.
        let scheduler = &self.scheduler;
        call.retain(|row| scheduler.place(row.id).is_some());
        let Some(first) = call.rows.first().copied() else {
            return Ok(());
        };
        let [sequences, _] = call.shape();
        let caches = match sequences {
            1 => self.process_chunk(first)?,
            _ => self.process_together(&call)?,
        };
        let Some(caches) = caches else {
            self.scheduler.refuse_call(&call.rows);
            return Ok(());
        };
        let length = caches.trunk.lengths()[0];
        if sequences == 1 && length < first.first {
            // What was to be restored is gone. Chunks are planned anew from where it begins now.
            let rows = call.rows.iter();
            rows.for_each(|row| self.scheduler.put_back(row.id));
            return Ok(());
        }
        for row in &call.rows {
            if let Some(text) = self.texts.get_mut(&row.id) {
                text.processed = text.processed.max(row.end.min(text.prompt));
            }
        }
        if first.enters {
            return self.enter(&call.rows, caches);
        }
        if let Some(text) = self.texts.get_mut(&first.id) {
            text.caches = Some(caches);
        }
        Ok(())
    }

    /// Processes the next chunk of a text. Returns the caches that have it, or what is before it if
    /// that is not all there; `None` where there was no memory for any.
    fn process_chunk(&mut self, row: Row) -> Result<Option<Caches>, GenerateError> {
        let texts = self.texts.len().min(self.setup.config.lanes);
        let (setup, text) = (&self.setup, self.texts.get_mut(&row.id));
        let text = text.expect("the text of a row");
        let caches = match text.caches.take() {
            Some(caches) => Some(caches),
            None => if_fitting(begin(setup, &mut self.prefixes, text, row.first))?,
        };
        let Some(mut caches) = caches else {
            return Ok(None);
        };
        let (start, end) = (caches.trunk.lengths()[0], row.end);
        if start >= row.first && start < end {
            self.prompt_calls += 1;
            forward(setup, &mut caches, &[&text.tokens[start..=end]])?;
            if self.prefixes.is_wanted() && row.is_marked {
                self.prefixes
                    .add_mark(&mut text.marks, caches.mark(), texts);
            }
        }
        Ok(Some(caches))
    }

    /// Processes whole prompts side by side.
    fn process_together(&mut self, call: &Call) -> Result<Option<Caches>, GenerateError> {
        let [_, width] = call.shape();
        let mut rows: Vec<Row> = call.rows.clone();
        rows.dedup_by_key(|row| row.sequence);
        let caches = self.setup.new_caches([rows.len(), call.padding()]);
        let caches = caches.and_then(|mut caches| {
            for (sequence, row) in rows.iter().enumerate() {
                let text = &self.texts[&row.id];
                let needed = self.setup.needed(text.tokens.len(), text.most_tokens());
                caches.provide(sequence, needed)?;
            }
            Ok(caches)
        });
        let Some(mut caches) = if_fitting(caches)? else {
            return Ok(None);
        };
        if width > 0 {
            self.prompt_calls += 1;
            let tokens = rows.iter().map(|row| &self.texts[&row.id].tokens[..]);
            let tokens: Vec<&[u32]> = tokens.collect();
            forward(&self.setup, &mut caches, &tokens)?;
        }
        Ok(Some(caches))
    }

    /// Gives texts their lanes, whose sequences caches have. The last text of a sequence gets its
    /// pages as they are; others that go on from there share those that are full.
    fn enter(&mut self, rows: &[Row], caches: Caches) -> Result<(), GenerateError> {
        let is_last = |row: &Row| {
            let mut later = rows.iter().rev();
            let last = later.find(|other| other.sequence == row.sequence);
            last.is_some_and(|last| last.id == row.id)
        };
        let mut groups: Vec<GroupId> = rows.iter().map(|row| row.place.group).collect();
        groups.sort();
        groups.dedup();
        for id in groups {
            self.settle(id)?;
            let own = rows.iter().filter(|row| row.place.group == id);
            let own: Vec<(usize, Row)> = own.map(|row| (row.place.lane, *row)).collect();
            let group = self.groups.iter_mut().find(|own| own.id == id);
            let group = group.expect("that of a place");
            let follows = |a: &(usize, Row), b: &(usize, Row)| {
                (a.0 + 1, a.1.sequence + 1) == (b.0, b.1.sequence) && is_last(&a.1) == is_last(&b.1)
            };
            for run in own.chunk_by(follows) {
                let lengths: Vec<usize> = run.iter().map(|(_, row)| row.end).collect();
                let (lane, first) = run[0];
                let source = (&caches, first.sequence);
                let mut lanes = group.settled();
                lanes.adopt(lane, source, &lengths, is_last(&first))?;
            }
            for (lane, row) in &own {
                let text = self.texts.get_mut(&row.id).expect("the text of a row");
                let last = text.tokens.last().map(|token| *token as i32);
                let no_drafts = std::iter::repeat_n(-1, self.setup.config.drafts);
                let inputs = upload(last.into_iter().chain(no_drafts), self.setup.device());
                text.processed = text.prompt;
                (text.drafts, text.dropped, text.last_row) = (0, 0, None);
                group.settled().enter(*lane, inputs, text.constraint.take());
                group.texts[*lane] = Some(row.id);
            }
            let lanes: Vec<usize> = own.iter().map(|(lane, _)| *lane).collect();
            self.refresh(id, &lanes)?;
        }
        Ok(())
    }
}

/// Makes caches for a text, with as much of it as is known. If that is as much as is planned for,
/// they have the pages for all of it.
fn begin(
    setup: &Setup,
    prefixes: &mut PrefixCache,
    text: &mut Text,
    planned: usize,
) -> Result<Caches, GenerateError> {
    let mut caches = setup.new_caches([1, 0])?;
    let needed = setup.needed(text.tokens.len(), text.most_tokens());
    if let Some(processed) = setup.random_contexts {
        caches.provide(0, needed)?;
        let drawn = (text.tokens.len() - 1).saturating_sub(processed);
        for cache in caches.both_mut().filter(|_| drawn > 0) {
            let normal = Distribution::Normal(0.0, 1.0);
            cache.fill_random(drawn, normal)?;
        }
    } else {
        // What it has generated is not kept by chunks.
        let prompt = &text.tokens[..text.prompt];
        text.marks = prefixes.restore(prompt, &mut caches)?;
        if text.tokens.len() == text.prompt {
            text.cached = caches.trunk.lengths()[0];
        }
        if caches.trunk.lengths()[0] >= planned {
            caches.provide(0, needed)?;
        }
    }
    Ok(caches)
}

/// Runs texts through the model, each but for its last token, which the drafter sees only. Shorter
/// ones are followed by anything.
fn forward(setup: &Setup, caches: &mut Caches, texts: &[&[u32]]) -> Result<(), GenerateError> {
    let longest = texts.iter().map(|tokens| tokens.len() - 1).max();
    let width = longest.unwrap_or(0);
    let ids = |first: usize, device| {
        let rows = texts.iter().flat_map(|tokens| {
            let own = tokens[first..].iter().map(|id| *id as i32);
            own.chain(std::iter::repeat(0)).take(width)
        });
        let rows = TensorData::new(rows.collect(), [texts.len(), width]);
        Tensor::<2, Int>::from_data(rows, device)
    };
    let features = setup.forward(ids(0, setup.first_device()), &mut caches.trunk)?;
    if let (Some(drafter), Some(cache)) = (&setup.drafter, &mut caches.draft) {
        drafter.observe(features, ids(1, setup.device()), cache)?;
    }
    Ok(())
}
