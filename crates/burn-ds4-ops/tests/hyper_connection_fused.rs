//! The end of a sub-layer, the mix of the next one and its norm at once, against the `f64` oracle
//! of each of them.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::hyper_connection::{
    Coefficients, Norm, Streams, collapse_norm, expand, head_norm,
};

use super::common::{
    EXACT, FLOATS, Tolerance, absolute, assert_close, compiles_slowly, devices, every_dtype,
    floats, half_unit, is_gpu, narrow, noise, read, rounded, values, wide,
};
use super::mixing::{Case, SINKHORN, shapes, spoilt_widths, widths};

/// Half a unit in the last place, and what f32 coefficients may be off by.
fn one_rounding(dtype: FloatDType) -> Tolerance {
    Tolerance {
        absolute: 2e-5,
        relative: half_unit(dtype),
    }
}

/// What is pending on the streams of a case.
fn pending(case: &Case, output: Tensor<2>, streams: Tensor<3>) -> Streams {
    let coefficients = case.coefficients(SINKHORN, &streams.device());
    Streams::Pending {
        output,
        streams,
        coefficients,
    }
}

/// The same case, whose streams are these.
fn with_streams(case: &Case, streams: Vec<f32>) -> Case {
    Case {
        streams,
        ..Case::new(case.tokens, case.n, case.d, 1.0)
    }
}

/// Holds the results for `streams` against the oracles, each for what the operator has made so far.
#[track_caller]
fn assert_mixed(case: &Case, streams: Streams, spread: &[f64], dtype: FloatDType, what: &str) {
    let [tokens, n, d] = streams.dims();
    let tolerance = one_rounding(dtype);
    let parameters = case.parameters(&streams.device());
    let actual = parameters.collapse_norm(streams.clone(), SINKHORN);
    assert_eq!(actual.streams.dims(), [tokens, n, d], "{what}");
    for rows in [&actual.input, &actual.normed] {
        assert_eq!(
            (rows.dims(), rows.dtype()),
            ([tokens, d], dtype.into()),
            "{what}"
        );
    }
    let held = read(&actual.streams);
    assert_close(
        &held,
        &narrow(spread),
        tolerance,
        &format!("{what} streams"),
    );
    let expanded = with_streams(case, held);
    let oracle = expanded.oracle(SINKHORN);
    let packed = values(actual.coefficients.packed());
    assert_close(
        &packed,
        &narrow(&oracle.packed()),
        absolute(1e-5),
        &format!("{what} coefficients"),
    );
    let input = read(&actual.input);
    assert_close(
        &input,
        &narrow(&oracle.input),
        tolerance,
        &format!("{what} input"),
    );
    let normed = narrow(&case.normed(&wide(&input)));
    assert_close(
        &read(&actual.normed),
        &normed,
        tolerance,
        &format!("{what} norm"),
    );

    let last = parameters.head_norm(streams, 1e-3, 1e-6);
    assert_eq!((last.dims(), last.dtype()), ([tokens, d], dtype.into()));
    let normed = narrow(&case.normed(&expanded.headed(1e-3, 1e-6)));
    // The norm is of a row that has been rounded.
    let tolerance = Tolerance {
        absolute: 1e-4 + 4.0 * half_unit(dtype),
        relative: 2.0 * half_unit(dtype),
    };
    assert_close(&read(&last), &normed, tolerance, &format!("{what} head"));
}

fn streams_of_any_size_are_mixed_at_once() {
    every_dtype(|name, device, dtype| {
        for &(tokens, n, d) in shapes(name, dtype) {
            let what = format!("{name} [{tokens}, {n}, {d}]");
            let case = Case::new(tokens, n, d, 1.0).rounded(dtype, device);
            let streams = case.streams(device).cast(dtype);
            assert_mixed(&case, streams.into(), &wide(&case.streams), dtype, &what);
        }
    });
}

fn outputs_of_any_dtype_are_spread_at_once() {
    every_dtype(|name, device, dtype| {
        for of in FLOATS.into_iter().filter(|of| device.supports_dtype(*of)) {
            // Where an output is converted, its dtype makes further kernels.
            let few = compiles_slowly(name) && of != dtype;
            for &(tokens, n, d) in shapes(name, dtype).take(if few { 1 } else { usize::MAX }) {
                let what = format!("{name} [{tokens}, {n}, {d}], {of:?} output");
                let case = Case::new(tokens, n, d, 1.0).rounded(dtype, device);
                let (output, held) = rounded(&noise(tokens * d, 21), [tokens, d], of, device);
                let spread = case.expanded(&held, &case.oracle(SINKHORN));
                let streams = pending(&case, output, case.streams(device).cast(dtype));
                assert_mixed(&case, streams, &spread, dtype, &what);
            }
        }
    });
}

