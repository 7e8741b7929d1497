//! Compressed rows that several layers share, and picks among them.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_ds4_ops::attention::{
    self as ops, CompressionInputs, PagedRows, PooledBlocks, Positions, RowRounding,
};

use super::compressor::Compressor;
use super::indexer::{Indexer, IndexerInput};
use super::modules::Attention;
use crate::cache::{CompressedCache, CompressedStep, LayerCache, PickedRows, SharedCaches, Step};
use crate::linear::project_f32;
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::trace::Trace;
use crate::weights::WeightSource;

/// Makes the keys by which indexers pick among compressed rows, of these rows before they are
/// rotated and rounded.
#[derive(Module, Debug)]
pub struct IndexKeys {
    /// Projection of a row: `[width, row width]`.
    pub projection: Param<Tensor<2>>,
    /// Norm of a key.
    pub norm: RmsNorm,
}

impl IndexKeys {
    /// The keys, of so many channels of rows of so many, of the tensors `{prefix}..`.
    pub(super) fn build(
        source: &mut impl WeightSource,
        prefix: &str,
        [width, d_row]: [usize; 2],
        norm_epsilon: f64,
    ) -> Option<Self> {
        let projection = source.stored(&[format!("{prefix}wk.weight")], [width, d_row]);
        let norm = RmsNormConfig::new(width)
            .with_epsilon(norm_epsilon)
            .build(source, &format!("{prefix}k_norm"));
        Some(Self {
            projection: projection?,
            norm: norm?,
        })
    }
}

impl Compressor {
    /// Stores rows for the blocks that a step completes, by its projections (f32 `[batch,
    /// positions, values and scores]`), and their keys.
    pub(super) fn append_shared(
        &self,
        projections: Tensor<3>,
        positions: &Positions,
        caches: &mut SharedCaches,
        step: &Step,
        trace: &Trace,
    ) {
        const FITTING: &str = "a cache that was made for the model and has capacity";
        let keys = self.keys.as_ref().expect("rows that are shared have keys");
        let [_, count, width] = projections.dims();
        let latent = match self.ratio {
            // Nothing is pooled.
            1 => self.norm.forward(projections),
            ratio => {
                let device = (&projections.device(), projections.dtype());
                let inputs = CompressionInputs {
                    bias: Tensor::zeros([ratio, width], device),
                    projections,
                    norm: self.norm.weight.val(),
                    epsilon: self.norm.epsilon,
                };
                let raw = caches.rows.raw_mut().take();
                let pooled = ops::pool_blocks(inputs, positions.clone(), raw);
                let PooledBlocks { raw, rows } = pooled.expect(FITTING);
                caches.rows.raw_mut().put(raw);
                rows
            }
        };
        trace.record("latent", &latent);
        let key = keys
            .norm
            .forward(project_f32(latent.clone(), keys.projection.val()));
        for (new, cache, rounding) in [
            (latent, &mut caches.rows, RowRounding::Shared),
            (key, &mut caches.keys, RowRounding::Key),
        ] {
            let rows = PagedRows {
                rows: cache.take_rows(),
                pages: step.pages().cloned(),
            };
            let blocks = (self.ratio, count);
            let stored = ops::store_blocks(new, positions.clone(), blocks, rounding, rows);
            cache.put_rows(stored.expect(FITTING));
        }
    }
}

/// The compressed rows that a layer reads, and those that its indexer scores.
#[derive(Clone, Copy)]
pub(super) struct Source<'c> {
    pub(super) rows: Option<&'c CompressedCache>,
    pub(super) keys: Option<&'c CompressedCache>,
}

impl<'c> Source<'c> {
    /// The layer's own, or those that it shares.
    pub(super) fn new(cache: &'c LayerCache, shared: Option<&'c SharedCaches>) -> Self {
        match shared {
            Some(shared) => Self {
                rows: Some(&shared.rows),
                keys: Some(&shared.keys),
            },
            None => Self {
                rows: cache.compressed.as_ref(),
                keys: cache.indexer.as_ref(),
            },
        }
    }
}

impl Attention {
    /// Stores what a step adds to rows that layers share, and hands them on, if it is this layer
    /// that makes them.
    pub(super) fn compress_shared(
        &self,
        projections: Option<Tensor<3>>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) {
        let made = self.compressor.as_ref().zip(projections).zip(self.shared);
        let Some(((compressor, projections), shared)) = made else {
            return;
        };
        let made_for = "a cache that was made for the model";
        let mut caches = SharedCaches {
            rows: cache.compressed.take().expect(made_for),
            keys: cache.indexer.take().expect(made_for),
        };
        let positions = step.rotation(cache.kind).positions();
        compressor.append_shared(projections, &positions, &mut caches, step, trace);
        cache.compressed = Some(caches.rows.clone());
        cache.indexer = Some(caches.keys.clone());
        trace.record_with("index_keys", || {
            caches.keys.in_order(caches.keys.slots(), step.pages())
        });
        step.handed().rows.insert(shared.layer, caches);
    }

    /// The rows that the layer shares with others, if it does.
    ///
    /// # Panics
    ///
    /// If the layer that makes them has had no part in the step.
    pub(super) fn shared_caches(&self, step: &Step) -> Option<SharedCaches> {
        let layer = self.shared?.rows_of;
        let rows = step.handed().rows.get(&layer).cloned();
        Some(rows.unwrap_or_else(|| panic!("layer {layer} has handed on no compressed rows")))
    }

    /// Picks among the compressed rows, after those of the step are stored, by weights and queries
    /// of the indexer's heads. `None` without compressed rows.
    pub(super) fn pick(
        &self,
        index: Option<(Tensor<3>, Tensor<4>)>,
        step: &Step,
        prefill: Option<&CompressedStep>,
        source: Source<'_>,
        trace: &Trace,
    ) -> Option<PickedRows> {
        let compressed = source.rows?;
        trace.record_with("compressed", || {
            compressed.in_order(compressed.slots(), step.pages())
        });
        if let Some(shared) = self.shared.filter(|shared| !shared.picks()) {
            let picks = step.handed().picks.get(&shared.picks_of).cloned();
            return Some(picks.expect("a layer before this one has handed on its picks"));
        }
        let indexer = self.indexer.as_ref().zip(source.keys);
        let picks = match indexer.zip(index) {
            None => PickedRows::All,
            Some(((indexer, keys), (head_weights, queries))) => {
                let input = IndexerInput {
                    head_weights,
                    queries,
                    rotation: step.rotation(self.kind()),
                    step,
                    prefill,
                    rounding: Indexer::rounding(self.rounding),
                };
                indexer.pick(input, keys, &trace.scope("indexer"))
            }
        };
        if let Some(shared) = self.shared {
            step.handed().picks.insert(shared.layer, picks.clone());
        }
        Some(picks)
    }
}
