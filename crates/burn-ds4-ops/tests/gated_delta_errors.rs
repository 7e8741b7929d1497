//! What the gated delta rule refuses.

use burn::tensor::{DType, Device, Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::gated_delta::{
    GatedDelta, GatedDeltaInputs, GatedDeltaOptions, StateSlots, StateUpdate, gated_delta_rule,
};

use super::common::{Refusal, assert_each_refused, devices, integers, second_device};

fn flex() -> &'static Device {
    &devices()[0].1
}

fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, (flex(), DType::F32))
}

fn f16_tensor<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, (flex(), DType::F16))
}

fn doubles<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, (flex(), DType::F64))
}

pub fn slots(slots: &[i64]) -> Tensor<1, Int> {
    integers(slots, [slots.len()], flex())
}

/// A call with two sequences of three tokens, 2 heads and 4 of values, width 8 and 6 channels, on a
/// pool of 5 slots.
pub struct Call {
    pub inputs: GatedDeltaInputs,
    pub pool: Tensor<4>,
    pub slots: StateSlots,
    pub options: GatedDeltaOptions,
}

impl Call {
    fn new(batch: usize, tokens: usize, heads: usize, value_heads: usize) -> Self {
        let gates = [batch, tokens, value_heads];
        Self {
            inputs: GatedDeltaInputs {
                q: zeros([batch, tokens, heads, 8]),
                k: zeros([batch, tokens, heads, 8]),
                v: zeros([batch, tokens, value_heads, 6]),
                a: zeros(gates),
                b: zeros(gates),
                a_log: zeros([value_heads]),
                dt_bias: zeros([value_heads]),
            },
            pool: zeros([5, value_heads, 6, 8]),
            slots: StateSlots::in_place(slots(&(0..batch as i64).collect::<Vec<_>>())),
            options: GatedDeltaOptions::new(),
        }
    }

    fn run(self) -> Result<GatedDelta, OpError> {
        gated_delta_rule(self.inputs, self.pool, self.slots, &self.options)
    }
}

pub fn accepted(steps: &[i64]) -> GatedDeltaOptions {
    GatedDeltaOptions::new().with_update(StateUpdate::Accepted(slots(steps)))
}

/// The message for a call that would be accepted without `change`.
pub fn refused(change: impl FnOnce(&mut Call)) -> String {
    let mut call = Call::new(2, 3, 2, 4);
    change(&mut call);
    match call.run() {
        Ok(_) => "accepted".into(),
        Err(error) => error.to_string(),
    }
}

pub fn all_refused(cases: &[Refusal<Call>]) {
    assert_each_refused(|| Call::new(2, 3, 2, 4), Call::run, cases);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    all_refused(&[
        (
            |call| call.inputs.k = zeros([2, 3, 2, 7]),
            "`k` has shape [2, 3, 2, 7], expected [2, 3, 2, 8]",
        ),
        (
            |call| call.inputs.v = zeros([2, 2, 4, 6]),
            "`v` has shape [2, 2, 4, 6], expected [2, 3, 4, 6]",
        ),
        (
            |call| call.inputs.a = zeros([2, 3, 2]),
            "`a` has shape [2, 3, 2], expected [2, 3, 4]",
        ),
        (
            |call| call.inputs.b = zeros([1, 3, 4]),
            "`b` has shape [1, 3, 4], expected [2, 3, 4]",
        ),
        (
            |call| call.inputs.a_log = zeros([2]),
            "`a_log` has shape [2], expected [4]",
        ),
        (
            |call| call.inputs.dt_bias = zeros([1]),
            "`dt_bias` has shape [1], expected [4]",
        ),
        (
            |call| call.pool = zeros([5, 4, 8, 6]),
            "`pool` has shape [5, 4, 8, 6], expected [5, 4, 6, 8]",
        ),
        (
            |call| call.slots.read = slots(&[1]),
            "`read_slots` has shape [1], expected [2]",
        ),
        (
            |call| call.slots.write = Some(slots(&[1, 2, 3])),
            "`write_slots` has shape [3], expected [2]",
        ),
        (
            |call| call.options = accepted(&[1, 2, 3]),
            "`accepted_steps` has shape [3], expected [2]",
        ),
    ]);
}

