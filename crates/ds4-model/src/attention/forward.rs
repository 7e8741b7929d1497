//! Forward calls of an attention.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::attention::{
    self as ops, CONTENT_BLOCK, CachedQueries, CachedRows, CachedWindow, CompressedKeys,
    LowRankQueries, NewRows, PagedRows, Positions, RowRounding, StepRows, WindowKeys, WindowLayout,
};
use burn_ds4_ops::{device::is_host, quant};

use super::indexer::{Indexer, IndexerInput, PickedRows};
use super::modules::Attention;
use crate::cache::{CompressedStep, LayerCache, PrefillStep, Step};
use crate::linear::PackedLinear;
use crate::norm::normalize;
use crate::trace::Trace;

/// Projections that compressors pool into rows.
struct Compressions {
    /// Of the rows that are attended to: f32 `[batch, positions, 2 · series · head_dim]`.
    own: Tensor<3>,
    /// Of the indexer's rows, and the weights of its heads: f32 `[batch, positions, heads]`.
    indexer: Option<(Tensor<3>, Tensor<3>)>,
}

impl Attention {
    /// Attends from the new positions of `step`, and stores their rows in `cache`.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, positions, d_model]`
    /// - output: like `x`
    ///
    /// # Panics
    ///
    /// If `cache` was made for another kind of attention, or `step` does not belong to the cache
    /// that `cache` is a layer of.
    pub fn forward(&self, x: Tensor<3>, step: &Step, cache: &mut LayerCache) -> Tensor<3> {
        self.forward_traced(x, step, cache, &Trace::off())
    }

