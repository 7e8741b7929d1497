use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::Tokens;
use super::kernel::{
    LongRowBlueprint, MergeBlueprint, StretchBlueprint, TokensLaunch, Units, ValuesBlueprint,
    WholeRowBlueprint, long_row_kernel, merge_kernel, stretch_kernel, values_kernel,
    whole_row_kernel,
};
use crate::intrinsics::Target;
use crate::launching::{
    address_type, cube_count, has_counters, is_float, is_wide_int, output, plane_size,
    with_contiguous_rows,
};

/// Columns up to which a cube has a whole row in registers.
const WHOLE_COLUMNS: usize = 8192;
/// Units of such a cube at most: fewer where many rows share the device, as each unit costs the same whatever it holds.
const WHOLE_UNITS: u32 = 512;
const WHOLE_UNITS_OF_MANY: u32 = 256;
/// Rows from which on they are many.
const MANY_ROWS: usize = 1024;
/// Elements of a unit at most, of a row, a stretch or a sample: each has a bit of a word.
const MAX_ELEMENTS: usize = 32;

/// Rows up to which one is split, so that all of the device works on them.
const SPLIT_ROWS: usize = 16;
/// Elements of a stretch of such a row.
const STRETCH: usize = 4096;
/// Units of the cube that brings the candidates of a row together, and slots of a unit at most.
const MERGE_UNITS: u32 = 1024;
const MAX_SLOTS: usize = 16;
/// How much more of the candidates a stretch may have than its share, where windows leave others less.
const UNEVEN: f64 = 1.4;

/// Units of a cube that works on a long row: more if so few rows leave multiprocessors idle.
const LONG_UNITS: u32 = 512;
const LONG_UNITS_OF_FEW: u32 = 1024;
const FEW_ROWS: usize = 132;
/// Elements that a unit reads at once.
const STEP: usize = 16;
/// A row is that many times as long as its sample, at least.
const SAMPLED: usize = 30;
/// Words of the map of chosen columns at most: longer rows are mapped in parts.
const MAX_WORDS: usize = 8192;
/// Bytes of shared memory that neither the candidates nor the map can have, and of a candidate.
const RESERVED: usize = 14 << 10;
const CANDIDATE: usize = 8;

/// Units of a cube that collects or sorts values.
const VALUE_UNITS: u32 = 512;

/// Whether kernels can clamp bounds to a number of columns: a narrower integer may not hold it.
fn are_bounds(bounds: Option<&CubeTensor>) -> bool {
    bounds.is_none_or(|bounds| is_wide_int(bounds.dtype))
}

pub(super) fn can_select(logits: &CubeTensor, bounds: [Option<&CubeTensor>; 2]) -> bool {
    let [rows, columns] = logits.shape().dims();
    let properties = logits.client.properties();
    rows > 0
        && columns > 0
        && u32::try_from(rows).is_ok()
        && is_float(logits.dtype)
        && bounds.into_iter().all(are_bounds)
        && has_counters(&logits.client)
        && properties.hardware.max_shared_memory_size >= 2 * RESERVED
        && properties.hardware.max_units_per_cube >= 2 * properties.hardware.plane_size_max
        && plane_size(&logits.client).is_some()
}

pub(super) fn top_k_ids(
    logits: CubeTensor,
    starts: Option<CubeTensor>,
    ends: Option<CubeTensor>,
    tokens: Tokens,
    k: usize,
) -> CubeTensor {
    let logits = with_contiguous_rows(logits);
    let rows = logits.shape()[0];
    let ids = output(&logits, [rows, k], DType::I32);
    let problem = Problem::new(logits, starts, ends, tokens, k);
    if problem.is_whole() {
        problem.launch_whole(&ids);
    } else if rows <= SPLIT_ROWS && problem.can_split() {
        problem.launch_split(&ids);
    } else {
        problem.launch_long(&ids);
    }
    ids
}

fn launched(tokens: Tokens, columns: usize) -> TokensLaunch {
    let most = tokens.most(columns);
    let Tokens {
        next_n,
        counted,
        ratio,
    } = tokens;
    TokensLaunch::new(next_n as u32, counted as u32, ratio as u32, most as u32)
}

/// What all kernels are launched with.
struct Problem {
    client: Client,
    logits: CubeTensor,
    starts: Option<CubeTensor>,
    ends: Option<CubeTensor>,
    tokens: Tokens,
    k: usize,
    rows: usize,
    columns: usize,
    /// Elements of a vector.
    size: usize,
    plane: u32,
    target: Target,
}

