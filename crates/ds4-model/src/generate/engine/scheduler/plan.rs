//! What a step of the engine does.

use crate::generate::request_id::RequestId;

/// A group of lanes. There are several where devices take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupId(pub(crate) usize);

/// A lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) group: GroupId,
    pub(crate) lane: usize,
}

/// What becomes of lanes and of those who have them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    /// Makes a group of so many lanes.
    Make(GroupId, usize),
    /// Makes these lanes of those of a group, in this order, `None` for a vacant one.
    Arrange(GroupId, Vec<Option<usize>>),
    /// Drops a group that nobody uses.
    Drop(GroupId),
    /// Takes a text's lane and pages, and what is known of it but its tokens, which wait to be
    /// processed again.
    Preempt(RequestId),
    /// Ends a text for which there is no memory: so many pages are missing, or with none of them,
    /// what else it takes.
    Fail {
        id: RequestId,
        pages: usize,
        from: Option<Place>,
    },
}

/// Tokens of a text that a call processes, before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: RequestId,
    pub(crate) place: Place,
    /// The sequence of the call that has the tokens. Texts of one prompt share it.
    pub(crate) sequence: usize,
    /// The first of them, and the one after the last.
    pub(crate) first: usize,
    pub(crate) end: usize,
    /// Whether the text can be continued from there by another.
    pub(crate) is_marked: bool,
    /// Whether it is decoded from then on, in this very step: its last token is what it begins
    /// with.
    pub(crate) enters: bool,
}

/// A forward call over tokens of prompts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Call {
    pub(crate) rows: Vec<Row>,
}

impl Call {
    /// Keeps some rows, and the sequences that they have.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&Row) -> bool) {
        self.rows.retain(is_kept);
        let mut sequences: Vec<usize> = self.rows.iter().map(|row| row.sequence).collect();
        sequences.dedup();
        for row in &mut self.rows {
            row.sequence = sequences.partition_point(|own| *own < row.sequence);
        }
    }

    /// Positions that the shortest sequence is padded by.
    pub(crate) fn padding(&self) -> usize {
        let shortest = self.rows.iter().map(|row| row.end - row.first).min();
        self.shape()[1] - shortest.unwrap_or(0)
    }

    /// Sequences, and positions of the longest.
    pub(crate) fn shape(&self) -> [usize; 2] {
        let sequences = self.rows.last().map_or(0, |row| row.sequence + 1);
        let counts = self.rows.iter().map(|row| row.end - row.first);
        [sequences, counts.max().unwrap_or(0)]
    }
}

/// What a step does, in this order, before the texts in lanes are
/// [decoded](super::Scheduler::decoded).
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    pub(crate) changes: Vec<Change>,
    pub(crate) calls: Vec<Call>,
}
