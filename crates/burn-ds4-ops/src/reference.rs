//! Functions that the references of several families share.

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{BoolDType, FloatDType, IntDType, Shape, Slice};

/// What references use.
pub(crate) mod prelude {
    pub(crate) use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
    pub(crate) use burn::backend::{Backend, TensorMetadata};
    pub(crate) use burn::tensor::{
        FloatDType, IndexingUpdateOp, Shape, Slice, TensorData, read_sync,
    };

    pub(crate) use super::{
        INT, are_within, as_f32, bool_broadcast, bool_dtype, bool_reshape, bool_slice, broadcast,
        int_broadcast, int_reshape, int_slice, log1p, numbers, reshape, slice, within,
    };
}

/// The dtype of ids, positions, counts and columns.
pub(crate) const INT: IntDType = IntDType::I32;

/// `log1p(t) / s` as a polynomial in `s²`, highest power first; relative error 1.7e-7 for `t` in
/// 0..=1 (minimax, by Remez).
const LOG1P: [f64; 4] = [0.342_260_51, 0.395_894_61, 0.666_760_03, 1.999_999_67];

/// The dtype of the masks that a device's comparisons give.
pub(crate) fn bool_dtype<B: Backend>(device: &B::Device) -> BoolDType {
    get_or_init_device_settings::<B>(device).bool_dtype
}

/// `log(1 + t)` for `t` in 0..=1, in f32.
///
/// Backends compute log1p as ln(1 + t), which has no correct digit left for small t. This uses
/// log1p(t) = 2·atanh(s) with s = t / (2 + t), whose quotient by s is a short polynomial in s².
pub(crate) fn log1p<B: Backend>(t: FloatTensor<B>) -> FloatTensor<B> {
    let s = B::float_div(t.clone(), B::float_add_scalar(t, 2.0.into()));
    let square = B::float_mul(s.clone(), s.clone());
    let [c3, c2, c1, c0] = LOG1P;
    let quotient = B::float_add_scalar(B::float_mul_scalar(square.clone(), c3.into()), c2.into());
    let quotient = B::float_add_scalar(B::float_mul(quotient, square.clone()), c1.into());
    let quotient = B::float_add_scalar(B::float_mul(quotient, square), c0.into());
    B::float_mul(s, quotient)
}

pub(crate) fn as_f32<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(x, FloatDType::F32)
}

/// Numbers up to which they are summed up on the device: an upload cannot be recorded, as decode
/// steps are.
const SUMMED: usize = 256;

/// The numbers of a range along an axis of a shape, the same along all others.
pub(crate) fn numbers<B: Backend>(
    range: Range<i64>,
    axis: usize,
    shape: impl Into<Shape>,
    device: &B::Device,
) -> IntTensor<B> {
    let shape = shape.into();
    let mut single = vec![1; shape.num_dims()];
    single[axis] = shape[axis];
    let count = (range.end - range.start).max(0) as usize;
    let numbers = match (1..=SUMMED).contains(&count) {
        true => {
            let ones = B::int_ones([count].into(), device, INT);
            B::int_add_scalar(B::int_cumsum(ones, 0), (range.start - 1).into())
        }
        false => B::int_arange(range, device, INT),
    };
    int_broadcast::<B>(numbers, single, shape)
}

/// Indices clamped to `0..count`, in their own dtype: a cast could bring one that is out of range
/// into it.
pub(crate) fn within<B: Backend>(indices: IntTensor<B>, count: usize) -> IntTensor<B> {
    B::int_clamp(indices, 0.into(), (count as i64 - 1).into())
}

/// Whether indices are in `0..count`.
pub(crate) fn are_within<B: Backend>(indices: IntTensor<B>, count: usize) -> BoolTensor<B> {
    let dtype = bool_dtype::<B>(&indices.device());
    B::bool_and(
        B::int_greater_equal_elem(indices.clone(), 0.into(), dtype),
        B::int_lower_elem(indices, (count as i64).into(), dtype),
    )
}

/// The slice of a range of one axis, and all of the others.
pub(crate) fn ranges(shape: &Shape, axis: usize, range: Range<usize>) -> Vec<Slice> {
    let mut ranges: Vec<Slice> = shape.iter().map(|&size| (0..size).into()).collect();
    ranges[axis] = range.into();
    ranges
}

macro_rules! shaping {
    (
        $tensor:ident,
        $to:ident by $reshape:ident,
        $of:ident by $expand:ident,
        $part:ident by $slice:ident
    ) => {
        /// Gives a tensor another shape.
        pub(crate) fn $to<B: Backend>(x: $tensor<B>, shape: impl Into<Shape>) -> $tensor<B> {
            B::$reshape(x, shape.into())
        }

        /// Gives a tensor another shape, and repeats it along axes of size 1.
        pub(crate) fn $of<B: Backend>(
            x: $tensor<B>,
            shape: impl Into<Shape>,
            wide: impl Into<Shape>,
        ) -> $tensor<B> {
            B::$expand(B::$reshape(x, shape.into()), wide.into())
        }

        /// Slices a range of one axis, and all of the others.
        pub(crate) fn $part<B: Backend>(
            x: $tensor<B>,
            axis: usize,
            range: Range<usize>,
        ) -> $tensor<B> {
            let ranges = ranges(&x.shape(), axis, range);
            B::$slice(x, &ranges)
        }
    };
}

shaping!(
    FloatTensor,
    reshape by float_reshape,
    broadcast by float_expand,
    slice by float_slice
);
shaping!(
    IntTensor,
    int_reshape by int_reshape,
    int_broadcast by int_expand,
    int_slice by int_slice
);
shaping!(
    BoolTensor,
    bool_reshape by bool_reshape,
    bool_broadcast by bool_expand,
    bool_slice by bool_slice
);
