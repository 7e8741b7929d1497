//! Golden files: tensors that independent implementations of the model computed.

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors};

use crate::common::{absolute, assert_close};
pub use ds4_test_support::{golden_text, root};

/// Tolerance where values are of order one.
pub const TOLERANCE: f64 = 1e-4;
/// Tolerance relative to a tensor's largest value, where that is larger: expert outputs of this
/// fixture reach a thousand, at which two f32 implementations that sum in another order differ by
/// more than 1e-4.
const RELATIVE: f64 = 1e-5;

/// Compares with a golden tensor.
#[track_caller]
pub fn assert_golden(actual: &[f32], expected: &[f32], what: &str) {
    let largest = expected
        .iter()
        .fold(0.0f32, |largest, value| largest.max(value.abs()));
    assert_close(
        actual,
        expected,
        absolute(TOLERANCE.max(RELATIVE * f64::from(largest))),
        what,
    );
}

/// One golden tensor; integers are exact in `f64`.
#[derive(Clone, Debug)]
pub struct GoldenTensor {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl GoldenTensor {
    pub fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|value| *value as f32).collect()
    }

    pub fn ids(&self) -> Vec<i64> {
        self.values.iter().map(|value| *value as i64).collect()
    }
}

/// A golden file.
pub struct Golden {
    tensors: BTreeMap<String, GoldenTensor>,
}

impl Golden {
    pub fn open(file: &str) -> Self {
        let path = root().join(file);
        let bytes =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("a golden file is valid");
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let values = match view.dtype() {
                    Dtype::F32 => numbers(view.data(), |b| f32::from_le_bytes(b).into()),
                    Dtype::U8 => numbers(view.data(), |[value]| value.into()),
                    Dtype::I64 => numbers(view.data(), |b| i64::from_le_bytes(b) as f64),
                    other => panic!("{name}: unexpected dtype {other:?}"),
                };
                let shape = view.shape().to_vec();
                (name, GoldenTensor { shape, values })
            })
            .collect();
        Self { tensors }
    }

    pub fn get(&self, name: &str) -> &GoldenTensor {
        let tensor = self.find(name);
        tensor.unwrap_or_else(|| panic!("no golden tensor {name}"))
    }

    pub fn find(&self, name: &str) -> Option<&GoldenTensor> {
        self.tensors.get(name)
    }
}

fn numbers<const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty());
    chunks.iter().map(|chunk| read(*chunk)).collect()
}