#[test]
fn sizes_out_of_range_are_refused() {
    all_refused(&[
        (
            |call| *call = Call::new(2, 0, 2, 4),
            "`tokens of q` is 0, expected 1 to 16",
        ),
        (
            |call| *call = Call::new(2, 17, 2, 4),
            "`tokens of q` is 17, expected 1 to 16",
        ),
        (
            |call| *call = Call::new(2, 3, 2, 3),
            "`heads of v` is 3, expected a multiple of 2, the heads of q",
        ),
        (
            |call| *call = Call::new(2, 3, 0, 4),
            "`heads of q` is 0, expected at least 1",
        ),
        (
            |call| *call = Call::new(2, 3, 2, 0),
            "`heads of v` is 0, expected at least 1",
        ),
        (
            |call| call.inputs.q = zeros([2, 3, 2, 0]),
            "`width of q` is 0, expected at least 1",
        ),
        (
            |call| call.inputs.v = zeros([2, 3, 4, 0]),
            "`channels of v` is 0, expected at least 1",
        ),
        (
            |call| call.pool = zeros([0, 4, 6, 8]),
            "`slots of pool` is 0, expected at least 1",
        ),
    ]);
}

#[test]
fn dtypes_that_do_not_fit_are_refused() {
    const FLOATS: &str = "F32, F16 or BF16";
    let shape = [2, 3, 2, 8];
    assert_eq!(
        refused(|call| call.inputs.q = doubles(shape)),
        format!("`q` has dtype F64, expected {FLOATS}")
    );
    assert_eq!(
        refused(|call| call.pool = doubles([5, 4, 6, 8])),
        format!("`pool` has dtype F64, expected {FLOATS}")
    );
    assert_eq!(
        refused(|call| call.inputs.a = doubles([2, 3, 4])),
        format!("`a` has dtype F64, expected {FLOATS}")
    );
    assert_eq!(
        refused(|call| call.inputs.b = doubles([2, 3, 4])),
        format!("`b` has dtype F64, expected {FLOATS}")
    );
    assert_eq!(
        refused(|call| call.inputs.dt_bias = doubles([4])),
        format!("`dt_bias` has dtype F64, expected {FLOATS}")
    );
    all_refused(&[
        (
            |call| call.inputs.k = f16_tensor([2, 3, 2, 8]),
            "`k` has dtype F16, expected that of `q`",
        ),
        (
            |call| call.inputs.v = f16_tensor([2, 3, 4, 6]),
            "`v` has dtype F16, expected that of `q`",
        ),
        (
            |call| call.inputs.a_log = f16_tensor([4]),
            "`a_log` has dtype F16, expected F32",
        ),
        (
            |call| call.slots.read = slots(&[0, 1]).cast(burn::tensor::IntDType::I8),
            "`read_slots` has dtype I8, expected I32, I64 or U32",
        ),
    ]);
}

#[test]
fn numbers_that_are_none_are_refused() {
    all_refused(&[
        (
            |call| call.options = GatedDeltaOptions::new().with_scale(f64::NAN),
            "`scale` is NaN, expected a number",
        ),
        (
            |call| call.options = GatedDeltaOptions::new().with_softplus_threshold(f64::NAN),
            "`softplus_threshold` is NaN, expected a number",
        ),
    ]);
}

#[test]
fn tensors_on_different_devices_are_refused() {
    let Some((_, other)) = second_device() else {
        return;
    };
    let elsewhere = |argument: &str| {
        format!(
            "`{argument}` is on {other:?}, expected {:?} like `pool`",
            flex()
        )
    };
    type Change = fn(&mut Call, &Device);
    let changes: [(&str, Change); 5] = [
        ("q", |call, other| {
            call.inputs.q = call.inputs.q.clone().to_device(other)
        }),
        ("a_log", |call, other| {
            call.inputs.a_log = call.inputs.a_log.clone().to_device(other)
        }),
        ("dt_bias", |call, other| {
            call.inputs.dt_bias = call.inputs.dt_bias.clone().to_device(other)
        }),
        ("read_slots", |call, other| {
            call.slots.read = call.slots.read.clone().to_device(other)
        }),
        ("write_slots", |call, other| {
            call.slots.write = Some(slots(&[3, 4]).to_device(other))
        }),
    ];
    for (argument, change) in changes {
        assert_eq!(refused(|call| change(call, other)), elsewhere(argument));
    }
}
