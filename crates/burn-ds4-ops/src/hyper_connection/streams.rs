use burn::tensor::{Device, Tensor};

use super::{Coefficients, expand};
use crate::OpError;

/// The residual streams of some tokens, `[tokens, n, d]`, as they are between two sub-layers.
///
/// Whoever needs them next can spread the last sub-layer's output together with what it does itself, see
/// [`collapse_norm`](super::collapse_norm) and [`head_norm`](super::head_norm). Whoever needs the tensor asks for it:
/// [`ready`](Self::ready).
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one of these is moved from block to block"
)]
pub enum Streams {
    /// All is done.
    Ready(Tensor<3>),
    /// The output of a sub-layer is still to be spread over the streams before it, as [`expand`] does.
    Pending {
        /// What the sub-layer has made of its input: `[tokens, d]`, f32 / f16 / bf16.
        output: Tensor<2>,
        /// The streams before it: `[tokens, n, d]`, any of these.
        streams: Tensor<3>,
        /// Their coefficients.
        coefficients: Coefficients,
    },
}

impl Streams {
    /// Tokens, streams of a token, and channels of a stream.
    pub fn dims(&self) -> [usize; 3] {
        self.tensor().dims()
    }

    /// Where they are.
    pub fn device(&self) -> Device {
        self.tensor().device()
    }

    /// The streams after the last sub-layer.
    ///
    /// # Errors
    ///
    /// As [`expand`], if something is pending.
    pub fn ready(self) -> Result<Tensor<3>, OpError> {
        match self {
            Self::Ready(streams) => Ok(streams),
            Self::Pending {
                output,
                streams,
                coefficients,
            } => expand(output, streams, &coefficients),
        }
    }

    /// The newest that there are, which have the shape, dtype and device of those to come.
    pub(super) fn tensor(&self) -> &Tensor<3> {
        match self {
            Self::Ready(streams) | Self::Pending { streams, .. } => streams,
        }
    }
}

impl From<Tensor<3>> for Streams {
    fn from(streams: Tensor<3>) -> Self {
        Self::Ready(streams)
    }
}
