//! What a launch finds that counts cubes after one that was aborted.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{FlashHead, FlashHeadOptions, flash_head_argmax};
use crate::arrival::counters;
use crate::caps::Caps;
use crate::device::DeviceSpec;

/// More candidates than one cube reads.
const ROWS: usize = 20_000;

#[cube(launch)]
fn leave_kernel(counters: &mut [Atomic<u32>], at: u32, number: u32) {
    if UNIT_POS == 0 {
        counters[at as usize].store(number);
    }
}

fn floats<const D: usize>(data: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data, shape), (device, DType::F32))
}

#[test]
fn a_launch_after_one_that_was_aborted_counts_from_zero() {
    for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
        let Ok(device) = spec.init() else {
            continue;
        };
        let hidden = floats(vec![1.0], [1, 1], &device);
        let tensor = hidden.clone().try_into_primitive::<CubeBackend>();
        let CubeTensor {
            client,
            device: own,
            ..
        } = tensor.expect("a tensor of this backend");
        if !Caps::of(&client).last_cube {
            continue;
        }
        let best = 12_345;
        let logit = |row: usize| {
            if row == best {
                2.0
            } else {
                (row % 7) as f32 / 7.0
            }
        };
        let rows = floats((0..ROWS).map(logit).collect(), [ROWS, 1], &device);
        let clusters = floats(vec![1.0], [1, 1], &device);
        let head = FlashHead::new(rows, &[0; ROWS], clusters, FlashHeadOptions::default());
        let head = head.expect("parts that fit");
        let winner = || {
            let id = flash_head_argmax(hidden.clone(), &head, 1).expect("a hidden state");
            Tensor::<1, Int>::into_data(id)
                .iter::<i64>()
                .collect::<Vec<_>>()
        };
        let next = || counters(&client, &own, false).1;
        let before = next();
        assert_eq!(winner(), [best as i64], "{spec}");
        assert_ne!(next(), before, "{spec}: it has not counted");
        for number in [1, u32::MAX] {
            // What a launch leaves that has not got to its end.
            let (handle, turn) = counters(&client, &own, true);
            leave_kernel::launch(
                &client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                // SAFETY: there are two counters.
                unsafe { BufferArg::from_raw_parts(handle, 2) },
                turn,
                number,
            );
            for after in 1..=3 {
                assert_eq!(winner(), [best as i64], "{spec}: {after} after {number}");
            }
        }
    }
}
