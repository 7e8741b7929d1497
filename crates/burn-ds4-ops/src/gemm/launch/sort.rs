use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::optional;
use crate::caps::Caps;
use crate::dims::Dims;
use crate::gemm::kernel::{
    SortBlueprint, SortSizesLaunch, SortedProblemsLaunch, sort_kernel, sum_slots_kernel,
};
use crate::launching::{address_type, cube_count, output, vector_size};

/// Units of a cube that sums rows.
const SUM_UNITS: u32 = 256;

/// Pairs in groups of one expert.
pub(crate) struct SortedPairs {
    pub order: CubeTensor,
    pub starts: CubeTensor,
    pub(super) problems: CubeTensor,
    /// Capacity of the table of problems.
    pub(super) max_problems: usize,
}

impl SortedPairs {
    /// The problems as a kernel argument.
    pub(super) fn arg(&self) -> SortedProblemsLaunch {
        SortedProblemsLaunch::new(
            self.order.clone().into_buffer_arg(),
            self.problems.clone().into_buffer_arg(),
            self.max_problems as u32,
        )
    }
}

/// Groups pairs, and divides the groups into problems of at most `problem_pairs` pairs.
pub(crate) fn sort(ids: &CubeTensor, experts: usize, problem_pairs: usize) -> SortedPairs {
    let client = ids.client.clone();
    let pairs = ids.shape().num_elements();
    let max_problems = pairs.min(pairs.div_ceil(problem_pairs) + experts);
    let sorted = SortedPairs {
        order: output(ids, [1, pairs], DType::U32),
        starts: output(ids, [1, experts + 1], DType::U32),
        problems: output(ids, [1, 3 * max_problems + 1], DType::U32),
        max_problems,
    };
    let lanes = Caps::of(&client).lanes();
    let units = Caps::of(&client).cube_units;
    // By powers of two, so that there are few kernels for all numbers of pairs.
    let planes = pairs.div_ceil(lanes as usize).next_power_of_two();
    let planes = (planes as u32).min(units.min(1024) / lanes);
    let blueprint = SortBlueprint {
        experts: (experts as u32).next_multiple_of(lanes),
        lanes,
        planes,
        target: Caps::of(&client).target,
    };
    // SAFETY: ids that are no experts' are left out; there are no more problems than the table has
    // capacity for.
    unsafe {
        sort_kernel::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_2d(lanes, planes),
            ids.clone().into_buffer_arg(),
            sorted.order.clone().into_buffer_arg(),
            sorted.starts.clone().into_buffer_arg(),
            sorted.problems.clone().into_buffer_arg(),
            SortSizesLaunch::new(
                pairs as u32,
                experts as u32,
                problem_pairs as u32,
                max_problems as u32,
            ),
            blueprint,
            dtype_to_storage_type(ids.dtype),
        );
    }
    sorted
}

/// Sums the rows of each token's pairs, and a row of `addend` for each token.
pub(crate) fn sum_slots(
    rows: CubeTensor,
    (ids, experts): (&CubeTensor, usize),
    addend: Option<&CubeTensor>,
    dtype: DType,
) -> CubeTensor {
    let client = rows.client.clone();
    let ([tokens, slots], [_, columns]) = (ids.dims(), rows.dims());
    let sums = output(&rows, [tokens, columns], dtype);
    let size = vector_size(&rows, 4);
    let vectors = columns / size;
    let dtypes = [ids.dtype, dtype].map(dtype_to_storage_type);
    // SAFETY: reads are within `[pairs, columns]` and `[tokens, columns]`, and writes within the
    // latter.
    unsafe {
        sum_slots_kernel::launch_unchecked(
            &client,
            cube_count(&client, (tokens * vectors).div_ceil(SUM_UNITS as usize)),
            CubeDim::new_1d(SUM_UNITS),
            address_type([&rows, &sums]),
            size,
            rows.into_buffer_arg(),
            ids.clone().into_buffer_arg(),
            optional(addend),
            sums.clone().into_buffer_arg(),
            tokens as u32,
            slots as u32,
            experts as u32,
            vectors as u32,
            dtypes,
        );
    }
    sums
}
