//! What the layers of a step read of the tables of engrams.

use std::collections::BTreeMap;

use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use super::modules::Model;
use crate::cache::{Cache, Step};

impl Model {
    /// Hands the layers of a step on what their tables have for its token ids `[batch,
    /// positions]`, which are read back to the host.
    ///
    /// # Panics
    ///
    /// If the model has engrams and no [lookup](Model::engrams).
    pub(crate) fn look_up_engrams(&self, ids: &Tensor<2, Int>, step: &Step, cache: &mut Cache) {
        if self.config.engram.is_none() {
            return;
        }
        let lookup = self
            .engrams
            .as_ref()
            .expect("a model with engrams has its lookup");
        let [batch, count] = ids.dims();
        let (device, dtype) = (ids.device(), FloatDType::from(self.embedding.val().dtype()));
        let tokens: Vec<u32> = ids.to_data().iter().collect();
        let mut rows = BTreeMap::new();
        // The host may count positions that were taken back since.
        let lengths: Vec<i64> = cache.start().into_data().iter().collect();
        for (sequence, tokens) in tokens.chunks(count).enumerate() {
            let length = usize::try_from(lengths[sequence]).unwrap_or(0);
            let ids = cache.add_engram_ids((sequence, length), lookup.ids(tokens));
            lookup.extend(&mut rows, ids, count);
        }
        for (layer, rows) in rows {
            let table = &self.layers[layer].engram.as_ref().expect("an engram").table;
            let width = rows.len() / (batch * count) * table.width();
            let values = TensorData::new(table.gather(&rows), [batch * count, width]);
            let values = Tensor::from_data(values, (&device, dtype.into()));
            step.handed().engrams.insert(layer, values);
        }
    }
}
