//! New rows of a ring.

use cubecl::prelude::*;

use super::rotate::Table;
use super::row::{RowBlueprint, store};

/// How much there is, and steps from one to the next.
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
    epsilon: f32,
    hadamard_scale: f32,
    #[comptime] blueprint: RowBlueprint,
    #[define(X, R, W, I)] _dtypes: [ElemType; 4],
) {
    let width = comptime!(blueprint.width);
    let mut row = Shared::<[f32]>::new_slice(width as usize);
    let mut other = Shared::<[f32]>::new_slice(width as usize);
    let sequence = CUBE_POS_Y as usize;
    let token = CUBE_POS_X + sizes.dropped;
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
        &table,
        to,
        there,
        epsilon,
        hadamard_scale,
        blueprint,
    );
}