fn many_tokens_are_mixed_at_once() {
    every_dtype(|name, device, dtype| {
        // So many tokens are multiplied on tensor cores in this dtype alone.
        if dtype != FloatDType::BF16 {
            return;
        }
        for (tokens, n, d) in [(290, 4, 200), (301, 2, 64)] {
            let what = format!("{name} [{tokens}, {n}, {d}]");
            let case = Case::new(tokens, n, d, 1.0).rounded(dtype, device);
            let (output, held) = rounded(&noise(tokens * d, 23), [tokens, d], dtype, device);
            let spread = case.expanded(&held, &case.oracle(SINKHORN));
            let streams = case.streams(device).cast(dtype);
            let waiting = pending(&case, output, streams.clone());
            assert_mixed(&case, streams.into(), &wide(&case.streams), dtype, &what);
            assert_mixed(&case, waiting.clone(), &spread, dtype, &what);
            let ready = Streams::Ready(waiting.clone().ready().unwrap());
            let parameters = case.parameters(device);
            let [a, b] = [waiting, ready].map(|streams| {
                let mixed = parameters.collapse_norm(streams, SINKHORN);
                [read(&mixed.streams), read(&mixed.normed)]
            });
            for (a, b) in a.iter().zip(&b) {
                assert_close(a, b, EXACT, &what);
            }

            // Neither their number nor another token's NaN matters to a token.
            let all = all_of(&case, 0..tokens, false, dtype, device);
            let mut spoilt = with_streams(&case, case.streams.clone());
            spoilt.streams[(tokens - 2) * n * d + 3] = f32::NAN;
            for (own, range) in [(&case, 0..256), (&spoilt, 1..tokens)] {
                let fewer = all_of(own, range.clone(), false, dtype, device);
                for ((part, actual), (_, all)) in fewer.iter().zip(&all) {
                    let width = all.len() / tokens;
                    let good = range.start..range.end.min(tokens - 2);
                    let (actual, expected) = (
                        &actual[..good.len() * width],
                        &all[good.start * width..good.end * width],
                    );
                    assert_close(
                        actual,
                        expected,
                        EXACT,
                        &format!("{what} {range:?}: {part}"),
                    );
                }
            }
        }
    });
}

fn a_function_and_a_weight_may_be_of_any_dtype() {
    let (tokens, n, d) = (3, 4, 72);
    every_dtype(|name, device, dtype| {
        let mut case = Case::new(tokens, n, d, 1.0);
        let (function, held) = rounded(&case.function, [24, n * d], dtype, device);
        case.function = narrow(&held);
        let (weight, held) = rounded(&noise(d, 3), [d], dtype, device);
        let base = floats(&case.base, [24], device);
        let scale = floats(&case.scale, [24], device);
        let norm = Norm {
            weight,
            epsilon: 0.0,
        };
        let streams = case.streams(device).into();
        let actual = collapse_norm(streams, function, base, scale, SINKHORN, norm).unwrap();
        let oracle = case.oracle(SINKHORN);
        let packed = values(actual.coefficients.packed());
        assert_close(&packed, &narrow(&oracle.packed()), absolute(1e-5), name);
        let expected = oracle.input.chunks(d).flat_map(|row| {
            let rms = (row.iter().map(|v| v * v).sum::<f64>() / d as f64).sqrt();
            row.iter()
                .zip(&held)
                .map(move |(v, weight)| v / rms * weight)
        });
        let expected = narrow(&expected.collect::<Vec<_>>());
        assert_close(&values(actual.normed), &expected, absolute(2e-5), name);
    });
}

/// Everything that comes of the streams of some tokens, with or without something pending, each of
/// it token by token.
fn all_of(
    case: &Case,
    tokens: std::ops::Range<usize>,
    spread: bool,
    dtype: FloatDType,
    device: &Device,
) -> Vec<(&'static str, Vec<f32>)> {
    let (n, d) = (case.n, case.d);
    let count = tokens.len();
    let own = &case.streams[tokens.start * n * d..tokens.end * n * d];
    let mut own = with_streams(case, own.to_vec());
    own.tokens = count;
    let streams = own.streams(device).cast(dtype);
    let streams = if spread {
        let output = noise(case.tokens * d, 31);
        let output = &output[tokens.start * d..tokens.end * d];
        pending(
            &own,
            floats(output, [count, d], device).cast(dtype),
            streams,
        )
    } else {
        streams.into()
    };
    let parameters = case.parameters(device);
    let mixed = parameters.collapse_norm(streams.clone(), SINKHORN);
    vec![
        ("streams", read(&mixed.streams)),
        ("input", read(&mixed.input)),
        ("normed", read(&mixed.normed)),
        ("coefficients", read(&mixed.coefficients.packed())),
        ("head", read(&parameters.head_norm(streams, 1e-6, 1e-6))),
    ]
}

