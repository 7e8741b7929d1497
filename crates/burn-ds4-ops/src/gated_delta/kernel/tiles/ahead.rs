//! What is read long before it is needed.

use cubecl::prelude::*;

use super::fetch::Item;
use crate::gated_delta::kernel::Places;

/// What lanes read of items ahead of time, the next one's first. Nothing is made of it before, which would wait for it.
#[derive(CubeType)]
pub(super) struct Ahead<Q: Float, A: Float, B: Float, D: Float> {
    /// Of the lane's row, token by token.
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
impl<Q: Float, A: Float, B: Float, D: Float> Ahead<Q, A, B, D> {
    pub fn new(#[comptime] depth: u32, #[comptime] tokens: u32) -> Ahead<Q, A, B, D> {
        Ahead::<Q, A, B, D> {
            values: Array::new(comptime!((depth * tokens) as usize)),
            a: Array::new(depth as usize),
            b: Array::new(depth as usize),
            a_log: Array::new(depth as usize),
            dt_bias: Array::new(depth as usize),
            depth,
            tokens,
        }
    }

    /// Begins to read what is to be number `to`: the values of a row, and the gates of a token.
    #[allow(clippy::too_many_arguments)]
    pub fn load(
        &mut self,
        #[comptime] to: u32,
        v: &[Q],
        a: &[A],
        b: &[B],
        a_log: &[f32],
        dt_bias: &[D],
        item: &Item,
        row: u32,
        gate: u32,
        places: &Places,
    ) {
        let tokens = comptime!(self.tokens as usize);
        let to = comptime!(to as usize);
        let (sequence, head) = (item.sequence, item.head);
        self.a[to] = a[places.a.of(sequence, gate, head)];
        self.b[to] = b[places.b.of(sequence, gate, head)];
        self.a_log[to] = a_log[head as usize];
        self.dt_bias[to] = dt_bias[head as usize];
        let first = places.v.of(sequence, 0u32, head) + (item.row + row) as usize;
        #[unroll]
        for token in 0..tokens {
            self.values[comptime!(to * tokens + token)] = v[first + token * places.v.token];
        }
    }

    /// The first is done with.
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