impl Problem {
    fn new(
        logits: CubeTensor,
        starts: Option<CubeTensor>,
        ends: Option<CubeTensor>,
        tokens: Tokens,
        k: usize,
    ) -> Self {
        let client = logits.client.clone();
        let [rows, columns] = logits.shape().dims();
        Self {
            size: vector_size(&logits),
            plane: plane_size(&client).expect("checked by can_select"),
            target: Target::of(&client),
            client,
            logits,
            starts: starts.map(into_contiguous),
            ends: ends.map(into_contiguous),
            tokens,
            k,
            rows,
            columns,
        }
    }

    /// Vectors of a row.
    fn vectors(&self) -> usize {
        self.columns.div_ceil(self.size)
    }

    fn row_vectors(&self) -> usize {
        self.logits.meta.strides()[0] / self.size
    }

    /// Of a cube that should have `cube` units.
    fn units(&self, cube: u32) -> Units {
        let most = self.client.properties().hardware.max_units_per_cube;
        Units {
            // Halves of a power of two stay one, and a multiple of the plane.
            cube: cube.min(1 << most.ilog2()),
            plane: self.plane,
            target: self.target,
        }
    }

    fn dtypes(&self) -> [ElemType; 2] {
        let bounds = self.ends.as_ref().map_or(DType::I32, |ends| ends.dtype);
        [self.logits.dtype, bounds].map(dtype_to_storage_type)
    }

    /// The units of a cube that takes a row whole.
    fn whole_units(&self) -> Units {
        let most = if self.rows < MANY_ROWS {
            WHOLE_UNITS
        } else {
            WHOLE_UNITS_OF_MANY
        };
        let vectors = self.vectors().next_power_of_two() as u32;
        self.units(vectors.clamp(2 * self.plane, most))
    }

    fn is_whole(&self) -> bool {
        let most = self.whole_units().cube as usize * MAX_ELEMENTS;
        self.columns <= WHOLE_COLUMNS && self.vectors() * self.size <= most
    }

    fn launch_whole(self, ids: &CubeTensor) {
        let units = self.whole_units();
        let vectors = self.vectors().div_ceil(units.cube as usize);
        let blueprint = WholeRowBlueprint {
            vectors: vectors.next_power_of_two() as u32,
            units,
        };
        let (dtypes, address) = (self.dtypes(), address_type([&self.logits, ids]));
        let (cubes, row_vectors) = (cube_count(&self.client, self.rows), self.row_vectors());
        // SAFETY: reads are within the vectors of a row, all of which are in the buffer; writes are within `[rows, k]`.
        unsafe {
            whole_row_kernel::launch_unchecked(
                &self.client,
                cubes,
                CubeDim::new_1d(units.cube),
                address,
                self.size,
                self.logits.into_buffer_arg(),
                self.starts.map(CubeTensor::into_buffer_arg).into(),
                self.ends.map(CubeTensor::into_buffer_arg).into(),
                ids.clone().into_buffer_arg(),
                self.rows as u32,
                self.columns as u32,
                row_vectors,
                launched(self.tokens, self.columns),
                self.k as u32,
                blueprint,
                dtypes,
            );
        }
    }

    fn launch_long(self, ids: &CubeTensor) {
        let few = self.rows <= FEW_ROWS;
        let (blueprint, rank) = self.long_row(if few { LONG_UNITS_OF_FEW } else { LONG_UNITS });
        let (dtypes, address) = (self.dtypes(), address_type([&self.logits, ids]));
        let (cubes, row_vectors) = (cube_count(&self.client, self.rows), self.row_vectors());
        // SAFETY: as for whole rows.
        unsafe {
            long_row_kernel::launch_unchecked(
                &self.client,
                cubes,
                CubeDim::new_1d(blueprint.units.cube),
                address,
                self.size,
                self.logits.clone().into_buffer_arg(),
                self.logits.into_buffer_arg(),
                self.starts.map(CubeTensor::into_buffer_arg).into(),
                self.ends.map(CubeTensor::into_buffer_arg).into(),
                ids.clone().into_buffer_arg(),
                self.rows as u32,
                self.columns as u32,
                row_vectors,
                launched(self.tokens, self.columns),
                self.k as u32,
                rank,
                blueprint,
                dtypes,
            );
        }
    }

