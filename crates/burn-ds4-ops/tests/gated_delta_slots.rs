//! Which slots of the pool the gated delta rule reads, writes and leaves alone.

use burn::tensor::{DType, IntDType, Tensor, TensorData};
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaOptions, NegativeSlots, StateSlots, StateUpdate, gated_delta_rule,
};

use super::common::{assert_close, devices, every_dtype, floats, integers, narrow, skip, values};
use super::delta::{Case, OUTPUTS, Rule, STATES, Sizes, oracle, read, tolerance};

/// Where each sequence's state comes from, and where it goes, with `None` for nowhere.
type Moves = [(Option<usize>, Option<usize>)];

/// Compares outputs with the oracle, and every slot: those written to with the oracle, the others
/// bit by bit with what they held.
fn check(case: &Case, result: &GatedDelta, moves: &Moves, what: &str) {
    let (size, count) = (case.sizes.state(), case.sizes.outputs());
    let (out, before, after) = (read(&result.out), read(&case.pool), read(&result.pool));
    let mut written = vec![false; case.sizes.slots];
    for (sequence, &(from, to)) in moves.iter().enumerate() {
        let what = format!("{what}, sequence {sequence}");
        let outputs = &out[sequence * count..][..count];
        let Some(from) = from else {
            assert!(outputs.iter().all(|&x| x == 0.0), "{what}: {outputs:?}");
            continue;
        };
        let expected = oracle(case, sequence, from, Rule::of(case.sizes));
        let close = tolerance(result.out.dtype().into(), OUTPUTS);
        assert_close(outputs, &narrow(&expected.outputs), close, &what);
        if let Some(to) = to {
            written[to] = true;
            let close = tolerance(result.pool.dtype().into(), STATES);
            let last = narrow(expected.states.last().expect("a token"));
            assert_close(&after[to * size..][..size], &last, close, &what);
        }
    }
    for slot in (0..case.sizes.slots).filter(|&slot| !written[slot]) {
        let bits = |pool: &[f32]| -> Vec<u32> {
            let slot = pool[slot * size..][..size].iter();
            slot.map(|x| x.to_bits()).collect()
        };
        assert_eq!(bits(&after), bits(&before), "{what}: slot {slot} changed");
    }
}

fn padding_puts_out_zeros_and_leaves_the_pool_alone() {
    every_dtype(|name, device, dtype| {
        let case = Case::new(Sizes::small(4, 2), dtype, dtype, device);
        let moves = |slot: &i64| (usize::try_from(*slot).ok(), usize::try_from(*slot).ok());
        for slots in [
            [9, 0, 15, 3],
            [-1, 5, -1, 0],
            [0, -1, -1, -1],
            [-1, -7, i64::from(i32::MIN), -1],
        ] {
            let result = case.run(&slots, None, &GatedDeltaOptions::new());
            let moves: Vec<_> = slots.iter().map(moves).collect();
            check(&case, &result, &moves, &format!("{name} {slots:?}"));
        }
    });
}

fn a_split_pool_keeps_the_slots_that_are_read() {
    every_dtype(|name, device, dtype| {
        let case = Case::new(Sizes::small(3, 2), dtype, dtype, device);
        // Two sequences start from one state; the last writes where it reads.
        let result = case.run(&[4, 4, 11], Some(&[0, 7, 11]), &GatedDeltaOptions::new());
        let moves = [(Some(4), Some(0)), (Some(4), Some(7)), (Some(11), Some(11))];
        check(&case, &result, &moves, name);
    });
}

fn a_negative_slot_on_one_side_only() {
    for (name, device) in devices() {
        let case = Case::f32(Sizes::small(3, 2), device);
        let result = case.run(&[-1, 4, 1], Some(&[3, -1, 0]), &GatedDeltaOptions::new());
        let moves = [(None, None), (Some(4), None), (Some(1), Some(0))];
        check(&case, &result, &moves, name);
    }
}

fn negative_slots_are_the_null_slot_if_so_asked() {
    for (name, device) in devices() {
        let options = GatedDeltaOptions::new().with_negative_slots(NegativeSlots::NullSlot0);
        let case = Case::f32(Sizes::small(3, 2), device);
        let result = case.run(&[2, -1, 5], None, &options);
        let moves = [(Some(2), Some(2)), (Some(0), Some(0)), (Some(5), Some(5))];
        check(&case, &result, &moves, name);
        // Several may write there: the slot keeps something, and no other one changes.
        let result = case.run(&[-1, 7, -3], None, &options);
        let size = case.sizes.state();
        let (before, after) = (values(case.pool.clone()), values(result.pool.clone()));
        assert_ne!(after[..size], before[..size], "{name}");
        assert_eq!(after[size..7 * size], before[size..7 * size], "{name}");
        assert_eq!(after[8 * size..], before[8 * size..], "{name}");
        // On one side only: what one sequence writes, another must not read.
        let result = case.run(&[-1, 4, 1], Some(&[3, 2, 6]), &options);
        let moves = [(Some(0), Some(3)), (Some(4), Some(2)), (Some(1), Some(6))];
        check(&case, &result, &moves, name);
        let result = case.run(&[7, 4, 1], Some(&[3, -1, 6]), &options);
        let moves = [(Some(7), Some(3)), (Some(4), Some(0)), (Some(1), Some(6))];
        check(&case, &result, &moves, name);
    }
}

