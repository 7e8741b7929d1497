//! Compressed rows.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{CompressorState, Positions, RowRounding, compress_rows as compress};

use super::super::common::{EXACT, absolute, assert_close, floats, narrow, read};
use super::super::compressing::{Case, EPSILON, Sizes, round};
use super::attention::{angles, are_known, can_rotate};
use super::draw::Draw;

pub fn compress_rows(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let device = &Device::flex();
    let sizes = Sizes {
        batch: draw.size(2),
        ratio: 1 + draw.below(5),
        overlap: draw.one_in(2),
        width: draw.size(9),
        rotated: draw.pick(&[0, 2, 4, 2, 2, 3, 0, 10]),
        slots: draw.size(12),
        positions: 1 + draw.below(30),
    };
    let Sizes {
        batch,
        ratio,
        width,
        rotated,
        slots,
        positions,
        ..
    } = sizes;
    let raw_width = sizes.raw_width();
    let mut case = Case::new(sizes, draw.seed() as u32);
    let tame = draw.spoil_rows(&mut case.projections, batch * positions);
    let starts: Vec<i64> = (0..batch).map(|_| draw.index(positions + 1)).collect();
    let count = draw.size(7);
    let known = draw.pick(&[positions, positions, positions, positions - 1]);
    let rows = sizes.rows();
    let available = draw.pick(&[rows, rows, rows + 1, rows / 2]);
    let rounding = draw.pick(&[
        RowRounding::None,
        RowRounding::None,
        RowRounding::Content,
        RowRounding::Index,
    ]);
    let epsilon = draw.pick(&[EPSILON, EPSILON, EPSILON, EPSILON, -1.0, f64::NAN]);
    let latest = starts.iter().copied().max().filter(|start| *start >= 0);
    let complete = latest.map_or(0, |start| (start as usize + count) / ratio);
    let mut fits = epsilon >= 0.0 && width > 0 && available > 0 && can_rotate(rotated, width);
    fits &= slots >= (sizes.series() * ratio - 1).max(1);
    fits &= rounding != RowRounding::Index || width.is_power_of_two();
    fits &= count == 0 || batch == 0 || (are_known(&starts, count, known) && complete <= available);

    // What the slots held before the first position is not to be seen.
    let left = draw.rows(batch * slots, raw_width).values;
    let division = draw.below(256);
    let before = |rounding, dtype: FloatDType| {
        let ones = Tensor::ones([batch, available, width], (device, dtype.into()));
        let raw = floats(&left, [batch, slots, raw_width], device);
        let mut state = CompressorState { raw, rows: ones };
        for (sequence, &start) in starts.iter().enumerate().filter(|_| fits && count > 0) {
            let first = division % (start.max(0) as usize + 1);
            for part in [0..first, first..start.max(0) as usize] {
                let mut starts = vec![-1; batch];
                starts[sequence] = part.start as i64;
                let inputs = case.inputs(&starts, part.len(), device);
                let (at, options) = (case.positions(&starts, device), sizes.options(rounding));
                let next = compress(inputs, at, options, state.raw, state.rows);
                state = next.expect("positions before those that fit");
            }
        }
        state
    };
    let dtype = draw.dtype();
    let state = before(rounding, dtype);
    let (was_raw, was_rows) = (read(&state.raw), read(&state.rows));
    let clamped: Vec<i64> = starts.iter().map(|s| (*s).min(positions as i64)).collect();
    let mut inputs = case.inputs(&clamped, count, device);
    inputs.projections = draw.again(&inputs.projections);
    inputs.bias = draw.again(&inputs.bias);
    inputs.norm = draw.again(&inputs.norm);
    inputs.epsilon = epsilon;
    let at = Positions {
        angles: draw.again(&angles(known, rotated)),
        start: draw.integers(&starts, [batch]),
    };
    let (raw, rows) = (draw.again(&state.raw), draw.again(&state.rows));
    let options = sizes.options(rounding);
    let result = compress(inputs.clone(), at.clone(), options, raw, rows);
    let Some(state) = draw.settle(result, fits) else {
        return;
    };
    assert_eq!(state.raw.dims(), [batch, slots, raw_width]);
    let shape = [batch, available, width];
    assert_eq!(
        (state.rows.dims(), state.rows.dtype()),
        (shape, dtype.into())
    );
    let (raw, rows) = (read(&state.raw), read(&state.rows));

    // The same rows before they are rounded.
    let plain = before(RowRounding::None, FloatDType::F32);
    let options = sizes.options(RowRounding::None);
    let plain = compress(inputs, at, options, plain.raw, plain.rows).expect("they fit");
    let rounded = read(&round(plain.rows.clone(), rounding, rotated).cast(dtype));
    let plain = read(&plain.rows);
    // A row of few channels may be next to nothing, and is large once it is normalised.
    let close = absolute(if width < 4 { 1e-3 } else { 1e-5 });
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (sequence, &start) in starts.iter().enumerate() {
        let start = usize::try_from(start).ok().filter(|_| count > 0);
        let length = start.map_or(0, |start| start + count);
        let tame = |position: usize| tame[sequence * positions + position];
        for slot in 0..slots {
            let at =
                (sequence * slots + slot) * raw_width..(sequence * slots + slot + 1) * raw_width;
            let newest = (0..length).rev().take(slots).find(|p| p % slots == slot);
            match newest {
                None => assert_eq!(bits(&raw[at.clone()]), bits(&was_raw[at]), "slot {slot}"),
                Some(position) if tame(position) => {
                    assert_eq!(raw[at], case.raw(sequence, position), "position {position}");
                }
                Some(_) => (),
            }
        }
        for block in 0..available {
            let at =
                (sequence * available + block) * width..(sequence * available + block + 1) * width;
            let end = (block + 1) * ratio;
            if end > length {
                let (now, before) = (&rows[at.clone()], &was_rows[at]);
                assert_eq!(bits(now), bits(before), "block {block}");
                continue;
            }
            let first = end.saturating_sub(sizes.series() * ratio);
            if (first..end).all(tame) {
                let expected = narrow(&case.row(sequence, block));
                assert_close(
                    &plain[at.clone()],
                    &expected,
                    close,
                    &format!("block {block}"),
                );
                assert_close(&rows[at.clone()], &rounded[at], EXACT, "rounded rows");
            }
        }
    }
}
