//! Stacks of matrices in every format that operators read, packed on the host, with the values that
//! they stand for.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::quant::{FP4_BLOCK, FP8_BLOCK, Fp4Layout, Weights, repack_fp4};

use super::common::{skip, wide};
use super::distributions::Random;
use super::tables::{E2M1, E4M3, E8M0};

/// How the matrices of a stack are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format {
    Dense(FloatDType),
    Fp8 { parts: usize, block: usize },
    Fp4(Fp4Layout),
}

pub const DENSE: [Format; 3] = [
    Format::Dense(FloatDType::F32),
    Format::Dense(FloatDType::F16),
    Format::Dense(FloatDType::BF16),
];
pub const FP4: Format = Format::Fp4(Fp4Layout::Plain);
pub const REPACKED_FP4: Format = Format::Fp4(Fp4Layout::Repacked);
pub const FP8: Format = fp8_of(1, FP8_BLOCK);
/// Gate above up, each with block rows of its own.
pub const FP8_PAIR: Format = fp8_of(2, FP8_BLOCK);
/// In blocks of 32x32.
pub const FP8_BLOCKS32: Format = fp8_of(1, 32);
pub const FP8_BLOCKS32_PAIR: Format = fp8_of(2, 32);

const fn fp8_of(parts: usize, block: usize) -> Format {
    Format::Fp8 { parts, block }
}

impl Format {
    /// The format of the down projection, a single matrix, next to gate and up.
    pub fn of_down(self) -> Self {
        match self {
            Self::Fp8 { block, .. } => fp8_of(1, block),
            other => other,
        }
    }
}

/// Runs `test` with every format of which a device has the dtype.
pub fn every_format(name: &str, device: &Device, test: impl Fn(Format)) {
    let packed = [FP4, REPACKED_FP4, FP8, FP8_PAIR, FP8_BLOCKS32_PAIR];
    for format in packed.into_iter().chain(DENSE) {
        match format {
            Format::Dense(dtype) if !device.supports_dtype(dtype) => {
                skip(name, &format!("{dtype:?}").to_lowercase());
            }
            _ => test(format),
        }
    }
}

/// E4M3 codes of the E2M1 values.
const E2M1_IN_E4M3: [u8; 16] = [
    0x00, 0x30, 0x38, 0x3c, 0x40, 0x44, 0x48, 0x4c, 0x80, 0xb0, 0xb8, 0xbc, 0xc0, 0xc4, 0xc8, 0xcc,
];
/// What fills up the last words of a row. None of it may be seen: the codes are NaN where there is
/// a NaN.
const FP8_PADDING: u8 = 0x7f;
const FP4_PADDING: u8 = 0xf;
const SCALE_PADDING: u8 = 0xff;

/// A stack of matrices `[count, out, in]`, one code or value for each weight.
#[derive(Clone)]
pub struct Packed {
    shape: [usize; 3],
    stored: Stored,
}

#[derive(Clone)]
enum Stored {
    Dense {
        dtype: FloatDType,
        values: Vec<f32>,
    },
    Fp8 {
        parts: usize,
        block: usize,
        codes: Vec<u8>,
        scales: Vec<f32>,
    },
    Fp4 {
        layout: Fp4Layout,
        codes: Vec<u8>,
        scales: Vec<u8>,
    },
}

/// The number of FP8 scales `[count, block rows, block columns]`.
pub fn fp8_blocks(shape: [usize; 3], parts: usize) -> [usize; 3] {
    fp8_blocks_of(shape, parts, FP8_BLOCK)
}

/// The same of blocks of another size.
pub fn fp8_blocks_of([count, rows, columns]: [usize; 3], parts: usize, block: usize) -> [usize; 3] {
    let block_rows = parts * (rows / parts).div_ceil(block);
    [count, block_rows, columns.div_ceil(block)]
}

