//! Problems of compressed rows, and their oracle in `f64`.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    CONTENT_BLOCK, CompressionInputs, CompressionOptions, Positions, RowRounding, SHARED_BLOCK,
    WHOLE_BLOCK,
};
use burn_ds4_ops::quant::{
    FP4_BLOCK, fp4_roundtrip, fp4_scaled_roundtrip, fp8_roundtrip, hadamard,
};

use super::common::{floats, integers, noise};
use super::rotation::{table, turned_at};

pub const EPSILON: f64 = 1e-6;

/// The shape of a compressor, and of the cache that it writes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub ratio: usize,
    pub overlap: bool,
    pub width: usize,
    pub rotated: usize,
    /// Of the raw rows of a sequence.
    pub slots: usize,
    /// Positions that a sequence may have.
    pub positions: usize,
}

impl Sizes {
    pub fn series(&self) -> usize {
        1 + usize::from(self.overlap)
    }

    pub fn raw_width(&self) -> usize {
        2 * self.series() * self.width
    }

    pub fn rows(&self) -> usize {
        self.positions.div_ceil(self.ratio)
    }

    pub fn options(&self, rounding: RowRounding) -> CompressionOptions {
        CompressionOptions {
            overlap: self.overlap,
            rounding,
        }
    }
}

/// Projections of all positions that sequences may have, and the weights.
#[derive(Clone, Debug)]
pub struct Case {
    pub sizes: Sizes,
    /// `[batch, positions, raw width]`.
    pub projections: Vec<f32>,
    pub bias: Vec<f32>,
    pub norm: Vec<f32>,
}

impl Case {
    pub fn new(sizes: Sizes, seed: u32) -> Self {
        let raw_width = sizes.raw_width();
        let norm = noise(sizes.width, seed ^ 2);
        Self {
            projections: noise(sizes.batch * sizes.positions * raw_width, seed),
            bias: noise(sizes.ratio * raw_width, seed ^ 1),
            norm: norm.iter().map(|weight| weight + 1.5).collect(),
            sizes,
        }
    }

    /// What [`compress_rows`](burn_ds4_ops::attention::compress_rows) is given for `count`
    /// positions from each start; those of a sequence that is not there are its first ones.
    pub fn inputs(&self, starts: &[i64], count: usize, device: &Device) -> CompressionInputs {
        let Sizes {
            batch,
            ratio,
            width,
            positions,
            ..
        } = self.sizes;
        let raw_width = self.sizes.raw_width();
        let mut new = Vec::new();
        for (sequence, start) in starts.iter().enumerate() {
            let first = sequence * positions + usize::try_from(*start).unwrap_or(0);
            let last = (first + count).min((sequence + 1) * positions);
            new.extend_from_slice(&self.projections[first * raw_width..last * raw_width]);
            new.resize((sequence + 1) * count * raw_width, 0.5);
        }
        CompressionInputs {
            projections: floats(&new, [batch, count, raw_width], device),
            bias: floats(&self.bias, [ratio, raw_width], device),
            norm: floats(&self.norm, [width], device),
            epsilon: EPSILON,
        }
    }

    /// Where new positions of sequences start, and the angles of all that there may be.
    pub fn positions(&self, starts: &[i64], device: &Device) -> Positions {
        Positions {
            angles: table(self.sizes.positions, self.sizes.rotated, device),
            start: integers(starts, [starts.len()], device),
        }
    }

    /// Tensors of ones to write to.
    pub fn empty(&self, dtype: FloatDType, device: &Device) -> (Tensor<3>, Tensor<3>) {
        let Sizes {
            batch,
            width,
            slots,
            ..
        } = self.sizes;
        let raw = Tensor::ones([batch, slots, self.sizes.raw_width()], (device, DType::F32));
        let rows = Tensor::ones([batch, self.sizes.rows(), width], (device, dtype.into()));
        (raw, rows)
    }

    /// The raw row of a position of a sequence.
    pub fn raw(&self, sequence: usize, position: usize) -> Vec<f32> {
        let raw_width = self.sizes.raw_width();
        let at = (sequence * self.sizes.positions + position) * raw_width;
        let slot = position % self.sizes.ratio * raw_width;
        let bias = &self.bias[slot..slot + raw_width];
        let projections = self.projections[at..at + raw_width].iter();
        projections.zip(bias).map(|(x, bias)| x + bias).collect()
    }

    /// Values and scores that a channel of a block pools, in their order.
    pub fn pooled(&self, sequence: usize, block: usize) -> [Vec<Vec<f32>>; 2] {
        let Sizes { ratio, width, .. } = self.sizes;
        let series = self.sizes.series();
        let mut parts = [Vec::new(), Vec::new()];
        for of in 0..series {
            // The last series is that of the block itself.
            let Some(block) = (block + 1 + of).checked_sub(series) else {
                continue;
            };
            for position in block * ratio..(block + 1) * ratio {
                let raw = self.raw(sequence, position);
                for (kind, part) in parts.iter_mut().enumerate() {
                    let at = (kind * series + of) * width;
                    part.push(raw[at..at + width].to_vec());
                }
            }
        }
        parts
    }

    /// The row of a block, before it is rounded.
    pub fn row(&self, sequence: usize, block: usize) -> Vec<f64> {
        let Sizes {
            ratio,
            width,
            rotated,
            ..
        } = self.sizes;
        let [values, scores] = self.pooled(sequence, block);
        let pooled: Vec<f64> = (0..width)
            .map(|channel| {
                let share = |slot: &Vec<f32>| f64::from(slot[channel]).exp();
                let sum: f64 = scores.iter().map(share).sum();
                let slots = values.iter().zip(&scores);
                slots
                    .map(|(value, score)| share(score) / sum * f64::from(value[channel]))
                    .sum()
            })
            .collect();
        let mean = pooled.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let factor = (mean + EPSILON).sqrt().recip();
        let weights = self.norm.iter().copied().map(f64::from);
        let normalized: Vec<f64> = pooled
            .iter()
            .zip(weights)
            .map(|(x, weight)| x * factor * weight)
            .collect();
        turned_at(&normalized, width, rotated, &[block * ratio])
    }
}

/// Rows of f32, of whose channels the last `rotated` are turned, rounded by the operators for that.
pub fn round(rows: Tensor<3>, rounding: RowRounding, rotated: usize) -> Tensor<3> {
    let fits = "rows that can be rounded";
    let [_, _, width] = rows.dims();
    let content = width - rotated;
    match rounding {
        RowRounding::None => rows,
        RowRounding::Content if rotated == 0 => fp8_roundtrip(rows, CONTENT_BLOCK).expect(fits),
        RowRounding::Content if content == 0 => rows,
        RowRounding::Content => {
            let content = rows.clone().slice_dim(2, 0..content);
            let content = fp8_roundtrip(content, CONTENT_BLOCK).expect(fits);
            Tensor::cat(vec![content, rows.slice_dim(2, width - rotated..width)], 2)
        }
        RowRounding::Index => fp4_roundtrip(hadamard(rows).expect(fits), FP4_BLOCK).expect(fits),
        RowRounding::Whole => fp8_roundtrip(rows, WHOLE_BLOCK).expect(fits),
        RowRounding::Shared => fp4_scaled_roundtrip(rows, SHARED_BLOCK).expect(fits),
        RowRounding::Key => fp4_roundtrip(rows, FP4_BLOCK).expect(fits),
    }
}
