//! Numbers that are read back while the device goes on.

use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::readback::Readback;

use super::common::devices;

fn a_read_has_the_numbers_of_when_it_began() {
    for (name, device) in devices() {
        let place = Tensor::<1, Int>::from_ints([1], device);
        let mut ids = Tensor::<1, Int>::from_ints([-1, 0], device);
        let mut reads = Vec::new();
        for _ in 0..40 {
            reads.push(Readback::begin([ids.clone()]));
            let next = ids.clone().narrow(0, 1, 1) + 1;
            ids = ids.select_assign(0, place.clone(), next, IndexingUpdateOp::Assign);
        }
        for (step, read) in reads.into_iter().enumerate() {
            let numbers = read.wait().expect("a device that works");
            assert_eq!(numbers, [-1, step as i32], "{name}");
        }
    }
}

fn several_tensors_come_in_their_order_however_they_lie() {
    for (name, device) in devices() {
        let table = Tensor::<2, Int>::from_ints([[1, 2, 3], [4, 5, 6]], device);
        let column = table.clone().transpose().narrow(0, 1, 1).reshape([2]);
        let row = table.narrow(0, 1, 1).reshape([3]);
        let read = Readback::begin([column, row.clone(), row.narrow(0, 2, 1)]);
        let numbers = read.wait().expect("a device that works");
        assert_eq!(numbers, [2, 5, 4, 5, 6, 6], "{name}");
    }
}

fn reads_that_nobody_waits_for_do_not_disturb_others() {
    for (name, device) in devices() {
        for round in 0..20 {
            let dropped = Tensor::<1, Int>::from_ints([7, 7, 7], device);
            drop(Readback::begin([dropped]));
            let kept = Tensor::<1, Int>::from_ints([round, 1, 2], device);
            let numbers = Readback::begin([kept]).wait();
            let numbers = numbers.expect("a device that works");
            assert_eq!(numbers, [round, 1, 2], "{name}");
        }
    }
}

catalogue![
    a_read_has_the_numbers_of_when_it_began,
    several_tensors_come_in_their_order_however_they_lie,
    reads_that_nobody_waits_for_do_not_disturb_others,
];
