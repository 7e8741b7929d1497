//! Weights that several devices have, each read on a thread of its own.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::super::{Checkpoint, CheckpointError, LoadOptions, Loader, WeightErrors};
use super::{checkpoint_of, stored_f32};
use crate::model::Model;
use crate::placement::Placement;
use crate::repository;

fn ds4_tiny() -> Checkpoint {
    Checkpoint::open(&repository::path("assets/ds4-tiny")).unwrap()
}

fn flex() -> [Device; 2] {
    [Device::flex(), Device::flex()]
}

pub(super) fn load(
    checkpoint: &Checkpoint,
    placement: &Placement,
) -> Result<Model, CheckpointError> {
    let (loader, options) = (Loader::new(checkpoint), LoadOptions::default());
    checkpoint.build(loader, &options, placement, |model, _| model)
}

/// One layer on the first, all others on the second; and parts of every layer on both.
pub(super) fn placements(devices: &[Device; 2], layers: usize) -> [Placement; 2] {
    [
        Placement::new(devices, &[1, layers - 1]).unwrap(),
        Placement::tensor(devices, layers).unwrap(),
    ]
}

/// The parameters of a module, in their order.
#[derive(Default)]
pub(super) struct Parameters(Vec<TensorData>);

impl Parameters {
    pub(super) fn of(module: &impl Module) -> Vec<TensorData> {
        let mut parameters = Self::default();
        module.visit(&mut parameters);
        parameters.0
    }
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.push(param.val().into_data());
    }
}

#[test]
fn threads_load_what_one_loads_and_divides() {
    let checkpoint = ds4_tiny();
    let whole = load(&checkpoint, &Placement::single(&Device::flex(), 6)).unwrap();
    for placement in placements(&flex(), 6) {
        let model = load(&checkpoint, &placement).unwrap();
        let placed = whole.clone().place(placement).unwrap();
        assert!(Parameters::of(&model) == Parameters::of(&placed));
        let (Some(own), Some(expected)) = (model.parallel, placed.parallel) else {
            assert!(model.placement.ranks().is_empty());
            continue;
        };
        let (own, expected) = (own.other(0).unwrap(), expected.other(0).unwrap());
        assert!(Parameters::of(&own.layers) == Parameters::of(&expected.layers));
        assert_eq!(own.embedding.to_data(), expected.embedding.to_data());
        assert!(Parameters::of(&own.head) == Parameters::of(&expected.head));
        assert!(Parameters::of(&own.norm) == Parameters::of(&expected.norm));
    }
}

#[test]
fn bytes_are_reported_once_whoever_reads_them() {
    let checkpoint = ds4_tiny();
    for placement in placements(&flex(), 6) {
        let mut reports = Vec::new();
        let loader = Loader::new(&checkpoint);
        let loader = loader.with_progress(|read, total| reports.push((read, total)));
        let options = LoadOptions::default();
        let model = checkpoint.build(loader, &options, &placement, |model, _| model);
        drop(model.unwrap());
        assert!(reports.is_sorted());
        let (read, total) = reports.last().copied().unwrap();
        assert_eq!(read, total);
    }
}

#[test]
fn one_error_tells_what_all_threads_have_found() {
    // All but the first layer's norms, one of which is not finite.
    let tensors = [
        stored_f32("layers.0.attn_norm.weight", &[128], &[f32::NAN; 128]),
        stored_f32("left", &[1], &[1.0]),
    ];
    let checkpoint = checkpoint_of(&tensors);
    let errors = |placement: &Placement| -> WeightErrors {
        match load(&checkpoint, placement).map(|_| ()).unwrap_err() {
            CheckpointError::Weights(errors) => *errors,
            other => panic!("{other}"),
        }
    };
    let expected = errors(&Placement::single(&Device::flex(), 6));
    assert!(expected.more_missing > 0 && expected.missing.len() > 100);
    assert_eq!(expected.unexpected.len(), 1);
    assert_eq!(expected.invalid.len() + expected.mis_shaped.len(), 1);
    for placement in placements(&flex(), 6) {
        assert_eq!(errors(&placement), expected);
    }
}

