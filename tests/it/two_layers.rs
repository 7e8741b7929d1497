//! A small model for tests of how a text is decoded: two layers of the shipped checkpoint and its
//! MTP layer, with caches that a short text outgrows.

use std::sync::OnceLock;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::generate::MAX_DRAFTS;
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::common::{compiles_slowly, devices, skip, values};
use crate::golden::{Golden, root};

/// The layers of the shipped checkpoint that the model has: CSA with experts by hash, HCA with
/// experts by score. The MTP layer has a sliding window only.
const LAYERS: [usize; 2] = [1, 4];
/// Fewer than the shipped checkpoint has, so that a short text is longer than it.
const WINDOW: usize = 16;
/// Compressed rows that the indexer picks: all of [`CAPACITY`] positions, half of those of
/// [`PICKED_CAPACITY`].
const PICKS: usize = 8;
/// Fewer than the shipped checkpoint has, of which most of a token's operations on a CPU are.
const SINKHORN_ITERATIONS: usize = 4;

/// Of a cache at first; the prompt ends right before, so that the text grows out of it. From then
/// on the indexer picks.
pub(crate) const CAPACITY: usize = 32;
/// Enough for the indexer to pick from the beginning.
pub(crate) const PICKED_CAPACITY: usize = 2 * CAPACITY;
const PROMPT: usize = 28;
/// Positions of a page, few enough for short texts to have several: what both layers divide into
/// whole rows.
pub(crate) const PAGE: usize = 16;
/// What the model computes in.
const DTYPES: [FloatDType; 2] = [FloatDType::F32, FloatDType::BF16];

/// Opens the checkpoint, which is made once. Its files are mapped, and gone when it is open.
fn checkpoint() -> &'static Checkpoint {
    static CHECKPOINT: OnceLock<Checkpoint> = OnceLock::new();
    CHECKPOINT.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let asset = root().join("assets/ds4-tiny");
        let read = |name| std::fs::read(asset.join(name)).expect("the asset is there");
        let write = |name, bytes: Vec<u8>| {
            std::fs::write(dir.path().join(name), bytes).expect("the directory is writable");
        };
        write("config.json", config(&read("config.json")));
        write("model.safetensors", weights(&read("model.safetensors")));
        Checkpoint::open(dir.path()).expect("layers of a checkpoint are a checkpoint")
    })
}

/// The configuration with the layers alone.
fn config(json: &[u8]) -> Vec<u8> {
    let mut config: Value = serde_json::from_slice(json).expect("JSON");
    let of = |key: &str| LAYERS.map(|layer| config[key][layer].clone());
    let (ratios, types) = (of("compress_ratios"), of("layer_types"));
    config["compress_ratios"] = json!([ratios[0], ratios[1], 0]);
    config["layer_types"] = json!(types);
    config["num_hidden_layers"] = json!(LAYERS.len());
    config["num_hash_layers"] = json!(1);
    config["sliding_window"] = json!(WINDOW);
    config["index_topk"] = json!(PICKS);
    config["hc_sinkhorn_iters"] = json!(SINKHORN_ITERATIONS);
    serde_json::to_vec(&config).expect("JSON")
}

/// The tensors of the layers, and those of no layer of the trunk.
fn weights(file: &[u8]) -> Vec<u8> {
    let file = SafeTensors::deserialize(file).expect("the asset is valid");
    let tensors = file.iter().filter_map(|(name, tensor)| {
        let Some((layer, rest)) = name.strip_prefix("layers.").and_then(|n| n.split_once('.'))
        else {
            return Some((name.to_owned(), tensor));
        };
        let layer: usize = layer.parse().expect("the number of a layer");
        let layer = LAYERS.iter().position(|known| *known == layer)?;
        Some((format!("layers.{layer}.{rest}"), tensor))
    });
    let tensors: Vec<(String, TensorView)> = tensors.collect();
    safetensors::serialize(tensors, None).expect("tensors of a valid file")
}

/// A text of so many tokens, up to 300, that begins like that of any other number.
pub(crate) fn text(count: usize) -> Vec<u32> {
    let golden = Golden::open("tests/fixtures/ds4-tiny/golden.safetensors");
    let ids = golden.get("long.input_ids").ids();
    ids[..count].iter().map(|id| *id as u32).collect()
}

/// The model on a device, and what to begin a text with.
#[derive(Clone)]
pub(crate) struct Fixture {
    pub(crate) model: Model,
    pub(crate) device: Device,
    pub(crate) prompt: Vec<u32>,
}

impl Fixture {
    pub(crate) fn open(device: &Device, dtype: FloatDType, expand: bool) -> Self {
        let checkpoint = checkpoint();
        let options = LoadOptions {
            dtype,
            expand,
            ..LoadOptions::default()
        };
        Self {
            model: checkpoint.load(&options, device).expect("it loads"),
            device: device.clone(),
            prompt: text(PROMPT),
        }
    }

    pub(crate) fn cache(&self, capacity: usize) -> Cache {
        let options = CacheConfig {
            capacity,
            rollback: Rollback::Bounded(MAX_DRAFTS),
            ..CacheConfig::default()
        };
        let cache = self.model.new_cache(options);
        cache.expect("the options are valid")
    }

    pub(crate) fn streams(&self, ids: &[u32], cache: &mut Cache, trace: &Trace) -> Tensor<4> {
        let count = ids.len();
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, count]), &self.device);
        let streams = self.model.forward_streams(ids, cache, trace);
        streams.expect("the text fits the context")
    }

    /// Logits of each position.
    pub(crate) fn logits(&self, streams: Tensor<4>) -> Vec<Vec<f32>> {
        let logits = values(self.model.logits(streams));
        let rows = logits.chunks(self.model.config().vocab_size);
        rows.map(<[f32]>::to_vec).collect()
    }
}

/// Runs `test` with every dtype that a device has, and with weights as they are used there: packed
/// on GPUs.
pub(crate) fn every_model(test: impl Fn(&str, &Fixture)) {
    every_model_in(&DTYPES, test);
}

/// The same with some dtypes only.
pub(crate) fn every_model_in(dtypes: &[FloatDType], test: impl Fn(&str, &Fixture)) {
    models(devices(), dtypes, test);
}

/// The same without devices that compile kernels slowly: for what the host decides.
pub(crate) fn every_quick_model(test: impl Fn(&str, &Fixture)) {
    let devices = devices().iter().filter(|(name, _)| !compiles_slowly(name));
    models(devices, &DTYPES, test);
}

fn models<'a>(
    devices: impl IntoIterator<Item = &'a (String, Device)>,
    dtypes: &[FloatDType],
    test: impl Fn(&str, &Fixture),
) {
    for (name, device) in devices {
        for &dtype in dtypes {
            if !device.supports_dtype(dtype) {
                skip(name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            let fixture = Fixture::open(device, dtype, name == "flex");
            test(&format!("{name} {dtype:?}"), &fixture);
        }
    }
}

pub(crate) fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|value| value.to_bits()).collect()
}
