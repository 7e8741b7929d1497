//! How rows of `x` come to the planes that multiply by them.

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::pass::Pass;
use super::pipeline::Stream;
use super::place::LanePlace;
use super::rows::scale_index;
use crate::gemm::kernel::groups::{Groups, Pairing};
use crate::gemm::kernel::input::{
    SCALE_VEC8S, ordered_vec8, padded_columns, read_vec8, scaled_vec8, vec8_slot,
};
use crate::intrinsics::{ballot, modulo};

/// Makes the `x` that a plane multiplies by ready, in registers or in shared memory, and begins to
/// fetch the first weights. Every unit of the cube must call this.
#[cube]
pub(super) fn load_x<X: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    slots: &FastDivmod<u32>,
    groups: &Groups,
    pass: &Pass,
    place: &LanePlace,
    stream: &mut Stream,
    x_rows: &mut Shared<[Vector<u32, Const<4>>]>,
) {
    if comptime!(stream.blueprint.x_in_registers) {
        load_operands::<X, N>(x, x_vectors, groups, pass, place, stream);
    } else {
        load_rows::<X, N>(x, x_vectors, slots, groups, pass, place, stream, x_rows);
    }
}

/// Puts a plane's K-block of a pass's rows of `x` into registers, of which it has one in each part
/// of K. There are no ids.
#[cube]
fn load_operands<X: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    groups: &Groups,
    pass: &Pass,
    place: &LanePlace,
    stream: &mut Stream,
) {
    let blueprint = comptime!(stream.blueprint);
    let x_tiles = comptime!(blueprint.x_tiles());
    let mut rows = Array::<usize>::new(comptime!(x_tiles as usize));
    #[unroll]
    for tile in 0..x_tiles {
        let x_row = pass.first_pair + place.row + comptime!(8 * tile);
        let pair = groups.pair(pass.start, min(x_row, pass.count - 1));
        rows[tile as usize] = pair as usize * x_vectors;
    }
    let k_block = pass.x_load * blueprint.planes + place.plane;
    let vec8s = comptime!(blueprint.input.format.vec8s());
    let vec8 = k_block * comptime!(blueprint.input.format.k_block() / 8);
    let vec8 = vec8 + UNIT_POS_X % 4 * vec8s;
    stream.operands.read::<X, N>(x, &rows, vec8);
    pass.begin_weights(place, stream);
    stream.operands.scale();
}

/// Puts a pass's rows of `x` into shared memory, those columns of them that are its part of K. For
/// the first part of the first tiles, it also begins to fetch the first weights. Every unit of the
/// cube must call this.
///
/// `x` is asked for first, because all planes wait for it, and then the weights.
#[cube]
fn load_rows<X: Float, N: Size>(
    x: &[Vector<X, N>],
    x_vectors: usize,
    slots: &FastDivmod<u32>,
    groups: &Groups,
    pass: &Pass,
    place: &LanePlace,
    stream: &mut Stream,
    x_rows: &mut Shared<[Vector<u32, Const<4>>]>,
) {
    let blueprint = comptime!(stream.blueprint);
    let terms = comptime!(blueprint.input.terms);
    let several_loads = comptime!(blueprint.x_loads() > 1);
    let first_vec8 = if comptime!(several_loads) {
        pass.x_load * comptime!(blueprint.row_vec8s())
    } else {
        0u32.runtime()
    };
    let columns = if comptime!(blueprint.input.permuted) {
        padded_columns(stream.columns(), blueprint.input.format)
    } else {
        stream.columns()
    };
    let mut fetched = Array::<Vector<u32, Const<4>>>::new(comptime!(
        (blueprint.unit_vec8s() * blueprint.input.vectors()) as usize
    ));
    #[unroll]
    for i in 0..comptime!(blueprint.unit_vec8s()) {
        let at = UNIT_POS + comptime!(i * blueprint.cube_units());
        let x_row = min(
            at / comptime!(blueprint.row_vec8s()),
            comptime!(blueprint.x_rows - 1),
        );
        let vec8 = modulo(at, blueprint.row_vec8s());
        let index = min(pass.first_pair + x_row / terms, pass.count - 1);
        let pair = groups.pair(pass.start, index);
        let vec8 = first_vec8 + vec8;
        let inside = comptime!(blueprint.k_aligned) || vec8 * 8 < columns;
        let source_row = if comptime!(blueprint.one_token) {
            0u32.runtime()
        } else if comptime!(blueprint.input.permuted) {
            pair * terms + modulo(x_row, terms)
        } else if comptime!(matches!(blueprint.pairing, Pairing::Ids | Pairing::Sorted)) {
            slots.div(pair)
        } else {
            pair
        };
        let source = source_row as usize * x_vectors;
        let read = select(inside, vec8, 0u32);
        let to = comptime!(i * blueprint.input.vectors());
        read_vec8(x, source, read, &mut fetched, to, blueprint.input);
    }
    pass.begin_weights(place, stream);
    // There are columns, so this is 0. The assembler would put the first use of `x`, and the wait
    // for it, in front of the weights, but it does not move a vote.
    let mut zero = 0u32;
    if comptime!(!blueprint.input.f16_input) {
        zero = ballot(columns == 0, blueprint.target);
    }
    if comptime!(several_loads) {
        // Other planes may still multiply by the part before.
        sync_cube();
    }
    #[unroll]
    for i in 0..comptime!(blueprint.unit_vec8s()) {
        let at = UNIT_POS + comptime!(i * blueprint.cube_units());
        let x_row = at / comptime!(blueprint.row_vec8s());
        let vec8 = modulo(at, blueprint.row_vec8s());
        let slot = if comptime!(blueprint.input.permuted) {
            vec8
        } else {
            vec8_slot(vec8, blueprint.input.format)
        };
        let offset = (x_row * comptime!(blueprint.row_pitch()) + slot) as usize;
        let from = comptime!(i * blueprint.input.vectors());
        let inside = comptime!(blueprint.k_aligned) || (first_vec8 + vec8) * 8 < columns;
        if comptime!(blueprint.input.f16_input) {
            let (pairs, scale) = scaled_vec8::<X, N>(
                &fetched,
                from,
                inside,
                modulo(x_row, terms),
                blueprint.input,
                blueprint.target,
            );
            if comptime!(blueprint.fills_units()) || x_row < blueprint.x_rows {
                x_rows[offset] = pairs;
                if vec8 % SCALE_VEC8S == 0 {
                    x_rows[scale_index(x_row, vec8 / SCALE_VEC8S, blueprint)] =
                        Vector::new(u32::reinterpret(scale));
                }
            }
        } else if comptime!(blueprint.fills_units()) || x_row < blueprint.x_rows {
            let term = modulo(x_row, terms);
            fetched[from as usize] ^= Vector::new(zero);
            let pairs = ordered_vec8::<X, N>(&fetched, from, term, blueprint.input);
            x_rows[offset] = select(inside, pairs, Vector::new(0u32));
        }
    }
    sync_cube();
}
