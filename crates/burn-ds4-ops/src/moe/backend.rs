use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::reference;
use crate::quant::{PackedWeights, QuantOps};

/// Extension of Burn's backends by the operators of this family; the default bodies are the
/// reference.
///
/// A limit of infinity means no limit. No tensor that gets to `expert_ffn` or `moe_ffn` is empty.
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
    #[fusion(meta = |x, _ids, _weights, _gate_up, _down, _limit| fusion::sums(x))]
    fn expert_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        #[extension_type] gate_up: PackedWeights<Self>,
        #[extension_type] down: PackedWeights<Self>,
        limit: f64,
    ) -> FloatTensor<Self> {
        reference::gathered::<Self>(x, ids, weights, gate_up, down, limit)
    }

    /// See [`moe_ffn`](super::moe_ffn).
    #[fusion(meta = |
        x, _ids, _weights, _gate_up, _down, _limit, _shared_gate_up, _shared_down, _shared_limit
    | x.clone())]
    #[allow(clippy::too_many_arguments)]
    fn moe_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        #[extension_type] gate_up: PackedWeights<Self>,
        #[extension_type] down: PackedWeights<Self>,
        limit: f64,
        #[extension_type] shared_gate_up: PackedWeights<Self>,
        #[extension_type] shared_down: PackedWeights<Self>,
        shared_limit: f64,
    ) -> FloatTensor<Self> {
        let routed = Self::expert_ffn(x.clone(), ids, weights, gate_up, down, limit);
        reference::add_shared::<Self>(routed, x, shared_gate_up, shared_down, shared_limit)
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
        gate_up: PackedWeights<Self>,
        down: PackedWeights<Self>,
        limit: f64,
    ) -> FloatTensor<Self> {
        reference::grouped::<Self>(x, ids, weights, gate_up, down, limit)
    }
}

#[cfg(feature = "cube")]
impl MoeOps for burn_cubecl::CubeBackend {
    fn expert_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        gate_up: PackedWeights<Self>,
        down: PackedWeights<Self>,
        limit: f64,
    ) -> FloatTensor<Self> {
        let routed = super::launch::Routed {
            x: x.clone(),
            ids: ids.clone(),
            scores: weights.clone(),
            gate_up: gate_up.clone().into(),
            down: down.clone().into(),
            limit,
        };
        if routed.can_launch() {
            routed.launch()
        } else {
            reference::gathered::<Self>(x, ids, weights, gate_up, down, limit)
        }
    }

    fn moe_ffn(
        x: FloatTensor<Self>,
        ids: IntTensor<Self>,
        weights: FloatTensor<Self>,
        gate_up: PackedWeights<Self>,
        down: PackedWeights<Self>,
        limit: f64,
        shared_gate_up: PackedWeights<Self>,
        shared_down: PackedWeights<Self>,
        shared_limit: f64,
    ) -> FloatTensor<Self> {
        let both = super::launch::WithShared {
            routed: super::launch::Routed {
                x: x.clone(),
                ids: ids.clone(),
                scores: weights.clone(),
                gate_up: gate_up.clone().into(),
                down: down.clone().into(),
                limit,
            },
            gate_up: shared_gate_up.clone().into(),
            down: shared_down.clone().into(),
            limit: shared_limit,
        };
        if both.can_launch() {
            return both.launch();
        }
        let routed = Self::expert_ffn(x.clone(), ids, weights, gate_up, down, limit);
        reference::add_shared::<Self>(routed, x, shared_gate_up, shared_down, shared_limit)
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
