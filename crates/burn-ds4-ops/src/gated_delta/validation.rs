//! Checks of the arguments of the gated delta rule.

use std::collections::HashMap;

use burn::tensor::{DType, Int, Tensor};

use super::{
    GatedDeltaInputs, GatedDeltaOptions, MAX_TOKENS, NegativeSlots, StateSlots, StateUpdate,
};
use crate::OpError;
use crate::device::is_host;
use crate::validation::{expect_device, expect_dtype, expect_float, expect_shape, invalid};

pub(super) fn check(
    inputs: &GatedDeltaInputs,
    pool: &Tensor<4>,
    slots: &StateSlots,
    options: &GatedDeltaOptions,
) -> Result<(), OpError> {
    check_sizes(inputs, pool)?;
    check_dtypes(inputs, pool)?;
    check_devices(inputs, pool)?;
    let [batch, tokens, _, _] = inputs.q.dims();
    expect_slots("read_slots", &slots.read, batch, pool)?;
    if let Some(write) = &slots.write {
        expect_slots("write_slots", write, batch, pool)?;
    }
    if let StateUpdate::Accepted(steps) = &options.update {
        expect_slots("accepted_steps", steps, batch, pool)?;
    }
    expect_number("scale", options.scale.unwrap_or(1.0))?;
    expect_number("softplus_threshold", options.softplus_threshold)?;
    if is_host(&pool.device()) {
        check_host_values(tokens, pool.dims()[0], slots, options)?;
    }
    Ok(())
}

fn check_sizes(inputs: &GatedDeltaInputs, pool: &Tensor<4>) -> Result<(), OpError> {
    let [batch, tokens, heads, width] = inputs.q.dims();
    let [_, _, value_heads, channels] = inputs.v.dims();
    let [slots, _, _, _] = pool.dims();
    for (argument, actual) in [
        ("heads of q", heads),
        ("width of q", width),
        ("heads of v", value_heads),
        ("channels of v", channels),
        ("slots of pool", slots),
    ] {
        if actual == 0 {
            return Err(invalid(argument, "at least 1", actual));
        }
    }
    if !(1..=MAX_TOKENS).contains(&tokens) {
        let expected = format!("1 to {MAX_TOKENS}");
        return Err(invalid("tokens of q", expected, tokens));
    }
    if !value_heads.is_multiple_of(heads) {
        let expected = format!("a multiple of {heads}, the heads of q");
        return Err(invalid("heads of v", expected, value_heads));
    }
    let gates = [batch, tokens, value_heads];
    expect_shape("k", inputs.k.dims(), inputs.q.dims())?;
    expect_shape("v", inputs.v.dims(), [batch, tokens, value_heads, channels])?;
    expect_shape("a", inputs.a.dims(), gates)?;
    expect_shape("b", inputs.b.dims(), gates)?;
    expect_shape("a_log", inputs.a_log.dims(), [value_heads])?;
    expect_shape("dt_bias", inputs.dt_bias.dims(), [value_heads])?;
    expect_shape("pool", pool.dims(), [slots, value_heads, channels, width])
}

fn check_dtypes(inputs: &GatedDeltaInputs, pool: &Tensor<4>) -> Result<(), OpError> {
    expect_float("q", &inputs.q)?;
    let dtype = [inputs.q.dtype()];
    expect_dtype("k", "that of `q`", &inputs.k, &dtype)?;
    expect_dtype("v", "that of `q`", &inputs.v, &dtype)?;
    expect_float("a", &inputs.a)?;
    expect_float("b", &inputs.b)?;
    expect_dtype("a_log", "F32", &inputs.a_log, &[DType::F32])?;
    expect_float("dt_bias", &inputs.dt_bias)?;
    expect_float("pool", pool)
}

