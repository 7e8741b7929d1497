//! Attention with a sink, for few queries, over the rows of a cache.

use cubecl::prelude::*;

use super::angles::{RowSteps, UnitAngles};
use super::combine::combine_planes;
use super::head_tiles::{HeadTiles, LANES, TILE_PLANES};
use super::heads::{Heads, KvGroup};
use super::inputs::{AttentionInputs, KV_GROUP, KvSplit, PartialOutput, SinkBlueprint};
use super::rotate::{Positions, RowRotation};
use super::visibility::{CacheLayout, Visibility};
use crate::attention::options::MASKED;
use crate::comptime_option::ComptimeOption;

/// Compile-time configuration of [`cached_kernel`]: how work is divided, and the vectors in front
/// of queries and results that are not rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedBlueprint {
    pub sink: SinkBlueprint,
    pub unrotated: u32,
    /// Whether a query attends up to its own position. Otherwise the span of all of them ends with
    /// the last query.
    pub causal: bool,
    /// Whether [`Masks`] say what is visible, and queries are neither normalised nor rotated.
    pub masked: bool,
}

impl CachedBlueprint {
    /// How the lanes of a plane share a query.
    pub(super) fn row_steps(&self) -> RowSteps {
        RowSteps {
            steps: self.sink.steps,
            units: self.sink.plane,
            unrotated: self.unrotated,
            target: self.sink.target,
        }
    }
}

/// Compile-time configuration of [`cached_tiles_kernel`](super::cached_tiles_kernel). For clusters,
/// the block of the tiles has at least two columns for each of their heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CachedTilesBlueprint {
    pub cached: CachedBlueprint,
    pub tiles: HeadTiles,
    /// Cubes that share the columns of a query, each of them a KV split: at most 8, which can be a
    /// cluster anywhere, by which the heads of a tile can be divided.
    pub kv_cubes: u32,
    /// Whether these cubes are a cluster.
    pub in_cluster: bool,
    /// Blocks whose rows are in shared memory at the same time: 1, or 2 for many queries.
    pub stages: u32,
    /// Whether a cube has all columns of a query, one of many.
    pub whole: bool,
}

impl CachedTilesBlueprint {
    /// Pairs of channels of a head.
    pub(super) const fn head_pairs(&self) -> u32 {
        4 * self.tiles.vectors
    }

    /// Heads of which a cube of a cluster has the results.
    pub(super) const fn result_heads(&self) -> u32 {
        self.tiles.heads() / self.kv_cubes
    }

    /// Units that share the results of a head, and the pairs of each.
    pub(super) const fn head_units(&self) -> u32 {
        LANES * TILE_PLANES / self.result_heads()
    }

    pub(super) const fn unit_pairs(&self) -> u32 {
        self.head_pairs().div_ceil(self.head_units())
    }

    /// How they share them.
    pub(super) fn result_steps(&self) -> RowSteps {
        RowSteps {
            steps: self.unit_pairs(),
            units: self.head_units(),
            unrotated: 4 * self.cached.unrotated,
            target: self.tiles.target,
        }
    }
}

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
    /// In place of positions, layout and epsilon, which nothing reads then.
    pub masks: ComptimeOption<Masks>,
}

/// Biases of rows.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Masks {
    /// `[batch, columns]`.
    pub window: Box<[f32]>,
    /// `[batch, count, rows]`.
    pub rows: Box<[f32]>,
}

#[cube]
impl<F: Float, I: Int, P: Int, N: Size> CachedInputs<F, I, P, N> {
    /// What is visible to query number `token`.
    pub fn visibility(&self, token: u32, #[comptime] blueprint: CachedBlueprint) -> Visibility {
        let shape = &self.attention.shape;
        if comptime!(blueprint.masked) {
            Visibility::of_masks(shape, token)
        } else {
            Visibility::new::<P>(
                &self.positions,
                token,
                &self.layout,
                shape,
                blueprint.causal,
                blueprint.sink.target,
            )
        }
    }

