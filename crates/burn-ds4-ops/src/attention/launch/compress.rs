//! Launches of the compressor.

use super::pages::Pages;
use super::tensors::{Positions, stride};
use crate::attention::args::Compression;
use crate::attention::kernel::{
    CompressBlueprint, CompressSizesLaunch, CompressorLaunch, RowBlueprint, RowNormLaunch,
    compress_kernel,
};
use crate::attention::options::{DECODE_TOKENS, RowRounding};
use crate::launching::prelude::*;
use crate::roundtrip::hadamard_scale;
use crate::rows::RowPartition;

/// The most units of a cube that stores rows.
pub(super) const ROW_UNITS: u32 = 512;
/// The fewest and the most cubes that the blocks of a sequence are divided among, besides that of
/// the first blocks.
const DIVIDED_CUBES: [usize; 2] = [32, 512];
/// Bytes of an f32.
pub(super) const F32_BYTES: usize = 4;

/// Configuration of a kernel that stores rows.
pub(super) fn row_blueprint(
    client: &Client,
    width: usize,
    rotated: usize,
    rounding: RowRounding,
) -> Option<RowBlueprint> {
    let plane = Caps::of(client).plane()?;
    let partition = RowPartition::new(client, plane, width, F32_BYTES);
    let most = Caps::of(client).cube_units.min(ROW_UNITS) / plane;
    Some(RowBlueprint {
        width: width as u32,
        rotated: rotated as u32,
        rounding,
        partition,
        planes: (width as u32)
            .div_ceil(plane)
            .min(most)
            .max(partition.planes),
        target: Caps::of(client).target,
    })
}

/// The norm of rows of as many channels as `weight`, which is contiguous.
pub(super) fn row_norm<W: Float>(weight: CubeTensor, epsilon: f64) -> RowNormLaunch<W> {
    let hadamard_scale = hadamard_scale(weight.shape()[0]);
    RowNormLaunch::new(weight.into_buffer_arg(), epsilon as f32, hadamard_scale)
}

fn blueprint(
    client: &Client,
    inputs: &Compression<CubeBackend>,
    width: usize,
) -> Option<CompressBlueprint> {
    let rotated = inputs.angles.shape()[1];
    Some(CompressBlueprint {
        row: row_blueprint(client, width, rotated, inputs.rounding)?,
        ratio: inputs.ratio as u32,
        overlap: inputs.overlap,
        divided: false,
    })
}

pub(in crate::attention) fn can_compress(
    inputs: &Compression<CubeBackend>,
    raw: &CubeTensor,
    rows: &CubeTensor,
) -> bool {
    let [batch, count, raw_width] = inputs.projections.dims();
    let [known, rotated] = inputs.angles.dims();
    let [_, slots, _] = raw.dims();
    let ([_, _, width], available) = (rows.dims(), available(inputs, rows));
    rotated > 0
        && inputs.rounding.has_kernel()
        && batch <= MAX_CUBES
        && is_float(rows.dtype)
        && is_float(inputs.norm.dtype)
        && is_wide_int(inputs.start.dtype)
        && fits_i32(Some(slots.max(available).max(raw_width)))
        && fits_i32(rows.shape()[0].checked_mul(rows.shape()[1]))
        && fits_i32(known.checked_add(count))
        && fits_i32(inputs.ratio.checked_mul(4))
        && Caps::of(&rows.client).fits_shared((2 * width + ROW_UNITS as usize) * F32_BYTES)
        && blueprint(&rows.client, inputs, width).is_some()
}

/// Compressed rows of a sequence.
fn available(inputs: &Compression<CubeBackend>, rows: &CubeTensor) -> usize {
    let pages = inputs.pages.as_ref().map_or(1, |pages| pages.shape()[1]);
    pages * rows.shape()[1]
}

/// The arguments of the kernels that run a compressor.
pub(super) struct CompressArguments {
    pub blueprint: CompressBlueprint,
    pub pages: Option<Pages>,
    sizes: CompressSizesLaunch,
    projections: CubeTensor,
    bias: CubeTensor,
    norm: CubeTensor,
    epsilon: f64,
    raw: CubeTensor,
    rows: CubeTensor,
}

