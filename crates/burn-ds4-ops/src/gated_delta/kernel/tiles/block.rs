//! What the tokens of a sequence have to do with a state and with each other, of which each row's corrections follow.
//!
//! With `c` the correction that a row learned of each key, decayed since, and `G` the decay since the beginning, the row is
//! `G S + c K`: what a key or query finds in it is `G` times its product with `S`, and `c` times its products with the keys.

use cubecl::prelude::*;

use super::fetch::fetched_at;
use super::state::State;
use super::{PARTS, TilesBlueprint};
use crate::gated_delta::kernel::inverse_length;
use crate::intrinsics::multiply_tiles;
use crate::packed::kernel::{pair, part_of};

/// Products of keys and queries of the tokens, in shared memory: of each group of planes.
#[derive(CubeType)]
pub(super) struct Grams {
    /// Of key `t` and key `s`, and of query `t` and key `s`, at `t * padded + s`.
    keys: Shared<[f32]>,
    queries: Shared<[f32]>,
    /// What a token's key and query have to be multiplied by.
    key_factors: Shared<[f32]>,
    query_factors: Shared<[f32]>,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

/// Products of the planes' rows of the state with all keys and queries, in shared memory.
#[derive(CubeType)]
pub(super) struct Products {
    /// The rows' one after the other: with the keys, then with the queries.
    rows: Shared<[f32]>,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

/// What the planes' rows learn of each token, in shared memory: in parts of `bf16` whose sum it is, two tokens to a word. A row has the
/// words of the first parts, then those of the second, and so on.
#[derive(CubeType)]
pub(super) struct Staged {
    rows: Shared<[u32]>,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

impl TilesBlueprint {
    /// From the products of a row to those of the next.
    pub(super) const fn product_pitch(self) -> u32 {
        2 * self.padded() + 1
    }

    /// From what a row learns to the same of the next.
    pub(super) const fn learned_pitch(self) -> u32 {
        self.slots() + 1
    }
}

#[cube]
impl Grams {
    pub fn new(#[comptime] blueprint: TilesBlueprint) -> Grams {
        let (groups, padded) = comptime!((blueprint.groups as usize, blueprint.padded() as usize));
        Grams {
            keys: Shared::new_slice(comptime!(groups * padded * padded)),
            queries: Shared::new_slice(comptime!(groups * padded * padded)),
            key_factors: Shared::new_slice(comptime!(groups * padded)),
            query_factors: Shared::new_slice(comptime!(groups * padded)),
            blueprint,
        }
    }

    /// Where the lane's products of a tile of tokens begin.
    fn line(&self, group: u32, #[comptime] tile: u32) -> u32 {
        let padded = comptime!(self.blueprint.padded());
        (group * padded + comptime!(8 * tile) + UNIT_POS_X / 4) * padded + UNIT_POS_X % 4 * 2
    }
}

#[cube]
impl Products {
    pub fn new(#[comptime] blueprint: TilesBlueprint) -> Products {
        let rows = comptime!(blueprint.groups * blueprint.group_rows() * blueprint.product_pitch());
        Products {
            rows: Shared::new_slice(rows as usize),
            blueprint,
        }
    }

