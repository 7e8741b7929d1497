use super::args::{
    CachedBlocks, Compression, IndexInputs, NewRows, OptionalCompression, OptionalState, Queries,
    QueryRotation, SinkInputs, StepRows, StoredStep,
};
#[cfg(feature = "cube")]
use super::launch;
use super::reference;
use super::rows::RowOps;
#[cfg(feature = "fusion")]
use crate::attention::args::{
    OptionalCompressionMetadata, OptionalStateMetadata, PagedRowsMetadata, StepRowsMetadata,
    StoredStepMetadata,
};
use crate::matmul::MatmulOps;
use crate::norm::{NormOps, norm_rows};
use crate::operators::prelude::*;
use crate::optional::OptionalFloat;
#[cfg(feature = "fusion")]
use crate::optional::OptionalIntMetadata;

operators! {
    /// Extends Burn's backends by the operators of this family.
    ///
    /// No tensor that is passed to them is empty.
    pub trait AttentionOps: MatmulOps + NormOps + RowOps;

    /// See [`sink_attention`](super::sink_attention).
    #[fusion(meta = |inputs| like(&inputs.queries))]
    fn sink_attention(#[extension_type] inputs: SinkInputs<Self>) -> FloatTensor<Self> {
        inputs.output()
    }
    if launch::can_attend(&inputs) => launch::sink_attention(inputs);

    /// See [`sink_probabilities`](super::sink_probabilities). Takes f32 queries that are already
    /// multiplied by the scale; `columns` is the number of columns of the result.
    #[fusion(meta = |inputs, columns| {
        let [batch, count, heads, _] = dims_of(&inputs.queries.shape);
        spec([batch, count, heads, *columns], DType::F32)
    })]
    fn sink_probabilities(
        #[extension_type] inputs: SinkInputs<Self>,
        columns: usize,
    ) -> FloatTensor<Self> {
        let probabilities = inputs.probabilities();
        debug_assert_eq!(probabilities.shape()[3], columns);
        probabilities
    }

    /// See [`index_scores`](super::index_scores).
    #[fusion(meta = |inputs| {
        let [batch, count, _, _] = dims_of(&inputs.queries.shape);
        spec([batch, count, count_rows(&inputs.keys)], DType::F32)
    })]
    fn index_scores(#[extension_type] inputs: IndexInputs<Self>) -> FloatTensor<Self> {
        reference::index_scores::<Self>(rotated(inputs))
    }

    /// See [`cached_attention`](super::cached_attention).
    #[fusion(meta = |queries, _window, _blocks| like(&queries.x))]
    fn cached_attention(
        #[extension_type] queries: Queries<Self>,
        window: FloatTensor<Self>,
        #[extension_type] blocks: CachedBlocks<Self>,
    ) -> FloatTensor<Self> {
        reference::cached_attention::<Self>(queries, window, blocks, Self::sink_attention)
    }

    /// See [`append_rows`](super::append_rows).
    #[fusion(meta = |_new, ring| ring.clone())]
    fn append_rows(
        #[extension_type] new: NewRows<Self>,
        ring: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::append_rows::<Self>(new, ring)
    }
    if launch::can_append(&new, &ring) => launch::append_rows(new, ring);

    /// See [`compress_rows`](super::compress_rows). Returns the raw rows and the compressed rows.
    #[fusion(meta = |_inputs, raw, rows| (raw.clone(), rows.clone()))]
    fn compress_rows(
        #[extension_type] inputs: Compression<Self>,
        raw: FloatTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::compress_rows::<Self>(inputs, raw, rows)
    }
    if launch::can_compress(&inputs, &raw, &rows) => launch::compress_rows(inputs, raw, rows);

    /// See [`store_step`](super::store_step).
    #[fusion(meta = stored)]
    fn store_step(#[extension_type] step: StepRows<Self>) -> StoredStep<Self> {
        store_by_parts(step)
    }
    if launch::can_store(&step) => launch::store_step(step);

    flex {
        /// The positions are in the host's memory: reading them costs nothing, and no row is read
        /// that its query does not see.
        fn index_scores(inputs: IndexInputs<Self>) -> FloatTensor<Self> {
            reference::index_scores_by_query::<Self>(rotated(inputs))
        }

        /// As [`index_scores`](Self::index_scores).
        fn cached_attention(
            queries: Queries<Self>,
            window: FloatTensor<Self>,
            blocks: CachedBlocks<Self>,
        ) -> FloatTensor<Self> {
            reference::cached_attention_by_query::<Self>(queries, window, blocks)
        }
    }

    cube {
        fn index_scores(inputs: IndexInputs<Self>) -> FloatTensor<Self> {
            if !launch::can_score(&inputs) {
                return reference::index_scores::<Self>(rotated(inputs));
            }
            let inputs = match launch::rotates(&inputs) {
                true => inputs,
                false => rotated(inputs),
            };
            launch::index_scores(inputs)
        }

        fn cached_attention(
            queries: Queries<Self>,
            window: FloatTensor<Self>,
            blocks: CachedBlocks<Self>,
        ) -> FloatTensor<Self> {
            if launch::can_attend_cached(&queries, &window, &blocks) {
                launch::cached_attention(queries, window, blocks)
            } else if launch::can_attend_many(&queries, &window, &blocks) {
                launch::attend_many(queries, window, blocks)
            } else {
                reference::cached_attention(queries, window, blocks, Self::sink_attention)
            }
        }
    }
}

/// Rotates the queries by themselves.
fn rotated<B: RowOps>(inputs: IndexInputs<B>) -> IndexInputs<B> {
    let QueryRotation::At { angles, start } = inputs.rotation else {
        return inputs;
    };
    IndexInputs {
        queries: B::rotate_at(inputs.queries, angles, start, false),
        rotation: QueryRotation::None,
        ..inputs
    }
}

/// What a step stores, by the operator for each part.
fn store_by_parts<B: AttentionOps>(step: StepRows<B>) -> StoredStep<B> {
    let weight = OptionalFloat::Some(step.norm);
    let compress = |compression| match compression {
        OptionalCompression::None => OptionalState::None,
        OptionalCompression::Some { inputs, raw, rows } => {
            let (raw, rows) = B::compress_rows(inputs, raw, rows);
            OptionalState::Some { raw, rows }
        }
    };
    StoredStep {
        queries: norm_rows::<B>(step.queries, weight, step.epsilon),
        ring: B::append_rows(step.new, step.ring),
        compressed: compress(step.compressed),
        indexed: compress(step.indexed),
    }
}

/// Rows of a sequence.
#[cfg(feature = "fusion")]
fn count_rows(paged: &PagedRowsMetadata) -> usize {
    let pages = match &paged.pages {
        OptionalIntMetadata::None => 1,
        OptionalIntMetadata::Some(pages) => pages.shape[1],
    };
    pages * paged.rows.shape[1]
}

#[cfg(feature = "fusion")]
fn stored(step: &StepRowsMetadata) -> StoredStepMetadata {
    StoredStepMetadata {
        queries: step.queries.clone(),
        ring: step.ring.clone(),
        compressed: state(&step.compressed),
        indexed: state(&step.indexed),
    }
}

#[cfg(feature = "fusion")]
fn state(of: &OptionalCompressionMetadata) -> OptionalStateMetadata {
    match of {
        OptionalCompressionMetadata::None => OptionalStateMetadata::None,
        OptionalCompressionMetadata::Some { raw, rows, .. } => OptionalStateMetadata::Some {
            raw: raw.clone(),
            rows: rows.clone(),
        },
    }
}
