use super::args::PackedExperts;
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::operators::prelude::*;
use crate::quant::QuantOps;

/// Extension of Burn's backends by the operators of this family; the default bodies are the
/// reference.
///
/// No tensor that gets to `expert_ffn` or `moe_ffn` is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MoeOps: QuantOps {
    /// See [`swiglu`](super::swiglu).
    #[fusion(default)]
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>, limit: f64) -> FloatTensor<Self> {
        reference::swiglu::<Self>(gate, up, limit)
    }

    /// See [`expert_ffn`](super::expert_ffn).
    #[fusion(meta = |x, _ids, _weights, _experts| fusion::sums(x))]
    fn expert_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        #[extension_type] experts: PackedExperts<Self>,
    ) -> FloatTensor<Self> {
        reference::gathered::<Self>(x, ids, weights, experts)
    }

    /// See [`moe_ffn`](super::moe_ffn).
    #[fusion(meta = |x, _ids, _weights, _routed, _shared| x.clone())]
    fn moe_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        #[extension_type] routed: PackedExperts<Self>,
        #[extension_type] shared: PackedExperts<Self>,
    ) -> FloatTensor<Self> {
        reference::mixture::<Self>(x, ids, weights, routed, shared)
    }
}

#[cfg(feature = "flex")]
impl MoeOps for burn::backend::Flex {
    /// The ids are in the host's memory: reading them costs nothing, and every matrix in use is
    /// decoded once.
    fn expert_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        experts: PackedExperts<Self>,
    ) -> FloatTensor<Self> {
        reference::grouped::<Self>(x, ids, weights, experts)
    }
}

#[cfg(feature = "cube")]
impl MoeOps for burn_cubecl::CubeBackend {
    fn expert_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        experts: PackedExperts<Self>,
    ) -> FloatTensor<Self> {
        launch::sums(&x, &ids, &weights, &experts, None)
            .unwrap_or_else(|| reference::gathered::<Self>(x, ids, weights, experts))
    }

    fn moe_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        routed: PackedExperts<Self>,
        shared: PackedExperts<Self>,
    ) -> FloatTensor<Self> {
        launch::sums(&x, &ids, &weights, &routed, Some(&shared))
            .unwrap_or_else(|| reference::mixture::<Self>(x, ids, weights, routed, shared))
    }
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub(super) fn sums(x: &TensorSpec) -> TensorSpec {
        TensorSpec::new(x.shape.clone(), DType::F32)
    }
}
