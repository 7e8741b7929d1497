//! Bits of packed random weights.

use burn::module::Param;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::quant::{Activations, FP4_BLOCK, Fp4Layout};

use super::stack::{Fp4Weight, Fp8Weight, int_parameter};

/// Random bits from which packed weights are made: drawn once, as many as the largest stack of
/// matrices so far has. Every stack is a copy with some of its bits flipped.
pub(super) struct RandomBits<'d> {
    device: &'d Device,
    dtype: FloatDType,
    activations: Activations,
    /// Rows and columns that share a scale of FP8.
    block: usize,
    words: Option<Tensor<1, Int>>,
    copies: u32,
}

impl<'d> RandomBits<'d> {
    pub(super) fn new(
        dtype: FloatDType,
        activations: Activations,
        device: &'d Device,
        block: usize,
    ) -> Self {
        Self {
            device,
            dtype,
            activations,
            block,
            words: None,
            copies: 0,
        }
    }

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

    /// As [`stored_dtype`].
    pub(super) fn stored_dtype(&self) -> FloatDType {
        stored_dtype(self.device)
    }

    /// Random codes without NaN, and scales that keep the size of what the weights multiply: powers
    /// of two, as in the released files.
    pub(super) fn fp8(&mut self, [count, rows, columns]: [usize; 3], parts: usize) -> Fp8Weight {
        let blocks = parts * (rows / parts).div_ceil(self.block);
        let lowest = (0.75 * deviation(columns) / 32.0).log2().round().exp2();
        let words = self.bits([count, rows, columns.div_ceil(4)]);
        let doubled = self
            .bits([count, blocks, columns.div_ceil(self.block)])
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

/// The dtype in which a released file has dense matrices, if the device has it.
pub(crate) fn stored_dtype(device: &Device) -> FloatDType {
    match device.supports_dtype(FloatDType::BF16) {
        true => FloatDType::BF16,
        false => FloatDType::F32,
    }
}

/// Standard deviation of weights that keep the size of what they multiply.
pub(super) fn deviation(columns: usize) -> f64 {
    (columns as f64).powf(-0.5)
}
