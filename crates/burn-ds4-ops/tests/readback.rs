//! Numbers that are read back while the device goes on.

use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::readback::{ReadNumbers, Readback};

use super::common::{devices, floats};

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

fn floats_come_with_integers_and_are_of_when_the_read_began() {
    for (name, device) in devices() {
        let table = floats(&[0.5, -1.5, f32::NEG_INFINITY, 2.0], [2, 2], device);
        let place = Tensor::<1, Int>::from_ints([0], device);
        let mut row = table.clone().narrow(0, 1, 1).reshape([2]) + 0.0;
        let column = table.transpose().narrow(0, 1, 1).reshape([2]);
        let ids = Tensor::<1, Int>::from_ints([7, -1], device);
        let mut reads = Vec::new();
        for step in 0..10 {
            let ids = ids.clone() + step;
            reads.push(Readback::begin_both(&[ids], &[row.clone(), column.clone()]));
            let next = Tensor::full_like(&row.clone().narrow(0, 0, 1), step);
            row = row.select_assign(0, place.clone(), next, IndexingUpdateOp::Assign);
        }
        for (step, read) in reads.into_iter().enumerate() {
            let numbers = read.wait_both().expect("a device that works");
            let first = match step {
                0 => f32::NEG_INFINITY,
                step => step as f32 - 1.0,
            };
            assert_eq!(numbers.ints, [7 + step as i32, step as i32 - 1], "{name}");
            assert_eq!(numbers.floats, [first, 2.0, -1.5, 2.0], "{name}");
        }
        let read = Readback::begin_both(&[], &[column]).wait_both();
        let expected = ReadNumbers {
            ints: vec![],
            floats: vec![-1.5, 2.0],
        };
        assert_eq!(read.expect("a device that works"), expected, "{name}");
        let nothing = Readback::begin_both(&[], &[]).wait_both();
        let nothing = nothing.expect("nothing can fail");
        assert_eq!(nothing, ReadNumbers::default(), "{name}");
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
    floats_come_with_integers_and_are_of_when_the_read_began,
    reads_that_nobody_waits_for_do_not_disturb_others,
];
