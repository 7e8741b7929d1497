//! What the layers of a step hand on to later ones.

use std::collections::BTreeMap;

use burn::tensor::{Bool, Int, Tensor};

use super::layer::CompressedCache;

/// The complete compressed rows that a query attends to.
#[derive(Clone, Debug)]
pub(crate) enum PickedRows {
    /// All of them.
    All,
    /// Those that this mask leaves visible: f32 `[batch, positions, rows]`.
    Masked(Tensor<3>),
    /// The rows with these indices: `[batch, positions, picks]`.
    Some(Tensor<3, Int>),
}

impl PickedRows {
    /// The indices of the rows, if they are some.
    pub(crate) fn ids(self) -> Option<Tensor<3, Int>> {
        match self {
            Self::Some(picks) => Some(picks),
            Self::All | Self::Masked(_) => None,
        }
    }
}

/// Compressed rows that several layers read, and the keys of their indexers.
#[derive(Clone, Debug)]
pub(crate) struct SharedCaches {
    pub(crate) rows: CompressedCache,
    pub(crate) keys: CompressedCache,
}

/// What layers of a step have handed on, by their numbers. It goes with the step, before the rows
/// are written again.
#[derive(Debug, Default)]
pub(crate) struct StepState {
    pub(crate) rows: BTreeMap<usize, SharedCaches>,
    pub(crate) picks: BTreeMap<usize, PickedRows>,
    /// The blocks of rows that indexers may pick in, `[batch * positions, blocks]`, if not all.
    pub(crate) candidates: Option<Tensor<2, Bool>>,
    /// What the tables of engrams have for the new positions: `[batch * positions, columns]`.
    pub(crate) engrams: BTreeMap<usize, Tensor<2>>,
}
