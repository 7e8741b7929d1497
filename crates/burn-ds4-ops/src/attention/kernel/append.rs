//! Storing new rows in a ring.

use cubecl::prelude::*;

use super::rotate::AngleTable;
use super::row::{RowBlueprint, store};

/// Dimensions, strides and constants of [`append_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AppendSizes {
    /// New rows of a sequence that come before those that are stored.
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

/// Stores new rows of sequences in the slots of their positions. Each cube stores one row.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn append_kernel<X: Float, R: Float, W: Float, I: Int>(
    x: &[X],
    norm: &[W],
    angles: &[f32],
    start: &[I],
    ring: &mut [R],
    sizes: AppendSizes,
    table: AngleTable,
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

/// Stores row number `index` of a sequence, not counting the dropped rows. Every unit of the cube
/// must call this.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn append<X: Float, R: Float, W: Float, I: Int>(
    x: &[X],
    norm: &[W],
    angles: &[f32],
    start: &[I],
    ring: &mut [R],
    sequence: usize,
    index: u32,
    sizes: &AppendSizes,
    table: &AngleTable,
    #[comptime] blueprint: RowBlueprint,
) {
    let width = comptime!(blueprint.width);
    let mut row = Shared::<[f32]>::new_slice(width as usize);
    let mut scratch = Shared::<[f32]>::new_slice(width as usize);
    let token = index + sizes.dropped;
    let given = start[sequence];
    let active = given >= I::from_int(0) && given < I::cast_from(table.positions);
    let position = select(active, u32::cast_from(given), 0u32) + token;

    let from = sequence * sizes.x_sequence + token as usize * sizes.x_row;
    let mut channel = UNIT_POS;
    while channel < width {
        row[channel as usize] = f32::cast_from(x[from + channel as usize]);
        channel += comptime!(blueprint.units());
    }
    let to = sequence * sizes.ring_sequence + (position % sizes.slots) as usize * sizes.ring_slot;
    store::<R, W>(
        &mut row,
        &mut scratch,
        norm,
        angles,
        ring,
        table.at::<I>(given, token),
        table,
        to,
        active,
        sizes.epsilon,
        sizes.hadamard_scale,
        blueprint,
    );
}
