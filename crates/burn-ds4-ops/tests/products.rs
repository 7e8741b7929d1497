//! Operands of a product of a few rows, and what comes out, worked out in f64.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul};

use super::common::{
    EXACT, FLOATS, assert_close, assert_within, devices, is_limited, narrow, skip, values, wide,
};
use super::linear::Input;
use super::packing::rounded;
use super::sums::{Sum, smallest, unit};

/// Of the sum of the magnitudes: what the roundings of an f32 sum of exact products make, in the
/// worst of many thousands.
const SUMMED: f64 = 1.0 / (1 << 21) as f64;
/// The same where Burn multiplies many rows, whose sum of 16,384 columns has come to two thirds.
const LIMITED_SUMMED: f64 = 2.0 * SUMMED;

/// Dtypes of x and of the weights.
pub type Pair = (FloatDType, FloatDType);

/// Runs `test` with every pair of dtypes that each device has.
pub fn every_pair(test: impl Fn(&str, &Device, Pair)) {
    for (name, device) in devices() {
        for (x, weights) in pairs(name, device) {
            test(&format!("{name} {x:?} x {weights:?}"), device, (x, weights));
        }
    }
}

/// All pairs of dtypes that a device has.
pub fn pairs(name: &str, device: &Device) -> Vec<Pair> {
    let has = |dtype: &FloatDType| device.supports_dtype(*dtype);
    for dtype in FLOATS.iter().filter(|dtype| !has(dtype)) {
        skip(name, &format!("{dtype:?}").to_lowercase());
    }
    let held = || FLOATS.into_iter().filter(has);
    held()
        .flat_map(|x| held().map(move |weights| (x, weights)))
        .collect()
}

/// The dtypes that the output may have.
pub fn outputs(x: FloatDType) -> Vec<FloatDType> {
    let mut dtypes = vec![FloatDType::F32, x];
    dtypes.dedup();
    dtypes
}

/// Options of a call.
pub fn options(output: FloatDType) -> SmallMOptions {
    SmallMOptions {
        f32_output: output == FloatDType::F32,
        ..SmallMOptions::default()
    }
}

/// `x · weightsᵀ` on the host.
pub struct Product {
    pub x: Input,
    pub weights: Input,
}

impl Product {
    /// Rows of x, of the weights, and columns of both; full mantissas.
    pub fn random([m, n, k]: [usize; 3], (x, weights): Pair, seed: u64) -> Self {
        Self {
            x: Input::random([m, k], x, 2 * seed),
            weights: Input::random([n, k], weights, 2 * seed + 1),
        }
    }

    /// Small integers: the sums are exact in any order.
    pub fn exact([m, n, k]: [usize; 3], (x, weights): Pair, seed: u64) -> Self {
        Self {
            x: Input::exact([m, k], x, 2 * seed),
            weights: Input::exact([n, k], weights, 2 * seed + 1),
        }
    }

    /// The product of some rows of x.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Self {
        let (shape, dtype) = (self.weights.shape, self.weights.dtype);
        Self {
            x: self.x.rows(rows),
            weights: Input::new(shape, dtype, &self.weights.values),
        }
    }

    pub fn run(&self, device: &Device, output: FloatDType) -> Vec<f32> {
        product(self.x.on(device), self.weights.on(device), options(output))
    }

    fn sums(&self) -> Vec<Sum> {
        let [[m, k], [n, _]] = [self.x.shape, self.weights.shape];
        if k == 0 {
            return vec![Sum::default(); m * n];
        }
        let (x, weights) = (wide(&self.x.values), wide(&self.weights.values));
        let rows = x.chunks(k);
        rows.flat_map(|x| weights.chunks(k).map(move |row| Sum::products(row, x)))
            .collect()
    }

    /// Compares with what f32 sums of exact products, rounded once, can be.
    #[track_caller]
    pub fn check(&self, actual: &[f32], output: FloatDType, what: &str) {
        let (sums, unit) = (self.sums(), unit(output));
        let expected: Vec<f64> = sums.iter().map(|sum| sum.value).collect();
        let allowed = |index: usize| {
            let summed = if is_limited() { LIMITED_SUMMED } else { SUMMED };
            let error = summed * sums[index].magnitude;
            error + unit * (sums[index].value.abs() + error) + smallest(output)
        };
        assert_within(
            actual,
            &narrow(&expected),
            allowed,
            &self.named(output, what),
        );
    }

    /// Compares with the exact sums, rounded once.
    #[track_caller]
    pub fn check_exact(&self, actual: &[f32], output: FloatDType, what: &str) {
        let sums: Vec<f32> = self.sums().iter().map(|sum| sum.value as f32).collect();
        let expected = rounded(&sums, output);
        assert_close(actual, &expected, EXACT, &self.named(output, what));
    }

    fn named(&self, output: FloatDType, what: &str) -> String {
        let (x, weights) = (self.x.shape, self.weights.shape);
        format!("{what} {x:?} x {weights:?} -> {output:?}")
    }
}

/// Reads back what the operator gives.
#[track_caller]
pub fn product<const D: usize>(
    x: Tensor<D>,
    weights: Tensor<2>,
    options: SmallMOptions,
) -> Vec<f32> {
    let mut shape = x.dims();
    shape[D - 1] = weights.dims()[0];
    let dtype = if options.f32_output {
        DType::F32
    } else {
        x.dtype()
    };
    let y = small_m_matmul(x, weights, options).expect("arguments that fit");
    assert_eq!((y.dims(), y.dtype()), (shape, dtype));
    values(y.cast(FloatDType::F32))
}

/// Fails unless all values have the same bits.
#[track_caller]
pub fn assert_same_bits(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of elements");
    let different = (0..actual.len()).filter(|&i| actual[i].to_bits() != expected[i].to_bits());
    let different: Vec<usize> = different.collect();
    let first: Vec<String> = different
        .iter()
        .take(8)
        .map(|&i| format!("[{i}] {:e} != {:e}", actual[i], expected[i]))
        .collect();
    assert!(
        different.is_empty(),
        "{what}: {} of {} elements differ, first: {}",
        different.len(),
        actual.len(),
        first.join(", ")
    );
}
