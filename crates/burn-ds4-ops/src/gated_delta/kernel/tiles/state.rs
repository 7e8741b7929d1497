//! A plane's rows of a state, and their update.

use cubecl::prelude::*;

use super::blueprint::{COLUMN_BLOCK, TilesBlueprint};
use super::corrections::CorrectionTerms;
use super::fetch::{fetched_index, write_rows};
use crate::gated_delta::kernel::RowLayout;
use crate::intrinsics::{modulo, multiply_half_tiles, pack_bf16};

/// This lane's part of a plane's rows, in vectors of 16 bytes: by column block, of rows `quad` and
/// `quad + 8` of every tile.
#[derive(CubeType)]
pub(super) struct State {
    words: Array<Vector<u32, Const<4>>>,
    /// Where the rows are in the shared memory that they were fetched to.
    first_row: u32,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

/// What is stored of a state, and how: `total_decay` times the state plus the corrections times the
/// first `token_count` keys.
#[derive(CubeType)]
pub(super) struct StateUpdate {
    pub total_decay: f32,
    pub token_count: u32,
    /// Whether lanes store it straight from registers. Otherwise it goes through the shared memory
    /// that the rows were fetched to, and leaves in whole rows. That takes longer, but less of the
    /// memory's time.
    #[cube(comptime)]
    pub direct: bool,
}

#[cube]
impl State {
    /// Reads the rows that were fetched from `first_row` on.
    pub fn read(
        fetched: &Shared<[Vector<u32, Const<4>>]>,
        first_row: u32,
        #[comptime] blueprint: TilesBlueprint,
    ) -> State {
        let (column_blocks, half_tiles) = comptime!((blueprint.column_blocks, 2 * blueprint.tiles));
        let count = comptime!((half_tiles * column_blocks) as usize);
        let mut words = Array::<Vector<u32, Const<4>>>::new(count);
        #[unroll]
        for half_tile in 0..half_tiles {
            #[unroll]
            for column_block in 0..column_blocks {
                let row = first_row + comptime!(8 * half_tile) + UNIT_POS_X / 4;
                let vector = comptime!(4 * column_block) + UNIT_POS_X % 4;
                let at = fetched_index(row, vector, blueprint);
                words[comptime!((half_tile * column_blocks + column_block) as usize)] =
                    fetched[at as usize];
            }
        }
        State {
            words,
            first_row,
            blueprint,
        }
    }

    pub fn at(
        &self,
        #[comptime] half_tile: u32,
        #[comptime] column_block: u32,
    ) -> Vector<u32, Const<4>> {
        self.words[comptime!((self.blueprint.column_blocks * half_tile + column_block) as usize)]
    }

