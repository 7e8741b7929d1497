//! Compressed rows. Each sequence has a cube, or several where its new positions complete many
//! blocks.

mod slots;

use cubecl::prelude::*;

use super::pages::PageTable;
use super::rotate::Positions;
use super::row::{RowBlueprint, RowNorm, RowPlace, RowStorage, store};
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::modulo;
use slots::{PoolSource, pool};

/// Compile-time configuration of [`compress_kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CompressBlueprint {
    pub row: RowBlueprint,
    /// Positions of a block.
    pub ratio: u32,
    /// Whether a row also pools the block before its own.
    pub overlap: bool,
    /// Whether the blocks of a sequence are divided among several cubes.
    pub divided: bool,
}

impl CompressBlueprint {
    pub(crate) const fn series(self) -> u32 {
        if self.overlap { 2 } else { 1 }
    }

    /// Slots that a row pools.
    const fn slots(self) -> u32 {
        self.series() * self.ratio
    }

    /// The most earlier positions that are pooled with new ones.
    const fn history(self) -> u32 {
        self.slots() - 1
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
    pages: &ComptimeOption<PageTable>,
    mut compressor: Compressor<R, W>,
    #[comptime] blueprint: CompressBlueprint,
    #[define(R, W, I)] _dtypes: [ElemType; 3],
) {
    let sequence = CUBE_POS_Y as usize;
    compress::<R, W, I>(
        &mut compressor,
        positions,
        pages,
        sequence,
        CUBE_POS_X,
        blueprint,
    );
}

/// Stores the raw rows of a sequence's new positions, and the rows of the blocks that they
/// complete. Every unit of the cube must call this.
///
/// A unit has the same channels of all raw rows and of all series, so it overwrites only what it
/// alone reads. It writes raw rows after all blocks are pooled.
///
/// Where blocks are divided, the first cube has those that pool earlier positions, and overwrites
/// these; the other cubes of the row have the other blocks and slots. `cube` is the number of the
/// cube among them.
///
/// With PTX, blocks that are not complete are skipped. Other compilers may not see that the
/// condition is the same for the whole cube. There, all barriers are passed for these blocks too,
/// while no raw row is read and nothing is written.
#[cube]
pub(super) fn compress<R: Float, W: Float, I: Int>(
    compressor: &mut Compressor<R, W>,
    positions: &Positions<I>,
    pages: &ComptimeOption<PageTable>,
    sequence: usize,
    cube: u32,
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
    let mut first = 0u32.runtime();
    let mut step = 1u32.runtime();
    if comptime!(blueprint.divided) {
        let series = comptime!(blueprint.series());
        if cube == 0 {
            blocks = min(blocks, series);
        } else {
            first = cube + comptime!(blueprint.series() - 1);
            step = CUBE_COUNT_X - 1;
        }
    }
    for i in range_stepped(first, blocks, step) {
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

        let angle = table.at::<u32>(block * ratio, 0u32);
        let row_stride = compressor.sizes.rows_row;
        let paged: ComptimeOption<usize> = pages.as_ref().map(|pages| {
            let row = pages.row(sequence as u32, select(complete, block, 0u32));
            row as usize * row_stride
        });
        let to = paged.unwrap_or_else(|| {
            sequence * compressor.sizes.rows_sequence
                + select(complete, block, 0u32) as usize * row_stride
        });
        let place = RowPlace {
            angle,
            to,
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
        let count = compressor.sizes.count;
        let slots = compressor.sizes.slots;
        let first = select(count > slots, count - slots, 0u32);
        if comptime!(!blueprint.divided) {
            for token in first..count {
                store_raw(compressor, sequence, begin, token, blueprint);
            }
        } else if cube == 0 {
            // The new positions in slots of those that this cube has pooled.
            let history = comptime!(blueprint.history());
            let from = (slots - history + slots - first % slots) % slots;
            for i in 0..history {
                let token = first + (from + i) % slots;
                if token < count {
                    store_raw(compressor, sequence, begin, token, blueprint);
                }
            }
        } else {
            for token in range_stepped(first + cube - 1, count, CUBE_COUNT_X - 1) {
                if token % slots < slots - comptime!(blueprint.history()) {
                    store_raw(compressor, sequence, begin, token, blueprint);
                }
            }
        }
    }
}

/// Stores the raw row of a new position. A unit has its channels of all series.
#[cube]
fn store_raw<R: Float, W: Float>(
    compressor: &mut Compressor<R, W>,
    sequence: usize,
    begin: u32,
    token: u32,
    #[comptime] blueprint: CompressBlueprint,
) {
    let width = comptime!(blueprint.row.width);
    let position = begin + token;
    let from = sequence * compressor.sizes.projections_sequence
        + token as usize * compressor.sizes.projections_token;
    let to = sequence * compressor.sizes.raw_sequence
        + (position % compressor.sizes.slots) as usize * compressor.sizes.raw_slot;
    let slot = modulo(position, blueprint.ratio) as usize * compressor.sizes.bias_slot;
    let mut channel = UNIT_POS;
    while channel < width {
        #[unroll]
        for part in 0..comptime!(2 * blueprint.series()) {
            let at = (channel + comptime!(part * width)) as usize;
            compressor.raw[to + at] =
                compressor.projections[from + at] + compressor.bias[slot + at];
        }
        channel += comptime!(blueprint.row.units());
    }
}
