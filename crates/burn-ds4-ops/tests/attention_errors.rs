//! What the operators of attention refuse.

use super::attending::{Case, SMALL, Sizes};
use super::common::{assert_on_another_device, devices, second_device, two_devices};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::attention::{
    CachedQueries, CachedRows, CachedWindow, CompressedKeys, NewRows, Positions, RowRounding,
    VisibleBlocks, WindowKeys, WindowLayout, append_rows, cached_attention, index_scores, pool,
    rotate, rotate_at, sink_attention, sink_probabilities,
};

fn flex() -> &'static Device {
    &devices()[0].1
}

fn floats<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<D> {
    Tensor::zeros(shape, (flex(), dtype))
}

fn f32s<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    floats(shape, DType::F32)
}

fn f16s<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    floats(shape, DType::F16)
}

/// The message of an error that should be.
fn refused<T>(result: Result<T, OpError>) -> String {
    match result {
        Ok(_) => "accepted".into(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn rotate_refuses_what_does_not_fit() {
    let x = || f32s([1, 2, 3, 4]);
    let angles = |rotated: usize| f32s([1, 2, rotated]);
    for (result, message) in [
        (
            rotate(x(), angles(6), angles(6)),
            "`number of rotated channels` is 6, expected even and at most 4",
        ),
        (
            rotate(x(), angles(3), angles(3)),
            "`number of rotated channels` is 3, expected even and at most 4",
        ),
        (
            rotate(x(), f32s([1, 5, 2]), angles(2)),
            "`cos` has shape [1, 5, 2], expected [1, 2, 2]",
        ),
        (
            rotate(x(), angles(2), angles(4)),
            "`sin` has shape [1, 2, 4], expected [1, 2, 2]",
        ),
        (
            rotate(x(), f16s([1, 2, 2]), angles(2)),
            "`cos` has dtype F16, expected F32",
        ),
        (
            rotate(floats([1, 2, 3, 4], DType::F64), angles(2), angles(2)),
            "`x` has dtype F64, expected F32, F16 or BF16",
        ),
    ] {
        assert_eq!(refused(result), message);
    }
}

fn starts(values: &[i32]) -> Tensor<1, Int> {
    Tensor::from_data(values, flex())
}

#[test]
fn rotate_at_refuses_what_does_not_fit() {
    let x = || f32s([1, 2, 3, 4]);
    let table = |rotated: usize| f32s([5, rotated]);
    let turned = |x, angles, start: &[i32]| rotate_at(x, angles, starts(start), false);
    let bytes = || starts(&[0]).cast(burn::tensor::IntDType::I8);
    for (result, message) in [
        (
            turned(x(), table(6), &[0]),
            "`number of rotated channels` is 6, expected even and at most 4",
        ),
        (
            turned(x(), table(3), &[0]),
            "`number of rotated channels` is 3, expected even and at most 4",
        ),
        (
            turned(x(), f16s([5, 2]), &[0]),
            "`angles` has dtype F16, expected F32",
        ),
        (
            turned(floats([1, 2, 3, 4], DType::F64), table(2), &[0]),
            "`x` has dtype F64, expected F32, F16 or BF16",
        ),
        (
            turned(x(), table(2), &[0, 1]),
            "`start` has shape [2], expected [1]",
        ),
        (
            rotate_at(x(), table(2), bytes(), false),
            "`start` has dtype I8, expected I32, I64 or U32",
        ),
        (
            turned(x(), f32s([0, 2]), &[0]),
            "`positions of angles` is 0, expected at least 1",
        ),
        (
            turned(x(), table(2), &[4]),
            "`last position` is 5, expected less than 5, the positions of angles",
        ),
        (
            turned(x(), f32s([1, 2]), &[-1]),
            "`last position` is 1, expected less than 1, the positions of angles",
        ),
    ] {
        assert_eq!(refused(result), message);
    }
}

#[test]
fn pool_refuses_what_does_not_fit() {
    let shape = [1, 2, 3, 4];
    for (result, message) in [
        (
            pool(floats(shape, DType::F64), floats(shape, DType::F64)),
            "`values` has dtype F64, expected F32, F16 or BF16",
        ),
        (
            pool(f32s(shape), f16s(shape)),
            "`scores` has dtype F16, expected that of `values`",
        ),
        (
            pool(f32s(shape), f32s([1, 2, 4, 4])),
            "`scores` has shape [1, 2, 4, 4], expected [1, 2, 3, 4]",
        ),
    ] {
        assert_eq!(refused(result), message);
    }
}

#[test]
fn index_scores_refuse_what_does_not_fit() {
    let queries = || f32s([1, 2, 3, 4]);
    let visible = |start: &[i32], ratio| {
        let start = starts(start);
        Some(VisibleBlocks { start, ratio })
    };
    let (keys, weights) = (|| f32s([1, 7, 4]), || f32s([1, 2, 3]));
    let rotated = |rotation| index_scores(queries(), keys(), weights(), 1.0, None, Some(rotation));
    for (result, message) in [
        (
            index_scores(
                floats([1, 2, 3, 4], DType::F64),
                keys(),
                weights(),
                1.0,
                None,
                None,
            ),
            "`queries` has dtype F64, expected F32, F16 or BF16",
        ),
        (
            index_scores(queries(), f16s([1, 7, 4]), weights(), 1.0, None, None),
            "`keys` has dtype F16, expected that of `queries`",
        ),
        (
            index_scores(queries(), keys(), f16s([1, 2, 3]), 1.0, None, None),
            "`weights` has dtype F16, expected F32",
        ),
        (
            index_scores(queries(), f32s([1, 7, 5]), weights(), 1.0, None, None),
            "`keys` has shape [1, 7, 5], expected [1, 7, 4]",
        ),
        (
            index_scores(queries(), keys(), f32s([1, 2, 4]), 1.0, None, None),
            "`weights` has shape [1, 2, 4], expected [1, 2, 3]",
        ),
        (
            index_scores(queries(), keys(), weights(), f64::NAN, None, None),
            "`scale` is NaN, expected a finite number",
        ),
        (
            index_scores(queries(), keys(), weights(), 1.0, visible(&[0], 0), None),
            "`visible.ratio` is 0, expected at least 1",
        ),
        (
            index_scores(queries(), keys(), weights(), 1.0, visible(&[0, 0], 1), None),
            "`visible.start` has shape [2], expected [1]",
        ),
        (
            rotated(positions(&[0, 1], 9, 2)),
            "`start` has shape [2], expected [1]",
        ),
        (
            rotated(positions(&[8], 9, 2)),
            "`last position` is 9, expected less than 9, the positions of angles",
        ),
    ] {
        assert_eq!(refused(result), message);
    }
}

fn positions(start: &[i32], known: usize, rotated: usize) -> Positions {
    Positions {
        angles: f32s([known, rotated]),
        start: starts(start),
    }
}

#[test]
fn rows_that_do_not_fit_a_ring_are_not_appended() {
    let new = |norm: usize, epsilon: f64, rounding| NewRows {
        x: f32s([1, 2, 6]),
        norm: f32s([norm]),
        epsilon,
        rounding,
    };
    let none = RowRounding::None;
    for (new, positions, ring, message) in [
        (
            new(5, 0.0, none),
            positions(&[0], 9, 2),
            f32s([1, 4, 6]),
            "`norm` has shape [5], expected [6]",
        ),
        (
            new(6, -1.0, none),
            positions(&[0], 9, 2),
            f32s([1, 4, 6]),
            "`epsilon` is -1, expected a number that is not negative",
        ),
        (
            new(6, 0.0, RowRounding::Index),
            positions(&[0], 9, 2),
            f32s([1, 4, 6]),
            "`columns of x` is 6, expected a power of two where rows are rounded as an index",
        ),
        (
            new(6, 0.0, none),
            positions(&[0], 9, 2),
            f32s([1, 0, 6]),
            "`slots of ring` is 0, expected at least 1",
        ),
        (
            new(6, 0.0, none),
            positions(&[0], 9, 2),
            f32s([2, 4, 6]),
            "`ring` has shape [2, 4, 6], expected [1, 4, 6]",
        ),
        (
            new(6, 0.0, none),
            positions(&[0], 9, 3),
            f32s([1, 4, 6]),
            "`number of rotated channels` is 3, expected even and at most 6",
        ),
        (
            new(6, 0.0, none),
            positions(&[0, 1], 9, 2),
            f32s([1, 4, 6]),
            "`start` has shape [2], expected [1]",
        ),
        (
            new(6, 0.0, none),
            positions(&[8], 9, 2),
            f32s([1, 4, 6]),
            "`last position` is 9, expected less than 9, the positions of angles",
        ),
    ] {
        assert_eq!(refused(append_rows(new, positions, ring)), message);
    }
}

#[test]
fn cached_attention_refuses_what_does_not_fit() {
    let queries = |sinks: usize, epsilon: f64, scale: f64| CachedQueries {
        x: f32s([1, 2, 3, 6]),
        epsilon: Some(epsilon),
        sinks: f32s([sinks]),
        scale,
    };
    let fit = || queries(3, 0.0, 1.0);
    let window = |slots: usize, span: usize| CachedWindow {
        rows: f32s([1, slots, 6]),
        layout: WindowLayout::Ring,
        span,
        causal: true,
    };
    let blocks = |width: usize, ratio: usize, queries: usize| {
        Some(CachedRows {
            rows: f32s([1, 5, width]).into(),
            ratio,
            picking: true,
            picks: Some(Tensor::zeros([1, queries, 2], flex())),
        })
    };
    for (queries, window, compressed, message) in [
        (
            queries(4, 0.0, 1.0),
            window(5, 4),
            None,
            "`queries.sinks` has shape [4], expected [3]",
        ),
        (
            queries(3, f64::NAN, 1.0),
            window(5, 4),
            None,
            "`epsilon` is NaN, expected a number that is not negative",
        ),
        (
            fit(),
            CachedWindow {
                causal: false,
                ..window(5, 4)
            },
            blocks(6, 1, 2),
            "`compressed.rows` is 5, expected none where the window is not causal",
        ),
        (
            queries(3, 0.0, f64::INFINITY),
            window(5, 4),
            None,
            "`scale` is inf, expected a finite number",
        ),
        (
            fit(),
            window(4, 4),
            None,
            "`window.span` is 4, expected 1 to 3, with 4 slots and 2 queries",
        ),
        (
            fit(),
            window(4, 0),
            None,
            "`window.span` is 0, expected 1 to 3, with 4 slots and 2 queries",
        ),
        (
            fit(),
            window(5, 4),
            blocks(7, 1, 2),
            "`compressed.rows` has shape [1, 5, 7], expected [1, 5, 6]",
        ),
        (
            fit(),
            window(5, 4),
            blocks(6, 0, 2),
            "`compressed.ratio` is 0, expected at least 1",
        ),
        (
            fit(),
            window(5, 4),
            blocks(6, 1, 3),
            "`compressed.picks` has shape [1, 3, 2], expected [1, 2, 2]",
        ),
    ] {
        let output = cached_attention(queries, positions(&[0], 9, 2), window, compressed);
        assert_eq!(refused(output), message);
    }
    let output = cached_attention(fit(), positions(&[8], 9, 2), window(5, 4), None);
    assert_eq!(
        refused(output),
        "`last position` is 9, expected less than 9, the positions of angles"
    );
}

#[test]
fn cached_attention_refuses_tensors_of_other_devices() {
    let Some(on) = two_devices() else {
        return;
    };
    type Given = (CachedQueries, Positions, CachedWindow, CachedRows);
    let given = |device: &Device| -> Given {
        let queries = CachedQueries {
            x: Tensor::zeros([1, 2, 3, 6], device),
            epsilon: Some(0.0),
            sinks: Tensor::zeros([3], device),
            scale: 1.0,
        };
        let positions = Positions {
            angles: Tensor::zeros([9, 2], device),
            start: Tensor::zeros([1], device),
        };
        let window = CachedWindow {
            rows: Tensor::zeros([1, 5, 6], device),
            layout: WindowLayout::Ring,
            span: 4,
            causal: true,
        };
        let blocks = CachedRows {
            rows: Tensor::zeros([1, 5, 6], device).into(),
            ratio: 1,
            picking: true,
            picks: Some(Tensor::zeros([1, 2, 2], device)),
        };
        (queries, positions, window, blocks)
    };
    type Spoil = fn(&mut Given, Given);
    let spoils: [(Spoil, [&str; 2]); 6] = [
        (
            |own, other| own.0.sinks = other.0.sinks,
            ["queries.sinks", "queries.x"],
        ),
        (|own, other| own.1.angles = other.1.angles, ["angles", "x"]),
        (|own, other| own.1.start = other.1.start, ["start", "x"]),
        (
            |own, other| own.2.rows = other.2.rows,
            ["window.rows", "queries.x"],
        ),
        (
            |own, other| own.3.rows = other.3.rows,
            ["compressed.rows", "queries.x"],
        ),
        (
            |own, other| own.3.picks = other.3.picks,
            ["compressed.picks", "queries.x"],
        ),
    ];
    for (spoil, named) in spoils {
        let [mut own, other] = on.map(given);
        spoil(&mut own, other);
        let result = cached_attention(own.0, own.1, own.2, Some(own.3));
        assert_on_another_device(result, named);
    }
}

/// Arguments that fit, to be spoilt.
struct Arguments {
    queries: Tensor<4>,
    window: WindowKeys,
    compressed: CompressedKeys,
    sinks: Tensor<1>,
    scale: f64,
}

#[test]
fn attention_refuses_what_does_not_fit() {
    let sizes = Sizes {
        picks: Some(2),
        ..SMALL
    };
    type Spoil = fn(&mut Arguments);
    let spoils: [(Spoil, &str); 15] = [
        (
            |a| a.queries = floats([2, 3, 2, 4], DType::F64),
            "`queries` has dtype F64, expected F32, F16 or BF16",
        ),
        (
            |a| a.window.rows = f16s([2, 6, 4]),
            "`window.rows` has dtype F16, expected that of `queries`",
        ),
        (
            |a| a.window.rows = f32s([2, 6, 5]),
            "`window.rows` has shape [2, 6, 5], expected [2, 6, 4]",
        ),
        (
            |a| a.window.bias = f16s([2, 6]),
            "`window.bias` has dtype F16, expected F32",
        ),
        (
            |a| a.window.bias = f32s([2, 7]),
            "`window.bias` has shape [2, 7], expected [2, 6]",
        ),
        (
            |a| a.window.span = 0,
            "`window.span` is 0, expected 1 to 4, with 6 rows and 3 queries",
        ),
        (
            |a| a.window.span = 5,
            "`window.span` is 5, expected 1 to 4, with 6 rows and 3 queries",
        ),
        (
            |a| a.sinks = f16s([2]),
            "`sinks` has dtype F16, expected F32",
        ),
        (
            |a| a.sinks = f32s([3]),
            "`sinks` has shape [3], expected [2]",
        ),
        (
            |a| a.scale = f64::NAN,
            "`scale` is NaN, expected a finite number",
        ),
        (
            |a| a.compressed.rows = f16s([2, 6, 4]),
            "`compressed.rows` has dtype F16, expected that of `queries`",
        ),
        (
            |a| a.compressed.rows = f32s([1, 6, 4]),
            "`compressed.rows` has shape [1, 6, 4], expected [2, 6, 4]",
        ),
        (
            |a| a.compressed.bias = f16s([2, 3, 6]),
            "`compressed.bias` has dtype F16, expected F32",
        ),
        (
            |a| a.compressed.bias = f32s([2, 3, 5]),
            "`compressed.bias` has shape [2, 3, 5], expected [2, 3, 6]",
        ),
        (
            |a| a.compressed.picks = Some(Tensor::zeros([2, 4, 2], flex())),
            "`compressed.picks` has shape [2, 4, 2], expected [2, 3, 2]",
        ),
    ];
    let case = Case::new(sizes, 1);
    for (spoil, message) in spoils {
        let (queries, window, compressed, sinks) = case.arguments(flex(), FloatDType::F32);
        let mut a = Arguments {
            queries,
            window,
            compressed: compressed.expect("there are compressed rows"),
            sinks,
            scale: case.scale,
        };
        spoil(&mut a);
        let (queries, window, keys, sinks) = (
            a.queries.clone(),
            a.window.clone(),
            Some(a.compressed.clone()),
            a.sinks.clone(),
        );
        let shares = sink_probabilities(queries, window, keys, sinks, a.scale);
        assert_eq!(refused(shares), message);
        let output = sink_attention(a.queries, a.window, Some(a.compressed), a.sinks, a.scale);
        assert_eq!(refused(output), message);
    }
}

#[test]
fn tensors_of_other_devices_are_refused() {
    let Some((name, other)) = second_device() else {
        return;
    };
    let elsewhere = |message: String| {
        let argument = message.split('`').nth(1).unwrap_or_default().to_string();
        assert!(message.contains(" is on "), "{name}: {message}");
        argument
    };
    let x = f32s([1, 2, 3, 4]);
    let there = Tensor::<3>::zeros([1, 2, 2], (other, DType::F32));
    let turned = rotate(x.clone(), there.clone(), there);
    assert_eq!(elsewhere(refused(turned)), "cos");
    let there = Tensor::<2>::zeros([5, 2], (other, DType::F32));
    let turned = rotate_at(x.clone(), there, starts(&[0]), false);
    assert_eq!(elsewhere(refused(turned)), "angles");
    let there = Tensor::<1, Int>::zeros([1], other);
    let turned = rotate_at(x.clone(), f32s([5, 2]), there, false);
    assert_eq!(elsewhere(refused(turned)), "start");
    let there = Tensor::<4>::zeros([1, 2, 3, 4], (other, DType::F32));
    assert_eq!(elsewhere(refused(pool(x.clone(), there))), "scores");
    let there = Tensor::<3>::zeros([1, 7, 4], (other, DType::F32));
    let scores = index_scores(x.clone(), there, f32s([1, 2, 3]), 1.0, None, None);
    assert_eq!(elsewhere(refused(scores)), "keys");
    let window = WindowKeys {
        rows: f32s([1, 5, 4]),
        bias: f32s([1, 5]),
        span: 2,
    };
    let there = Tensor::<1>::zeros([3], (other, DType::F32));
    let output = sink_attention(x, window, None, there, 1.0);
    assert_eq!(elsewhere(refused(output)), "sinks");
}
