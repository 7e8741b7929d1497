//! Storing new rows in a ring.

use cubecl::prelude::*;

use super::rotate::Positions;
use super::row::{RowBlueprint, RowNorm, RowPlace, RowStorage, store};

/// Dimensions and strides of new rows and of the ring that stores them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AppendSizes {
    /// New rows of a sequence that are stored, and those that come before them.
    pub stored: u32,
    pub dropped: u32,
    /// Slots of a sequence.
    pub slots: u32,
    pub x_sequence: usize,
    pub x_row: usize,
    pub ring_sequence: usize,
    pub ring_slot: usize,
}

/// New rows, and the ring that stores them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Appender<X: Float, R: Float, W: Float> {
    pub x: Box<[X]>,
    pub norm: RowNorm<W>,
    pub ring: Box<[R]>,
    pub sizes: AppendSizes,
}

/// Stores new rows of sequences in the slots of their positions. Each cube stores one row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn append_kernel<X: Float, R: Float, W: Float, I: Int>(
    appender: &mut Appender<X, R, W>,
    positions: &Positions<I>,
    #[comptime] blueprint: RowBlueprint,
    #[define(X, R, W, I)] _dtypes: [ElemType; 4],
) {
    let sequence = CUBE_POS_Y as usize;
    append::<X, R, W, I>(appender, positions, sequence, CUBE_POS_X, blueprint);
}

/// Stores row number `index` of a sequence, not counting the dropped rows. Every unit of the cube
/// must call this.
#[cube]
pub(super) fn append<X: Float, R: Float, W: Float, I: Int>(
    appender: &mut Appender<X, R, W>,
    positions: &Positions<I>,
    sequence: usize,
    index: u32,
    #[comptime] blueprint: RowBlueprint,
) {
    let width = comptime!(blueprint.width);
    let mut storage = RowStorage::new(blueprint);
    let sizes = &appender.sizes;
    let table = &positions.table;
    let token = index + sizes.dropped;
    let given = positions.start[sequence];
    let active = given >= I::from_int(0) && given < I::cast_from(table.positions);
    let position = select(active, u32::cast_from(given), 0u32) + token;

    let from = sequence * sizes.x_sequence + token as usize * sizes.x_row;
    let mut channel = UNIT_POS;
    while channel < width {
        storage.row[channel as usize] = f32::cast_from(appender.x[from + channel as usize]);
        channel += comptime!(blueprint.units());
    }
    let place = RowPlace {
        to: sequence * sizes.ring_sequence + (position % sizes.slots) as usize * sizes.ring_slot,
        write: active,
        angle: table.at::<I>(given, token),
    };
    store::<R, W>(
        &mut storage,
        &appender.norm,
        table,
        &mut appender.ring,
        &place,
        blueprint,
    );
}
