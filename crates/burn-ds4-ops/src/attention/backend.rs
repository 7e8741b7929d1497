#![allow(
    clippy::large_enum_variant,
    reason = "a call makes one of these, and backend extensions take no box"
)]

use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension};

use super::reference::{self, SinkInputs};
use super::{CompressedKeys, Positions, RowRounding, WindowLayout};
use crate::matmul::MatmulOps;
use crate::norm::NormOps;

/// [`CompressedKeys`] as passed to a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum CompressedRows<B: Backend> {
    /// There are none.
    None,
    /// All queries of a sequence attend to the same rows.
    Shared {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// `[batch, queries, rows]`.
        bias: FloatTensor<B>,
    },
    /// Every query attends to rows of its own.
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

/// The compressed rows of a cache as passed to a backend, one for each block of `ratio` positions.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum CachedBlocks<B: Backend> {
    /// There are none.
    None,
    /// Queries attend to all rows whose blocks are complete.
    All {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// Positions of a block.
        ratio: usize,
        /// Whether queries get the same bits as with picks that are all rows in order.
        picking: bool,
    },
    /// Queries attend to those of their picks whose blocks are complete.
    Picked {
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
        /// `[batch, queries, picks]`.
        picks: IntTensor<B>,
        /// Positions of a block.
        ratio: usize,
    },
}

/// The queries of [`cached_attention`](super::cached_attention), as passed to a backend.
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
    /// Epsilon of the norm.
    pub epsilon: f64,
    /// Positions of the window that a query attends to.
    pub span: usize,
    /// The order of the window's rows.
    pub layout: WindowLayout,
    /// Whether it attends up to its own position.
    pub causal: bool,
    /// Factor of the logits.
    pub scale: f64,
}

#[cfg(feature = "cube")]
impl<B: Backend> Queries<B> {
    /// Rows of the window that a query attends to.
    pub(super) fn columns(&self) -> usize {
        match self.causal {
            true => self.span,
            false => self.span + self.x.shape()[1] - 1,
        }
    }
}

/// The inputs of [`append_rows`](super::append_rows), as passed to a backend.
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
    /// Epsilon of the norm.
    pub epsilon: f64,
    /// How a row is rounded before it is stored.
    pub rounding: RowRounding,
}

/// The blocks that are visible to queries, as passed to a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum BlockVisibility<B: Backend> {
    /// All of them.
    All,
    /// Blocks of `ratio` positions that are complete at the position of the query. The positions of
    /// a sequence's queries begin at its `start`.
    From {
        /// `[batch]`.
        start: IntTensor<B>,
        /// Positions of a block.
        ratio: usize,
    },
}

/// The rotation of queries, as passed to a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum QueryRotation<B: Backend> {
    /// None.
    None,
    /// By the angles of consecutive positions from `start` on.
    At {
        /// `[positions, rotated]`.
        angles: FloatTensor<B>,
        /// `[batch]`.
        start: IntTensor<B>,
    },
}

impl From<Option<Positions>> for QueryRotation<Dispatch> {
    /// A table of no channels rotates nothing.
    fn from(positions: Option<Positions>) -> Self {
        match positions.filter(|positions| positions.angles.dims()[1] > 0) {
            None => Self::None,
            Some(Positions { angles, start }) => Self::At {
                angles: angles.into_dispatch(),
                start: start.into_dispatch(),
            },
        }
    }
}

impl<B: AttentionOps> QueryRotation<B> {
    /// Rotates queries by themselves.
    pub(super) fn rotate(self, queries: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::None => queries,
            Self::At { angles, start } => B::rotate_at(queries, angles, start, false),
        }
    }
}

/// The inputs of [`compress_rows`](super::compress_rows), as passed to a backend.
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
    /// Epsilon of the norm.
    pub epsilon: f64,
    /// Positions of a block.
    pub ratio: usize,
    /// Whether a row also pools the block before its own.
    pub overlap: bool,
    /// How a row is rounded before it is stored.
    pub rounding: RowRounding,
}

/// A compressor of [`StepRows`], if the layer has one.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalCompression<B: Backend> {
    /// The layer has none.
    None,
    /// The layer has one.
    Some {
        /// Its inputs, at the positions of [`StepRows::new`].
        #[extension_type]
        inputs: Compression<B>,
        /// `[batch, slots, raw width]`.
        raw: FloatTensor<B>,
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
    },
}

/// The state that a compressor of [`StepRows`] updated.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum OptionalState<B: Backend> {
    /// There was no compressor.
    None,
    /// There was one.
    Some {
        /// `[batch, slots, raw width]`.
        raw: FloatTensor<B>,
        /// `[batch, rows, width]`.
        rows: FloatTensor<B>,
    },
}

