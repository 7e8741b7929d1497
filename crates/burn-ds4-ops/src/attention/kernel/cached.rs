//! Attention with a sink, for few queries, over the rows of a cache.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::combine::combine_planes;
use super::heads::{Heads, KV_GROUP, KvGroup};
use super::rotate::{Positions, RowRotation};
use super::sink::{AttentionInputs, KvSplit, PartialOutput, SinkBlueprint};
use super::visibility::{CacheLayout, Visibility};
use crate::attention::MASKED;
use crate::intrinsics::{await_copies, commit_copies};

/// Compile-time configuration of [`cached_kernel`]: as of [`sink_kernel`](super::sink_kernel), and
/// the vectors in front of queries and results that are not rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedBlueprint {
    pub sink: SinkBlueprint,
    pub unrotated: u32,
    /// Whether a query attends up to its own position. Otherwise the span of all of them ends with
    /// the last query.
    pub causal: bool,
    /// Groups of rows of a plane that are copied to shared memory before the query is prepared, all
    /// of them, or none: as many as a plane can have, and at most [`MAX_STAGED_GROUPS`]. Rows are
    /// of 16-bit floats, in vectors of 16 bytes of which all lanes have as many.
    pub staged_groups: u32,
}

impl CachedBlueprint {
    /// Vectors of all planes that are in shared memory.
    pub const fn staged_vectors(self) -> usize {
        let rows = self.sink.planes * self.staged_groups * KV_GROUP;
        (rows * self.sink.steps * self.sink.plane) as usize
    }
}

/// Groups whose visible rows fit the bits of a word.
pub(crate) const MAX_STAGED_GROUPS: u32 = u32::BITS / KV_GROUP;

/// Queries as they were projected, and the rows of a cache.
///
/// - in `attention.window`, the row of a position is in slot `position % shape.columns`, or the
///   last row is that of the last query
/// - in `attention.rows`, row `r` is visible from position `(r + 1) * layout.ratio - 1` on
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CachedInputs<F: Float, I: Int, P: Int, N: Size> {
    pub attention: AttentionInputs<F, I, N>,
    /// The positions of first queries. A sequence whose start is outside the table is vacant:
    /// nothing is visible to it.
    pub positions: Positions<P>,
    pub layout: CacheLayout,
    /// Epsilon of the norm of queries.
    pub epsilon: f32,
}

/// Computes [`sink_kernel`](super::sink_kernel) for queries as they were projected, over rows that
/// are located, and are visible, by position. The KV splits are the same, counted from the first
/// position of a query's window and from the first block.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn cached_kernel<F: Float, O: Float, I: Int, P: Int, N: Size>(
    inputs: &CachedInputs<F, I, P, N>,
    output: &mut PartialOutput<O, N>,
    #[comptime] blueprint: CachedBlueprint,
    #[define(F, O, I, P)] _dtypes: [ElemType; 4],
) {
    let sink = comptime!(blueprint.sink);
    let attention = &inputs.attention;
    let shape = &attention.shape;
    let table = &inputs.positions.table;
    let token = CUBE_POS_Y;
    let first_head = CUBE_POS_X * sink.heads;
    let visibility = Visibility::new::<P>(
        &inputs.positions,
        token,
        &inputs.layout,
        shape,
        blueprint.causal,
    );
    let mut selected = shape.selected;
    if attention.picks.as_ref().is_none() {
        selected = min(selected, visibility.visible_rows);
    }
    let split = KvSplit::new(shape, selected, sink);
    let (sequence, query) = (visibility.sequence, visibility.query);
    let mut heads = Heads::<N>::new::<F, I>(attention, sequence, query, first_head, sink);
    let rotation = RowRotation::new(table, visibility.angle, blueprint.unrotated);
    let stride = comptime!(KV_GROUP * sink.planes);
    let own = UNIT_POS_Y * KV_GROUP;
    let is_staged = comptime!(blueprint.staged_groups > 0);
    let mut staged = StagedRows::<F, N>::new(blueprint);
    if comptime!(!is_staged) {
        heads.normalize_and_rotate(&rotation, shape.vectors, inputs.epsilon);
    }
    let mut first = split.first + own;
    while first < min(split.end, shape.span) {
        let group = window_group(inputs, &visibility, first);
        if group.is_visible() {
            if comptime!(is_staged) {
                staged.copy(&attention.window, &group);
            } else {
                heads.attend::<F>(&attention.window, &group, shape.vectors, attention.scale);
            }
        }
        first += stride;
    }
    let mut first = split.row(split.first) + own;
    while first < split.row(split.end) {
        let group = compressed_group(inputs, &visibility, first, split.row(split.end));
        if group.is_visible() {
            if comptime!(is_staged) {
                staged.copy(&attention.rows, &group);
            } else {
                heads.attend::<F>(&attention.rows, &group, shape.vectors, attention.scale);
            }
        }
        first += stride;
    }
    if comptime!(is_staged) {
        commit_copies();
        heads.normalize_and_rotate(&rotation, shape.vectors, inputs.epsilon);
        await_copies(0u32);
        for index in 0..staged.count {
            let group = staged.group(index);
            heads.attend::<F>(&staged.rows[..], &group, shape.vectors, attention.scale);
        }
    }

    let rotation = ComptimeOption::new_Some(rotation);
    combine_planes::<O, N>(&heads, &attention.sinks, &rotation, output, shape, sink);
}

