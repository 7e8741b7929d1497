use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::quant::{Activations, FP4_BLOCK, FP8_BLOCK, Fp4Layout};

use super::sizes::{PackedSizes, WeightBytes};
use super::{Random, deviation};
use crate::config::ModelConfig;
use crate::linear::{Fp4Weight, Fp8Weight};
use crate::model::Model;
use crate::parallel::Divider;
use crate::placement::{Devices, ModelBytes, Placement, PlacementError};

impl ModelConfig {
    /// Initializes a model with random weights in the formats of a released checkpoint: routed
    /// experts in FP4, the other linear maps in FP8, and the matrices that are read in f32 in bf16,
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
        self.init_from(Random::packed(dtype, activations, device, None))
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
        let source = Random::packed(dtype, activations, device, Some(&placement));
        Ok(self.init_from(source))
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
            device: &devices[0],
        };
        // There is no model of no weights.
        let _ = self.build(&mut source, false);
        source.bytes.model.with_caches(self, dtype, context)
    }
}

impl<'d> Random<'d> {
    fn packed(
        dtype: FloatDType,
        activations: Activations,
        device: &'d Device,
        placement: Option<&'d Placement>,
    ) -> Self {
        let ranks = placement.map_or(&[][..], Placement::ranks);
        Self {
            device,
            divider: (!ranks.is_empty()).then(|| Divider::new(ranks)),
            placement,
            packed: Some(RandomBits {
                device,
                dtype,
                activations,
                words: None,
                copies: 0,
            }),
        }
    }
}

/// Random bits from which packed weights are made: drawn once, as many as the largest stack of
/// matrices so far has. Every stack is a copy with some of its bits flipped.
pub(super) struct RandomBits<'d> {
    device: &'d Device,
    dtype: FloatDType,
    activations: Activations,
    words: Option<Tensor<1, Int>>,
    copies: u32,
}

impl<'d> RandomBits<'d> {
    /// Makes weights on another device from now on.
    pub(super) fn move_to(&mut self, device: &'d Device) {
        if *self.device != *device {
            self.device = device;
            self.words = None;
        }
    }

    /// The dtype of the activations.
    pub(super) fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// What products do to them.
    pub(super) fn activations(&self) -> Activations {
        self.activations
    }

    /// The dtype in which a released file has dense matrices, if the device has it.
    pub(super) fn stored_dtype(&self) -> FloatDType {
        stored_dtype(self.device)
    }

    /// Random codes without NaN, and scales that keep the size of what the weights multiply: powers
    /// of two, as in the released files.
    pub(super) fn fp8(&mut self, [count, rows, columns]: [usize; 3], parts: usize) -> Fp8Weight {
        let blocks = parts * (rows / parts).div_ceil(FP8_BLOCK);
        let lowest = (0.75 * deviation(columns) / 32.0).log2().round().exp2();
        let words = self.bits([count, rows, columns.div_ceil(4)]);
        let doubled = self
            .bits([count, blocks, columns.div_ceil(FP8_BLOCK)])
            .bitwise_and_scalar(1_u32);
        let scales = doubled.add_scalar(1_u32).float().cast(DType::F32);
        Fp8Weight {
            words: int_parameter(words.bitwise_and_scalar(0xf7f7_f7f7_u32)),
            scales: Param::from_tensor(scales.mul_scalar(lowest)),
            parts,
            columns,
        }
    }

    /// The same in FP4.
    pub(super) fn fp4(&mut self, [count, rows, columns]: [usize; 3]) -> Fp4Weight {
        let scales = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
        let lowest = 124 - (columns as f64).sqrt().log2().round() as u32;
        let scales = self
            .bits([count, scales])
            .bitwise_and_scalar(0x0303_0303_u32);
        Fp4Weight {
            words: int_parameter(self.bits([count, rows, columns.div_ceil(8)])),
            scales: int_parameter(scales.add_scalar(lowest * 0x0101_0101)),
            columns,
            layout: Fp4Layout::fastest_on(self.device),
        }
    }

    /// Words of which every bit is random, in memory of their own.
    fn bits<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D, Int> {
        let count: usize = shape.iter().product();
        let known = self.words.take().filter(|words| words.dims()[0] >= count);
        let words = known.unwrap_or_else(|| {
            // Devices draw integers as f32, which holds half the bits.
            let half = || {
                let distribution = Distribution::Uniform(0.0, 65_536.0);
                Tensor::<1, Int>::random([count], distribution, (self.device, DType::U32))
            };
            half().mul_scalar(1_u32 << 16).add(half())
        });
        self.words = Some(words.clone());
        self.copies = self.copies.wrapping_add(0x9e37_79b9);
        // Keep one row until the end: a device may leave gaps between several, and kernels would
        // copy them each time.
        let words = words.narrow(0, 0, count);
        words.bitwise_xor_scalar(self.copies).reshape(shape)
    }
}

fn stored_dtype(device: &Device) -> FloatDType {
    match device.supports_dtype(FloatDType::BF16) {
        true => FloatDType::BF16,
        false => FloatDType::F32,
    }
}

fn int_parameter<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor)
}
