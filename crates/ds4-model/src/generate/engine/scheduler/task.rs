//! A text, as the scheduler knows it.

use super::Limits;
use super::plan::Place;
use crate::generate::request_id::RequestId;

/// The first length at which a prompt is marked within its first chunk; the next ones are twice as
/// long each.
const FIRST_MARK: usize = 512;
/// Tokens between the last mark of a prompt and the last of its tokens that are processed. Another
/// prompt may go on differently from the tokens that begin an answer.
const LAST_MARK: usize = 4;
/// Prompts that are so many times shorter than a chunk have no such mark: several of them take one
/// call, and one that begins alike takes one either way.
const UNMARKED: usize = 8;

/// A text that is added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewTask {
    pub(crate) id: RequestId,
    /// Texts of a higher one come first.
    pub(crate) priority: i64,
    /// Tokens of its prompt.
    pub(crate) prompt: usize,
    /// Tokens that it may have in the end.
    pub(crate) all: usize,
    /// The first of those texts that have the same prompt and came one after the other.
    pub(crate) like: RequestId,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) new: NewTask,
    /// Tokens so far.
    pub(super) tokens: usize,
    /// Those that the model has processed, before the text is decoded.
    pub(super) processed: usize,
    /// Its lane, from when its prompt begins.
    pub(super) place: Option<Place>,
    pub(super) is_decoded: bool,
    /// Whether it has too few pages for another step.
    pub(super) is_stuck: bool,
    /// Whether the devices had no memory for it. It asks for none until something is given back.
    pub(super) is_refused: bool,
    /// Whether they ever had none: from then on it asks for itself alone.
    pub(super) is_modest: bool,
}

impl Task {
    pub(super) fn new(new: NewTask) -> Self {
        Self {
            new,
            tokens: new.prompt,
            processed: 0,
            place: None,
            is_decoded: false,
            is_stuck: false,
            is_refused: false,
            is_modest: false,
        }
    }

    /// Tokens to be processed before the text is decoded.
    pub(super) fn last(&self) -> usize {
        self.tokens - 1
    }

    /// Pages that it begins with, besides the full ones of what is known of it.
    pub(super) fn pages(&self, known: usize, limits: &Limits) -> usize {
        let positions = self.tokens.saturating_add(limits.ahead);
        let positions = positions.min(self.new.all).min(limits.reach);
        let shared = if limits.shares { known } else { 0 };
        positions.div_ceil(limits.page) - shared / limits.page
    }

    /// Whether two texts have the same tokens.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let is_new = |task: &Self| task.tokens == task.new.prompt;
        self.new.like == other.new.like && is_new(self) && is_new(other)
    }
}

/// Where the chunk of a prompt ends that begins after `start` tokens, `last` of which are to be
/// processed; and whether the prompt is marked there.
///
/// Chunks end at multiples of their size, so that a text depends on nothing else that runs. Where
/// `between` says so, they end at marks, too: of instructions that others may share, and of the
/// prompt's end, from which the conversation may go on otherwise than by this answer.
pub(crate) fn chunk_end([start, last]: [usize; 2], size: usize, between: bool) -> (usize, bool) {
    let regular = start - start % size + size;
    let early = std::iter::successors(Some(FIRST_MARK), |length| length.checked_mul(2));
    let early = early.take_while(|length| *length < size);
    let end_mark = last.checked_sub(LAST_MARK);
    let between = early
        .chain(end_mark.filter(|_| last * UNMARKED > size))
        .filter(|length| between && *length > start)
        .min();
    let end = between.unwrap_or(last).min(regular).min(last);
    (end, end == regular || between == Some(end))
}