impl Packed {
    pub fn dense(shape: [usize; 3], dtype: FloatDType, values: &[f32]) -> Self {
        let values = rounded(values, dtype);
        Self::new(shape, Stored::Dense { dtype, values })
    }

    /// One code a weight, scales as [`fp8_blocks`].
    pub fn fp8(shape: [usize; 3], parts: usize, codes: Vec<u8>, scales: Vec<f32>) -> Self {
        Self::fp8_in_blocks(shape, [parts, FP8_BLOCK], codes, scales)
    }

    /// The same with scales as [`fp8_blocks_of`].
    pub fn fp8_in_blocks(
        shape: [usize; 3],
        [parts, block]: [usize; 2],
        codes: Vec<u8>,
        scales: Vec<f32>,
    ) -> Self {
        let blocks: usize = fp8_blocks_of(shape, parts, block).iter().product();
        assert_eq!(scales.len(), blocks);
        Self::new(
            shape,
            Stored::Fp8 {
                parts,
                block,
                codes,
                scales,
            },
        )
    }

    /// One code a weight, scales `[count, out, ceil(in / 32)]`.
    pub fn fp4(shape: [usize; 3], codes: Vec<u8>, scales: Vec<u8>) -> Self {
        assert_eq!(scales.len(), fp4_scales(shape));
        let layout = Fp4Layout::Plain;
        Self::new(
            shape,
            Stored::Fp4 {
                layout,
                codes,
                scales,
            },
        )
    }

    /// The same matrices, of FP4, in this layout.
    pub fn in_layout(mut self, to: Fp4Layout) -> Self {
        if let Stored::Fp4 { layout, .. } = &mut self.stored {
            *layout = to;
        }
        self
    }

    fn new(shape: [usize; 3], stored: Stored) -> Self {
        let packed = Self { shape, stored };
        let weights = match &packed.stored {
            Stored::Dense { values, .. } => values.len(),
            Stored::Fp8 { codes, .. } | Stored::Fp4 { codes, .. } => codes.len(),
        };
        assert_eq!(weights, shape.iter().product::<usize>());
        packed
    }

    /// All codes but NaN, scales that are no powers of two where the format may have such; the
    /// product with a row of -1..1 is some units large, whatever the number of columns.
    pub fn random(format: Format, shape: [usize; 3], seed: u64) -> Self {
        let (random, weights) = (&mut Random::new(seed), shape.iter().product::<usize>());
        let spread = (shape[2].max(1) as f32).sqrt();
        match format {
            Format::Dense(dtype) => {
                let values = (0..weights).map(|_| (random.unit() * 2.0 - 1.0) * 3.0 / spread);
                Self::dense(shape, dtype, &values.collect::<Vec<_>>())
            }
            Format::Fp8 { parts, block } => {
                let codes = (0..weights).map(|_| {
                    let code = random.bits() as u8;
                    if code & 0x7f == 0x7f { code ^ 1 } else { code }
                });
                let codes = codes.collect();
                let scales = fp8_blocks_of(shape, parts, block).iter().product();
                let scales = (0..scales).map(|_| {
                    let scale = (0.5 + random.unit()) / (32.0 * spread);
                    match block {
                        FP8_BLOCK => scale,
                        _ => scale.log2().round().exp2(),
                    }
                });
                Self::fp8_in_blocks(shape, [parts, block], codes, scales.collect())
            }
            Format::Fp4(layout) => {
                let codes = (0..weights).map(|_| random.index(16) as u8).collect();
                let highest = 127 - spread.log2().round() as u8;
                let scales = (0..fp4_scales(shape)).map(|_| highest - random.index(4) as u8);
                Self::fp4(shape, codes, scales.collect()).in_layout(layout)
            }
        }
    }

