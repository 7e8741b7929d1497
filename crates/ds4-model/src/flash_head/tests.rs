use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use super::{FLASH_HEAD_FILE, FlashHeadFile, FlashHeadFileError};
#[cfg(unix)]
use crate::repository;

fn matrix(shape: [usize; 2], dtype: FloatDType) -> Tensor<2> {
    let device = Device::flex();
    device.seed(7);
    Tensor::<2>::random(shape, Distribution::Default, (&device, DType::F32)).cast(dtype)
}

fn built(lm_head: &Tensor<2>, clusters: usize) -> FlashHead {
    let options = BuildOptions {
        special_tokens: vec![11, 2],
        iterations: 2,
        ..BuildOptions::default()
    };
    FlashHead::build(lm_head.clone(), clusters, &options, |_| {}).unwrap()
}

/// A directory with the file of a head of 21 rows of width 4 in 5 clusters.
fn saved() -> (TempDir, PathBuf, Tensor<2>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FLASH_HEAD_FILE);
    let lm_head = matrix([21, 4], FloatDType::F32);
    FlashHeadFile::save(&path, &built(&lm_head, 5), Some(9)).unwrap();
    (dir, path, lm_head)
}

fn assert_same(actual: &FlashHead, expected: &FlashHead) {
    assert_eq!(actual.assignments(), expected.assignments());
    assert_eq!(actual.special_tokens(), expected.special_tokens());
    assert_eq!(actual.ids().into_data(), expected.ids().into_data());
    assert_eq!(actual.weight().into_data(), expected.weight().into_data());
    assert_eq!(
        actual.centroids().into_data(),
        expected.centroids().into_data()
    );
    assert_eq!(actual.norms().into_data(), expected.norms().into_data());
}

#[test]
fn what_is_saved_is_loaded_bit_by_bit() {
    for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
        for (vocabulary, clusters) in [(24, 6), (23, 6), (700, 30), (12, 1)] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(FLASH_HEAD_FILE);
            let lm_head = matrix([vocabulary, 8], dtype);
            let head = built(&lm_head, clusters);
            for seed in [None, Some(u64::MAX)] {
                FlashHeadFile::save(&path, &head, seed).unwrap();
                let file = FlashHeadFile::open(&path).unwrap();
                assert_eq!(file.seed(), seed);
                assert_eq!(file.special_tokens(), [2, 11]);
                assert_eq!(file.assignments(), head.assignments());
                assert_same(&file.head(lm_head.clone()).unwrap(), &head);
            }
        }
    }
}

#[test]
fn a_head_without_special_tokens_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other name");
    let lm_head = matrix([8, 3], FloatDType::F32);
    let options = BuildOptions::default();
    let head = FlashHead::build(lm_head.clone(), 2, &options, |_| {}).unwrap();
    FlashHeadFile::save(&path, &head, None).unwrap();
    let loaded = FlashHeadFile::open(&path).unwrap().head(lm_head).unwrap();
    assert_same(&loaded, &head);
}

#[test]
fn a_file_of_a_16_bit_head_fits_the_same_values_in_f32() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FLASH_HEAD_FILE);
    let lm_head = matrix([16, 4], FloatDType::BF16);
    FlashHeadFile::save(&path, &built(&lm_head, 4), None).unwrap();
    let wide = lm_head.cast(FloatDType::F32);
    let head = FlashHeadFile::open(&path).unwrap().head(wide).unwrap();
    assert_eq!(head.weight().dtype(), DType::F32);
}

#[test]
fn a_file_of_another_head_is_refused() {
    let (_dir, path, lm_head) = saved();
    let file = FlashHeadFile::open(&path).unwrap();
    let other_value = lm_head
        .clone()
        .slice_assign([20..21, 3..4], matrix([1, 1], FloatDType::F32));
    let other_shape = matrix([21, 5], FloatDType::F32);
    let shorter = lm_head.clone().slice_dim(0, 0..20);
    for other in [other_value, other_shape, shorter, lm_head.clone() * 2] {
        let error = file.head(other).unwrap_err();
        assert!(
            matches!(error, FlashHeadFileError::OtherHead { .. }),
            "{error}"
        );
        let message = error.to_string();
        assert!(message.contains("was made of the head 21x4:"), "{message}");
        assert!(message.starts_with(path.to_str().unwrap()), "{message}");
    }
    file.head(lm_head).unwrap();
}

#[test]
fn a_file_is_replaced_and_nothing_is_left_beside_it() {
    let (dir, path, lm_head) = saved();
    let head = built(&lm_head, 7);
    FlashHeadFile::save(&path, &head, Some(1)).unwrap();
    assert_same(
        &FlashHeadFile::open(&path).unwrap().head(lm_head).unwrap(),
        &head,
    );
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, [FLASH_HEAD_FILE]);
}

#[test]
fn a_file_that_cannot_be_written_or_read_is_named() {
    let (dir, _, lm_head) = saved();
    let head = built(&lm_head, 5);
    let nowhere = dir.path().join("no such directory").join("file");
    let error = FlashHeadFile::save(&nowhere, &head, None).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("no such directory/file: cannot be written"),
        "{message}"
    );
    let error = FlashHeadFile::open(&nowhere).unwrap_err().to_string();
    assert!(
        error.contains("no such directory/file: cannot be read"),
        "{error}"
    );

    // A directory cannot be replaced by a file: what was written on the way is removed.
    let taken = dir.path().join("taken");
    std::fs::create_dir(&taken).unwrap();
    FlashHeadFile::save(&taken, &head, None).unwrap_err();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[cfg(unix)]
