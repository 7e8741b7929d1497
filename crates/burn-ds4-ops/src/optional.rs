//! Optional tensors of an operator. Backend extensions do not support `Option`.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{Bool, Float, Int, Tensor};

macro_rules! optional {
    ($name:ident, $tensor:ident, $kind:ident, $what:literal) => {
        #[doc = concat!("An optional ", $what, ".")]
        #[derive(Clone, ExtensionType)]
        #[extension_type(fusion: cfg(feature = "fusion"))]
        pub enum $name<B: Backend> {
            /// Not given.
            None,
            /// Given.
            Some($tensor<B>),
        }

        impl<B: Backend> $name<B> {
            pub(crate) fn into_option(self) -> Option<$tensor<B>> {
                match self {
                    Self::None => None,
                    Self::Some(tensor) => Some(tensor),
                }
            }

            #[allow(dead_code, reason = "not every kind is looked at before a launch")]
            pub(crate) fn as_ref(&self) -> Option<&$tensor<B>> {
                match self {
                    Self::None => None,
                    Self::Some(tensor) => Some(tensor),
                }
            }
        }

        impl<const D: usize> From<Option<Tensor<D, $kind>>> for $name<Dispatch> {
            fn from(tensor: Option<Tensor<D, $kind>>) -> Self {
                tensor.map_or(Self::None, |tensor| Self::Some(tensor.into_dispatch()))
            }
        }
    };
}

optional!(OptionalFloat, FloatTensor, Float, "float tensor");
optional!(OptionalInt, IntTensor, Int, "integer tensor");
optional!(OptionalBool, BoolTensor, Bool, "mask");
