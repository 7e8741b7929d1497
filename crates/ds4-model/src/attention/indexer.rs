use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::attention::{PagedRows, RowRounding, VisibleBlocks, index_scores};
use burn_ds4_ops::device::is_host;
use burn_ds4_ops::topk::{self, Windows};

use super::candidates::Candidates;
use super::compressor::{Compressor, CompressorConfig, quantize_index, quantize_query};
use crate::cache::{CompressedCache, CompressedStep, PickedRows, Step, mask};
use crate::linear::{PackedLinear, PackedLinearConfig};
use crate::rope::Rotation;
use crate::trace::Trace;
use crate::weights::{self, WeightSource, all_or_nothing};

/// Why what an indexer computes fits the operators that it calls.
const FITTING: &str = "queries and keys of a cache that was made for the model";

/// Configuration of [`Indexer`].
#[derive(Config, Debug)]
pub struct IndexerConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Width of the query's low-rank representation.
    pub q_lora_rank: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head and of an indexer row.
    pub width: usize,
    /// Trailing channels of a head that are rotated.
    pub rotated: usize,
    /// Tokens per row.
    pub ratio: usize,
    /// Rows to pick per query.
    pub top_k: usize,
    /// Its part in two-level picking, if the rows are shared. It has no rows of its own then, but
    /// picks by the keys of these.
    #[config(default = "None")]
    pub shared: Option<Candidates>,
    /// Epsilon of the row's norm.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

impl IndexerConfig {
    /// Initializes the indexer with random weights.
    ///
    /// # Panics
    ///
    /// If `top_k` is 0 or more than [`MAX_K`](topk::MAX_K).
    pub fn init(&self, device: &Device) -> Indexer {
        weights::dense(device, |source| self.build(source, ""))
    }

    /// The indexer of the tensors `{prefix}..`.
    pub(super) fn build(&self, source: &mut impl WeightSource, prefix: &str) -> Option<Indexer> {
        let (heads, width, d) = (self.heads, self.width, self.d_model);
        assert!(
            (1..=topk::MAX_K).contains(&self.top_k),
            "top_k must be in 1..={}, got {}",
            topk::MAX_K,
            self.top_k
        );
        let query = PackedLinearConfig::new(self.q_lora_rank, heads * width)
            .build(source, &format!("{prefix}wq_b"));
        let head_weights = source.stored(&[format!("{prefix}weights_proj.weight")], [heads, d]);
        let compressor = self.shared.is_none().then(|| {
            CompressorConfig::new(d, width, self.rotated, self.ratio, true)
                .with_norm_epsilon(self.norm_epsilon)
                .build(source, prefix)
        });
        Some(Indexer {
            query: query?,
            head_weights: head_weights?,
            compressor: all_or_nothing(compressor)?,
            heads,
            width,
            top_k: self.top_k,
            ratio: self.ratio,
            shared: self.shared,
        })
    }
}

/// The lightning indexer: scores compressed rows with several narrow heads, and picks the best for
/// each query.
#[derive(Module, Debug)]
pub struct Indexer {
    /// Projection to the heads' queries: `[heads · width, q_lora_rank]`.
    pub query: PackedLinear,
    /// Projection to the heads' weights: `[heads, d_model]`.
    pub head_weights: Param<Tensor<2>>,
    /// Compressor of the indexer's own rows. None where it picks by keys of shared rows.
    pub compressor: Option<Compressor>,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head.
    pub width: usize,
    /// Rows to pick per query.
    pub top_k: usize,
    /// Tokens per row.
    pub ratio: usize,
    /// Its part in two-level picking, if the rows are shared.
    #[module(skip)]
    pub shared: Option<Candidates>,
}

/// Inputs of the indexer.
pub(super) struct IndexerInput<'a> {
    /// The heads' weights: f32 `[batch, positions, heads]`.
    pub(super) head_weights: Tensor<3>,
    /// The heads' queries: `[batch, positions, heads, width]`.
    pub(super) queries: Tensor<4>,
    pub(super) rotation: &'a Rotation,
    pub(super) step: &'a Step,
    /// The part of a prefill step for the compressed rows.
    pub(super) prefill: Option<&'a CompressedStep>,
    /// How queries are rounded, as the rows are.
    pub(super) rounding: RowRounding,
}

