//! A small number of rows of `x` by packed matrices and by 16-bit ones, in one launch.

use cubecl::prelude::*;

use crate::comptime_option::ComptimeOption;

use super::dense::{CubeRange, InputRows, MatrixList, TilesBlueprint, multiply_group};
use super::stream::{CubeSplit, SharedStorage, StreamBlueprint, StreamProblem, multiply_problems};

/// How [`linear_group_kernel`] is compiled: both parts for the same rows of `x` and as many planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearGroupBlueprint {
    /// For the two packed matrices, without ids and gates.
    pub packed: StreamBlueprint,
    pub dense: TilesBlueprint,
}

impl LinearGroupBlueprint {
    /// Bytes of shared memory: the pipelines of weights share one region, everything else is added.
    pub const fn shared_bytes(self) -> usize {
        self.packed.shared_bytes() + self.dense.shared_bytes() - self.dense.ring_bytes()
    }
}

/// Matrices of 16-bit weights, and the products `[rows, height]` with each.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DenseProblem<Y: Float> {
    list: MatrixList<Vector<u32, Const<4>>>,
    output: Box<[Y]>,
}

/// Multiplies rows of `x` by two packed matrices, as [`stream_kernel`](super::stream_kernel) does,
/// and by matrices of 16-bit weights, as [`tiles_kernel`](super::dense::tiles_kernel) does. The
/// first cubes, as many as `split` says, have the packed matrices, the rest have the others, so
/// that each product has the bits that it has alone.
///
/// - `x`: rows of vectors, `x_vectors` from one to the next
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn linear_group_kernel<X: Float, Y: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    mut first: StreamProblem<u32, X>,
    second: ComptimeOption<StreamProblem<u32, X>>,
    split: &CubeSplit,
    mut dense: DenseProblem<Y>,
    #[comptime] blueprint: LinearGroupBlueprint,
    #[define(X, Y)] _dtypes: [ElemType; 2],
) {
    let packed = comptime!(blueprint.packed);
    let mut storage = SharedStorage::new(packed, packed);
    let packed_cubes = split.count();
    if CUBE_POS_X < packed_cubes {
        multiply_problems::<X, u32, X, N>(
            x,
            x_vectors,
            &mut first,
            second,
            split,
            &mut storage,
            packed,
            comptime!(Some(packed)),
        );
    } else {
        let rows = first.sizes.tokens;
        let columns = first.matrices.layout.columns;
        let input_blueprint = comptime!(blueprint.dense.input);
        let mut input = InputRows::new(x, rows, x_vectors, columns, input_blueprint);
        let cubes = CubeRange {
            index: CUBE_POS_X - packed_cubes,
            count: CUBE_COUNT_X - packed_cubes,
        };
        multiply_group(
            &mut input,
            &dense.list,
            &mut dense.output,
            &mut storage.ring,
            cubes,
            comptime!(blueprint.dense),
        );
    }
}
