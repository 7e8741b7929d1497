//! Kernels of the gated delta rule. They use no Burn types.

mod lanes;
mod tiles;

use cubecl::prelude::*;

use cubecl::std::FastDivmod;

use crate::comptime_option::ComptimeOption;
use crate::gated_delta::args::NORM_EPSILON;
use crate::intrinsics::{LOG1P, polynomial};

pub(super) use lanes::{LanesBlueprint, lanes_kernel};
pub(super) use tiles::{COLUMN_BLOCK, TILE_ROWS, TilesBlueprint, tiles_kernel};

/// Stands for a slot that does not exist.
const NO_SLOT: u32 = u32::MAX;

/// Compile-time options that all kernels share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RuleOptions {
    /// Whether queries and keys are normalised.
    pub l2_norm: bool,
    /// Whether a negative slot means slot 0.
    pub null_slot: bool,
    /// Whether a state is written to the pool.
    pub writes_pool: bool,
}

/// The sizes of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DeltaShape {
    pub batch: u32,
    /// Tokens of a sequence.
    pub tokens: u32,
    /// Heads of the values, and the number of them that share a key.
    pub heads: u32,
    pub heads_per_key: u32,
    /// Rows of a state, and vectors of a row.
    pub channels: u32,
    pub vectors: u32,
}

/// A tensor that has elements for each sequence, token and head.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TokenTensor<T: CubePrimitive> {
    pub elements: Box<[T]>,
    /// Strides in elements, which may be vectors.
    pub sequence: usize,
    pub token: usize,
    pub head: usize,
}

/// The inputs of the tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DeltaInputs<T: CubePrimitive, Q: Float> {
    /// In vectors, as states are.
    pub q: TokenTensor<T>,
    pub k: TokenTensor<T>,
    pub v: TokenTensor<Q>,
    /// The factor of the queries.
    pub scale: f32,
}

/// The inputs of the gates.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GateInputs<A: Float, B: Float, D: Float> {
    pub a: TokenTensor<A>,
    pub b: TokenTensor<B>,
    /// One value for each head.
    pub a_log: Box<[f32]>,
    pub dt_bias: Box<[D]>,
    /// The value beyond which softplus is the identity.
    pub threshold: f32,
}

/// The slots of the sequences.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StateSlots<R: Int, W: Int, C: Int> {
    /// Where states are read.
    pub read: Box<[R]>,
    /// Where they are written; without it, where they were read.
    pub write: ComptimeOption<Box<[W]>>,
    /// The number of tokens of each sequence after which its state is written; without it, all.
    pub accepted: ComptimeOption<Box<[C]>>,
    /// Slots of the pool.
    pub count: u32,
}

/// States by slot and head.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StatePool<T: CubePrimitive> {
    pub vectors: Box<[T]>,
    /// Strides.
    pub slot: usize,
    pub head: usize,
    pub row: usize,
}

/// What a call writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DeltaResults<T: CubePrimitive, Q: Float> {
    pub pool: StatePool<T>,
    /// `[batch, tokens, heads, channels]`.
    pub out: Box<[Q]>,
    /// The state after every token, `[batch, tokens, heads, channels, vectors]`.
    pub states: ComptimeOption<Box<[T]>>,
}

/// Divisors that turn the index of a state block into its position: blocks of rows of a state,
/// heads, and value heads that share a key.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct WorkDivisors {
    pub blocks: FastDivmod<u32>,
    pub heads: FastDivmod<u32>,
    pub heads_per_key: FastDivmod<u32>,
}

/// Where rows of vectors are: the offset of the first, and the distance from one to the next.
#[derive(CubeType, Clone, Copy)]
struct RowLayout {
    first: usize,
    stride: usize,
}

#[cube]
impl RowLayout {
    fn offset(&self, row: u32) -> usize {
        self.first + row as usize * self.stride
    }

    /// The rows from row `row` on.
    fn skip(&self, row: u32) -> RowLayout {
        RowLayout {
            first: self.offset(row),
            stride: self.stride,
        }
    }
}

#[cube]
impl<T: CubePrimitive> TokenTensor<T> {
    fn offset(&self, sequence: u32, token: u32, head: u32) -> usize {
        sequence as usize * self.sequence + token as usize * self.token + head as usize * self.head
    }

