//! The arguments of the operators, as backends, launches and references share them.
#![allow(
    clippy::large_enum_variant,
    reason = "a call makes one of these, and backend extensions take no box"
)]

use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Backend, ExtensionType, TensorMetadata};

use super::options::{RowRounding, WindowLayout};
use crate::optional::OptionalInt;

/// [`CompressedKeys`](super::CompressedKeys) as passed to a backend.
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

/// The inputs of [`sink_attention`](super::sink_attention), as passed to a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct SinkInputs<B: Backend> {
    /// `[batch, count, heads, width]`.
    pub queries: FloatTensor<B>,
    /// `[batch, columns, width]`.
    pub window: FloatTensor<B>,
    /// `[batch, columns]`.
    pub window_bias: FloatTensor<B>,
    /// The compressed rows.
    #[extension_type]
    pub compressed: CompressedRows<B>,
    /// `[heads]`.
    pub sinks: FloatTensor<B>,
    /// Rows of the window that a query attends to.
    pub span: usize,
    /// Factor of the logits.
    pub scale: f64,
}

/// [`PagedRows`](super::PagedRows) as passed to a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct PagedRows<B: Backend> {
    /// `[batch, rows, width]`, or `[pages, rows of a page, width]`.
    pub rows: FloatTensor<B>,
    /// `[batch, pages of a sequence]`.
    #[extension_type]
    pub pages: OptionalInt<B>,
}

#[cfg(any(feature = "flex", feature = "cube"))]
impl<B: Backend> PagedRows<B> {
    /// Rows of a sequence.
    pub(super) fn count(&self) -> usize {
        let rows = self.rows.shape()[1];
        let pages = self.pages.as_ref().map_or(1, |pages| pages.shape()[1]);
        rows * pages
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
        /// The rows.
        #[extension_type]
        rows: PagedRows<B>,
        /// Positions of a block.
        ratio: usize,
        /// Whether queries get the same bits as with picks that are all rows in order.
        picking: bool,
    },
    /// Queries attend to those of their picks whose blocks are complete.
    Picked {
        /// The rows.
        #[extension_type]
        rows: PagedRows<B>,
        /// `[batch, queries, picks]`.
        picks: IntTensor<B>,
        /// Positions of a block.
        ratio: usize,
    },
}

impl<B: Backend> CachedBlocks<B> {
    /// The rows, if there are any, the picks among them, and the positions of a block.
    #[cfg(any(feature = "flex", feature = "cube"))]
    pub(super) fn parts(&self) -> (Option<&PagedRows<B>>, Option<&IntTensor<B>>, usize) {
        match self {
            Self::None => (None, None, 1),
            Self::All { rows, ratio, .. } => (Some(rows), None, *ratio),
            Self::Picked { rows, picks, ratio } => (Some(rows), Some(picks), *ratio),
        }
    }

    /// The number of rows of a sequence, and of those that a query attends to or picks.
    #[cfg(feature = "cube")]
    pub(super) fn counts(&self) -> [usize; 2] {
        let (rows, picks, _) = self.parts();
        let all = rows.map_or(0, PagedRows::count);
        [all, picks.map_or(all, |picks| picks.shape()[2])]
    }
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
    /// Epsilon of the norm, if there is one.
    pub epsilon: Option<f64>,
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

/// The inputs of [`index_scores`](super::index_scores), as passed to a backend.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct IndexInputs<B: Backend> {
    /// `[batch, count, heads, width]`.
    pub queries: FloatTensor<B>,
    /// The rows that get scores.
    #[extension_type]
    pub keys: PagedRows<B>,
    /// `[batch, count, heads]`.
    pub weights: FloatTensor<B>,
    /// Factor of the scores.
    pub scale: f64,
    /// The blocks that get a score.
    #[extension_type]
    pub visibility: BlockVisibility<B>,
    /// What is to be done to the queries before.
    #[extension_type]
    pub rotation: QueryRotation<B>,
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
    /// Of the compressed rows: `[batch, pages of a sequence]`.
    #[extension_type]
    pub pages: OptionalInt<B>,
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
