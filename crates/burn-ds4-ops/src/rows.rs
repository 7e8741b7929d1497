//! How kernels that sum over rows divide them among lanes. The partition depends on the length of a
//! row alone, and additions have one order. So a row has the same bits whatever other rows there
//! are and wherever it lies.

use cubecl::client::Client;
use cubecl::prelude::*;

use crate::caps::Caps;
use crate::caps::Target;
use crate::intrinsics::{group_sum, modulo};

/// Bytes of a block: the widest read.
const BLOCK_BYTES: usize = 16;
/// The fewest blocks of a lane before a row gets more planes.
const MIN_STEPS: usize = 2;
/// The most planes of a row.
const MAX_PLANES: usize = 16;

/// How a row is divided among lanes. Lanes take blocks of 16 bytes in turn, whether or not a block
/// can be read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowPartition {
    /// Elements of a block.
    pub block: u32,
    /// Blocks of a lane.
    pub steps: u32,
    /// Planes of a row.
    pub planes: u32,
    /// Lanes of a plane.
    pub plane: u32,
}

impl RowPartition {
    /// The partition of rows of `columns` elements of `bytes` bytes each.
    pub(crate) fn new(client: &Client, plane: u32, columns: usize, bytes: usize) -> Self {
        let most = Caps::of(client).cube_units / plane;
        let most = MAX_PLANES.min(1 << most.ilog2());
        let lanes = plane as usize;
        let block = BLOCK_BYTES / bytes;
        let blocks = columns.div_ceil(block);
        let planes = blocks
            .div_ceil(lanes * MIN_STEPS)
            .next_power_of_two()
            .min(most);
        Self {
            block: block as u32,
            steps: blocks.div_ceil(lanes * planes) as u32,
            planes: planes as u32,
            plane,
        }
    }
}

/// The index, in vectors of `size` elements, of vector `part` of this lane's block number `step`.
#[cube]
pub(crate) fn vector_of(
    step: u32,
    #[comptime] part: usize,
    #[comptime] size: usize,
    #[comptime] partition: RowPartition,
) -> u32 {
    let own = modulo(UNIT_POS_Y, partition.planes) * partition.plane + UNIT_POS_X;
    let block = step * comptime!(partition.planes * partition.plane) + own;
    block * comptime!(partition.block / size as u32) + comptime!(part as u32)
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

/// The sum over the lanes of a row, in all of them. The cube has `planes` planes, and those of this
/// row begin at plane `first`. Every unit of the cube must call this.
#[cube]
pub(crate) fn row_sum(
    x: f32,
    first: u32,
    #[comptime] planes: u32,
    #[comptime] partition: RowPartition,
    #[comptime] target: Target,
) -> f32 {
    let sum = group_sum(x, partition.plane, target);
    if comptime!(partition.planes == 1) {
        sum
    } else {
        let mut partials = Shared::<[f32]>::new_slice(comptime!(planes as usize));
        if UNIT_POS_X == 0 {
            partials[UNIT_POS_Y as usize] = sum;
        }
        sync_cube();
        let mut total = partials[first as usize];
        #[unroll]
        for plane in 1..partition.planes {
            total += partials[(first + plane) as usize];
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
