//! Kernels of the gated delta rule. They use no Burn types.

mod lanes;
mod tiles;

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use crate::gated_delta::NORM_EPSILON;
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
    /// Slots of the pool.
    pub slots: u32,
}

/// Strides of a tensor by sequence, token and head. They count elements, or vectors where the
/// tensor is read in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct TokenStrides {
    pub sequence: usize,
    pub token: usize,
    pub head: usize,
}

/// Strides of all tensors of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DeltaStrides {
    pub q: TokenStrides,
    pub k: TokenStrides,
    pub v: TokenStrides,
    pub a: TokenStrides,
    pub b: TokenStrides,
    /// Strides of the pool.
    pub slot: usize,
    pub pool_head: usize,
    pub row: usize,
}

/// Divisors that turn the index of a state block into its position: blocks of rows of a state,
/// heads, and value heads that share a key.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct WorkDivisors {
    pub blocks: FastDivmod<u32>,
    pub heads: FastDivmod<u32>,
    pub heads_per_key: FastDivmod<u32>,
}

/// Scalar arguments of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DeltaScalars {
    /// The factor of the queries.
    pub scale: f32,
    /// The value beyond which softplus is the identity.
    pub threshold: f32,
}

#[cube]
impl TokenStrides {
    fn offset(&self, sequence: u32, token: u32, head: u32) -> usize {
        sequence as usize * self.sequence + token as usize * self.token + head as usize * self.head
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

/// The destination of a sequence whose state was read from `slot`.
#[cube]
fn destination_of<W: Int, C: Int>(
    write_slots: &ComptimeOption<&[W]>,
    accepted: &ComptimeOption<&[C]>,
    sequence: u32,
    slot: u32,
    shape: &DeltaShape,
    #[comptime] rule: RuleOptions,
) -> Destination {
    let mut to = slot;
    let mut write_after = shape.tokens;
    #[comptime]
    if let ComptimeOption::Some(write_slots) = write_slots {
        to = slot_of::<W>(write_slots[sequence as usize], shape.slots, rule);
    }
    #[comptime]
    if let ComptimeOption::Some(accepted) = accepted {
        let steps = accepted[sequence as usize];
        let past = steps >= C::cast_from(shape.tokens);
        write_after = select(past, shape.tokens, u32::cast_from(steps));
        write_after = select(steps <= C::from_int(0), 0u32, write_after);
    }
    Destination {
        slot: to,
        write_after,
    }
}

/// The factor of the state before a token: `exp(-exp(a_log) * softplus(a + dt_bias))`.
#[cube]
fn decay(a: f32, dt_bias: f32, a_log: f32, threshold: f32) -> f32 {
    let x = a + dt_bias;
    let t = (-x.abs()).exp();
    let softplus = fma(t, polynomial(t, LOG1P), select(x > 0.0f32, x, 0.0f32));
    // If x is not greater, it may be NaN, and then softplus is NaN too.
    let softplus = select(x > threshold, x, softplus);
    (-(a_log.exp() * softplus)).exp()
}

/// The factor of a token's correction: `1 / (1 + exp(-b))`.
#[cube]
fn beta(b: f32) -> f32 {
    1.0f32 / (1.0f32 + (-b).exp())
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
impl<A: Float, B: Float, D: Float> Gates<A, B, D> {
    /// Starts to read the inputs of the gates of token `token` of a sequence.
    fn read(
        a: &[A],
        b: &[B],
        a_log: &[f32],
        dt_bias: &[D],
        sequence: u32,
        token: u32,
        head: u32,
        strides: &DeltaStrides,
    ) -> Gates<A, B, D> {
        Gates::<A, B, D> {
            a: a[strides.a.offset(sequence, token, head)],
            b: b[strides.b.offset(sequence, token, head)],
            a_log: a_log[head as usize],
            dt_bias: dt_bias[head as usize],
        }
    }

    fn decay(&self, threshold: f32) -> f32 {
        let (a, dt_bias) = (f32::cast_from(self.a), f32::cast_from(self.dt_bias));
        decay(a, dt_bias, self.a_log, threshold)
    }

    fn beta(&self) -> f32 {
        beta(f32::cast_from(self.b))
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
