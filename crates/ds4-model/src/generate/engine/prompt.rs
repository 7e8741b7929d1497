//! Prompts on their way into a lane.

use std::ops::Range;

use burn::tensor::Distribution;

use super::prefix::PrefixCache;
use super::setup::{Caches, Setup, upload};
use super::text::Text;
use crate::generate::error::GenerateError;

/// A text whose prompt is processed in chunks, in caches of its own.
///
/// A chunk ends where the next multiple of the chunk's size begins, so that a text depends on
/// nothing else that runs. The last token is left for the text's first step.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) text: Text,
    /// `None` before it begins.
    caches: Option<Caches>,
}

impl Prompt {
    pub(super) fn new(text: Text) -> Self {
        Self { text, caches: None }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.caches.is_some()
    }

    /// Tokens that the model has processed.
    pub(super) fn processed(&self) -> usize {
        let caches = self.caches.as_ref();
        caches.map_or(0, |caches| caches.trunk.lengths()[0])
    }

    /// Bytes of its caches.
    pub(super) fn bytes(&self) -> usize {
        self.caches.as_ref().map_or(0, Caches::bytes)
    }

    /// Makes caches, with as much of the prompt as is known.
    pub(super) fn begin(
        &mut self,
        setup: &Setup,
        prefixes: &mut PrefixCache,
    ) -> Result<(), GenerateError> {
        let mut caches = setup.new_caches(1, self.text.tokens.len())?;
        if setup.random_contexts {
            for cache in caches.both_mut() {
                let normal = Distribution::Normal(0.0, 1.0);
                cache.fill_random(self.text.tokens.len() - 1, normal)?;
            }
        } else {
            self.text.marks = prefixes.restore(&self.text.tokens, &mut caches)?;
        }
        self.caches = Some(caches);
        Ok(())
    }

    /// Tokens of the next chunk; 0 once there is none left.
    pub(super) fn next_chunk(&self, size: usize) -> usize {
        let (start, last) = (self.processed(), self.text.tokens.len() - 1);
        (size - start % size).min(last - start)
    }

    /// Processes the next chunk; `true` once there is none left.
    pub(super) fn process_chunk(
        &mut self,
        setup: &Setup,
        prefixes: &PrefixCache,
    ) -> Result<bool, GenerateError> {
        let size = setup.config.prefill_chunk;
        let (start, count) = (self.processed(), self.next_chunk(size));
        let (end, tokens) = (start + count, &self.text.tokens);
        let caches = self.caches.as_mut().expect("it has begun");
        if start < end {
            let ids = |range: Range<usize>, device| {
                let ids = tokens[range].iter().map(|id| *id as i32);
                upload(ids, device)
            };
            let features =
                setup.forward(ids(start..end, setup.first_device()), &mut caches.trunk)?;
            if let (Some(drafter), Some(cache)) = (&setup.drafter, &mut caches.draft) {
                let next = ids(start + 1..end + 1, setup.device());
                drafter.observe(features, next, cache)?;
            }
            if prefixes.is_wanted() && end % size == 0 {
                let (marks, lanes) = (&mut self.text.marks, setup.config.lanes);
                prefixes.add_mark(marks, caches.mark(), lanes);
            }
        }
        Ok(end == tokens.len() - 1)
    }

    /// The text, and the caches of all but its last token.
    pub(super) fn end(self) -> (Text, Caches) {
        (self.text, self.caches.expect("it has begun"))
    }
}
