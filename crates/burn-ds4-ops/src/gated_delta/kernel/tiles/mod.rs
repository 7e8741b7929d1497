//! The gated delta rule on tensor cores, for states in `bf16`.

mod blueprint;
mod corrections;
mod fetch;
mod prefetched;
mod products;
mod state;

use cubecl::prelude::*;

use super::{
    DeltaInputs, DeltaResults, DeltaShape, GateInputs, NO_SLOT, RowLayout, StateSlots,
    WorkDivisors, slot_of,
};
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{await_copies, commit_copies, modulo, sync_planes};
pub(crate) use blueprint::{COLUMN_BLOCK, TILE_ROWS, TilesBlueprint};
use corrections::CorrectionTerms;
use fetch::{StateBlock, fetched_index, interleave_keys, write_rows};
use prefetched::Prefetched;
use products::{Grams, Products, StepInputs};
use state::{State, StateUpdate};

/// Processes all tokens of some rows of a `bf16` state at once, on tensor cores.
///
/// Arguments are those of [`lanes_kernel`](super::lanes_kernel), with vectors of 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic")]
// Compile-time conditions have an `if` of their own, so that the code they exclude is not compiled.
#[allow(clippy::collapsible_if)]
pub(crate) fn tiles_kernel<Q: Float, A: Float, B: Float, D: Float, R: Int, W: Int, C: Int>(
    inputs: &DeltaInputs<Vector<u32, Const<4>>, Q>,
    gates: &GateInputs<A, B, D>,
    slots: &StateSlots<R, W, C>,
    results: &mut DeltaResults<Vector<u32, Const<4>>, Q>,
    shape: DeltaShape,
    divisors: WorkDivisors,
    #[comptime] blueprint: TilesBlueprint,
    #[define(Q, A, B, D, R, W, C)] _dtypes: [ElemType; 7],
) {
    let TilesBlueprint {
        tokens,
        column_blocks,
        tiles,
        planes,
        groups,
        depth,
        rule,
        ..
    } = comptime!(blueprint);
    let padded = comptime!(blueprint.padded());
    let group_rows = comptime!(blueprint.group_rows());
    let units = comptime!(blueprint.group_units());
    let plane_group = UNIT_POS_Y / planes;
    let plane = modulo(UNIT_POS_Y, planes);
    let unit = plane * 32 + UNIT_POS_X;
    // The token whose gates this unit computes. Most units repeat the last token.
    let gate = min(unit, comptime!(tokens - 1));
    let (quad, quad_lane) = (UNIT_POS_X / 4, UNIT_POS_X % 4);
    let own_row =
        plane * comptime!(blueprint.plane_rows()) + UNIT_POS_X % comptime!(blueprint.plane_rows());
    // With 16 rows in a plane, lanes 16 to 31 have the same rows as lanes 0 to 15 and do not write.
    let writes = UNIT_POS_X < comptime!(blueprint.plane_rows());

    let mut fetched = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(
        (groups * depth * blueprint.fetched_rows() * blueprint.row_vectors()) as usize
    ));
    let mut keys =
        Shared::<[u32]>::new_slice(comptime!((groups * blueprint.group_words()) as usize));
    let mut decays = Shared::<[f32]>::new_slice(comptime!((groups * padded) as usize));
    let mut betas = Shared::<[f32]>::new_slice(comptime!((groups * padded) as usize));
    let mut grams = Grams::new(blueprint);
    let mut products = Products::new(blueprint);
    let mut correction_terms = CorrectionTerms::new(blueprint);
    let first_fetched = plane_group * comptime!(depth * blueprint.fetched_rows());
    let first_word = plane_group * comptime!(blueprint.group_words());
    let first_gate = plane_group * padded;
    let block_count = shape.batch * shape.heads * (shape.channels / group_rows);
    let last_block = block_count - 1;
    let step = CUBE_COUNT as u32 * groups;
    let mut index = plane_group * CUBE_COUNT as u32 + CUBE_POS as u32;

    // Start to read the inputs of the first `depth` blocks, and the slots of these and of the next.
    let mut raw_slots = Array::<R>::new(comptime!(depth as usize + 1));
    let mut prefetched = Prefetched::<Q, A, B, D>::new(depth, tokens);
    let next = StateBlock::new(min(index + step * depth, last_block), &divisors, blueprint);
    raw_slots[depth as usize] = slots.read[next.sequence as usize];
    #[unroll]
    for i in 0..depth {
        let block = StateBlock::new(min(index + step * i, last_block), &divisors, blueprint);
        raw_slots[i as usize] = slots.read[block.sequence as usize];
        prefetched.load(i, inputs, gates, &block, own_row, gate);
    }

    let mut stage_slots = Array::<u32>::new(comptime!(depth as usize));
    #[unroll]
    for i in 0..depth {
        stage_slots[i as usize] = slot_of::<R>(raw_slots[i as usize], slots.count, rule);
        let prefetch_index = index + step * i;
        if prefetch_index < block_count {
            StateBlock::new(prefetch_index, &divisors, blueprint).fetch(
                inputs,
                &results.pool,
                &mut fetched,
                first_fetched + comptime!(i * blueprint.fetched_rows()),
                stage_slots[i as usize],
                &divisors,
                blueprint,
            );
        }
        commit_copies();
    }
    let mut raw_slot = raw_slots[depth as usize];

    // Rows of tokens past the last one stay zero.
    let token_rows = comptime!(2 * padded);
    let mut at = unit;
    while at < comptime!(depth * token_rows * blueprint.row_vectors()) {
        let row = at / comptime!(blueprint.row_vectors());
        let vector = at % comptime!(blueprint.row_vectors());
        if row % padded >= tokens {
            let buffer = row / token_rows * comptime!(blueprint.fetched_rows());
            let to = first_fetched + buffer + group_rows + row % token_rows;
            fetched[fetched_index(to, vector, blueprint) as usize] = Vector::new(0u32);
        }
        at += units;
    }
    let mut at = unit;
    while at < comptime!(blueprint.group_words()) {
        keys[(first_word + at) as usize] = 0u32;
        at += units;
    }

    let mut buffer = first_fetched;
    while index < block_count {
        let block = StateBlock::new(index, &divisors, blueprint);
        let first_row = block.row + plane * comptime!(blueprint.plane_rows());
        let slot = stage_slots[0];
        let active = slot != NO_SLOT;
        let key_rows = buffer + group_rows;
        let query_rows = key_rows + padded;
        let plane_rows = buffer + plane * comptime!(blueprint.plane_rows());
        let destination = slots.destination(block.sequence, slot, shape.tokens, rule);
        let (target, write_after) = (destination.slot, destination.write_after);
        await_copies(comptime!(depth - 1));
        sync_planes(plane_group, planes);
        if unit < tokens {
            let own = prefetched.gates();
            let at = (first_gate + unit) as usize;
            decays[at] = own.decay(gates.threshold);
            betas[at] = own.beta();
        }
        let mut values = Array::<f32>::new(comptime!(tokens as usize));
        #[unroll]
        for token in 0..comptime!(tokens as usize) {
            values[token] = f32::cast_from(prefetched.values[token]);
        }
        let state = State::read(&fetched, plane_rows, blueprint);
        interleave_keys(&fetched, &mut keys, key_rows, first_word, unit, blueprint);
        products.multiply(
            &state,
            &fetched,
            key_rows,
            query_rows,
            &mut grams,
            plane_group,
            inputs.scale,
        );
        sync_planes(plane_group, planes);

        #[unroll]
        for i in 1..depth {
            stage_slots[comptime!(i as usize - 1)] = stage_slots[i as usize];
        }
        let prefetch_slot = slot_of::<R>(raw_slot, slots.count, rule);
        stage_slots[comptime!(depth as usize - 1)] = prefetch_slot;
        let prefetch_index = index + step * depth;
        let prefetch_block = StateBlock::new(min(prefetch_index, last_block), &divisors, blueprint);
        // Before the rows of the next state are requested, which these reads would otherwise wait
        // behind.
        prefetched.shift();
        let newest = comptime!(depth - 1);
        prefetched.load(newest, inputs, gates, &prefetch_block, own_row, gate);
        let slot_block =
            StateBlock::new(min(prefetch_index + step, last_block), &divisors, blueprint);
        raw_slot = slots.read[slot_block.sequence as usize];

        let out_token = shape.heads as usize * shape.channels as usize;
        let first_token = block.sequence as usize * shape.tokens as usize;
        let out_start = first_token * out_token
            + block.head as usize * shape.channels as usize
            + (block.row + own_row) as usize;
        let state_vectors = shape.channels as usize * shape.vectors as usize;
        let states_start = (first_token * shape.heads as usize + block.head as usize)
            * state_vectors
            + first_row as usize * shape.vectors as usize;
        let states_token = shape.heads as usize * state_vectors;
        if active {
            let to = results.pool.rows(target, block.head).skip(first_row);
            if comptime!(rule.writes_pool && slots.accepted.is_some()) {
                if write_after == 0 && target != NO_SLOT && target != slot {
                    let pool = &mut results.pool.vectors;
                    write_rows(&fetched, plane_rows, pool, &to, blueprint);
                }
            }
            let mut write_decay = 1.0f32;
            let mut corrections = Array::<f32>::new(comptime!(tokens as usize));
            let mut total_decay = 1.0f32;
            #[unroll]
            for token in 0..tokens {
                let at = (first_gate + token) as usize;
                let decay = decays[at];
                total_decay *= decay;
                let step_inputs = StepInputs {
                    value: values[token as usize],
                    decay,
                    total_decay,
                    beta: betas[at],
                };
                let output =
                    products.step(&grams, &mut corrections, &step_inputs, plane_group, token);
                if writes {
                    let at = out_start + comptime!(token as usize) * out_token;
                    results.out[at] = Q::cast_from(output);
                }
                let after = comptime!(token + 1);
                #[comptime]
                if let ComptimeOption::Some(states) = results.states.as_mut() {
                    correction_terms.store(&corrections, after);
                    let update = StateUpdate {
                        total_decay,
                        token_count: after.runtime(),
                        direct: true,
                    };
                    let to = RowLayout {
                        first: states_start + comptime!(token as usize) * states_token,
                        stride: shape.vectors as usize,
                    };
                    state.store(
                        &update,
                        &correction_terms,
                        &keys,
                        first_word,
                        &mut fetched,
                        states,
                        &to,
                    );
                }
                if comptime!(rule.writes_pool && (slots.accepted.is_some() || after == tokens)) {
                    if write_after == after {
                        correction_terms.store(&corrections, after);
                        write_decay = total_decay;
                    }
                }
            }
            if comptime!(rule.writes_pool) {
                if write_after > 0 && target != NO_SLOT {
                    let update = StateUpdate {
                        total_decay: write_decay,
                        token_count: write_after,
                        direct: false,
                    };
                    state.store(
                        &update,
                        &correction_terms,
                        &keys,
                        first_word,
                        &mut fetched,
                        &mut results.pool.vectors,
                        &to,
                    );
                }
            }
        } else {
            #[unroll]
            for token in 0..tokens {
                if writes {
                    let at = out_start + comptime!(token as usize) * out_token;
                    results.out[at] = Q::from_int(0);
                }
                #[comptime]
                if let ComptimeOption::Some(states) = results.states.as_mut() {
                    let first = states_start + comptime!(token as usize) * states_token;
                    let lane = quad as usize * shape.vectors as usize + quad_lane as usize;
                    #[unroll]
                    for half_tile in 0..comptime!(2 * tiles as usize) {
                        #[unroll]
                        for column_block in 0..comptime!(column_blocks as usize) {
                            let at =
                                first + comptime!(8 * half_tile) * shape.vectors as usize + lane;
                            states[at + comptime!(4 * column_block)] = Vector::new(0u32);
                        }
                    }
                }
            }
        }
        // Refill the stage of this block while the other stages are processed.
        if prefetch_index < block_count {
            prefetch_block.fetch(
                inputs,
                &results.pool,
                &mut fetched,
                buffer,
                prefetch_slot,
                &divisors,
                blueprint,
            );
        }
        commit_copies();

        index += step;
        buffer += comptime!(blueprint.fetched_rows());
        if buffer == first_fetched + comptime!(depth * blueprint.fetched_rows()) {
            buffer = first_fetched;
        }
    }
}