    /// Multiplies the plane's rows by all keys and queries, and the first plane these by each other.
    #[allow(clippy::too_many_arguments)]
    pub fn multiply(
        &mut self,
        state: &State,
        fetched: &Shared<[Vector<u32, Const<4>>]>,
        key_rows: u32,
        query_rows: u32,
        grams: &mut Grams,
        side: u32,
        scale: f32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let TilesBlueprint {
            chunks,
            tiles,
            planes,
            rule,
            ..
        } = blueprint;
        let sides = comptime!(blueprint.sides());
        let padded = comptime!(blueprint.padded());
        let group = UNIT_POS_X / 4;
        let quarter = UNIT_POS_X % 4;
        let plane = UNIT_POS_Y % planes;
        let first_plane = plane == 0;
        let none = Vector::<f32, Const<4>>::new(0.0f32);

        // Of each tile of tokens, their keys and their queries, and every eight rows of the state.
        let lines = comptime!(2 * tiles);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!((sides * lines) as usize));
        #[unroll]
        for i in 0..comptime!((sides * lines) as usize) {
            sums[i] = none;
        }
        // Of every two tiles of tokens whose first is not the earlier one, and of the queries of a tile by themselves.
        let pairs = comptime!(sides * (sides + 1) / 2);
        let mut gram_sums =
            Array::<Vector<f32, Const<4>>>::new(comptime!((pairs + sides) as usize));
        #[unroll]
        for i in 0..comptime!((pairs + sides) as usize) {
            gram_sums[i] = none;
        }
        #[unroll]
        for chunk in 0..chunks {
            let mut keys = Array::<Vector<u32, Const<4>>>::new(comptime!(sides as usize));
            let mut queries = Array::<Vector<u32, Const<4>>>::new(comptime!(sides as usize));
            #[unroll]
            for tokens in 0..sides {
                let vector = comptime!(4 * chunk) + quarter;
                let token = comptime!(8 * tokens) + group;
                let key = fetched_at(key_rows + token, vector, blueprint);
                let query = fetched_at(query_rows + token, vector, blueprint);
                keys[tokens as usize] = fetched[key as usize];
                queries[tokens as usize] = fetched[query as usize];
            }
            #[unroll]
            for t in 0..sides {
                let (key, query) = (keys[t as usize], queries[t as usize]);
                #[unroll]
                for line in 0..lines {
                    let to = comptime!((t * lines + line) as usize);
                    add_product(key, query, state.at(line, chunk), &mut sums, to);
                }
                if first_plane {
                    #[unroll]
                    for s in 0..comptime!(t + 1) {
                        let to = comptime!((t * (t + 1) / 2 + s) as usize);
                        add_product(key, query, keys[s as usize], &mut gram_sums, to);
                    }
                    if comptime!(rule.l2_norm) {
                        let to = comptime!((pairs + t) as usize);
                        add_product(key, query, query, &mut gram_sums, to);
                    }
                }
            }
        }

        let pitch = comptime!(blueprint.product_pitch());
        let own = UNIT_POS_Y * comptime!(blueprint.plane_rows()) + quarter * 2;
        #[unroll]
        for t in 0..sides {
            #[unroll]
            for line in 0..lines {
                let sum = sums[comptime!((t * lines + line) as usize)];
                let row = own + comptime!(8 * line);
                let to = (row * pitch + comptime!(8 * t) + group) as usize;
                self.rows[to] = sum.extract(0usize);
                self.rows[to + comptime!(padded as usize)] = sum.extract(2usize);
                let to = to + comptime!(pitch as usize);
                self.rows[to] = sum.extract(1usize);
                self.rows[to + comptime!(padded as usize)] = sum.extract(3usize);
            }
        }
        if first_plane {
            #[unroll]
            for t in 0..sides {
                #[unroll]
                for s in 0..comptime!(t + 1) {
                    let sum = gram_sums[comptime!((t * (t + 1) / 2 + s) as usize)];
                    let to = (grams.line(side, t) + comptime!(8 * s)) as usize;
                    grams.keys[to] = sum.extract(0usize);
                    grams.keys[to + 1] = sum.extract(1usize);
                    grams.queries[to] = sum.extract(2usize);
                    grams.queries[to + 1] = sum.extract(3usize);
                }
                // The lane with a query's product with itself.
                let squares = gram_sums[comptime!((pairs + t) as usize)];
                let own = group / 2 == quarter;
                let square = select(
                    group % 2 == 1,
                    squares.extract(3usize),
                    squares.extract(2usize),
                );
                if own {
                    let token = (side * padded + comptime!(8 * t) + group) as usize;
                    grams.query_factors[token] = inverse_length(square, rule) * scale;
                }
            }
            sync_plane();
            if UNIT_POS_X < padded {
                let token = side * padded + UNIT_POS_X;
                let square = grams.keys[(token * padded + UNIT_POS_X) as usize];
                grams.key_factors[token as usize] = inverse_length(square, rule);
            }
        }
    }

