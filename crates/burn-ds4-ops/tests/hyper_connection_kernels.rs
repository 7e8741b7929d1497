//! Hyper-connections at the sizes, dtypes and layouts that choose between the ways the kernels are
//! built, and every token by itself.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::hyper_connection::expand;

use super::common::{
    EXACT, FLOATS, Tolerance, absolute, assert_close, compiles_slowly, devices, every_dtype,
    floats, half_unit, is_gpu, narrow, noise, read, sized, values, wide,
};
use super::mixing::{Case, SINKHORN, shapes, spoilt_widths, widths};

/// Half a unit in the last place, and what f32 coefficients may be off by.
fn one_rounding(dtype: FloatDType) -> Tolerance {
    Tolerance {
        absolute: 2e-5,
        relative: half_unit(dtype),
    }
}

fn streams_of_any_size_are_collapsed() {
    every_dtype(|name, device, dtype| {
        for &(tokens, n, d) in shapes(name, dtype) {
            let what = format!("{name} [{tokens}, {n}, {d}]");
            let case = Case::new(tokens, n, d, 1.0).rounded(dtype, device);
            let expected = case.oracle(SINKHORN);
            let streams = case.streams(device).cast(dtype);
            let (input, coefficients) = case.collapse(streams, SINKHORN);
            assert_eq!((input.dims(), input.dtype()), ([tokens, d], dtype.into()));
            let (packed, expected_packed) = (coefficients.packed(), narrow(&expected.packed()));
            assert_close(&values(packed), &expected_packed, absolute(1e-5), &what);
            let tolerance = one_rounding(dtype);
            assert_close(&read(&input), &narrow(&expected.input), tolerance, &what);
        }
    });
}

fn streams_of_any_size_are_collapsed_at_the_end() {
    every_dtype(|name, device, dtype| {
        for &(tokens, n, d) in shapes(name, dtype) {
            let what = format!("{name} [{tokens}, {n}, {d}]");
            let case = Case::new(tokens, n, d, 1.0).rounded(dtype, device);
            let expected = narrow(&case.headed(1e-3, 1e-6));
            let actual = case.head(case.streams(device).cast(dtype), 1e-3, 1e-6);
            assert_eq!((actual.dims(), actual.dtype()), ([tokens, d], dtype.into()));
            assert_close(&read(&actual), &expected, one_rounding(dtype), &what);
        }
    });
}

fn outputs_of_any_dtype_are_spread_over_streams_of_any_size() {
    every_dtype(|name, device, dtype| {
        for output_dtype in FLOATS.into_iter().filter(|of| device.supports_dtype(*of)) {
            // Where an output is converted, its dtype makes further kernels.
            let few = compiles_slowly(name) && output_dtype != dtype;
            for &(tokens, n, d) in shapes(name, dtype).take(if few { 1 } else { usize::MAX }) {
                let what = format!("{name} [{tokens}, {n}, {d}], {output_dtype:?} output");
                let case = Case::new(tokens, n, d, 1.0).rounded(dtype, device);
                let output = floats(&noise(tokens * d, 21), [tokens, d], device);
                let output = output.cast(output_dtype);
                let held = wide(&read(&output));
                let expected = narrow(&case.expanded(&held, &case.oracle(SINKHORN)));
                let coefficients = case.coefficients(SINKHORN, device);
                let streams = case.streams(device).cast(dtype);
                let actual = expand(output, streams, &coefficients).unwrap();
                assert_eq!(actual.dtype(), dtype.into(), "{what}");
                assert_close(&read(&actual), &expected, one_rounding(dtype), &what);
            }
        }
    });
}