    /// The rows of all tokens.
    fn rows(&self, sequence: u32, head: u32) -> RowLayout {
        RowLayout {
            first: self.offset(sequence, 0u32, head),
            stride: self.token,
        }
    }
}

#[cube]
impl<T: CubePrimitive> StatePool<T> {
    /// The rows of a state.
    fn rows(&self, slot: u32, head: u32) -> RowLayout {
        RowLayout {
            first: slot as usize * self.slot + head as usize * self.head,
            stride: self.row,
        }
    }
}

/// The slot to use, or [`NO_SLOT`] if there is none.
#[cube]
fn slot_of<I: Int>(slot: I, slots: u32, #[comptime] rule: RuleOptions) -> u32 {
    let negative = slot < I::from_int(0);
    let inside = slot < I::cast_from(slots);
    let index = u32::cast_from(slot);
    if comptime!(rule.null_slot) {
        select(negative, 0u32, select(inside, index, NO_SLOT))
    } else {
        select(inside && !negative, index, NO_SLOT)
    }
}

/// Where the state of a sequence is written, [`NO_SLOT`] for nowhere, and after how many tokens.
#[derive(CubeType)]
struct Destination {
    slot: u32,
    write_after: u32,
}

#[cube]
impl<R: Int, W: Int, C: Int> StateSlots<R, W, C> {
    /// The destination of a sequence whose state was read from `slot`.
    fn destination(
        &self,
        sequence: u32,
        slot: u32,
        tokens: u32,
        #[comptime] rule: RuleOptions,
    ) -> Destination {
        let mut to = slot;
        let mut write_after = tokens;
        #[comptime]
        if let ComptimeOption::Some(write) = &self.write {
            to = slot_of::<W>(write[sequence as usize], self.count, rule);
        }
        #[comptime]
        if let ComptimeOption::Some(accepted) = &self.accepted {
            let steps = accepted[sequence as usize];
            let past = steps >= C::cast_from(tokens);
            write_after = select(past, tokens, u32::cast_from(steps));
            write_after = select(steps <= C::from_int(0), 0u32, write_after);
        }
        Destination {
            slot: to,
            write_after,
        }
    }
}

/// The inputs of a token's gates, as they were read.
#[derive(CubeType)]
struct Gates<A: Float, B: Float, D: Float> {
    a: A,
    b: B,
    a_log: f32,
    dt_bias: D,
}

#[cube]
impl<A: Float, B: Float, D: Float> GateInputs<A, B, D> {
    /// Starts to read the inputs of the gates of token `token` of a sequence.
    fn read(&self, sequence: u32, token: u32, head: u32) -> Gates<A, B, D> {
        Gates::<A, B, D> {
            a: self.a.elements[self.a.offset(sequence, token, head)],
            b: self.b.elements[self.b.offset(sequence, token, head)],
            a_log: self.a_log[head as usize],
            dt_bias: self.dt_bias[head as usize],
        }
    }
}

#[cube]
impl<A: Float, B: Float, D: Float> Gates<A, B, D> {
    /// The factor of the state before the token: `exp(-exp(a_log) * softplus(a + dt_bias))`.
    fn decay(&self, threshold: f32) -> f32 {
        let x = f32::cast_from(self.a) + f32::cast_from(self.dt_bias);
        let t = (-x.abs()).exp();
        let softplus = fma(t, polynomial(t, LOG1P), select(x > 0.0f32, x, 0.0f32));
        // If x is not greater, it may be NaN, and then softplus is NaN too.
        let softplus = select(x > threshold, x, softplus);
        (-(self.a_log.exp() * softplus)).exp()
    }

    /// The factor of the token's correction: `1 / (1 + exp(-b))`.
    fn beta(&self) -> f32 {
        let b = f32::cast_from(self.b);
        1.0f32 / (1.0f32 + (-b).exp())
    }
}

/// The reciprocal of the norm of a row, from the sum of its squares.
#[cube]
fn inverse_norm(squares: f32, #[comptime] rule: RuleOptions) -> f32 {
    if comptime!(rule.l2_norm) {
        1.0f32 / (squares + NORM_EPSILON).sqrt()
    } else {
        1.0f32.runtime()
    }
}
