//! What the layers of a step read of the tables of engrams.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::backend::ExecutionError;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use super::modules::Model;
use crate::cache::{Cache, Step};
use crate::placement::Place;

impl Model {
    /// Hands layers of a step on what their tables have for its token ids `[batch, positions]`,
    /// which are read back to the host, unless that was done before.
    ///
    /// # Panics
    ///
    /// If the model has engrams and no [lookup](Model::engrams), or the device has failed.
    pub(crate) fn look_up_engrams(
        &self,
        ids: &Tensor<2, Int>,
        step: &Step,
        cache: &mut Cache,
        layers: &Range<usize>,
    ) {
        let params = self.config.engram.as_ref();
        let have_any = params.is_some_and(|own| own.layers.iter().any(|of| layers.contains(of)));
        if have_any && step.handed().engrams.is_empty() {
            let rows = self.engram_rows(ids, cache, layers);
            step.handed()
                .engrams
                .extend(rows.expect("a device that works"));
        }
    }

    /// What the table of each of these layers with an engram has for token ids `[batch, positions]`
    /// behind those of a cache: `[batch * positions, columns]`, on the layer's device.
    ///
    /// # Errors
    ///
    /// Where the ids cannot be read back.
    ///
    /// # Panics
    ///
    /// If the model has engrams and no [lookup](Model::engrams).
    pub(crate) fn engram_rows(
        &self,
        ids: &Tensor<2, Int>,
        cache: &mut Cache,
        layers: &Range<usize>,
    ) -> Result<BTreeMap<usize, Tensor<2>>, ExecutionError> {
        if self.config.engram.is_none() {
            return Ok(BTreeMap::new());
        }
        let lookup = self
            .engrams
            .as_ref()
            .expect("a model with engrams has its lookup");
        let [batch, count] = ids.dims();
        let dtype = FloatDType::from(self.embedding.val().dtype());
        let tokens: Vec<u32> = self
            .in_vocabulary(ids.clone())
            .try_into_data()?
            .iter()
            .collect();
        let mut rows = BTreeMap::new();
        // The host may count positions that were taken back since.
        let lengths: Vec<i64> = cache.start().try_into_data()?.iter().collect();
        for (sequence, tokens) in tokens.chunks(count).enumerate() {
            let length = usize::try_from(lengths[sequence]).unwrap_or(0);
            let ids = cache.add_engram_ids((sequence, length), lookup.ids(tokens));
            lookup.extend(&mut rows, ids, count);
        }
        let own = rows.into_iter().filter(|(layer, _)| layers.contains(layer));
        let values = own.map(|(layer, rows)| {
            let device = self.placement.device(Place::Layer(layer));
            let table = &self.layers[layer].engram.as_ref().expect("an engram").table;
            let width = rows.len() / (batch * count) * table.width();
            let values = TensorData::new(table.gather(&rows), [batch * count, width]);
            (layer, Tensor::from_data(values, (device, dtype.into())))
        });
        Ok(values.collect())
    }
}
