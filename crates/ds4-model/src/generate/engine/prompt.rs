//! Prompts on their way into a lane.

use std::ops::Range;

use burn::tensor::Distribution;

use super::prefix::PrefixCache;
use super::setup::{Caches, Setup, upload};
use super::text::Text;
use crate::generate::error::GenerateError;

/// The first length at which a prompt is marked within its first chunk; the next ones are twice as
/// long each.
const FIRST_MARK: usize = 512;
/// Tokens between the last mark of a prompt and the last of its tokens that are processed. Another
/// prompt may go on differently from the tokens that begin an answer.
const LAST_MARK: usize = 4;

/// A text whose prompt is processed in chunks, in caches of its own.
///
/// A chunk ends where the next multiple of the chunk's size begins, so that a text depends on
/// nothing else that runs. The last token is left for the text's first step.
///
/// What is kept of prompts is of use to others only up to a mark. Unless texts have to be the same
/// to the bit, chunks end at marks of instructions that others may share, and of the prompt's end,
/// from which the conversation may go on otherwise than by this answer.
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
            self.text.cached = caches.trunk.lengths()[0];
        }
        self.caches = Some(caches);
        Ok(())
    }

    /// Tokens of the next chunk; 0 once there is none left.
    pub(super) fn next_chunk(&self, size: usize, prefixes: &PrefixCache) -> usize {
        self.next_end(size, prefixes).0 - self.processed()
    }

    /// Where the next chunk ends, and whether the prompt is marked there.
    fn next_end(&self, size: usize, prefixes: &PrefixCache) -> (usize, bool) {
        let (start, last) = (self.processed(), self.text.tokens.len() - 1);
        let regular = start - start % size + size;
        let early = std::iter::successors(Some(FIRST_MARK), |length| length.checked_mul(2));
        let early = early.take_while(|length| *length < size);
        let between = early.chain(last.checked_sub(LAST_MARK));
        let between = between.filter(|length| prefixes.has_marks_between() && *length > start);
        let between = between.min();
        let end = between.unwrap_or(last).min(regular).min(last);
        let is_marked = prefixes.is_wanted() && (end == regular || between == Some(end));
        (end, is_marked)
    }

    /// Processes the next chunk; `true` once there is none left.
    pub(super) fn process_chunk(
        &mut self,
        setup: &Setup,
        prefixes: &PrefixCache,
    ) -> Result<bool, GenerateError> {
        let size = setup.config.prefill_chunk;
        let (start, (end, is_marked)) = (self.processed(), self.next_end(size, prefixes));
        let tokens = &self.text.tokens;
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
            if is_marked {
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
