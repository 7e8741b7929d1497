//! Damaged files give an error or a checkpoint, never a panic.

use proptest::prelude::*;

use crate::checkpoint::{Checkpoint, CheckpointError, Dtype, LoadOptions, Loader};

use super::{checkpoint_of_bytes, repository, safetensors, stored, stored_f32};

/// What follows the header.
const DATA_BYTES: usize = 8 + 8 + 6 + 1 + 16 + 1;

fn file() -> Vec<u8> {
    safetensors(&[
        stored_f32("norm", &[2], &[1.0, 2.0]),
        stored("ids", "I64", &[1], &[1, 0, 0, 0, 0, 0, 0, 0]),
        stored("up.weight", "F8_E4M3", &[2, 3], &[1; 6]),
        stored("up.scale", "F8_E8M0", &[1, 1], &[127]),
        stored("down.weight", "I8", &[1, 16], &[0x21; 16]),
        stored("down.scale", "F8_E8M0", &[1, 1], &[127]),
    ])
}

/// Opens the file and asks for everything in it.
fn use_file(bytes: &[u8]) -> bool {
    let dir = checkpoint_of_bytes(bytes);
    let Ok(checkpoint) = Checkpoint::open(dir.path()) else {
        return false;
    };
    let mut loader = Loader::new(&checkpoint);
    let norm = loader.dense("norm", &[2]);
    let ids = loader.ids("ids", &[1], 4);
    let up = loader.linear("up", 2, 3);
    let down = loader.linear("down", 1, 32);
    let all = || Some((norm?, ids?, up?, down?));
    let all = all();
    loader.finish(all).is_ok()
}

#[test]
fn a_file_that_was_not_fetched_is_called_so() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 123456\n";
    let dir = checkpoint_of_bytes(pointer.as_bytes());
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Pointer { .. }), "{error}");
    let error = error.to_string();
    assert!(
        error.contains("model.safetensors: it is a pointer of git-LFS"),
        "{error}"
    );
}

#[test]
fn the_undamaged_file_loads() {
    assert!(use_file(&file()));
}

#[cfg(feature = "flex")]
#[test]
fn contents_of_every_tensor_that_is_loaded_are_checked() {
    let asset = repository::path("assets/ds4-tiny/model.safetensors");
    let mut file = std::fs::read(&asset).unwrap();
    let whole = Checkpoint::open(asset.parent().unwrap()).unwrap();
    // All codes of FP4 are numbers.
    let checked = whole.tensors().filter(|tensor| tensor.dtype != Dtype::I8);
    let data = file.len()
        - whole
            .tensors()
            .map(|tensor| tensor.bytes.len())
            .sum::<usize>();
    let start = whole
        .tensors()
        .map(|tensor| tensor.bytes.as_ptr() as usize)
        .min()
        .unwrap();
    let mut names = Vec::new();
    for tensor in checked {
        // NaN in all formats of floats, and no id.
        let at = data + tensor.bytes.as_ptr() as usize - start;
        let bytes = tensor.bytes.len().min(8);
        file[at..at + bytes].fill(0xff);
        names.push(tensor.name);
    }
    let damaged = checkpoint_of_bytes(&file);
    let damaged = Checkpoint::open(damaged.path()).unwrap();
    let device = burn::tensor::Device::flex();
    let error = damaged.load(&LoadOptions::default(), &device).unwrap_err();
    let CheckpointError::Weights(errors) = error else {
        panic!("{error}");
    };
    let invalid = errors.invalid.iter().map(|tensor| &*tensor.name);
    assert_eq!(invalid.collect::<Vec<_>>(), names);
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(256)
    })]

    #[test]
    fn no_truncation_panics_or_loads(fraction in 0.0f64..1.0) {
        let file = file();
        let length = (file.len() as f64 * fraction) as usize;
        prop_assert!(!use_file(&file[..length]));
    }

    #[test]
    fn no_damaged_header_panics(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..6),
    ) {
        let mut file = file();
        let header = file.len() - DATA_BYTES;
        for (index, flip) in flips {
            file[index.index(header)] ^= flip;
        }
        use_file(&file);
    }

    #[test]
    fn no_damaged_digit_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..4),
    ) {
        let mut file = file();
        let digits = (8..file.len() - DATA_BYTES).filter(|&at| file[at].is_ascii_digit());
        let digits: Vec<usize> = digits.collect();
        for (index, digit) in changes {
            file[digits[index.index(digits.len())]] = digit;
        }
        use_file(&file);
    }
}
