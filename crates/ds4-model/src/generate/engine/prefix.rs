//! Prompts and texts that are kept, so that others that begin alike continue from them.
//!
//! A kept text has the pages that it had in its lane, and those that go on from it share the full
//! ones. Window rows and raw projections are overwritten by later positions. So a text can be
//! continued from its end, and from each [mark](Mark): a copy of these rows, made where a chunk of
//! the prompt ended.

use super::lanes::Lanes;
use super::mark::{Mark, bytes_of};
use super::memory::if_fitting;
use super::setup::{Caches, Setup};
use super::text::Text;
use crate::generate::error::GenerateError;

#[derive(Debug)]
struct Prefix {
    /// Tokens that the caches have.
    tokens: Vec<u32>,
    caches: Caches,
    /// Shorter lengths, ascending.
    marks: Vec<Mark>,
    /// Those of its pages, whoever else has some of them, and of all else.
    bytes: usize,
}

/// The beginnings of texts, the least recently used first.
#[derive(Debug)]
pub(super) struct PrefixCache {
    prefixes: Vec<Prefix>,
    maximum: usize,
    exact: bool,
}

impl PrefixCache {
    pub(super) fn new(bytes: usize, exact: bool) -> Self {
        Self {
            prefixes: Vec::new(),
            maximum: bytes,
            exact,
        }
    }

    /// Whether anything is kept.
    pub(super) fn is_wanted(&self) -> bool {
        self.maximum > 0
    }

    /// Adds a mark to those of one of so many texts. The marks of all of them together take hardly
    /// more than what is kept: where there would be more, every other one goes.
    pub(super) fn add_mark(&self, marks: &mut Vec<Mark>, mark: Mark, texts: usize) {
        marks.push(mark);
        if bytes_of(marks) > self.maximum / texts {
            let mut is_kept = marks.len().is_multiple_of(2);
            marks.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
        }
    }

    /// Keeps a text that leaves its lane, in which no step is ahead, unless something went wrong
    /// with it.
    pub(super) fn keep(
        &mut self,
        setup: &Setup,
        mut text: Text,
        lanes: &Lanes,
        lane: usize,
    ) -> Result<(), GenerateError> {
        if !self.is_wanted() || text.failed {
            return Ok(());
        }
        // Tokens after the last one that was wanted are in the caches, too.
        let length = lanes.lengths()[lane].min(text.tokens.len() - 1);
        if length == 0 {
            return Ok(());
        }
        let bytes = setup.kept_bytes(length)?;
        let bytes = bytes.saturating_add(bytes_of(&text.marks));
        if bytes > self.maximum {
            return Ok(());
        }
        let Some(mut caches) = if_fitting(setup.new_caches([1, 0]))? else {
            return Ok(());
        };
        caches.adopt(0, (lanes.caches(), lane), &[length], true)?;
        text.tokens.truncate(length);
        self.prefixes
            .retain(|prefix| !text.tokens.starts_with(&prefix.tokens));
        self.prefixes.push(Prefix {
            tokens: text.tokens,
            caches,
            marks: text.marks,
            bytes,
        });
        self.evict();
        Ok(())
    }

    /// How many tokens of a prompt need not be processed, and which of the prefixes has them.
    fn best(&self, prompt: &[u32]) -> Option<(usize, usize)> {
        // A drafter's row depends on the token after it.
        let longest = |prefix: &Prefix| {
            let pairs = prompt.iter().zip(&prefix.tokens);
            let common = pairs.take_while(|(a, b)| a == b).count();
            common.min(prompt.len() - 1)
        };
        let reach = |prefix: &Prefix| {
            let common = longest(prefix);
            if !self.exact && common == prefix.tokens.len() {
                return common;
            }
            let marks = prefix.marks.iter().map(|mark| mark.length);
            marks.filter(|length| *length < common).max().unwrap_or(0)
        };
        let best = self.prefixes.iter().map(reach).enumerate();
        let best = best.max_by_key(|(_, length)| *length);
        best.filter(|(_, length)| *length > 0)
    }

    /// How many tokens of a prompt [`restore`](Self::restore) finds.
    pub(super) fn reach(&self, prompt: &[u32]) -> usize {
        self.best(prompt).map_or(0, |(_, length)| length)
    }

    /// Brings empty caches as far as possible towards a prompt, but for its last token. Returns the
    /// marks on the way.
    pub(super) fn restore(
        &mut self,
        prompt: &[u32],
        caches: &mut Caches,
    ) -> Result<Vec<Mark>, GenerateError> {
        let Some((index, length)) = self.best(prompt) else {
            return Ok(Vec::new());
        };
        caches.adopt(0, (&self.prefixes[index].caches, 0), &[length], false)?;
        let prefix = self.prefixes.remove(index);
        let marks = prefix.marks.iter();
        let marks: Vec<Mark> = marks
            .filter(|mark| mark.length <= length)
            .cloned()
            .collect();
        if length < prefix.tokens.len()
            && let Some(mark) = marks.last()
        {
            caches.return_to(mark);
        }
        // It is the most recently used one now.
        self.prefixes.push(prefix);
        Ok(marks)
    }

    /// Drops the least recently used one; `false` if there is none.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let is_any = !self.prefixes.is_empty();
        self.prefixes.drain(..usize::from(is_any));
        is_any
    }

    /// Drops all that is kept; `false` if there is nothing.
    pub(super) fn drop_all(&mut self) -> bool {
        let is_any = !self.prefixes.is_empty();
        self.prefixes.clear();
        is_any
    }

    /// Drops the least recently used ones until the others fit.
    fn evict(&mut self) {
        let mut bytes: usize = self.prefixes.iter().map(|prefix| prefix.bytes).sum();
        while bytes > self.maximum && !self.prefixes.is_empty() {
            bytes -= self.prefixes.remove(0).bytes;
        }
    }
}