    /// Vectors of a unit that works on a stretch.
    fn stretch_vectors(&self) -> usize {
        let (cube, merging) = (self.units(LONG_UNITS), self.units(MERGE_UNITS));
        let (cube, merging) = (cube.cube as usize, merging.cube as usize);
        // No more stretches than the merging cube has units to ask for their counts.
        let fewest = self.vectors().div_ceil(cube * merging);
        let vectors = (STRETCH / self.size / cube).max(fewest);
        vectors.next_power_of_two()
    }

    /// Whether a cube can hold a stretch.
    fn can_split(&self) -> bool {
        self.stretch_vectors() * self.size <= MAX_ELEMENTS
    }

    /// In two launches: stretches of rows, then rows.
    fn launch_split(self, ids: &CubeTensor) {
        let (long, rank) = self.long_row(LONG_UNITS);
        let merging = self.units(MERGE_UNITS);
        let cube = long.units.cube as usize;
        let vectors = self.stretch_vectors();
        let stretches = self.vectors().div_ceil(vectors * cube);
        let capacity = vectors * cube * self.size;

        let sampled = cube * long.sample as usize * self.size;
        let expected = f64::from(rank) * self.columns as f64 / (sampled * stretches) as f64;
        let uneven = if self.ends.is_some() { UNEVEN } else { 1.0 };
        // Hardly ever has a stretch more than it has slots if it is like the others. If not, the merge takes longer.
        let likely = (uneven * expected + 5.0 * expected.sqrt() + 8.0) as usize;
        let room = MAX_SLOTS * merging.cube as usize / stretches;
        let slots = likely.next_multiple_of(self.plane as usize).min(room);
        let stretch_blueprint = StretchBlueprint {
            vectors: vectors as u32,
            sample: long.sample,
            slots: slots as u32,
            units: long.units,
        };
        let merge_blueprint = MergeBlueprint {
            own: (stretches * slots).div_ceil(merging.cube as usize) as u32,
            slots: slots as u32,
            long: LongRowBlueprint {
                units: merging,
                ..long
            },
        };
        let kept = output(&self.logits, [self.rows, stretches, capacity], DType::U32);
        let places = output(&self.logits, [self.rows, stretches, capacity], DType::U32);
        let counts = output(&self.logits, [self.rows, stretches], DType::U32);
        let dtypes = self.dtypes();
        let address = address_type([&self.logits, ids, &kept]);
        let row_vectors = self.row_vectors();
        // SAFETY: as for whole rows; a stretch has room for all of its elements.
        unsafe {
            stretch_kernel::launch_unchecked(
                &self.client,
                CubeCount::Static(stretches as u32, self.rows as u32, 1),
                CubeDim::new_1d(cube as u32),
                address,
                self.size,
                self.logits.clone().into_buffer_arg(),
                self.logits.clone().into_buffer_arg(),
                self.starts.clone().map(CubeTensor::into_buffer_arg).into(),
                self.ends.clone().map(CubeTensor::into_buffer_arg).into(),
                kept.clone().into_buffer_arg(),
                places.clone().into_buffer_arg(),
                counts.clone().into_buffer_arg(),
                self.columns as u32,
                row_vectors,
                launched(self.tokens, self.columns),
                rank,
                long.capacity,
                stretch_blueprint,
                dtypes,
            );
            merge_kernel::launch_unchecked(
                &self.client,
                CubeCount::Static(self.rows as u32, 1, 1),
                CubeDim::new_1d(merging.cube),
                address,
                self.size,
                self.logits.clone().into_buffer_arg(),
                self.logits.into_buffer_arg(),
                self.starts.map(CubeTensor::into_buffer_arg).into(),
                self.ends.map(CubeTensor::into_buffer_arg).into(),
                kept.into_buffer_arg(),
                places.into_buffer_arg(),
                counts.into_buffer_arg(),
                ids.clone().into_buffer_arg(),
                self.columns as u32,
                row_vectors,
                launched(self.tokens, self.columns),
                self.k as u32,
                stretches as u32,
                capacity as u32,
                merge_blueprint,
                dtypes,
            );
        }
    }

