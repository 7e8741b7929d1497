//! Rows of `x` as tiles of weights meet them.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use super::tiles::STEP;
use crate::intrinsics::{await_copies, commit_copies};
use crate::packed::kernel::{pair, part_of};

/// Where rows of `x` are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// Where they are.
    Memory,
    /// Shared memory, which they are copied to.
    Copy,
    /// Shared memory, where each of the parts of an element is for itself.
    Parts,
}

/// How `x` is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SourceBlueprint {
    /// Numbers whose sum an element is in what is multiplied: one, as it is, or so many in `bf16`.
    pub parts: u32,
    /// Tiles of 8 rows.
    pub tiles: u32,
    pub place: Place,
    /// Rows in shared memory, and units of 8 columns of one.
    pub lines: u32,
    pub units: u32,
    /// Units of a cube.
    pub cube: u32,
    /// Whether all stretches of columns are full.
    pub even: bool,
}

impl SourceBlueprint {
    /// Vectors of 8 columns.
    const fn vectors(self) -> u32 {
        if self.parts == 3 { 2 } else { 1 }
    }

    /// Vectors from one row to the next in shared memory: such that lanes that read together meet no bank twice.
    const fn pitch(self) -> u32 {
        match self.place {
            Place::Copy if self.vectors() == 2 => (2 * self.units).next_multiple_of(8) + 1,
            _ => self.units.next_multiple_of(8) + 4,
        }
    }

    /// Vectors in shared memory.
    pub const fn shared_vectors(self) -> u32 {
        match self.place {
            Place::Memory => 0,
            Place::Copy => self.lines * self.pitch(),
            Place::Parts => self.parts * self.lines * self.pitch(),
        }
    }

    /// Units of 8 columns whose parts a unit of the cube makes.
    const fn own(self) -> u32 {
        (self.lines * self.units).div_ceil(self.cube)
    }

    /// Vectors that a unit of the cube reads for that.
    const fn fetched(self) -> u32 {
        match self.place {
            Place::Parts => self.own() * self.vectors(),
            _ => 1,
        }
    }

    /// Whether all of a stretch is read before its weights have come: not if that takes too many registers.
    const fn ahead(self) -> bool {
        !matches!(self.place, Place::Parts) && self.tiles * self.vectors() <= 2
    }

    const fn held(self) -> u32 {
        if self.ahead() {
            STEP * self.tiles * self.vectors()
        } else {
            1
        }
    }
}

/// A few rows of `x`.
#[derive(CubeType)]
pub(super) struct Source<'a, X: Float, N: Size> {
    x: &'a [Vector<X, N>],
    copy: Shared<[Vector<X, N>]>,
    parts: Shared<[Vector<u32, Const<4>>]>,
    fetched: Array<Vector<X, N>>,
    /// Where the rows of the lane begin, one of each tile.
    lines: Array<usize>,
    rows: u32,
    x_vectors: usize,
    columns: u32,
    #[cube(comptime)]
    blueprint: SourceBlueprint,
}

