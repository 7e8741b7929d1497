use burn::tensor::FloatDType;

use super::reference;
use super::tensor_list::TensorList;
#[cfg(feature = "flex")]
use crate::gemm::INVARIANT_ROWS;
use crate::operators::prelude::*;

/// Extension of Burn's backends by the operators of this family; the default bodies are the
/// reference.
///
/// No tensor that gets here is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MatmulOps: Backend {
    /// `lhs · rhs`, f32 operands multiplied in f32.
    #[fusion(dtype = lhs, shape = {
        let mut shape = lhs.clone();
        let columns = rhs.num_dims() - 1;
        shape[columns] = rhs[columns];
        shape
    })]
    fn precise_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    /// See [`small_m_matmul_group`](super::small_m_matmul_group); `x` is `[rows, in]`. The
    /// `weights` have one dtype; there is one product for each, in their order.
    #[fusion(meta = |x, weights, dtype, _invariant_rows| fusion::group(x, weights, *dtype))]
    fn small_m_matmul(
        x: FloatTensor<Self>,
        #[extension_type] weights: TensorList<Self>,
        dtype: FloatDType,
        invariant_rows: usize,
    ) -> TensorList<Self> {
        weights.map(|weight| {
            reference::small_m_matmul::<Self>(x.clone(), weight, dtype, invariant_rows)
        })
    }
}

#[cfg(feature = "flex")]
impl MatmulOps for burn::backend::Flex {
    /// Multiplies a small number of rows one by one, so that the result is row-invariant. For two
    /// or more rows, the CPU's product would first copy all of `rhs` into its own layout, which
    /// takes longer than streaming `rhs` once for each.
    fn precise_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;
        use burn::tensor::{DType, FloatDType};

        if lhs.dtype() == DType::F16 {
            // The CPU's product rounds the sums of f16 on the way.
            let [lhs, rhs] = [lhs, rhs].map(|x| Self::float_cast(x, FloatDType::F32));
            return Self::float_cast(Self::precise_matmul(lhs, rhs), FloatDType::F16);
        }
        let shape = lhs.shape();
        if shape.num_dims() != 2 || !(2..=INVARIANT_ROWS).contains(&shape[0]) {
            return Self::float_matmul(lhs, rhs);
        }
        reference::one_by_one::<Self>(lhs, |row| Self::float_matmul(row, rhs.clone()))
    }
}

#[cfg(feature = "cube")]
impl MatmulOps for burn_cubecl::CubeBackend {
    fn precise_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        crate::gemm::launch::library::matmul(lhs, rhs)
    }

    fn small_m_matmul(
        x: FloatTensor<Self>,
        weights: TensorList<Self>,
        dtype: FloatDType,
        invariant_rows: usize,
    ) -> TensorList<Self> {
        super::launch::small_m_matmul(x, weights, dtype.into(), invariant_rows)
    }
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
pub(crate) mod fusion {
    use super::super::tensor_list::TensorListMetadata;
    use crate::optional::OptionalFloatMetadata;
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::FloatDType;

    pub(crate) fn group(
        x: &TensorSpec,
        weights: &TensorListMetadata,
        dtype: FloatDType,
    ) -> TensorListMetadata {
        let of = |weight: &OptionalFloatMetadata| match weight {
            OptionalFloatMetadata::None => OptionalFloatMetadata::None,
            OptionalFloatMetadata::Some(weight) => {
                let shape = [x.shape[0], weight.shape[0]].into();
                OptionalFloatMetadata::Some(TensorSpec::new(shape, dtype.into()))
            }
        };
        TensorListMetadata {
            a: of(&weights.a),
            b: of(&weights.b),
            c: of(&weights.c),
            d: of(&weights.d),
            e: of(&weights.e),
        }
    }
}
