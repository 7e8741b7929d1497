use cubecl::prelude::*;

use crate::intrinsics::{Target, exp};
use crate::rows::{RowCut, add_squares, multiply_piece, row_sum, vector_of};

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
        self.inverse_rms_of(
            row_sum(sum, 0u32, cut.planes, cut, blueprint.target),
            epsilon,
        )
    }

    /// `1 / sqrt(mean(v²) + epsilon)`, of the sum of squares.
    pub fn inverse_rms_of(&self, sum: f32, epsilon: f32) -> f32 {
        let size = N::value();
        let per_vector = comptime!(size as u32 * self.blueprint.streams);
        let count = f32::cast_from(self.layout.vectors * per_vector);
        1.0f32 / (sum / count + epsilon).sqrt()
    }

    /// Sum of this lane's vectors `part` of its unit number `step`, each times its gate, where they are kept.
    fn kept_sum(
        &self,
        gates: &Array<f32>,
        #[comptime] step: usize,
        #[comptime] part: usize,
    ) -> Vector<f32, N> {
        let streams = comptime!(self.blueprint.streams as usize);
        let size = N::value();
        let parts = comptime!(self.blueprint.cut.unit as usize / size);
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for stream in 0..streams {
            let at = comptime!((step * streams + stream) * parts + part);
            let value = Vector::<f32, N>::cast_from(self.values[at]);
            sum = fma(Vector::new(gates[stream]), value, sum);
        }
        sum
    }

    /// The same sum of vectors that are read again.
    fn read_sum(&self, gates: &Array<f32>, vector: u32) -> Vector<f32, N> {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for stream in 0..comptime!(self.blueprint.streams) {
            let value = Vector::<f32, N>::cast_from(self.read(stream, vector));
            let gate = gates[comptime!(stream as usize)];
            sum = fma(Vector::new(gate), value, sum);
        }
        sum
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
                let sum = self.kept_sum(gates, step, part);
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
                    let sum = self.read_sum(gates, vector);
                    if vector < self.layout.vectors {
                        output[to + vector as usize] = Vector::cast_from(sum);
                    }
                }
            }
        }
    }

    /// This lane's part of the weights of a norm, if its part of the streams is kept.
    pub fn read_weights<W: Float, M: Size>(&self, weight: &[Vector<W, M>]) -> Array<Vector<W, M>> {
        let blueprint = comptime!(self.blueprint);
        let size = N::value();
        let share = M::value();
        let pieces = comptime!(size / share);
        let cut = comptime!(blueprint.cut);
        let parts = comptime!(cut.unit as usize / size);
        let kept = comptime!(if blueprint.held {
            cut.steps as usize * parts
        } else {
            0
        });
        let mut weights = Array::<Vector<W, M>>::new(comptime!((kept * pieces).max(1)));
        #[unroll]
        for i in 0..kept {
            let step = comptime!((i / parts) as u32).runtime();
            let vector = vector_of(step, comptime!(i % parts), size, cut);
            let at = select(vector < self.layout.vectors, vector, 0u32) as usize * pieces;
            #[unroll]
            for piece in 0..pieces {
                weights[comptime!(i * pieces + piece)] = weight[at + piece];
            }
        }
        weights
    }

    /// Writes the sum of the streams, each times its gate, from vector `to` on, and its norm: `x / sqrt(mean(x²) + epsilon)` times the
    /// weight, `x` being the sum as it is written. `kept` are the weights from [`read_weights`](Self::read_weights). All units of the
    /// cube must be here.
    #[allow(clippy::too_many_arguments)]
    pub fn write_norm<W: Float, M: Size>(
        &self,
        gates: &Array<f32>,
        weight: &[Vector<W, M>],
        kept: &Array<Vector<W, M>>,
        output: &mut [Vector<F, N>],
        normed: &mut [Vector<F, N>],
        to: usize,
        epsilon: f32,
    ) {
        let blueprint = comptime!(self.blueprint);
        let size = N::value();
        let share = M::value();
        let pieces = comptime!(size / share);
        let cut = comptime!(blueprint.cut);
        let parts = comptime!(cut.unit as usize / size);
        let vectors = self.layout.vectors;
        let columns = f32::cast_from(vectors * comptime!(size as u32));
        let mut squares = 0.0f32;
        if comptime!(blueprint.held) {
            let count = comptime!(cut.steps as usize * parts);
            let mut values = Array::<Vector<F, N>>::new(count);
            #[unroll]
            for i in 0..count {
                let step = comptime!(i / parts);
                let part = comptime!(i % parts);
                let value = Vector::<F, N>::cast_from(self.kept_sum(gates, step, part));
                values[i] = value;
                squares = add_squares(value, squares);
                let vector = vector_of(comptime!(step as u32).runtime(), part, size, cut);
                if vector < vectors {
                    output[to + vector as usize] = value;
                }
            }
            let sum = row_sum(squares, 0u32, cut.planes, cut, blueprint.target);
            let factor = 1.0f32 / (sum / columns + epsilon).sqrt();
            #[unroll]
            for i in 0..count {
                let step = comptime!((i / parts) as u32).runtime();
                let vector = vector_of(step, comptime!(i % parts), size, cut);
                let mut scaled = Vector::<f32, N>::cast_from(values[i]) * Vector::new(factor);
                #[unroll]
                for piece in 0..pieces {
                    multiply_piece(&mut scaled, kept[comptime!(i * pieces + piece)], piece);
                }
                if vector < vectors {
                    normed[to + vector as usize] = Vector::cast_from(scaled);
                }
            }
        } else {
            for step in 0..cut.steps {
                #[unroll]
                for part in 0..parts {
                    let vector = vector_of(step, part, size, cut);
                    let value = Vector::<F, N>::cast_from(self.read_sum(gates, vector));
                    squares = add_squares(value, squares);
                    if vector < vectors {
                        output[to + vector as usize] = value;
                    }
                }
            }
            let sum = row_sum(squares, 0u32, cut.planes, cut, blueprint.target);
            let factor = 1.0f32 / (sum / columns + epsilon).sqrt();
            for step in 0..cut.steps {
                #[unroll]
                for part in 0..parts {
                    let vector = vector_of(step, part, size, cut);
                    if vector < vectors {
                        // What this lane has written.
                        let value = output[to + vector as usize];
                        let mut scaled = Vector::<f32, N>::cast_from(value) * Vector::new(factor);
                        #[unroll]
                        for piece in 0..pieces {
                            let own = weight[vector as usize * pieces + piece];
                            multiply_piece(&mut scaled, own, piece);
                        }
                        normed[to + vector as usize] = Vector::cast_from(scaled);
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