    /// Stores the state after an update. The group's keys begin at `first_word`.
    pub fn store(
        &self,
        update: &StateUpdate,
        correction_terms: &CorrectionTerms,
        keys: &Shared<[u32]>,
        first_word: u32,
        fetched: &mut Shared<[Vector<u32, Const<4>>]>,
        to: &mut [Vector<u32, Const<4>>],
        layout: &RowLayout,
    ) {
        let (blueprint, direct) = comptime!((self.blueprint, update.direct));
        let TilesBlueprint {
            column_blocks,
            tiles,
            ..
        } = blueprint;
        let token_tiles = comptime!(blueprint.token_tiles());
        let quad = UNIT_POS_X / 4;
        let quad_lane = UNIT_POS_X % 4;
        let word_tiles = comptime!(blueprint.correction_words() / 4);
        let mut terms = Array::<u32>::new(comptime!((2 * tiles * word_tiles) as usize));
        #[unroll]
        for half_tile in 0..comptime!(2 * tiles) {
            #[unroll]
            for i in 0..word_tiles {
                let word = comptime!(4 * i) + quad_lane;
                terms[comptime!((half_tile * word_tiles + i) as usize)] =
                    correction_terms.word(comptime!(8 * half_tile) + quad, word);
            }
        }
        // Masks for the pairs of tokens that the four lanes have of a tile. Keys of later tokens
        // may be NaN, so they must be removed and not only multiplied by zero.
        let pair = modulo(quad_lane, comptime!(blueprint.pairs()));
        let mut masks = Array::<u32>::new(comptime!(token_tiles as usize));
        #[unroll]
        for token_tile in 0..token_tiles {
            let token = comptime!(8 * token_tile) + pair * 2;
            let low = select(token < update.token_count, 0x0000_ffffu32, 0u32);
            let high = select(token + 1 < update.token_count, 0xffff_0000u32, 0u32);
            masks[token_tile as usize] = low | high;
        }
        #[unroll]
        for column_block in 0..column_blocks {
            let mut stored = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * tiles as usize));
            #[unroll]
            for half_tile in 0..comptime!(2 * tiles as usize) {
                stored[half_tile] = Vector::new(0u32);
            }
            #[unroll]
            for j in 0..4u32 {
                // The columns of a tile of the product are those columns of the state that the
                // lanes have.
                let column =
                    comptime!(COLUMN_BLOCK * column_block + 2 * j) + quad / 2 * 8 + quad % 2;
                let first_word =
                    first_word + column * comptime!(blueprint.padded() / 2) + column / 8 * 8 + pair;
                let mut key_words = Array::<u32>::new(comptime!(token_tiles as usize));
                #[unroll]
                for token_tile in 0..token_tiles {
                    let word = keys[(first_word + comptime!(4 * token_tile)) as usize];
                    key_words[token_tile as usize] = word & masks[token_tile as usize];
                }
                #[unroll]
                for tile in 0..tiles {
                    let low = self
                        .at(comptime!(2 * tile), column_block)
                        .extract(j as usize);
                    let high = self
                        .at(comptime!(2 * tile + 1), column_block)
                        .extract(j as usize);
                    let mut start = Vector::<f32, Const<4>>::new(0.0f32);
                    start.insert(0usize, f32::reinterpret(low << 16) * update.total_decay);
                    start.insert(
                        1usize,
                        f32::reinterpret(low & 0xffff_0000u32) * update.total_decay,
                    );
                    start.insert(2usize, f32::reinterpret(high << 16) * update.total_decay);
                    start.insert(
                        3usize,
                        f32::reinterpret(high & 0xffff_0000u32) * update.total_decay,
                    );
                    let mut sums = Array::<Vector<f32, Const<4>>>::new(1usize);
                    sums[0] = start;
                    add_corrections(&mut sums, &terms, &key_words, tile, blueprint);
                    let sum = sums[0];
                    set(
                        &mut stored,
                        comptime!(2 * tile as usize),
                        j,
                        pack_bf16(sum.extract(0usize), sum.extract(1usize)),
                    );
                    set(
                        &mut stored,
                        comptime!(2 * tile as usize + 1),
                        j,
                        pack_bf16(sum.extract(2usize), sum.extract(3usize)),
                    );
                }
            }
            #[unroll]
            for half_tile in 0..comptime!(2 * tiles as usize) {
                let row = comptime!(8 * half_tile as u32) + quad;
                let vector = comptime!(4 * column_block) + quad_lane;
                if direct {
                    to[layout.offset(row) + vector as usize] = stored[half_tile];
                } else {
                    let at = fetched_index(self.first_row + row, vector, blueprint);
                    fetched[at as usize] = stored[half_tile];
                }
            }
        }
        if direct {
            // The plane may overwrite the corrections next, from which this state was computed.
            sync_plane();
        } else {
            write_rows(&*fetched, self.first_row, to, layout, blueprint);
        }
    }
}

/// Sets one word of one of the vectors.
#[cube]
fn set(
    vectors: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] index: usize,
    #[comptime] word: u32,
    value: u32,
) {
    let mut vector = vectors[index];
    vector.insert(word as usize, value);
    vectors[index] = vector;
}

/// Adds the product of the rows' corrections, in terms, and the keys of the tokens to the one sum.
#[cube]
fn add_corrections(
    sums: &mut Array<Vector<f32, Const<4>>>,
    terms: &Array<u32>,
    words: &Array<u32>,
    #[comptime] tile: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    let count = comptime!((blueprint.correction_words() / 4) as usize);
    let token_tiles = comptime!(blueprint.token_tiles() as usize);
    let first = comptime!(2 * tile as usize * count);
    #[unroll]
    for i in 0..count {
        sums[0] = multiply_half_tiles(
            terms[comptime!(first + i)],
            terms[comptime!(first + count + i)],
            words[comptime!(i % token_tiles)],
            sums[0],
        );
    }
}
