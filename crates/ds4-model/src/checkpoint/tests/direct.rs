//! Weights that a device takes as they are in the files, against those that the host takes apart.

use burn::module::Module;
use burn::tensor::{Device, TensorData};

use super::super::stored::Stored;
use super::super::{Checkpoint, CheckpointError, InvalidReason, LoadOptions, Loader, WeightErrors};
use super::portions::{Parameters, load, placements, wgpu};
use super::{StoredTensor, checkpoint_of, checkpoint_of_bytes, invalid, stored, stored_f32};
use crate::placement::Placement;
use crate::repository;
use crate::weights::WeightSource;

/// The values of parameters, whatever dtype a device has them in.
fn values(module: &impl Module) -> Vec<Vec<f64>> {
    let values = |data: TensorData| data.iter::<f64>().collect();
    Parameters::of(module).into_iter().map(values).collect()
}

fn errors<T>(result: Result<T, CheckpointError>) -> WeightErrors {
    match result.map(|_| ()) {
        Err(CheckpointError::Weights(errors)) => *errors,
        other => panic!("{other:?}"),
    }
}

/// What `ask` makes of the tensors on a device.
fn stored_on<T>(
    device: &Device,
    tensors: &[StoredTensor],
    ask: impl Fn(&mut Stored<'_, '_>) -> Option<T>,
) -> Result<T, CheckpointError> {
    let checkpoint = checkpoint_of(tensors);
    let (options, placement) = (LoadOptions::default(), Placement::single(device, 1));
    let mut source = Stored::new(Loader::new(&checkpoint), &options, &placement, device);
    let asked = ask(&mut source);
    source.settle();
    source.loader.finish(asked)
}

fn bytes(count: usize, seed: usize) -> Vec<u8> {
    let byte = |at: usize| ((at + seed) * 2_654_435_761 >> 11) as u8;
    // No NaN of E4M3 or E8M0.
    (0..count).map(|at| byte(at) & 0xb7).collect()
}

fn fp4(prefix: &str, [out, inp]: [usize; 2]) -> [StoredTensor; 2] {
    let [codes, scales] = [inp.div_ceil(2), inp.div_ceil(32)];
    let name = |end: &str| format!("{prefix}.{end}");
    let (weight, scale) = (bytes(out * codes, prefix.len()), bytes(out * scales, out));
    [
        stored(&name("weight"), "I8", &[out, codes], &weight),
        stored(&name("scale"), "F8_E8M0", &[out, scales], &scale),
    ]
}

fn fp8(prefix: &str, [out, inp]: [usize; 2]) -> [StoredTensor; 2] {
    let blocks = [out.div_ceil(128), inp.div_ceil(128)];
    let name = |end: &str| format!("{prefix}.{end}");
    let (weight, scale) = (bytes(out * inp, out), bytes(blocks[0] * blocks[1], inp));
    [
        stored(&name("weight"), "F8_E4M3", &[out, inp], &weight),
        stored(&name("scale"), "F8_E8M0", &blocks, &scale),
    ]
}

#[test]
fn a_model_is_the_same_whoever_takes_it_apart() {
    let Some((_alone, devices)) = wgpu() else {
        eprintln!("skipped: wgpu");
        return;
    };
    let path = repository::path("assets/ds4-tiny");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let whole = load(&checkpoint, &Placement::single(&Device::flex(), 6)).unwrap();
    let mut reports = Vec::new();
    let report = |read, total| reports.push((read, total));
    let single = checkpoint.load_with_progress(&LoadOptions::default(), &devices[0], report);
    let single = single.unwrap();
    assert!(values(&single) == values(&whole));
    assert!(reports.is_sorted());
    assert!(reports.last().is_some_and(|(read, total)| read == total));
    for placement in placements(&devices, 6) {
        let model = load(&checkpoint, &placement).unwrap();
        let placed = single.clone().place(placement).unwrap();
        assert!(values(&model) == values(&placed));
    }
}

#[test]
fn stacks_of_any_sizes_are_the_same_whoever_takes_them_apart() {
    let Some((_alone, [device, _])) = wgpu() else {
        eprintln!("skipped: wgpu");
        return;
    };
    // Rows of whole words and others, scales of whole words and others, partial blocks: which of
    // them, in FP4 and in FP8, the device is given as they are.
    for (shape, given) in [
        ([4, 32], [true, true]),
        ([3, 32], [false, true]),
        ([8, 24], [true, true]),
        ([8, 20], [false, false]),
        ([2, 72], [false, true]),
        ([1, 7], [false, false]),
        ([130, 264], [false, true]),
        ([4, 264], [true, true]),
    ] {
        let experts = 0..3;
        let experts =
            experts.flat_map(|expert| ["w1", "w3"].map(|part| format!("e.{expert}.{part}")));
        let experts: Vec<String> = experts.collect();
        for (make, given) in [fp4, fp8].into_iter().zip(given) {
            let tensors: Vec<_> = experts.iter().flat_map(|of| make(of, shape)).collect();
            let stack = |device: &Device, given: bool| {
                let loaded = stored_on(device, &tensors, |source| {
                    let stack = source.stack("e", Some(3), &[".w1", ".w3"], shape);
                    assert_eq!(source.unchecked.len(), usize::from(given), "{shape:?}");
                    stack
                });
                values(&loaded.unwrap())
            };
            let host = stack(&Device::flex(), false);
            assert!(stack(&device, given) == host, "{shape:?}");
        }
    }
    for (groups, shape) in [
        (2, [256, 40]),
        (2, [128, 40]),
        (1, [130, 8]),
        (3, [384, 264]),
    ] {
        for make in [fp4, fp8] {
            let tensors = make("o", shape);
            let [rank, width] = [shape[0] / groups, shape[1]];
            let stack = |device: &Device| {
                let loaded = stored_on(device, &tensors, |source| {
                    source.groups("o", [groups, rank, width])
                });
                values(&loaded.unwrap())
            };
            assert!(
                stack(&device) == stack(&Device::flex()),
                "{groups} {shape:?}"
            );
        }
    }
}

