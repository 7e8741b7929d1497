use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};

/// Extension of Burn's backends by the operator of this family.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MatmulOps: Backend {
    /// `lhs · rhs`, f32 operands multiplied in f32.
    #[cfg_attr(feature = "fusion", fusion(dtype = lhs, shape = {
        let mut shape = lhs.clone();
        let columns = rhs.num_dims() - 1;
        shape[columns] = rhs[columns];
        shape
    }))]
    fn precise_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }
}

#[cfg(feature = "flex")]
impl MatmulOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl MatmulOps for burn_cubecl::CubeBackend {
    fn precise_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;

        if lhs.dtype() == burn::tensor::DType::F32 {
            super::launch::f32_matmul(lhs, rhs)
        } else {
            Self::float_matmul(lhs, rhs)
        }
    }
}
