use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::FloatDType;

use super::reference;
use super::weight_group::WeightGroup;

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

    /// See [`small_m_matmul`](super::small_m_matmul); `x` is `[rows, in]`.
    #[fusion(dtype = (*dtype).into(), shape = [x[0], weight[0]].into())]
    fn small_m_matmul(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dtype: FloatDType,
        invariant_rows: usize,
    ) -> FloatTensor<Self> {
        reference::small_m_matmul::<Self>(x, weight, dtype, invariant_rows)
    }

    /// See [`small_m_matmul_group`](super::small_m_matmul_group), for at most as many rows as are
    /// invariant. The `weights` have one dtype; the products with each are laid out as
    /// [`group_layout`] says.
    #[fusion(meta = |x, weights, dtype| fusion::group(x, weights, *dtype))]
    fn small_m_matmul_group(
        x: FloatTensor<Self>,
        #[extension_type] weights: WeightGroup<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        reference::small_m_matmul_group::<Self>(x, weights.into_vec(), dtype)
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
        if shape.num_dims() != 2 || !(2..=super::INVARIANT_ROWS).contains(&shape[0]) {
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
        weight: FloatTensor<Self>,
        dtype: FloatDType,
        invariant_rows: usize,
    ) -> FloatTensor<Self> {
        super::launch::small_m_matmul(x, weight, dtype.into(), invariant_rows)
    }

    fn small_m_matmul_group(
        x: FloatTensor<Self>,
        weights: WeightGroup<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        super::launch::small_m_matmul_group(x, &weights.into_vec(), dtype.into())
    }
}

/// The products of each matrix begin at a multiple of this many elements, so that a view of them
/// needs no copy.
const GROUP_ALIGNMENT: usize = 256;

/// Where each matrix's products with `rows` rows begin, and the length of all of them.
pub(crate) fn group_layout(
    rows: usize,
    heights: impl IntoIterator<Item = usize>,
) -> (Vec<usize>, usize) {
    let mut length = 0;
    let starts = heights.into_iter().map(|height| {
        let start = length;
        length += (rows * height).next_multiple_of(GROUP_ALIGNMENT);
        start
    });
    (starts.collect(), length)
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
pub(crate) mod fusion {
    use super::super::weight_group::WeightGroupMetadata;
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::FloatDType;

    pub(crate) fn group(
        x: &TensorSpec,
        weights: &WeightGroupMetadata,
        dtype: FloatDType,
    ) -> TensorSpec {
        let weights = match weights {
            WeightGroupMetadata::One(a) => vec![a],
            WeightGroupMetadata::Two(a, b) => vec![a, b],
            WeightGroupMetadata::Three(a, b, c) => vec![a, b, c],
            WeightGroupMetadata::Four(a, b, c, d) => vec![a, b, c, d],
            WeightGroupMetadata::Five(a, b, c, d, e) => vec![a, b, c, d, e],
        };
        let heights = weights.iter().map(|weight| weight.shape[0]);
        let (_, length) = super::group_layout(x.shape[0], heights);
        TensorSpec::new([length].into(), dtype.into())
    }
}
