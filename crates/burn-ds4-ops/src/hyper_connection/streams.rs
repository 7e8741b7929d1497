use burn::tensor::{DType, Device, Tensor};

use super::coefficients::Coefficients;
use super::expand::expand;
use crate::OpError;

/// The residual streams of some tokens between two sub-layers, `[tokens, n, d]`.
///
/// The next operator can spread the last sub-layer's output together with its own work, see
/// [`collapse_norm`](super::collapse_norm) and [`head_norm`](super::head_norm). Code that needs the
/// tensor itself calls [`ready`](Self::ready).
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one of these is moved from block to block"
)]
pub enum Streams {
    /// Nothing is pending.
    Ready(Tensor<3>),
    /// Nothing is pending, but the [weights](Self::pre) of the connection before are known.
    Weighted {
        /// The streams: `[tokens, n, d]`, f32 / f16 / bf16.
        streams: Tensor<3>,
        /// The weight of each: f32 `[tokens, n]`.
        pre: Tensor<2>,
    },
    /// The output of a sub-layer is still to be spread over the streams before it, as [`expand`]
    /// does.
    Pending {
        /// The output of the sub-layer: `[tokens, d]`, f32 / f16 / bf16.
        output: Tensor<2>,
        /// The streams before the sub-layer: `[tokens, n, d]`, any of these.
        streams: Tensor<3>,
        /// The coefficients of the sub-layer.
        coefficients: Coefficients,
    },
}

impl Streams {
    /// Tokens, streams of a token, and channels of a stream.
    pub fn dims(&self) -> [usize; 3] {
        self.tensor().dims()
    }

    /// The device of the streams.
    pub fn device(&self) -> Device {
        self.tensor().device()
    }

    /// Returns the streams after the last sub-layer. Spreads its output first if that is pending.
    ///
    /// # Errors
    ///
    /// As [`expand`], if something is pending.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_ds4_ops::hyper_connection::{Coefficients, Streams};
    ///
    /// let device = Device::flex();
    /// // Two streams of one channel. The output goes to the second one, and nothing is mixed.
    /// let (pre, post) = (Tensor::ones([1, 2], &device), Tensor::from_data([[0.0, 1.0]], &device));
    /// let coefficients = Coefficients::new(pre, post, Tensor::eye(2, &device).unsqueeze())?;
    /// let pending = Streams::Pending {
    ///     output: Tensor::from_data([[5.0]], &device),
    ///     streams: Tensor::from_data([[[1.0], [10.0]]], &device),
    ///     coefficients,
    /// };
    /// pending.ready()?.into_data().assert_eq(&TensorData::from([[[1.0_f32], [15.0]]]), true);
    /// # }
    /// # Ok::<(), burn_ds4_ops::OpError>(())
    /// ```
    pub fn ready(self) -> Result<Tensor<3>, OpError> {
        match self {
            Self::Ready(streams) | Self::Weighted { streams, .. } => Ok(streams),
            Self::Pending {
                output,
                streams,
                coefficients,
            } => expand(output, streams, &coefficients),
        }
    }

    /// The weights of the streams that the connection before has computed: f32 `[tokens, n]`. Where
    /// there was none, the first stream has all weight.
    pub fn pre(&self) -> Tensor<2> {
        match self {
            Self::Pending { coefficients, .. } => coefficients.pre(),
            Self::Weighted { pre, .. } => pre.clone(),
            Self::Ready(streams) => {
                let [tokens, n, _] = streams.dims();
                let like = (&streams.device(), DType::F32);
                if tokens * n == 0 {
                    return Tensor::zeros([tokens, n], like);
                }
                let first = Tensor::ones([tokens, 1], like);
                match n {
                    1 => first,
                    _ => Tensor::cat(vec![first, Tensor::zeros([tokens, n - 1], like)], 1),
                }
            }
        }
    }

    /// The newest streams that exist. They have the shape, dtype and device of the pending ones.
    pub(super) fn tensor(&self) -> &Tensor<3> {
        match self {
            Self::Ready(streams)
            | Self::Weighted { streams, .. }
            | Self::Pending { streams, .. } => streams,
        }
    }
}

impl From<Tensor<3>> for Streams {
    fn from(streams: Tensor<3>) -> Self {
        Self::Ready(streams)
    }
}
