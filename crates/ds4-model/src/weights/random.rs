//! Random weights, dense or packed.

use burn::module::Param;
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::quant::Activations;

use super::bits::{RandomBits, deviation};
use super::source::{Initial, WeightSource};
use super::stack::{StackValues, WeightStack, int_parameter};
use super::table::{EngramTable, TableSource};
use crate::config::ModelConfig;

/// A module with dense random weights.
///
/// # Panics
///
/// If `build` gives up, which it has no reason to.
pub(crate) fn dense<T>(device: &Device, build: impl FnOnce(&mut Random) -> Option<T>) -> T {
    build(&mut Random::dense(device)).expect("any weight can be drawn")
}

/// Random weights.
pub(crate) struct Random<'d> {
    device: &'d Device,
    /// Makes them packed as the released ones.
    packed: Option<RandomBits<'d>>,
}

impl<'d> Random<'d> {
    pub(crate) fn dense(device: &'d Device) -> Self {
        Self {
            device,
            packed: None,
        }
    }

    /// Weights as those of a released checkpoint of this configuration are on a device.
    pub(crate) fn packed(
        config: &ModelConfig,
        dtype: FloatDType,
        activations: Activations,
        device: &'d Device,
    ) -> Self {
        let activations = config.in_blocks(activations);
        Self {
            device,
            packed: Some(RandomBits::new(
                dtype,
                activations,
                device,
                config.weight_block,
            )),
        }
    }

    pub(crate) fn device(&self) -> &'d Device {
        self.device
    }

    /// Makes weights on another device from now on.
    pub(crate) fn move_to(&mut self, device: &'d Device) {
        self.device = device;
        if let Some(packed) = &mut self.packed {
            packed.move_to(device);
        }
    }

    /// What packed weights do to their inputs.
    fn activations(&self) -> Activations {
        match &self.packed {
            Some(packed) => packed.activations(),
            None => Activations::Exact,
        }
    }

    fn tensor<const D: usize>(&self, shape: [usize; D], initial: Initial) -> Tensor<D> {
        match initial {
            Initial::Zeros => Tensor::zeros(shape, self.device),
            Initial::Ones => Tensor::ones(shape, self.device),
            Initial::Random => {
                let normal = Distribution::Normal(0.0, deviation(shape[D - 1]));
                // As one row: a device may leave gaps between several, and kernels would copy them
                // each time.
                let count: usize = shape.iter().product();
                Tensor::<1>::random([count], normal, self.device).reshape(shape)
            }
        }
    }
}

impl WeightSource for Random<'_> {
    fn arranged<const D: usize>(
        &mut self,
        _: &str,
        _: [usize; D],
        shape: [usize; D],
        initial: Initial,
        _: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Option<Param<Tensor<D>>> {
        Some(Param::from_tensor(self.tensor(shape, initial)))
    }

    fn embedding(&mut self, _: &str, shape: [usize; 2]) -> Option<Param<Tensor<2>>> {
        let tensor = self.tensor(shape, Initial::Random);
        Some(Param::from_tensor(match &self.packed {
            Some(packed) => tensor.cast(packed.dtype()),
            None => tensor,
        }))
    }

    fn stored(
        &mut self,
        names: &[String],
        [rows, columns]: [usize; 2],
    ) -> Option<Param<Tensor<2>>> {
        let tensor = self.tensor([names.len() * rows, columns], Initial::Random);
        Some(Param::from_tensor(match &self.packed {
            Some(packed) => tensor.cast(packed.stored_dtype()),
            None => tensor,
        }))
    }

    fn stack(
        &mut self,
        _: &str,
        experts: Option<usize>,
        parts: &[&str],
        [out, inp]: [usize; 2],
    ) -> Option<WeightStack> {
        let shape = [experts.unwrap_or(1), parts.len() * out, inp];
        let values = match (&mut self.packed, experts) {
            (None, _) => {
                StackValues::Dense(Param::from_tensor(self.tensor(shape, Initial::Random)))
            }
            (Some(packed), None) => StackValues::Fp8(packed.fp8(shape, parts.len())),
            (Some(packed), Some(_)) => StackValues::Fp4(packed.fp4(shape)),
        };
        Some(WeightStack {
            values,
            activations: self.activations(),
        })
    }

    fn groups(&mut self, prefix: &str, [groups, rank, width]: [usize; 3]) -> Option<WeightStack> {
        let shape = [groups, rank, width];
        Some(match &mut self.packed {
            Some(packed) => StackValues::Fp8(packed.fp8(shape, 1)).into(),
            None => self.stack(prefix, Some(groups), &[""], [rank, width])?,
        })
    }

    fn lookup(&mut self, prefix: &str, [_, width]: [usize; 2]) -> Option<EngramTable> {
        let seed = prefix
            .bytes()
            .fold(0, |sum: u64, byte| sum * 31 % (1 << 40) + u64::from(byte));
        Some(EngramTable::new(RandomRows(seed), width))
    }

    fn table(
        &mut self,
        _: &str,
        [vocabulary, k]: [usize; 2],
        experts: usize,
    ) -> Option<Param<Tensor<2, Int>>> {
        let ids = (0..vocabulary * k).map(|place| (place % experts) as i32);
        let table = TensorData::new(ids.collect::<Vec<_>>(), [vocabulary, k]);
        let table = Tensor::from_data(table, self.device);
        Some(int_parameter(table))
    }
}

/// Rows of a table that are drawn when they are asked for, the same each time.
#[derive(Debug)]
struct RandomRows(u64);

impl TableSource for RandomRows {
    fn row(&self, row: u64, values: &mut [f32]) {
        use rand_chacha::rand_core::{Rng, SeedableRng};
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(self.0 ^ row << 8);
        // Of variance 1, about.
        let scale = 3f32.sqrt() / f32::from(1u16 << 15);
        values.fill_with(|| f32::from(random.next_u32() as i16) * scale);
    }
}