fn views_are_mixed_as_their_copies() {
    let (tokens, n, d) = (3, 4, 128);
    for (name, device) in devices() {
        let swapped = floats(&noise(tokens * n * d, 5), [n, tokens, d], device).swap_dims(0, 1);
        // A multiple of any device's alignment is cut off, so that these are views.
        let wide_rows = floats(
            &noise((tokens + 1) * n * 256, 6),
            [tokens + 1, n, 256],
            device,
        );
        let of_columns = wide_rows.clone().slice([0..tokens, 0..n, 128..256]);
        let odd_columns = wide_rows.slice([1..tokens + 1, 0..n, 3..3 + d]);
        let across = floats(&noise(tokens * n * d, 7), [d, n, tokens], device).swap_dims(0, 2);
        let views = [
            ("swapped", swapped),
            ("columns", of_columns),
            ("odd columns", odd_columns),
            ("across", across),
        ];
        for (view, streams) in views {
            let what = format!("{name} {view}");
            let mut case = Case::new(tokens, n, d, 1.0);
            case.streams = values(streams.clone());
            let oracle = case.oracle(SINKHORN);
            let (input, coefficients) = case.collapse(streams.clone(), SINKHORN);
            assert_close(
                &values(input),
                &narrow(&oracle.input),
                absolute(2e-5),
                &what,
            );
            let last = values(case.head(streams.clone(), 0.0, 1e-6));
            assert_close(
                &last,
                &narrow(&case.headed(0.0, 1e-6)),
                absolute(2e-5),
                &what,
            );
            let output = floats(&noise(tokens * d, 8), [d, tokens], device).transpose();
            let held = wide(&values(output.clone()));
            let expected = narrow(&case.expanded(&held, &oracle));
            let actual = values(expand(output, streams, &coefficients).unwrap());
            assert_close(&actual, &expected, absolute(2e-5), &what);
        }
    }
}

