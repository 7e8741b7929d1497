use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{NormSizesLaunch, RmsNormBlueprint, rms_norm_kernel};
use crate::intrinsics::Target;
use crate::launching::{
    address_type, cube_count, is_float, output, plane_size, vector_size, with_contiguous_rows,
};
use crate::rows::RowCut;

/// Rows of a cube, where one plane is enough for a row.
const ROWS: u32 = 4;
/// Bytes of a row that a lane keeps in registers at most.
const HELD_BYTES: usize = 128;

pub(super) fn can_normalize(x: &CubeTensor, weight: Option<&CubeTensor>) -> bool {
    let [rows, columns] = x.shape().dims();
    i32::try_from(rows.max(columns)).is_ok()
        && is_float(x.dtype)
        && weight.is_none_or(|weight| is_float(weight.dtype))
        && plane_size(&x.client).is_some()
}

/// What a norm is launched with.
pub(crate) struct Norm {
    pub x: CubeTensor,
    pub weight: Option<CubeTensor>,
    pub output: CubeTensor,
    pub sizes: NormSizesLaunch,
    pub blueprint: RmsNormBlueprint,
    /// Elements of a vector of `x`, and of one of the weight.
    pub size: usize,
    pub weight_size: usize,
}

impl Norm {
    /// Of what [`can_normalize`] takes.
    pub(crate) fn new(x: CubeTensor, weight: Option<CubeTensor>, epsilon: f64) -> Self {
        let x = with_contiguous_rows(x);
        let weight = weight.map(into_contiguous);
        let [rows, columns] = x.shape().dims();
        let plane = plane_size(&x.client).expect("checked by can_normalize");
        let cut = RowCut::new(&x.client, plane, columns, x.elem_size());
        let size = vector_size(&x, usize::MAX);
        let weight_size = weight
            .as_ref()
            .map_or(size, |weight| vector_size(weight, size));
        let blueprint = RmsNormBlueprint {
            cut,
            held: (cut.steps * cut.unit) as usize * x.elem_size() <= HELD_BYTES,
            rows: if cut.planes == 1 { ROWS } else { 1 },
            target: Target::of(&x.client),
        };
        let row_vectors = x.meta.strides()[0] / size;
        Self {
            output: output(&x, [rows, columns], x.dtype),
            sizes: NormSizesLaunch::new(rows as u32, columns as u32, row_vectors, epsilon as f32),
            x,
            weight,
            blueprint,
            size,
            weight_size,
        }
    }
}

pub(super) fn rms_norm(x: CubeTensor, weight: Option<CubeTensor>, epsilon: f64) -> CubeTensor {
    let norm = Norm::new(x, weight, epsilon);
    let (x, weight, normalized) = (norm.x, norm.weight, norm.output);
    let [rows, _] = x.shape().dims();
    let client = x.client.clone();
    let RmsNormBlueprint { cut, rows: own, .. } = norm.blueprint;
    let weight_dtype = weight.as_ref().map_or(DType::F32, |weight| weight.dtype);
    let dtypes = [x.dtype, weight_dtype].map(dtype_to_storage_type);
    // SAFETY: rows and vectors past the end are read as others, and not written.
    unsafe {
        rms_norm_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows.div_ceil(own as usize)),
            CubeDim::new_2d(cut.plane, cut.planes * own),
            address_type([&x, &normalized]),
            norm.size,
            norm.weight_size,
            x.into_buffer_arg(),
            weight.map(CubeTensor::into_buffer_arg).into(),
            normalized.clone().into_buffer_arg(),
            norm.sizes,
            norm.blueprint,
            dtypes,
        );
    }
    normalized
}
