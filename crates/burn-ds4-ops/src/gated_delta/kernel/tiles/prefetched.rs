//! Inputs that are read long before they are needed.

use cubecl::prelude::*;

use super::fetch::StateBlock;
use crate::gated_delta::kernel::{DeltaInputs, GateInputs, Gates};

/// Inputs of the next state blocks, the next block's first. They are not converted here: a
/// conversion would wait for the read.
#[derive(CubeType)]
pub(super) struct Prefetched<Q: Float, A: Float, B: Float, D: Float> {
    /// Values of the lane's row, token by token.
    pub values: Array<Q>,
    a: Array<A>,
    b: Array<B>,
    a_log: Array<f32>,
    dt_bias: Array<D>,
    #[cube(comptime)]
    depth: u32,
    #[cube(comptime)]
    tokens: u32,
}

#[cube]
impl<Q: Float, A: Float, B: Float, D: Float> Prefetched<Q, A, B, D> {
    pub fn new(#[comptime] depth: u32, #[comptime] tokens: u32) -> Prefetched<Q, A, B, D> {
        Prefetched::<Q, A, B, D> {
            values: Array::new(comptime!((depth * tokens) as usize)),
            a: Array::new(depth as usize),
            b: Array::new(depth as usize),
            a_log: Array::new(depth as usize),
            dt_bias: Array::new(depth as usize),
            depth,
            tokens,
        }
    }

    /// Starts to read the inputs of block number `to`: the values of a row, and the gates of a
    /// token.
    pub fn load(
        &mut self,
        #[comptime] to: u32,
        inputs: &DeltaInputs<Vector<u32, Const<4>>, Q>,
        gates: &GateInputs<A, B, D>,
        block: &StateBlock,
        row: u32,
        gate: u32,
    ) {
        let tokens = comptime!(self.tokens as usize);
        let to = comptime!(to as usize);
        let (sequence, head) = (block.sequence, block.head);
        let own = gates.read(sequence, gate, head);
        self.a[to] = own.a;
        self.b[to] = own.b;
        self.a_log[to] = own.a_log;
        self.dt_bias[to] = own.dt_bias;
        let v = &inputs.v;
        let first = v.offset(sequence, 0u32, head) + (block.row + row) as usize;
        #[unroll]
        for token in 0..tokens {
            self.values[comptime!(to * tokens + token)] = v.elements[first + token * v.token];
        }
    }

    /// The gates of the first block.
    pub fn gates(&self) -> Gates<A, B, D> {
        Gates::<A, B, D> {
            a: self.a[0],
            b: self.b[0],
            a_log: self.a_log[0],
            dt_bias: self.dt_bias[0],
        }
    }

    /// Drops the first block.
    pub fn shift(&mut self) {
        let tokens = comptime!(self.tokens as usize);
        #[unroll]
        for i in 1..comptime!(self.depth as usize) {
            let to = comptime!(i - 1);
            self.a[to] = self.a[i];
            self.b[to] = self.b[i];
            self.a_log[to] = self.a_log[i];
            self.dt_bias[to] = self.dt_bias[i];
            #[unroll]
            for token in 0..tokens {
                self.values[comptime!(to * tokens + token)] =
                    self.values[comptime!(i * tokens + token)];
            }
        }
    }
}