#[cube]
impl<'a, X: Float, N: Size> Source<'a, X, N> {
    pub fn new(
        x: &'a [Vector<X, N>],
        rows: u32,
        x_vectors: usize,
        columns: u32,
        #[comptime] blueprint: SourceBlueprint,
    ) -> Source<'a, X, N> {
        let place = comptime!(blueprint.place);
        let shared = comptime!(blueprint.shared_vectors() as usize);
        let mut lines = Array::<usize>::new(comptime!(blueprint.tiles as usize));
        #[unroll]
        for t in 0..blueprint.tiles {
            let row = min(comptime!(8 * t) + UNIT_POS_X / 4, rows - 1);
            lines[t as usize] = if comptime!(place == Place::Memory) {
                row as usize * x_vectors
            } else {
                (row * comptime!(blueprint.pitch())) as usize
            };
        }
        Source::<'a, X, N> {
            x,
            copy: Shared::new_slice(comptime!(if place == Place::Copy { shared } else { 1 })),
            parts: Shared::new_slice(comptime!(if place == Place::Parts { shared } else { 1 })),
            fetched: Array::new(comptime!(blueprint.fetched() as usize)),
            lines,
            rows,
            x_vectors,
            columns,
            blueprint,
        }
    }

    /// Begins to read all of it, if it is to be in shared memory. All of the cube must be here.
    pub fn fetch(&mut self) {
        let blueprint = comptime!(self.blueprint);
        let each = comptime!(blueprint.vectors());
        if comptime!(blueprint.place == Place::Copy) {
            let row_vectors = self.columns / 8 * each;
            let mut at = UNIT_POS;
            while at < self.rows * row_vectors {
                let row = at / row_vectors;
                let vector = at % row_vectors;
                let from = row as usize * self.x_vectors + vector as usize;
                let to = (row * comptime!(blueprint.pitch()) + vector) as usize;
                copy_async(
                    &self.x[from..from + 1],
                    &mut self.copy[to..to + 1],
                    comptime!(8 / each),
                );
                at += CUBE_DIM;
            }
            commit_copies();
        }
        if comptime!(blueprint.place == Place::Parts) {
            #[unroll]
            for i in 0..comptime!(blueprint.own()) {
                let at = UNIT_POS + comptime!(i * blueprint.cube);
                let row = min(at / comptime!(blueprint.units), self.rows - 1);
                let unit = at % comptime!(blueprint.units);
                #[unroll]
                for v in 0..each {
                    let from = row as usize * self.x_vectors + (unit * each + v) as usize;
                    self.fetched[comptime!((i * each + v) as usize)] = self.x[from];
                }
            }
        }
    }

    /// Waits until it is in shared memory, while the last `pending` groups of copies may be on their way. All of the cube must be here.
    pub fn store(&mut self, #[comptime] pending: u32) {
        let blueprint = comptime!(self.blueprint);
        if comptime!(blueprint.place == Place::Copy) {
            await_copies(pending);
            sync_cube();
        }
        if comptime!(blueprint.place == Place::Parts) {
            let each = comptime!(blueprint.vectors() as usize);
            #[unroll]
            for i in 0..comptime!(blueprint.own()) {
                let at = UNIT_POS + comptime!(i * blueprint.cube);
                let row = at / comptime!(blueprint.units);
                let unit = at % comptime!(blueprint.units);
                if row < comptime!(blueprint.lines) {
                    let mut raw = Array::<Vector<X, N>>::new(each);
                    #[unroll]
                    for v in 0..each {
                        raw[v] = self.fetched[comptime!(i as usize * each + v)];
                    }
                    #[unroll]
                    for part in 0..comptime!(blueprint.parts) {
                        let line = comptime!(part * blueprint.lines) + row;
                        let to = (line * comptime!(blueprint.pitch()) + unit) as usize;
                        self.parts[to] = part_of_unit::<X, N>(&raw, part, blueprint);
                    }
                }
            }
            sync_cube();
        }
    }

    /// What the lane needs of a stretch, its first columns being at `first`, if that is to be read now.
    pub fn read_ahead(&self, first: u32) -> Array<Vector<X, N>> {
        let blueprint = comptime!(self.blueprint);
        let each = comptime!(blueprint.vectors());
        let mut held = Array::<Vector<X, N>>::new(comptime!(blueprint.held() as usize));
        if comptime!(blueprint.ahead()) {
            #[unroll]
            for c in 0..STEP {
                #[unroll]
                for t in 0..blueprint.tiles {
                    #[unroll]
                    for v in 0..each {
                        let to = comptime!(((c * blueprint.tiles + t) * each + v) as usize);
                        held[to] = self.vector(t, first + comptime!(c * 32), v);
                    }
                }
            }
        }
        held
    }

    /// The parts of the 8 columns at `column`, which are those of chunk `c`, of the lane's row of tile `t`.
    pub fn columns(
        &self,
        held: &Array<Vector<X, N>>,
        #[comptime] t: u32,
        #[comptime] c: u32,
        column: u32,
    ) -> Array<Vector<u32, Const<4>>> {
        let blueprint = comptime!(self.blueprint);
        let each = comptime!(blueprint.vectors());
        let mut parts = Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.parts as usize));
        if comptime!(blueprint.place == Place::Parts) {
            let unit = column / 8;
            let inside = column < self.columns;
            #[unroll]
            for part in 0..comptime!(blueprint.parts) {
                let line = self.lines[t as usize]
                    + comptime!((part * blueprint.lines * blueprint.pitch()) as usize);
                parts[part as usize] = if comptime!(blueprint.even) {
                    self.parts[line + unit as usize]
                } else {
                    let pairs = self.parts[line + select(inside, unit, 0u32) as usize];
                    select(inside, pairs, Vector::new(0u32))
                };
            }
        } else {
            let mut raw = Array::<Vector<X, N>>::new(comptime!(each as usize));
            #[unroll]
            for v in 0..each {
                raw[v as usize] = if comptime!(blueprint.ahead()) {
                    held[comptime!(((c * blueprint.tiles + t) * each + v) as usize)]
                } else {
                    self.vector(t, column, v)
                };
            }
            #[unroll]
            for part in 0..comptime!(blueprint.parts) {
                parts[part as usize] = part_of_unit::<X, N>(&raw, part, blueprint);
            }
        }
        parts
    }

    /// Vector `v` of these columns; zeros past the end.
    fn vector(&self, #[comptime] t: u32, column: u32, #[comptime] v: u32) -> Vector<X, N> {
        let blueprint = comptime!(self.blueprint);
        let vector = column / 8 * comptime!(blueprint.vectors()) + v;
        let inside = column < self.columns;
        let vector = if comptime!(blueprint.even) {
            vector
        } else {
            select(inside, vector, 0u32)
        };
        let at = self.lines[t as usize] + vector as usize;
        let values = if comptime!(blueprint.place == Place::Copy) {
            self.copy[at]
        } else {
            self.x[at]
        };
        if comptime!(blueprint.even) {
            values
        } else {
            select(inside, values, Vector::new(X::from_int(0)))
        }
    }
}

/// The four pairs of 8 columns, or a part of them.
#[cube]
fn part_of_unit<X: Float, N: Size>(
    raw: &Array<Vector<X, N>>,
    #[comptime] part: u32,
    #[comptime] blueprint: SourceBlueprint,
) -> Vector<u32, Const<4>> {
    if comptime!(blueprint.parts == 1) {
        Vector::<u32, Const<4>>::reinterpret(raw[0usize])
    } else {
        let mut pairs = Vector::<u32, Const<4>>::new(0u32);
        let size = comptime!(8 / blueprint.vectors() as usize);
        #[unroll]
        for i in 0..4usize {
            let vector = Vector::<f32, N>::cast_from(raw[comptime!(2 * i / size)]);
            let low = part_of(vector.extract(comptime!(2 * i % size)), part);
            let high = part_of(vector.extract(comptime!(2 * i % size + 1)), part);
            pairs.insert(i, pair(low, high));
        }
        pairs
    }
}
