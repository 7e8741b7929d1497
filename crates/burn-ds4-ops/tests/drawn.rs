//! Stacks of matrices too large for the host: drawn on a device, and read back one by one.

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::quant::{Activations, FP4_BLOCK, Fp4Layout, Weights, fp8_block};

use super::common::{assert_within, narrow, seeded, values, wide};
use super::experts::{Rounding, Stacks};
use super::packing::{Format, Packed, fp8_blocks_of, plain_codes};
use super::round_trips::FP8;

/// A stack `[count, out, in]` on a device.
#[derive(Clone)]
pub struct Drawn {
    shape: [usize; 3],
    stored: Stored,
}

#[derive(Clone)]
enum Stored {
    Dense(Tensor<3>),
    Fp8 {
        words: Tensor<3, Int>,
        scales: Tensor<3>,
        parts: usize,
    },
    Fp4 {
        words: Tensor<3, Int>,
        scales: Tensor<2, Int>,
        layout: Fp4Layout,
    },
}

impl Drawn {
    /// Any codes but NaN; FP8 has no odd exponents. The product with a row of -1..1 is some units
    /// large.
    pub fn new(format: Format, shape: [usize; 3], device: &Device, seed: u32) -> Self {
        let stored = seeded(device, seed.into(), || Self::stored(format, shape, device));
        Self { shape, stored }
    }

    fn stored(format: Format, shape: [usize; 3], device: &Device) -> Stored {
        let [count, rows, columns] = shape;
        let spread = (columns as f64).sqrt();
        match format {
            Format::Dense(dtype) => {
                let distribution = Distribution::Uniform(-3.0 / spread, 3.0 / spread);
                let values = Tensor::<3>::random(shape, distribution, (device, DType::F32));
                Stored::Dense(values.cast(dtype))
            }
            Format::Fp8 { parts, block } => {
                let words = bits([count, rows, columns.div_ceil(4)], device);
                // Powers of two, as in the released checkpoints.
                let least = (0.75 / 32.0 / spread).log2().round().exp2();
                let blocks = fp8_blocks_of(shape, parts, block);
                let varied = bits(blocks, device).bitwise_and_scalar(1_u32);
                Stored::Fp8 {
                    words: words.bitwise_and_scalar(0xf7f7_f7f7_u32),
                    scales: varied
                        .float()
                        .cast(DType::F32)
                        .add_scalar(1)
                        .mul_scalar(least),
                    parts,
                }
            }
            Format::Fp4(layout) => {
                let scales = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
                let lowest = 124 - spread.log2().round() as u32;
                let varied = bits([count, scales], device).bitwise_and_scalar(0x0303_0303_u32);
                Stored::Fp4 {
                    words: bits([count, rows, columns.div_ceil(8)], device),
                    scales: varied.add_scalar(lowest * 0x0101_0101),
                    layout,
                }
            }
        }
    }

    /// The operators' view of it.
    pub fn weights(&self) -> Weights {
        let [_, _, columns] = self.shape;
        match self.stored.clone() {
            Stored::Dense(values) => Weights::dense(values),
            Stored::Fp8 {
                words,
                scales,
                parts,
            } => Weights::fp8(words, scales, columns, parts),
            Stored::Fp4 {
                words,
                scales,
                layout,
            } => Weights::fp4(words, scales, columns, layout),
        }
        .expect("a stack as it should be")
    }

    /// A stack of one of the matrices.
    pub fn one(&self, matrix: usize) -> Self {
        let one = matrix..matrix + 1;
        let [_, rows, columns] = self.shape;
        let stored = match self.stored.clone() {
            Stored::Dense(values) => Stored::Dense(values.slice_dim(0, one)),
            Stored::Fp8 {
                words,
                scales,
                parts,
            } => Stored::Fp8 {
                words: words.slice_dim(0, one.clone()),
                scales: scales.slice_dim(0, one),
                parts,
            },
            Stored::Fp4 {
                words,
                scales,
                layout,
            } => Stored::Fp4 {
                words: words.slice_dim(0, one.clone()),
                scales: scales.slice_dim(0, one),
                layout,
            },
        };
        Self {
            shape: [1, rows, columns],
            stored,
        }
    }

    /// Reads all matrices back.
    pub fn read(&self) -> Packed {
        let [_, rows, columns] = self.shape;
        match self.stored.clone() {
            Stored::Dense(all) => {
                let dtype = FloatDType::from(all.dtype());
                Packed::dense(self.shape, dtype, &values(all.cast(FloatDType::F32)))
            }
            Stored::Fp8 {
                words,
                scales,
                parts,
            } => {
                let codes = codes(words, columns, 4);
                let block = fp8_block(scales.dims(), [rows, columns], parts).expect("checked");
                Packed::fp8_in_blocks(self.shape, [parts, block], codes, values(scales))
            }
            Stored::Fp4 {
                words,
                scales,
                layout,
            } => {
                let per_matrix = rows * columns.div_ceil(FP4_BLOCK);
                let scales = codes(scales, per_matrix, 4);
                let words = match layout {
                    Fp4Layout::Plain => words,
                    Fp4Layout::Repacked => plain(words),
                };
                let codes = codes(words, columns, 8);
                Packed::fp4(self.shape, codes, scales).in_layout(layout)
            }
        }
    }
}

