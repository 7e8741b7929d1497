use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

use super::args::{Mix, PendingOutput, Sinkhorn};
use super::reference;
use crate::matmul::MatmulOps;
use crate::norm::NormOps;

/// The backend operations of this family. The default bodies are the reference.
///
/// No tensor passed to these methods is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait HyperConnectionOps: MatmulOps + NormOps {
    /// See [`expand`](super::expand()).
    #[fusion(meta = |_output, streams, _coefficients| streams.clone())]
    fn hyper_expand(
        output: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        coefficients: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::expand::<Self>(output, streams, coefficients)
    }

    /// See [`collapse_norm`](super::collapse_norm). Returns the streams, the input, its norm and
    /// all coefficients, `[tokens, (2 + n)·n]`. Without a weight, the input takes the place of its
    /// norm.
    #[fusion(meta = |_pending, mix, _sinkhorn| fusion::normed(mix))]
    fn hyper_collapse(
        #[extension_type] pending: PendingOutput<Self>,
        #[extension_type] mix: Mix<Self>,
        sinkhorn: Sinkhorn,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    ) {
        reference::collapse::<Self>(spread(pending, mix), sinkhorn)
    }

    /// See [`head_norm`](super::head_norm). Without a weight there is no norm.
    #[fusion(meta = |_pending, mix, _epsilon, _norm_epsilon| fusion::collapsed(&mix.streams))]
    fn hyper_head(
        #[extension_type] pending: PendingOutput<Self>,
        #[extension_type] mix: Mix<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::head::<Self>(spread(pending, mix), epsilon, norm_epsilon)
    }
}

/// Spreads what is pending.
fn spread<B: HyperConnectionOps>(pending: PendingOutput<B>, mix: Mix<B>) -> Mix<B> {
    match pending {
        PendingOutput::None => mix,
        PendingOutput::Some {
            output,
            coefficients,
        } => Mix {
            streams: B::hyper_expand(output, mix.streams, coefficients),
            ..mix
        },
    }
}

#[cfg(feature = "flex")]
impl HyperConnectionOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl HyperConnectionOps for burn_cubecl::CubeBackend {
    fn hyper_expand(
        output: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        coefficients: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_expand(&output, &streams) {
            super::launch::expand(output, streams, coefficients)
        } else {
            reference::expand::<Self>(output, streams, coefficients)
        }
    }

    fn hyper_collapse(
        pending: PendingOutput<Self>,
        mix: Mix<Self>,
        sinkhorn: Sinkhorn,
    ) -> reference::Collapsed<Self> {
        if super::launch::can_collapse(&pending, &mix) {
            super::launch::collapse(pending, mix, sinkhorn)
        } else {
            reference::collapse::<Self>(spread(pending, mix), sinkhorn)
        }
    }

    fn hyper_head(
        pending: PendingOutput<Self>,
        mix: Mix<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        if super::launch::can_collapse(&pending, &mix) {
            super::launch::head(pending, mix, epsilon, norm_epsilon)
        } else {
            reference::head::<Self>(spread(pending, mix), epsilon, norm_epsilon)
        }
    }
}

/// Output shapes and dtypes that fusion needs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use crate::hyper_connection::args::MixMetadata;

    pub(super) fn normed(mix: &MixMetadata) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
        let (streams, input) = (&mix.streams, collapsed(&mix.streams));
        let shape = [streams.shape[0], mix.function.shape[0]];
        let coefficients = TensorSpec::new(shape.into(), DType::F32);
        (streams.clone(), input.clone(), input, coefficients)
    }

    pub(super) fn collapsed(streams: &TensorSpec) -> TensorSpec {
        let shape = [streams.shape[0], streams.shape[2]];
        TensorSpec::new(shape.into(), streams.dtype)
    }
}