    /// How a cube of so many units works on a row, and the rank in its sample from which on elements are candidates.
    fn long_row(&self, cube: u32) -> (LongRowBlueprint, u32) {
        let units = self.units(cube);
        let shared = self.client.properties().hardware.max_shared_memory_size;
        let room = shared.saturating_sub(RESERVED);
        // A quarter of the room for the map, which has a word in 32 more than it shows.
        let words = self.columns.div_ceil(32).next_power_of_two().min(MAX_WORDS);
        let words = words.min(1 << (room / 16).max(1).ilog2());
        let words = words.max(self.units(MERGE_UNITS).cube as usize);
        let capacity = room.saturating_sub(words * 33 / 8) / CANDIDATE;
        let capacity = capacity.min((2 * self.k + 2048).next_multiple_of(1024));
        let once = units.cube as usize * self.size;
        let mut sample = 1;
        while 2 * sample as usize * self.size <= MAX_ELEMENTS
            && 2 * sample as usize * once * SAMPLED <= self.columns
        {
            sample *= 2;
        }
        // How many of the largest are in the sample is about normally distributed.
        let expected = (self.k * once) as f64 * f64::from(sample) / self.columns as f64;
        let rank = (expected + 4.0 * expected.sqrt() + 4.0).ceil() as u32;
        let blueprint = LongRowBlueprint {
            vectors: (STEP / self.size) as u32,
            sample,
            capacity: capacity as u32,
            words: words as u32,
            units,
        };
        (blueprint, rank)
    }
}

/// The widest vector of up to 16 bytes that rows begin at, of which the last of the last row does not end after the buffer.
fn vector_size(tensor: &CubeTensor) -> usize {
    let ([rows, columns], stride) = (tensor.shape().dims(), tensor.meta.strides()[0]);
    let elements = tensor.handle.size_in_used() as usize / tensor.elem_size();
    let mut sizes = tensor.client.io_optimized_vector_sizes(tensor.elem_size());
    let fits = |size: &usize| {
        (rows == 1 || stride.is_multiple_of(*size))
            && (rows - 1) * stride + columns.next_multiple_of(*size) <= elements
    };
    sizes.find(fits).unwrap_or(1)
}

/// Slots that are sorted: the power of two that holds `k`.
fn sorted_slots(k: usize) -> usize {
    k.next_power_of_two().max(2)
}

pub(super) fn can_order(
    logits: &CubeTensor,
    starts: Option<&CubeTensor>,
    ids: &CubeTensor,
    sorted: bool,
) -> bool {
    let ([rows, columns], [_, k]) = (logits.shape().dims(), ids.shape().dims());
    let shared = logits.client.properties().hardware.max_shared_memory_size;
    rows > 0
        && columns > 0
        && u32::try_from(rows).is_ok()
        && is_float(logits.dtype)
        && ids.dtype == DType::I32
        && are_bounds(starts)
        && (!sorted || 2 * size_of::<u32>() * sorted_slots(k) <= shared)
}

pub(super) fn top_k_values(
    logits: CubeTensor,
    starts: Option<CubeTensor>,
    ids: CubeTensor,
    sorted: bool,
) -> (CubeTensor, CubeTensor) {
    let (logits, ids) = (with_contiguous_rows(logits), into_contiguous(ids));
    let starts = starts.map(into_contiguous);
    let ([rows, columns], [_, k]) = (logits.shape().dims(), ids.shape().dims());
    let client = logits.client.clone();
    let values = output(&logits, [rows, k], logits.dtype);
    let ordered = output(&logits, [rows, k], DType::I32);
    let slots = sorted_slots(k) as u32;
    let most = 1 << client.properties().hardware.max_units_per_cube.ilog2();
    let blueprint = ValuesBlueprint {
        sorted: if sorted { slots } else { 0 },
        units: (slots / 2).clamp(1, VALUE_UNITS).min(most),
    };
    let bounds = starts.as_ref().map_or(DType::I32, |starts| starts.dtype);
    let dtypes = [logits.dtype, bounds].map(dtype_to_storage_type);
    let address = address_type([&logits, &ids]);
    let row_stride = logits.meta.strides()[0];
    // SAFETY: ids are within the windows of `[rows, columns]`, or negative; writes are within `[rows, k]`.
    unsafe {
        values_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(blueprint.units),
            address,
            logits.into_buffer_arg(),
            starts.map(CubeTensor::into_buffer_arg).into(),
            ids.into_buffer_arg(),
            values.clone().into_buffer_arg(),
            ordered.clone().into_buffer_arg(),
            rows as u32,
            columns as u32,
            row_stride,
            k as u32,
            f32::NEG_INFINITY,
            blueprint,
            dtypes,
        );
    }
    (values, ordered)
}
