use super::args::CausalWindow;
use super::kernel::{
    CausalWindowArgsLaunch, LogitRowsLaunch, LongRowBlueprint, MergeBlueprint, SegmentBlueprint,
    SegmentCandidatesLaunch, SegmentSizesLaunch, TopkIdsLaunch, TopkValuesLaunch, ValuesBlueprint,
    WholeRowBlueprint, WindowArgsLaunch, long_row_kernel, merge_kernel, segment_kernel,
    values_kernel, whole_row_kernel,
};
use crate::caps::Target;
use crate::launching::prelude::*;
use crate::select::CubeUnits;

/// Columns up to which one cube holds a whole row in registers.
const WHOLE_COLUMNS: usize = 8192;
/// Most units of such a cube, and of a smaller one where there are many rows: each unit costs the
/// same however little it holds.
const WHOLE_UNITS: u32 = 512;
const WHOLE_UNITS_SMALL: u32 = 256;
/// Rows from which on cubes that hold whole rows are smaller.
const SMALL_CUBE_ROWS: usize = 1024;
/// Most elements that a unit holds of a row, a segment or a sample: each has a bit of a word.
const MAX_UNIT_ELEMENTS: usize = 32;

/// Rows up to which each is divided into segments, so that all SMs work on them.
const SPLIT_ROWS: usize = 16;
/// Elements of a segment.
const SEGMENT_ELEMENTS: usize = 4096;
/// Units of the cube that merges the candidates of a row.
const MERGE_UNITS: u32 = 1024;
/// Most slots of each of these units.
const MAX_SLOTS: usize = 16;
/// How many times the average number of candidates a segment may have, where windows leave other
/// segments fewer.
const SEGMENT_IMBALANCE: f64 = 1.4;

/// Units of a cube that works on a long row, and of a larger one where each row can have an SM.
const LONG_UNITS: u32 = 512;
const LONG_UNITS_LARGE: u32 = 1024;
/// Elements that a unit reads at once.
const READ_ELEMENTS: usize = 16;
/// Columns of a row for each element of its sample, at least.
const COLUMNS_PER_SAMPLE: usize = 30;
/// Most words of the bitmap of chosen columns. Longer rows are mapped in parts.
const MAX_BITMAP_WORDS: usize = 8192;
/// Bytes of shared memory that are used for neither the candidates nor the bitmap.
const RESERVED_BYTES: usize = 14 << 10;
/// Bytes of a candidate.
const CANDIDATE_BYTES: usize = 8;

/// Units of a cube that collects or sorts values.
const VALUE_UNITS: u32 = 512;

/// Whether kernels can clamp bounds to a number of columns, which a narrower integer may not hold.
fn are_bounds(bounds: Option<&CubeTensor>) -> bool {
    bounds.is_none_or(|bounds| is_wide_int(bounds.dtype))
}

pub(super) fn can_select(logits: &CubeTensor, bounds: [Option<&CubeTensor>; 2]) -> bool {
    let [rows, columns] = logits.dims();
    let caps = Caps::of(&logits.client);
    rows > 0
        && columns > 0
        && u32::try_from(rows).is_ok()
        && is_float(logits.dtype)
        && bounds.into_iter().all(are_bounds)
        && caps.counters
        && caps.shared_bytes >= 2 * RESERVED_BYTES
        && caps
            .plane()
            .is_some_and(|plane| caps.cube_units >= 2 * plane)
}

pub(super) fn top_k_ids(
    logits: CubeTensor,
    starts: Option<CubeTensor>,
    ends: Option<CubeTensor>,
    causal: CausalWindow,
    k: usize,
) -> CubeTensor {
    let logits = with_contiguous_rows(logits);
    let rows = logits.shape()[0];
    let ids = output(&logits, [rows, k], DType::I32);
    let launch = TopkLaunch::new(logits, starts, ends, causal, k);
    if launch.is_whole() {
        launch.launch_whole(&ids);
    } else if rows <= SPLIT_ROWS && launch.can_split() {
        launch.launch_split(&ids);
    } else {
        launch.launch_long(&ids);
    }
    ids
}

/// Rows of vectors of `size` as a kernel argument.
fn rows_arg<W: CubePrimitive>(logits: &CubeTensor, size: usize) -> LogitRowsLaunch<W> {
    LogitRowsLaunch::new(
        logits.clone().into_buffer_arg(),
        logits.meta.shape()[1] as u32,
        logits.meta.strides()[0] / size,
    )
}