#[test]
fn a_fifo_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = repository::fifo(dir.path(), FLASH_HEAD_FILE);
    let given = path.clone();
    let error = repository::in_time(move || FlashHeadFile::open(&given).unwrap_err());
    let expected = format!("{}: cannot be read: not a regular file", path.display());
    assert_eq!(error.to_string(), expected);
}

/// The parts of a file, to be changed.
struct Parts {
    metadata: HashMap<String, String>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), (view.dtype(), shape, data))
        });
        Self {
            metadata: header.metadata().clone().unwrap(),
            tensors: tensors.collect(),
        }
    }

    fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
            (name.clone(), view)
        });
        let metadata = Some(self.metadata.clone());
        std::fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
    }
}

/// The error of opening a changed file, or of making its head, without the name of the file.
#[track_caller]
fn refused(change: impl FnOnce(&mut Parts)) -> String {
    let (_dir, path, lm_head) = saved();
    let mut parts = Parts::read(&path);
    change(&mut parts);
    parts.write(&path);
    let error = FlashHeadFile::open(&path).and_then(|file| file.head(lm_head));
    let message = error.expect_err("a damaged file").to_string();
    let prefix = format!("{}: ", path.display());
    message.strip_prefix(&prefix).expect("the file").to_owned()
}

fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

#[test]
fn metadata_that_are_missing_or_wrong_are_named() {
    let without = |key: &'static str| refused(|p| assert!(p.metadata.remove(key).is_some()));
    let with = |key: &str, value: &str| {
        refused(|p| {
            p.metadata.insert(key.to_owned(), value.to_owned());
        })
    };
    assert_eq!(
        without("flash_head_version"),
        "metadata `flash_head_version` is missing, expected 1"
    );
    assert_eq!(
        with("flash_head_version", "2"),
        "metadata `flash_head_version` is `2`, expected 1"
    );
    assert_eq!(
        with("capacity", "4"),
        "metadata `capacity` is `4`, expected 5"
    );
    assert_eq!(
        with("seed", "-1"),
        "metadata `seed` is `-1`, expected a whole number"
    );
    for tokens in ["1,,2", "1, 2", "x", "-3"] {
        assert_eq!(
            with("special_tokens", tokens),
            format!("metadata `special_tokens` is `{tokens}`, expected ids separated by commas")
        );
    }
    assert_eq!(
        with("special_tokens", "3,21"),
        "`special_tokens` is 21, expected less than 21, the size of the vocabulary"
    );
    assert_eq!(
        without("lm_head"),
        "metadata `lm_head` is missing, expected a fingerprint"
    );
}

#[test]
fn tensors_that_are_missing_or_wrong_are_named() {
    assert_eq!(
        refused(|p| assert!(p.tensors.remove("norms").is_some())),
        "tensor `norms` is missing, expected F32"
    );
    let put = |name: &'static str, dtype, shape: &[usize], bytes: Vec<u8>| {
        refused(|p| {
            let old = p
                .tensors
                .insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
            assert!(old.is_some());
        })
    };
    assert_eq!(
        put("norms", Dtype::F32, &[4], vec![0; 16]),
        "tensor `norms` has shape [4], expected shape [5], one for each row of `centroids`"
    );
    assert_eq!(
        put("norms", Dtype::F16, &[5], vec![0; 10]),
        "tensor `norms` has dtype F16, expected dtype F32"
    );
    assert_eq!(
        put("centroids", Dtype::F64, &[5, 4], vec![0; 160]),
        "tensor `centroids` has dtype F64, expected dtype F32, F16 or BF16"
    );
    assert_eq!(
        put("centroids", Dtype::F32, &[20], vec![0; 80]),
        "tensor `centroids` has shape [20], expected shape [clusters, width] of at least 1 each"
    );
    assert_eq!(
        put("centroids", Dtype::F32, &[5, 3], vec![0; 60]),
        "`centroids` has shape [5, 3], expected [5, 4]"
    );
    assert_eq!(
        put("centroids", Dtype::F16, &[5, 4], [0x00, 0x7e].repeat(20)),
        "`centroids` is NaN in row 0, expected rows of length 1 or 0, as `norms` are given"
    );
    assert_eq!(
        put("assignments", Dtype::U32, &[3, 7], vec![0; 84]),
        "tensor `assignments` has shape [3, 7], expected shape [vocabulary] of at least 1"
    );
    assert_eq!(
        put("assignments", Dtype::I32, &[21], words(&[u32::MAX; 21])),
        "tensor `assignments` has -1, expected clusters from 0"
    );
    assert_eq!(
        put("assignments", Dtype::U32, &[21], words(&[5; 21])),
        "`assignments` is 5, expected less than 5, the number of clusters"
    );
    let error = put("assignments", Dtype::U32, &[21], words(&[0; 21]));
    assert!(
        error.starts_with("`assignments` gives 5 clusters a number of rows outside 1 to 5"),
        "{error}"
    );
}

#[test]
fn assignments_may_be_signed() {
    let (_dir, path, lm_head) = saved();
    let before = FlashHeadFile::open(&path).unwrap();
    let mut parts = Parts::read(&path);
    parts.tensors.get_mut("assignments").unwrap().0 = Dtype::I32;
    parts.write(&path);
    let after = FlashHeadFile::open(&path).unwrap();
    assert_eq!(after.assignments(), before.assignments());
    after.head(lm_head).unwrap();
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let (_dir, path, _) = saved();
    let bytes = std::fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = FlashHeadFile::open(&path).expect_err("a truncated file");
        assert!(matches!(error, FlashHeadFileError::File(_)), "{error}");
    }
}
