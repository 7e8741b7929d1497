//! Attention over the rows of a cache, and the rows that are appended to it.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    CachedQueries, CachedRows, CachedWindow, NewRows, Positions, RowRounding, WindowLayout,
    append_rows, cached_attention as attend,
};

use super::super::caching::{EPSILON, STARTS, Text, close};
use super::super::common::{EXACT, assert_close, narrow, read};
use super::super::compressing::round;
use super::attention::{angles, are_known, can_rotate};
use super::draw::Draw;

/// Two of them are none.
const EPSILONS: [f64; 8] = [
    EPSILON,
    EPSILON,
    EPSILON,
    EPSILON,
    EPSILON,
    EPSILON,
    -1.0,
    f64::NAN,
];

pub fn cached_attention(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let text = Text {
        count: draw.size(4),
        heads: draw.size(3),
        width: draw.size(9),
        rotated: draw.pick(&[0, 2, 4, 2, 2, 3, 0, 10]),
        span: 1 + draw.below(4),
        slots: draw.size(10),
        causal: !draw.one_in(4),
        layout: draw.pick(&[WindowLayout::Ring, WindowLayout::Latest]),
        ratio: 1 + draw.below(4),
        rows: 0,
        picks: None,
        seed: draw.seed() as u32,
    };
    let starts = (0..draw.size(3)).map(|_| draw.index(STARTS[5] as usize + 1));
    let starts: Vec<i64> = starts.collect();
    match draw.one_in(3) {
        true => appended(draw, text, &starts),
        false => attended(draw, text, &starts),
    }
}

/// Positions of new tokens, and whether the arguments of rows fit them.
fn positions(draw: &mut Draw, text: &Text, starts: &[i64]) -> (Positions, bool) {
    let all = text.positions();
    let known = draw.pick(&[all, all, all, all - 1, 20]);
    let positions = Positions {
        angles: draw.again(&angles(known, text.rotated)),
        start: draw.integers(starts, [starts.len()]),
    };
    let fits = can_rotate(text.rotated, text.width) && are_known(starts, text.count, known);
    (positions, fits)
}

fn attended(draw: &mut Draw, mut text: Text, starts: &[i64]) {
    // Blocks go with a window that is not causal now and then only: they are refused.
    let blocks = draw.one_in(2) && (text.causal || draw.one_in(8));
    if blocks {
        text.rows = draw.size(12);
        text.picks = draw.one_in(2).then(|| draw.size(5));
        text.ratio = draw.pick(&[text.ratio, text.ratio, text.ratio, 0, 1000, usize::MAX]);
    }
    text.span = draw.pick(&[text.span, text.span, text.span, text.span, 0, usize::MAX]);
    let Text {
        count,
        heads,
        width,
        slots,
        ratio,
        rows,
        ..
    } = text;
    let batch = starts.len();
    let (positions, mut fits) = positions(draw, &text, starts);
    let epsilon = draw.pick(&EPSILONS);
    let scale = text.scale();
    let scale = draw.pick(&[scale, scale, scale, scale, f64::NAN, f64::INFINITY]);
    fits &= epsilon >= 0.0 && scale.is_finite();
    fits &= (1..=(slots + 1).saturating_sub(count)).contains(&text.span);
    fits &= !blocks || (text.causal && ratio > 0);

    let dtype = draw.dtype();
    let mut queries = text.queries(batch);
    let tame = draw.spoil_rows(&mut queries, batch * count * heads);
    let (x, _) = draw.tensor(&queries, [batch, count, heads, width], dtype);
    let ring = window(&text, starts, fits);
    let (ring, _) = draw.tensor(&ring, [batch, slots, width], dtype);
    let mut compressed = text.compressed(batch);
    let tame_rows = draw.spoil_rows(&mut compressed, batch * rows);
    let picked: Vec<i64> = (0..batch * count * text.picks.unwrap_or(0))
        .map(|_| draw.index(rows))
        .collect();
    let compressed = blocks.then(|| CachedRows {
        rows: draw
            .tensor(&compressed, [batch, rows, width], dtype)
            .0
            .into(),
        ratio,
        picking: draw.one_in(2),
        picks: text
            .picks
            .map(|picks| draw.integers(&picked, [batch, count, picks])),
    });
    let queries = CachedQueries {
        x,
        epsilon: Some(epsilon),
        sinks: draw.tensor(&text.sinks(), [heads], FloatDType::F32).0,
        scale,
    };
    let window = CachedWindow {
        rows: ring,
        layout: text.layout,
        span: text.span,
        causal: text.causal,
    };
    let Some(output) = draw.settle(attend(queries, positions, window, compressed), fits) else {
        return;
    };
    let shape = [batch, count, heads, width];
    assert_eq!((output.dims(), output.dtype()), (shape, dtype.into()));
    let actual = read(&output);
    if actual.is_empty() {
        return;
    }
    for (sequence, &start) in starts.iter().enumerate() {
        let expected = narrow(&text.oracle_of_picks(starts, sequence, &picked));
        for (row, expected) in expected.chunks(width).enumerate() {
            let query = sequence * count + row / heads;
            // Rows that the query attends to.
            let attended = |at: &usize| {
                let picks = text.picks.map(|picks| &picked[query * picks..][..picks]);
                let picked = picks.is_none_or(|picks| picks.contains(&(*at as i64)));
                let end = (at + 1).saturating_mul(ratio);
                picked && end as u128 <= (start + 1) as u128 + (row / heads) as u128
            };
            let at = sequence * count * heads + row;
            let only_tame = |at: usize| tame_rows[sequence * rows + at];
            let vacant = start < 0;
            if vacant || (tame[at] && (0..rows).filter(attended).all(only_tame)) {
                let actual = &actual[at * width..][..width];
                assert_close(actual, expected, close(dtype), "attention");
            }
        }
    }
}