fn ids_arg(ids: &CubeTensor) -> TopkIdsLaunch {
    TopkIdsLaunch::new(ids.clone().into_buffer_arg(), ids.meta.shape()[1] as u32)
}

/// The arguments that all kernels are launched with.
struct TopkLaunch {
    client: Client,
    logits: CubeTensor,
    starts: Option<CubeTensor>,
    ends: Option<CubeTensor>,
    causal: CausalWindow,
    k: usize,
    rows: usize,
    columns: usize,
    /// Elements of a vector.
    size: usize,
    plane: u32,
    target: Target,
}

impl TopkLaunch {
    fn new(
        logits: CubeTensor,
        starts: Option<CubeTensor>,
        ends: Option<CubeTensor>,
        causal: CausalWindow,
        k: usize,
    ) -> Self {
        let client = logits.client.clone();
        let [rows, columns] = logits.dims();
        Self {
            size: vector_size(&logits),
            plane: Caps::of(&client).plane().expect("checked by can_select"),
            target: Caps::of(&client).target,
            client,
            logits,
            starts: starts.map(into_contiguous),
            ends: ends.map(into_contiguous),
            causal,
            k,
            rows,
            columns,
        }
    }

    /// Vectors that hold a row.
    fn vectors(&self) -> usize {
        self.columns.div_ceil(self.size)
    }

    fn rows_arg<W: CubePrimitive>(&self) -> LogitRowsLaunch<W> {
        rows_arg(&self.logits, self.size)
    }

    fn windows_arg<I: Int>(&self) -> WindowArgsLaunch<I> {
        let CausalWindow {
            next_n,
            counted,
            ratio,
        } = self.causal;
        let most = self.causal.max_length(self.columns);
        WindowArgsLaunch::new(
            self.starts.clone().map(CubeTensor::into_buffer_arg).into(),
            self.ends.clone().map(CubeTensor::into_buffer_arg).into(),
            CausalWindowArgsLaunch::new(next_n as u32, counted as u32, ratio as u32, most as u32),
        )
    }

    /// The configuration of a cube that should have `cube` units.
    fn units(&self, cube: u32) -> CubeUnits {
        let most = Caps::of(&self.client).cube_units;
        CubeUnits {
            // Half a power of two is still one, and still a multiple of the plane.
            cube: cube.min(1 << most.ilog2()),
            plane: self.plane,
            target: self.target,
        }
    }

    fn dtypes(&self) -> [ElemType; 2] {
        let bounds = self.ends.as_ref().map_or(DType::I32, |ends| ends.dtype);
        [self.logits.dtype, bounds].map(dtype_to_storage_type)
    }

    /// The units of a cube that holds a whole row.
    fn whole_units(&self) -> CubeUnits {
        let most = if self.rows < SMALL_CUBE_ROWS {
            WHOLE_UNITS
        } else {
            WHOLE_UNITS_SMALL
        };
        let vectors = self.vectors().next_power_of_two() as u32;
        self.units(vectors.clamp(2 * self.plane, most))
    }

    fn is_whole(&self) -> bool {
        let most = self.whole_units().cube as usize * MAX_UNIT_ELEMENTS;
        self.columns <= WHOLE_COLUMNS && self.vectors() * self.size <= most
    }

    fn launch_whole(&self, ids: &CubeTensor) {
        let units = self.whole_units();
        let vectors = self.vectors().div_ceil(units.cube as usize);
        let blueprint = WholeRowBlueprint {
            vectors: vectors.next_power_of_two() as u32,
            units,
        };
        // SAFETY: reads are within the vectors of a row, all of which are in the buffer; writes are
        // within `[rows, k]`.
        unsafe {
            whole_row_kernel::launch_unchecked(
                &self.client,
                cube_count(&self.client, self.rows),
                CubeDim::new_1d(units.cube),
                address_type([&self.logits, ids]),
                self.size,
                self.rows as u32,
                self.rows_arg(),
                self.windows_arg(),
                ids_arg(ids),
                blueprint,
                self.dtypes(),
            );
        }
    }

    fn launch_long(&self, ids: &CubeTensor) {
        let large = self.rows <= Caps::of(&self.client).processors as usize;
        let (blueprint, rank) = self.long_row(if large { LONG_UNITS_LARGE } else { LONG_UNITS });
        // SAFETY: reads are within the vectors of a row, all of which are in the buffer; writes are
        // within `[rows, k]`.
        unsafe {
            long_row_kernel::launch_unchecked(
                &self.client,
                cube_count(&self.client, self.rows),
                CubeDim::new_1d(blueprint.units.cube),
                address_type([&self.logits, ids]),
                self.size,
                self.rows as u32,
                self.rows_arg(),
                self.logits.clone().into_buffer_arg(),
                self.windows_arg(),
                ids_arg(ids),
                rank,
                blueprint,
                self.dtypes(),
            );
        }
    }

