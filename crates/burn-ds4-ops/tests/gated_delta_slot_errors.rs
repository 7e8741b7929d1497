//! Which slots and accepted tokens the gated delta rule refuses where the device's memory is the
//! host's.

use burn_ds4_ops::gated_delta::{GatedDeltaOptions, NegativeSlots, StateSlots, StateUpdate};

use super::gated_delta_errors::{Call, accepted, all_refused, refused, slots};

#[test]
fn slots_that_the_host_sees_to_be_wrong_are_refused() {
    all_refused(&[
        (
            |call| call.slots.read = slots(&[4, 5]),
            "`read_slots` is 5, expected less than 5, the number of slots",
        ),
        (
            |call| call.slots.write = Some(slots(&[77, 3])),
            "`write_slots` is 77, expected less than 5, the number of slots",
        ),
        (
            |call| call.slots.read = slots(&[3, 3]),
            "`read_slots` is 3, expected a slot that no other sequence writes to",
        ),
        (
            |call| call.slots.write = Some(slots(&[4, 4])),
            "`write_slots` is 4, expected a slot that no other sequence writes to",
        ),
        (
            |call| call.slots.write = Some(slots(&[1, 3])),
            "`write_slots` is 1, expected a slot that no other sequence reads",
        ),
        (
            |call| call.options = accepted(&[3, 4]),
            "`accepted_steps` is 4, expected at most 3, the number of tokens",
        ),
    ]);
}

#[test]
fn slots_that_several_sequences_may_use_are_accepted() {
    let null = || GatedDeltaOptions::new().with_negative_slots(NegativeSlots::NullSlot0);
    let changes: [fn(&mut Call); 6] = [
        |call| call.slots.read = slots(&[-1, -1]),
        |call| call.slots = StateSlots::split(slots(&[2, 2]), slots(&[0, 1])),
        |call| call.slots = StateSlots::split(slots(&[2, 2]), slots(&[-1, -1])),
        |call| call.slots = StateSlots::split(slots(&[-1, 2]), slots(&[1, 1])),
        |call| {
            call.slots.read = slots(&[3, 3]);
            call.options = GatedDeltaOptions::new().with_update(StateUpdate::Intermediate);
        },
        |call| {
            call.slots.read = slots(&[3, 3]);
            call.options = GatedDeltaOptions::new().with_update(StateUpdate::Discard);
        },
    ];
    for (index, change) in changes.into_iter().enumerate() {
        assert_eq!(refused(change), "accepted", "change {index}");
    }
    for read in [[-1, -1], [0, -1]] {
        let change = |call: &mut Call| {
            call.slots.read = slots(&read);
            call.options = null();
        };
        assert_eq!(refused(change), "accepted", "{read:?}");
    }
}
