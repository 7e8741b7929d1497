use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::attention::{
    self as ops, CompressionInputs, CompressionOptions, PagedRows, Positions, RowRounding,
    StepCompression,
};
use burn_ds4_ops::quant;

use super::shared::IndexKeys;
use crate::cache::CompressedCache;
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::weights::{self, Initial, WeightSource, all_or_nothing};

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
    /// Width of the keys that it makes of rows that several layers share. These have no position
    /// bias, and those of one token no gate.
    #[config(default = "None")]
    pub keys: Option<usize>,
    /// Epsilon of the row's norm.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl CompressorConfig {
    /// Initializes the compressor with random weights.
    pub fn init(&self, device: &Device) -> Compressor {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The compressor of the tensors `{prefix}compressor...`.
    pub(super) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Compressor> {
        let series = 1 + usize::from(self.overlap);
        let width = series * self.width;
        let names = ["wkv", "wgate"].map(|name| format!("{prefix}compressor.{name}.weight"));
        let gated = self.keys.is_none() || self.ratio > 1;
        let names = &names[..1 + usize::from(gated)];
        let projection = source.stored(names, [width, self.d_model]);
        let (stored, shape) = ([self.ratio, width], [self.ratio, 2 * width]);
        let name = format!("{prefix}compressor.ape");
        let position_bias = self.keys.is_none().then(|| {
            source.arranged(&name, stored, shape, Initial::Zeros, |bias| {
                Tensor::cat(vec![bias.zeros_like(), bias], 1)
            })
        });
        let norm = RmsNormConfig::new(self.width)
            .with_epsilon(self.norm_epsilon)
            .build(source, &format!("{prefix}compressor.norm"));
        let keys = self.keys.map(|keys| {
            let prefix = format!("{prefix}indexer.");
            IndexKeys::build(source, &prefix, [keys, self.width], self.norm_epsilon)
        });
        Some(Compressor {
            projection: projection?,
            position_bias: all_or_nothing(position_bias)?,
            keys: all_or_nothing(keys)?,
            norm: norm?,
            rotated: self.rotated,
            ratio: self.ratio,
            overlap: self.overlap,
        })
    }
}

/// Pools blocks of `ratio` tokens into one key/value row each.
///
/// Every token is projected to values and, unless a row that layers share is of one token, to
/// scores. A row is the per-channel softmax-weighted sum
/// of its tokens' values, normalised and rotated at the position of its first token. With overlap
/// there are two series of channels: a row pools the first series of the previous block and the
/// second series of its own. All of it is f32.
#[derive(Module, Debug)]
pub struct Compressor {
    /// Projection to values, then to scores (`wkv` over `wgate`): `[2 · series · width, d_model]`.
    /// Rows of one token that layers share have no scores: `[width, d_model]`.
    pub projection: Param<Tensor<2>>,
    /// Added to the projection by in-block position: f32 `[ratio, 2 · series · width]`, zero for
    /// the values, `ape` for the scores. None where several layers share the rows.
    pub position_bias: Option<Param<Tensor<2>>>,
    /// Makes the keys of rows that several layers share.
    pub keys: Option<IndexKeys>,
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
                bias: self
                    .position_bias
                    .as_ref()
                    .expect("rows of one layer")
                    .val(),
                norm: self.norm.weight.val(),
                epsilon: self.norm.epsilon,
            },
            options: CompressionOptions {
                overlap: self.overlap,
                rounding,
            },
            state: cache.take(),
        }
    }

    /// Stores the projections of a prefill step (as [`step`](Self::step) takes them), and rows for
    /// the blocks that it completes.
    pub(super) fn append(
        &self,
        projections: Tensor<3>,
        positions: Positions,
        cache: &mut CompressedCache,
        pages: Option<&Tensor<2, Int>>,
        rounding: RowRounding,
    ) {
        let StepCompression {
            inputs,
            options,
            state,
        } = self.step(projections, cache, rounding);
        let rows = PagedRows {
            rows: state.rows,
            pages: pages.cloned(),
        };
        let stored = ops::compress_rows(inputs, positions, options, state.raw, rows);
        cache.put(stored.expect("a cache that was made for the model and has capacity"));
    }
}

/// Rounds an indexer's query as the FP4 cache of V4 does.
pub(super) fn quantize_index<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let transformed = quant::hadamard(x).expect("the width was checked at initialization or load");
    quant::fp4_roundtrip(transformed, quant::FP4_BLOCK).expect("float channels in non-empty blocks")
}

/// Rounds an indexer's query as that of V4.1 does, which is not transformed.
pub(super) fn quantize_query<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    quant::fp4_roundtrip(x, quant::FP4_BLOCK).expect("float channels in non-empty blocks")
}