fn check_devices(inputs: &GatedDeltaInputs, pool: &Tensor<4>) -> Result<(), OpError> {
    let device = pool.device();
    for (argument, actual) in [
        ("q", inputs.q.device()),
        ("k", inputs.k.device()),
        ("v", inputs.v.device()),
        ("a", inputs.a.device()),
        ("b", inputs.b.device()),
        ("a_log", inputs.a_log.device()),
        ("dt_bias", inputs.dt_bias.device()),
    ] {
        expect_device(argument, &actual, "pool", &device)?;
    }
    Ok(())
}

fn expect_slots(
    argument: &'static str,
    slots: &Tensor<1, Int>,
    batch: usize,
    pool: &Tensor<4>,
) -> Result<(), OpError> {
    let accepted = [DType::I32, DType::I64, DType::U32];
    expect_dtype(argument, "I32, I64 or U32", slots, &accepted)?;
    expect_shape(argument, slots.dims(), [batch])?;
    expect_device(argument, &slots.device(), "pool", &pool.device())
}

fn expect_number(argument: &'static str, actual: f64) -> Result<(), OpError> {
    if actual.is_nan() {
        return Err(OpError::InvalidFloat {
            argument,
            expected: "a number",
            actual: actual.to_string(),
        });
    }
    Ok(())
}

fn check_host_values(
    tokens: usize,
    count: usize,
    slots: &StateSlots,
    options: &GatedDeltaOptions,
) -> Result<(), OpError> {
    let read = host_values(&slots.read);
    expect_in_pool("read_slots", &read, count)?;
    let write = slots.write.as_ref().map(host_values);
    if let Some(write) = &write {
        expect_in_pool("write_slots", write, count)?;
    }
    let skips = options.negative_slots == NegativeSlots::Skip;
    if let StateUpdate::Accepted(steps) = &options.update {
        let steps = host_values(steps);
        let too_many = |&(slot, steps): &(i64, i64)| {
            let skipped = skips && slot < 0;
            !skipped && usize::try_from(steps).is_ok_and(|steps| steps > tokens)
        };
        if let Some((_, steps)) = read.iter().copied().zip(steps).find(too_many) {
            let expected = format!("at most {tokens}, the number of tokens");
            return Err(invalid("accepted_steps", expected, steps as usize));
        }
    }
    match options.update {
        StateUpdate::Last | StateUpdate::Accepted(_) => {
            let argument = if write.is_some() {
                "write_slots"
            } else {
                "read_slots"
            };
            expect_exclusive(argument, &read, write.as_ref().unwrap_or(&read), skips)
        }
        StateUpdate::Intermediate | StateUpdate::Discard => Ok(()),
    }
}

fn host_values(tensor: &Tensor<1, Int>) -> Vec<i64> {
    tensor.clone().into_data().iter::<i64>().collect()
}

fn expect_in_pool(argument: &'static str, slots: &[i64], count: usize) -> Result<(), OpError> {
    let beyond = |slot: &usize| *slot >= count;
    let mut slots = slots.iter().filter_map(|&slot| usize::try_from(slot).ok());
    match slots.find(beyond) {
        None => Ok(()),
        Some(slot) => {
            let expected = format!("less than {count}, the number of slots");
            Err(invalid(argument, expected, slot))
        }
    }
}

/// Rejects a slot that one sequence writes to and another uses.
fn expect_exclusive(
    argument: &'static str,
    read: &[i64],
    write: &[i64],
    skips: bool,
) -> Result<(), OpError> {
    let mut writers = HashMap::new();
    for (sequence, (&from, &to)) in read.iter().zip(write).enumerate() {
        let skipped = skips && from < 0;
        if to >= 0 && !skipped && writers.insert(to, sequence).is_some() {
            let expected = "a slot that no other sequence writes to";
            return Err(invalid(argument, expected, to as usize));
        }
    }
    for (sequence, from) in read.iter().enumerate() {
        if writers.get(from).is_some_and(|&writer| writer != sequence) {
            let expected = "a slot that no other sequence reads";
            return Err(invalid(argument, expected, *from as usize));
        }
    }
    Ok(())
}
