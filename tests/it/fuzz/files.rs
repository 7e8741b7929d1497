//! Files of a checkpoint.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use ds4_model::cache::{CacheConfig, CacheLayout, Rollback};
use ds4_model::checkpoint::{Checkpoint, Form, LoadOptions};
use ds4_model::config::{GenerationDefaults, ModelConfig};
use ds4_model::generate::{SpecialTokens, TextTokenizer};
use tempfile::TempDir;

/// The shipped checkpoint: of the checkout that cargo runs this in, or was built in.
fn shipped(name: &str) -> PathBuf {
    let running = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let crates = running
        .into_iter()
        .chain([env!("CARGO_MANIFEST_DIR").into()]);
    let mut roots = crates
        .flat_map(|path: PathBuf| path.ancestors().map(Path::to_path_buf).collect::<Vec<_>>());
    let root = roots.find(|root| root.join("assets/ds4-tiny").is_dir());
    root.expect("a checkout").join("assets/ds4-tiny").join(name)
}

fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).expect("it is writable");
    }
    directory
}

/// That every error has a message of one screen, which no terminal obeys.
fn readable(error: impl std::fmt::Display) {
    let message = error.to_string();
    let controls = |character: char| character.is_control() && character != '\n';
    assert!(!message.contains(controls), "{message:?}");
}

/// `config.json`, and the sizes that follow from it.
pub fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let config = match ModelConfig::from_json_str(&text) {
        Ok(config) => config,
        Err(error) => return readable(error),
    };
    for layout in [CacheLayout::trunk(&config), CacheLayout::mtp(&config)] {
        for rollback in [Rollback::Bounded(3), Rollback::Unlimited] {
            let options = CacheConfig {
                batch: 2,
                capacity: 100,
                rollback,
                dtype: FloatDType::F32,
            };
            let _ = layout.bytes(options).map_err(readable);
        }
    }
}

/// `generation_config.json`.
pub fn generation_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = GenerationDefaults::from_json_str(&text).map_err(readable);
}

/// Opens and loads what is there.
fn open(directory: &TempDir) {
    let checkpoint = match Checkpoint::open(directory.path()) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return readable(error),
    };
    for tensor in checkpoint.tensors() {
        let sizes = tensor
            .shape
            .iter()
            .try_fold(1_usize, |all, size| all.checked_mul(*size));
        assert!(sizes.is_some(), "{:?}", tensor.shape);
    }
    let (options, device) = (LoadOptions::default(), Device::flex());
    let _ = checkpoint.weight_bytes(&options, &device).map_err(readable);
    let target = directory.path().join("target");
    let form = [Form::Dense, Form::Released, Form::Transformers][checkpoint.tensors().len() % 3];
    let written = checkpoint.convert(form, &target, 1000, |_, _| {});
    let _ = written.map_err(readable);
    let _ = checkpoint.load(&options, &device).map_err(readable);
}

/// `model.safetensors`.
pub fn header(data: &[u8]) {
    let config = std::fs::read(shipped("config.json")).expect("an asset");
    open(&directory(&[
        ("config.json", &config),
        ("model.safetensors", data),
    ]));
}

/// `model.safetensors.index.json`, beside two shards.
pub fn index(data: &[u8]) {
    let config = std::fs::read(shipped("config.json")).expect("an asset");
    let shard = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        [
            &(header.len() as u64).to_le_bytes(),
            header.as_bytes(),
            &[0; 4],
        ]
        .concat()
    };
    open(&directory(&[
        ("config.json", &config),
        ("model.safetensors.index.json", data),
        ("a.safetensors", &shard("norm.weight")),
        ("b.safetensors", &shard("head.weight")),
    ]));
}

/// `tokenizer.json`.
pub fn tokenizer(data: &[u8]) {
    let directory = directory(&[("tokenizer.json", data)]);
    let tokenizer = match TextTokenizer::from_dir(directory.path()) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return readable(error),
    };
    let text = "And God said, \u{e9}\u{4e16} 123\n<think>";
    for encoded in [tokenizer.encode(text), tokenizer.encode_plain(text)] {
        let Ok(ids) = encoded else {
            continue;
        };
        let _ = tokenizer.decode(&ids, SpecialTokens::Skip);
        let mut stream = tokenizer.decode_stream(SpecialTokens::Keep);
        let pieces = ids.iter().map(|id| stream.push(*id));
        let pieces: Result<String, _> = pieces.collect();
        if let (Ok(pieces), Ok(whole)) = (pieces, tokenizer.decode(&ids, SpecialTokens::Keep)) {
            assert_eq!(pieces + &stream.finish(), whole);
        }
    }
    for id in [0, 1, 300, u32::MAX] {
        let _ = tokenizer.token_bytes(id);
    }
}