/// The bytes of a mapped file that are in the memory of this process.
#[cfg(target_os = "linux")]
fn resident(file: &std::path::Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let name = file.to_str().unwrap();
    let own = maps.lines().skip_while(|line| !line.contains(name));
    let resident = own.into_iter().find_map(|line| line.strip_prefix("Rss:"));
    let kilobytes = resident.unwrap().trim().trim_end_matches(" kB");
    1024 * kilobytes.parse::<usize>().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn pages_of_tensors_that_were_read_are_given_back() {
    let values = vec![1.5; 1 << 20];
    let tensors = ["a", "b"].map(|name| stored_f32(name, &[1 << 20], &values));
    let checkpoint = checkpoint_of(&tensors);
    let shard = checkpoint.tensor("a").unwrap().shard.to_path_buf();
    let sum: u64 = checkpoint
        .tensors()
        .map(|tensor| {
            let bytes = tensor.bytes.iter();
            bytes.map(|byte| u64::from(*byte)).sum::<u64>()
        })
        .sum();
    assert!(sum > 0);
    let before = resident(&shard);
    assert!(before >= 8 << 20, "{before}");
    let mut loader = Loader::new(&checkpoint);
    let a = loader.dense("a", &[1 << 20]).unwrap();
    assert!(a.iter::<f32>().all(|value| value == 1.5));
    let after = resident(&shard);
    assert!(after < 5 << 20, "{after} of {before}");
    // Who reads them again finds them.
    let again = checkpoint.tensor("a").unwrap();
    assert_eq!(again.bytes[..4], 1.5f32.to_le_bytes());
}

/// Two adapters of wgpu, or the one twice, for as long as the guard is held.
#[cfg(feature = "wgpu")]
pub(super) fn wgpu() -> Option<(std::sync::MutexGuard<'static, ()>, [Device; 2])> {
    use burn::tensor::{DeviceKind, DeviceType};
    use burn_ds4_ops::device::DeviceSpec;
    let alone = repository::alone_on_wgpu();
    let first = DeviceSpec::Wgpu.init().ok()?;
    let cpu = Device::wgpu(DeviceKind::Cpu);
    let found = Device::enumerate(DeviceType::Wgpu);
    let second = if found.contains(&cpu) {
        cpu
    } else {
        first.clone()
    };
    Some((alone, [first, second]))
}

#[cfg(feature = "wgpu")]
#[test]
fn a_device_that_does_not_take_its_part_is_named_and_the_other_gives_its_memory_back() {
    use burn::tensor::FloatDType;

    use super::releases::checkpoint;
    use crate::config::ModelConfig;
    use crate::placement::Devices;

    let Some((_alone, [first, second])) = wgpu() else {
        eprintln!("skipped: wgpu");
        return;
    };
    if first == second || !first.supports_dtype(FloatDType::F16) {
        eprintln!("skipped: two adapters of wgpu with f16");
        return;
    }
    // In f16, the embedding fits a buffer of a software driver, the output matrix in f32 does not.
    let config = ModelConfig {
        vocab_size: 129_280,
        hidden_size: 448,
        layers: ModelConfig::new().layers[..2].to_vec(),
        num_attention_heads: 4,
        head_dim: 64,
        rope_head_dim: 32,
        q_lora_rank: 64,
        o_groups: 2,
        o_lora_rank: 64,
        index_n_heads: 2,
        index_head_dim: 64,
        n_routed_experts: 8,
        moe_intermediate_size: 64,
        num_hash_layers: 0,
        num_mtp_layers: 0,
        ..ModelConfig::new()
    };
    config.validate().unwrap();
    let checkpoint = checkpoint(config);
    let options = LoadOptions {
        dtype: FloatDType::F16,
        ..LoadOptions::default()
    };
    let named = [("one", &first), ("two", &second)];
    let named = named.map(|(name, device)| (name.to_owned(), device.clone()));
    let devices = Devices::new(named.into())
        .unwrap()
        .with_split(Some(vec![1, 1]));
    let in_use = || {
        first.memory_cleanup();
        first.memory_pool_usage().map(|usage| usage.bytes_in_use)
    };
    let before = in_use();
    let error = checkpoint.load(&options, &devices).map(|_| ()).unwrap_err();
    let told = error.to_string();
    assert!(
        told.starts_with("two: it has not taken its part of the model: "),
        "{told}"
    );
    assert_eq!(in_use(), before);
}
