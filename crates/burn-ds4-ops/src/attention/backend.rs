use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension};

use super::reference::{self, Problem};
use super::{CompressedKeys, RowRounding};
use crate::matmul::MatmulOps;
use crate::norm::NormOps;

/// [`CompressedKeys`] as backends see them.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum CompressedRows<B: Backend> {
    /// There are none.
    None,
    /// All queries of a sequence see the same.
    Shared {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// `[batch, queries, rows]`.
        bias: FloatTensor<B>,
    },
    /// Every query sees some.
    Picked {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// `[batch, queries, rows]`.
        bias: FloatTensor<B>,
        /// `[batch, queries, picks]`.
        picks: IntTensor<B>,
    },
}

impl From<Option<CompressedKeys>> for CompressedRows<Dispatch> {
    fn from(keys: Option<CompressedKeys>) -> Self {
        let Some(CompressedKeys { rows, bias, picks }) = keys else {
            return Self::None;
        };
        let (rows, bias) = (rows.into_dispatch(), bias.into_dispatch());
        match picks {
            None => Self::Shared { rows, bias },
            Some(picks) => Self::Picked {
                rows,
                bias,
                picks: picks.into_dispatch(),
            },
        }
    }
}

/// The compressed rows of a cache as backends see them, each of a block of `ratio` positions.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum CachedBlocks<B: Backend> {
    /// There are none.
    None,
    /// Queries see all that are complete.
    All {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// Positions of a block.
        ratio: usize,
        /// Whether queries are to get the bits of picks that are all rows in their order.
        picking: bool,
    },
    /// Queries see those of their picks that are complete.
    Picked {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// `[batch, queries, picks]`.
        picks: IntTensor<B>,
        /// Positions of a block.
        ratio: usize,
    },
}

/// The queries of [`cached_attention`](super::cached_attention), as backends see them.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Queries<B: Backend> {
    /// `[batch, count, heads, width]`.
    pub x: FloatTensor<B>,
    /// `[positions, rotated]`.
    pub angles: FloatTensor<B>,
    /// `[batch]`.
    pub start: IntTensor<B>,
    /// `[heads]`.
    pub sinks: FloatTensor<B>,
    /// Of the norm.
    pub epsilon: f64,
    /// Positions that a query sees in the window.
    pub span: usize,
    /// Of the logits.
    pub scale: f64,
}

/// What [`append_rows`](super::append_rows) reads, as backends see it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct NewRows<B: Backend> {
    /// `[batch, count, width]`.
    pub x: FloatTensor<B>,
    /// `[width]`.
    pub norm: FloatTensor<B>,
    /// `[positions, rotated]`.
    pub angles: FloatTensor<B>,
    /// `[batch]`.
    pub start: IntTensor<B>,
    /// Of the norm.
    pub epsilon: f64,
    /// What becomes of a row.
    pub rounding: RowRounding,
}

/// Which blocks queries see, as backends know it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum BlockSight<B: Backend> {
    /// All.
    All,
    /// Those of `ratio` positions that are complete at each query's, from the `start` of its sequence on.
    From {
        /// `[batch]`.
        start: IntTensor<B>,
        /// Positions of a block.
        ratio: usize,
    },
}

/// What [`compress_rows`](super::compress_rows) reads, as backends see it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct Compression<B: Backend> {
    /// `[batch, count, raw width]`.
    pub projections: FloatTensor<B>,
    /// `[ratio, raw width]`.
    pub bias: FloatTensor<B>,
    /// `[width]`.
    pub norm: FloatTensor<B>,
    /// `[positions, rotated]`.
    pub angles: FloatTensor<B>,
    /// `[batch]`.
    pub start: IntTensor<B>,
    /// Of the norm.
    pub epsilon: f64,
    /// Positions of a block.
    pub ratio: usize,
    /// Whether a row also pools the block before its own.
    pub overlap: bool,
    /// What becomes of a row.
    pub rounding: RowRounding,
}

/// A compressor of [`StepRows`], where there is one.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalCompression<B: Backend> {
    /// There is none.
    None,
    /// There is one.
    Some {
        /// What it reads, of the positions of [`StepRows::new`].
        #[extension_type]
        inputs: Compression<B>,
        /// `[batch, slots, raw width]`.
        raw: FloatTensor<B>,
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
    },
}

/// What a compressor of [`StepRows`] has updated.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalState<B: Backend> {
    /// There is none.
    None,
    /// There is one.
    Some {
        /// `[batch, slots, raw width]`.
        raw: FloatTensor<B>,
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
    },
}

