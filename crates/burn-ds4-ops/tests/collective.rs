//! What several devices do together. CUDA takes part where there are two GPUs.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_ds4_ops::collective::{DeviceGroup, GroupError, GroupRoute};
use burn_ds4_ops::device::DeviceSpec;

use super::common::{assert_refused, devices, floats};

/// Groups of each kind of device, by name: the same device several times where there is but one.
fn groups() -> Vec<(String, DeviceGroup)> {
    let named = devices().iter().flat_map(|(name, device)| {
        let many = match DeviceSpec::Cuda(1).init() {
            Ok(second) if name.starts_with("cuda") => vec![device.clone(), second],
            _ => vec![device.clone(); 2],
        };
        let three = vec![device.clone(); 3];
        [many, three].map(|devices| (name.clone(), devices))
    });
    let groups = named.map(|(name, devices)| {
        let group = DeviceGroup::new(&devices).expect("devices");
        (format!("{name}, {} ranks", devices.len()), group)
    });
    groups.collect()
}

/// Numbers of a rank, of either sign and several sizes, exact in bf16.
fn numbers(rank: usize, round: usize, count: usize) -> Vec<f32> {
    let number = |at: usize| {
        let hash = (at * 2_654_435_761 + rank * 97_777 + round * 40_503) >> 7;
        let size = 2f32.powi((hash % 9) as i32 - 4);
        ((hash >> 4) % 127) as f32 * size - 60.0 * size
    };
    (0..count).map(number).collect()
}

fn on_all<const D: usize>(
    group: &DeviceGroup,
    shape: [usize; D],
    dtype: DType,
    values: impl Fn(usize) -> Vec<f32>,
) -> Vec<Tensor<D>> {
    let ranks = group.devices().iter().enumerate();
    let tensors = ranks.map(|(rank, device)| {
        let data = TensorData::new(values(rank), shape);
        Tensor::<D>::from_data(data, (device, DType::F32)).cast(dtype)
    });
    tensors.collect()
}

fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u32> {
    let data = tensor.clone().cast(DType::F32).into_data();
    data.iter::<f32>().map(f32::to_bits).collect()
}

fn sums_are_added_in_the_order_of_the_ranks_and_are_the_same_on_all() {
    for (name, group) in groups() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let supported = group.devices().iter();
            if !supported.clone().all(|device| device.supports_dtype(dtype)) {
                eprintln!("skipped: {dtype:?} on {name}");
                continue;
            }
            // One of more words than a launch takes, and one whose last unit is not full.
            for (round, shape) in [[1, 4096], [3, 10], [16, 256], [160, 4096]]
                .into_iter()
                .enumerate()
            {
                let count = shape[0] * shape[1];
                let values = |rank| numbers(rank, round, count);
                let sums = group.all_reduce(0, on_all(&group, shape, dtype, values));
                let sums = sums.expect("partials that fit");
                let mut expected = vec![0f32; count];
                for rank in 0..group.devices().len() {
                    let own = values(rank);
                    let sums = expected.iter_mut().zip(own);
                    sums.for_each(|(sum, own)| *sum += own);
                }
                let expected = floats(&expected, shape, &Device::flex()).cast(dtype);
                let expected = bits(&expected);
                for (sum, device) in sums.iter().zip(group.devices()) {
                    assert_eq!(sum.device(), *device, "{name}");
                    assert_eq!(sum.dtype(), dtype, "{name}");
                    let wrong = bits(sum)
                        .iter()
                        .zip(&expected)
                        .filter(|(a, b)| a != b)
                        .count();
                    assert_eq!(wrong, 0, "{name}, {dtype:?}, {shape:?}: wrong of {count}");
                }
            }
        }
        assert_eq!(group.check(), Ok(()), "{name}");
    }
}

fn many_exchanges_in_a_row_have_all_their_own_words() {
    for (name, group) in groups() {
        let ranks = group.devices().len();
        let mut sums = on_all(&group, [1, 512], DType::F32, |rank| vec![rank as f32; 512]);
        let mut expected = sums
            .iter()
            .map(|sum| bits(sum)[0])
            .map(f32::from_bits)
            .sum::<f32>();
        for round in 0..40 {
            // Each rank has the same sum, of which it adds its own part.
            sums = group.all_reduce(0, sums).expect("partials that fit");
            let own = sums.into_iter().enumerate();
            sums = own
                .map(|(rank, sum)| sum / ranks as f32 + rank as f32)
                .collect();
            if round > 0 {
                expected += (ranks * (ranks - 1) / 2) as f32;
            }
        }
        let sums = group.all_reduce(0, sums).expect("partials that fit");
        expected += (ranks * (ranks - 1) / 2) as f32;
        for sum in &sums {
            let all = bits(sum).into_iter().map(f32::from_bits);
            let worst = all.map(|sum| (sum - expected).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-3, "{name}: off by {worst} from {expected}");
        }
        assert!(sums.iter().all(|sum| bits(sum) == bits(&sums[0])), "{name}");
    }
}

fn parts_are_gathered_in_the_order_of_the_ranks() {
    for (name, group) in groups() {
        for rows in [1, 3, 80] {
            let shape = [rows, 2500];
            let values = |rank| numbers(rank, rows, rows * 2500);
            let parts = on_all(&group, shape, DType::F32, values);
            let all = group.all_gather(0, parts).expect("parts that fit");
            let ranks = group.devices().len();
            let expected: Vec<u32> = (0..ranks).flat_map(values).map(f32::to_bits).collect();
            for (all, device) in all.iter().zip(group.devices()) {
                assert_eq!(all.device(), *device, "{name}");
                assert_eq!(all.dims(), [ranks * rows, 2500], "{name}");
                assert!(bits(all) == expected, "{name}, {rows} rows");
            }
        }
    }
}

