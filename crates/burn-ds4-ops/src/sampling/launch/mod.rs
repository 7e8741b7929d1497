mod log_probs;
mod penalties;
mod split;

use super::kernel::{
    LaneTablesLaunch, LanesLaunch, RowShapeLaunch, SampleBlueprint, sample_kernel, verify_kernel,
};
use super::params::MAX_COLUMNS;
use crate::launching::prelude::*;
use crate::select::CubeUnits;

pub(super) use log_probs::{can_have_log_probs, log_probs};
pub(super) use penalties::{apply_penalties, can_count, can_penalise, count_tokens};

/// Most and fewest units of a cube.
const MAX_UNITS: u32 = 1024;
const MIN_UNITS: u32 = 64;
/// Fewest vectors of each unit, unless that leaves too few units.
const MIN_UNIT_VECTORS: usize = 4;
/// Elements of the widest read: a unit may have to search a vector element by element.
const MAX_VECTOR: usize = 4;
/// Binary logarithms of the number of bins, with enough shared memory and with less.
const LOG2_BINS: u32 = 11;
const SMALL_LOG2_BINS: u32 = 9;
/// Binary logarithm of the most bins of a unit. Each bin is cleared and summed, however short the
/// row.
const LOG2_UNIT_BINS: u32 = 3;
/// Bytes of a bin's sum.
const WIDE_BYTES: usize = 8;
/// Bytes of a unit's sum, and of its share in that of its plane, which has four lanes at least.
const SCAN_BYTES: usize = WIDE_BYTES + WIDE_BYTES / 4;
/// Bytes of shared memory for the results of a search.
const FOUND_BYTES: usize = 64;
/// Units of a cube that verifies drafts.
const VERIFY_UNITS: u32 = 64;

/// Units of a cube and binary logarithm of the number of bins, if they fit in shared memory.
fn units_and_bins(logits: &CubeTensor) -> Option<(u32, u32)> {
    let [_, columns] = logits.dims();
    let most = Caps::of(&logits.client).cube_units;
    if most < MIN_UNITS {
        return None;
    }
    let most = (1 << most.ilog2()).min(MAX_UNITS);
    let wanted = columns
        .div_ceil(MAX_VECTOR * MIN_UNIT_VECTORS)
        .next_power_of_two() as u32;
    let fits = |&(units, log2_bins): &(u32, u32)| {
        let bytes = SCAN_BYTES * units as usize + (WIDE_BYTES << log2_bins) + FOUND_BYTES;
        Caps::of(&logits.client).fits_shared(bytes)
    };
    let sizes = [
        (most, LOG2_BINS),
        (most.min(1 << SMALL_LOG2_BINS), SMALL_LOG2_BINS),
    ];
    let (most, log2_bins) = sizes.into_iter().find(fits)?;
    // Rounded to a power of four, so that there are fewer kernels.
    let wanted = 1 << wanted.ilog2().next_multiple_of(2);
    let units = wanted.clamp(MIN_UNITS, most);
    Some((units, log2_bins.min(units.ilog2() + LOG2_UNIT_BINS)))
}

pub(super) fn can_sample(logits: &CubeTensor, words: [&CubeTensor; 2]) -> bool {
    let [rows, columns] = logits.dims();
    rows > 0
        && (1..=MAX_COLUMNS).contains(&columns)
        && i32::try_from(rows).is_ok()
        && is_float(logits.dtype)
        && words.iter().all(|words| is_wide_int(words.dtype))
        && Caps::of(&logits.client).counters
        && units_and_bins(logits).is_some()
}

/// The tables of all lanes as a kernel argument.
fn tables_arg([floats, words]: [CubeTensor; 2]) -> LaneTablesLaunch {
    let [floats, words] = [floats, words].map(into_contiguous);
    LaneTablesLaunch::new(floats.into_buffer_arg(), words.into_buffer_arg())
}