/// What [`store_step`](super::store_step) reads and updates, as backends see it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StepRows<B: Backend> {
    /// `[batch, count, rank]`.
    pub queries: FloatTensor<B>,
    /// `[rank]`.
    pub norm: FloatTensor<B>,
    /// Of the norm.
    pub epsilon: f64,
    /// Key/value rows.
    #[extension_type]
    pub new: NewRows<B>,
    /// `[batch, slots, width]`.
    pub ring: FloatTensor<B>,
    /// Of key/value rows.
    #[extension_type]
    pub compressed: OptionalCompression<B>,
    /// Of the indexer.
    #[extension_type]
    pub indexed: OptionalCompression<B>,
}

/// What [`store_step`](super::store_step) gives, as backends see it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StoredStep<B: Backend> {
    /// `[batch, count, rank]`.
    pub queries: FloatTensor<B>,
    /// `[batch, slots, width]`.
    pub ring: FloatTensor<B>,
    /// Of key/value rows.
    #[extension_type]
    pub compressed: OptionalState<B>,
    /// Of the indexer.
    #[extension_type]
    pub indexed: OptionalState<B>,
}

/// Extension of Burn's backends by the operators of this family; the default bodies are the reference.
///
/// No tensor that gets here is empty.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait AttentionOps: MatmulOps + NormOps {
    /// See [`rotate`](super::rotate).
    #[fusion(meta = |x, _cos, _sin| fusion::like(x))]
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::rotate::<Self>(x, cos, sin)
    }

    /// See [`rotate_at`](super::rotate_at).
    #[fusion(meta = |x, _angles, _start, _inverse| fusion::like(x))]
    fn rotate_at(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        start: IntTensor<Self>,
        inverse: bool,
    ) -> FloatTensor<Self> {
        reference::rotate_at::<Self>(x, angles, start, inverse)
    }

    /// See [`sink_attention`](super::sink_attention).
    #[fusion(meta = |queries, _window, _window_bias, _compressed, _sinks, _span, _scale| fusion::like(queries))]
    fn sink_attention(
        queries: FloatTensor<Self>,
        window: FloatTensor<Self>,
        window_bias: FloatTensor<Self>,
        #[extension_type] compressed: CompressedRows<Self>,
        sinks: FloatTensor<Self>,
        span: usize,
        scale: f64,
    ) -> FloatTensor<Self> {
        Problem::<Self> {
            queries,
            window,
            window_bias,
            compressed,
            sinks,
            span,
            scale,
        }
        .output()
    }

    /// See [`sink_probabilities`](super::sink_probabilities): of f32 queries times their scale; `columns` are those of the result.
    #[fusion(meta = |queries, _window, _window_bias, _compressed, _sinks, _span, columns| fusion::probabilities(queries, *columns))]
    fn sink_probabilities(
        queries: FloatTensor<Self>,
        window: FloatTensor<Self>,
        window_bias: FloatTensor<Self>,
        #[extension_type] compressed: CompressedRows<Self>,
        sinks: FloatTensor<Self>,
        span: usize,
        columns: usize,
    ) -> FloatTensor<Self> {
        let probabilities = Problem::<Self> {
            queries,
            window,
            window_bias,
            compressed,
            sinks,
            span,
            scale: 1.0,
        }
        .probabilities();
        debug_assert_eq!(probabilities.shape()[3], columns);
        probabilities
    }

    /// See [`index_scores`](super::index_scores).
    #[fusion(meta = |queries, keys, _weights, _scale, _sight| fusion::scores(queries, keys))]
    fn index_scores(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        scale: f64,
        #[extension_type] sight: BlockSight<Self>,
    ) -> FloatTensor<Self> {
        reference::index_scores::<Self>(queries, keys, weights, scale, sight)
    }

    /// See [`cached_attention`](super::cached_attention).
    #[fusion(meta = |queries, _window, _blocks| fusion::like(&queries.x))]
    fn cached_attention(
        #[extension_type] queries: Queries<Self>,
        window: FloatTensor<Self>,
        #[extension_type] blocks: CachedBlocks<Self>,
    ) -> FloatTensor<Self> {
        reference::cached_attention::<Self>(queries, window, blocks)
    }

    /// See [`append_rows`](super::append_rows).
    #[fusion(meta = |_new, ring| ring.clone())]
    fn append_rows(
        #[extension_type] new: NewRows<Self>,
        ring: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::append_rows::<Self>(new, ring)
    }

    /// See [`pool`](super::pool).
    #[fusion(meta = |values, _scores| fusion::pooled(values))]
    fn pool(values: FloatTensor<Self>, scores: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::pool::<Self>(values, scores)
    }

    /// See [`compress_rows`](super::compress_rows): the raw rows, and the rows.
    #[fusion(meta = |_inputs, raw, rows| (raw.clone(), rows.clone()))]
    fn compress_rows(
        #[extension_type] inputs: Compression<Self>,
        raw: FloatTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::compress_rows::<Self>(inputs, raw, rows)
    }

    /// See [`store_step`](super::store_step).
    #[fusion(meta = fusion::stored)]
    fn store_step(#[extension_type] step: StepRows<Self>) -> StoredStep<Self> {
        reference::store_step::<Self>(step)
    }
}

