//! Products of the tokens of a sequence with a state and with each other, and the corrections of
//! each row that follow from them.
//!
//! Let `c` be the correction that a row adds for each key, decayed since then, and `G` the decay
//! since the beginning. The row is `G S + c K`. Its product with a key or query is `G` times the
//! product with `S`, plus `c` times the products with the keys.

use cubecl::prelude::*;

use super::blueprint::TilesBlueprint;
use super::fetch::fetched_index;
use super::state::State;
use crate::gated_delta::kernel::inverse_norm;
use crate::intrinsics::{modulo, multiply_tiles};

/// Products of keys and queries of the tokens with each other, in shared memory, for each group of
/// planes.
#[derive(CubeType)]
pub(super) struct Grams {
    /// Products of key `t` and key `s`, and of query `t` and key `s`, at `t * padded + s`.
    keys: Shared<[f32]>,
    queries: Shared<[f32]>,
    /// Factors of a token's key and query.
    key_factors: Shared<[f32]>,
    query_factors: Shared<[f32]>,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

/// Products of the planes' rows of the state with all keys and queries, in shared memory.
#[derive(CubeType)]
pub(super) struct Products {
    /// Row by row: the products with the keys, then those with the queries.
    rows: Shared<[f32]>,
    #[cube(comptime)]
    blueprint: TilesBlueprint,
}

/// The value of this lane's row for a token, the token's gates, and the decay since the beginning.
#[derive(CubeType)]
pub(super) struct StepInputs {
    pub value: f32,
    pub decay: f32,
    pub total_decay: f32,
    pub beta: f32,
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

