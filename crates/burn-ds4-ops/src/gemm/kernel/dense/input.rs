//! Rows of `x` as operands of tiles of weights.

use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

use crate::gemm::kernel::input::{bf16_pair, term_of};
use crate::gemm::kernel::weights::K_STEPS;
use crate::intrinsics::{await_copies, commit_copies, modulo};

/// Where rows of `x` are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum InputLocation {
    /// From global memory.
    Global,
    /// From a copy in shared memory.
    Shared,
    /// From shared memory, where each term of an element is stored separately.
    SharedTerms,
}

/// How `x` is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct InputBlueprint {
    /// Terms of an element that are multiplied: one is the element itself, more are in `bf16`.
    pub terms: u32,
    /// Tiles of 8 rows.
    pub x_tiles: u32,
    pub location: InputLocation,
    /// Rows in shared memory, and vec8s of a row.
    pub shared_rows: u32,
    pub row_vec8s: u32,
    /// Units of a cube.
    pub cube_units: u32,
    /// Whether K is a multiple of the K-block.
    pub k_aligned: bool,
}

impl InputBlueprint {
    /// Vectors of a vec8.
    const fn vectors(self) -> u32 {
        if self.terms == 3 { 2 } else { 1 }
    }

    /// Vectors from one row to the next in shared memory, such that lanes that read together have
    /// no bank conflict.
    const fn pitch(self) -> u32 {
        match self.location {
            InputLocation::Shared if self.vectors() == 2 => {
                (2 * self.row_vec8s).next_multiple_of(8) + 1
            }
            _ => self.row_vec8s.next_multiple_of(8) + 4,
        }
    }

    /// Vectors in shared memory.
    pub const fn shared_vectors(self) -> u32 {
        match self.location {
            InputLocation::Global => 0,
            InputLocation::Shared => self.shared_rows * self.pitch(),
            InputLocation::SharedTerms => self.terms * self.shared_rows * self.pitch(),
        }
    }

    /// vec8s that a unit of the cube splits into terms.
    const fn unit_vec8s(self) -> u32 {
        (self.shared_rows * self.row_vec8s).div_ceil(self.cube_units)
    }

    /// Vectors that a unit of the cube reads for that.
    const fn fetched(self) -> u32 {
        match self.location {
            InputLocation::SharedTerms => self.unit_vec8s() * self.vectors(),
            _ => 1,
        }
    }

    /// Whether all of a K-block is read before its weights have arrived: not if that takes too many
    /// registers.
    const fn reads_ahead(self) -> bool {
        !matches!(self.location, InputLocation::SharedTerms) && self.x_tiles * self.vectors() <= 2
    }

    const fn held(self) -> u32 {
        if self.reads_ahead() {
            K_STEPS * self.x_tiles * self.vectors()
        } else {
            1
        }
    }
}

/// A small number of rows of `x`.
#[derive(CubeType)]
pub(in crate::gemm::kernel) struct InputRows<'a, X: Float, N: Size> {
    x: &'a [Vector<X, N>],
    shared: Shared<[Vector<X, N>]>,
    terms: Shared<[Vector<u32, Const<4>>]>,
    fetched: Array<Vector<X, N>>,
    /// Where the lane's rows begin, one of each tile.
    row_starts: Array<usize>,
    pub rows: u32,
    x_vectors: usize,
    pub columns: u32,
    #[cube(comptime)]
    blueprint: InputBlueprint,
}