/// The rows of the newest positions of all sequences, each with its queries', where there are any.
fn window(text: &Text, starts: &[i64], fits: bool) -> Vec<f32> {
    let size = text.slots * text.width;
    let mut window = vec![100.0; starts.len() * size];
    if !fits || text.count == 0 || size == 0 {
        return window;
    }
    for (sequence, ring) in window.chunks_mut(size).enumerate() {
        let Ok(start) = usize::try_from(starts[sequence]) else {
            continue;
        };
        let end = start + text.count;
        let first = end.saturating_sub(text.slots);
        let rows = first * text.width..end * text.width;
        text.put(ring, &text.projected(sequence)[rows], first);
        if text.layout == WindowLayout::Latest {
            ring.rotate_left(end % text.slots * text.width);
        }
    }
    window
}

fn appended(draw: &mut Draw, text: Text, starts: &[i64]) {
    let Text {
        width,
        rotated,
        slots,
        ..
    } = text;
    // So that some have more rows than there are slots.
    let text = Text {
        count: draw.size(12),
        ..text
    };
    let (count, batch) = (text.count, starts.len());
    let rounding = draw.pick(&[
        RowRounding::None,
        RowRounding::None,
        RowRounding::Content,
        RowRounding::Index,
    ]);
    let (positions, mut fits) = positions(draw, &text, starts);
    let epsilon = draw.pick(&EPSILONS);
    fits &= epsilon >= 0.0 && width > 0 && slots > 0;
    fits &= rounding != RowRounding::Index || width.is_power_of_two();

    let (dtype, of_ring) = (draw.dtype(), draw.dtype());
    let given: Vec<Vec<f32>> = (0..batch)
        .map(|sequence| text.projected(sequence)[..count * width].to_vec())
        .collect();
    let mut x = given.concat();
    let tame = draw.spoil_rows(&mut x, batch * count);
    let (x, _) = draw.tensor(&x, [batch, count, width], dtype);
    let old = draw.rows(batch * slots, width).values;
    let (ring, old) = draw.tensor(&old, [batch, slots, width], of_ring);
    let new = |rounding, norm| NewRows {
        x: x.clone(),
        norm,
        epsilon,
        rounding,
    };
    let norm = draw.tensor(&text.norm(), [width], FloatDType::F32).0;
    let result = append_rows(new(rounding, norm.clone()), positions.clone(), ring.clone());
    let Some(output) = draw.settle(result, fits) else {
        return;
    };
    let shape = [batch, slots, width];
    assert_eq!((output.dims(), output.dtype()), (shape, of_ring.into()));
    // In the dtype in which rows are normalised, before they are rounded and stored in another.
    let plain = Tensor::zeros(shape, (&Device::flex(), DType::from(dtype)));
    let plain = append_rows(new(RowRounding::None, norm), positions, plain).expect("they fit");
    let stored = round(plain.clone().cast(FloatDType::F32), rounding, rotated);
    let stored = read(&stored.cast(dtype).cast(of_ring));
    let (actual, plain) = (read(&output), read(&plain));
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (sequence, &start) in starts.iter().enumerate() {
        let of_sequence = sequence * slots * width..(sequence + 1) * slots * width;
        let mut expected = vec![f32::NAN; slots * width];
        let mut written = vec![None; slots];
        if let (Ok(start), true) = (usize::try_from(start), count > 0) {
            text.put(&mut expected, &given[sequence], start);
            (0..count).for_each(|row| written[(start + row) % slots] = Some(row));
        }
        for (slot, row) in written.iter().enumerate() {
            let at = of_sequence.start + slot * width..of_sequence.start + (slot + 1) * width;
            let Some(row) = row else {
                assert_eq!(bits(&actual[at.clone()]), bits(&old[at]), "not written");
                continue;
            };
            if tame[sequence * count + row] {
                let expected = &expected[slot * width..][..width];
                assert_close(&plain[at.clone()], expected, close(dtype), "rows");
                assert_close(&actual[at.clone()], &stored[at], EXACT, "rounded rows");
            }
        }
    }
}
