use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{FilterLaunch, SampleBlueprint, sample_kernel, verify_kernel};
use super::weight::Filter;
use super::{MAX_COLUMNS, Sampling};
use crate::launching::{
    address_type, cube_count, fits_shared, has_counters, is_float, is_wide_int, output,
    vector_size, with_contiguous_rows,
};

/// Units of a cube at most, and at least.
const MOST_UNITS: u32 = 1024;
const LEAST_UNITS: u32 = 64;
/// Vectors that a unit has at least, unless that leaves too few units.
const OWN_VECTORS: usize = 4;
/// Widest read, in elements: a unit may have to look through a vector.
const MAX_VECTOR: usize = 4;
/// Binary logarithms of bins, where the shared memory has room for them.
const LOG2_BINS: u32 = 11;
const FEW_LOG2_BINS: u32 = 9;
/// Binary logarithm of a unit's bins at most: each is cleared and added up, however short the row.
const LOG2_OWN_BINS: u32 = 3;
/// Bytes of a bin, and of a unit's sum.
const WIDE: usize = 8;
/// Bytes of shared memory for what is found.
const FOUND: usize = 64;
/// Units of a cube that compares drafts.
const VERIFY_UNITS: u32 = 64;

/// Units of a cube and binary logarithm of the bins, if the device has room for any.
fn sizes(logits: &CubeTensor) -> Option<(u32, u32)> {
    let [_, columns] = logits.shape().dims();
    let most = logits.client.properties().hardware.max_units_per_cube;
    if most < LEAST_UNITS {
        return None;
    }
    let most = (1 << most.ilog2()).min(MOST_UNITS);
    let wanted = columns
        .div_ceil(MAX_VECTOR * OWN_VECTORS)
        .next_power_of_two() as u32;
    let fits = |&(units, log2_bins): &(u32, u32)| {
        fits_shared(
            &logits.client,
            WIDE * (units as usize + (1 << log2_bins)) + FOUND,
        )
    };
    let sizes = [
        (most, LOG2_BINS),
        (most.min(1 << FEW_LOG2_BINS), FEW_LOG2_BINS),
    ];
    let (most, log2_bins) = sizes.into_iter().find(fits)?;
    // A power of four: few kernels.
    let wanted = 1 << wanted.ilog2().next_multiple_of(2);
    let units = wanted.clamp(LEAST_UNITS, most);
    Some((units, log2_bins.min(units.ilog2() + LOG2_OWN_BINS)))
}

pub(super) fn can_sample(logits: &CubeTensor, words: [&CubeTensor; 2]) -> bool {
    let [rows, columns] = logits.shape().dims();
    rows > 0
        && (1..=MAX_COLUMNS).contains(&columns)
        && i32::try_from(rows).is_ok()
        && is_float(logits.dtype)
        && words.iter().all(|words| is_wide_int(words.dtype))
        && has_counters(&logits.client)
        && sizes(logits).is_some()
}

pub(super) fn sample(
    logits: CubeTensor,
    seeds: CubeTensor,
    positions: CubeTensor,
    sampling: Sampling,
) -> CubeTensor {
    let logits = with_contiguous_rows(logits);
    let (seeds, positions) = (into_contiguous(seeds), into_contiguous(positions));
    let [rows, columns] = logits.shape().dims();
    let client = logits.client.clone();
    let tokens = output(&logits, [rows], DType::I32);
    let size = vector_size(&logits, MAX_VECTOR);
    let (units, log2_bins) = sizes(&logits).expect("checked by can_sample");
    let filter = Filter::of(&sampling, columns);
    let blueprint = SampleBlueprint {
        greedy: sampling.temperature == 0.0,
        top_k: filter.top_k > 0,
        top_p: sampling.top_p < 1.0,
        units,
        log2_bins,
    };
    let filter = FilterLaunch::new(
        filter.rate,
        filter.farthest,
        filter.top_k as u32,
        filter.top_p as u32,
        (filter.minimum >> 32) as u32,
        filter.minimum as u32,
    );
    let dtypes = [logits.dtype, seeds.dtype, positions.dtype].map(dtype_to_storage_type);
    let address = address_type([&logits, &seeds, &positions]);
    let row_vectors = logits.meta.strides()[0] / size;
    let of_sequence = rows / positions.shape()[0];
    // SAFETY: reads are of vectors of the rows, and of the seed and position of a row's sequence; a cube writes its row's token.
    unsafe {
        sample_kernel::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(units),
            address,
            size,
            logits.into_buffer_arg(),
            seeds.into_buffer_arg(),
            positions.into_buffer_arg(),
            tokens.clone().into_buffer_arg(),
            rows as u32,
            (columns / size) as u32,
            row_vectors,
            of_sequence as u32,
            filter,
            blueprint,
            dtypes,
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
    let [sequences, count] = drafts.shape().dims();
    let client = tokens.client.clone();
    let verified = output(&tokens, [sequences, count + 1], DType::I32);
    let accepted = output(&tokens, [sequences], DType::I32);
    let cubes = sequences.div_ceil(VERIFY_UNITS as usize);
    let dtype = dtype_to_storage_type(drafts.dtype);
    let address = address_type([&tokens, &drafts]);
    // SAFETY: each unit reads and writes within its sequence.
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
            sequences as u32,
            count as u32,
            dtype,
        );
    }
    (verified, accepted)
}