    /// Multiples of `2^(exponent - 1)` up to `12 * 2^exponent`, which every format holds; sums of
    /// products with small integers are exact in any order.
    pub fn exact(format: Format, shape: [usize; 3], exponent: i32, seed: u64) -> Self {
        let (random, weights) = (&mut Random::new(seed), shape.iter().product::<usize>());
        let codes: Vec<usize> = (0..weights).map(|_| random.index(16)).collect();
        match format {
            Format::Dense(dtype) => {
                let value = |code| (E2M1[code] * 2f64.powi(exponent)) as f32;
                let values: Vec<f32> = codes.into_iter().map(value).collect();
                Self::dense(shape, dtype, &values)
            }
            Format::Fp8 { parts, block } => {
                let codes = codes.into_iter().map(|code| E2M1_IN_E4M3[code]).collect();
                let scales = fp8_blocks_of(shape, parts, block).iter().product();
                let scales = (0..scales).map(|_| 2f32.powi(exponent + random.index(2) as i32));
                Self::fp8_in_blocks(shape, [parts, block], codes, scales.collect())
            }
            Format::Fp4(layout) => {
                let codes = codes.into_iter().map(|code| code as u8).collect();
                let scales =
                    (0..fp4_scales(shape)).map(|_| (127 + exponent + random.index(2) as i32) as u8);
                Self::fp4(shape, codes, scales.collect()).in_layout(layout)
            }
        }
    }

    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    pub fn format(&self) -> Format {
        match self.stored {
            Stored::Dense { dtype, .. } => Format::Dense(dtype),
            Stored::Fp8 { parts, block, .. } => Format::Fp8 { parts, block },
            Stored::Fp4 { layout, .. } => Format::Fp4(layout),
        }
    }

    /// Whether values of `dtype` hold every weight as it is, for weights inside its range.
    pub fn is_exact_in(&self, dtype: FloatDType) -> bool {
        match &self.stored {
            Stored::Dense { values, .. } => rounded(values, dtype) == *values,
            Stored::Fp8 { scales, .. } => {
                let power = |s: &f32| s.to_bits().trailing_zeros() >= 23;
                dtype == FloatDType::F32 || scales.iter().all(power)
            }
            Stored::Fp4 { .. } => true,
        }
    }

    /// Turns all weights of one matrix into NaN.
    pub fn poison(&mut self, matrix: usize) {
        fn fill<T: Copy>(all: &mut [T], count: usize, matrix: usize, with: T) {
            let size = all.len() / count;
            all[matrix * size..(matrix + 1) * size].fill(with);
        }
        let count = self.shape[0];
        match &mut self.stored {
            Stored::Dense { values, .. } => fill(values, count, matrix, f32::NAN),
            Stored::Fp8 { codes, .. } => fill(codes, count, matrix, 0x7f),
            Stored::Fp4 { scales, .. } => fill(scales, count, matrix, 0xff),
        }
    }

    /// What the code of a weight is multiplied by.
    fn scale(&self, matrix: usize, row: usize, column: usize) -> f64 {
        let [_, rows, columns] = self.shape;
        match &self.stored {
            Stored::Dense { .. } => 1.0,
            Stored::Fp8 {
                parts,
                block,
                scales,
                ..
            } => {
                let [_, block_rows, block_columns] = fp8_blocks_of(self.shape, *parts, *block);
                let (part, row) = (row / (rows / parts), row % (rows / parts));
                let block_row = matrix * block_rows + part * (block_rows / parts) + row / block;
                f64::from(scales[block_row * block_columns + column / block])
            }
            Stored::Fp4 { scales, .. } => {
                let block = (matrix * rows + row) * columns.div_ceil(32) + column / 32;
                E8M0[usize::from(scales[block])]
            }
        }
    }

