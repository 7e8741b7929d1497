//! Kernels of the gated delta rule. No Burn type enters.

mod lanes;
mod tiles;

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use crate::gated_delta::NORM_EPSILON;
use crate::intrinsics::{LOG1P, polynomial};

pub(super) use lanes::{LanesBlueprint, lanes_kernel};
pub(super) use tiles::{CHUNK, TILE, TilesBlueprint, tiles_kernel};

/// In place of a slot that there is none of.
const NONE: u32 = u32::MAX;

/// What all kernels do alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rule {
    /// Whether queries and keys are normalised.
    pub l2_norm: bool,
    /// Whether a negative slot is slot 0.
    pub null_slot: bool,
    /// Whether a state goes to the pool.
    pub written: bool,
}

/// How much there is.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: u32,
    /// Of a sequence.
    pub tokens: u32,
    /// Heads of the values, and how many of them share a key.
    pub heads: u32,
    pub sharing: u32,
    /// Rows of a state, and vectors of a row.
    pub channels: u32,
    pub vectors: u32,
    /// Of the pool.
    pub slots: u32,
}

/// Steps from one to the next, in elements or in vectors of those that are read in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Place {
    pub sequence: usize,
    pub token: usize,
    pub head: usize,
}

/// Where it all is.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Places {
    pub q: Place,
    pub k: Place,
    pub v: Place,
    pub a: Place,
    pub b: Place,
    /// Of the pool.
    pub slot: usize,
    pub pool_head: usize,
    pub row: usize,
}

/// What items of work are counted by, as divisors: blocks of rows of a state, heads, and heads that share a key.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Counts {
    pub blocks: FastDivmod<u32>,
    pub heads: FastDivmod<u32>,
    pub sharing: FastDivmod<u32>,
}

/// Numbers of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Numbers {
    /// Of the queries.
    pub scale: f32,
    /// Beyond which softplus is the identity.
    pub threshold: f32,
}

#[cube]
impl Place {
    fn of(&self, sequence: u32, token: u32, head: u32) -> usize {
        sequence as usize * self.sequence + token as usize * self.token + head as usize * self.head
    }
}

/// The slot that is meant, [`NONE`] if there is none.
#[cube]
fn slot_of<I: Int>(slot: I, slots: u32, #[comptime] rule: Rule) -> u32 {
    let negative = slot < I::from_int(0);
    let inside = slot < I::cast_from(slots);
    let place = u32::cast_from(slot);
    if comptime!(rule.null_slot) {
        select(negative, 0u32, select(inside, place, NONE))
    } else {
        select(inside && !negative, place, NONE)
    }
}

/// Where a sequence's state goes, [`NONE`] for nowhere, and after how many tokens.
#[derive(CubeType)]
struct Destination {
    slot: u32,
    kept: u32,
}

/// That of a sequence whose state came from `slot`.
#[cube]
fn destination_of<W: Int, C: Int>(
    write_slots: &ComptimeOption<&[W]>,
    accepted: &ComptimeOption<&[C]>,
    sequence: u32,
    slot: u32,
    sizes: &Sizes,
    #[comptime] rule: Rule,
) -> Destination {
    let mut to = slot;
    let mut kept = sizes.tokens;
    #[comptime]
    if let ComptimeOption::Some(write_slots) = write_slots {
        to = slot_of::<W>(write_slots[sequence as usize], sizes.slots, rule);
    }
    #[comptime]
    if let ComptimeOption::Some(accepted) = accepted {
        let steps = accepted[sequence as usize];
        let past = steps >= C::cast_from(sizes.tokens);
        kept = select(past, sizes.tokens, u32::cast_from(steps));
        kept = select(steps <= C::from_int(0), 0u32, kept);
    }
    Destination { slot: to, kept }
}

/// What the state is multiplied by before a token: `exp(-exp(a_log) * softplus(a + dt_bias))`.
#[cube]
fn decay(a: f32, dt_bias: f32, a_log: f32, threshold: f32) -> f32 {
    let x = a + dt_bias;
    let t = (-x.abs()).exp();
    let softplus = fma(t, polynomial(t, LOG1P), select(x > 0.0f32, x, 0.0f32));
    // What is not greater may be NaN, and so is softplus of it.
    let softplus = select(x > threshold, x, softplus);
    (-(a_log.exp() * softplus)).exp()
}

/// How much of what a token's value differs by is learned: `1 / (1 + exp(-b))`.
#[cube]
fn strength(b: f32) -> f32 {
    1.0f32 / (1.0f32 + (-b).exp())
}

/// What the gates of a token are made of, as it was read.
#[derive(CubeType)]
struct Gates<A: Float, B: Float, D: Float> {
    a: A,
    b: B,
    a_log: f32,
    dt_bias: D,
}

#[cube]
impl<A: Float, B: Float, D: Float> Gates<A, B, D> {
    /// Begins to read those of token `token` of a sequence.
    #[allow(clippy::too_many_arguments)]
    fn read(
        a: &[A],
        b: &[B],
        a_log: &[f32],
        dt_bias: &[D],
        sequence: u32,
        token: u32,
        head: u32,
        places: &Places,
    ) -> Gates<A, B, D> {
        Gates::<A, B, D> {
            a: a[places.a.of(sequence, token, head)],
            b: b[places.b.of(sequence, token, head)],
            a_log: a_log[head as usize],
            dt_bias: dt_bias[head as usize],
        }
    }

    fn decay(&self, threshold: f32) -> f32 {
        let (a, dt_bias) = (f32::cast_from(self.a), f32::cast_from(self.dt_bias));
        decay(a, dt_bias, self.a_log, threshold)
    }

    fn strength(&self) -> f32 {
        strength(f32::cast_from(self.b))
    }
}

/// Reciprocal of the length of a row, of the sum of its squares.
#[cube]
fn inverse_length(squares: f32, #[comptime] rule: Rule) -> f32 {
    if comptime!(rule.l2_norm) {
        1.0f32 / (squares + NORM_EPSILON).sqrt()
    } else {
        1.0f32.runtime()
    }
}