#[cfg(feature = "flex")]
impl AttentionOps for burn::backend::Flex {}

#[cfg(feature = "cube")]
impl AttentionOps for burn_cubecl::CubeBackend {
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_rotate(&x, &cos) {
            super::launch::rotate(x, cos, sin)
        } else {
            reference::rotate::<Self>(x, cos, sin)
        }
    }

    fn rotate_at(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        start: IntTensor<Self>,
        inverse: bool,
    ) -> FloatTensor<Self> {
        if super::launch::can_rotate_at(&x, &angles, &start) {
            super::launch::rotate_at(x, angles, start, inverse)
        } else {
            reference::rotate_at::<Self>(x, angles, start, inverse)
        }
    }

    fn sink_attention(
        queries: FloatTensor<Self>,
        window: FloatTensor<Self>,
        window_bias: FloatTensor<Self>,
        compressed: CompressedRows<Self>,
        sinks: FloatTensor<Self>,
        span: usize,
        scale: f64,
    ) -> FloatTensor<Self> {
        let problem = Problem::<Self> {
            queries,
            window,
            window_bias,
            compressed,
            sinks,
            span,
            scale,
        };
        if super::launch::can_attend(&problem) {
            super::launch::sink_attention(problem)
        } else {
            problem.output()
        }
    }

    fn index_scores(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        scale: f64,
        sight: BlockSight<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_score(&queries, &keys, &sight) {
            super::launch::index_scores(queries, keys, weights, scale, sight)
        } else {
            reference::index_scores::<Self>(queries, keys, weights, scale, sight)
        }
    }

    fn cached_attention(
        queries: Queries<Self>,
        window: FloatTensor<Self>,
        blocks: CachedBlocks<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_attend_cached(&queries, &window, &blocks) {
            super::launch::cached_attention(queries, window, blocks)
        } else {
            reference::cached_attention::<Self>(queries, window, blocks)
        }
    }

    fn append_rows(new: NewRows<Self>, ring: FloatTensor<Self>) -> FloatTensor<Self> {
        if super::launch::can_append(&new, &ring) {
            super::launch::append_rows(new, ring)
        } else {
            reference::append_rows::<Self>(new, ring)
        }
    }

    fn pool(values: FloatTensor<Self>, scores: FloatTensor<Self>) -> FloatTensor<Self> {
        super::launch::pool(values, scores)
    }

    fn compress_rows(
        inputs: Compression<Self>,
        raw: FloatTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        if super::launch::can_compress(&inputs, &raw, &rows) {
            super::launch::compress_rows(inputs, raw, rows)
        } else {
            reference::compress_rows::<Self>(inputs, raw, rows)
        }
    }

    fn store_step(step: StepRows<Self>) -> StoredStep<Self> {
        if super::launch::can_store(&step) {
            super::launch::store_step(step)
        } else {
            reference::store_step::<Self>(step)
        }
    }
}

/// What fusion has to know about the outputs before the operators run.
#[cfg(feature = "fusion")]
mod fusion {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use super::{
        OptionalCompressionMetadata, OptionalStateMetadata, StepRowsMetadata, StoredStepMetadata,
    };

    pub(super) fn stored(step: &StepRowsMetadata) -> StoredStepMetadata {
        StoredStepMetadata {
            queries: step.queries.clone(),
            ring: step.ring.clone(),
            compressed: state(&step.compressed),
            indexed: state(&step.indexed),
        }
    }

    fn state(of: &OptionalCompressionMetadata) -> OptionalStateMetadata {
        match of {
            OptionalCompressionMetadata::None => OptionalStateMetadata::None,
            OptionalCompressionMetadata::Some { raw, rows, .. } => OptionalStateMetadata::Some {
                raw: raw.clone(),
                rows: rows.clone(),
            },
        }
    }

    pub(super) fn like(queries: &TensorSpec) -> TensorSpec {
        TensorSpec::new(queries.shape.clone(), queries.dtype)
    }

    pub(super) fn probabilities(queries: &TensorSpec, columns: usize) -> TensorSpec {
        let [batch, count, heads, _] = queries.shape.dims();
        TensorSpec::new([batch, count, heads, columns].into(), DType::F32)
    }

    pub(super) fn scores(queries: &TensorSpec, keys: &TensorSpec) -> TensorSpec {
        let shape = [queries.shape[0], queries.shape[1], keys.shape[1]];
        TensorSpec::new(shape.into(), DType::F32)
    }

    pub(super) fn pooled(values: &TensorSpec) -> TensorSpec {
        let shape = [values.shape[0], values.shape[1], values.shape[3]];
        TensorSpec::new(shape.into(), values.dtype)
    }
}