    /// All values of one matrix, row by row.
    pub fn matrix(&self, matrix: usize) -> Vec<f64> {
        let [_, rows, columns] = self.shape;
        let mut all = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            let first = (matrix * rows + row) * columns;
            match &self.stored {
                Stored::Dense { values, .. } => all.extend(wide(&values[first..first + columns])),
                Stored::Fp8 { codes, block, .. } => {
                    for (at, codes) in codes[first..first + columns].chunks(*block).enumerate() {
                        let scale = self.scale(matrix, row, at * block);
                        all.extend(codes.iter().map(|&code| E4M3[usize::from(code)] * scale));
                    }
                }
                Stored::Fp4 { codes, .. } => {
                    for (block, codes) in codes[first..first + columns].chunks(32).enumerate() {
                        let scale = self.scale(matrix, row, block * 32);
                        all.extend(codes.iter().map(|&code| E2M1[usize::from(code)] * scale));
                    }
                }
            }
        }
        all
    }

    /// The operators' view of them.
    pub fn on(&self, device: &Device) -> Weights {
        let [count, rows, columns] = self.shape;
        match &self.stored {
            Stored::Dense { dtype, values } => {
                let data = TensorData::new(values.clone(), self.shape);
                let data = data.convert_dtype((*dtype).into());
                Weights::dense(Tensor::from_data(data, (device, (*dtype).into())))
            }
            Stored::Fp8 {
                parts,
                block,
                codes,
                scales,
            } => {
                let words = words(codes, columns, 4, FP8_PADDING);
                let words = integers(words, [count, rows, columns.div_ceil(4)], device);
                let blocks = fp8_blocks_of(self.shape, *parts, *block);
                let scales = TensorData::new(scales.clone(), blocks);
                let scales = Tensor::from_data(scales, (device, DType::F32));
                Weights::fp8(words, scales, columns, *parts)
            }
            Stored::Fp4 {
                layout,
                codes,
                scales,
            } => {
                let per_matrix = rows * columns.div_ceil(FP4_BLOCK);
                let words_of_scales = words(scales, per_matrix, 4, SCALE_PADDING);
                let mut words = words(codes, columns, 8, FP4_PADDING);
                if *layout == Fp4Layout::Repacked {
                    repack_fp4(&mut words);
                }
                Weights::fp4(
                    integers(words, [count, rows, columns.div_ceil(8)], device),
                    integers(words_of_scales, [count, per_matrix.div_ceil(4)], device),
                    columns,
                    *layout,
                )
            }
        }
        .expect("a stack as it should be")
    }
}

/// The codes of a repacked word, the first in the lowest bits, by the definition of
/// [`Fp4Layout::Repacked`].
pub fn plain_codes(word: u32) -> u32 {
    let turned = word.rotate_right(8);
    let pairs = [word, word << 4, turned ^ turned << 2, turned ^ turned << 6];
    pairs.into_iter().enumerate().fold(0, |codes, (i, pair)| {
        let pair = pair & 0x81c0_81c0;
        let both = (pair >> 6 & 0x0007_0007) | (pair >> 12 & 0x0008_0008);
        codes | both << (4 * i)
    })
}

fn fp4_scales([count, rows, columns]: [usize; 3]) -> usize {
    count * rows * columns.div_ceil(FP4_BLOCK)
}

/// Codes of a row side by side, the first in the lowest bits, `per_word` to a word; every row
/// starts a word of its own.
fn words(codes: &[u8], row: usize, per_word: usize, padding: u8) -> Vec<u32> {
    let bits = 32 / per_word;
    let rows = codes.chunks(row.max(1));
    rows.flat_map(|row| row.chunks(per_word))
        .map(|chunk| {
            let code = |i: usize| u32::from(*chunk.get(i).unwrap_or(&padding));
            (0..per_word).fold(0, |word, i| word | code(i) << (i * bits))
        })
        .collect()
}

fn integers<const D: usize>(words: Vec<u32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(words, shape), (device, DType::U32))
}

/// What values of `dtype` hold in place of `values`, rounded on the host: a device may flush what
/// is not normal.
pub fn rounded(values: &[f32], dtype: FloatDType) -> Vec<f32> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    data.convert_dtype(dtype.into()).iter::<f32>().collect()
}
