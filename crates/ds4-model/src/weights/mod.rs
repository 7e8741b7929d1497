//! Where the weights of modules come from.
//!
//! Every configuration has one `build`, which makes its module of a [`WeightSource`]. The source is
//! a checkpoint or [random numbers](Random), and the weights are dense or packed.

mod packed;
mod sizes;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_ds4_ops::quant::Activations;

use crate::block::Block;
use crate::linear::{StackValues, WeightStack};
use crate::parallel::Divider;
use crate::placement::{Place, Placement, Portion};
use packed::RandomBits;
pub(crate) use sizes::WeightBytes;

/// What a parameter is where nothing has been learned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Initial {
    Zeros,
    Ones,
    /// Normal, its variance being one over the last dimension.
    Random,
}

/// Hands out weights by their names in a released checkpoint.
///
/// A method returns `None` if there is no such weight; the source knows why. Whoever builds a
/// module asks for all weights before giving up, so that a source can tell everything that is
/// wrong.
pub(crate) trait WeightSource {
    /// Where the layers of a trunk of so many are to be.
    fn placement(&self, layers: usize) -> Placement;

    /// Lets `build` make what each device has. Where weights are read, it does so on a thread for
    /// each device, with a source of its own.
    fn build_portions<T: Send>(
        &mut self,
        placement: &Placement,
        build: impl Fn(&mut Self, &Portion) -> Option<T> + Sync,
    ) -> Vec<Option<T>> {
        let portions = placement.portions();
        portions.iter().map(|own| build(self, own)).collect()
    }

    /// Takes a layer that is complete, and returns what its device is to have of it; `None` if that
    /// has not taken it.
    fn take(&mut self, block: Block, _: &Portion) -> Option<Block> {
        Some(block)
    }

    /// Whether a device has taken the weights of a module.
    fn is_taken(&mut self, _: &impl Module) -> bool {
        true
    }

    /// What has divided the layers, if they were divided as they were [taken](Self::take).
    fn divider(&mut self) -> Option<Divider<'_>> {
        None
    }

    /// Says which part of a model the weights that are asked for next belong to: they are put on
    /// its device.
    fn enter(&mut self, place: Place);

    /// An f32 parameter of this shape, which `arrange` makes of the tensor that is stored.
    fn arranged<const D: usize>(
        &mut self,
        name: &str,
        stored: [usize; D],
        shape: [usize; D],
        initial: Initial,
        arrange: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Option<Param<Tensor<D>>>;

    /// An f32 parameter.
    fn float<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        initial: Initial,
    ) -> Option<Param<Tensor<D>>> {
        self.arranged(name, shape, shape, initial, |tensor| tensor)
    }

    /// A matrix in the dtype of the activations.
    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Option<Param<Tensor<2>>>;

    /// Matrices of this shape on top of each other, which the released model reads in f32, in the
    /// dtype of their file: products with them are as exact, and read less.
    fn stored(&mut self, names: &[String], shape: [usize; 2]) -> Option<Param<Tensor<2>>>;

    /// Linear weights `{prefix}{part}` of shape `[out, in]`, the parts on top of each other:
    /// `[1, parts · out, in]`. With a number of experts, the `{prefix}.{expert}{part}` of each:
    /// `[experts, parts · out, in]`.
    fn stack(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        shape: [usize; 2],
    ) -> Option<WeightStack>;

    /// The linear maps of equal groups of channels, which are stored as one:
    /// `[groups, rank, width]`.
    fn groups(&mut self, prefix: &str, shape: [usize; 3]) -> Option<WeightStack>;

    /// Expert ids below `experts`: `[vocabulary, experts_per_token]`.
    fn table(
        &mut self,
        name: &str,
        shape: [usize; 2],
        experts: usize,
    ) -> Option<Param<Tensor<2, Int>>>;
}

/// An optional part: absent, complete, or (`None`) wanted and not there.
pub(crate) fn all_or_nothing<T>(part: Option<Option<T>>) -> Option<Option<T>> {
    match part {
        None => Some(None),
        Some(part) => part.map(Some),
    }
}

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
    /// Divides the layers, if several devices are to have parts of each.
    divider: Option<Divider<'d>>,
    /// Where the layers are to be, if not all on the device.
    placement: Option<&'d Placement>,
    /// Makes them packed as the released ones.
    packed: Option<RandomBits<'d>>,
}

impl<'d> Random<'d> {
    pub(crate) fn dense(device: &'d Device) -> Self {
        Self {
            device,
            divider: None,
            placement: None,
            packed: None,
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
    fn placement(&self, layers: usize) -> Placement {
        match self.placement {
            Some(placement) => placement.clone(),
            None => Placement::single(self.device, layers),
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
            self.device = placement.device(place);
            if let Some(packed) = &mut self.packed {
                packed.move_to(self.device);
            }
        }
    }

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
        Some(match &mut self.packed {
            Some(packed) => StackValues::Fp8(packed.fp8([groups, rank, width], 1)).into(),
            None => self.stack(prefix, Some(groups), &[""], [rank, width])?,
        })
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
        Some(Param::initialized(ParamId::new(), table))
    }
}

/// Standard deviation of weights that keep the size of what they multiply.
fn deviation(columns: usize) -> f64 {
    (columns as f64).powf(-0.5)
}