fn a_token_is_mixed_as_if_it_were_alone() {
    every_dtype(|name, device, dtype| {
        let elsewhere = [(1, 1), (3, 127), (4, 64), (8, 40), (4, 4096)];
        for &(n, d) in widths(name, dtype, &elsewhere) {
            for spread in [false, true] {
                let what = format!("{name} {n} x {d}");
                // More tokens than a cube has, where there are kernels, and the product that makes
                // what is pending does not depend on the number of tokens either.
                let many = !name.starts_with("flex") && n <= 4;
                let tokens = if many { 37 } else { 16 };
                let case = Case::new(tokens, n, d, 1.0);
                let together = all_of(&case, 0..tokens, spread, dtype, device);
                let step = if is_gpu(name) || n * d < 1000 { 1 } else { 5 };
                let counts = if compiles_slowly(name) { 5 } else { step };
                let some = (1..16).step_by(counts).map(|count| 0..count);
                let alone = (1..tokens).step_by(step).map(|token| token..token + 1);
                for range in some.chain(alone) {
                    let actual = all_of(&case, range.clone(), spread, dtype, device);
                    for ((part, actual), (_, all)) in actual.iter().zip(&together) {
                        let width = all.len() / tokens;
                        let expected = &all[range.start * width..range.end * width];
                        let what = format!("{what} {range:?}: {part}");
                        assert_close(actual, expected, EXACT, &what);
                    }
                }
            }
        }
    });
}

fn what_is_pending_has_the_bits_of_what_is_spread_before() {
    every_dtype(|name, device, dtype| {
        for &(tokens, n, d) in shapes(name, dtype) {
            let what = format!("{name} [{tokens}, {n}, {d}]");
            let case = Case::new(tokens, n, d, 1.0);
            let streams = case.streams(device).cast(dtype);
            let output = floats(&noise(tokens * d, 5), [tokens, d], device).cast(dtype);
            let coefficients = case.coefficients(SINKHORN, device);
            let ready = expand(output.clone(), streams.clone(), &coefficients).unwrap();
            let pending = pending(&case, output, streams);
            assert_eq!(pending.dims(), ready.dims(), "{what}");
            let same = read(&pending.clone().ready().unwrap());
            assert_close(&same, &read(&ready), EXACT, &what);
            let parameters = case.parameters(device);
            let [a, b] = [pending, ready.into()].map(|streams: Streams| {
                let mixed = parameters.collapse_norm(streams.clone(), SINKHORN);
                let last = parameters.head_norm(streams, 1e-6, 1e-6);
                [
                    read(&mixed.streams),
                    read(&mixed.normed),
                    read(&mixed.coefficients.packed()),
                    read(&last),
                ]
            });
            for (a, b) in a.iter().zip(&b) {
                assert_close(a, b, EXACT, &what);
            }
        }
    });
}

fn views_are_mixed_at_once_as_their_copies() {
    let (tokens, n, d) = (3, 4, 128);
    for (name, device) in devices() {
        let swapped = floats(&noise(tokens * n * d, 5), [n, tokens, d], device).swap_dims(0, 1);
        // A multiple of any device's alignment is cut off, so that these are views.
        let all = noise((tokens + 1) * n * 256, 6);
        let wide_rows = floats(&all, [tokens + 1, n, 256], device);
        let of_columns = wide_rows.clone().slice([0..tokens, 0..n, 128..256]);
        let odd_columns = wide_rows.slice([1..tokens + 1, 0..n, 3..3 + d]);
        let across = floats(&noise(tokens * n * d, 7), [d, n, tokens], device).swap_dims(0, 2);
        let repeated = floats(&noise(tokens * d, 8), [tokens, 1, d], device).expand([tokens, n, d]);
        let views = [
            ("swapped", swapped),
            ("columns", of_columns),
            ("odd columns", odd_columns),
            ("across", across),
            ("repeated", repeated),
        ];
        for (view, streams) in views {
            let what = format!("{name} {view}");
            let case = with_streams(&Case::new(tokens, n, d, 1.0), values(streams.clone()));
            let output = floats(&noise(tokens * d, 9), [d, tokens], device).transpose();
            let held = wide(&values(output.clone()));
            let spread = case.expanded(&held, &case.oracle(SINKHORN));
            let dtype = FloatDType::F32;
            assert_mixed(
                &case,
                pending(&case, output, streams.clone()),
                &spread,
                dtype,
                &what,
            );
            assert_mixed(&case, streams.into(), &wide(&case.streams), dtype, &what);
        }
    }
}