/// The rows of the window from column `first` on.
#[cube]
fn window_group<F: Float, I: Int, P: Int, N: Size>(
    inputs: &CachedInputs<F, I, P, N>,
    visibility: &Visibility,
    first: u32,
) -> KvGroup {
    let (shape, strides) = (&inputs.attention.shape, &inputs.attention.strides);
    let mut group = KvGroup::new();
    #[unroll]
    for c in 0..KV_GROUP {
        let slot = visibility.slot(first + c, shape) as usize;
        group.biases[c as usize] = select(visibility.is_visible(first + c, shape), 0.0f32, MASKED);
        group.starts[c as usize] =
            visibility.sequence as usize * strides.window_sequence + slot * strides.window_row;
    }
    group
}

/// The compressed rows from number `first` up to `end` of those that the query attends to.
#[cube]
fn compressed_group<F: Float, I: Int, P: Int, N: Size>(
    inputs: &CachedInputs<F, I, P, N>,
    visibility: &Visibility,
    first: u32,
    end: u32,
) -> KvGroup {
    let strides = &inputs.attention.strides;
    let mut group = KvGroup::new();
    #[unroll]
    for c in 0..KV_GROUP {
        let mut inside = first + c < end;
        let index = select(inside, first + c, first);
        let picked = inputs.attention.pick(CUBE_POS_Y, index);
        inside =
            inside && picked >= I::from_int(0) && picked < I::cast_from(visibility.visible_rows);
        let row = select(inside, u32::cast_from(picked), 0u32) as usize;
        group.biases[c as usize] = select(inside, 0.0f32, MASKED);
        group.starts[c as usize] =
            visibility.sequence as usize * strides.rows_sequence + row * strides.row;
    }
    group
}

/// The rows of a plane in shared memory. Each lane reads what it has copied itself.
#[derive(CubeType)]
struct StagedRows<F: Float, N: Size> {
    rows: Shared<[Vector<F, N>]>,
    /// Groups with a visible row, and a bit for each of their rows that is visible.
    count: u32,
    visible: u32,
    #[cube(comptime)]
    blueprint: CachedBlueprint,
}

#[cube]
impl<F: Float, N: Size> StagedRows<F, N> {
    fn new(#[comptime] blueprint: CachedBlueprint) -> StagedRows<F, N> {
        StagedRows::<F, N> {
            rows: Shared::new_slice(comptime!(blueprint.staged_vectors().max(1))),
            count: 0u32.runtime(),
            visible: 0u32.runtime(),
            blueprint,
        }
    }

    /// The first vector of row `row` of this plane.
    fn start(&self, row: u32) -> usize {
        let vectors = comptime!(self.blueprint.sink.steps * self.blueprint.sink.plane);
        let plane_rows = comptime!(self.blueprint.staged_groups * KV_GROUP);
        ((UNIT_POS_Y * plane_rows + row) * vectors) as usize
    }

    /// Begins to copy the rows of a group with a visible row.
    fn copy(&mut self, source: &[Vector<F, N>], group: &KvGroup) {
        let sink = comptime!(self.blueprint.sink);
        #[unroll]
        for c in 0..KV_GROUP {
            let row = self.count * KV_GROUP + c;
            let to = self.start(row) + UNIT_POS_X as usize;
            let from = group.starts[c as usize] + UNIT_POS_X as usize;
            #[unroll]
            for step in 0..sink.steps {
                let ahead = comptime!((step * sink.plane) as usize);
                let (from, to) = (from + ahead, to + ahead);
                copy_async(&source[from..from + 1], &mut self.rows[to..to + 1], 8u32);
            }
            let is_visible = group.biases[c as usize] == 0.0f32;
            self.visible |= select(is_visible, 1u32, 0u32) << row;
        }
        self.count += 1;
    }

    /// The rows of group `index` that were copied.
    fn group(&self, index: u32) -> KvGroup {
        let mut group = KvGroup::new();
        #[unroll]
        for c in 0..KV_GROUP {
            let row = index * KV_GROUP + c;
            let is_visible = self.visible >> row & 1u32 == 1u32;
            group.biases[c as usize] = select(is_visible, 0.0f32, MASKED);
            group.starts[c as usize] = self.start(row);
        }
        group
    }
}
