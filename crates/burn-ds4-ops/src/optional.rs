//! Optional tensors of an operator. Backend extensions do not support `Option`.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{Bool, Int, Tensor};

/// An optional float tensor.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalFloat<B: Backend> {
    /// Not given.
    None,
    /// Given.
    Some(FloatTensor<B>),
}

/// An optional integer tensor.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalInt<B: Backend> {
    /// Not given.
    None,
    /// Given.
    Some(IntTensor<B>),
}

/// An optional mask.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalBool<B: Backend> {
    /// Not given.
    None,
    /// Given.
    Some(BoolTensor<B>),
}

impl<B: Backend> OptionalFloat<B> {
    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::None => None,
            Self::Some(tensor) => Some(tensor),
        }
    }
}

impl<B: Backend> OptionalInt<B> {
    pub(crate) fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::None => None,
            Self::Some(tensor) => Some(tensor),
        }
    }
}

impl<B: Backend> OptionalBool<B> {
    pub(crate) fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            Self::None => None,
            Self::Some(tensor) => Some(tensor),
        }
    }
}

impl<const D: usize> From<Option<Tensor<D>>> for OptionalFloat<Dispatch> {
    fn from(tensor: Option<Tensor<D>>) -> Self {
        tensor.map_or(Self::None, |tensor| Self::Some(tensor.into_dispatch()))
    }
}

impl<const D: usize> From<Option<Tensor<D, Int>>> for OptionalInt<Dispatch> {
    fn from(tensor: Option<Tensor<D, Int>>) -> Self {
        tensor.map_or(Self::None, |tensor| Self::Some(tensor.into_dispatch()))
    }
}

impl<const D: usize> From<Option<Tensor<D, Bool>>> for OptionalBool<Dispatch> {
    fn from(tensor: Option<Tensor<D, Bool>>) -> Self {
        tensor.map_or(Self::None, |tensor| Self::Some(tensor.into_dispatch()))
    }
}
