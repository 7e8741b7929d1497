//! The gated delta rule.

use burn::tensor::Device;
use burn_ds4_ops::gated_delta::{
    GatedDeltaOptions, NegativeSlots, StateSlots, StateUpdate, gated_delta_rule,
};

use super::super::common::{assert_close, narrow, read};
use super::super::delta::{Case, OUTPUTS, Rule, STATES, Sizes, oracle, tolerance};
use super::draw::Draw;

pub fn gated_delta(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let heads = 1 + draw.below(2);
    let sizes = Sizes {
        batch: draw.size(3),
        tokens: draw.pick(&[1, 2, 5, 16, 0, 17]),
        heads,
        value_heads: heads * (1 + draw.below(2)) + usize::from(draw.one_in(16)),
        width: draw.size(6),
        channels: draw.size(5),
        slots: draw.size(6),
    };
    let Sizes {
        batch,
        tokens,
        value_heads,
        width,
        channels,
        slots,
        ..
    } = sizes;
    let (dtype, of_pool) = (draw.dtype(), draw.dtype());
    let mut case = Case::new(sizes, dtype, of_pool, &Device::flex());
    // Sequences whose values are hostile, beside others.
    let v = draw.rows(batch, tokens * value_heads * channels);
    let shape = [batch, tokens, value_heads, channels];
    let kept = read(&case.inputs.v);
    let size = tokens * value_heads * channels;
    let part = |row: usize| row * size..(row + 1) * size;
    let values = (0..batch).flat_map(|row| match v.tame[row] {
        true => kept[part(row)].to_vec(),
        false => v.values[part(row)].to_vec(),
    });
    case.inputs.v = draw.tensor(&values.collect::<Vec<f32>>(), shape, dtype).0;

    let mut from: Vec<i64> = (0..batch as i64).collect();
    if draw.one_in(3) {
        from = (0..batch).map(|_| draw.index(slots)).collect();
    }
    let kind = draw.below(8);
    let options = GatedDeltaOptions::new().with_negative_slots(NegativeSlots::Skip);
    let options = match kind {
        0 => options.with_scale(f64::NAN),
        1 | 2 => options.with_update(StateUpdate::Discard),
        3 | 4 => options.with_update(StateUpdate::Intermediate),
        _ => options,
    };
    let (stores, is_number) = (![1, 2, 3, 4].contains(&kind), kind != 0);
    let within = from.iter().all(|slot| *slot < slots as i64);
    let mut writers: Vec<i64> = from.iter().copied().filter(|slot| *slot >= 0).collect();
    writers.sort_unstable();
    let exclusive = writers.windows(2).all(|pair| pair[0] != pair[1]);
    let fits = (1..=16).contains(&tokens)
        && ![width, channels, slots].contains(&0)
        && value_heads.is_multiple_of(heads)
        && within
        && (exclusive || !stores)
        && is_number;
    let read_slots = StateSlots::in_place(draw.integers(&from, [batch]));
    let result = gated_delta_rule(case.inputs.clone(), case.pool.clone(), read_slots, &options);
    let Some(result) = draw.settle(result, fits) else {
        return;
    };
    assert_eq!(
        (result.out.dims(), result.out.dtype()),
        (shape, dtype.into())
    );
    let (out, pool) = (read(&result.out), read(&result.pool));
    let untouched = read(&case.pool);
    for (row, &slot) in from.iter().enumerate() {
        let out = &out[part(row)];
        let Ok(slot) = usize::try_from(slot) else {
            assert!(out.iter().all(|value| *value == 0.0), "padding");
            continue;
        };
        if !v.tame[row] {
            continue;
        }
        let sequence = oracle(&case, row, slot, Rule::of(sizes));
        assert_close(
            out,
            &narrow(&sequence.outputs),
            tolerance(dtype, OUTPUTS),
            "outputs",
        );
        let state = &pool[slot * sizes.state()..][..sizes.state()];
        if stores {
            let last = narrow(&sequence.states[tokens]);
            assert_close(state, &last, tolerance(of_pool, STATES), "states");
        }
    }
    for slot in (0..slots).filter(|slot| !stores || !from.contains(&(*slot as i64))) {
        let slots = slot * sizes.state()..(slot + 1) * sizes.state();
        assert_eq!(pool[slots.clone()], untouched[slots], "a slot of nobody");
    }
}
