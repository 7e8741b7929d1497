//! Attention with a sink, for few queries.

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::combine::combine_planes;
use super::heads::{Heads, KV_GROUP, KvGroup};
use super::rotate::RowRotation;
use crate::attention::MASKED;
use crate::caps::Target;
use crate::intrinsics::read_ordered;

/// Compile-time configuration of [`sink_kernel`].
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
    pub sinks: Box<[f32]>,
    pub shape: AttentionShape,
    pub strides: AttentionStrides,
    /// The factor of logits.
    pub scale: f32,
}

#[cube]
impl<F: Float, I: Int, N: Size> AttentionInputs<F, I, N> {
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

/// Computes one softmax over the rows of the window, compressed rows and a sink, which has no
/// value.
///
/// - `window`: query `i` of a sequence attends to `span` rows, which end `count - 1 - i` rows
///   before the last
/// - `rows`: all queries of a sequence attend to the first `selected`, or each has `selected` of
///   its own in `picks`; a pick that is out of range is hidden
/// - `window_bias`, `rows_bias`: `[batch, columns]`, `[batch, count, rows]`
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sink_kernel<F: Float, O: Float, I: Int, N: Size>(
    inputs: &AttentionInputs<F, I, N>,
    window_bias: &[f32],
    rows_bias: &[f32],
    output: &mut PartialOutput<O, N>,
    #[comptime] blueprint: SinkBlueprint,
    #[define(F, O, I)] _dtypes: [ElemType; 3],
) {
    let shape = &inputs.shape;
    let strides = &inputs.strides;
    let token = CUBE_POS_Y;
    let (sequence, query) = shape.query_of(token);
    let first_head = CUBE_POS_X * blueprint.heads;
    let mut heads = Heads::<N>::new::<F, I>(inputs, sequence, query, first_head, blueprint);

    let first_column = shape.columns + 1 - shape.count - shape.span + query;
    let split = KvSplit::new(shape, shape.selected, blueprint);
    let mut first = split.first + UNIT_POS_Y * KV_GROUP;
    while first < min(split.end, shape.span) {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let inside = first + c < shape.span;
            let column = first_column + select(inside, first + c, first);
            let bias = window_bias[(sequence * shape.columns + column) as usize];
            group.biases[c as usize] = select(inside, bias, MASKED);
            group.starts[c as usize] =
                sequence as usize * strides.window_sequence + column as usize * strides.window_row;
        }
        if group.is_visible() {
            heads.attend::<F>(&inputs.window, &group, shape.vectors, inputs.scale);
        }
        first += comptime!(KV_GROUP * blueprint.planes);
    }

    let end = split.row(split.end);
    let mut first = split.row(split.first) + UNIT_POS_Y * KV_GROUP;
    while first < end {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let mut inside = first + c < end;
            let index = select(inside, first + c, first);
            let picked = inputs.pick(token, index);
            inside = inside && picked >= I::from_int(0) && picked < I::cast_from(shape.rows);
            let row = select(inside, u32::cast_from(picked), 0u32) as usize;
            let bias = rows_bias[token as usize * shape.rows as usize + row];
            group.biases[c as usize] = select(inside, bias, MASKED);
            group.starts[c as usize] =
                sequence as usize * strides.rows_sequence + row * strides.row;
        }
        if group.is_visible() {
            heads.attend::<F>(&inputs.rows, &group, shape.vectors, inputs.scale);
        }
        first += comptime!(KV_GROUP * blueprint.planes);
    }

    let rotation = ComptimeOption::<RowRotation>::new_None();
    combine_planes::<O, N>(&heads, &inputs.sinks, &rotation, output, shape, blueprint);
}
