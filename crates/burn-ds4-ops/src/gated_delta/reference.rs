//! The gated delta rule in plain tensor operations.
//!
//! Tokens are processed one after the other, as in the recurrence, and every operation has the
//! shape that it has for one token. So several tokens at once give the same bits as one by one, as
//! long as the state is not rounded in between.

use super::args::{NORM_EPSILON, Recurrence, StateStore};
use crate::dims::{Dims, dims_of};
use crate::reference::prelude::*;

/// Slots clamped to the pool, and which of them are skipped.
struct Slots<B: Backend> {
    /// `[batch]`, in range.
    indices: IntTensor<B>,
    /// `[batch]`: true where there is nothing to read or write.
    skipped: BoolTensor<B>,
}

impl<B: Backend> Slots<B> {
    fn new(slots: IntTensor<B>, count: usize, null_slot: bool) -> Self {
        let mask_dtype = bool_dtype::<B>(&slots.device());
        let indices = within::<B>(slots.clone(), count);
        let skipped = if null_slot {
            B::int_greater_equal_elem(slots, (count as i64).into(), mask_dtype)
        } else {
            B::int_not_equal(indices.clone(), slots, mask_dtype)
        };
        Self {
            indices: B::int_cast(indices, INT),
            skipped,
        }
    }

    fn read(recurrence: &Recurrence<B>, pool: &FloatTensor<B>) -> Self {
        let slots = recurrence.read_slots.clone();
        Self::new(slots, pool.shape()[0], recurrence.null_slot)
    }
}

/// Returns the outputs, and the pool or, where states are stored apart, these.
pub(super) fn gated_delta_rule<B: Backend>(
    recurrence: Recurrence<B>,
    pool: FloatTensor<B>,
    store: StateStore<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let read = Slots::read(&recurrence, &pool);
    let first = initial::<B>(&pool, &read);
    match store {
        StateStore::Pool { slots, accepted } => {
            let accepted = accepted.into_option();
            let mut saved = first.clone();
            let outputs = steps::<B>(&recurrence, first, &read, |token, state| {
                saved = match &accepted {
                    None => state.clone(),
                    Some(accepted) => {
                        let mask_dtype = bool_dtype::<B>(&accepted.device());
                        let bound = (token as i64 + 1).into();
                        let reached =
                            B::int_greater_equal_elem(accepted.clone(), bound, mask_dtype);
                        let reached = expand_mask::<B>(reached, &state.shape());
                        B::float_mask_where(saved.clone(), reached, state.clone())
                    }
                };
            });
            let write = match slots.into_option() {
                None => read,
                Some(slots) => {
                    let mut write = Slots::<B>::new(slots, pool.shape()[0], recurrence.null_slot);
                    write.skipped = B::bool_or(write.skipped, read.skipped);
                    write
                }
            };
            (outputs, write_states::<B>(pool, saved, write))
        }
        StateStore::Apart => {
            let mut states = Vec::new();
            let outputs = steps::<B>(&recurrence, first, &read, |_, state| {
                let [batch, heads, channels, width] = state.dims();
                let state = mask_skipped::<B>(state.clone(), &read.skipped);
                let state = B::float_cast(state, pool.dtype().into());
                let shape = Shape::new([batch, 1, heads, channels, width]);
                states.push(B::float_reshape(state, shape));
            });
            (outputs, B::float_cat(states, 1))
        }
        StateStore::Nowhere => (steps::<B>(&recurrence, first, &read, |_, _| {}), pool),
    }
}

fn initial<B: Backend>(pool: &FloatTensor<B>, slots: &Slots<B>) -> FloatTensor<B> {
    let states = B::float_select(pool.clone(), 0, slots.indices.clone());
    as_f32::<B>(states)
}

/// Runs all tokens from an initial state. Calls `after` with each token and the state after it.
fn steps<B: Backend>(
    recurrence: &Recurrence<B>,
    mut state: FloatTensor<B>,
    slots: &Slots<B>,
    mut after: impl FnMut(usize, &FloatTensor<B>),
) -> FloatTensor<B> {
    let [_, tokens, _, _] = recurrence.v.dims();
    let dtype: FloatDType = recurrence.v.dtype().into();
    let outputs = (0..tokens).map(|token| {
        let output;
        (output, state) = recurrence.step(token, state.clone());
        after(token, &state);
        B::float_cast(mask_skipped::<B>(output, &slots.skipped), dtype)
    });
    B::float_cat(outputs.collect(), 1)
}

impl<B: Backend> Recurrence<B> {
    /// Returns the output `[batch, 1, value heads, channels]` and the next state.
    fn step(&self, token: usize, state: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let shape = state.shape();
        let [batch, heads, channels, _] = dims_of(&shape);
        let q = self.of_value_heads(B::float_mul_scalar(
            self.normalized(&self.q, token),
            self.scale.into(),
        ));
        let k = self.of_value_heads(self.normalized(&self.k, token));
        let v = reshape::<B>(
            token_slice::<B>(&self.v, token),
            [batch, heads, channels, 1],
        );
        let full = |tensor: FloatTensor<B>| B::float_expand(tensor, shape.clone());

        let state = B::float_mul(state, full(self.decay(token)));
        let recalled = B::float_sum_dim(B::float_mul(state.clone(), full(k.clone())), 3);
        let beta = B::float_expand(self.beta(token), v.shape());
        let correction = B::float_mul(B::float_sub(v, recalled), beta);
        let state = B::float_add(state, B::float_mul(full(correction), full(k)));
        let output = B::float_sum_dim(B::float_mul(state.clone(), full(q)), 3);
        let output = reshape::<B>(output, [batch, 1, heads, channels]);
        (output, state)
    }

