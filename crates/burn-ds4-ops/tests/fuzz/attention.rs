//! Attention with a sink, the indexer's scores, and the rotary embedding.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    MASKED, Positions, VisibleBlocks, index_scores, rotate_at, sink_attention,
};

use super::super::attending::{Case, Sizes};
use super::super::common::{
    absolute, assert_close, assert_within, half_unit, narrow, read, values, wide,
};
use super::super::products::assert_same_bits;
use super::super::rotation::{table, turned_at};
use super::draw::Draw;

pub fn attention(data: &[u8]) {
    let draw = &mut Draw::new(data);
    match draw.below(4) {
        0 => scored(draw),
        1 => rotated(draw),
        _ => attended(draw),
    }
}

fn attended(draw: &mut Draw) {
    let sizes = Sizes {
        batch: 1 + draw.below(2),
        count: 1 + draw.below(4),
        heads: 1 + draw.below(3),
        width: 1 + draw.below(8),
        span: 1 + draw.below(4),
        rows: draw.size(6),
        picks: None,
    };
    let dtype = draw.dtype();
    let mut case = Case::new(sizes, draw.seed() as u32).rounded(dtype, &Device::flex());
    let Sizes {
        batch,
        count,
        heads,
        width,
        rows,
        ..
    } = sizes;
    if draw.one_in(2) && rows > 0 {
        let picks = 1 + draw.below(4);
        case.sizes.picks = Some(picks);
        case.picks = (0..batch * count * picks)
            .map(|_| draw.index(rows))
            .collect();
    }
    // The oracle has the columns of the span that the case was made with.
    let columns = case.columns();
    case.sizes.span = draw.pick(&[sizes.span, sizes.span, sizes.span + 1, 0, usize::MAX]);
    case.scale = draw.pick(&[1.7, 0.0, -1.0, 1.7, f64::INFINITY, f64::NAN]);
    let fits = (1..=columns + 1 - count).contains(&case.sizes.span) && case.scale.is_finite();
    let mut device_case = case.clone();
    let tame = draw.spoil_rows(&mut device_case.queries, batch * count * heads);
    let (queries_of, window, compressed, sinks) = device_case.arguments(&Device::flex(), dtype);
    let output = sink_attention(queries_of, window, compressed, sinks, case.scale);
    let Some(output) = draw.settle(output, fits) else {
        return;
    };
    let shape = [batch, count, heads, width];
    assert_eq!((output.dims(), output.dtype()), (shape, dtype.into()));
    let (actual, expected) = (read(&output), case.oracle().0);
    // Products round logits and shares to the dtype.
    let tolerance = match dtype {
        FloatDType::F32 => 5e-6,
        FloatDType::F16 => 2f64.powi(-6),
        _ => 2f64.powi(-5),
    };
    for row in (0..batch * count * heads).filter(|&row| tame[row]) {
        let slots = row * width..(row + 1) * width;
        let expected = narrow(&expected[slots.clone()]);
        assert_close(&actual[slots], &expected, absolute(tolerance), "attention");
    }
}