#[cube]
impl<'a, X: Float, N: Size> InputRows<'a, X, N> {
    pub fn new(
        x: &'a [Vector<X, N>],
        rows: u32,
        x_vectors: usize,
        columns: u32,
        #[comptime] blueprint: InputBlueprint,
    ) -> InputRows<'a, X, N> {
        let location = comptime!(blueprint.location);
        let shared_vectors = comptime!(blueprint.shared_vectors() as usize);
        let mut row_starts = Array::<usize>::new(comptime!(blueprint.x_tiles as usize));
        #[unroll]
        for t in 0..blueprint.x_tiles {
            let row = min(comptime!(8 * t) + UNIT_POS_X / 4, rows - 1);
            row_starts[t as usize] = if comptime!(location == InputLocation::Global) {
                row as usize * x_vectors
            } else {
                (row * comptime!(blueprint.pitch())) as usize
            };
        }
        InputRows::<'a, X, N> {
            x,
            shared: Shared::new_slice(comptime!(match location {
                InputLocation::Shared => shared_vectors,
                _ => 1,
            })),
            terms: Shared::new_slice(comptime!(match location {
                InputLocation::SharedTerms => shared_vectors,
                _ => 1,
            })),
            fetched: Array::new(comptime!(blueprint.fetched() as usize)),
            row_starts,
            rows,
            x_vectors,
            columns,
            blueprint,
        }
    }

    /// Begins to read all rows, if they go to shared memory. Every unit of the cube must call this.
    pub fn fetch(&mut self) {
        let blueprint = comptime!(self.blueprint);
        let each = comptime!(blueprint.vectors());
        if comptime!(blueprint.location == InputLocation::Shared) {
            let row_vectors = self.columns / 8 * each;
            let mut at = UNIT_POS;
            while at < self.rows * row_vectors {
                let row = at / row_vectors;
                let vector = at % row_vectors;
                let from = row as usize * self.x_vectors + vector as usize;
                let to = (row * comptime!(blueprint.pitch()) + vector) as usize;
                copy_async(
                    &self.x[from..from + 1],
                    &mut self.shared[to..to + 1],
                    comptime!(8 / each),
                );
                at += CUBE_DIM;
            }
            commit_copies();
        }
        if comptime!(blueprint.location == InputLocation::SharedTerms) {
            #[unroll]
            for i in 0..comptime!(blueprint.unit_vec8s()) {
                let at = UNIT_POS + comptime!(i * blueprint.cube_units);
                let row = min(at / comptime!(blueprint.row_vec8s), self.rows - 1);
                let vec8 = modulo(at, comptime!(blueprint.row_vec8s));
                #[unroll]
                for v in 0..each {
                    let from = row as usize * self.x_vectors + (vec8 * each + v) as usize;
                    self.fetched[comptime!((i * each + v) as usize)] = self.x[from];
                }
            }
        }
    }

    /// Waits until the rows are in shared memory, while the last `pending` groups of copies may be
    /// in flight. Every unit of the cube must call this.
    pub fn store(&mut self, #[comptime] pending: u32) {
        let blueprint = comptime!(self.blueprint);
        if comptime!(blueprint.location == InputLocation::Shared) {
            await_copies(pending);
            sync_cube();
        }
        if comptime!(blueprint.location == InputLocation::SharedTerms) {
            let each = comptime!(blueprint.vectors() as usize);
            #[unroll]
            for i in 0..comptime!(blueprint.unit_vec8s()) {
                let at = UNIT_POS + comptime!(i * blueprint.cube_units);
                let row = at / comptime!(blueprint.row_vec8s);
                let vec8 = modulo(at, comptime!(blueprint.row_vec8s));
                if row < comptime!(blueprint.shared_rows) {
                    let mut raw = Array::<Vector<X, N>>::new(each);
                    #[unroll]
                    for v in 0..each {
                        raw[v] = self.fetched[comptime!(i as usize * each + v)];
                    }
                    #[unroll]
                    for term in 0..comptime!(blueprint.terms) {
                        let term_row = comptime!(term * blueprint.shared_rows) + row;
                        let to = (term_row * comptime!(blueprint.pitch()) + vec8) as usize;
                        self.terms[to] = vec8_term::<X, N>(&raw, term, blueprint);
                    }
                }
            }
            sync_cube();
        }
    }

    /// Reads what the lane needs of a K-block, from column `first` on, if it is to be read now.
    pub fn read_ahead(&self, first: u32) -> Array<Vector<X, N>> {
        let blueprint = comptime!(self.blueprint);
        let each = comptime!(blueprint.vectors());
        let mut held = Array::<Vector<X, N>>::new(comptime!(blueprint.held() as usize));
        if comptime!(blueprint.reads_ahead()) {
            #[unroll]
            for c in 0..K_STEPS {
                #[unroll]
                for t in 0..blueprint.x_tiles {
                    #[unroll]
                    for v in 0..each {
                        let to = comptime!(((c * blueprint.x_tiles + t) * each + v) as usize);
                        held[to] = self.vector(t, first + comptime!(c * 32), v);
                    }
                }
            }
        }
        held
    }

    /// The terms of the 8 columns at `column`, which belong to K-step `c`, of the lane's row of
    /// tile `t`.
    pub fn columns(
        &self,
        held: &Array<Vector<X, N>>,
        #[comptime] t: u32,
        #[comptime] c: u32,
        column: u32,
    ) -> Array<Vector<u32, Const<4>>> {
        let blueprint = comptime!(self.blueprint);
        let each = comptime!(blueprint.vectors());
        let mut terms = Array::<Vector<u32, Const<4>>>::new(comptime!(blueprint.terms as usize));
        if comptime!(blueprint.location == InputLocation::SharedTerms) {
            let vec8 = column / 8;
            let inside = column < self.columns;
            #[unroll]
            for term in 0..comptime!(blueprint.terms) {
                let row_start = self.row_starts[t as usize]
                    + comptime!((term * blueprint.shared_rows * blueprint.pitch()) as usize);
                terms[term as usize] = if comptime!(blueprint.k_aligned) {
                    self.terms[row_start + vec8 as usize]
                } else {
                    let pairs = self.terms[row_start + select(inside, vec8, 0u32) as usize];
                    select(inside, pairs, Vector::new(0u32))
                };
            }
        } else {
            let mut raw = Array::<Vector<X, N>>::new(comptime!(each as usize));
            #[unroll]
            for v in 0..each {
                raw[v as usize] = if comptime!(blueprint.reads_ahead()) {
                    held[comptime!(((c * blueprint.x_tiles + t) * each + v) as usize)]
                } else {
                    self.vector(t, column, v)
                };
            }
            #[unroll]
            for term in 0..comptime!(blueprint.terms) {
                terms[term as usize] = vec8_term::<X, N>(&raw, term, blueprint);
            }
        }
        terms
    }

    /// Vector `v` of the vec8 at `column`; zeros past the end.
    fn vector(&self, #[comptime] t: u32, column: u32, #[comptime] v: u32) -> Vector<X, N> {
        let blueprint = comptime!(self.blueprint);
        let vector = column / 8 * comptime!(blueprint.vectors()) + v;
        let inside = column < self.columns;
        let vector = if comptime!(blueprint.k_aligned) {
            vector
        } else {
            select(inside, vector, 0u32)
        };
        let at = self.row_starts[t as usize] + vector as usize;
        let values = if comptime!(blueprint.location == InputLocation::Shared) {
            self.shared[at]
        } else {
            self.x[at]
        };
        if comptime!(blueprint.k_aligned) {
            values
        } else {
            select(inside, values, Vector::new(X::from_int(0)))
        }
    }
}

/// The four pairs of a vec8, or of one of its terms.
#[cube]
fn vec8_term<X: Float, N: Size>(
    raw: &Array<Vector<X, N>>,
    #[comptime] term: u32,
    #[comptime] blueprint: InputBlueprint,
) -> Vector<u32, Const<4>> {
    if comptime!(blueprint.terms == 1) {
        Vector::<u32, Const<4>>::reinterpret(raw[0usize])
    } else {
        let mut pairs = Vector::<u32, Const<4>>::new(0u32);
        let size = comptime!(8 / blueprint.vectors() as usize);
        #[unroll]
        for i in 0..4usize {
            let vector = Vector::<f32, N>::cast_from(raw[comptime!(2 * i / size)]);
            let low = term_of(vector.extract(comptime!(2 * i % size)), term);
            let high = term_of(vector.extract(comptime!(2 * i % size + 1)), term);
            pairs.insert(i, bf16_pair(low, high));
        }
        pairs
    }
}
