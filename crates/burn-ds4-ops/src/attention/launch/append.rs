//! Launch of storing new rows.

use super::compress::{F32_BYTES, ROW_UNITS, row_blueprint, row_norm};
use super::tensors::{Positions, stride};
use crate::attention::args::NewRows;
use crate::attention::kernel::{AppendSizesLaunch, AppenderLaunch, RowBlueprint, append_kernel};
use crate::launching::prelude::*;

pub(in crate::attention) fn can_append(new: &NewRows<CubeBackend>, ring: &CubeTensor) -> bool {
    let [batch, count, _] = new.x.dims();
    let [known, rotated] = new.angles.dims();
    let [_, slots, width] = ring.dims();
    rotated > 0
        && new.rounding.has_kernel()
        && batch <= MAX_CUBES
        && count <= MAX_CUBES
        && [new.x.dtype, ring.dtype, new.norm.dtype]
            .into_iter()
            .all(is_float)
        && is_wide_int(new.start.dtype)
        && fits_i32(Some(slots.max(width)))
        && fits_i32(known.checked_add(count))
        && Caps::of(&ring.client).fits_shared((2 * width + ROW_UNITS as usize) * F32_BYTES)
        && row_blueprint(&ring.client, width, rotated, new.rounding).is_some()
}

/// The arguments of the kernels that store new rows.
pub(super) struct AppendArguments {
    pub blueprint: RowBlueprint,
    /// New rows of a sequence that are stored.
    pub stored: usize,
    pub x: CubeTensor,
    pub norm: CubeTensor,
    epsilon: f64,
    pub positions: Positions,
    pub ring: CubeTensor,
}

impl AppendArguments {
    /// For arguments that [`can_append`] accepts.
    pub(super) fn new(new: NewRows<CubeBackend>, ring: CubeTensor) -> Self {
        let [_, count, width] = new.x.dims();
        let [_, rotated] = new.angles.dims();
        let [_, slots, _] = ring.dims();
        let blueprint = row_blueprint(&ring.client, width, rotated, new.rounding)
            .expect("checked by can_append");
        Self {
            blueprint,
            stored: count.min(slots),
            x: with_contiguous_rows(new.x),
            norm: into_contiguous(new.norm),
            epsilon: new.epsilon,
            positions: Positions::new(new.angles, new.start),
            ring: writable(with_contiguous_rows(ring)),
        }
    }

    /// The type of offsets into its tensors.
    pub(super) fn address_type(&self) -> AddressType {
        address_type([&self.x, &self.positions.angles, &self.ring])
    }

    /// The dtypes of new rows, of the ring, of norm weights and of starts.
    pub(super) fn dtypes(&self) -> [ElemType; 4] {
        [&self.x, &self.ring, &self.norm, &self.positions.start]
            .map(|tensor| dtype_to_storage_type(tensor.dtype))
    }

    /// The kernel argument.
    pub(super) fn arg<X: Float, R: Float, W: Float>(&self) -> AppenderLaunch<X, R, W> {
        let (count, slots) = (self.x.shape()[1], self.ring.shape()[1]);
        AppenderLaunch::new(
            self.x.clone().into_buffer_arg(),
            row_norm(self.norm.clone(), self.epsilon),
            self.ring.clone().into_buffer_arg(),
            AppendSizesLaunch::new(
                self.stored as u32,
                (count - self.stored) as u32,
                slots as u32,
                stride(&self.x, 0),
                stride(&self.x, 1),
                stride(&self.ring, 0),
                stride(&self.ring, 1),
            ),
        )
    }
}

pub(in crate::attention) fn append_rows(new: NewRows<CubeBackend>, ring: CubeTensor) -> CubeTensor {
    let append = AppendArguments::new(new, ring);
    let client = append.ring.client.clone();
    let [batch, _, _] = append.ring.dims();
    // SAFETY: there is a cube for each row that is stored; a vacant sequence, whose start is not in
    // the table, reads the angles of a position in it and writes nothing; slots are taken modulo
    // their number.
    unsafe {
        append_kernel::launch_unchecked(
            &client,
            CubeCount::Static(append.stored as u32, batch as u32, 1),
            CubeDim::new_2d(append.blueprint.partition.plane, append.blueprint.planes),
            append.address_type(),
            append.arg(),
            append.positions.arg(),
            append.blueprint,
            append.dtypes(),
        );
    }
    append.ring
}
