//! Inputs of a linear layer with packed weights, and what comes out, worked out in f64.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_ds4_ops::quant::{FP8_BLOCK, Weights, quant_linear};

use super::common::{EXACT, assert_close, assert_within, narrow, values, wide};
use super::distributions::Random;
use super::packing::{Packed, rounded};
use super::round_trips::FP8;
use super::sums::{Sum, smallest, unit};

/// An x on the host.
pub struct Input {
    pub shape: [usize; 2],
    pub dtype: FloatDType,
    pub values: Vec<f32>,
    /// Whether products by packed weights may be those of E4M3.
    in_fp8: bool,
}

impl Input {
    pub fn new(shape: [usize; 2], dtype: FloatDType, values: &[f32]) -> Self {
        Self {
            shape,
            dtype,
            values: rounded(values, dtype),
            in_fp8: false,
        }
    }

    /// What products make of it that round their input, in blocks of so many columns.
    pub fn rounded(&self, block: usize) -> Self {
        let values = FP8.rows(&self.values, self.shape[1], block);
        Self {
            in_fp8: self.dtype == FloatDType::BF16 && block == FP8_BLOCK,
            ..Self::new(self.shape, self.dtype, &values)
        }
    }

    /// Full mantissas.
    pub fn random(shape: [usize; 2], dtype: FloatDType, seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let values = (0..shape[0] * shape[1]).map(|_| random.unit() * 2.0 - 1.0);
        Self::new(shape, dtype, &values.collect::<Vec<_>>())
    }

    /// Small integers.
    pub fn exact(shape: [usize; 2], dtype: FloatDType, seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let values = (0..shape[0] * shape[1]).map(|_| random.index(9) as f32 - 4.0);
        Self::new(shape, dtype, &values.collect::<Vec<_>>())
    }

    pub fn rows(&self, rows: std::ops::Range<usize>) -> Self {
        let columns = self.shape[1];
        let values = &self.values[rows.start * columns..rows.end * columns];
        Self::new([rows.len(), columns], self.dtype, values)
    }

    pub fn on(&self, device: &Device) -> Tensor<2> {
        let dtype = DType::from(self.dtype);
        let data = TensorData::new(self.values.clone(), self.shape).convert_dtype(dtype);
        Tensor::from_data(data, (device, dtype))
    }

    fn sums(&self, weights: &Packed) -> Vec<Sum> {
        let [_, rows, columns] = weights.shape();
        if columns == 0 {
            return vec![Sum::default(); self.shape[0] * rows];
        }
        let (weights, x) = (weights.matrix(0), wide(&self.values));
        x.chunks(columns)
            .flat_map(|x| {
                weights
                    .chunks(columns)
                    .map(move |row| Sum::products(row, x))
            })
            .collect()
    }

    /// Compares with what f32 sums, rounded to the dtype of x, can be.
    #[track_caller]
    pub fn check(&self, weights: &Packed, actual: &[f32], what: &str) {
        let (sums, unit) = (self.sums(weights), unit(self.dtype));
        let of_weights = if weights.is_exact_in(self.dtype) {
            0.0
        } else {
            unit
        };
        let expected: Vec<f64> = sums.iter().map(|sum| sum.value).collect();
        let allowed = |index: usize| {
            let error = sums[index].error(of_weights);
            let on_the_way = sums[index].spread() + sums[index].value.abs();
            let error = error + self.rounded_on_the_way(what) * on_the_way;
            let of_fp8 = sums[index].error_of_fp8() * f64::from(u8::from(self.in_fp8));
            let error = error + of_fp8;
            error + unit * (sums[index].value.abs() + error) + smallest(self.dtype)
        };
        let (format, shape) = (weights.format(), self.shape);
        let what = format!("{what} {format:?} {shape:?} · {:?}", weights.shape());
        assert_within(actual, &narrow(&expected), allowed, &what);
    }

    /// The CPU's product rounds f16 sums from time to time on the way.
    fn rounded_on_the_way(&self, what: &str) -> f64 {
        let long = self.shape[1] > 1024;
        if long && self.dtype == FloatDType::F16 && what.starts_with("flex") {
            4.0 * unit(self.dtype)
        } else {
            0.0
        }
    }

    /// Compares with the exact sums, rounded once.
    #[track_caller]
    pub fn check_exact(&self, weights: &Packed, actual: &[f32], what: &str) {
        if self.rounded_on_the_way(what) > 0.0 {
            return self.check(weights, actual, what);
        }
        let sums: Vec<f32> = self
            .sums(weights)
            .iter()
            .map(|sum| sum.value as f32)
            .collect();
        let (format, shape) = (weights.format(), self.shape);
        let what = format!("{what} {format:?} {shape:?} · {:?}", weights.shape());
        assert_close(actual, &rounded(&sums, self.dtype), EXACT, &what);
    }
}

/// Reads back what `quant_linear` gives.
pub fn linear<const D: usize>(x: Tensor<D>, weights: &Weights) -> Vec<f32> {
    let (shape, dtype) = (x.dims(), x.dtype());
    let y = quant_linear(x, weights).expect("arguments that fit");
    read_product(y, shape, weights.dims()[1], dtype)
}

/// Reads back a product of `out` columns in `dtype`, whose `x` has shape `shape`.
#[track_caller]
pub fn read_product<const D: usize>(
    y: Tensor<D>,
    mut shape: [usize; D],
    out: usize,
    dtype: DType,
) -> Vec<f32> {
    shape[D - 1] = out;
    assert_eq!((y.dims(), y.dtype()), (shape, dtype));
    values(y.cast(FloatDType::F32))
}
