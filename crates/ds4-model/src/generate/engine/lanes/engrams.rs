//! What a step reads of the tables of engrams, where the steps of a group of lanes find it.

use std::collections::BTreeMap;

use burn::tensor::{Int, Tensor};

use crate::cache::{Cache, Step};
use crate::generate::engine::recorder;
use crate::generate::engine::setup::Setup;
use crate::generate::error::GenerateError;

/// The rows of the tables for the tokens of a step, of each layer with an engram: `[lanes * (1 +
/// drafts), columns]`, of which a step that verifies fewer drafts reads the first. Always in the
/// same buffers, because they are part of recordings.
#[derive(Debug, Default)]
pub(super) struct EngramRows(BTreeMap<usize, Tensor<2>>);

impl EngramRows {
    /// Looks up what a step over these ids `[lanes, rows]` reads, which the host has to know: it
    /// waits for the step before.
    pub(super) fn stage(
        &mut self,
        setup: &Setup,
        ids: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<(), GenerateError> {
        recorder::note_launch();
        let [lanes, _] = ids.dims();
        let most = lanes * (1 + setup.config.drafts);
        let layers = 0..setup.model.layers.len();
        let found = setup.model.engram_rows(&ids, cache, &layers);
        for (layer, rows) in found.map_err(|error| setup.device_error(error))? {
            let [count, columns] = rows.dims();
            let held = self.0.remove(&layer);
            let held = held.filter(|held| held.dims() == [most, columns]);
            let held = held
                .unwrap_or_else(|| Tensor::zeros([most, columns], (&rows.device(), rows.dtype())));
            let held = held.slice_assign([0..count, 0..columns], rows);
            self.0.insert(layer, held);
        }
        Ok(())
    }

    /// Hands them to a step over so many tokens.
    pub(super) fn hand(&self, step: &Step, tokens: usize) {
        let own = self.0.iter();
        let own = own.map(|(layer, rows)| (*layer, rows.clone().narrow(0, 0, tokens)));
        step.handed().engrams.extend(own);
    }
}