/// Words of which every bit is random. Devices draw integers as f32, which holds half of them.
pub fn bits<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    let half = || {
        let distribution = Distribution::Uniform(0.0, 65_536.0);
        Tensor::<D, Int>::random(shape, distribution, (device, DType::U32))
    };
    half().mul_scalar(1_u32 << 16).add(half())
}

/// Words of FP4 that are repacked, in the plain layout.
fn plain(words: Tensor<3, Int>) -> Tensor<3, Int> {
    let (shape, device) = (words.dims(), words.device());
    let words: Vec<u32> = words.try_into_vec_as().expect("words");
    let words: Vec<u32> = words.into_iter().map(plain_codes).collect();
    Tensor::from_data(TensorData::new(words, shape), (&device, DType::U32))
}

/// The first `length` codes of each row of words.
fn codes<const D: usize>(words: Tensor<D, Int>, length: usize, per_word: usize) -> Vec<u8> {
    let (width, bits) = (words.dims()[D - 1], 32 / per_word);
    let words: Vec<u32> = words.try_into_vec_as().expect("a device that works");
    let mask = (1_u32 << bits) - 1;
    let rows = words.chunks(width.max(1));
    rows.flat_map(|row| {
        let codes = row
            .iter()
            .flat_map(|&word| (0..per_word).map(move |i| (word >> (i * bits) & mask) as u8));
        codes.take(length)
    })
    .collect()
}

/// Both stacks of a layer of experts.
#[derive(Clone)]
pub struct DrawnExperts {
    pub gate_up: Drawn,
    pub down: Drawn,
    /// What the products do to x and to the hidden layer.
    pub activations: Activations,
}

/// Some tokens of a batch, and the error that is allowed.
pub struct Batch<'a> {
    pub x: &'a Tensor<2>,
    pub ids: &'a [i64],
    pub weights: &'a [f32],
    pub limit: Option<f64>,
}

impl DrawnExperts {
    /// `experts`, d and inner.
    pub fn new(format: Format, shape: [usize; 3], device: &Device, seed: u32) -> Self {
        let [experts, d, inner] = shape;
        let down = [experts, d, inner];
        Self {
            gate_up: Drawn::new(format, [experts, 2 * inner, d], device, 2 * seed),
            down: Drawn::new(format.of_down(), down, device, 2 * seed + 1),
            activations: Activations::Exact,
        }
    }

    pub fn stacks(&self) -> Stacks {
        let [gate_up, down] = [&self.gate_up, &self.down]
            .map(|stack| stack.weights().with_activations(self.activations));
        Stacks { gate_up, down }
    }

    /// The outputs of one token, with the error that is allowed. The slots are worked out side by
    /// side: they are large.
    pub fn expected(&self, batch: &Batch, token: usize) -> Vec<(f64, f64)> {
        let x = batch.x.clone().slice_dim(0, token..token + 1);
        let dtype = FloatDType::from(x.dtype());
        let x = values(x.cast(FloatDType::F32));
        let x = match self.activations.block() {
            None => wide(&x),
            Some(block) => wide(&FP8.row(&x, block)),
        };
        let k = batch.ids.len() / batch.x.dims()[0];
        let slots = (token * k..(token + 1) * k).filter(|&pair| batch.ids[pair] >= 0);
        let slots = slots.map(|pair| {
            let expert = batch.ids[pair] as usize;
            let matrices = [&self.gate_up, &self.down].map(|stack| stack.one(expert).read());
            (matrices, f64::from(batch.weights[pair]))
        });
        let slots: Vec<_> = slots.collect();
        let one = |([gate_up, down], weight): &([Packed; 2], f64)| {
            let rounding = Rounding {
                dtype,
                weights_fit: gate_up.is_exact_in(dtype) && down.is_exact_in(dtype),
                products_fit: false,
                activations: self.activations,
            };
            rounding.slot(
                &x,
                (&gate_up.matrix(0), &down.matrix(0)),
                *weight,
                batch.limit,
            )
        };
        let outputs: Vec<Vec<(f64, f64)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = slots.iter().map(|slot| scope.spawn(|| one(slot))).collect();
            let outputs = threads.into_iter().map(|thread| thread.join());
            outputs.map(|output| output.expect("an oracle")).collect()
        });
        outputs
            .into_iter()
            .fold(vec![(0.0, 0.0); x.len()], |sum, slot| {
                let both = sum.into_iter().zip(slot);
                both.map(|(a, b)| (a.0 + b.0, a.1 + b.1)).collect()
            })
    }
}

/// Compares one row of an output with what [`DrawnExperts::expected`] says of it.
#[track_caller]
pub fn assert_row(output: &Tensor<2>, row: usize, expected: &[(f64, f64)], what: &str) {
    let actual = values(output.clone().slice_dim(0, row..row + 1));
    let (expected, allowed): (Vec<f64>, Vec<f64>) = expected.iter().copied().unzip();
    let what = format!("{what}, token {row}");
    assert_within(&actual, &narrow(&expected), |index| allowed[index], &what);
}
