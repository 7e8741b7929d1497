//! The RMS norm.

use burn_ds4_ops::norm::rms_norm;

use super::super::common::{half_unit, read, wide};
use super::draw::Draw;

pub fn norm(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let (rows, columns) = (draw.size(5), draw.size(20));
    let epsilon = draw.pick(&[1e-6, 0.5, 1e-6, 0.0, -0.0, f64::INFINITY, -1.0, f64::NAN]);
    let x = draw.rows(rows, columns);
    let (dtype, of_weight) = (draw.dtype(), draw.dtype());
    let (tensor, held) = draw.tensor(&x.values, [rows, columns], dtype);
    let weight = draw.one_in(2).then(|| draw.tame_values(columns));
    let (weight, weights) = match weight {
        Some(weight) => {
            let (tensor, held) = draw.tensor(&weight, [columns], of_weight);
            (Some(tensor), wide(&held))
        }
        None => (None, vec![1.0; columns]),
    };
    let normalized = rms_norm(tensor, weight, epsilon);
    let Some(normalized) = draw.settle(normalized, epsilon >= 0.0) else {
        return;
    };
    let dims = (normalized.dims(), normalized.dtype());
    assert_eq!(dims, ([rows, columns], dtype.into()));
    let actual = read(&normalized);
    for row in (0..rows).filter(|&row| x.tame[row]) {
        let slots = row * columns..(row + 1) * columns;
        let held = wide(&held[slots.clone()]);
        let mean = held.iter().map(|v| v * v).sum::<f64>() / columns as f64;
        let rms = (mean + epsilon).sqrt();
        for ((actual, v), weight) in actual[slots].iter().zip(held).zip(&weights) {
            let (actual, expected) = (f64::from(*actual), v / rms * weight);
            let allowed = 1e-7 + (half_unit(dtype) + 2e-6) * expected.abs();
            let nothing = rms == 0.0 && actual.is_nan();
            assert!(
                nothing || (actual - expected).abs() <= allowed,
                "{actual} != {expected}"
            );
        }
    }
}
