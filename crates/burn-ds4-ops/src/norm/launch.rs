use super::kernel::{NormSizesLaunch, RmsNormBlueprint, rms_norm_kernel};
use crate::launching::prelude::*;
use crate::rows::RowPartition;

/// Rows of each cube, where one plane is enough for a row.
const CUBE_ROWS: u32 = 4;
/// Most bytes of a row that a lane keeps in registers.
const REGISTER_BYTES: usize = 128;

pub(super) fn can_normalize(x: &CubeTensor, weight: Option<&CubeTensor>) -> bool {
    let [rows, columns] = x.dims();
    i32::try_from(rows.max(columns)).is_ok()
        && is_float(x.dtype)
        && weight.is_none_or(|weight| is_float(weight.dtype))
        && Caps::of(&x.client).plane().is_some()
}

/// The arguments that a norm is launched with.
pub(crate) struct Norm {
    pub x: CubeTensor,
    pub weight: Option<CubeTensor>,
    pub output: CubeTensor,
    pub sizes: NormSizesLaunch,
    pub blueprint: RmsNormBlueprint,
    /// Elements of a vector of `x`.
    pub size: usize,
    /// Elements of a vector of the weight.
    pub weight_size: usize,
}

impl Norm {
    /// Prepares the launch. [`can_normalize`] must hold.
    pub(crate) fn new(x: CubeTensor, weight: Option<CubeTensor>, epsilon: f64) -> Self {
        let x = with_contiguous_rows(x);
        let weight = weight.map(into_contiguous);
        let [rows, columns] = x.dims();
        let plane = Caps::of(&x.client)
            .plane()
            .expect("checked by can_normalize");
        let partition = RowPartition::new(&x.client, plane, columns, x.elem_size());
        let size = vector_size(&x, usize::MAX);
        let weight_size = weight
            .as_ref()
            .map_or(size, |weight| vector_size(weight, size));
        let blueprint = RmsNormBlueprint {
            partition,
            in_registers: (partition.steps * partition.block) as usize * x.elem_size()
                <= REGISTER_BYTES,
            rows: if partition.planes == 1 { CUBE_ROWS } else { 1 },
            target: Caps::of(&x.client).target,
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
    let [rows, _] = x.dims();
    let client = x.client.clone();
    let RmsNormBlueprint {
        partition,
        rows: cube_rows,
        ..
    } = norm.blueprint;
    let weight_dtype = weight.as_ref().map_or(DType::F32, |weight| weight.dtype);
    let dtypes = [x.dtype, weight_dtype].map(dtype_to_storage_type);
    // SAFETY: rows past the end are read as the last one, vectors past the end as the first;
    // neither is written.
    unsafe {
        rms_norm_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows.div_ceil(cube_rows as usize)),
            CubeDim::new_2d(partition.plane, partition.planes * cube_rows),
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
