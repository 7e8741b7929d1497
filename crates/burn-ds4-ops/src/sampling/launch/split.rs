//! Rows that many cubes work on.

use super::super::kernel::{
    COUNTERS, DrawStages, MASS_WORDS, RowPartsLaunch, SampleBlueprint, SplitBlueprint,
    SplitShapeLaunch, TOTAL_WORDS, draw_kernel, highest_kernel,
};
use super::{FOUND_BYTES, MAX_VECTOR, SCAN_BYTES, Sampling, WIDE_BYTES, cube_units};
use crate::launching::prelude::*;

/// Most rows that are divided among cubes, and fewest columns.
const SPLIT_ROWS: usize = 128;
const SPLIT_COLUMNS: usize = 8192;
/// Cubes of all rows together: one for almost every SM of a large GPU.
const SPLIT_CUBES: usize = 128;
/// Fewest segments of a row: the cube that chooses the token reads one of them.
const MIN_SEGMENTS: usize = 16;
/// Units of a cube that looks for the highest logit.
const HIGHEST_UNITS: u32 = 256;
/// Units of a cube that weighs, and binary logarithms of its bins, with enough shared memory and
/// with less.
const SIZES: [(u32, u32); 3] = [(1024, 11), (512, 10), (256, 9)];
/// Elements that each unit sorts at most.
const UNIT_CANDIDATES: u32 = 2;
/// Bytes of a bin: of its sum and its count.
const BIN_BYTES: usize = WIDE_BYTES + 4;
/// Bytes of shared memory for each unit: its sum, its segment and its candidates.
const UNIT_BYTES: usize = SCAN_BYTES + 4 + 8 * UNIT_CANDIDATES as usize;
/// Buffers of the kernel that weighs, and one for its sizes.
const BINDINGS: u32 = 9;

/// How rows are divided. Sums of weights are exact, so no token depends on it.
pub(super) struct Division {
    /// Elements of a vector.
    size: usize,
    /// Units of a cube, and the binary logarithm of its bins.
    units: u32,
    log2_bins: u32,
    /// Segments of a row, vectors of a segment, and segments of a cube.
    segments: usize,
    segment_vectors: usize,
    cube_segments: usize,
}

/// How rows are divided, if they are: long rows, of which there are few.
pub(super) fn division(logits: &CubeTensor) -> Option<Division> {
    let [rows, columns] = logits.dims();
    let caps = Caps::of(&logits.client);
    if rows > SPLIT_ROWS || columns < SPLIT_COLUMNS || caps.bindings < BINDINGS {
        return None;
    }
    let fits = |&(units, log2_bins): &(u32, u32)| {
        let bytes = (BIN_BYTES << log2_bins) + UNIT_BYTES * units as usize + FOUND_BYTES;
        units <= caps.cube_units && caps.fits_shared(bytes)
    };
    let (units, log2_bins) = SIZES.into_iter().find(fits)?;
    let size = vector_size(logits, MAX_VECTOR);
    let vectors = columns / size;
    let cubes = (SPLIT_CUBES / rows).max(1);
    let segment_vectors = vectors.div_ceil(cubes.max(MIN_SEGMENTS));
    let segments = vectors.div_ceil(segment_vectors);
    Some(Division {
        size,
        units,
        log2_bins,
        segments,
        segment_vectors,
        cube_segments: segments.div_ceil(cubes),
    })
}

pub(super) fn sample(sampling: Sampling, division: &Division) -> CubeTensor {
    let Division {
        size,
        log2_bins,
        segments,
        ..
    } = *division;
    let logits = &sampling.logits;
    let rows = sampling.rows();
    let client = logits.client.clone();
    let bins = 1 << log2_bins;
    let tokens = output(logits, [rows], DType::I32);
    let highest = output(logits, [rows, segments, 2], DType::U32);
    let masses = output(logits, [rows, segments, bins * MASS_WORDS], DType::U32);
    let totals = output(logits, [rows, bins * TOTAL_WORDS + COUNTERS], DType::U32);
    let shape = || {
        SplitShapeLaunch::new(
            sampling.row_shape(size),
            segments as u32,
            division.segment_vectors as u32,
            division.cube_segments as u32,
        )
    };
    let address = address_type([logits, &masses, &totals]);
    let finder = HIGHEST_UNITS.min(division.units);
    // SAFETY: reads are of vectors of the rows and of highest logits of their segments; writes are
    // of the highest logit of a segment, and of the sums of its row.
    unsafe {
        highest_kernel::launch_unchecked(
            &client,
            CubeCount::Static(segments as u32, rows as u32, 1),
            CubeDim::new_1d(finder),
            address,
            size,
            logits.clone().into_buffer_arg(),
            highest.clone().into_buffer_arg(),
            totals.clone().into_buffer_arg(),
            shape(),
            SampleBlueprint {
                units: cube_units(&client, finder),
                log2_bins,
            },
            dtype_to_storage_type(logits.dtype),
        );
    }
    let launch = |cubes: usize, stages: DrawStages| {
        let blueprint = SplitBlueprint {
            sample: SampleBlueprint {
                units: cube_units(&client, division.units),
                log2_bins,
            },
            unit_candidates: UNIT_CANDIDATES,
            stages,
        };
        let [highest, masses] = [&highest, &masses].map(|part| part.clone().into_buffer_arg());
        // SAFETY: reads are of vectors of the rows, and of the parameters and position of a row's
        // lane; a cube writes the sums of its segments, those of its row, and its row's token.
        unsafe {
            draw_kernel::launch_unchecked(
                &client,
                CubeCount::Static(cubes as u32, rows as u32, 1),
                CubeDim::new_1d(division.units),
                address,
                size,
                logits.clone().into_buffer_arg(),
                sampling.lanes_arg(),
                tokens.clone().into_buffer_arg(),
                RowPartsLaunch::new(highest, masses),
                totals.clone().into_buffer_arg(),
                shape(),
                blueprint,
                sampling.dtypes(),
            );
        }
    };
    let cubes = segments.div_ceil(division.cube_segments);
    if Caps::of(&client).last_cube {
        launch(cubes, DrawStages::Both);
    } else {
        launch(cubes, DrawStages::Weigh);
        launch(1, DrawStages::Choose);
    }
    tokens
}
