//! A plane's rows of a state, and what becomes of them.

use cubecl::prelude::*;

use super::block::Staged;
use super::fetch::{fetched_at, write_rows};
use super::{CHUNK, TilesBlueprint};
use crate::intrinsics::{multiply_half_tiles, pack_bf16};

/// The lane's part of a plane's rows, 16 bytes at a time: chunk by chunk of the rows `group` and `group + 8` of every tile.
#[derive(CubeType)]
pub(super) struct State {
    pub words: Array<Vector<u32, Const<4>>>,
    #[cube(comptime)]
    pub blueprint: TilesBlueprint,
}

#[cube]
impl State {
    pub fn at(&self, #[comptime] line: u32, #[comptime] chunk: u32) -> Vector<u32, Const<4>> {
        self.words[comptime!((self.blueprint.chunks * line + chunk) as usize)]
    }

    /// The state after `kept` tokens, of `carried` times this one and what the plane's rows have learned, goes to where they begin:
    /// directly, or in whole lines by way of the place that the rows were fetched to, which takes longer and less of the memory's time.
    #[allow(clippy::too_many_arguments)]
    pub fn store(
        &self,
        carried: f32,
        learned: &Staged,
        keys: &Shared<[u32]>,
        first_word: u32,
        kept: u32,
        fetched: &mut Shared<[Vector<u32, Const<4>>]>,
        first_row: u32,
        to: &mut [Vector<u32, Const<4>>],
        first: usize,
        row_vectors: usize,
        #[comptime] direct: bool,
    ) {
        let blueprint = comptime!(self.blueprint);
        let TilesBlueprint { chunks, tiles, .. } = blueprint;
        let sides = comptime!(blueprint.sides());
        let group = UNIT_POS_X / 4;
        let quarter = UNIT_POS_X % 4;
        let tiles_of_slots = comptime!(blueprint.slots() / 4);
        let mut parts = Array::<u32>::new(comptime!((2 * tiles * tiles_of_slots) as usize));
        #[unroll]
        for line in 0..comptime!(2 * tiles) {
            #[unroll]
            for i in 0..tiles_of_slots {
                let slot = comptime!(4 * i) + quarter;
                parts[comptime!((line * tiles_of_slots + i) as usize)] =
                    learned.word(comptime!(8 * line) + group, slot);
            }
        }
        // Of the pairs of tokens that the quad's lanes have of a tile, those that count: keys of later tokens may be NaN, of which
        // nothing is nothing only if they are not there.
        let pair = quarter % comptime!(blueprint.pairs());
        let mut masks = Array::<u32>::new(comptime!(sides as usize));
        #[unroll]
        for side in 0..sides {
            let token = comptime!(8 * side) + pair * 2;
            let low = select(token < kept, 0x0000_ffffu32, 0u32);
            let high = select(token + 1 < kept, 0xffff_0000u32, 0u32);
            masks[side as usize] = low | high;
        }
        #[unroll]
        for chunk in 0..chunks {
            let mut stored = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * tiles as usize));
            #[unroll]
            for line in 0..comptime!(2 * tiles as usize) {
                stored[line] = Vector::new(0u32);
            }
            #[unroll]
            for j in 0..4u32 {
                // The columns of a tile of the product are those of which lanes have the state.
                let column = comptime!(CHUNK * chunk + 2 * j) + group / 2 * 8 + group % 2;
                let first_word =
                    first_word + column * comptime!(blueprint.padded() / 2) + column / 8 * 8 + pair;
                let mut key_words = Array::<u32>::new(comptime!(sides as usize));
                #[unroll]
                for side in 0..sides {
                    let word = keys[(first_word + comptime!(4 * side)) as usize];
                    key_words[side as usize] = word & masks[side as usize];
                }
                #[unroll]
                for tile in 0..tiles {
                    let low = self.at(comptime!(2 * tile), chunk).extract(j as usize);
                    let high = self.at(comptime!(2 * tile + 1), chunk).extract(j as usize);
                    let mut start = Vector::<f32, Const<4>>::new(0.0f32);
                    start.insert(0usize, f32::reinterpret(low << 16) * carried);
                    start.insert(1usize, f32::reinterpret(low & 0xffff_0000u32) * carried);
                    start.insert(2usize, f32::reinterpret(high << 16) * carried);
                    start.insert(3usize, f32::reinterpret(high & 0xffff_0000u32) * carried);
                    let mut sums = Array::<Vector<f32, Const<4>>>::new(1usize);
                    sums[0] = start;
                    add_learned(&mut sums, &parts, &key_words, tile, blueprint);
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
            for line in 0..comptime!(2 * tiles as usize) {
                let row = comptime!(8 * line as u32) + group;
                let vector = comptime!(4 * chunk) + quarter;
                if direct {
                    to[first + row as usize * row_vectors + vector as usize] = stored[line];
                } else {
                    let at = fetched_at(first_row + row, vector, blueprint);
                    fetched[at as usize] = stored[line];
                }
            }
        }
        if direct {
            // The plane may put what it learns next in the place of what this was made of.
            sync_plane();
        } else {
            write_rows(&*fetched, first_row, to, first, row_vectors, blueprint);
        }
    }
}

/// Changes one word of one of some vectors.
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

/// Adds the product of what rows have learned of each token, in parts, and the tokens' keys to the one sum.
#[cube]
fn add_learned(
    sums: &mut Array<Vector<f32, Const<4>>>,
    parts: &Array<u32>,
    words: &Array<u32>,
    #[comptime] tile: u32,
    #[comptime] blueprint: TilesBlueprint,
) {
    let count = comptime!((blueprint.slots() / 4) as usize);
    let sides = comptime!(blueprint.sides() as usize);
    let first = comptime!(2 * tile as usize * count);
    #[unroll]
    for i in 0..count {
        sums[0] = multiply_half_tiles(
            parts[comptime!(first + i)],
            parts[comptime!(first + count + i)],
            words[comptime!(i % sides)],
            sums[0],
        );
    }
}