fn all_ranks_have_the_integers_of_the_root() {
    for (name, group) in groups() {
        for root in 0..group.devices().len() {
            let ids = |rank: usize| (0..15).map(move |at| (at * 7 + rank * 100) as i32 - 9);
            let ranks = group.devices().iter().enumerate();
            let tensors = ranks.map(|(rank, device)| {
                let data = TensorData::new(ids(rank).collect::<Vec<_>>(), [5, 3]);
                Tensor::<2, Int>::from_data(data, device)
            });
            let copies = group.broadcast(root, 0, tensors.collect());
            let copies = copies.expect("tensors that fit");
            for (copy, device) in copies.into_iter().zip(group.devices()) {
                assert_eq!(copy.device(), *device, "{name}");
                let actual: Vec<i32> = copy.into_data().iter().collect();
                assert_eq!(actual, ids(root).collect::<Vec<_>>(), "{name}, root {root}");
            }
        }
    }
}

fn a_lone_device_and_tensors_without_elements_come_back() {
    for (name, device) in devices() {
        let alone = DeviceGroup::new(std::slice::from_ref(device)).expect("a device");
        assert_eq!(*alone.route(), GroupRoute::Alone, "{name}");
        let own = floats(&[1.0, -2.0], [2, 1], device);
        let sums = alone.all_reduce(0, vec![own]).expect("a partial");
        assert_eq!(bits(&sums[0]), [1f32, -2.0].map(f32::to_bits), "{name}");
    }
    for (name, group) in groups() {
        let nothing = on_all(&group, [0, 3], DType::F32, |_| vec![]);
        let nothing = group.all_gather(0, nothing).expect("tensors that fit");
        assert!(nothing.iter().all(|all| all.dims() == [0, 3]), "{name}");
    }
}

fn devices_find_each_other_after_memory_was_moved() {
    for (name, group) in groups() {
        if *group.route() != GroupRoute::Memory {
            continue;
        }
        let sum = || {
            let partials = on_all(&group, [1, 512], DType::F32, |rank| vec![rank as f32; 512]);
            let sums = group.all_reduce(0, partials).expect("partials that fit");
            sums.iter().map(bits).collect::<Vec<_>>()
        };
        let before = sum();
        // A larger page than before, where what the others have fits in.
        for device in group.devices() {
            drop(Tensor::<1>::zeros([1 << 25], device));
            let kept = Tensor::<1>::zeros([1 << 9], device);
            device.memory_cleanup();
            assert_eq!(kept.into_data().num_elements(), 1 << 9);
        }
        assert_eq!(sum(), before, "{name}");
        assert_eq!(group.check(), Ok(()), "{name}");
    }
}

/// Takes as long as a device waits.
fn a_device_that_waits_in_vain_gives_up_and_the_group_begins_anew() {
    for (name, group) in groups() {
        if *group.route() != GroupRoute::Memory {
            continue;
        }
        let partials = || on_all(&group, [1, 512], DType::F32, |rank| vec![rank as f32; 512]);
        let alone = partials().into_iter().take(1).collect();
        let sums = group.all_reduce(0, alone).expect("a partial that fits");
        let sums = bits(&sums[0]).into_iter().map(f32::from_bits);
        assert!(sums.into_iter().all(f32::is_nan), "{name}");
        let failure = GroupError::TimedOut {
            devices: vec![format!("{:?}", group.devices()[0])],
        };
        assert_eq!(group.check(), Err(failure), "{name}");
        let sums = group.all_reduce(0, partials()).expect("partials that fit");
        for sum in &sums {
            assert_eq!(bits(sum), [1f32.to_bits(); 512], "{name}");
        }
        assert_eq!(group.check(), Ok(()), "{name}");
    }
}

fn what_does_not_fit_the_group_is_refused() {
    let flex = Device::flex();
    assert_refused(
        DeviceGroup::new(&[]).map(|_| ()),
        "`devices` is 0, expected at least 1",
    );
    let group = DeviceGroup::new(&[flex.clone(), flex.clone()]).expect("devices");
    assert!(!group.is_recordable());
    let one = || floats(&[1.0], [1, 1], &flex);
    assert_refused(
        group.all_reduce(0, vec![one()]),
        "`partials` is 1, expected 2 tensors",
    );
    assert_refused(
        group.all_reduce(1, vec![one(), one()]),
        "`first` is 1, expected at most 0",
    );
    let wide = floats(&[1.0, 2.0], [1, 2], &flex);
    assert_refused(
        group.all_gather(0, vec![one(), wide]),
        "`parts` has shape [1, 2], expected [1, 1]",
    );
    let half = one().cast(DType::BF16);
    assert_refused(
        group.all_reduce(0, vec![one(), half]),
        "`partials` has dtype BF16, expected one dtype",
    );
    let ids = || Tensor::<1, Int>::from_ints([1], &flex);
    assert_refused(
        group.broadcast(2, 0, vec![ids(), ids()]),
        "`root` is 2, expected below 2",
    );
}

catalogue![
    sums_are_added_in_the_order_of_the_ranks_and_are_the_same_on_all,
    many_exchanges_in_a_row_have_all_their_own_words,
    parts_are_gathered_in_the_order_of_the_ranks,
    all_ranks_have_the_integers_of_the_root,
    a_lone_device_and_tensors_without_elements_come_back,
    devices_find_each_other_after_memory_was_moved,
    a_device_that_waits_in_vain_gives_up_and_the_group_begins_anew,
    what_does_not_fit_the_group_is_refused,
];
