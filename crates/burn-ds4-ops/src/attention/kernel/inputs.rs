//! What kernels of attention take and give.

use cubecl::prelude::*;

use cubecl::std::FastDivmod;

use super::pages::{PageTable, row_start};
use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::read_ordered;

/// Columns that a plane processes together.
pub(crate) const KV_GROUP: u32 = 4;

/// How the kernels for few queries divide their work.
///
/// A cube has a few heads of one query, and one [KV split](KvSplit) of its columns. Its planes take
/// the columns in groups, counted from the first of the window and from the first compressed row.
/// They read every row once, as key and as value, for all heads of the cube. Each plane has a
/// softmax of its own; these are combined in shared memory, plane by plane.
/// [`combine_kernel`](super::combine_kernel) combines the KV splits.
///
/// So nothing but the grid depends on the number of queries, and hidden rows at the end change no
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SinkBlueprint {
    /// Heads of a cube.
    pub heads: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Lanes of a plane.
    pub plane: u32,
    /// Vectors of a row for each lane.
    pub steps: u32,
    /// Whether the lanes' vectors cover a row exactly.
    pub even: bool,
    /// Columns of a KV split: a multiple of [`KV_GROUP`].
    pub split_columns: u32,
    /// Whether there are several KV splits.
    pub multiple_splits: bool,
    /// The instructions that the kernel may use.
    pub target: Target,
}

/// Dimensions of the inputs of attention.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct AttentionShape {
    /// Queries of a sequence, as a number and as a divisor.
    pub count: u32,
    pub count_divisor: FastDivmod<u32>,
    /// Heads of a query.
    pub heads: u32,
    /// Vectors of a row.
    pub vectors: u32,
    /// Rows of a sequence's window, and the number of them that a query attends to.
    pub columns: u32,
    pub span: u32,
    /// Compressed rows of a sequence, and the number of them that a query attends to or picks.
    pub rows: u32,
    pub selected: u32,
}

#[cube]
impl AttentionShape {
    /// The sequence of a token, and the number of its query there.
    pub fn query_of(&self, token: u32) -> (u32, u32) {
        self.count_divisor.div_mod(token)
    }
}

/// Strides in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AttentionStrides {
    pub queries_sequence: usize,
    pub query: usize,
    pub head: usize,
    pub window_sequence: usize,
    pub window_row: usize,
    pub rows_sequence: usize,
    pub row: usize,
}

/// Queries, and what they attend to.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct AttentionInputs<F: Float, I: Int, N: Size> {
    pub queries: Box<[Vector<F, N>]>,
    /// The rows of the window, and compressed rows.
    pub window: Box<[Vector<F, N>]>,
    pub rows: Box<[Vector<F, N>]>,
    /// The compressed rows of each query. Without it, all queries have the first ones.
    pub picks: ComptimeOption<Box<[I]>>,
    /// Of compressed rows, where they are in pages.
    pub pages: ComptimeOption<PageTable>,
    pub sinks: Box<[f32]>,
    pub shape: AttentionShape,
    pub strides: AttentionStrides,
    /// The factor of logits.
    pub scale: f32,
}

#[cube]
impl<F: Float, I: Int, N: Size> AttentionInputs<F, I, N> {
    /// The offset of a compressed row that a sequence has.
    pub fn row_start(&self, sequence: u32, row: u32) -> usize {
        let strides = &self.strides;
        row_start(
            &self.pages,
            sequence,
            row,
            strides.rows_sequence,
            strides.row,
        )
    }

    /// A query's compressed row number `index`, which may be out of range.
    pub fn pick(&self, token: u32, index: u32) -> I {
        let at = token as usize * self.shape.selected as usize + index as usize;
        let picked: ComptimeOption<I> = self.picks.as_ref().map(|picks| picks[at]);
        picked.unwrap_or_else(|| I::cast_from(index))
    }

    /// [`pick`](Self::pick), requested in the order of the code.
    pub fn pick_in_order(&self, token: u32, index: u32, #[comptime] target: Target) -> I {
        let at = token as usize * self.shape.selected as usize + index as usize;
        let picked: ComptimeOption<I> = self
            .picks
            .as_ref()
            .map(|picks| read_ordered(&picks[..], at, target));
        picked.unwrap_or_else(|| I::cast_from(index))
    }
}

/// What heads attended to: with one KV split, the results, otherwise the partials of all splits.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PartialOutput<O: Float, N: Size> {
    /// `[batch, count, heads, vectors]`; with several KV splits, the sums of each relative to its
    /// largest logit, in f32.
    pub sums: Box<[Vector<O, N>]>,
    /// With several KV splits, their largest logits and then their sums of exponentials:
    /// `[2, splits, batch, count, heads]`.
    pub softmax_stats: Box<[f32]>,
}

/// The part of a query's columns that a cube processes. Columns are those of the window, padded to
/// a whole group, and then the compressed rows; splits have equal length.
#[derive(CubeType)]
pub(super) struct KvSplit {
    /// The first column, and the end.
    pub first: u32,
    pub end: u32,
    /// The first column that is a compressed row.
    pub first_compressed: u32,
}

#[cube]
impl KvSplit {
    /// The split of this cube, for `selected` compressed rows.
    pub fn new(
        shape: &AttentionShape,
        selected: u32,
        #[comptime] blueprint: SinkBlueprint,
    ) -> KvSplit {
        let first_compressed = (shape.span + comptime!(KV_GROUP - 1)) / KV_GROUP * KV_GROUP;
        let first = CUBE_POS_Z * blueprint.split_columns;
        KvSplit {
            first,
            end: min(first + blueprint.split_columns, first_compressed + selected),
            first_compressed,
        }
    }

    /// The compressed row of a column, or the first one for a column of the window.
    pub fn row(&self, column: u32) -> u32 {
        max(column, self.first_compressed) - self.first_compressed
    }
}