/// The inputs of [`store_step`](super::store_step) and the tensors it updates, as passed to a
/// backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StepRows<B: Backend> {
    /// `[batch, count, rank]`.
    pub queries: FloatTensor<B>,
    /// `[rank]`.
    pub norm: FloatTensor<B>,
    /// Epsilon of the norm.
    pub epsilon: f64,
    /// The new key/value rows.
    #[extension_type]
    pub new: NewRows<B>,
    /// `[batch, slots, width]`.
    pub ring: FloatTensor<B>,
    /// The compressor of key/value rows.
    #[extension_type]
    pub compressed: OptionalCompression<B>,
    /// The compressor of the indexer.
    #[extension_type]
    pub indexed: OptionalCompression<B>,
}

/// The results of [`store_step`](super::store_step), as passed by a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StoredStep<B: Backend> {
    /// `[batch, count, rank]`.
    pub queries: FloatTensor<B>,
    /// `[batch, slots, width]`.
    pub ring: FloatTensor<B>,
    /// The state of the compressor of key/value rows.
    #[extension_type]
    pub compressed: OptionalState<B>,
    /// The state of the indexer's compressor.
    #[extension_type]
    pub indexed: OptionalState<B>,
}

/// Extends Burn's backends by the operators of this family. The default bodies are the reference.
///
/// No tensor that is passed to them is empty.
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
    #[fusion(
        meta = |queries, _window, _window_bias, _compressed, _sinks, _span, _scale|
            fusion::like(queries)
    )]
    fn sink_attention(
        queries: FloatTensor<Self>,
        window: FloatTensor<Self>,
        window_bias: FloatTensor<Self>,
        #[extension_type] compressed: CompressedRows<Self>,
        sinks: FloatTensor<Self>,
        span: usize,
        scale: f64,
    ) -> FloatTensor<Self> {
        SinkInputs::<Self> {
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

    /// See [`sink_probabilities`](super::sink_probabilities). Takes f32 queries that are already
    /// multiplied by the scale; `columns` is the number of columns of the result.
    #[fusion(
        meta = |queries, _window, _window_bias, _compressed, _sinks, _span, columns|
            fusion::probabilities(queries, *columns)
    )]
    fn sink_probabilities(
        queries: FloatTensor<Self>,
        window: FloatTensor<Self>,
        window_bias: FloatTensor<Self>,
        #[extension_type] compressed: CompressedRows<Self>,
        sinks: FloatTensor<Self>,
        span: usize,
        columns: usize,
    ) -> FloatTensor<Self> {
        let probabilities = SinkInputs::<Self> {
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
    #[fusion(meta = |queries, keys, _weights, _scale, _visibility, _rotation| {
        fusion::scores(queries, keys)
    })]
    fn index_scores(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        scale: f64,
        #[extension_type] visibility: BlockVisibility<Self>,
        #[extension_type] rotation: QueryRotation<Self>,
    ) -> FloatTensor<Self> {
        let queries = rotation.rotate(queries);
        reference::index_scores::<Self>(queries, keys, weights, scale, visibility)
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

    /// See [`compress_rows`](super::compress_rows). Returns the raw rows and the compressed rows.
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
impl AttentionOps for burn::backend::Flex {
    /// The positions are in the host's memory: reading them costs nothing, and no row is read that
    /// its query does not see.
    fn index_scores(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        scale: f64,
        visibility: BlockVisibility<Self>,
        rotation: QueryRotation<Self>,
    ) -> FloatTensor<Self> {
        let queries = rotation.rotate(queries);
        reference::index_scores_by_query::<Self>(queries, keys, weights, scale, visibility)
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
        let inputs = SinkInputs::<Self> {
            queries,
            window,
            window_bias,
            compressed,
            sinks,
            span,
            scale,
        };
        if super::launch::can_attend(&inputs) {
            super::launch::sink_attention(inputs)
        } else if super::launch::can_attend_many(&inputs) {
            super::launch::sink_attention_of_many(inputs)
        } else {
            inputs.output()
        }
    }

    fn index_scores(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        scale: f64,
        visibility: BlockVisibility<Self>,
        rotation: QueryRotation<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_score(&queries, &keys, &visibility) {
            super::launch::index_scores(queries, keys, weights, scale, visibility, rotation)
        } else {
            let queries = rotation.rotate(queries);
            reference::index_scores::<Self>(queries, keys, weights, scale, visibility)
        }
    }

    fn cached_attention(
        queries: Queries<Self>,
        window: FloatTensor<Self>,
        blocks: CachedBlocks<Self>,
    ) -> FloatTensor<Self> {
        if super::launch::can_attend_cached(&queries, &window, &blocks) {
            super::launch::cached_attention(queries, window, blocks)
        } else if super::launch::can_attend_prompt(&queries, &window, &blocks) {
            super::launch::attend_prompt(queries, window, blocks)
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

/// The shapes and dtypes of outputs, which fusion needs before the operators run.
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
