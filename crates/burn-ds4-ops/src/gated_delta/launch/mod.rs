mod lanes;
mod tiles;

use super::args::{Recurrence, StateStore};
use super::kernel::{
    DeltaInputsLaunch, DeltaResultsLaunch, DeltaShapeLaunch, GateInputsLaunch, RuleOptions,
    StatePoolLaunch, StateSlotsLaunch, TokenTensorLaunch,
};
use crate::launching::prelude::*;

pub(super) fn can_run(recurrence: &Recurrence<CubeBackend>, pool: &CubeTensor) -> bool {
    let [slots, heads, channels, width] = pool.dims();
    let batch = recurrence.v.shape()[0];
    let rows = batch
        .checked_mul(heads)
        .and_then(|n| n.checked_mul(channels));
    let size = row_vector_size([&recurrence.q, &recurrence.k, pool], width);
    i32::try_from(slots).is_ok()
        && rows.is_some_and(|rows| i32::try_from(rows).is_ok())
        && lanes::partition(&pool.client, width, size).is_some()
}

/// A call as kernels see it.
struct Call {
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    a: CubeTensor,
    b: CubeTensor,
    a_log: CubeTensor,
    dt_bias: CubeTensor,
    pool: CubeTensor,
    read_slots: CubeTensor,
    write_slots: Option<CubeTensor>,
    accepted: Option<CubeTensor>,
    out: CubeTensor,
    states: Option<CubeTensor>,
    /// Elements of the vectors in which queries, keys and states are read.
    size: usize,
    rule: RuleOptions,
    scale: f32,
    threshold: f32,
}

impl Call {
    /// Sequences, tokens, heads, channels and columns.
    fn dims(&self) -> [usize; 5] {
        let [batch, tokens, heads, channels] = self.v.dims();
        [batch, tokens, heads, channels, self.pool.shape()[3]]
    }

    /// Value heads that share a key.
    fn heads_per_key(&self) -> usize {
        self.v.shape()[2] / self.q.shape()[2]
    }

    fn shape(&self) -> DeltaShapeLaunch {
        let [batch, tokens, heads, channels, width] = self.dims();
        DeltaShapeLaunch::new(
            batch as u32,
            tokens as u32,
            heads as u32,
            self.heads_per_key() as u32,
            channels as u32,
            (width / self.size) as u32,
        )
    }

    fn inputs<T: CubePrimitive, Q: Float>(&self) -> DeltaInputsLaunch<T, Q> {
        DeltaInputsLaunch::new(
            token_tensor(&self.q, self.size),
            token_tensor(&self.k, self.size),
            token_tensor(&self.v, 1),
            self.scale,
        )
    }

    fn gates<A: Float, B: Float, D: Float>(&self) -> GateInputsLaunch<A, B, D> {
        GateInputsLaunch::new(
            token_tensor(&self.a, 1),
            token_tensor(&self.b, 1),
            buffer(&self.a_log),
            buffer(&self.dt_bias),
            self.threshold,
        )
    }

    fn slots<R: Int, W: Int, C: Int>(&self) -> StateSlotsLaunch<R, W, C> {
        StateSlotsLaunch::new(
            buffer(&self.read_slots),
            self.write_slots.as_ref().map(buffer).into(),
            self.accepted.as_ref().map(buffer).into(),
            self.pool.shape()[0] as u32,
        )
    }

    fn results<T: CubePrimitive, Q: Float>(&self) -> DeltaResultsLaunch<T, Q> {
        let strides = self.pool.meta.strides();
        let [slot, head, row] = [0, 1, 2].map(|i| strides[i] / self.size);
        DeltaResultsLaunch::new(
            StatePoolLaunch::new(buffer(&self.pool), slot, head, row),
            buffer(&self.out),
            self.states.as_ref().map(buffer).into(),
        )
    }

    /// Dtypes of the gates, the slots to read, the slots to write and the accepted steps.
    fn dtypes(&self) -> [DType; 6] {
        let int = |ints: &Option<CubeTensor>| ints.as_ref().map_or(DType::I32, |ints| ints.dtype);
        [
            self.a.dtype,
            self.b.dtype,
            self.dt_bias.dtype,
            self.read_slots.dtype,
            int(&self.write_slots),
            int(&self.accepted),
        ]
    }
}

fn buffer(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// A tensor in vectors of `size`.
fn token_tensor<T: CubePrimitive>(tensor: &CubeTensor, size: usize) -> TokenTensorLaunch<T> {
    let strides = tensor.meta.strides();
    let [sequence, token, head] = [0, 1, 2].map(|i| strides[i] / size);
    TokenTensorLaunch::new(buffer(tensor), sequence, token, head)
}

/// Returns the outputs, and the pool or, where states are stored apart, these.
pub(super) fn run(
    recurrence: Recurrence<CubeBackend>,
    pool: CubeTensor,
    store: StateStore<CubeBackend>,
) -> (CubeTensor, CubeTensor) {
    let [batch, tokens, heads, channels] = recurrence.v.dims();
    let width = pool.shape()[3];
    let uses_tiles = tiles::is_preferred(&recurrence, &pool);
    let size = if uses_tiles {
        tiles::VECTOR
    } else {
        row_vector_size([&recurrence.q, &recurrence.k, &pool], width)
    };
    let [q, k] = [recurrence.q, recurrence.k].map(|rows| with_vectors(rows, size));
    let mut pool = with_vectors(pool, size);
    let all_states = [batch, tokens, heads, channels, width];
    let (mut write_slots, mut accepted, mut states) = (None, None, None);
    let writes_pool = matches!(store, StateStore::Pool { .. });
    match store {
        StateStore::Pool {
            slots,
            accepted: steps,
        } => {
            pool = writable(pool);
            (write_slots, accepted) = (slots.into_option(), steps.into_option());
        }
        StateStore::Apart => states = Some(output(&pool, all_states, pool.dtype)),
        StateStore::Nowhere => {}
    }
    let call = Call {
        out: output(&q, [batch, tokens, heads, channels], q.dtype),
        states,
        q,
        k,
        v: with_vectors(recurrence.v, 1),
        a: recurrence.a,
        b: recurrence.b,
        a_log: into_contiguous(recurrence.a_log),
        dt_bias: into_contiguous(recurrence.dt_bias),
        pool,
        read_slots: into_contiguous(recurrence.read_slots),
        write_slots: write_slots.map(into_contiguous),
        accepted: accepted.map(into_contiguous),
        size,
        rule: RuleOptions {
            l2_norm: recurrence.l2_norm,
            null_slot: recurrence.null_slot,
            writes_pool,
        },
        scale: recurrence.scale as f32,
        threshold: recurrence.softplus_threshold as f32,
    };
    let stored = call.states.as_ref().unwrap_or(&call.pool);
    let results = (call.out.clone(), stored.clone());
    if uses_tiles {
        tiles::launch(call);
    } else {
        lanes::launch(call);
    }
    results
}
