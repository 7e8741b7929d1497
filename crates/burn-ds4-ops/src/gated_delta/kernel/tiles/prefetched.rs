//! Inputs that are read long before they are needed.

use cubecl::prelude::*;

use super::fetch::StateBlock;
use crate::gated_delta::kernel::DeltaStrides;

/// Inputs of the next state blocks, the next block's first. They are not converted here: a
/// conversion would wait for the read.
#[derive(CubeType)]
pub(super) struct Prefetched<Q: Float, A: Float, B: Float, D: Float> {
    /// Values of the lane's row, token by token.
    pub values: Array<Q>,
    pub a: Array<A>,
    pub b: Array<B>,
    pub a_log: Array<f32>,
    pub dt_bias: Array<D>,
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
    #[allow(clippy::too_many_arguments)]
    pub fn load(
        &mut self,
        #[comptime] to: u32,
        v: &[Q],
        a: &[A],
        b: &[B],
        a_log: &[f32],
        dt_bias: &[D],
        block: &StateBlock,
        row: u32,
        gate: u32,
        strides: &DeltaStrides,
    ) {
        let tokens = comptime!(self.tokens as usize);
        let to = comptime!(to as usize);
        let (sequence, head) = (block.sequence, block.head);
        self.a[to] = a[strides.a.offset(sequence, gate, head)];
        self.b[to] = b[strides.b.offset(sequence, gate, head)];
        self.a_log[to] = a_log[head as usize];
        self.dt_bias[to] = dt_bias[head as usize];
        let first = strides.v.offset(sequence, 0u32, head) + (block.row + row) as usize;
        #[unroll]
        for token in 0..tokens {
            self.values[comptime!(to * tokens + token)] = v[first + token * strides.v.token];
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