impl Indexer {
    /// Whether there may be more compressed rows than it picks: in a prefill step, than the step's
    /// positions may see.
    pub(super) fn chooses(&self, cache: &CompressedCache, step: Option<&CompressedStep>) -> bool {
        available(cache, step) > self.top_k
    }

    /// How the indexer's rows are rounded, given that of key/value rows.
    pub(super) fn rounding(of_rows: RowRounding) -> RowRounding {
        match of_rows {
            RowRounding::Content => RowRounding::Index,
            RowRounding::Whole => RowRounding::Key,
            other => other,
        }
    }

    /// Picks compressed rows for every query by scoring the indexer's own rows, of which there are
    /// as many.
    pub(super) fn pick(
        &self,
        input: IndexerInput<'_>,
        cache: &CompressedCache,
        trace: &Trace,
    ) -> PickedRows {
        let IndexerInput {
            head_weights,
            queries,
            rotation,
            step,
            prefill: masked,
            rounding,
        } = input;
        let pages = step.pages();
        let [batch, count, _, _] = queries.dims();
        let available = available(cache, masked);
        let ratio = self.ratio;

        // On the host, a prefill step masks scores. Elsewhere, each position says what is visible.
        let masked = masked.filter(|_| is_host(&queries.device()));
        let keys: PagedRows = match masked {
            Some(_) => cache.in_order(available, pages).into(),
            None => cache.first(available, pages),
        };
        let visible = masked.is_none().then(|| VisibleBlocks {
            start: rotation.start.clone(),
            ratio,
        });
        let queries = (queries, rotation, rounding);
        let scores = self.scores(head_weights, queries, keys, visible, trace);
        trace.record("scores", &scores);
        let (scores, windows) = match masked {
            None => {
                let windows = Windows::Blocks {
                    starts: rotation.start.clone(),
                    ratio,
                    next_n: count,
                };
                (scores, windows)
            }
            Some(of_kind) => (scores + of_kind.bias(step), Windows::All),
        };
        let scores = match self.shared {
            Some(candidates) => candidates.apply(scores, ratio, step, trace),
            None => scores,
        };
        // Those of whole pages.
        let [_, _, available] = scores.dims();
        let scores = scores.reshape([batch * count, available]);
        // Gather each query's picks, or mask rows once for all queries: whichever touches fewer
        // rows.
        if masked.is_some() && count * self.top_k > available {
            let picked = topk::top_k_mask(scores, self.top_k).expect(FITTING);
            let picked = picked.reshape([batch, count, available]);
            trace.record_with("picked", || picked.clone().int());
            return PickedRows::Masked(mask(picked.bool_not()));
        }
        let picks = topk::top_k_ids(scores, windows, self.top_k).expect(FITTING);
        trace.record("picks", &picks);
        PickedRows::Some(picks.reshape([batch, count, self.top_k]))
    }

    /// Scores of the rows `keys`, in f32: `[batch, positions, rows]`.
    fn scores(
        &self,
        head_weights: Tensor<3>,
        (queries, rotation, rounding): (Tensor<4>, &Rotation, RowRounding),
        keys: PagedRows,
        visible: Option<VisibleBlocks>,
        trace: &Trace,
    ) -> Tensor<3> {
        let rounded = |round: fn(Tensor<4>) -> Tensor<4>| round(rotation.apply(queries.clone()));
        let (queries, rotation) = match rounding {
            RowRounding::Index => (rounded(quantize_index), None),
            RowRounding::Key => (rounded(quantize_query), None),
            _ => (queries, Some(rotation.positions())),
        };
        trace.record("queries", &queries);
        let scale = (self.width as f64).powf(-0.5) * (self.heads as f64).powf(-0.5);
        trace.record_with("weights", || head_weights.clone() * scale);
        index_scores(queries, keys, head_weights, scale, visible, rotation).expect(FITTING)
    }
}

/// Rows that queries may pick from.
fn available(cache: &CompressedCache, step: Option<&CompressedStep>) -> usize {
    step.map_or(cache.slots(), |step| step.rows)
}
