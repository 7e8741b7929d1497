use super::args::{Mix, PendingOutput, Sinkhorn};
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use crate::matmul::MatmulOps;
use crate::norm::NormOps;
use crate::operators::prelude::*;

/// The collapsed streams.
#[cfg(feature = "fusion")]
fn collapsed(streams: &TensorSpec) -> TensorSpec {
    spec([streams.shape[0], streams.shape[2]], streams.dtype)
}

operators! {
    /// The backend operations of this family.
    ///
    /// No tensor passed to these methods is empty.
    pub trait HyperConnectionOps: MatmulOps + NormOps;

    /// See [`expand`](super::expand()).
    #[fusion(meta = |_output, streams, _coefficients| streams.clone())]
    fn hyper_expand(
        output: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        coefficients: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::expand::<Self>(output, streams, coefficients)
    }
    if launch::can_expand(&output, &streams) => launch::expand(output, streams, coefficients);

    /// See [`collapse_norm`](super::collapse_norm). Returns the streams, the input, its norm and
    /// all coefficients, `[tokens, (2 + n)·n]`. Without a weight, the input takes the place of its
    /// norm.
    #[fusion(meta = |_pending, mix, _sinkhorn| (
        mix.streams.clone(),
        collapsed(&mix.streams),
        collapsed(&mix.streams),
        spec([mix.streams.shape[0], mix.function.shape[0]], DType::F32),
    ))]
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
    if launch::can_collapse(&pending, &mix) => launch::collapse(pending, mix, sinkhorn);

    /// See [`head_norm`](super::head_norm). Without a weight there is no norm.
    #[fusion(meta = |_pending, mix, _epsilon, _norm_epsilon| collapsed(&mix.streams))]
    fn hyper_head(
        #[extension_type] pending: PendingOutput<Self>,
        #[extension_type] mix: Mix<Self>,
        epsilon: f64,
        norm_epsilon: f64,
    ) -> FloatTensor<Self> {
        reference::head::<Self>(spread(pending, mix), epsilon, norm_epsilon)
    }
    if launch::can_collapse(&pending, &mix) => launch::head(pending, mix, epsilon, norm_epsilon);
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