    /// Vectors that each unit of a segment's cube reads.
    fn segment_vectors(&self) -> usize {
        let (cube, merging) = (self.units(LONG_UNITS), self.units(MERGE_UNITS));
        let (cube, merging) = (cube.cube as usize, merging.cube as usize);
        // The merging cube reads the count of each segment with a unit of its own.
        let fewest = self.vectors().div_ceil(cube * merging);
        let vectors = (SEGMENT_ELEMENTS / self.size / cube).max(fewest);
        vectors.next_power_of_two()
    }

    /// Whether a cube can hold a segment in registers.
    fn can_split(&self) -> bool {
        self.segment_vectors() * self.size <= MAX_UNIT_ELEMENTS
    }

    /// Launches one kernel over the segments of rows and one that merges them, row by row.
    fn launch_split(&self, ids: &CubeTensor) {
        let (long, rank) = self.long_row(LONG_UNITS);
        let merging = self.units(MERGE_UNITS);
        let cube = long.units.cube as usize;
        let vectors = self.segment_vectors();
        let segments = self.vectors().div_ceil(vectors * cube);
        let capacity = vectors * cube * self.size;

        let sampled = cube * long.sample as usize * self.size;
        let expected = f64::from(rank) * self.columns as f64 / (sampled * segments) as f64;
        let imbalance = if self.ends.is_some() {
            SEGMENT_IMBALANCE
        } else {
            1.0
        };
        // A segment that is like the others hardly ever has more candidates than slots. If it has,
        // the merge takes longer.
        let likely = (imbalance * expected + 5.0 * expected.sqrt() + 8.0) as usize;
        let max_slots = MAX_SLOTS * merging.cube as usize / segments;
        let slots = likely.next_multiple_of(self.plane as usize).min(max_slots);
        let segment_blueprint = SegmentBlueprint {
            vectors: vectors as u32,
            sample: long.sample,
            slots: slots as u32,
            units: long.units,
        };
        let merge_blueprint = MergeBlueprint {
            unit_slots: (segments * slots).div_ceil(merging.cube as usize) as u32,
            slots: slots as u32,
            long: LongRowBlueprint {
                units: merging,
                ..long
            },
        };
        let bits = output(&self.logits, [self.rows, segments, capacity], DType::U32);
        let columns = output(&self.logits, [self.rows, segments, capacity], DType::U32);
        let counts = output(&self.logits, [self.rows, segments], DType::U32);
        let candidates = || {
            let parts = [&bits, &columns, &counts].map(|part| part.clone().into_buffer_arg());
            let [bits, columns, counts] = parts;
            SegmentCandidatesLaunch::new(bits, columns, counts)
        };
        let address = address_type([&self.logits, ids, &bits]);
        // SAFETY: reads are within the vectors of a row, all of which are in the buffer, and within
        // the candidates that a segment has counted; a segment's output has capacity for all of its
        // elements; the merge writes within `[rows, k]`.
        unsafe {
            segment_kernel::launch_unchecked(
                &self.client,
                CubeCount::Static(segments as u32, self.rows as u32, 1),
                CubeDim::new_1d(cube as u32),
                address,
                self.size,
                self.rows_arg(),
                self.logits.clone().into_buffer_arg(),
                self.windows_arg(),
                candidates(),
                rank,
                long.capacity,
                segment_blueprint,
                self.dtypes(),
            );
            merge_kernel::launch_unchecked(
                &self.client,
                CubeCount::Static(self.rows as u32, 1, 1),
                CubeDim::new_1d(merging.cube),
                address,
                self.size,
                self.rows_arg(),
                self.logits.clone().into_buffer_arg(),
                self.windows_arg(),
                candidates(),
                ids_arg(ids),
                SegmentSizesLaunch::new(segments as u32, capacity as u32),
                merge_blueprint,
                self.dtypes(),
            );
        }
    }