impl CompressArguments {
    /// For arguments that [`can_compress`] accepts.
    pub(super) fn new(inputs: Compression<CubeBackend>, raw: CubeTensor, rows: CubeTensor) -> Self {
        let [_, count, _] = inputs.projections.dims();
        let [_, slots, _] = raw.dims();
        let ([_, _, width], available) = (rows.dims(), available(&inputs, &rows));
        let pages = Pages::new(&inputs.pages, &rows);
        let rows = match pages {
            None => rows,
            Some(_) => into_contiguous(rows),
        };
        let blueprint = blueprint(&rows.client, &inputs, width).expect("checked by can_compress");
        let [raw, rows] = [raw, rows].map(|tensor| writable(with_contiguous_rows(tensor)));
        let projections = with_contiguous_rows(inputs.projections);
        let bias = with_contiguous_rows(inputs.bias);
        let sizes = CompressSizesLaunch::new(
            count as u32,
            count.div_ceil(inputs.ratio) as u32,
            slots as u32,
            available as u32,
            stride(&projections, 0),
            stride(&projections, 1),
            stride(&bias, 0),
            stride(&raw, 0),
            stride(&raw, 1),
            stride(&rows, 0),
            stride(&rows, 1),
        );
        Self {
            blueprint,
            pages,
            sizes,
            projections,
            bias,
            norm: into_contiguous(inputs.norm),
            epsilon: inputs.epsilon,
            raw,
            rows,
        }
    }

    /// The type of offsets into its tensors.
    pub(super) fn address_type(&self) -> AddressType {
        address_type([&self.projections, &self.bias, &self.raw, &self.rows])
    }

    /// The kernel argument, and the tensors that it updates.
    pub(super) fn launch<R: Float, W: Float>(
        self,
    ) -> (CompressorLaunch<R, W>, (CubeTensor, CubeTensor)) {
        let (raw, rows) = (self.raw.clone(), self.rows.clone());
        let compressor = CompressorLaunch::new(
            self.projections.into_buffer_arg(),
            self.bias.into_buffer_arg(),
            row_norm(self.norm, self.epsilon),
            self.raw.into_buffer_arg(),
            self.rows.into_buffer_arg(),
            self.sizes,
        );
        (compressor, (raw, rows))
    }
}

pub(in crate::attention) fn compress_rows(
    inputs: Compression<CubeBackend>,
    raw: CubeTensor,
    rows: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let client = rows.client.clone();
    let [batch, count, _] = inputs.projections.dims();
    let blocks = count.div_ceil(inputs.ratio);
    let dtypes = [rows.dtype, inputs.norm.dtype, inputs.start.dtype].map(dtype_to_storage_type);
    let positions = Positions::new(inputs.angles.clone(), inputs.start.clone());
    let arguments = CompressArguments::new(inputs, raw, rows);
    let blueprint = CompressBlueprint {
        divided: count > DECODE_TOKENS,
        ..arguments.blueprint
    };
    let mut cubes = 1;
    if blueprint.divided {
        let [fewest, most] = DIVIDED_CUBES;
        let others = blocks.saturating_sub(blueprint.series() as usize);
        cubes += others.clamp(fewest, most);
    }
    let address = arguments
        .address_type()
        .max(address_type([&positions.angles]));
    let pages = arguments.pages.clone();
    let (compressor, state) = arguments.launch();
    // SAFETY: a vacant sequence, whose start is not in the table, is read as if at the start of it
    // and writes nothing; for blocks that are not complete or not among the rows, nothing is read
    // or written; slots are taken modulo their number.
    unsafe {
        compress_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, batch as u32, 1),
            CubeDim::new_2d(blueprint.row.partition.plane, blueprint.row.planes),
            address,
            positions.arg(),
            pages.as_ref().map(Pages::arg).into(),
            compressor,
            blueprint,
            dtypes,
        );
    }
    state
}