fn slots_beyond_the_pool_are_skipped_where_the_host_cannot_see_them() {
    for (name, device) in devices().iter().filter(|(name, _)| name != "flex") {
        let case = Case::f32(Sizes::small(3, 2), device);
        for negative in [NegativeSlots::Skip, NegativeSlots::NullSlot0] {
            let options = GatedDeltaOptions::new().with_negative_slots(negative);
            let result = case.run(&[12, 4, i64::from(i32::MAX)], None, &options);
            let moves = [(None, None), (Some(4), Some(4)), (None, None)];
            check(&case, &result, &moves, &format!("{name} {negative:?}"));
            let result = case.run(&[3, 4, 5], Some(&[3, 12, 5]), &options);
            let moves = [(Some(3), Some(3)), (Some(4), None), (Some(5), Some(5))];
            check(&case, &result, &moves, &format!("{name} {negative:?}"));
        }
    }
}

fn without_an_update_the_pool_stays_as_it_is() {
    for (name, device) in devices() {
        let case = Case::f32(Sizes::small(3, 3), device);
        let options = GatedDeltaOptions::new().with_update(StateUpdate::Discard);
        // Nothing is written, so that all may start from one state.
        let result = case.run(&[4, -1, 4], None, &options);
        let moves = [(Some(4), None), (None, None), (Some(4), None)];
        check(&case, &result, &moves, name);
        assert!(result.intermediate.is_none(), "{name}");
    }
}

fn slots_may_be_of_any_integer_type() {
    for (name, device) in devices() {
        let case = Case::f32(Sizes::small(2, 1), device);
        for dtype in [IntDType::I32, IntDType::I64, IntDType::U32] {
            if !device.supports_dtype(dtype) {
                skip(name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            let slots = integers(&[6, 1], [2], device).cast(dtype);
            let (inputs, pool) = (case.inputs.clone(), case.pool.clone());
            let options = GatedDeltaOptions::new();
            let result = gated_delta_rule(inputs, pool, StateSlots::in_place(slots), &options);
            let moves = [(Some(6), Some(6)), (Some(1), Some(1))];
            check(
                &case,
                &result.unwrap(),
                &moves,
                &format!("{name} {dtype:?}"),
            );
        }
    }
}

fn what_padding_holds_has_no_part_in_anything() {
    for (name, device) in devices() {
        let mut case = Case::f32(Sizes::small(2, 2), device);
        let nan = Tensor::full([1, 2, 4, 8], f32::NAN, (device, DType::F32));
        case.inputs.v = case.inputs.v.clone().slice_assign([1..2, 0..2], nan);
        let nan = Tensor::full([1, 4, 8, 16], f32::NAN, (device, DType::F32));
        // The slots that a clamped negative slot, or one beyond the pool, would read.
        case.pool = case.pool.slice_assign([0..1, 0..4], nan.clone());
        case.pool = case.pool.slice_assign([7..8, 0..4], nan);
        let result = case.run(&[3, -1], None, &GatedDeltaOptions::new());
        let moves = [(Some(3), Some(3)), (None, None)];
        check(&case, &result, &moves, name);
    }
}

fn bits_of_slots_that_nobody_writes_are_kept() {
    for (name, device) in devices() {
        let mut case = Case::f32(Sizes::small(2, 1), device);
        let size = case.sizes.state();
        let odd = [-0.0, f32::INFINITY, f32::MIN_POSITIVE / 4.0, f32::NAN];
        let bits: Vec<f32> = odd.into_iter().cycle().take(8 * size).collect();
        case.pool = floats(&bits, [8, 4, 8, 16], device);
        let held = |pool: Tensor<4>| -> Vec<u32> {
            let data: TensorData = pool.into_data();
            data.iter::<f32>().map(f32::to_bits).collect()
        };
        let result = case.run(&[5, -1], None, &GatedDeltaOptions::new());
        let (before, after) = (held(case.pool), held(result.pool));
        assert_eq!(after[..5 * size], before[..5 * size], "{name}");
        assert_eq!(after[6 * size..], before[6 * size..], "{name}");
    }
}

catalogue![
    padding_puts_out_zeros_and_leaves_the_pool_alone,
    a_split_pool_keeps_the_slots_that_are_read,
    a_negative_slot_on_one_side_only,
    negative_slots_are_the_null_slot_if_so_asked,
    slots_beyond_the_pool_are_skipped_where_the_host_cannot_see_them,
    without_an_update_the_pool_stays_as_it_is,
    slots_may_be_of_any_integer_type,
    what_padding_holds_has_no_part_in_anything,
    bits_of_slots_that_nobody_writes_are_kept,
];
