//! In what order a cube goes through its tiles.

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::blueprint::StreamBlueprint;
use super::pipeline::Stream;
use super::place::LanePlace;
use crate::gemm::kernel::groups::{Groups, Pairing};

/// The tiles that a cube multiplies, of all tiles of all groups.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TileRange {
    first: u32,
    end: u32,
}

#[cube]
impl TileRange {
    /// Range `index`: all have `least` tiles, the first `more` of them one more.
    pub fn new(index: u32, least: u32, more: u32) -> TileRange {
        let first = index * least + min(index, more);
        TileRange {
            first,
            end: first + least + select(index < more, 1u32, 0u32),
        }
    }

    /// The range that begins after `tiles` more.
    pub fn after(self, tiles: u32) -> TileRange {
        TileRange {
            first: self.first + tiles,
            end: self.end + tiles,
        }
    }

    /// Range `index` of `count` that `tiles` are divided into.
    pub fn of(index: u32, count: u32, tiles: u32) -> TileRange {
        let least = tiles / count;
        TileRange::new(index, least, tiles - least * count)
    }
}

/// A cube's tiles of one group, and the pairs of it that are multiplied at a time.
#[derive(CubeType)]
pub(super) struct Pass {
    pub matrix: u32,
    pub first_tile: u32,
    pub last_tile: u32,
    /// Where the group's [pairs](Groups::pair) start, how many there are, and the first of this
    /// pass.
    pub start: u32,
    pub count: u32,
    pub first_pair: u32,
    /// The first tile of those whose partials are in shared memory, and the part of K whose columns
    /// of `x` are.
    pub tile: u32,
    pub x_load: u32,
    /// The cube's tiles of later groups.
    next: u32,
    end: u32,
    /// Tiles of a matrix.
    matrix_tiles: u32,
}

#[cube]
impl Pass {
    /// The first one of a range; without pairs where the range is empty.
    pub fn first_of(
        range: TileRange,
        tiles: &FastDivmod<u32>,
        matrix_tiles: u32,
        groups: &Groups,
    ) -> Pass {
        let mut pass = Pass {
            matrix: 0u32.runtime(),
            first_tile: 0u32.runtime(),
            last_tile: 0u32.runtime(),
            start: 0u32.runtime(),
            count: 0u32.runtime(),
            first_pair: 0u32.runtime(),
            tile: 0u32.runtime(),
            x_load: 0u32.runtime(),
            next: range.first,
            end: range.end,
            matrix_tiles,
        };
        if range.first < range.end {
            pass.begin_group(tiles, groups);
        }
        pass
    }

    fn begin_group(&mut self, tiles: &FastDivmod<u32>, groups: &Groups) {
        let mut group = 0u32;
        self.first_tile = self.next;
        self.last_tile = self.end;
        if comptime!(groups.blueprint.pairing != Pairing::One) {
            let (at, first) = tiles.div_mod(self.next);
            group = at;
            self.first_tile = first;
            self.last_tile = min(first + (self.end - self.next), self.matrix_tiles);
        }
        self.next += self.last_tile - self.first_tile;
        self.matrix = groups.expert(group);
        self.start = groups.start(group);
        self.count = groups.size(group, self.start);
        self.first_pair = 0u32;
    }

    /// Whether there are pairs to multiply.
    pub fn has_pairs(&self) -> bool {
        self.first_pair < self.count
    }

    /// Goes on to the next pairs of the group, or to the next group.
    pub fn advance(
        &mut self,
        tiles: &FastDivmod<u32>,
        groups: &Groups,
        #[comptime] blueprint: StreamBlueprint,
    ) {
        self.first_pair += comptime!(blueprint.pass_pairs());
        if self.first_pair >= self.count && self.next < self.end {
            self.begin_group(tiles, groups);
        }
    }

    /// The K-block that follows `block` of this part of K, in this plane's tile `filled` of
    /// `tiles`: how many of its tiles come before that K-block's, and its number there.
    pub fn next_k_block(
        &self,
        block: u32,
        filled: u32,
        tiles: u32,
        #[comptime] blueprint: StreamBlueprint,
    ) -> (u32, u32) {
        let ends_tile = block + 1 == blueprint.x_k_blocks;
        let mut before = filled + select(ends_tile, 1u32, 0u32);
        let mut next = select(ends_tile, 0u32, block + 1);
        if comptime!(blueprint.x_loads() > 1) {
            // The next part of the same tiles, or the first of others.
            let ends_load = before == tiles;
            let ends = ends_load && self.x_load + 1 == comptime!(blueprint.x_loads());
            let next_load = self.x_load + select(ends_load, 1u32, 0u32);
            next += select(ends, 0u32, next_load * blueprint.x_k_blocks);
            before = select(ends_load && !ends, 0u32, before);
        }
        (before, next)
    }

    /// Begins to fetch the first weights, if this is the first part of the first tiles.
    pub fn begin_weights(&self, place: &LanePlace, stream: &mut Stream) {
        let blueprint = comptime!(stream.blueprint);
        let begins = if comptime!(blueprint.x_loads() > 1) {
            self.x_load == 0 && self.tile == self.first_tile
        } else {
            true.runtime()
        };
        if begins && self.k_blocks(place, blueprint) > 0 {
            stream.seek_tile(place, self.matrix, self.first_tile, 0u32);
            stream.fetch();
        }
    }

    /// K-blocks of this plane.
    pub fn k_blocks(&self, place: &LanePlace, #[comptime] blueprint: StreamBlueprint) -> u32 {
        let stride = comptime!(blueprint.concurrent_tiles);
        let concurrent_tile = place.concurrent_tile;
        let tiles = self.last_tile - self.first_tile;
        let k_blocks =
            (tiles + comptime!(stride - 1) - concurrent_tile) / stride * blueprint.plane_k_blocks;
        if comptime!(blueprint.planes * stride < blueprint.cube_planes) {
            select(concurrent_tile < stride, k_blocks, 0u32)
        } else {
            k_blocks
        }
    }
}