    /// The offset of this lane's products of a tile of tokens.
    fn offset(&self, plane_group: u32, #[comptime] tile: u32) -> u32 {
        let padded = comptime!(self.blueprint.padded());
        (plane_group * padded + comptime!(8 * tile) + UNIT_POS_X / 4) * padded + UNIT_POS_X % 4 * 2
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

    /// Multiplies the plane's rows by all keys and queries. The first plane also multiplies keys
    /// and queries by each other.
    pub fn multiply(
        &mut self,
        state: &State,
        fetched: &Shared<[Vector<u32, Const<4>>]>,
        key_rows: u32,
        query_rows: u32,
        grams: &mut Grams,
        plane_group: u32,
        scale: f32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let TilesBlueprint {
            column_blocks,
            tiles,
            planes,
            rule,
            ..
        } = blueprint;
        let token_tiles = comptime!(blueprint.token_tiles());
        let padded = comptime!(blueprint.padded());
        let quad = UNIT_POS_X / 4;
        let quad_lane = UNIT_POS_X % 4;
        let plane = modulo(UNIT_POS_Y, planes);
        let first_plane = plane == 0;
        let none = Vector::<f32, Const<4>>::new(0.0f32);

        // Sums for each tile of tokens, with its keys and its queries, and each half tile of the
        // state.
        let half_tiles = comptime!(2 * tiles);
        let mut sums =
            Array::<Vector<f32, Const<4>>>::new(comptime!((token_tiles * half_tiles) as usize));
        #[unroll]
        for i in 0..comptime!((token_tiles * half_tiles) as usize) {
            sums[i] = none;
        }
        // Sums for each pair of token tiles whose first is not the earlier one, and for the queries
        // of a tile with themselves.
        let pairs = comptime!(token_tiles * (token_tiles + 1) / 2);
        let mut gram_sums =
            Array::<Vector<f32, Const<4>>>::new(comptime!((pairs + token_tiles) as usize));
        #[unroll]
        for i in 0..comptime!((pairs + token_tiles) as usize) {
            gram_sums[i] = none;
        }
        #[unroll]
        for column_block in 0..column_blocks {
            let mut keys = Array::<Vector<u32, Const<4>>>::new(comptime!(token_tiles as usize));
            let mut queries = Array::<Vector<u32, Const<4>>>::new(comptime!(token_tiles as usize));
            #[unroll]
            for tokens in 0..token_tiles {
                let vector = comptime!(4 * column_block) + quad_lane;
                let token = comptime!(8 * tokens) + quad;
                let key = fetched_index(key_rows + token, vector, blueprint);
                let query = fetched_index(query_rows + token, vector, blueprint);
                keys[tokens as usize] = fetched[key as usize];
                queries[tokens as usize] = fetched[query as usize];
            }
            #[unroll]
            for t in 0..token_tiles {
                let (key, query) = (keys[t as usize], queries[t as usize]);
                #[unroll]
                for half_tile in 0..half_tiles {
                    let to = comptime!((t * half_tiles + half_tile) as usize);
                    add_product(key, query, state.at(half_tile, column_block), &mut sums, to);
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
        let own = UNIT_POS_Y * comptime!(blueprint.plane_rows()) + quad_lane * 2;
        #[unroll]
        for t in 0..token_tiles {
            #[unroll]
            for half_tile in 0..half_tiles {
                let sum = sums[comptime!((t * half_tiles + half_tile) as usize)];
                let row = own + comptime!(8 * half_tile);
                let to = (row * pitch + comptime!(8 * t) + quad) as usize;
                self.rows[to] = sum.extract(0usize);
                self.rows[to + comptime!(padded as usize)] = sum.extract(2usize);
                let to = to + comptime!(pitch as usize);
                self.rows[to] = sum.extract(1usize);
                self.rows[to + comptime!(padded as usize)] = sum.extract(3usize);
            }
        }
        if first_plane {
            #[unroll]
            for t in 0..token_tiles {
                #[unroll]
                for s in 0..comptime!(t + 1) {
                    let sum = gram_sums[comptime!((t * (t + 1) / 2 + s) as usize)];
                    let to = (grams.offset(plane_group, t) + comptime!(8 * s)) as usize;
                    grams.keys[to] = sum.extract(0usize);
                    grams.keys[to + 1] = sum.extract(1usize);
                    grams.queries[to] = sum.extract(2usize);
                    grams.queries[to + 1] = sum.extract(3usize);
                }
                // The lane that has a query's product with itself stores the factor.
                let squares = gram_sums[comptime!((pairs + t) as usize)];
                let own = quad / 2 == quad_lane;
                let square = select(
                    quad % 2 == 1,
                    squares.extract(3usize),
                    squares.extract(2usize),
                );
                if own {
                    let token = (plane_group * padded + comptime!(8 * t) + quad) as usize;
                    grams.query_factors[token] = inverse_norm(square, rule) * scale;
                }
            }
            sync_plane();
            if UNIT_POS_X < padded {
                let token = plane_group * padded + UNIT_POS_X;
                let square = grams.keys[(token * padded + UNIT_POS_X) as usize];
                grams.key_factors[token as usize] = inverse_norm(square, rule);
            }
        }
    }

    /// Returns the output of this lane's row for a token, and appends the token's correction to
    /// those of the tokens before.
    pub fn step(
        &self,
        grams: &Grams,
        corrections: &mut Array<f32>,
        inputs: &StepInputs,
        plane_group: u32,
        #[comptime] token: u32,
    ) -> f32 {
        let blueprint = comptime!(self.blueprint);
        let padded = comptime!(blueprint.padded());
        let rows = comptime!(blueprint.plane_rows());
        let row = UNIT_POS_Y * rows + UNIT_POS_X % rows;
        let products = (row * comptime!(blueprint.product_pitch())) as usize;
        let factor_at = (plane_group * padded + token) as usize;
        let gram_row = factor_at * comptime!(padded as usize);
        let key_factor = grams.key_factors[factor_at];
        let mut recalled = inputs.total_decay * self.rows[products + comptime!(token as usize)];
        let mut output =
            inputs.total_decay * self.rows[products + comptime!((padded + token) as usize)];
        #[unroll]
        for earlier in 0..comptime!(token as usize) {
            corrections[earlier] *= inputs.decay;
            let at = gram_row + earlier;
            recalled = fma(corrections[earlier], grams.keys[at], recalled);
            output = fma(corrections[earlier], grams.queries[at], output);
        }
        let own = (inputs.value - recalled * key_factor) * inputs.beta * key_factor;
        corrections[token as usize] = own;
        output = fma(
            own,
            grams.queries[gram_row + comptime!(token as usize)],
            output,
        );
        output * grams.query_factors[factor_at]
    }
}

/// Adds the product of two tiles to sum `to`. The lane has 16 bytes each of rows `quad` and
/// `quad + 8` of the left tile, and 16 bytes of row `quad` of the right one.
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