/// Large enough for the device to check it.
const LARGE: usize = 1 << 18;

#[test]
fn large_floats_arrive_as_they_are_and_the_last_is_checked() {
    let Some((_alone, [device, _])) = wgpu() else {
        eprintln!("skipped: wgpu");
        return;
    };
    let mut floats: Vec<f32> = (0..LARGE).map(|at| at as f32 - 7.5).collect();
    let ask = |source: &mut Stored<'_, '_>| source.embedding("a", [2, LARGE / 2]);
    let loaded = stored_on(&device, &[stored_f32("a", &[2, LARGE / 2], &floats)], ask).unwrap();
    assert_eq!(loaded.dims(), [2, LARGE / 2]);
    assert!(
        loaded
            .val()
            .into_data()
            .iter::<f32>()
            .eq(floats.iter().copied())
    );
    let dense = |source: &mut Stored<'_, '_>| source.stack("e", None, &["a", "b"], [2, LARGE / 2]);
    let tensors = ["ea.weight", "eb.weight"];
    let tensors = tensors.map(|name| stored_f32(name, &[2, LARGE / 2], &floats));
    let [stack, expected] = [&device, &Device::flex()].map(|on| stored_on(on, &tensors, dense));
    assert!(values(&stack.unwrap()) == values(&expected.unwrap()));
    floats[LARGE - 1] = f32::NEG_INFINITY;
    let damaged = stored_on(&device, &[stored_f32("a", &[2, LARGE / 2], &floats)], ask);
    let (count, first) = (1, LARGE - 1);
    let expected = invalid("a", InvalidReason::NonFinite { count, first });
    assert_eq!(errors(damaged).invalid, [expected]);
}

#[test]
fn what_a_device_finds_is_named_as_by_the_host() {
    let Some((_alone, devices)) = wgpu() else {
        eprintln!("skipped: wgpu");
        return;
    };
    let asset = repository::path("assets/ds4-tiny/model.safetensors");
    let whole = Checkpoint::open(asset.parent().unwrap()).unwrap();
    let file = std::fs::read(&asset).unwrap();
    let tensors = || whole.tensors();
    let data = file.len() - tensors().map(|tensor| tensor.bytes.len()).sum::<usize>();
    let start = tensors().map(|tensor| tensor.bytes.as_ptr() as usize).min();
    // The first and the last of each: scales and codes of routed and of other linears, of the trunk
    // and of what drafts.
    let damages: [&[(&str, bool)]; 4] = [
        &[("layers.0.ffn.experts.0.w1.scale", false)],
        &[("layers.5.ffn.experts.31.w2.scale", true)],
        &[
            ("layers.3.attn.wq_b.weight", true),
            ("layers.3.attn.wo_b.scale", true),
            ("layers.3.ffn.experts.7.w3.scale", true),
        ],
        &[
            ("mtp.0.ffn.shared_experts.w2.weight", false),
            ("mtp.0.e_proj.weight", true),
        ],
    ];
    for damage in damages {
        let mut file = file.clone();
        for (name, is_last) in damage {
            let bytes = whole.tensor(name).unwrap().bytes;
            let at = data + bytes.as_ptr() as usize - start.unwrap();
            file[at + if *is_last { bytes.len() - 1 } else { 0 }] = 0xff;
        }
        let damaged = checkpoint_of_bytes(&file);
        let damaged = Checkpoint::open(damaged.path()).unwrap();
        let expected = errors(load(&damaged, &Placement::single(&Device::flex(), 6)));
        assert_eq!(expected.invalid.len(), damage.len());
        let single = Placement::single(&devices[0], 6);
        for placement in placements(&devices, 6).into_iter().chain([single]) {
            assert_eq!(errors(load(&damaged, &placement)), expected, "{damage:?}");
        }
    }
}

#[cfg(unix)]
#[test]
fn a_file_that_has_become_shorter_is_an_error() {
    let Some((_alone, [device, _])) = wgpu() else {
        eprintln!("skipped: wgpu");
        return;
    };
    let checkpoint = {
        let tensor = stored_f32("a", &[1, LARGE], &vec![1.0; LARGE]);
        let dir = checkpoint_of_bytes(&super::safetensors(&[tensor]));
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let path = dir.path().join("model.safetensors");
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(4096).unwrap();
        checkpoint
    };
    let (options, placement) = (LoadOptions::default(), Placement::single(&device, 1));
    let mut source = Stored::new(Loader::new(&checkpoint), &options, &placement, &device);
    assert!(source.embedding("a", [1, LARGE]).is_none());
    let errors = errors(source.loader.finish(None::<()>));
    let reason = &errors.invalid[0].reason;
    assert!(matches!(reason, InvalidReason::Unreadable(_)), "{reason}");
}
