//! Everything that a step stores.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    Positions, RowRounding, StepCompression, StepRows, store_step as store,
};

use super::super::common::read;
use super::super::storing::{Dtypes, Layer, POSITIONS, expect_equal, one_by_one};
use super::attention::angles;
use super::draw::Draw;

pub fn store_step(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let layer = Layer {
        rank: draw.size(9),
        width: draw.size(8),
        slots: draw.size(6),
        compressed: draw.one_in(2).then(|| (1 + draw.below(4), draw.one_in(2))),
        indexed: draw.one_in(2).then(|| draw.pick(&[1, 4, 8, 8, 6, 0])),
        rounding: draw.pick(&[RowRounding::None, RowRounding::None, RowRounding::Content]),
        count: draw.size(7),
    };
    let dtypes = Dtypes {
        x: draw.dtype(),
        rows: draw.dtype(),
        norm: draw.dtype(),
    };
    let starts: Vec<i64> = (0..draw.size(3)).map(|_| draw.index(POSITIONS)).collect();
    let clamped: Vec<i64> = starts.iter().map(|s| (*s).min(POSITIONS as i64)).collect();
    let (mut step, _) = layer.step(&clamped, (dtypes, &Device::flex()));
    let epsilon = draw.pick(&[1e-6, 1e-6, 1e-6, 1e-6, 1e-6, -1.0, f64::NAN]);
    step.queries.x = varied(draw, step.queries.x);
    step.queries.norm = draw.again(&step.queries.norm);
    step.queries.epsilon = epsilon;
    step.new.x = varied(draw, step.new.x);
    step.new.norm = draw.again(&step.new.norm);
    step.ring = varied(draw, step.ring);
    let compression = |draw: &mut Draw, part: &mut StepCompression| {
        part.inputs.projections = varied(draw, part.inputs.projections.clone());
        part.inputs.norm = draw.again(&part.inputs.norm);
        part.state.raw = varied(draw, part.state.raw.clone());
        part.state.rows = draw.again(&part.state.rows);
    };
    for part in [&mut step.compressed, &mut step.indexed] {
        part.iter_mut().for_each(|part| compression(draw, part));
    }
    let known = draw.pick(&[POSITIONS, POSITIONS, POSITIONS, POSITIONS - 1, 0]);
    let rotated = draw.pick(&[0, 2, 4, 2, 2, 3, 0, 10]);
    let positions = Positions {
        angles: draw.again(&angles(known, rotated)),
        start: draw.integers(&starts, [starts.len()]),
    };

    let expected = one_by_one(step.clone(), &positions);
    let fits = expected.is_ok() && are_alike(&step);
    match (store(step, positions), expected) {
        (Ok(stored), Ok(expected)) if fits => expect_equal(&stored, &expected, "a step"),
        (Ok(_), _) => panic!("taken, and does not fit"),
        (Err(error), _) => assert!(!fits, "refused: {error}"),
    }
}

/// Whether there are queries of all new positions, and projections.
fn are_alike(step: &StepRows) -> bool {
    let [batch, count, _] = step.new.x.dims();
    let is_of_all = |tensor: &Tensor<3>| tensor.dims()[..2] == [batch, count];
    let mut parts = [&step.compressed, &step.indexed].into_iter().flatten();
    step.queries.x.dims()[2] > 0
        && is_of_all(&step.queries.x)
        && parts.all(|part| is_of_all(&part.inputs.projections))
}

/// With hostile values in some of its rows, and now and then of another shape or dtype.
fn varied(draw: &mut Draw, tensor: Tensor<3>) -> Tensor<3> {
    let (shape, dtype) = (tensor.dims(), FloatDType::from(tensor.dtype()));
    let mut values = read(&tensor);
    draw.spoil_rows(&mut values, shape[0] * shape[1]);
    draw.tensor(&values, shape, dtype).0
}
