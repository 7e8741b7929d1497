use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::args::HeadTensors;
#[cfg(feature = "cube")]
use super::launch::{Candidates, can_run};
use super::reference;
use crate::matmul::MatmulOps;
use crate::optional::{OptionalFloat, OptionalInt};
use crate::topk::TopkOps;

/// The backend operations of this family. The default bodies are the reference.
///
/// No tensor passed to these methods is empty. Special tokens are given as rows of the weight,
/// `[special]`, i32, by ascending id.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait FlashHeadOps: MatmulOps + TopkOps {
    /// Returns the clusters to probe, `[tokens, probes]`, i32, ascending. With `uniform`, they are
    /// drawn; see [`flash_head_draw`](super::flash_head_draw).
    #[fusion(meta = |h, _head, _uniform, probes, _temperature| fusion::clusters(h, *probes))]
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
    #[fusion(meta = |h, _head, _special, _probes| fusion::tokens(h))]
    fn flash_head_argmax(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] special: OptionalInt<Self>,
        probes: usize,
    ) -> IntTensor<Self> {
        reference::argmax::<Self>(h, head, special.into_option(), probes)
    }

    /// See [`flash_head_logits`](super::flash_head_logits).
    #[fusion(meta = |h, _head, _special, _probes, vocabulary| fusion::logits(h, *vocabulary))]
    fn flash_head_logits(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] special: OptionalInt<Self>,
        probes: usize,
        vocabulary: usize,
    ) -> FloatTensor<Self> {
        reference::logits::<Self>(h, head, special.into_option(), probes, vocabulary)
    }

    /// Returns ids and logits of the `chosen` clusters' rows and of the special tokens; see
    /// [`FlashHeadCandidates`](super::FlashHeadCandidates).
    #[fusion(meta = |_h, head, special, chosen| fusion::candidates(head, special, chosen))]
    fn flash_head_candidates(
        h: FloatTensor<Self>,
        #[extension_type] head: HeadTensors<Self>,
        #[extension_type] special: OptionalInt<Self>,
        chosen: IntTensor<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        reference::candidates::<Self>(h, head, special.into_option(), chosen)
    }
}

#[cfg(feature = "flex")]
impl FlashHeadOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl FlashHeadOps for burn_cubecl::CubeBackend {
    fn flash_head_argmax(
        h: FloatTensor<Self>,
        head: HeadTensors<Self>,
        special: OptionalInt<Self>,
        probes: usize,
    ) -> IntTensor<Self> {
        let special = special.into_option();
        if !can_run(&h, &head, probes) {
            return reference::argmax::<Self>(h, head, special, probes);
        }
        let chosen = reference::clusters::<Self>(h.clone(), head.clone(), None, probes, 1.0);
        Candidates::new(h, head, special, chosen).argmax()
    }

    fn flash_head_logits(
        h: FloatTensor<Self>,
        head: HeadTensors<Self>,
        special: OptionalInt<Self>,
        probes: usize,
        vocabulary: usize,
    ) -> FloatTensor<Self> {
        let special = special.into_option();
        if !can_run(&h, &head, probes) {
            return reference::logits::<Self>(h, head, special, probes, vocabulary);
        }
        let chosen = reference::clusters::<Self>(h.clone(), head.clone(), None, probes, 1.0);
        Candidates::new(h, head, special, chosen).scattered(vocabulary)
    }

    fn flash_head_candidates(
        h: FloatTensor<Self>,
        head: HeadTensors<Self>,
        special: OptionalInt<Self>,
        chosen: IntTensor<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let special = special.into_option();
        if can_run(&h, &head, chosen.shape()[1]) {
            Candidates::new(h, head, special, chosen).all()
        } else {
            reference::candidates::<Self>(h, head, special, chosen)
        }
    }
}

/// Output shapes and dtypes that fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use crate::flash_head::args::HeadTensorsMetadata;
    use crate::optional::OptionalIntMetadata;
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn clusters(h: &TensorSpec, probes: usize) -> TensorSpec {
        TensorSpec::new([h.shape[0], probes].into(), DType::I32)
    }

    pub(super) fn tokens(h: &TensorSpec) -> TensorSpec {
        TensorSpec::new([h.shape[0]].into(), DType::I32)
    }

    pub(super) fn logits(h: &TensorSpec, vocabulary: usize) -> TensorSpec {
        TensorSpec::new([h.shape[0], vocabulary].into(), DType::F32)
    }

    pub(super) fn candidates(
        head: &HeadTensorsMetadata,
        special: &OptionalIntMetadata,
        chosen: &TensorSpec,
    ) -> (TensorSpec, TensorSpec) {
        let special = match special {
            OptionalIntMetadata::None => 0,
            OptionalIntMetadata::Some(rows) => rows.shape[0],
        };
        let shape = [
            chosen.shape[0],
            chosen.shape[1] * head.ids.shape[1] + special,
        ];
        (
            TensorSpec::new(shape.into(), DType::I32),
            TensorSpec::new(shape.into(), DType::F32),
        )
    }
}
