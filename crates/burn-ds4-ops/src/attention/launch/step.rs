//! The launch of all that a step stores.

use burn::backend::ops::FloatTensorOps;

use super::append::{AppendArguments, can_append};
use super::compress::{CompressArguments, F32_BYTES, ROW_UNITS, can_compress};
use super::pages::Pages;
use crate::attention::args::{
    Compression, OptionalCompression, OptionalState, StepRows, StoredStep,
};
use crate::attention::kernel::{
    CompressBlueprint, RowBlueprint, StepBlueprint, StepQueriesLaunch, step_kernel,
};
use crate::launching::prelude::*;
use crate::norm::{Norm, RmsNormBlueprint};

/// Buffers of the kernel, two of them for arguments that are no tensors, and the buffers of each
/// compressor.
const BUFFERS: usize = 10;
const COMPRESSOR_BUFFERS: usize = 5;
/// Words of shared memory for the sums of norms.
const SUMS: usize = 4 * ROW_UNITS as usize;

/// The inputs of a compressor, and the raw and compressed rows that it updates.
type CompressorPart<'a> = (&'a Compression<CubeBackend>, [&'a CubeTensor; 2]);

fn compressors(step: &StepRows<CubeBackend>) -> impl Iterator<Item = CompressorPart<'_>> {
    let given = |part| match part {
        &OptionalCompression::None => None,
        OptionalCompression::Some { inputs, raw, rows } => Some((inputs, [raw, rows])),
    };
    [&step.compressed, &step.indexed]
        .into_iter()
        .filter_map(given)
}

pub(in crate::attention) fn can_store(step: &StepRows<CubeBackend>) -> bool {
    let client = &step.ring.client;
    let caps = Caps::of(client);
    let [batch, count, rank] = step.queries.dims();
    let [_, _, width] = step.ring.dims();
    let new = &step.new;
    let widths = compressors(step).map(|(_, [_, rows])| rows.shape()[2]);
    let words = 2 * (width + widths.sum::<usize>()) + SUMS;
    let paged = compressors(step).any(|(inputs, _)| inputs.pages.as_ref().is_some());
    let bindings = BUFFERS + COMPRESSOR_BUFFERS * compressors(step).count() + usize::from(paged);
    is_float(step.queries.dtype)
        && step.queries.dtype == new.x.dtype
        && step.norm.dtype == new.norm.dtype
        && fits_i32((batch * count).checked_mul(rank))
        && 2 * count + 2 <= MAX_CUBES
        && bindings <= caps.bindings as usize
        // So that the planes can be rounded up to whole rows of queries.
        && Caps::of(client).plane()
            .is_some_and(|plane| (caps.cube_units / plane).is_power_of_two())
        && Caps::of(client).fits_shared(words * F32_BYTES)
        && can_append(new, &step.ring)
        && compressors(step).all(|(inputs, [raw, rows])| {
            rows.dtype == step.ring.dtype
                && inputs.norm.dtype == new.norm.dtype
                && can_compress(inputs, raw, rows)
        })
}

pub(in crate::attention) fn store_step(step: StepRows<CubeBackend>) -> StoredStep<CubeBackend> {
    let [batch, count, rank] = step.queries.dims();
    let queries = CubeBackend::float_reshape(step.queries, Shape::new([batch * count, rank]));
    let norm = Norm::new(queries, Some(step.norm), step.epsilon);
    let append = AppendArguments::new(step.new, step.ring);
    let [compressed, indexed] = [step.compressed, step.indexed].map(compress_arguments);
    let (blueprint, planes) = blueprint(&norm, &append, [&compressed, &indexed]);

    let client = append.ring.client.clone();
    let rows = (batch * count).div_ceil(blueprint.norm.rows as usize);
    let cubes = blueprint.compressor_cubes() + (append.stored + rows.div_ceil(batch)) as u32;
    let parts = [&compressed, &indexed].into_iter().flatten();
    let address = parts
        .map(CompressArguments::address_type)
        .fold(address_type([&norm.x]), Ord::max)
        .max(append.address_type());
    let queries = norm.output;
    let parts = [&compressed, &indexed].into_iter().flatten();
    let pages = parts.filter_map(|part| part.pages.clone()).next();
    let (compressed, compressed_state) = compressed.map(CompressArguments::launch).unzip();
    let (indexed, indexed_state) = indexed.map(CompressArguments::launch).unzip();
    // SAFETY: rows and vectors of queries past the end are read as others and not written; there is
    // a cube for each new row that is stored; a vacant sequence, whose start is not in the table,
    // reads the angles of a position in it and writes nothing; for blocks that are not complete or
    // not among the rows, nothing is read or written; slots are taken modulo their number.
    unsafe {
        step_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes, batch as u32, 1),
            CubeDim::new_2d(blueprint.append.partition.plane, planes),
            address,
            norm.size,
            norm.weight_size,
            append.positions.arg(),
            pages.as_ref().map(Pages::arg).into(),
            StepQueriesLaunch::new(
                norm.x.into_buffer_arg(),
                queries.clone().into_buffer_arg(),
                norm.sizes,
            ),
            norm.weight.map(CubeTensor::into_buffer_arg).into(),
            append.arg(),
            compressed.into(),
            indexed.into(),
            blueprint,
            append.dtypes(),
        );
    }
    StoredStep {
        queries: CubeBackend::float_reshape(queries, Shape::new([batch, count, rank])),
        ring: append.ring,
        compressed: state(compressed_state),
        indexed: state(indexed_state),
    }
}

fn compress_arguments(part: OptionalCompression<CubeBackend>) -> Option<CompressArguments> {
    match part {
        OptionalCompression::None => None,
        OptionalCompression::Some { inputs, raw, rows } => {
            Some(CompressArguments::new(inputs, raw, rows))
        }
    }
}

fn state(state: Option<(CubeTensor, CubeTensor)>) -> OptionalState<CubeBackend> {
    state.map_or(OptionalState::None, |(raw, rows)| OptionalState::Some {
        raw,
        rows,
    })
}

/// Configuration of the kernel, and the planes of a cube: the most that any part needs, rounded up
/// to whole rows of queries. Additional planes change no order of additions.
fn blueprint(
    norm: &Norm,
    append: &AppendArguments,
    parts: [&Option<CompressArguments>; 2],
) -> (StepBlueprint, u32) {
    let [compressed, indexed] = parts.map(|part| part.as_ref().map(|part| part.blueprint));
    let rows = [compressed, indexed].into_iter().flatten();
    let rows = rows.map(|part| part.row.planes);
    let most = rows.fold(append.blueprint.planes, u32::max);
    let planes = most.next_multiple_of(norm.blueprint.partition.planes);
    let with = |part: Option<CompressBlueprint>| {
        part.map(|part| CompressBlueprint {
            row: RowBlueprint { planes, ..part.row },
            ..part
        })
    };
    let blueprint = StepBlueprint {
        norm: RmsNormBlueprint {
            rows: planes / norm.blueprint.partition.planes,
            ..norm.blueprint
        },
        append: RowBlueprint {
            planes,
            ..append.blueprint
        },
        compressed: with(compressed),
        indexed: with(indexed),
    };
    (blueprint, planes)
}