fn scored(draw: &mut Draw) {
    let [batch, count, heads] = [draw.size(2), draw.size(4), draw.size(3)];
    let (width, rows) = (draw.size(6), draw.size(6));
    let dtype = draw.dtype();
    let queries = draw.rows(batch * count, heads * width);
    let keys = draw.tame_values(batch * rows * width);
    let weights = draw.tame_values(batch * count * heads);
    let shape = [batch, count, heads, width];
    let (given, held) = draw.tensor(&queries.values, shape, dtype);
    let (keys_given, keys) = draw.tensor(&keys, [batch, rows, width], dtype);
    let (weights_given, weights) = draw.tensor(&weights, [batch, count, heads], FloatDType::F32);
    let scale = draw.pick(&[0.5, 0.5, -2.0, f64::NAN, f64::INFINITY]);
    let ratio = draw.pick(&[1, 2, 4, 0, usize::MAX]);
    let starts = (0..batch).map(|_| draw.index(20).min(1 << 30));
    let starts: Vec<i64> = starts.collect();
    let limited = draw.one_in(2);
    let visible = limited.then(|| VisibleBlocks {
        start: draw.integers(&starts, [batch]),
        ratio,
    });
    let fits = scale.is_finite() && !(limited && ratio == 0);
    let score = |queries, rotation| {
        let (keys, weights) = (keys_given.clone(), weights_given.clone());
        index_scores(queries, keys, weights, scale, visible.clone(), rotation)
    };
    if draw.one_in(4) {
        let known = draw.size(30);
        let rotated: usize = draw.pick(&[2, 4, 0, 3]);
        let (angles, start) = (angles(known, rotated), draw.integers(&starts, [batch]));
        let positions = Positions {
            angles: angles.clone(),
            start: start.clone(),
        };
        // Where nothing is rotated or scored, positions may be checked or not.
        let certain = known > 0 && rotated > 0 && ![batch, count, heads, width].contains(&0);
        let fits = fits && can_rotate(rotated, width) && are_known(&starts, count, known);
        let actual = score(given.clone(), Some(positions));
        if certain {
            assert_eq!(actual.is_ok(), fits, "{actual:?}");
        }
        let turned = rotate_at(given, angles, start, false);
        if let (Ok(actual), Ok(turned)) = (actual, turned) {
            let expected = score(turned, None).expect("what scores rotated queries");
            assert_same_bits(&values(actual), &values(expected), "rotated");
        }
        return;
    }
    let Some(scores) = draw.settle(score(given, None), fits) else {
        return;
    };
    assert_eq!(
        (scores.dims(), scores.dtype()),
        ([batch, count, rows], DType::F32)
    );
    if heads == 0 || width == 0 {
        return;
    }
    let (actual, held, keys) = (values(scores), wide(&held), wide(&keys));
    for query in (0..batch * count).filter(|&query| queries.tame[query]) {
        let sequence = query / count;
        let mut expected = Vec::new();
        for row in 0..rows {
            let key = &keys[(sequence * rows + row) * width..][..width];
            let position = i128::from(starts[sequence]) + (query % count) as i128;
            let whole = (row as i128 + 1) * ratio as i128;
            let hidden = limited && (starts[sequence] < 0 || whole > position + 1);
            let sum: f64 = (0..heads)
                .map(|head| {
                    let q = &held[(query * heads + head) * width..][..width];
                    let dot: f64 = q.iter().zip(key).map(|(a, b)| a * b).sum();
                    f64::from(weights[query * heads + head]) * dot.max(0.0)
                })
                .sum();
            expected.push(if hidden {
                f64::from(MASKED)
            } else {
                scale * sum
            });
        }
        let slots = query * rows..(query + 1) * rows;
        let expected = narrow(&expected);
        assert_within(&actual[slots], &expected, |_| 1e-3, "scores");
    }
}

/// Angles of so many positions, of so many channels.
pub(super) fn angles(known: usize, rotated: usize) -> Tensor<2> {
    match rotated.is_multiple_of(2) {
        true => table(known, rotated, &Device::flex()),
        false => Tensor::ones([known, rotated], &Device::flex()),
    }
}

pub(super) fn can_rotate(rotated: usize, width: usize) -> bool {
    rotated.is_multiple_of(2) && rotated <= width
}

/// Whether all new positions are among the known ones.
pub(super) fn are_known(starts: &[i64], count: usize, known: usize) -> bool {
    let last = |start: &i64| start.max(&0) + count as i64 <= known as i64;
    count == 0 || starts.iter().all(last)
}

fn rotated(draw: &mut Draw) {
    let [batch, count, heads] = [draw.size(2), draw.size(3), draw.size(2)];
    let (width, known) = (draw.size(8), draw.size(9));
    let rotated: usize = draw.pick(&[2, 4, 0, 3, 10]);
    let dtype = draw.dtype();
    let x = draw.rows(batch * count, heads * width);
    let (given, held) = draw.tensor(&x.values, [batch, count, heads, width], dtype);
    let starts: Vec<i64> = (0..batch).map(|_| draw.index(known + 1)).collect();
    let start = draw.integers(&starts, [batch]);
    let turned = rotate_at(given, angles(known, rotated), start, false);
    let empty = rotated == 0 || [batch, count, heads, width].contains(&0);
    let fits = can_rotate(rotated, width) && (empty || are_known(&starts, count, known));
    let Some(turned) = draw.settle(turned, fits) else {
        return;
    };
    assert_eq!(
        (turned.dims(), turned.dtype()),
        ([batch, count, heads, width], dtype.into())
    );
    if empty {
        return;
    }
    let positions: Vec<usize> = starts
        .iter()
        .flat_map(|start| (0..count).map(|i| (*start).max(0) as usize + i))
        .collect();
    let expected = narrow(&turned_at(&wide(&held), width, rotated, &positions));
    let actual = read(&turned);
    let size = heads * width;
    for row in (0..batch * count).filter(|&row| x.tame[row]) {
        let slots = row * size..(row + 1) * size;
        let allowed =
            |at: usize| 1e-5 + half_unit(dtype) * f64::from(expected[row * size + at]).abs();
        assert_within(&actual[slots.clone()], &expected[slots], allowed, "rotated");
    }
}
