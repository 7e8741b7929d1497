//! Compressed rows. Each sequence has a cube.

mod slots;

use cubecl::prelude::*;

use super::rotate::Positions;
use super::row::{RowBlueprint, RowNorm, RowPlace, RowStorage, store};
use slots::{PoolSource, pool};

/// Compile-time configuration of [`compress_kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CompressBlueprint {
    pub row: RowBlueprint,
    /// Positions of a block.
    pub ratio: u32,
    /// Whether a row also pools the block before its own.
    pub overlap: bool,
}

impl CompressBlueprint {
    const fn series(self) -> u32 {
        if self.overlap { 2 } else { 1 }
    }

    /// Slots that a row pools.
    const fn slots(self) -> u32 {
        self.series() * self.ratio
    }
}

/// Dimensions and strides of a compressor.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CompressSizes {
    /// New positions of a sequence.
    pub count: u32,
    /// Blocks that they may complete.
    pub blocks: u32,
    /// Slots of a sequence's raw rows, and the number of its compressed rows.
    pub slots: u32,
    pub rows: u32,
    pub projections_sequence: usize,
    pub projections_token: usize,
    pub bias_slot: usize,
    pub raw_sequence: usize,
    pub raw_slot: usize,
    pub rows_sequence: usize,
    pub rows_row: usize,
}

/// The tensors that a compressor reads and writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Compressor<R: Float, W: Float> {
    pub projections: Box<[f32]>,
    pub bias: Box<[f32]>,
    pub norm: RowNorm<W>,
    pub raw: Box<[f32]>,
    pub rows: Box<[R]>,
    pub sizes: CompressSizes,
}

/// Stores the raw rows of the new positions of sequences, and the rows of the blocks that they
/// complete.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn compress_kernel<R: Float, W: Float, I: Int>(
    positions: &Positions<I>,
    mut compressor: Compressor<R, W>,
    #[comptime] blueprint: CompressBlueprint,
    #[define(R, W, I)] _dtypes: [ElemType; 3],
) {
    compress::<R, W, I>(&mut compressor, positions, CUBE_POS, blueprint);
}

/// Stores the raw rows of a sequence's new positions, and the rows of the blocks that they
/// complete. Every unit of the cube must call this.
///
/// A unit has the same channels of all raw rows and of all series, so it overwrites only what it
/// alone reads. It writes raw rows after all blocks are pooled.
///
/// With PTX, blocks that are not complete are skipped. Other compilers may not see that the
/// condition is the same for the whole cube. There, all barriers are passed for these blocks too,
/// while no raw row is read and nothing is written.
#[cube]
pub(super) fn compress<R: Float, W: Float, I: Int>(
    compressor: &mut Compressor<R, W>,
    positions: &Positions<I>,
    sequence: usize,
    #[comptime] blueprint: CompressBlueprint,
) {
    let width = comptime!(blueprint.row.width);
    let units = comptime!(blueprint.row.units());
    let ratio = comptime!(blueprint.ratio);
    let mut storage = RowStorage::new(blueprint.row);

    let table = &positions.table;
    let given = positions.start[sequence];
    let active = given >= I::from_int(0) && given < I::cast_from(table.positions);
    let begin = select(active, u32::cast_from(given), 0u32);
    let end = begin + compressor.sizes.count;
    let projections_at = sequence * compressor.sizes.projections_sequence;
    let raw_at = sequence * compressor.sizes.raw_sequence;

    let mut blocks = compressor.sizes.blocks;
    if comptime!(blueprint.row.target.ptx) {
        blocks = select(active, end / ratio - begin / ratio, 0u32);
    }
    for i in 0..blocks {
        let block = begin / ratio + i;
        let complete = active && (block + 1) * ratio <= end && block < compressor.sizes.rows;

        let mut channel = UNIT_POS;
        while channel < width {
            let mut pooled = 0.0f32;
            if complete {
                let source = PoolSource {
                    projections: projections_at,
                    raw: raw_at,
                    channel,
                    block,
                    begin,
                };
                pooled = pool(&*compressor, &source, blueprint);
            }
            storage.row[channel as usize] = pooled;
            channel += units;
        }

        let place = RowPlace {
            angle: table.at::<u32>(block * ratio, 0u32),
            to: sequence * compressor.sizes.rows_sequence
                + select(complete, block, 0u32) as usize * compressor.sizes.rows_row,
            write: complete,
        };
        store::<R, W>(
            &mut storage,
            &compressor.norm,
            table,
            &mut compressor.rows,
            &place,
            blueprint.row,
        );
    }

    if active {
        let first = select(
            compressor.sizes.count > compressor.sizes.slots,
            compressor.sizes.count - compressor.sizes.slots,
            0u32,
        );
        for token in first..compressor.sizes.count {
            let position = begin + token;
            let from = projections_at + token as usize * compressor.sizes.projections_token;
            let to =
                raw_at + (position % compressor.sizes.slots) as usize * compressor.sizes.raw_slot;
            let slot = (position % ratio) as usize * compressor.sizes.bias_slot;
            let mut channel = UNIT_POS;
            while channel < width {
                #[unroll]
                for part in 0..comptime!(2 * blueprint.series()) {
                    let at = (channel + comptime!(part * width)) as usize;
                    compressor.raw[to + at] =
                        compressor.projections[from + at] + compressor.bias[slot + at];
                }
                channel += units;
            }
        }
    }
}
