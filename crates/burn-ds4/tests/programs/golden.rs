//! Golden files of the repository, and copies of its checkpoint.

use safetensors::SafeTensors;
use tempfile::TempDir;

pub use ds4_test_support::root;

/// The values of a golden tensor of the shipped checkpoint.
pub fn golden<const N: usize, T>(name: &str, read: fn([u8; N]) -> T) -> Vec<T> {
    let path = root().join("tests/fixtures/ds4-tiny/golden.safetensors");
    let bytes = std::fs::read(path).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a golden file is valid");
    let tensor = file.tensor(name).expect("a golden tensor");
    let (values, rest) = tensor.data().as_chunks::<N>();
    assert!(rest.is_empty());
    values.iter().map(|value| read(*value)).collect()
}

/// The shipped checkpoint, with these files.
pub fn copy(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let asset = root().join("assets/ds4-tiny");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(asset.join(name), dir.path().join(name)).expect("an asset");
    }
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).expect("the directory is writable");
    }
    dir
}
