//! How kernels that sum over rows divide them among lanes: by the length of a row alone, and with one order of additions, so that
//! a row has the same bits whatever other rows there are and wherever it lies.

use cubecl::client::Client;
use cubecl::prelude::*;

use crate::intrinsics::{Target, group_sum};

/// Bytes of a unit: the widest read.
const UNIT_BYTES: usize = 16;
/// Units that a lane has at least before a row gets more planes.
const STEPS: usize = 2;
/// Planes of a row at most.
const MAX_PLANES: usize = 16;

/// Who has what of a row. Lanes take turns by units of 16 bytes, whether these can be read at once or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowCut {
    /// Elements of a unit.
    pub unit: u32,
    /// Units of a lane.
    pub steps: u32,
    /// Planes of a row.
    pub planes: u32,
    /// Lanes of a plane.
    pub plane: u32,
}

impl RowCut {
    /// For rows of `columns` elements of `bytes` bytes each.
    pub(crate) fn new(client: &Client, plane: u32, columns: usize, bytes: usize) -> Self {
        let most = client.properties().hardware.max_units_per_cube / plane;
        let most = MAX_PLANES.min(1 << most.ilog2());
        let lanes = plane as usize;
        let unit = UNIT_BYTES / bytes;
        let units = columns.div_ceil(unit);
        let planes = units.div_ceil(lanes * STEPS).next_power_of_two().min(most);
        Self {
            unit: unit as u32,
            steps: units.div_ceil(lanes * planes) as u32,
            planes: planes as u32,
            plane,
        }
    }
}

/// Index, in vectors of `size` elements, of vector `part` of this lane's unit number `step`.
#[cube]
pub(crate) fn vector_of(
    step: u32,
    #[comptime] part: usize,
    #[comptime] size: usize,
    #[comptime] cut: RowCut,
) -> u32 {
    let own = UNIT_POS_Y % cut.planes * cut.plane + UNIT_POS_X;
    let unit = step * comptime!(cut.planes * cut.plane) + own;
    unit * comptime!(cut.unit / size as u32) + comptime!(part as u32)
}

/// `sum` plus the squares of the elements, one after the other.
#[cube]
pub(crate) fn add_squares<F: Float, N: Size>(values: Vector<F, N>, sum: f32) -> f32 {
    let values = Vector::<f32, N>::cast_from(values);
    let mut sum = sum;
    #[unroll]
    for j in 0..N::value() {
        sum = fma(values.extract(j), values.extract(j), sum);
    }
    sum
}

/// Sum over the lanes of a row, in all of them, in a cube of `planes` planes, those of this row from plane `first` on. All units of the cube must be
/// here.
#[cube]
pub(crate) fn row_sum(
    x: f32,
    first: u32,
    #[comptime] planes: u32,
    #[comptime] cut: RowCut,
    #[comptime] target: Target,
) -> f32 {
    let sum = group_sum(x, cut.plane, target);
    if comptime!(cut.planes == 1) {
        sum
    } else {
        let mut stage = Shared::<[f32]>::new_slice(comptime!(planes as usize));
        if UNIT_POS_X == 0 {
            stage[UNIT_POS_Y as usize] = sum;
        }
        sync_cube();
        let mut total = stage[first as usize];
        #[unroll]
        for plane in 1..cut.planes {
            total += stage[(first + plane) as usize];
        }
        total
    }
}

/// Multiplies piece number `piece` of a vector by its weights.
#[cube]
pub(crate) fn multiply_piece<W: Float, N: Size, M: Size>(
    scaled: &mut Vector<f32, N>,
    weights: Vector<W, M>,
    #[comptime] piece: usize,
) {
    let size = M::value();
    #[unroll]
    for j in 0..size {
        let at = comptime!(piece * size + j);
        let product = scaled.extract(at) * f32::cast_from(weights.extract(j));
        scaled.insert(at, product);
    }
}