    /// How a cube of `cube` units works on a row, and the rank in its sample from which on elements
    /// are candidates.
    fn long_row(&self, cube: u32) -> (LongRowBlueprint, u32) {
        let units = self.units(cube);
        let shared = Caps::of(&self.client).shared_bytes;
        let available = shared.saturating_sub(RESERVED_BYTES);
        // The bitmap gets a quarter of what is available, with one word of padding for every 32.
        let words = self
            .columns
            .div_ceil(32)
            .next_power_of_two()
            .min(MAX_BITMAP_WORDS);
        let words = words.min(1 << (available / 16).max(1).ilog2());
        let words = words.max(self.units(MERGE_UNITS).cube as usize);
        let capacity = available.saturating_sub(words * 33 / 8) / CANDIDATE_BYTES;
        let capacity = capacity.min((2 * self.k + 2048).next_multiple_of(1024));
        let once = units.cube as usize * self.size;
        let mut sample = 1;
        while 2 * sample as usize * self.size <= MAX_UNIT_ELEMENTS
            && 2 * sample as usize * once * COLUMNS_PER_SAMPLE <= self.columns
        {
            sample *= 2;
        }
        // The number of the k largest that are in the sample is roughly normally distributed.
        let expected = (self.k * once) as f64 * f64::from(sample) / self.columns as f64;
        let rank = (expected + 4.0 * expected.sqrt() + 4.0).ceil() as u32;
        let blueprint = LongRowBlueprint {
            vectors: (READ_ELEMENTS / self.size) as u32,
            sample,
            capacity: capacity as u32,
            words: words as u32,
            units,
        };
        (blueprint, rank)
    }
}

/// The widest vector of up to 16 bytes at which every row begins, and which does not end after the
/// buffer in the last row.
fn vector_size(tensor: &CubeTensor) -> usize {
    let ([rows, columns], stride) = (tensor.dims(), tensor.meta.strides()[0]);
    let elements = tensor.handle.size_in_used() as usize / tensor.elem_size();
    let mut sizes = tensor.client.io_optimized_vector_sizes(tensor.elem_size());
    let fits = |size: &usize| {
        (rows == 1 || stride.is_multiple_of(*size))
            && (rows - 1) * stride + columns.next_multiple_of(*size) <= elements
    };
    sizes.find(fits).unwrap_or(1)
}

/// Slots that are sorted: the smallest power of two that holds `k`.
fn sorted_slots(k: usize) -> usize {
    k.next_power_of_two().max(2)
}

pub(super) fn can_order(
    logits: &CubeTensor,
    starts: Option<&CubeTensor>,
    ids: &CubeTensor,
    sorted: bool,
) -> bool {
    let ([rows, columns], [_, k]) = (logits.dims(), ids.dims());
    let caps = Caps::of(&logits.client);
    rows > 0
        && columns > 0
        && u32::try_from(rows).is_ok()
        && is_float(logits.dtype)
        && ids.dtype == DType::I32
        && are_bounds(starts)
        && (!sorted || caps.fits_shared(2 * size_of::<u32>() * sorted_slots(k)))
}

pub(super) fn top_k_values(
    logits: CubeTensor,
    starts: Option<CubeTensor>,
    ids: CubeTensor,
    sorted: bool,
) -> (CubeTensor, CubeTensor) {
    let (logits, ids) = (with_contiguous_rows(logits), into_contiguous(ids));
    let starts = starts.map(into_contiguous);
    let [rows, k] = ids.dims();
    let client = logits.client.clone();
    let values = output(&logits, [rows, k], logits.dtype);
    let ordered = output(&logits, [rows, k], DType::I32);
    let slots = sorted_slots(k) as u32;
    let most = 1 << Caps::of(&client).cube_units.ilog2();
    let blueprint = ValuesBlueprint {
        sorted: if sorted { slots } else { 0 },
        units: (slots / 2).clamp(1, VALUE_UNITS).min(most),
    };
    let bounds = starts.as_ref().map_or(DType::I32, |starts| starts.dtype);
    let dtypes = [logits.dtype, bounds].map(dtype_to_storage_type);
    // SAFETY: ids are within the windows of `[rows, columns]`, or negative; writes are within
    // `[rows, k]`.
    unsafe {
        values_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(blueprint.units),
            address_type([&logits, &ids]),
            rows as u32,
            rows_arg(&logits, 1),
            starts.map(CubeTensor::into_buffer_arg).into(),
            ids_arg(&ids),
            TopkValuesLaunch::new(
                values.clone().into_buffer_arg(),
                ordered.clone().into_buffer_arg(),
            ),
            f32::NEG_INFINITY,
            blueprint,
            dtypes,
        );
    }
    (values, ordered)
}
