use cubecl::prelude::*;

use crate::caps::Target;
use crate::comptime_option::ComptimeOption;
use crate::intrinsics::{exp, inverse_rms, read_ordered, reciprocal};
use crate::rows::{RowPartition, add_squares, multiply_piece, row_sum, vector_of};

/// How the kernels that collapse a token's streams are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TokenBlueprint {
    /// Streams of a token.
    pub streams: u32,
    /// How each stream is divided among lanes.
    pub partition: RowPartition,
    /// Whether a lane keeps its part of the streams in registers and does not read it again.
    pub in_registers: bool,
    /// The instructions that the kernel may use.
    pub target: Target,
}

impl TokenBlueprint {
    /// Units of a cube.
    pub fn units(&self) -> u32 {
        self.partition.plane * self.partition.planes
    }
}

/// The streams of all tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Streams<F: Float, N: Size> {
    pub values: Box<[Vector<F, N>]>,
    /// The number of tokens.
    pub tokens: u32,
    /// Vectors of a stream.
    pub vectors: u32,
    /// The distance from one token to the next.
    pub token: usize,
    /// The distance from one stream to the next.
    pub stream: usize,
}

#[cube]
impl<F: Float, N: Size> Streams<F, N> {
    /// `1 / sqrt(mean(v²) + epsilon)`, where `v` is all streams of a token, from the sum of
    /// squares.
    pub fn inverse_rms(
        &self,
        sum: f32,
        epsilon: f32,
        #[comptime] blueprint: TokenBlueprint,
    ) -> f32 {
        let size = N::value();
        let count = f32::cast_from(self.vectors * comptime!(size as u32 * blueprint.streams));
        inverse_rms(sum, count, epsilon, blueprint.target)
    }
}

/// What turns the projection of a token into its coefficients.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MixParameters {
    /// One value for each coefficient.
    pub base: Box<[f32]>,
    /// One value for each coefficient; for gates alone, one for all.
    pub scale: Box<[f32]>,
    /// For gates and matrix.
    pub epsilon: f32,
    /// For the norm over all streams.
    pub norm_epsilon: f32,
}

/// Where the collapsed streams are written, and their norm, if one follows.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct CollapsedRows<F: Float, W: Float, N: Size, M: Size> {
    pub norm: ComptimeOption<RowNorm<F, W, N, M>>,
    /// `[tokens, d]`.
    pub collapsed: Box<[Vector<F, N>]>,
}

/// The norm of the collapsed streams.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowNorm<F: Float, W: Float, N: Size, M: Size> {
    /// One value for each channel.
    pub weight: Box<[Vector<W, M>]>,
    pub epsilon: f32,
    /// Where the norm is written: `[tokens, d]`.
    pub normed: Box<[Vector<F, N>]>,
}

/// A token's streams, as a lane sees them.
#[derive(CubeType)]
pub(super) struct TokenStreams<'a, F: Float, N: Size> {
    streams: &'a Streams<F, N>,
    /// This lane's part of them, if it is in registers.
    values: Array<Vector<F, N>>,
    /// The first vector of the token.
    first: usize,
    #[cube(comptime)]
    blueprint: TokenBlueprint,
}