fn what_is_no_number_stays_in_its_token_when_mixed_at_once() {
    for (name, device) in devices() {
        for (n, d) in spoilt_widths(name) {
            for spread in [false, true] {
                let clean = Case::new(4, n, d, 1.0);
                let mut case = Case::new(4, n, d, 1.0);
                let width = n * d;
                case.streams[width + 5] = f32::NAN;
                case.streams[3 * width - 1] = f32::INFINITY;
                let all = |case| all_of(case, 0..4, spread, FloatDType::F32, device);
                for ((part, actual), (_, expected)) in all(&case).iter().zip(&all(&clean)) {
                    let own = actual.len() / 4;
                    for token in [0, 3] {
                        let range = token * own..(token + 1) * own;
                        let what = format!("{name} {n} x {d}: {part} of {token}");
                        assert_close(&actual[range.clone()], &expected[range], EXACT, &what);
                    }
                    if *part != "streams" {
                        let lost = actual[own..2 * own].iter().all(|v| v.is_nan());
                        assert!(lost, "{name} {n} x {d}: {part} of a token with NaN");
                    }
                }
            }
        }
    }
}

fn no_tokens_give_empty_results_at_once() {
    for (name, device) in devices() {
        let case = Case::new(0, 4, 6, 1.0);
        let parameters = case.parameters(device);
        let output = Tensor::zeros([0, 6], device);
        let streams = [
            case.streams(device).into(),
            pending(&case, output, case.streams(device)),
        ];
        for streams in streams {
            let mixed = parameters.collapse_norm(streams.clone(), SINKHORN);
            assert_eq!(mixed.streams.dims(), [0, 4, 6], "{name}");
            assert_eq!(mixed.input.dims(), [0, 6], "{name}");
            assert_eq!(mixed.normed.dims(), [0, 6], "{name}");
            assert_eq!(mixed.coefficients.packed().dims(), [0, 24], "{name}");
            let last = parameters.head_norm(streams, 1e-6, 1e-6);
            assert_eq!(last.dims(), [0, 6], "{name}");
        }
    }
}

/// What both operators say of three tokens of two streams of five channels.
fn results(streams: &Streams, norm: &Norm, device: &Device) -> [Result<(), OpError>; 2] {
    let ones = |count| Tensor::<1>::ones([count], device);
    let function = |rows| Tensor::<2>::ones([rows, 10], device);
    let (streams, norm) = (|| streams.clone(), || norm.clone());
    [
        collapse_norm(streams(), function(8), ones(8), ones(8), SINKHORN, norm()).map(|_| ()),
        head_norm(streams(), function(2), ones(2), ones(1), 0.0, 0.0, norm()).map(|_| ()),
    ]
}

fn what_is_pending_and_the_norm_are_checked() {
    for (name, device) in devices() {
        let case = Case::new(3, 2, 5, 1.0);
        let streams = |tokens| {
            pending(
                &case,
                Tensor::ones([tokens, 5], device),
                case.streams(device),
            )
        };
        let norm = |columns, epsilon| Norm {
            weight: Tensor::ones([columns], device),
            epsilon,
        };
        for result in results(&streams(3), &norm(5, 0.0), device) {
            assert!(result.is_ok(), "{name}: {result:?}");
        }
        let foreign = Streams::Pending {
            output: Tensor::ones([3, 5], device),
            streams: case.streams(device),
            coefficients: Coefficients::new(
                Tensor::ones([2, 2], device),
                Tensor::ones([2, 2], device),
                Tensor::ones([2, 2, 2], device),
            )
            .unwrap(),
        };
        let wrong = [
            (
                results(&streams(2), &norm(5, 0.0), device),
                "`output` has shape [2, 5], expected [3, 5]",
            ),
            (
                results(&foreign, &norm(5, 0.0), device),
                "`coefficients` has shape [2, 2], expected [3, 2]",
            ),
            (
                results(&streams(3), &norm(4, 0.0), device),
                "`weight` has shape [4], expected [5]",
            ),
            (
                results(&streams(3), &norm(5, -1.0), device),
                "`the norm's epsilon` is -1, expected a number that is not negative",
            ),
        ];
        for (results, message) in wrong {
            for result in results {
                assert_eq!(result.unwrap_err().to_string(), message, "{name}");
            }
        }
    }
}

catalogue![
    streams_of_any_size_are_mixed_at_once,
    outputs_of_any_dtype_are_spread_at_once,
    many_tokens_are_mixed_at_once,
    a_function_and_a_weight_may_be_of_any_dtype,
    a_token_is_mixed_as_if_it_were_alone,
    what_is_pending_has_the_bits_of_what_is_spread_before,
    views_are_mixed_at_once_as_their_copies,
    what_is_no_number_stays_in_its_token_when_mixed_at_once,
    no_tokens_give_empty_results_at_once,
    what_is_pending_and_the_norm_are_checked,
];
