//! How the operators of a family are told to Burn.

#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
#[cfg(feature = "fusion")]
use burn::tensor::DType;

/// What the backends of families use.
pub(crate) mod prelude {
    #[cfg(feature = "fusion")]
    pub(crate) use burn::backend::fusion::custom::TensorSpec;
    pub(crate) use burn::backend::tensor::{FloatTensor, IntTensor};
    pub(crate) use burn::backend::{Backend, TensorMetadata, backend_extension};
    #[cfg(feature = "fusion")]
    pub(crate) use burn::tensor::DType;

    pub(crate) use super::operators;
    #[cfg(feature = "fusion")]
    pub(crate) use super::{like, spec};
    #[cfg(feature = "fusion")]
    pub(crate) use crate::dims::dims_of;
}

/// Extends Burn's backends by a family's operators. An operator's body is its reference, generic
/// over the backend. After it may come `if CONDITION => LAUNCH;`: where CubeCL's kernels take the
/// arguments, they are launched in place of the reference. What a backend does in another way comes
/// last, in `flex { .. }` and `cube { .. }`: whole methods of their implementations.
///
/// With fusion, [`spec`](crate::operators::spec) and [`like`](crate::operators::like) tell the
/// shapes and dtypes of outputs, which it needs before operators run. All of that needs what is in
/// the [`prelude`](crate::operators::prelude).
macro_rules! operators {
    (
        $(#[$($doc:tt)*])*
        pub trait $ops:ident: $base:ident $(+ $other:ident)*;
        $(
            $(#[$($attribute:tt)*])*
            fn $operator:ident $arguments:tt -> $result:tt $(<$of:ident>)? $reference:block
            $(if $condition:expr => $launch:expr;)?
        )*
        $(flex { $($flex:tt)* })?
        $(cube { $($cube:tt)* })?
    ) => {
        $(#[$($doc)*])*
        #[backend_extension(
            Flex: cfg(feature = "flex"),
            Cube: cfg(feature = "cube"),
            Fusion: cfg(feature = "fusion")
        )]
        pub trait $ops: $base $(+ $other)* {
            $(
                $(#[$($attribute)*])*
                fn $operator $arguments -> $result $(<$of>)? $reference
            )*
        }

        #[cfg(feature = "flex")]
        impl $ops for burn::backend::Flex {
            $($($flex)*)?
        }

        #[cfg(feature = "cube")]
        impl $ops for burn_cubecl::CubeBackend {
            $(
                crate::operators::operators! {
                    @launched
                    fn $operator $arguments -> ($result $(<$of>)?) $reference
                    $(if $condition => $launch)?
                }
            )*
            $($($cube)*)?
        }
    };
    (@launched fn $operator:ident $arguments:tt -> ($result:ty) $reference:block) => {};
    (
        @launched
        fn $operator:ident ($($(#[$_attribute:meta])* $argument:ident: $of:ty),* $(,)?)
        -> ($result:ty) $reference:block
        if $condition:expr => $launch:expr
    ) => {
        fn $operator($($argument: $of),*) -> $result {
            if $condition {
                $launch
            } else $reference
        }
    };
}

pub(crate) use operators;

/// An output of this shape and dtype.
#[cfg(feature = "fusion")]
pub(crate) fn spec<const D: usize>(shape: [usize; D], dtype: DType) -> TensorSpec {
    TensorSpec::new(shape.into(), dtype)
}

/// An output like an input.
#[cfg(feature = "fusion")]
pub(crate) fn like(x: &TensorSpec) -> TensorSpec {
    x.clone()
}
