use cubecl::prelude::*;

use crate::intrinsics::{Target, exp};
use crate::rows::{RowCut, add_squares, row_sum, vector_of};

/// How the kernels that collapse a token's streams are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TokenBlueprint {
    /// Streams of a token.
    pub streams: u32,
    /// Who has what of each stream.
    pub cut: RowCut,
    /// Whether a lane keeps its part of the streams in registers, and does not read it again.
    pub held: bool,
    /// What the instructions are that the kernel may use.
    pub target: Target,
}

impl TokenBlueprint {
    /// Gates and the matrix.
    pub fn coefficients(&self) -> u32 {
        (2 + self.streams) * self.streams
    }

    /// Units of a cube.
    pub fn units(&self) -> u32 {
        self.cut.plane * self.cut.planes
    }
}

/// Where the streams of the tokens are, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Layout {
    /// Tokens.
    pub tokens: u32,
    /// Vectors of a stream.
    pub vectors: u32,
    /// From one token to the next.
    pub token: usize,
    /// From one stream to the next.
    pub stream: usize,
}

/// A token's streams, as a lane sees them.
#[derive(CubeType)]
pub(super) struct Token<'a, F: Float, N: Size> {
    streams: &'a [Vector<F, N>],
    /// This lane's part of them, if it is kept.
    values: Array<Vector<F, N>>,
    /// First vector of the token.
    first: usize,
    layout: Layout,
    #[cube(comptime)]
    blueprint: TokenBlueprint,
}

#[cube]
impl<'a, F: Float, N: Size> Token<'a, F, N> {
    /// Reads what is kept.
    pub fn new(
        streams: &'a [Vector<F, N>],
        index: u32,
        layout: Layout,
        #[comptime] blueprint: TokenBlueprint,
    ) -> Self {
        let size = N::value();
        let cut = comptime!(blueprint.cut);
        let parts = comptime!(cut.unit as usize / size);
        let kept = comptime!(if blueprint.held {
            (cut.steps * blueprint.streams) as usize * parts
        } else {
            1
        });
        let mut token = Token::<'a, F, N> {
            streams,
            values: Array::new(kept),
            first: index as usize * layout.token,
            layout,
            blueprint,
        };
        if comptime!(blueprint.held) {
            #[unroll]
            for i in 0..kept {
                let step = comptime!((i / parts) as u32 / blueprint.streams).runtime();
                let stream = comptime!((i / parts) as u32 % blueprint.streams);
                let vector = vector_of(step, comptime!(i % parts), size, cut);
                let value = token.read(stream, vector);
                token.values[i] = value;
            }
        }
        token
    }

    /// A vector of a stream, zeros past its end.
    fn read(&self, #[comptime] stream: u32, vector: u32) -> Vector<F, N> {
        let inside = vector < self.layout.vectors;
        let first = self.first + comptime!(stream as usize) * self.layout.stream;
        let value = self.streams[first + select(inside, vector, 0u32) as usize];
        select(inside, value, Vector::new(F::new(0.0)))
    }

    /// `1 / sqrt(mean(v²) + epsilon)`, `v` being all streams of the token. All units of the cube must be here.
    pub fn inverse_rms(&self, epsilon: f32) -> f32 {
        let blueprint = comptime!(self.blueprint);
        let size = N::value();
        let cut = comptime!(blueprint.cut);
        let parts = comptime!(cut.unit as usize / size);
        let mut sum = 0.0f32;
        if comptime!(blueprint.held) {
            let kept = comptime!((cut.steps * blueprint.streams) as usize * parts);
            #[unroll]
            for i in 0..kept {
                sum = add_squares(self.values[i], sum);
            }
        } else {
            for step in 0..cut.steps {
                #[unroll]
                for stream in 0..blueprint.streams {
                    #[unroll]
                    for part in 0..parts {
                        let vector = vector_of(step, part, size, cut);
                        sum = add_squares(self.read(stream, vector), sum);
                    }
                }
            }
        }
        let sum = row_sum(sum, cut, blueprint.target);
        let per_vector = comptime!(size as u32 * blueprint.streams);
        let count = f32::cast_from(self.layout.vectors * per_vector);
        1.0f32 / (sum / count + epsilon).sqrt()
    }

    /// Writes the sum of the streams, each times its gate, from vector `to` on.
    pub fn write_sum(&self, gates: &Array<f32>, output: &mut [Vector<F, N>], to: usize) {
        let blueprint = comptime!(self.blueprint);
        let size = N::value();
        let cut = comptime!(blueprint.cut);
        let parts = comptime!(cut.unit as usize / size);
        if comptime!(blueprint.held) {
            #[unroll]
            for i in 0..comptime!(cut.steps as usize * parts) {
                let step = comptime!(i / parts);
                let part = comptime!(i % parts);
                let mut sum = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for stream in 0..comptime!(blueprint.streams as usize) {
                    let at = comptime!((step * blueprint.streams as usize + stream) * parts + part);
                    let value = Vector::<f32, N>::cast_from(self.values[at]);
                    sum = fma(Vector::new(gates[stream]), value, sum);
                }
                let vector = vector_of(comptime!(step as u32).runtime(), part, size, cut);
                if vector < self.layout.vectors {
                    output[to + vector as usize] = Vector::cast_from(sum);
                }
            }
        } else {
            for step in 0..cut.steps {
                #[unroll]
                for part in 0..parts {
                    let vector = vector_of(step, part, size, cut);
                    let mut sum = Vector::<f32, N>::new(0.0f32);
                    #[unroll]
                    for stream in 0..blueprint.streams {
                        let value = Vector::<f32, N>::cast_from(self.read(stream, vector));
                        let gate = gates[comptime!(stream as usize)];
                        sum = fma(Vector::new(gate), value, sum);
                    }
                    if vector < self.layout.vectors {
                        output[to + vector as usize] = Vector::cast_from(sum);
                    }
                }
            }
        }
    }
}

#[cube]
pub(super) fn sigmoid(x: f32, #[comptime] target: Target) -> f32 {
    1.0f32 / (1.0f32 + exp(-x, target))
}
