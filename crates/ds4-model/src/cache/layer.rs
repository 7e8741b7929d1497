//! What a cache has of one layer.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::attention::{CompressorState, PagedRows};

use super::pool::PoolRows;
use super::ring::Ring;
use crate::config::AttentionKind;

/// Compressed rows.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a compressor has one of these")]
pub(crate) enum Rows {
    /// Of the sequences of this cache: `[batch, rows, width]`.
    Own(Ring),
    /// In pages, of which a sequence has so many rows at most.
    Paged(PoolRows, usize),
}

impl Rows {
    /// Those that are not in pages.
    fn own(&self) -> Option<&Ring> {
        match self {
            Self::Own(ring) => Some(ring),
            Self::Paged(..) => None,
        }
    }

    pub(super) fn own_mut(&mut self) -> Option<&mut Ring> {
        match self {
            Self::Own(ring) => Some(ring),
            Self::Paged(..) => None,
        }
    }
}

/// Rows and raw projections of one compressor.
#[derive(Clone, Debug)]
pub(crate) struct CompressedCache {
    pub(crate) rows: Rows,
    /// Raw projections of the newest positions, values then scores: f32
    /// `[batch, slots, 2 · series · width]`. `None` where no row depends on earlier calls.
    pub(crate) raw: Option<Ring>,
}

impl CompressedCache {
    /// Rows that a sequence may have.
    pub(crate) fn slots(&self) -> usize {
        match &self.rows {
            Rows::Own(ring) => ring.slots(),
            Rows::Paged(_, slots) => *slots,
        }
    }

    /// The first rows of every sequence, at least so many, as operators take them.
    pub(crate) fn first(&self, count: usize, pages: Option<&Tensor<2, Int>>) -> PagedRows {
        let rows = match &self.rows {
            Rows::Own(ring) => return ring.first(count).into(),
            Rows::Paged(rows, _) => rows.all(),
        };
        let [_, of_page, _] = rows.dims();
        let pages = pages.expect("the pages of a step").clone();
        let used = count.div_ceil(of_page);
        let pages = match used == pages.dims()[1] {
            true => pages,
            false => pages.narrow(1, 0, used),
        };
        PagedRows {
            rows,
            pages: Some(pages),
        }
    }

    /// The first rows of every sequence, one after the other: `[batch, count, width]`.
    pub(crate) fn in_order(&self, count: usize, pages: Option<&Tensor<2, Int>>) -> Tensor<3> {
        let PagedRows { rows, pages } = self.first(count, pages);
        let Some(pages) = pages else {
            return rows;
        };
        let ([_, of_page, width], [batch, used]) = (rows.dims(), pages.dims());
        let rows = rows.select(0, pages.reshape([batch * used]));
        let rows = rows.reshape([batch, used * of_page, width]);
        rows.narrow(1, 0, count)
    }

    /// Takes the tensors for an operation that returns them through [`put`](Self::put).
    pub(crate) fn take(&mut self) -> CompressorState {
        CompressorState {
            rows: self.take_rows(),
            raw: self.raw_mut().take(),
        }
    }

    /// Puts back what was taken for an operation.
    pub(crate) fn put(&mut self, state: CompressorState) {
        self.raw_mut().put(state.raw);
        self.put_rows(state.rows);
    }

    /// Takes the rows alone.
    pub(crate) fn take_rows(&mut self) -> Tensor<3> {
        match &mut self.rows {
            Rows::Own(ring) => ring.take(),
            Rows::Paged(rows, _) => rows.take(),
        }
    }

    /// Puts back the rows alone.
    pub(crate) fn put_rows(&mut self, all: Tensor<3>) {
        match &mut self.rows {
            Rows::Own(ring) => ring.put(all),
            Rows::Paged(rows, _) => rows.put(all),
        }
    }

    /// The raw projections of a compressor that pools several positions.
    pub(crate) fn raw_mut(&mut self) -> &mut Ring {
        self.raw
            .as_mut()
            .expect("a compressor of several positions")
    }
}

/// State of one attention layer.
#[derive(Clone, Debug)]
pub struct LayerCache {
    pub(crate) kind: AttentionKind,
    /// Key/value rows of the newest positions: `[batch, slots, head_dim]`.
    pub(crate) window: Ring,
    pub(crate) compressed: Option<CompressedCache>,
    pub(crate) indexer: Option<CompressedCache>,
}

impl LayerCache {
    pub(super) fn compressors(&self) -> impl Iterator<Item = &CompressedCache> {
        [&self.compressed, &self.indexer].into_iter().flatten()
    }

    pub(super) fn compressors_mut(&mut self) -> impl Iterator<Item = &mut CompressedCache> {
        let compressed = [&mut self.compressed, &mut self.indexer];
        compressed.into_iter().flatten()
    }

    /// All rings that are not in pages.
    pub(super) fn rings(&self) -> impl Iterator<Item = &Ring> {
        let compressed = self.compressors().flat_map(|cache| {
            let rows = cache.rows.own();
            rows.into_iter().chain(&cache.raw)
        });
        std::iter::once(&self.window).chain(compressed)
    }

    pub(super) fn rings_mut(&mut self) -> impl Iterator<Item = &mut Ring> {
        let compressed = [&mut self.compressed, &mut self.indexer];
        let compressed = compressed.into_iter().flatten();
        let compressed = compressed.flat_map(|cache| {
            let rows = cache.rows.own_mut();
            rows.into_iter().chain(&mut cache.raw)
        });
        std::iter::once(&mut self.window).chain(compressed)
    }

    /// The rings that wrap around. Compressed rows stay in place.
    pub(super) fn wrapping(&self) -> impl Iterator<Item = &Ring> {
        let raw = self.compressors().flat_map(|cache| &cache.raw);
        std::iter::once(&self.window).chain(raw)
    }

    pub(super) fn wrapping_mut(&mut self) -> impl Iterator<Item = &mut Ring> {
        let compressed = [&mut self.compressed, &mut self.indexer];
        let compressed = compressed.into_iter().flatten();
        std::iter::once(&mut self.window).chain(compressed.flat_map(|cache| &mut cache.raw))
    }

    /// The compressed rows that are not in pages.
    pub(super) fn own_rows(&self) -> impl Iterator<Item = &Ring> {
        self.compressors().filter_map(|cache| cache.rows.own())
    }

    pub(super) fn own_rows_mut(&mut self) -> impl Iterator<Item = &mut Ring> {
        self.compressors_mut()
            .filter_map(|cache| cache.rows.own_mut())
    }
}
