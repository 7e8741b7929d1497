mod lanes;
mod tiles;

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::backend::Recurrence;
use super::kernel::{
    DeltaScalarsLaunch, DeltaShapeLaunch, DeltaStridesLaunch, RuleOptions, TokenStridesLaunch,
};
use crate::launching::{output, row_vector_size, with_vectors, writable};

/// Where the states of a call go.
// Tensors are large, and there is one of these per call.
#[allow(clippy::large_enum_variant)]
pub(super) enum StateOutput {
    /// To the pool.
    Pool {
        slots: Option<CubeTensor>,
        accepted: Option<CubeTensor>,
    },
    /// All of them to a separate tensor.
    EveryState,
    /// Nowhere.
    None,
}

/// The results of a call, as far as they were asked for.
pub(super) struct Results {
    pub out: CubeTensor,
    pub pool: CubeTensor,
    pub states: Option<CubeTensor>,
}

pub(super) fn can_run(recurrence: &Recurrence<CubeBackend>, pool: &CubeTensor) -> bool {
    let [slots, heads, channels, width] = pool.shape().dims();
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
        let [batch, tokens, heads, channels] = self.v.shape().dims();
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
            self.pool.shape()[0] as u32,
        )
    }

    fn strides(&self) -> DeltaStridesLaunch {
        let token_strides = |tensor: &CubeTensor, size: usize| {
            let strides = tensor.meta.strides();
            TokenStridesLaunch::new(strides[0] / size, strides[1] / size, strides[2] / size)
        };
        let strides = self.pool.meta.strides();
        DeltaStridesLaunch::new(
            token_strides(&self.q, self.size),
            token_strides(&self.k, self.size),
            token_strides(&self.v, 1),
            token_strides(&self.a, 1),
            token_strides(&self.b, 1),
            strides[0] / self.size,
            strides[1] / self.size,
            strides[2] / self.size,
        )
    }

    fn scalars(&self) -> DeltaScalarsLaunch {
        DeltaScalarsLaunch::new(self.scale, self.threshold)
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

pub(super) fn run(
    recurrence: Recurrence<CubeBackend>,
    pool: CubeTensor,
    state_output: StateOutput,
) -> Results {
    let [batch, tokens, heads, channels] = recurrence.v.shape().dims();
    let width = pool.shape()[3];
    let uses_tiles = tiles::is_preferred(&recurrence, &pool);
    let size = if uses_tiles {
        tiles::VECTOR
    } else {
        row_vector_size([&recurrence.q, &recurrence.k, &pool], width)
    };
    let [q, k] = [recurrence.q, recurrence.k].map(|rows| with_vectors(rows, size));
    let mut pool = with_vectors(pool, size);
    let writes_pool = matches!(state_output, StateOutput::Pool { .. });
    if writes_pool {
        pool = writable(pool);
    }
    let every_state = matches!(state_output, StateOutput::EveryState);
    let (write_slots, accepted) = match state_output {
        StateOutput::Pool { slots, accepted } => (slots, accepted),
        StateOutput::EveryState | StateOutput::None => (None, None),
    };
    let all_states = [batch, tokens, heads, channels, width];
    let call = Call {
        out: output(&q, [batch, tokens, heads, channels], q.dtype),
        states: every_state.then(|| output(&pool, all_states, pool.dtype)),
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
    let results = Results {
        out: call.out.clone(),
        pool: call.pool.clone(),
        states: call.states.clone(),
    };
    if uses_tiles {
        tiles::launch(call);
    } else {
        lanes::launch(call);
    }
    results
}
