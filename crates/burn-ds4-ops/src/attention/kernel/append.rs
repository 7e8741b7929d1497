//! New rows of a ring.

use cubecl::prelude::*;

use super::rotate::Table;
use super::row::{RowBlueprint, store};

/// How much there is, steps from one to the next, and constants.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AppendSizes {
    /// New rows of a sequence before those that are kept.
    pub dropped: u32,
    /// Slots of a sequence.
    pub slots: u32,
    pub x_sequence: usize,
    pub x_row: usize,
    pub ring_sequence: usize,
    pub ring_slot: usize,
    pub epsilon: f32,
    pub hadamard_scale: f32,
}

/// Stores new rows of sequences in the slots of their positions, a cube to a row.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn append_kernel<X: Float, R: Float, W: Float, I: Int>(
    x: &[X],
    norm: &[W],
    angles: &[f32],
    start: &[I],
    ring: &mut [R],
    sizes: AppendSizes,
    table: Table,
    #[comptime] blueprint: RowBlueprint,
    #[define(X, R, W, I)] _dtypes: [ElemType; 4],
) {
    append::<X, R, W, I>(
        x,
        norm,
        angles,
        start,
        ring,
        CUBE_POS_Y as usize,
        CUBE_POS_X,
        &sizes,
        &table,
        blueprint,
    );
}

/// Stores the row of a sequence and its new row, not counting those that are dropped. All of the cube must be here.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn append<X: Float, R: Float, W: Float, I: Int>(
    x: &[X],
    norm: &[W],
    angles: &[f32],
    start: &[I],
    ring: &mut [R],
    sequence: usize,
    kept: u32,
    sizes: &AppendSizes,
    table: &Table,
    #[comptime] blueprint: RowBlueprint,
) {
    let width = comptime!(blueprint.width);
    let mut row = Shared::<[f32]>::new_slice(width as usize);
    let mut other = Shared::<[f32]>::new_slice(width as usize);
    let token = kept + sizes.dropped;
    let given = start[sequence];
    let there = given >= I::from_int(0) && given < I::cast_from(table.known);
    let position = select(there, u32::cast_from(given), 0u32) + token;

    let from = sequence * sizes.x_sequence + token as usize * sizes.x_row;
    let mut channel = UNIT_POS;
    while channel < width {
        row[channel as usize] = f32::cast_from(x[from + channel as usize]);
        channel += comptime!(blueprint.units());
    }
    let to = sequence * sizes.ring_sequence + (position % sizes.slots) as usize * sizes.ring_slot;
    store::<R, W>(
        &mut row,
        &mut other,
        norm,
        angles,
        ring,
        table.at::<I>(given, token),
        table,
        to,
        there,
        sizes.epsilon,
        sizes.hadamard_scale,
        blueprint,
    );
}
