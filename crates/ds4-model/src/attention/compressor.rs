use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::attention::{
    self as ops, CompressionInputs, CompressionOptions, CompressorState, RowRounding,
    StepCompression,
};
use burn_ds4_ops::quant;

use super::quantize_content;
use crate::cache::{CompressedCache, CompressedIndices};
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::weights::{self, Initial, WeightSource};

/// Configuration of [`Compressor`].
#[derive(Config, Debug)]
pub struct CompressorConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Width of a compressed row.
    pub width: usize,
    /// Trailing channels of a row that are rotated.
    pub rotated: usize,
    /// Tokens per row.
    pub ratio: usize,
    /// Whether a row also pools the tokens of the block before its own.
    pub overlap: bool,
    /// Epsilon of the row's norm.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl CompressorConfig {
    /// Initializes the compressor with random weights.
    pub fn init(&self, device: &Device) -> Compressor {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The compressor of the tensors `{prefix}..`.
    pub(super) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Compressor> {
        let series = 1 + usize::from(self.overlap);
        let width = series * self.width;
        let names = ["wkv", "wgate"].map(|name| format!("{prefix}{name}.weight"));
        let projection = source.stored(&names, [width, self.d_model]);
        let (stored, shape) = ([self.ratio, width], [self.ratio, 2 * width]);
        let name = format!("{prefix}ape");
        let position_bias = source.arranged(&name, stored, shape, Initial::Zeros, |bias| {
            Tensor::cat(vec![bias.zeros_like(), bias], 1)
        });
        let norm = RmsNormConfig::new(self.width)
            .with_epsilon(self.norm_epsilon)
            .build(source, &format!("{prefix}norm"));
        Some(Compressor {
            projection: projection?,
            position_bias: position_bias?,
            norm: norm?,
            rotated: self.rotated,
            ratio: self.ratio,
            overlap: self.overlap,
        })
    }
}

/// Pools blocks of `ratio` tokens into one key/value row each.
///
/// Every token is projected to values and to scores. A row is the per-channel softmax-weighted sum
/// of its tokens' values, normalised and rotated at the position of its first token. With overlap
/// there are two series of channels: a row pools the first series of the previous block and the
/// second series of its own. All of it is f32.
#[derive(Module, Debug)]
pub struct Compressor {
    /// Projection to values, then to scores (`wkv` over `wgate`): `[2 · series · width, d_model]`.
    pub projection: Param<Tensor<2>>,
    /// Added to the projection by in-block position: f32 `[ratio, 2 · series · width]`, zero for
    /// the values, `ape` for the scores.
    pub position_bias: Param<Tensor<2>>,
    /// Norm of a pooled row.
    pub norm: RmsNorm,
    /// Trailing channels of a row that are rotated.
    pub rotated: usize,
    /// Tokens per row.
    pub ratio: usize,
    /// Whether a row also pools the tokens of the block before its own.
    pub overlap: bool,
}

impl Compressor {
    /// Inputs of [`store_step`](ops::store_step) for a decode step with these projections (f32
    /// `[batch, positions, 2 · series · width]`). Takes the cache's tensors.
    pub(super) fn step(
        &self,
        projections: Tensor<3>,
        cache: &mut CompressedCache,
        rounding: RowRounding,
    ) -> StepCompression {
        StepCompression {
            inputs: CompressionInputs {
                projections,
                bias: self.position_bias.val(),
                norm: self.norm.weight.val(),
                epsilon: self.norm.epsilon,
            },
            options: CompressionOptions {
                overlap: self.overlap,
                rounding,
            },
            state: CompressorState {
                raw: cache.raw.take(),
                rows: cache.rows.take(),
            },
        }
    }

    /// Pools the blocks that a prefill step completes, and stores their projections (as
    /// [`step`](Self::step) takes them) and rows.
    pub(super) fn append(
        &self,
        projections: Tensor<3>,
        indices: &CompressedIndices,
        cache: &mut CompressedCache,
        rounding: RowRounding,
    ) {
        let [batch, count, raw_width] = projections.dims();
        let series = 1 + usize::from(self.overlap);
        let width = raw_width / (2 * series);

        let bias = self.position_bias.val().select(0, indices.slots.clone());
        let raw = projections + bias.reshape([batch, count, raw_width]);

        let history = indices.ring.history;
        let earlier = cache
            .raw
            .gather(indices.ring.read.clone())
            .reshape([batch, history, raw_width]);
        let pooled = Tensor::cat(vec![earlier, raw.clone()], 1)
            .reshape([batch * (history + count), raw_width])
            .select(0, indices.pooled.clone())
            .reshape([batch, indices.blocks + series - 1, self.ratio, raw_width]);
        cache
            .raw
            .write(indices.ring.write.clone(), indices.ring.newest(raw));

        let rows = self.norm.forward(self.pool(pooled, indices, width));
        let rows = indices.rotation.apply(rows);
        let rows = match rounding {
            RowRounding::None => rows,
            RowRounding::Content => quantize_content(rows, self.rotated),
            RowRounding::Index => quantize_index(rows),
        };
        cache.rows.write(
            indices.write.clone(),
            rows.reshape([batch * indices.blocks, width]),
        );
    }

    /// Pools `[batch, blocks, ratio, raw_width]` (with one more block in front where blocks
    /// overlap) to `[batch, blocks, width]`.
    fn pool(&self, raw: Tensor<4>, indices: &CompressedIndices, width: usize) -> Tensor<3> {
        let [batch, given, slots, _] = raw.dims();
        let part = |blocks: std::ops::Range<usize>, series: usize| {
            let from = series * width;
            raw.clone()
                .slice([0..batch, blocks, 0..slots, from..from + width])
        };
        if !self.overlap {
            return pooled(part(0..given, 0), part(0..given, 1));
        }
        let (previous, own) = (0..given - 1, 1..given);
        let values = Tensor::cat(vec![part(previous.clone(), 0), part(own.clone(), 1)], 2);
        let previous_scores = part(previous, 2) + indices.previous_bias.clone();
        let scores = Tensor::cat(vec![previous_scores, part(own, 3)], 2);
        pooled(values, scores)
    }
}

fn pooled(values: Tensor<4>, scores: Tensor<4>) -> Tensor<3> {
    ops::pool(values, scores).expect("parts of one projection")
}

/// Rounds an indexer row or query as the released model's FP4 cache does.
pub(super) fn quantize_index<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let transformed = quant::hadamard(x).expect("the width was checked at initialization or load");
    quant::fp4_roundtrip(transformed, quant::FP4_BLOCK).expect("float channels in non-empty blocks")
}
