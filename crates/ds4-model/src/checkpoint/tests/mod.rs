mod contents;
mod damage;
#[cfg(all(feature = "wgpu", not(feature = "fusion")))]
mod direct;
mod fixtures;
mod formats;
mod groups;
mod open;
mod packing;
mod portions;
mod progress;
mod releases;
mod report;
mod sharded;
mod variants;

use tempfile::TempDir;

use super::{
    Checkpoint, CheckpointError, InvalidReason, InvalidTensor, Loader, MisShapedTensor,
    MissingTensor, WeightErrors,
};
use crate::repository;

/// One tensor of a file made by hand.
#[derive(Clone, Debug)]
struct StoredTensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn stored(name: &str, dtype: &'static str, shape: &[usize], bytes: &[u8]) -> StoredTensor {
    StoredTensor {
        name: name.to_string(),
        dtype,
        shape: shape.to_vec(),
        bytes: bytes.to_vec(),
    }
}

fn stored_f32(name: &str, shape: &[usize], values: &[f32]) -> StoredTensor {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    stored(name, "F32", shape, &bytes)
}

/// A safetensors file, its format written out here independently of the reader.
fn safetensors(tensors: &[StoredTensor]) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        entries.push(format!(
            r#""{}":{{"dtype":"{}","shape":{:?},"data_offsets":[{begin},{}]}}"#,
            tensor.name,
            tensor.dtype,
            tensor.shape,
            data.len()
        ));
    }
    with_header(&format!("{{{}}}", entries.join(",")), &data)
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A directory with a valid `config.json` and nothing else.
fn empty_checkpoint() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = repository::path("assets/ds4-tiny/config.json");
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    dir
}

fn checkpoint_of_bytes(file: &[u8]) -> TempDir {
    let dir = empty_checkpoint();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    dir
}

/// A checkpoint of the given tensors, opened; the directory must outlive it only for its files'
/// names.
fn checkpoint_of(tensors: &[StoredTensor]) -> Checkpoint {
    let dir = checkpoint_of_bytes(&safetensors(tensors));
    Checkpoint::open(dir.path()).unwrap()
}

fn report<T>(
    tensors: &[StoredTensor],
    load: impl FnOnce(&mut Loader<'_>) -> Option<T>,
) -> WeightErrors {
    let checkpoint = checkpoint_of(tensors);
    let mut loader = Loader::new(&checkpoint);
    let value = load(&mut loader);
    assert!(value.is_none());
    match loader.finish(value) {
        Err(CheckpointError::Weights(errors)) => *errors,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("loaded"),
    }
}

fn invalid(name: &str, reason: InvalidReason) -> InvalidTensor {
    InvalidTensor {
        name: name.to_string(),
        reason,
    }
}

fn missing(name: &str, expected: &[usize]) -> MissingTensor {
    MissingTensor {
        name: name.to_string(),
        expected: expected.to_vec(),
    }
}

fn mis_shaped(name: &str, expected: &[usize], actual: &[usize]) -> MisShapedTensor {
    MisShapedTensor {
        name: name.to_string(),
        expected: expected.to_vec(),
        actual: actual.to_vec(),
    }
}
