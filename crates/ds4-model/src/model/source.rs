//! Where the weights of a model come from.

use burn::module::Module;

use crate::block::Block;
use crate::parallel::Divider;
use crate::placement::{Place, Placement, Portion};
use crate::weights::WeightSource;

/// Hands out the weights of a whole model, and says where each of its parts is to be.
pub(crate) trait ModelSource {
    /// What hands out the weights of a module.
    type Weights: WeightSource;

    /// The weights of the part that was [entered](Self::enter) last.
    fn weights(&mut self) -> &mut Self::Weights;

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
}