/// Input, coefficients, expanded streams and the head's result of some of the tokens of a case,
/// each of them token by token.
fn all_of(
    case: &Case,
    tokens: std::ops::Range<usize>,
    dtype: FloatDType,
    device: &Device,
) -> [(&'static str, Vec<f32>); 4] {
    let (n, d) = (case.n, case.d);
    let width = n * d;
    let count = tokens.len();
    let streams = &case.streams[tokens.start * width..tokens.end * width];
    let streams = floats(streams, [count, n, d], device).cast(dtype);
    let output = noise(case.tokens * d, 31);
    let output = floats(
        &output[tokens.start * d..tokens.end * d],
        [count, d],
        device,
    )
    .cast(dtype);
    let (input, coefficients) = case.collapse(streams.clone(), SINKHORN);
    let expanded = expand(output, streams.clone(), &coefficients).unwrap();
    [
        ("input", read(&input)),
        ("coefficients", read(&coefficients.packed())),
        ("expanded", read(&expanded)),
        ("head", read(&case.head(streams, 1e-6, 1e-6))),
    ]
}

/// What is equal up to the sign of zeros here has the same bits: no sum of this case is zero by
/// cancelling.
#[track_caller]
fn assert_tokens_equal(
    some: &[(&str, Vec<f32>)],
    tokens: std::ops::Range<usize>,
    all: &[(&str, Vec<f32>)],
    of: usize,
    what: &str,
) {
    for ((part, some), (_, all)) in some.iter().zip(all) {
        let width = all.len() / of;
        let expected = &all[tokens.start * width..tokens.end * width];
        assert_close(some, expected, EXACT, &format!("{what} {tokens:?}: {part}"));
    }
}

fn a_token_does_not_depend_on_how_many_there_are() {
    every_dtype(|name, device, dtype| {
        let elsewhere = [(1, 1), (3, 127), (4, 64), (4, 4096), (2, 20_000)];
        for &(n, d) in widths(name, dtype, &elsewhere) {
            let what = format!("{name} {n} x {d}");
            // The projection is another operator's.
            let case = Case::new(100, n, d, 1.0).exact();
            let together = all_of(&case, 0..100, dtype, device);
            // Products as long as these take a second on a software driver.
            let step = if is_gpu(name) || n * d < 1000 { 1 } else { 5 };
            // The projection has kernels for 1, 2, 4, 8 and 16 tokens.
            let counts = if compiles_slowly(name) { 5 } else { step };
            for count in (1..=16).step_by(counts) {
                let some = all_of(&case, 0..count, dtype, device);
                assert_tokens_equal(&some, 0..count, &together, 100, &what);
            }
            for token in (1..16).step_by(step).chain([99]) {
                let alone = all_of(&case, token..token + 1, dtype, device);
                assert_tokens_equal(&alone, token..token + 1, &together, 100, &what);
            }
        }
    });
}

fn what_is_no_number_stays_in_its_token() {
    for (name, device) in devices() {
        for (n, d) in spoilt_widths(name) {
            let clean = Case::new(4, n, d, 1.0).exact();
            let mut case = Case::new(4, n, d, 1.0).exact();
            let width = n * d;
            case.streams[width + 5] = f32::NAN;
            case.streams[3 * width - 1] = f32::INFINITY;
            let (dtype, what) = (FloatDType::F32, format!("{name} {n} x {d}"));
            let (actual, expected) = (
                all_of(&case, 0..4, dtype, device),
                all_of(&clean, 0..4, dtype, device),
            );
            for ((part, actual), (_, expected)) in actual.iter().zip(&expected) {
                let own = actual.len() / 4;
                for token in [0, 3] {
                    let range = token * own..(token + 1) * own;
                    let what = format!("{what} {part} of {token}");
                    assert_close(&actual[range.clone()], &expected[range], EXACT, &what);
                }
                let lost = actual[own..2 * own].iter().all(|v| v.is_nan());
                assert!(lost, "{what} {part} of a token with NaN");
            }
        }
    }
}

fn what_is_no_number_stays_in_its_channel_when_spread() {
    let (tokens, n, d) = (2, 4, 20);
    for (name, device) in devices() {
        let case = Case::new(tokens, n, d, 1.0);
        let coefficients = case.coefficients(SINKHORN, device);
        let mut streams = case.streams.clone();
        let mut output = noise(tokens * d, 41);
        streams[2 * d + 3] = f32::NAN;
        output[d + 7] = f32::INFINITY;
        let actual = expand(
            floats(&output, [tokens, d], device),
            floats(&streams, [tokens, n, d], device),
            &coefficients,
        );
        let lost: Vec<usize> = values(actual.unwrap())
            .iter()
            .enumerate()
            .filter_map(|(index, v)| (!v.is_finite()).then_some(index))
            .collect();
        let first = (0..n).map(|k| k * d + 3);
        let second = (0..n).map(|k| (n + k) * d + 7);
        assert_eq!(lost, first.chain(second).collect::<Vec<_>>(), "{name}");
    }
}

fn there_may_be_more_tokens_than_cubes_in_a_dimension() {
    sized(200_000, 70_000, |name, device, tokens| {
        let case = Case::new(tokens, 2, 2, 1.0);
        let oracle = case.oracle(SINKHORN);
        let (input, coefficients) = case.collapse(case.streams(device), SINKHORN);
        assert_close(&values(input), &narrow(&oracle.input), absolute(1e-5), name);
        let last = values(case.head(case.streams(device), 0.0, 1e-6));
        assert_close(
            &last,
            &narrow(&case.headed(0.0, 1e-6)),
            absolute(1e-5),
            name,
        );
        let output = noise(tokens * 2, 51);
        let expected = narrow(&case.expanded(&wide(&output), &oracle));
        let output = floats(&output, [tokens, 2], device);
        let actual = expand(output, case.streams(device), &coefficients).unwrap();
        assert_close(&values(actual), &expected, absolute(1e-5), name);
    });
}

catalogue![
    streams_of_any_size_are_collapsed,
    streams_of_any_size_are_collapsed_at_the_end,
    outputs_of_any_dtype_are_spread_over_streams_of_any_size,
    views_are_mixed_as_their_copies,
    a_token_does_not_depend_on_how_many_there_are,
    what_is_no_number_stays_in_its_token,
    what_is_no_number_stays_in_its_channel_when_spread,
    there_may_be_more_tokens_than_cubes_in_a_dimension,
];
