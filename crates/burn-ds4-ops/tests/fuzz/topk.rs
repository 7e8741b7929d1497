//! The largest entries of long rows.

use std::ops::Range;

use burn::tensor::FloatDType;
use burn_ds4_ops::topk::{Order, Windows, top_k, top_k_mask};

use super::super::common::{integer_values, values};
use super::super::ranking::{Ranking, window};
use super::draw::Draw;

/// Integers of any size.
fn bounds(draw: &mut Draw, count: usize, columns: usize) -> Vec<i64> {
    (0..count).map(|_| draw.index(columns + 1)).collect()
}

pub fn topk(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let (batch, next_n, columns) = (draw.size(3), draw.size(3), draw.size(40));
    let rows = batch * next_n;
    let k = match draw.one_in(32) {
        true => draw.pick(&[4096, 0, 4097]),
        false => draw.pick(&[1, 2, 3, 17, 41, 64]),
    };
    let logits = draw.rows(rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&logits.values, [rows, columns], dtype);
    let mut fits = (1..=4096).contains(&k);
    let (windows, expected): (Windows, Vec<Range<usize>>) = match draw.below(4) {
        0 => (Windows::All, vec![0..columns; rows]),
        1 => {
            let (starts, ends) = (bounds(draw, rows, columns), bounds(draw, rows, columns));
            let pairs = starts.iter().zip(&ends);
            let expected = pairs.map(|(start, end)| window(*start, *end, columns));
            let expected = expected.collect();
            let (starts, ends) = (draw.integers(&starts, [rows]), draw.integers(&ends, [rows]));
            (Windows::Ranges { starts, ends }, expected)
        }
        2 => {
            let lengths = bounds(draw, batch, columns);
            let end = |row: usize| {
                let length = i128::from(lengths[row / next_n]);
                length - next_n as i128 + (row % next_n) as i128 + 1
            };
            let expected = (0..rows).map(|row| window(0, end(row), columns)).collect();
            fits &= next_n > 0;
            let lengths = draw.integers(&lengths, [batch]);
            (Windows::Lengths { lengths, next_n }, expected)
        }
        _ => {
            let starts = bounds(draw, batch, columns);
            let ratio = draw.pick(&[1, 4, 128, 1 << 30, 0, usize::MAX]);
            let end = |row: usize| {
                let start = i128::from(starts[row / next_n]).max(0);
                (start + (row % next_n) as i128 + 1) / ratio.max(1) as i128
            };
            let expected = (0..rows).map(|row| window(0, end(row), columns)).collect();
            fits &= next_n > 0 && (1..=(1 << 30) / columns.max(1)).contains(&ratio);
            let starts = draw.integers(&starts, [batch]);
            (
                Windows::Blocks {
                    starts,
                    ratio,
                    next_n,
                },
                expected,
            )
        }
    };
    let order = draw.pick(&[Order::Column, Order::Value]);
    let marked = top_k_mask(tensor.clone(), k);
    let chosen = top_k(tensor, windows, k, order);
    if let Some(mask) = draw.settle(marked, (1..=4096).contains(&k)) {
        let mask: Vec<bool> = mask.into_data().iter().collect();
        for mask in mask.chunks(columns.max(1)) {
            let count = mask.iter().filter(|marked| **marked).count();
            assert_eq!(count, k.min(columns));
        }
    }
    let Some((best, ids)) = draw.settle(chosen, fits) else {
        return;
    };
    assert_eq!([best.dims(), ids.dims()], [[rows, k]; 2]);
    let (best, ids) = (values(best.cast(FloatDType::F32)), integer_values(ids));
    for (row, window) in expected.iter().enumerate() {
        let held = &held[row * columns..][..columns];
        let ranking = Ranking::of(held);
        let mut expected = match order {
            Order::Column => ranking.ids(window, k),
            Order::Value => ranking.best(window, k),
        };
        expected.resize(k, -1);
        let slots = row * k..(row + 1) * k;
        assert_eq!(ids[slots.clone()], expected, "{window:?} of {held:?}");
        for (best, id) in best[slots].iter().zip(expected) {
            let at = usize::try_from(id).map(|id| held[window.start + id]);
            let value = at.unwrap_or(f32::NEG_INFINITY);
            assert!(*best == value || (best.is_nan() && value.is_nan()), "{id}");
        }
    }
}