    /// Queries or keys of one token, normalised if asked for: `[batch, 1, heads, width]`.
    fn normalized(&self, rows: &FloatTensor<B>, token: usize) -> FloatTensor<B> {
        let rows = token_slice::<B>(rows, token);
        if !self.l2_norm {
            return rows;
        }
        let squares = B::float_sum_dim(B::float_mul(rows.clone(), rows.clone()), 3);
        let norms = B::float_sqrt(B::float_add_scalar(squares, NORM_EPSILON.into()));
        let inverse = B::float_expand(B::float_recip(norms), rows.shape());
        B::float_mul(rows, inverse)
    }

    /// `[batch, 1, heads, width]` to `[batch, value heads, 1, width]`: neighbouring value heads
    /// share a head.
    fn of_value_heads(&self, rows: FloatTensor<B>) -> FloatTensor<B> {
        let [batch, _, heads, width] = rows.dims();
        let value_heads = self.v.shape()[2];
        let rows = reshape::<B>(rows, [batch, heads, 1, width]);
        let shared = Shape::new([batch, heads, value_heads / heads, width]);
        let rows = B::float_expand(rows, shared);
        reshape::<B>(rows, [batch, value_heads, 1, width])
    }

    /// `exp(-exp(a_log) * softplus(a + dt_bias))`: `[batch, value heads, 1, 1]`.
    fn decay(&self, token: usize) -> FloatTensor<B> {
        let a = token_slice::<B>(&self.a, token);
        let shape = a.shape();
        let [batch, _, heads] = dims_of(&shape);
        let of_heads = |tensor: &FloatTensor<B>| {
            let tensor = as_f32::<B>(tensor.clone());
            broadcast::<B>(tensor, [1, 1, heads], shape.clone())
        };
        let x = B::float_add(a, of_heads(&self.dt_bias));
        // log(1 + exp(x)), which overflows for no x.
        let small = B::float_exp(B::float_neg(B::float_abs(x.clone())));
        let softplus = B::float_add(B::float_clamp_min(x.clone(), 0.0.into()), log1p::<B>(small));
        let mask_dtype = bool_dtype::<B>(&x.device());
        let linear = B::float_greater_elem(x.clone(), self.softplus_threshold.into(), mask_dtype);
        let softplus = B::float_mask_where(softplus, linear, x);
        let rate = B::float_exp(of_heads(&self.a_log));
        let decay = B::float_exp(B::float_neg(B::float_mul(rate, softplus)));
        reshape::<B>(decay, [batch, heads, 1, 1])
    }

    /// `1 / (1 + exp(-b))`: `[batch, value heads, 1, 1]`.
    fn beta(&self, token: usize) -> FloatTensor<B> {
        let b = token_slice::<B>(&self.b, token);
        let [batch, _, heads] = b.dims();
        let beta = B::float_recip(B::float_add_scalar(
            B::float_exp(B::float_neg(b)),
            1.0.into(),
        ));
        reshape::<B>(beta, [batch, heads, 1, 1])
    }
}

/// Writes the states to their slots of the pool.
///
/// Sequences are processed one after the other: a skipped sequence writes back what its slot holds
/// at that time, which may be the new state of another sequence.
fn write_states<B: Backend>(
    mut pool: FloatTensor<B>,
    states: FloatTensor<B>,
    slots: Slots<B>,
) -> FloatTensor<B> {
    let states = B::float_cast(states, pool.dtype().into());
    for sequence in 0..states.shape()[0] {
        let own = sequence..sequence + 1;
        let state = slice::<B>(states.clone(), 0, own.clone());
        let index = int_slice::<B>(slots.indices.clone(), 0, own.clone());
        let held = B::float_select(pool.clone(), 0, index.clone());
        let skipped = bool_slice::<B>(slots.skipped.clone(), 0, own);
        let skipped = expand_mask::<B>(skipped, &state.shape());
        let state = B::float_mask_where(state, skipped, held);
        pool = B::float_select_assign(pool, 0, index, state, IndexingUpdateOp::Assign);
    }
    pool
}

/// Replaces the rows of skipped sequences by zeros, whatever they hold.
fn mask_skipped<B: Backend>(rows: FloatTensor<B>, skipped: &BoolTensor<B>) -> FloatTensor<B> {
    let skipped = expand_mask::<B>(skipped.clone(), &rows.shape());
    B::float_mask_fill(rows, skipped, 0.0.into())
}

/// Expands a mask of sequences to all elements of the shape.
fn expand_mask<B: Backend>(mask: BoolTensor<B>, shape: &Shape) -> BoolTensor<B> {
    let mut single = vec![1; shape.num_dims()];
    single[0] = shape[0];
    B::bool_expand(B::bool_reshape(mask, Shape::from(single)), shape.clone())
}

/// The slice of one token, in f32.
fn token_slice<B: Backend>(tensor: &FloatTensor<B>, token: usize) -> FloatTensor<B> {
    as_f32::<B>(slice::<B>(tensor.clone(), 1, token..token + 1))
}
