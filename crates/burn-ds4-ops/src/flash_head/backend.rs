use super::args::HeadTensors;
#[cfg(feature = "cube")]
use super::launch::{Candidates, can_run};
use super::reference;
use crate::matmul::MatmulOps;
use crate::operators::prelude::*;
use crate::optional::{OptionalFloat, OptionalInt};
use crate::topk::TopkOps;
#[cfg(feature = "fusion")]
use crate::{flash_head::args::HeadTensorsMetadata, optional::OptionalIntMetadata};

/// Ids and logits of all candidates.
#[cfg(feature = "fusion")]
fn all_candidates(
    head: &HeadTensorsMetadata,
    special: &OptionalIntMetadata,
    chosen: &TensorSpec,
) -> (TensorSpec, TensorSpec) {
    let special = match special {
        OptionalIntMetadata::None => 0,
        OptionalIntMetadata::Some(rows) => rows.shape[0],
    };
    let columns = chosen.shape[1] * head.ids.shape[1] + special;
    let shape = [chosen.shape[0], columns];
    (spec(shape, DType::I32), spec(shape, DType::F32))
}

operators! {
    /// The backend operations of this family.
    ///
    /// No tensor passed to these methods is empty. Special tokens are given as rows of the weight,
    /// `[special]`, i32, by ascending id. `chosen` are the clusters that are probed.
    pub trait FlashHeadOps: MatmulOps + TopkOps;

    /// Returns the clusters to probe, `[tokens, probes]`, i32, ascending. With `uniform`, they are
    /// drawn; see [`flash_head_draw`](super::flash_head_draw).
    #[fusion(meta = |h, _head, _uniform, probes, _temperature| {
        spec([h.shape[0], *probes], DType::I32)
    })]
    fn flash_head_clusters(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] uniform: OptionalFloat<Self>,
        probes: usize,
        temperature: f64,
    ) -> IntTensor<Self> {
        reference::clusters::<Self>(h, head, uniform.into_option(), probes, temperature)
    }

    /// See [`flash_head_argmax`](super::flash_head_argmax).
    #[fusion(meta = |h, _head, _special, _chosen| spec([h.shape[0]], DType::I32))]
    fn flash_head_argmax(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] special: OptionalInt<Self>,
        chosen: IntTensor<Self>,
    ) -> IntTensor<Self> {
        reference::argmax::<Self>(h, head, special.into_option(), chosen)
    }
    if can_run(&h, &head, &chosen) =>
        Candidates::new(h, head, special.into_option(), chosen).argmax();

    /// See [`flash_head_logits`](super::flash_head_logits).
    #[fusion(meta = |h, _head, _special, _chosen, vocabulary| {
        spec([h.shape[0], *vocabulary], DType::F32)
    })]
    fn flash_head_logits(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] special: OptionalInt<Self>,
        chosen: IntTensor<Self>,
        vocabulary: usize,
    ) -> FloatTensor<Self> {
        reference::logits::<Self>(h, head, special.into_option(), chosen, vocabulary)
    }
    if can_run(&h, &head, &chosen) =>
        Candidates::new(h, head, special.into_option(), chosen).scattered(vocabulary);

    /// Returns ids and logits of the clusters' rows and of the special tokens; see
    /// [`FlashHeadCandidates`](super::FlashHeadCandidates).
    #[fusion(meta = |_h, head, special, chosen| all_candidates(head, special, chosen))]
    fn flash_head_candidates(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] special: OptionalInt<Self>,
        chosen: IntTensor<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        reference::candidates::<Self>(h, head, special.into_option(), chosen)
    }
    if can_run(&h, &head, &chosen) =>
        Candidates::new(h, head, special.into_option(), chosen).all();
}