pub(super) fn sample(
    logits: CubeTensor,
    tables: [CubeTensor; 2],
    positions: CubeTensor,
) -> CubeTensor {
    let sampling = Sampling {
        logits: with_contiguous_rows(logits),
        tables,
        positions: into_contiguous(positions),
    };
    match split::division(&sampling.logits) {
        Some(division) => split::sample(sampling, &division),
        None => sample_whole(sampling),
    }
}

/// What tokens are chosen from, in rows that are contiguous.
struct Sampling {
    logits: CubeTensor,
    tables: [CubeTensor; 2],
    positions: CubeTensor,
}

impl Sampling {
    fn rows(&self) -> usize {
        self.logits.shape()[0]
    }

    fn row_shape(&self, size: usize) -> RowShapeLaunch {
        let [rows, columns] = self.logits.dims();
        RowShapeLaunch::new(
            rows as u32,
            (columns / size) as u32,
            self.logits.meta.strides()[0] / size,
            (rows / self.positions.shape()[0]) as u32,
        )
    }

    fn lanes_arg<I: Int>(&self) -> LanesLaunch<I> {
        LanesLaunch::new(
            tables_arg(self.tables.clone()),
            self.positions.clone().into_buffer_arg(),
        )
    }

    fn dtypes(&self) -> [ElemType; 2] {
        [self.logits.dtype, self.positions.dtype].map(dtype_to_storage_type)
    }
}

/// The units of a cube, as kernels exchange sums among them.
fn cube_units(client: &Client, cube: u32) -> CubeUnits {
    let caps = Caps::of(client);
    CubeUnits {
        cube,
        plane: caps.plane().unwrap_or(1),
        target: caps.target,
    }
}

/// Launches one cube for each row.
fn sample_whole(sampling: Sampling) -> CubeTensor {
    let logits = &sampling.logits;
    let rows = sampling.rows();
    let client = logits.client.clone();
    let tokens = output(logits, [rows], DType::I32);
    let size = vector_size(logits, MAX_VECTOR);
    let (units, log2_bins) = units_and_bins(logits).expect("checked by can_sample");
    let blueprint = SampleBlueprint {
        units: cube_units(&client, units),
        log2_bins,
    };
    let address = address_type([logits, &sampling.positions, &sampling.tables[0]]);
    // SAFETY: reads are of vectors of the rows, and of the parameters and position of a row's lane;
    // a cube writes its row's token.
    unsafe {
        sample_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(units),
            address,
            size,
            logits.clone().into_buffer_arg(),
            sampling.lanes_arg(),
            tokens.clone().into_buffer_arg(),
            sampling.row_shape(size),
            blueprint,
            sampling.dtypes(),
        );
    }
    tokens
}

pub(super) fn can_verify(tokens: &CubeTensor, drafts: &CubeTensor) -> bool {
    tokens.dtype == DType::I32
        && is_wide_int(drafts.dtype)
        && i32::try_from(tokens.shape()[0]).is_ok()
}

pub(super) fn verify(tokens: CubeTensor, drafts: CubeTensor) -> (CubeTensor, CubeTensor) {
    let (tokens, drafts) = (into_contiguous(tokens), into_contiguous(drafts));
    let [lanes, count] = drafts.dims();
    let client = tokens.client.clone();
    let verified = output(&tokens, [lanes, count + 1], DType::I32);
    let accepted = output(&tokens, [lanes], DType::I32);
    let cubes = lanes.div_ceil(VERIFY_UNITS as usize);
    let dtype = dtype_to_storage_type(drafts.dtype);
    let address = address_type([&tokens, &drafts]);
    // SAFETY: each unit reads and writes within its lane.
    unsafe {
        verify_kernel::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_1d(VERIFY_UNITS),
            address,
            tokens.into_buffer_arg(),
            drafts.into_buffer_arg(),
            verified.clone().into_buffer_arg(),
            accepted.clone().into_buffer_arg(),
            lanes as u32,
            count as u32,
            dtype,
        );
    }
    (verified, accepted)
}
