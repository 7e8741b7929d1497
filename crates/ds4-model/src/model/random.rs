//! Models with random weights.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::quant::Activations;

use super::modules::Model;
use super::sizes::PackedSizes;
use super::source::ModelSource;
use crate::block::Block;
use crate::config::ModelConfig;
use crate::engram::{EngramIds, EngramLookup};
use crate::parallel::Divider;
use crate::placement::{
    Devices, ModelBytes, Place, Placement, PlacementError, Portion, WeightBytes,
};
use crate::weights::{Random, stored_dtype};

impl ModelConfig {
    /// Initializes a model with random weights.
    ///
    /// # Panics
    ///
    /// If the configuration contradicts itself, see [`validate`](Self::validate).
    pub fn init(&self, device: &Device) -> Model {
        self.init_from(Random::dense(device).into())
    }

    fn init_from(&self, mut source: RandomModel) -> Model {
        self.assert_valid();
        let model = self.build(&mut source, false);
        let mut model = model.expect("any weight can be drawn");
        if let Some(engram) = &self.engram {
            let ids = 0..self.vocab_size;
            let ids = ids.map(|token| (token % engram.compressed_vocab_size) as u32);
            let ids = EngramIds::new(ids.collect());
            model.engrams = Some(EngramLookup::new(engram, ids));
        }
        model
    }

    fn assert_valid(&self) {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
    }

    /// Initializes a model with random weights in the formats of a released checkpoint: routed
    /// experts in FP4, the other linear maps in FP8 (or, where no kernel reads blocks of theirs,
    /// expanded to `dtype`), and the matrices that are read in f32 in bf16,
    /// where the device has it. `dtype` is that of the activations, which products by packed
    /// weights take as `activations` says.
    ///
    /// For measurements of models that are not at hand. The weights are drawn on the device; the
    /// host never holds one. No two matrices share memory, so that a cache of the device holds no
    /// more of them than of a real model.
    ///
    /// # Panics
    ///
    /// If the configuration contradicts itself, see [`validate`](Self::validate).
    pub fn init_packed(
        &self,
        dtype: FloatDType,
        activations: Activations,
        device: &Device,
    ) -> Model {
        self.init_from(Random::packed(self, dtype, activations, device).into())
    }

    /// Initializes a model like [`init_packed`](Self::init_packed), each layer on its own device.
    ///
    /// # Errors
    ///
    /// If the model cannot be divided as asked.
    ///
    /// # Panics
    ///
    /// As [`init_packed`](Self::init_packed).
    pub fn init_packed_on(
        &self,
        dtype: FloatDType,
        activations: Activations,
        devices: impl Into<Devices>,
    ) -> Result<Model, PlacementError> {
        self.assert_valid();
        let devices = devices.into();
        let bytes = self.packed_bytes(dtype, devices.devices(), devices.context());
        let placement = devices.place(self, &bytes)?;
        let device = placement.first();
        let ranks = placement.ranks();
        Ok(self.init_from(RandomModel {
            random: Random::packed(self, dtype, activations, device),
            divider: (!ranks.is_empty()).then(|| Divider::new(ranks)),
            placement: Some(&placement),
        }))
    }

    /// Bytes of a model that is [packed](Self::init_packed), and of its caches.
    pub(crate) fn packed_bytes(
        &self,
        dtype: FloatDType,
        devices: &[Device],
        context: usize,
    ) -> ModelBytes {
        let mut source = PackedSizes {
            bytes: WeightBytes::default(),
            dtype,
            stored: stored_dtype(&devices[0]),
            weight_block: self.weight_block,
            device: &devices[0],
        };
        // There is no model of no weights.
        let _ = self.build(&mut source, false);
        source.bytes.model.with_caches(self, dtype, context)
    }
}

/// Random weights of a model.
struct RandomModel<'d> {
    random: Random<'d>,
    /// Divides the layers, if several devices are to have parts of each.
    divider: Option<Divider<'d>>,
    /// Where the layers are to be, if not all on the device.
    placement: Option<&'d Placement>,
}

impl<'d> From<Random<'d>> for RandomModel<'d> {
    /// All layers on the device of the weights.
    fn from(random: Random<'d>) -> Self {
        Self {
            random,
            divider: None,
            placement: None,
        }
    }
}

impl<'d> ModelSource for RandomModel<'d> {
    type Weights = Random<'d>;

    fn weights(&mut self) -> &mut Random<'d> {
        &mut self.random
    }

    fn placement(&self, layers: usize) -> Placement {
        match self.placement {
            Some(placement) => placement.clone(),
            None => Placement::single(self.random.device(), layers),
        }
    }

    fn take(&mut self, block: Block, _: &Portion) -> Option<Block> {
        Some(match &mut self.divider {
            Some(divider) => divider.take(block),
            None => block,
        })
    }

    fn divider(&mut self) -> Option<Divider<'_>> {
        self.divider.take()
    }

    fn enter(&mut self, place: Place) {
        if let Some(placement) = self.placement {
            self.random.move_to(placement.device(place));
        }
    }
}
