//! Checks of the arguments of the gated delta rule.

use std::collections::HashMap;

use burn::tensor::{Int, Tensor};

use super::{
    GatedDeltaInputs, GatedDeltaOptions, MAX_TOKENS, NegativeSlots, StateSlots, StateUpdate,
};
use crate::OpError;
use crate::device::is_host;
use crate::validation::{
    F32, FLOATS, INTEGERS, expect_number, expect_positive, expect_tensor, expect_value, invalid,
};

pub(super) fn check(
    inputs: &GatedDeltaInputs,
    pool: &Tensor<4>,
    slots: &StateSlots,
    options: &GatedDeltaOptions,
) -> Result<(), OpError> {
    check_inputs(inputs, pool)?;
    let [batch, tokens, _, _] = inputs.q.dims();
    expect_slots("read_slots", &slots.read, batch, pool)?;
    if let Some(write) = &slots.write {
        expect_slots("write_slots", write, batch, pool)?;
    }
    if let StateUpdate::Accepted(steps) = &options.update {
        expect_slots("accepted_steps", steps, batch, pool)?;
    }
    for (argument, number) in [
        ("scale", options.scale.unwrap_or(1.0)),
        ("softplus_threshold", options.softplus_threshold),
    ] {
        expect_number(!number.is_nan(), argument, number, "a number")?;
    }
    if is_host(&pool.device()) {
        check_host_values(tokens, pool.dims()[0], slots, options)?;
    }
    Ok(())
}

fn check_inputs(inputs: &GatedDeltaInputs, pool: &Tensor<4>) -> Result<(), OpError> {
    let [batch, tokens, heads, width] = inputs.q.dims();
    let [_, _, value_heads, channels] = inputs.v.dims();
    let [slots, _, _, _] = pool.dims();
    expect_positive([
        ("heads of q", heads),
        ("width of q", width),
        ("heads of v", value_heads),
        ("channels of v", channels),
        ("slots of pool", slots),
    ])?;
    let expected = format_args!("1 to {MAX_TOKENS}");
    let fits = (1..=MAX_TOKENS).contains(&tokens);
    expect_value(fits, "tokens of q", tokens, expected)?;
    let expected = format_args!("a multiple of {heads}, the heads of q");
    let fits = value_heads.is_multiple_of(heads);
    expect_value(fits, "heads of v", value_heads, expected)?;

    let GatedDeltaInputs {
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
    } = inputs;
    let like = ("pool", &pool.device());
    let same = ("that of `q`", &[q.dtype()][..]);
    let (keys, gates) = ([batch, tokens, heads, width], [batch, tokens, value_heads]);
    expect_tensor(("q", q), FLOATS, keys, like)?;
    expect_tensor(("k", k), same, keys, like)?;
    expect_tensor(("v", v), same, [batch, tokens, value_heads, channels], like)?;
    expect_tensor(("a", a), FLOATS, gates, like)?;
    expect_tensor(("b", b), FLOATS, gates, like)?;
    expect_tensor(("a_log", a_log), F32, [value_heads], like)?;
    expect_tensor(("dt_bias", dt_bias), FLOATS, [value_heads], like)?;
    expect_tensor(
        ("pool", pool),
        FLOATS,
        [slots, value_heads, channels, width],
        like,
    )
}

fn expect_slots(
    argument: &'static str,
    slots: &Tensor<1, Int>,
    batch: usize,
    pool: &Tensor<4>,
) -> Result<(), OpError> {
    let like = ("pool", &pool.device());
    expect_tensor((argument, slots), INTEGERS, [batch], like)
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
    let mut slots = slots.iter().filter_map(|&slot| usize::try_from(slot).ok());
    slots.try_for_each(|slot| {
        let expected = format_args!("less than {count}, the number of slots");
        expect_value(slot < count, argument, slot, expected)
    })
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
