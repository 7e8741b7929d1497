use burn::tensor::{DType, Tensor};

use crate::OpError;
use crate::validation::{F32, expect_shape, expect_tensor};

/// The coefficients of one sub-layer, f32. [`collapse`](super::collapse) returns them, and
/// [`expand`](super::expand) takes them.
#[derive(Clone, Debug)]
pub struct Coefficients {
    values: Tensor<2>,
    streams: usize,
}

impl Coefficients {
    /// Makes coefficients that do not come from [`collapse`](super::collapse).
    ///
    /// # Errors
    ///
    /// [`OpError`] for a dtype, shape or device that does not fit.
    pub fn new(pre: Tensor<2>, post: Tensor<2>, comb: Tensor<3>) -> Result<Self, OpError> {
        let [tokens, streams] = pre.dims();
        let like = ("pre", &pre.device());
        expect_tensor(("pre", &pre), F32, [tokens, streams], like)?;
        expect_tensor(("post", &post), F32, [tokens, streams], like)?;
        expect_tensor(("comb", &comb), F32, [tokens, streams, streams], like)?;
        if tokens * streams == 0 {
            let values = Tensor::zeros(
                [tokens, (2 + streams) * streams],
                (&pre.device(), DType::F32),
            );
            return Ok(Self::from_packed(values, streams));
        }
        let comb = comb.reshape([tokens, streams * streams]);
        Ok(Self::from_packed(
            Tensor::cat(vec![pre, post, comb], 1),
            streams,
        ))
    }

    pub(super) fn from_packed(values: Tensor<2>, streams: usize) -> Self {
        Self { values, streams }
    }

    /// [`pre`](Self::pre), [`post`](Self::post) and [`comb`](Self::comb) of a token side by side,
    /// as they are stored: `[tokens, (2 + n)·n]`.
    pub fn packed(&self) -> Tensor<2> {
        self.values.clone()
    }

    pub(super) fn expect_fit(&self, tokens: usize, streams: usize) -> Result<(), OpError> {
        let [actual, _] = self.values.dims();
        expect_shape("coefficients", [actual, self.streams], [tokens, streams])
    }

    /// Weight of each stream in the sub-layer's input: `[tokens, n]`.
    pub fn pre(&self) -> Tensor<2> {
        self.columns(0..self.streams)
    }

    /// Weight of the sub-layer's output in each stream: `[tokens, n]`.
    pub fn post(&self) -> Tensor<2> {
        self.columns(self.streams..2 * self.streams)
    }

    /// Mixing matrix with a row for each source and a column for each target: `[tokens, n, n]`.
    pub fn comb(&self) -> Tensor<3> {
        let n = self.streams;
        let [tokens, _] = self.values.dims();
        if tokens * n == 0 {
            // Burn takes a size of 0 in a new shape for that of the old one.
            return Tensor::zeros([tokens, n, n], (&self.values.device(), DType::F32));
        }
        self.columns(2 * n..(2 + n) * n).reshape([tokens, n, n])
    }

    fn columns(&self, range: std::ops::Range<usize>) -> Tensor<2> {
        let [tokens, _] = self.values.dims();
        if tokens * range.len() == 0 {
            // CubeCL devices panic on some operations without elements.
            return Tensor::zeros([tokens, range.len()], (&self.values.device(), DType::F32));
        }
        self.packed().slice([0..tokens, range])
    }
}