    pub(crate) fn forward_traced(
        &self,
        x: Tensor<3>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Tensor<3> {
        assert_eq!(
            cache.kind,
            self.kind(),
            "the cache was made for another kind of attention"
        );
        let ([low_rank, rows], compressions) = self.project_input(x);
        let attended = match &step.prefill {
            None => self.forward_decode(low_rank, rows, compressions, step, cache, trace),
            Some(prefill) => {
                let low_rank = self.query_norm.forward(low_rank);
                let prefill_of_kind = prefill.compressed(cache.kind);
                let (queries, index_queries) =
                    self.project_queries(low_rank, cache, prefill_of_kind);
                let window = self.window_rows(rows, prefill, step, cache);
                let head_weights =
                    compressions.and_then(|all| self.compress_prefill(all, step, cache));
                let picks = self.pick(
                    head_weights,
                    index_queries,
                    step,
                    prefill_of_kind,
                    cache,
                    trace,
                );
                self.attend_prefill(queries, window, picks, prefill, step, cache, trace)
            }
        };
        let output = self.project_output(attended);
        trace.record("output", &output);
        output
    }

    /// Queries of all heads, before norm and rotation: `[batch, positions, heads, head_dim]`. With
    /// them, the indexer's own queries if it has to [choose](Indexer::chooses).
    fn project_queries(
        &self,
        low_rank: Tensor<3>,
        cache: &LayerCache,
        prefill: Option<&CompressedStep>,
    ) -> (Tensor<4>, Option<Tensor<4>>) {
        let [batch, count, _] = low_rank.dims();
        let indexer = self.indexer.as_ref().zip(cache.indexer.as_ref());
        let indexer = indexer.filter(|(indexer, cache)| indexer.chooses(cache, prefill));
        let (queries, index_queries) = match indexer {
            None => (self.query_b.forward(low_rank), None),
            Some((indexer, _)) => {
                let maps = [&self.query_b, &indexer.query];
                let [queries, index_queries] = PackedLinear::forward_both(low_rank, maps);
                let shape = [batch, count, indexer.heads, indexer.width];
                (queries, Some(index_queries.reshape(shape)))
            }
        };
        let shape = [batch, count, self.heads, self.head_dim];
        (queries.reshape(shape), index_queries)
    }

    /// How key/value rows are rounded before they are stored.
    fn rounding(&self) -> RowRounding {
        if self.quantized_cache {
            RowRounding::Content
        } else {
            RowRounding::None
        }
    }

    fn scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    /// Attention of a decode step: everything between the projections, except storing its rows.
    fn attend_decode(
        &self,
        queries: Tensor<4>,
        positions: Positions,
        picks: Option<PickedRows>,
        step: &Step,
        cache: &LayerCache,
        trace: &Trace,
    ) -> Tensor<4> {
        let compressed = cache.compressed.as_ref();
        let rows = compressed.map(|cache| cache.first(cache.slots(), step.pages()));
        // A decode step has no mask: all rows are visible, or some are picked.
        let picks = picks.and_then(PickedRows::ids);
        let ratio = cache.kind.ratio().unwrap_or(1);
        trace.record_with("rows", || step.window_rows(&cache.window).0);
        trace.record_with("probabilities", || {
            let queries = step
                .rotation(cache.kind)
                .apply(normalize(queries.clone(), self.norm_epsilon));
            let (window, bias) = step.window_rows(&cache.window);
            let window = WindowKeys {
                rows: window,
                bias,
                span: step.span,
            };
            let compressed = compressed.map(|cache| CompressedKeys {
                bias: step.mask_blocks(ratio, cache.slots()),
                rows: cache.in_order(cache.slots(), step.pages()),
                picks: picks.clone(),
            });
            let (sinks, scale) = (self.sinks.val(), self.scale());
            ops::sink_probabilities(queries, window, compressed, sinks, scale)
                .expect("what the attention itself takes")
        });
        let window = CachedWindow {
            rows: cache.window.all(),
            layout: WindowLayout::Ring,
            span: step.span,
            causal: step.causal,
        };
        let compressed = rows.map(|rows| (rows, picks));
        self.attend_cached(queries, positions, window, compressed, cache)
    }

    /// Attention over a window and compressed rows, or picks among them.
    fn attend_cached(
        &self,
        queries: Tensor<4>,
        positions: Positions,
        window: CachedWindow,
        compressed: Option<(PagedRows, Option<Tensor<3, Int>>)>,
        cache: &LayerCache,
    ) -> Tensor<4> {
        let queries = CachedQueries {
            x: queries,
            epsilon: self.norm_epsilon,
            sinks: self.sinks.val(),
            scale: self.scale(),
        };
        let compressed = compressed.map(|(rows, picks)| CachedRows {
            rows,
            ratio: cache.kind.ratio().unwrap_or(1),
            picking: self.indexer.is_some(),
            picks,
        });
        ops::cached_attention(queries, positions, window, compressed)
            .expect("a step that belongs to the cache")
    }

    /// Stores the rows of the new positions of `step`, and attends from none.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, positions, d_model]`
    pub(crate) fn append(&self, x: Tensor<3>, step: &Step, cache: &mut LayerCache) {
        let rows = self.new_rows(self.key_value.forward(x));
        let positions = step.rotation(cache.kind).positions();
        let stored = ops::append_rows(rows, positions, cache.window.take());
        let stored = stored.expect("a cache that was made for the model");
        cache.window.put(stored);
    }

    fn new_rows(&self, x: Tensor<3>) -> NewRows {
        NewRows {
            x,
            norm: self.key_value_norm.weight.val(),
            epsilon: self.key_value_norm.epsilon,
            rounding: self.rounding(),
        }
    }

    /// Stores the key/value rows of a prefill step, and returns them after the earlier rows that
    /// are visible to its queries.
    fn window_rows(
        &self,
        rows: Tensor<3>,
        prefill: &PrefillStep,
        step: &Step,
        cache: &mut LayerCache,
    ) -> Tensor<3> {
        let [batch, _, _] = rows.dims();
        let ring = &prefill.window.ring;
        let earlier =
            cache
                .window
                .gather(ring.read.clone())
                .reshape([batch, ring.history, self.head_dim]);
        let rotation = step.rotation(cache.kind);
        let rows = self.key_value_norm.forward(rows).unsqueeze_dim::<4>(2);
        let rows = rotation.apply(rows).squeeze_dim::<3>(2);
        let rows = if self.quantized_cache {
            quantize_content(rows, self.rotated)
        } else {
            rows
        };
        cache
            .window
            .write(ring.write.clone(), ring.newest(rows.clone()));
        Tensor::cat(vec![earlier, rows], 1)
    }

    /// Attention of a prefill step: everything between the projections, except storing its rows.
    fn attend_prefill(
        &self,
        queries: Tensor<4>,
        window: Tensor<3>,
        picks: Option<PickedRows>,
        prefill: &PrefillStep,
        step: &Step,
        cache: &LayerCache,
        trace: &Trace,
    ) -> Tensor<4> {
        let rotation = step.rotation(cache.kind);
        let prepared = |queries| rotation.apply(normalize(queries, self.norm_epsilon));
        let of_kind = prefill.compressed(cache.kind);
        let compressed = cache.compressed.as_ref().zip(of_kind).zip(picks);
        let keys = || {
            let window = WindowKeys {
                rows: window.clone(),
                bias: prefill.window.bias(step),
                span: step.span,
            };
            let compressed = compressed.clone().map(|((cached, of_kind), picks)| {
                let rows = cached.in_order(of_kind.rows, step.pages());
                let bias = of_kind.bias(step);
                let (bias, picks) = match picks {
                    PickedRows::All => (bias, None),
                    PickedRows::Masked(mask) => (bias + mask, None),
                    PickedRows::Some(picks) => (bias, Some(picks)),
                };
                CompressedKeys { rows, bias, picks }
            });
            (window, compressed)
        };
        let (sinks, scale) = (self.sinks.val(), self.scale());
        trace.record_with("probabilities", || {
            let (window, compressed) = keys();
            let queries = prepared(queries.clone());
            ops::sink_probabilities(queries, window, compressed, sinks.clone(), scale)
                .expect("what the attention itself takes")
        });
        if is_host(&queries.device()) {
            let (window, compressed) = keys();
            let queries = prepared(queries);
            let attended = ops::sink_attention(queries, window, compressed, sinks, scale)
                .expect("a step that belongs to the cache");
            return rotation.apply_inverse(attended);
        }
        let window = CachedWindow {
            rows: window,
            layout: WindowLayout::Latest,
            span: step.span,
            causal: true,
        };
        let compressed = compressed.map(|((cached, of_kind), picks)| {
            (cached.first(of_kind.rows, step.pages()), picks.ids())
        });
        self.attend_cached(queries, rotation.positions(), window, compressed, cache)
    }

    /// Low-rank queries, key/value rows, and projections that compressors pool into rows; `None`
    /// without a compressor.
    fn project_input(&self, x: Tensor<3>) -> ([Tensor<3>; 2], Option<Compressions>) {
        let maps = [&self.query_a, &self.key_value];
        let Some(compressor) = &self.compressor else {
            return (PackedLinear::forward_both(x, maps), None);
        };
        let own = compressor.projection.val();
        let Some(indexer) = &self.indexer else {
            let (products, [own]) = PackedLinear::forward_both_and_project(x, maps, [own]);
            return (products, Some(Compressions { own, indexer: None }));
        };
        let of_indexer = indexer.compressor.projection.val();
        let weights = [own, of_indexer, indexer.head_weights.val()];
        let (products, projections) = PackedLinear::forward_both_and_project(x, maps, weights);
        let [own, of_indexer, head_weights] = projections;
        let compressions = Compressions {
            own,
            indexer: Some((of_indexer, head_weights)),
        };
        (products, Some(compressions))
    }

    /// A decode step between the first projections and the last.
    fn forward_decode(
        &self,
        low_rank: Tensor<3>,
        rows: Tensor<3>,
        compressions: Option<Compressions>,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Tensor<4> {
        let positions = step.rotation(cache.kind).positions();
        let (own, of_indexer) =
            compressions.map_or((None, None), |all| (Some(all.own), all.indexer));
        let (index_projections, head_weights) = of_indexer.unzip();
        let compressed = self.compressor.as_ref().zip(cache.compressed.as_mut());
        let indexed = self.indexer.as_ref().zip(cache.indexer.as_mut());
        let step_rows = StepRows {
            queries: LowRankQueries {
                x: low_rank,
                norm: self.query_norm.weight.val(),
                epsilon: self.query_norm.epsilon,
            },
            new: self.new_rows(rows),
            ring: cache.window.take(),
            compressed: compressed
                .zip(own)
                .map(|((compressor, cache), projections)| {
                    compressor.step(projections, cache, self.rounding())
                }),
            indexed: indexed
                .zip(index_projections)
                .map(|((indexer, cache), projections)| {
                    let rounding = Indexer::rounding(self.quantized_cache);
                    indexer.compressor.step(projections, cache, rounding)
                }),
            pages: step.pages().cloned(),
        };
        let stored = ops::store_step(step_rows, positions.clone())
            .expect("a cache that was made for the model and has capacity for the step");
        cache.window.put(stored.ring);
        for (cache, state) in [
            (&mut cache.compressed, stored.compressed),
            (&mut cache.indexer, stored.indexed),
        ] {
            if let (Some(cache), Some(state)) = (cache, state) {
                cache.put(state);
            }
        }
        let (queries, index_queries) = self.project_queries(stored.queries, cache, None);
        let picks = self.pick(head_weights, index_queries, step, None, cache, trace);
        self.attend_decode(queries, positions, picks, step, cache, trace)
    }

    /// Stores what a prefill step adds to the compressed rows, and returns the weights of the
    /// indexer's heads.
    fn compress_prefill(
        &self,
        compressions: Compressions,
        step: &Step,
        cache: &mut LayerCache,
    ) -> Option<Tensor<3>> {
        let positions = step.rotation(cache.kind).positions();
        let (compressor, compressed) = self.compressor.as_ref().zip(cache.compressed.as_mut())?;
        let own = compressions.own;
        let pages = step.pages();
        compressor.append(own, positions.clone(), compressed, pages, self.rounding());
        let (projections, head_weights) = compressions.indexer?;
        let (indexer, indexed) = self.indexer.as_ref().zip(cache.indexer.as_mut())?;
        let rounding = Indexer::rounding(self.quantized_cache);
        let compressor = &indexer.compressor;
        compressor.append(projections, positions, indexed, pages, rounding);
        Some(head_weights)
    }

    /// PickedRows among the compressed rows, after those of the step are stored. `None` without
    /// compressed rows.
    fn pick(
        &self,
        head_weights: Option<Tensor<3>>,
        queries: Option<Tensor<4>>,
        step: &Step,
        prefill: Option<&CompressedStep>,
        cache: &LayerCache,
        trace: &Trace,
    ) -> Option<PickedRows> {
        let compressed = cache.compressed.as_ref()?;
        trace.record_with("compressed", || {
            compressed.in_order(compressed.slots(), step.pages())
        });
        let indexer = self.indexer.as_ref().zip(cache.indexer.as_ref());
        Some(match indexer.zip(head_weights) {
            None => PickedRows::All,
            Some(((indexer, cache), head_weights)) => {
                let input = IndexerInput {
                    head_weights,
                    queries,
                    rotation: step.rotation(self.kind()),
                    pages: step.pages(),
                    prefill: prefill.map(|prefill| (prefill, step)),
                    quantized: self.quantized_cache,
                };
                indexer.pick(input, cache, &trace.scope("indexer"))
            }
        })
    }

    /// The grouped low-rank output projection of `[batch, positions, heads, head_dim]`.
    fn project_output(&self, heads: Tensor<4>) -> Tensor<3> {
        let [batch, count, _, _] = heads.dims();
        let (groups, rank) = (self.o_groups, self.o_lora_rank);
        let group_width = self.heads / groups * self.head_dim;
        let heads = heads.reshape([batch, count, groups, group_width]);
        let projected = quant::grouped_linear(heads, &self.output_a.weights())
            .expect("heads that fit the groups");
        self.output_b
            .forward(projected.reshape([batch, count, groups * rank]))
    }
}

/// Rounds key/value rows as the released model's FP8 cache does; rotated channels stay as they are.
fn quantize_content(rows: Tensor<3>, rotated: usize) -> Tensor<3> {
    let [batch, count, width] = rows.dims();
    if rotated == width {
        return rows;
    }
    let content = rows.clone().slice([0..batch, 0..count, 0..width - rotated]);
    let content =
        quant::fp8_roundtrip(content, CONTENT_BLOCK).expect("float channels in non-empty blocks");
    let rotary = rows.slice([0..batch, 0..count, width - rotated..width]);
    Tensor::cat(vec![content, rotary], 2)
}
