//! From token ids to rows of tables.

use std::collections::BTreeMap;

use super::hash::EngramHash;
use super::ids::EngramIds;
use crate::config::EngramParams;

/// By which ids and hashes the engrams of a model read their tables.
#[derive(Clone, Debug)]
pub struct EngramLookup {
    ids: EngramIds,
    /// Of each layer with an engram.
    hashes: Vec<(usize, EngramHash)>,
}

impl EngramLookup {
    /// That of a model with these ids, one for each of its tokens.
    ///
    /// # Panics
    ///
    /// If there are no ids for all tokens.
    pub fn new(params: &EngramParams, ids: EngramIds) -> Self {
        let pad = ids.id(params.pad_token_id);
        let hashes = params.layers.iter().enumerate();
        let hashes = hashes.map(|(index, layer)| (*layer, EngramHash::new(params, index, pad)));
        Self {
            hashes: hashes.collect(),
            ids,
        }
    }

    /// The ids of tokens.
    pub(crate) fn ids<'t>(&'t self, tokens: &'t [u32]) -> impl Iterator<Item = u32> + 't {
        tokens.iter().map(|token| self.ids.id(*token))
    }

    /// The rows that each layer reads at the newest `count` ids of a text, which are put behind its
    /// `rows`.
    pub(crate) fn extend(&self, rows: &mut BTreeMap<usize, Vec<u64>>, ids: &[u32], count: usize) {
        for (layer, hash) in &self.hashes {
            let new = ids.len() - count..ids.len();
            let new = new.flat_map(|at| hash.rows(ids, at));
            rows.entry(*layer).or_default().extend(new);
        }
    }
}