#[cube]
impl<'a, F: Float, N: Size> TokenStreams<'a, F, N> {
    /// Reads the lane's part of the streams, if it is kept in registers.
    pub fn new(
        streams: &'a Streams<F, N>,
        index: u32,
        #[comptime] blueprint: TokenBlueprint,
    ) -> Self {
        let size = N::value();
        let partition = comptime!(blueprint.partition);
        let parts = comptime!(partition.block as usize / size);
        let vectors_held = comptime!(if blueprint.in_registers {
            (partition.steps * blueprint.streams) as usize * parts
        } else {
            1
        });
        let mut token = TokenStreams::<'a, F, N> {
            streams,
            values: Array::new(vectors_held),
            first: index as usize * streams.token,
            blueprint,
        };
        if comptime!(blueprint.in_registers) {
            #[unroll]
            for i in 0..vectors_held {
                let step = comptime!((i / parts) as u32 / blueprint.streams).runtime();
                let stream = comptime!((i / parts) as u32 % blueprint.streams);
                let vector = vector_of(step, comptime!(i % parts), size, partition);
                let value = token.read(stream, vector);
                token.values[i] = value;
            }
        }
        token
    }

    /// A vector of a stream, zeros past its end.
    fn read(&self, #[comptime] stream: u32, vector: u32) -> Vector<F, N> {
        let inside = vector < self.streams.vectors;
        let first = self.first + comptime!(stream as usize) * self.streams.stream;
        let at = first + select(inside, vector, 0u32) as usize;
        let value = read_ordered(&self.streams.values, at, self.blueprint.target);
        select(inside, value, Vector::new(F::new(0.0)))
    }

    /// The sum of this lane's vectors `part` of block `step`, each times its gate, from registers.
    fn register_sum(
        &self,
        gates: &Array<f32>,
        #[comptime] step: usize,
        #[comptime] part: usize,
    ) -> Vector<f32, N> {
        let streams = comptime!(self.blueprint.streams as usize);
        let size = N::value();
        let parts = comptime!(self.blueprint.partition.block as usize / size);
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
    fn memory_sum(&self, gates: &Array<f32>, vector: u32) -> Vector<f32, N> {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for stream in 0..comptime!(self.blueprint.streams) {
            let value = Vector::<f32, N>::cast_from(self.read(stream, vector));
            let gate = gates[comptime!(stream as usize)];
            sum = fma(Vector::new(gate), value, sum);
        }
        sum
    }

    /// Reads this lane's part of the weights of a norm, if its part of the streams is in registers.
    pub fn read_weights<W: Float, M: Size>(
        &self,
        norm: &ComptimeOption<RowNorm<F, W, N, M>>,
    ) -> Array<Vector<W, M>> {
        let blueprint = comptime!(self.blueprint);
        let size = N::value();
        let weight_size = M::value();
        let pieces = comptime!(size / weight_size);
        let partition = comptime!(blueprint.partition);
        let parts = comptime!(partition.block as usize / size);
        let vectors_held = comptime!(if blueprint.in_registers {
            partition.steps as usize * parts
        } else {
            0
        });
        let mut weights = Array::<Vector<W, M>>::new(comptime!((vectors_held * pieces).max(1)));
        #[comptime]
        if let ComptimeOption::Some(norm) = norm {
            #[unroll]
            for i in 0..vectors_held {
                let step = comptime!((i / parts) as u32).runtime();
                let vector = vector_of(step, comptime!(i % parts), size, partition);
                let at = select(vector < self.streams.vectors, vector, 0u32) as usize * pieces;
                #[unroll]
                for piece in 0..pieces {
                    weights[comptime!(i * pieces + piece)] =
                        read_ordered(&norm.weight, at + piece, blueprint.target);
                }
            }
        }
        weights
    }

    /// Writes the sum of the streams, each times its gate, from vector `to` on, and its norm, if
    /// there is one. The norm is `x / sqrt(mean(x²) + epsilon)` times the weight, where `x` is the
    /// sum as it is written. `weights` come from [`read_weights`](Self::read_weights). Every unit
    /// of the cube must call this.
    pub fn write<W: Float, M: Size>(
        &self,
        gates: &Array<f32>,
        weights: &Array<Vector<W, M>>,
        rows: &mut CollapsedRows<F, W, N, M>,
        to: usize,
    ) {
        let blueprint = comptime!(self.blueprint);
        let in_registers = comptime!(blueprint.in_registers);
        let size = N::value();
        let weight_size = M::value();
        let pieces = comptime!(size / weight_size);
        let partition = comptime!(blueprint.partition);
        let parts = comptime!(partition.block as usize / size);
        let vectors = self.streams.vectors;
        let columns = f32::cast_from(vectors * comptime!(size as u32));
        let mut squares = 0.0f32;
        let count = comptime!(partition.steps as usize * parts);
        let mut values =
            Array::<Vector<F, N>>::new(comptime!(if in_registers { count } else { 1 }));
        if comptime!(in_registers) {
            #[unroll]
            for i in 0..count {
                let step = comptime!(i / parts);
                let part = comptime!(i % parts);
                let value = Vector::<F, N>::cast_from(self.register_sum(gates, step, part));
                values[i] = value;
                squares = add_squares(value, squares);
                let vector = vector_of(comptime!(step as u32).runtime(), part, size, partition);
                if vector < vectors {
                    rows.collapsed[to + vector as usize] = value;
                }
            }
        } else {
            for step in 0..partition.steps {
                #[unroll]
                for part in 0..parts {
                    let vector = vector_of(step, part, size, partition);
                    let value = Vector::<F, N>::cast_from(self.memory_sum(gates, vector));
                    squares = add_squares(value, squares);
                    if vector < vectors {
                        rows.collapsed[to + vector as usize] = value;
                    }
                }
            }
        }
        #[comptime]
        if let ComptimeOption::Some(norm) = rows.norm.as_mut() {
            let sum = row_sum(squares, 0u32, partition.planes, partition, blueprint.target);
            let factor = inverse_rms(sum, columns, norm.epsilon, blueprint.target);
            if comptime!(in_registers) {
                #[unroll]
                for i in 0..count {
                    let step = comptime!((i / parts) as u32).runtime();
                    let vector = vector_of(step, comptime!(i % parts), size, partition);
                    let mut scaled = Vector::<f32, N>::cast_from(values[i]) * Vector::new(factor);
                    #[unroll]
                    for piece in 0..pieces {
                        let own = weights[comptime!(i * pieces + piece)];
                        multiply_piece(&mut scaled, own, piece);
                    }
                    if vector < vectors {
                        norm.normed[to + vector as usize] = Vector::cast_from(scaled);
                    }
                }
            } else {
                for step in 0..partition.steps {
                    #[unroll]
                    for part in 0..parts {
                        let vector = vector_of(step, part, size, partition);
                        if vector < vectors {
                            // This lane wrote the value itself.
                            let value = rows.collapsed[to + vector as usize];
                            let mut scaled =
                                Vector::<f32, N>::cast_from(value) * Vector::new(factor);
                            #[unroll]
                            for piece in 0..pieces {
                                let own = norm.weight[vector as usize * pieces + piece];
                                multiply_piece(&mut scaled, own, piece);
                            }
                            norm.normed[to + vector as usize] = Vector::cast_from(scaled);
                        }
                    }
                }
            }
        }
    }
}

#[cube]
pub(super) fn sigmoid(x: f32, #[comptime] target: Target) -> f32 {
    reciprocal(1.0f32 + exp(-x, target), target)
}

/// Coefficient `at` of a token, as far as it does not depend on others: a gate, or a logit of the
/// matrix as it is.
#[cube]
pub(super) fn coefficient(
    mixed: f32,
    at: u32,
    epsilon: f32,
    #[comptime] blueprint: TokenBlueprint,
) -> f32 {
    let n = comptime!(blueprint.streams);
    let mut value = mixed;
    if at < 2 * n {
        let gate = sigmoid(mixed, blueprint.target);
        value = select(at < n, gate + epsilon, 2.0f32 * gate);
    }
    value
}
