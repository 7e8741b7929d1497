//! Forward calls of an attention.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::attention::{
    self as ops, CONTENT_BLOCK, CachedQueries, CachedRows, CachedWindow, CompressedKeys,
    LowRankQueries, NewRows, PagedRows, Positions, RowRounding, StepRows, WHOLE_BLOCK, WindowKeys,
    WindowLayout,
};
use burn_ds4_ops::{device::is_host, quant};

use super::indexer::Indexer;
use super::modules::Attention;
use super::shared::Source;
use crate::cache::{CompressedStep, LayerCache, PickedRows, PrefillStep, Step};
use crate::linear::PackedLinear;
use crate::norm::normalize;
use crate::trace::Trace;

/// Projections of a layer with compressed rows, where it has a part of them.
struct Compressions {
    /// What rows that are attended to are pooled of: f32 `[batch, positions, columns]`.
    own: Option<Tensor<3>>,
    /// What the indexer's rows are pooled of.
    indexer: Option<Tensor<3>>,
    /// The weights of the indexer's heads: f32 `[batch, positions, heads]`.
    head_weights: Option<Tensor<3>>,
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
    /// If `cache` was made for another kind of attention, `step` does not belong to the cache that
    /// `cache` is a layer of, or, where layers share rows, the one that makes them or picks among
    /// them has not been called with this step.
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
                trace.record("low_rank", &low_rank);
                let window = self.window_rows(rows, prefill, step, cache);
                trace.record("rows", &window);
                let head_weights = self.compress_prefill(compressions, step, cache, trace);
                let shared = self.shared_caches(step);
                let source = Source::new(cache, shared.as_ref());
                let of_kind = prefill.compressed(cache.kind);
                let (queries, index_queries) = self.project_queries(low_rank, source, of_kind);
                let index = head_weights.zip(index_queries);
                let picks = self.pick(index, step, of_kind, source, trace);
                self.attend_prefill(queries, window, picks, (prefill, step), source, trace)
            }
        };
        trace.record("attended", &attended);
        let output = self.project_output(attended);
        trace.record("output", &output);
        output
    }

    /// Queries of all heads, before norm and rotation: `[batch, positions, heads, head_dim]`. With
    /// them, the indexer's own queries if it has to [choose](Indexer::chooses).
    fn project_queries(
        &self,
        low_rank: Tensor<3>,
        source: Source<'_>,
        prefill: Option<&CompressedStep>,
    ) -> (Tensor<4>, Option<Tensor<4>>) {
        let [batch, count, _] = low_rank.dims();
        let indexer = self.indexer.as_ref().zip(source.keys);
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
        (cache, source): (&LayerCache, Source<'_>),
        trace: &Trace,
    ) -> Tensor<4> {
        let compressed = source.rows;
        let rows = compressed.map(|cache| cache.first(cache.slots(), step.pages()));
        // A decode step has no mask: all rows are visible, or some are picked.
        let picks = picks.and_then(PickedRows::ids);
        let ratio = cache.kind.ratio().unwrap_or(1);
        trace.record_with("rows", || step.window_rows(&cache.window).0);
        trace.record_with("probabilities", || {
            let queries = self.prepared(queries.clone(), step);
            trace.record("queries", &queries);
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
        self.attend_cached(queries, positions, window, compressed)
    }

    /// Queries as they are multiplied by rows.
    fn prepared(&self, queries: Tensor<4>, step: &Step) -> Tensor<4> {
        let queries = match self.query_norm_heads {
            true => normalize(queries, self.norm_epsilon),
            false => queries,
        };
        step.rotation(self.kind()).apply(queries)
    }

    /// Attention over a window and compressed rows, or picks among them.
    fn attend_cached(
        &self,
        queries: Tensor<4>,
        positions: Positions,
        window: CachedWindow,
        compressed: Option<(PagedRows, Option<Tensor<3, Int>>)>,
    ) -> Tensor<4> {
        let queries = CachedQueries {
            x: queries,
            epsilon: self.query_norm_heads.then_some(self.norm_epsilon),
            sinks: self.sinks.val(),
            scale: self.scale(),
        };
        let compressed = compressed.map(|(rows, picks)| CachedRows {
            rows,
            ratio: self.kind().ratio().unwrap_or(1),
            picking: self.indexer.is_some() || self.shared.is_some(),
            picks,
        });
        let attended = ops::cached_attention(queries, positions, window, compressed);
        attended.expect("a step that belongs to the cache")
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
            rounding: self.rounding,
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
        let rows = match self.rounding {
            RowRounding::Content => quantize_content(rows, self.rotated),
            RowRounding::Whole => quantize_whole(rows),
            _ => rows,
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
        (prefill, step): (&PrefillStep, &Step),
        source: Source<'_>,
        trace: &Trace,
    ) -> Tensor<4> {
        let rotation = step.rotation(self.kind());
        let of_kind = prefill.compressed(self.kind());
        let compressed = source.rows.zip(of_kind).zip(picks);
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
            let queries = self.prepared(queries.clone(), step);
            trace.record("queries", &queries);
            ops::sink_probabilities(queries, window, compressed, sinks.clone(), scale)
                .expect("what the attention itself takes")
        });
        if is_host(&queries.device()) {
            let (window, compressed) = keys();
            let queries = self.prepared(queries, step);
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
        self.attend_cached(queries, rotation.positions(), window, compressed)
    }

    /// Low-rank queries, key/value rows, and projections for compressed rows.
    fn project_input(&self, x: Tensor<3>) -> ([Tensor<3>; 2], Compressions) {
        let own = self.compressor.as_ref();
        let of_indexer = self.indexer.as_ref();
        let of_indexer_rows = of_indexer.and_then(|indexer| indexer.compressor.as_ref());
        let weights = [
            own.map(|compressor| compressor.projection.val()),
            of_indexer_rows.map(|compressor| compressor.projection.val()),
            of_indexer.map(|indexer| indexer.head_weights.val()),
        ];
        let are_there = weights.each_ref().map(Option::is_some);
        let weights = weights.into_iter().flatten().collect();
        let maps = [&self.query_a, &self.key_value];
        let (products, projections) = PackedLinear::forward_both_and_project(x, maps, weights);
        let mut projections = projections.into_iter();
        let [own, indexer, head_weights] =
            are_there.map(|is_there| is_there.then(|| projections.next()).flatten());
        let compressions = Compressions {
            own,
            indexer,
            head_weights,
        };
        (products, compressions)
    }

    /// A decode step between the first projections and the last.
    fn forward_decode(
        &self,
        low_rank: Tensor<3>,
        rows: Tensor<3>,
        compressions: Compressions,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Tensor<4> {
        let positions = step.rotation(cache.kind).positions();
        let Compressions {
            own,
            indexer: of_indexer,
            head_weights,
        } = compressions;
        // Rows that are shared are stored apart, since more is made of them.
        let (own, shared) = match self.shared {
            None => (own, None),
            Some(_) => (None, own),
        };
        let compressed = self.compressor.as_ref().zip(cache.compressed.as_mut());
        let indexer = self.indexer.as_ref();
        let indexed = indexer.and_then(|indexer| indexer.compressor.as_ref());
        let indexed = indexed.zip(cache.indexer.as_mut());
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
                    compressor.step(projections, cache, self.rounding)
                }),
            indexed: indexed
                .zip(of_indexer)
                .map(|((compressor, cache), projections)| {
                    compressor.step(projections, cache, Indexer::rounding(self.rounding))
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
        self.compress_shared(shared, step, cache, trace);
        let shared = self.shared_caches(step);
        let source = Source::new(cache, shared.as_ref());
        trace.record("low_rank", &stored.queries);
        let (queries, index_queries) = self.project_queries(stored.queries, source, None);
        let index = head_weights.zip(index_queries);
        let picks = self.pick(index, step, None, source, trace);
        self.attend_decode(queries, positions, picks, step, (cache, source), trace)
    }

    /// Stores what a prefill step adds to the compressed rows, and returns the weights of the
    /// indexer's heads.
    fn compress_prefill(
        &self,
        compressions: Compressions,
        step: &Step,
        cache: &mut LayerCache,
        trace: &Trace,
    ) -> Option<Tensor<3>> {
        let Compressions {
            own,
            indexer,
            head_weights,
        } = compressions;
        if self.shared.is_some() {
            self.compress_shared(own, step, cache, trace);
            return head_weights;
        }
        let positions = step.rotation(cache.kind).positions();
        let (compressor, compressed) = self.compressor.as_ref().zip(cache.compressed.as_mut())?;
        let pages = step.pages();
        compressor.append(own?, positions.clone(), compressed, pages, self.rounding);
        let of_indexer = self.indexer.as_ref()?.compressor.as_ref();
        let (compressor, indexed) = of_indexer.zip(cache.indexer.as_mut())?;
        let rounding = Indexer::rounding(self.rounding);
        compressor.append(indexer?, positions, indexed, pages, rounding);
        head_weights
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

/// Rounds key/value rows as V4.1's FP8 cache does.
fn quantize_whole(rows: Tensor<3>) -> Tensor<3> {
    quant::fp8_roundtrip(rows, WHOLE_BLOCK).expect("float channels in non-empty blocks")
}

/// Rounds key/value rows as V4's FP8 cache does; rotated channels stay as they are.
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