    /// What the lane's row puts out for a token, whose correction joins those of the tokens before.
    #[allow(clippy::too_many_arguments)]
    pub fn step(
        &self,
        grams: &Grams,
        corrections: &mut Array<f32>,
        value: f32,
        decay: f32,
        carried: f32,
        strength: f32,
        side: u32,
        #[comptime] token: u32,
    ) -> f32 {
        let blueprint = comptime!(self.blueprint);
        let padded = comptime!(blueprint.padded());
        let rows = comptime!(blueprint.plane_rows());
        let row = UNIT_POS_Y * rows + UNIT_POS_X % rows;
        let products = (row * comptime!(blueprint.product_pitch())) as usize;
        let factor_at = (side * padded + token) as usize;
        let line = factor_at * comptime!(padded as usize);
        let key_factor = grams.key_factors[factor_at];
        let mut recalled = carried * self.rows[products + comptime!(token as usize)];
        let mut output = carried * self.rows[products + comptime!((padded + token) as usize)];
        #[unroll]
        for earlier in 0..comptime!(token as usize) {
            corrections[earlier] *= decay;
            let at = line + earlier;
            recalled = fma(corrections[earlier], grams.keys[at], recalled);
            output = fma(corrections[earlier], grams.queries[at], output);
        }
        let own = (value - recalled * key_factor) * strength * key_factor;
        corrections[token as usize] = own;
        output = fma(own, grams.queries[line + comptime!(token as usize)], output);
        output * grams.query_factors[factor_at]
    }
}

#[cube]
impl Staged {
    pub fn new(#[comptime] blueprint: TilesBlueprint) -> Staged {
        let rows = comptime!(blueprint.groups * blueprint.group_rows() * blueprint.learned_pitch());
        Staged {
            rows: Shared::new_slice(rows as usize),
            blueprint,
        }
    }

    /// What the lane's row has learned of the first `tokens`; zeros for those after. The plane may read it afterwards.
    pub fn put(&mut self, corrections: &Array<f32>, #[comptime] tokens: u32) {
        let blueprint = comptime!(self.blueprint);
        let rows = comptime!(blueprint.plane_rows());
        let pairs = comptime!(blueprint.pairs());
        let row = UNIT_POS_Y * rows + UNIT_POS_X % rows;
        let to = (row * comptime!(blueprint.learned_pitch())) as usize;
        #[unroll]
        for i in 0..pairs {
            let mut low = 0.0f32;
            let mut high = 0.0f32;
            if comptime!(2 * i < tokens) {
                low = corrections[comptime!(2 * i as usize)];
            }
            if comptime!(2 * i + 1 < tokens) {
                high = corrections[comptime!(2 * i as usize + 1)];
            }
            #[unroll]
            for part in 0..PARTS {
                let word = pair(part_of(low, part.runtime()), part_of(high, part.runtime()));
                self.rows[to + comptime!((part * pairs + i) as usize)] = word;
            }
        }
        #[unroll]
        for slot in comptime!(PARTS * pairs)..comptime!(blueprint.slots()) {
            self.rows[to + comptime!(slot as usize)] = 0u32;
        }
        sync_plane();
    }

    /// A word of the plane's row number `row`.
    pub fn word(&self, row: u32, slot: u32) -> u32 {
        let blueprint = comptime!(self.blueprint);
        let row = UNIT_POS_Y * comptime!(blueprint.plane_rows()) + row;
        self.rows[(row * comptime!(blueprint.learned_pitch()) + slot) as usize]
    }
}

/// Adds the product of a tile, of whose rows `group` and `group + 8` the lane has 16 bytes each, and of rows of which it has as much of
/// number `group` to sum `to`.
#[cube]
fn add_product(
    low: Vector<u32, Const<4>>,
    high: Vector<u32, Const<4>>,
    columns: Vector<u32, Const<4>>,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] to: usize,
) {
    #[unroll]
    for m in 0..2usize {
        sums[to] = multiply_tiles(
            low.extract(comptime!(2 * m)),
            high.extract(comptime!(2 * m)),
            low.extract(comptime!(2 * m + 1)),
            high.extract(comptime!(2 * m + 1)),
            columns.extract(comptime!(2 * m)),
            columns.extract(comptime!(2 * m + 1)),
            sums[to],
            "bf16",
        );
    }
}