    /// The bias of the row in a slot of the window, if it is visible.
    pub fn window_bias(&self, visibility: &Visibility, slot: u32) -> f32 {
        let mut bias = 0.0f32;
        #[comptime]
        if let ComptimeOption::Some(masks) = &self.masks {
            let at = visibility.sequence * self.attention.shape.columns + slot;
            bias = masks.window[at as usize];
        }
        bias
    }

    /// The bias of a compressed row, if it is visible.
    pub fn row_bias(&self, visibility: &Visibility, row: u32) -> f32 {
        let mut bias = 0.0f32;
        #[comptime]
        if let ComptimeOption::Some(masks) = &self.masks {
            let shape = &self.attention.shape;
            let token = visibility.sequence * shape.count + visibility.query;
            bias = masks.rows[token as usize * shape.rows as usize + row as usize];
        }
        bias
    }
}

/// Computes one softmax over the rows of the window, compressed rows and a sink without a value.
///
/// Queries are as they were projected, and rows are located, and visible, by position; or by masks,
/// for queries that are neither normalised nor rotated. All queries of a sequence attend to the
/// first `selected` compressed rows, or each has `selected` of its own in `picks`; a pick that is
/// out of range is hidden. KV splits are counted from the first column of a query's window and from
/// the first compressed row.
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
    let visibility = inputs.visibility(token, blueprint);
    let mut selected = shape.selected;
    if attention.picks.as_ref().is_none() {
        selected = min(selected, visibility.visible_rows);
    }
    let split = KvSplit::new(shape, selected, sink);
    let (sequence, query) = (visibility.sequence, visibility.query);
    let mut heads = Heads::<N>::new::<F, I>(attention, sequence, query, first_head, sink);
    let mut angles = UnitAngles::<N>::new(blueprint.row_steps());
    let rotation = if comptime!(blueprint.masked) {
        ComptimeOption::<RowRotation>::new_None()
    } else {
        angles.request(table, visibility.angle, UNIT_POS_X, shape.vectors);
        let own = RowRotation::new(table, visibility.angle, blueprint.unrotated);
        ComptimeOption::new_Some(own)
    };
    let stride = comptime!(KV_GROUP * sink.planes);
    let own = UNIT_POS_Y * KV_GROUP;
    if comptime!(!blueprint.masked) {
        heads.normalize_and_rotate(&angles, shape.vectors, inputs.epsilon);
    }
    let mut first = split.first + own;
    while first < min(split.end, shape.span) {
        let group = window_group(inputs, &visibility, first);
        if group.is_visible() {
            heads.attend::<F>(&attention.window, &group, shape.vectors, attention.scale);
        }
        first += stride;
    }
    let mut first = split.row(split.first) + own;
    while first < split.row(split.end) {
        let group = compressed_group(inputs, &visibility, first, split.row(split.end));
        if group.is_visible() {
            heads.attend::<F>(&attention.rows, &group, shape.vectors, attention.scale);
        }
        first += stride;
    }

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
        let slot = visibility.slot(first + c, shape);
        let bias = inputs.window_bias(visibility, slot);
        group.biases[c as usize] = select(visibility.is_visible(first + c, shape), bias, MASKED);
        group.starts[c as usize] = visibility.sequence as usize * strides.window_sequence
            + slot as usize * strides.window_row;
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
    let mut group = KvGroup::new();
    #[unroll]
    for c in 0..KV_GROUP {
        let mut inside = first + c < end;
        let index = select(inside, first + c, first);
        let picked = inputs.attention.pick(CUBE_POS_Y, index);
        inside =
            inside && picked >= I::from_int(0) && picked < I::cast_from(visibility.visible_rows);
        let row = select(inside, u32::cast_from(picked), 0u32);
        let bias = inputs.row_bias(visibility, row);
        group.biases[c as usize] = select(inside, bias, MASKED);
        group.starts[c as usize] = inputs.attention.row_start(visibility.sequence, row);
    }
    group
}
