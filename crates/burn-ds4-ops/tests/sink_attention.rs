//! Attention with a sink against an `f64` oracle and cases worked out by hand.

use super::attending::{Case, SMALL, Sizes};
use super::common::{
    EXACT, absolute, assert_close, devices, every_dtype, floats, is_gpu, narrow, some, values,
};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_ds4_ops::attention::{CompressedKeys, WindowKeys, sink_attention, sink_probabilities};

const FITS: &str = "arguments that fit";

fn the_sink_takes_its_share_of_a_softmax_by_hand() {
    // Logits ln 2 and ln 3 against a sink of ln 5: shares of 2/10, 3/10 and 5/10. The row in front
    // is outside the window.
    for (name, device) in devices() {
        let rows = [9.0, 9.0, 2f32.ln() * 2.0, 10.0, 3f32.ln() * 2.0, -20.0];
        let queries = || floats(&[1.0, 0.0], [1, 1, 1, 2], device);
        let window = || WindowKeys {
            rows: floats(&rows, [1, 3, 2], device),
            bias: Tensor::zeros([1, 3], (device, DType::F32)),
            span: 2,
        };
        let sinks = || floats(&[5f32.ln()], [1], device);
        let shares = sink_probabilities(queries(), window(), None, sinks(), 0.5).expect(FITS);
        assert_close(&values(shares), &[0.0, 0.2, 0.3], absolute(1e-6), name);
        let output = sink_attention(queries(), window(), None, sinks(), 0.5).expect(FITS);
        let first = 2.0 * (0.2 * 2f32.ln() + 0.3 * 3f32.ln());
        assert_close(&values(output), &[first, 2.0 - 6.0], absolute(1e-5), name);
    }
}

/// Few queries and many; odd numbers of heads, channels and rows, and more of each than a chunk, a
/// plane or a cube has. Rows of several cubes. Every third has another kernel, or none; the other
/// tests have those of [`SMALL`].
fn sizes() -> Vec<Sizes> {
    let wide = Sizes {
        batch: 1,
        count: 2,
        heads: 3,
        width: 512,
        span: 9,
        rows: 37,
        picks: Some(11),
    };
    vec![
        Sizes {
            heads: 3,
            rows: 400,
            picks: Some(290),
            ..SMALL
        },
        SMALL,
        Sizes { rows: 0, ..SMALL },
        wide,
        Sizes {
            picks: Some(4),
            ..SMALL
        },
        Sizes { rows: 300, ..SMALL },
        Sizes {
            heads: 5,
            width: 33,
            span: 70,
            rows: 45,
            ..SMALL
        },
        Sizes {
            heads: 1,
            width: 1,
            span: 1,
            rows: 1,
            ..SMALL
        },
        Sizes { count: 9, ..SMALL },
        Sizes {
            count: 9,
            width: 24,
            picks: Some(7),
            ..SMALL
        },
        Sizes {
            width: 1030,
            ..wide
        },
    ]
}

fn attention_agrees_with_the_oracle_at_every_size() {
    for (name, device) in devices() {
        for &sizes in some(name, &sizes(), 3) {
            let mut case = Case::new(sizes, 1);
            case.scale = 1.7 / (sizes.width as f64).sqrt();
            let (output, probabilities) = case.oracle();
            let what = format!("{name} {sizes:?}");
            let shares = case.probabilities(device);
            assert_close(&shares, &narrow(&probabilities), absolute(2e-6), &what);
            let actual = case.output(device);
            assert_close(&actual, &narrow(&output), absolute(5e-6), &what);
        }
    }
}

/// A kernel that combines KV splits reads 16 at a time, and the highest logit may come later.
fn splits_that_are_combined_in_turn_agree_with_the_oracle() {
    let sizes = Sizes {
        heads: 5,
        rows: 9000,
        ..SMALL
    };
    let mut case = Case::new(sizes, 3);
    // Few rows have most of a softmax.
    case.scale = 6.0;
    let (output, _) = case.oracle();
    for (name, device) in devices() {
        assert_close(&case.output(device), &narrow(&output), absolute(2e-5), name);
    }
}

fn attention_agrees_with_the_oracle_in_every_dtype() {
    every_dtype(|name, device, dtype| {
        // Few queries, and many: without the kernel, products round logits and shares to the dtype.
        // Of f32, the test of sizes has many, too.
        let step = if dtype == FloatDType::F32 { 2 } else { 1 };
        for &count in some(name, &[3, 9], step) {
            let sizes = Sizes {
                count,
                width: 40,
                picks: Some(5),
                ..SMALL
            };
            let case = Case::new(sizes, 2).rounded(dtype, device);
            let (output, _) = case.oracle();
            let tolerance = match dtype {
                FloatDType::F32 => 5e-6,
                _ if count == 3 && !name.starts_with("flex") => 2f64.powi(-8),
                _ => 2f64.powi(-6),
            };
            let actual = case.output_in(device, dtype);
            let what = format!("{name} {count} queries");
            assert_close(&actual, &narrow(&output), absolute(tolerance), &what);
        }
    });
}

/// More queries than decoding has, of 16 bits: one, two and more tiles of heads, parts of them,
/// several cubes; one slice of channels and all that a cube can have; columns that end within a
/// block.
fn many_queries_of_16_bits_agree_with_the_oracle() {
    let of = |heads, width, span, rows, picks| Sizes {
        batch: 2,
        count: 9,
        heads,
        width,
        span,
        rows,
        picks,
    };
    let sizes = [
        of(5, 64, 33, 20, None),
        of(20, 128, 3, 70, Some(41)),
        of(64, 512, 128, 90, Some(64)),
        of(70, 64, 1, 0, None),
        of(33, 192, 64, 129, None),
    ];
    every_dtype(|name, device, dtype| {
        let number = if is_gpu(name) { sizes.len() } else { 2 };
        for sizes in sizes.iter().take(number) {
            let mut case = Case::new(*sizes, 4);
            case.scale = 2.0 / (sizes.width as f64).sqrt();
            let case = case.rounded(dtype, device);
            let (output, _) = case.oracle();
            let tolerance = match dtype {
                FloatDType::F32 => 5e-6,
                _ => 2f64.powi(-6),
            };
            let actual = case.output_in(device, dtype);
            let what = format!("{name} {sizes:?}");
            assert_close(&actual, &narrow(&output), absolute(tolerance), &what);
        }
    });
}

fn views_are_read_where_they_are() {
    let case = Case::new(Sizes { width: 8, ..SMALL }, 3);
    for (name, device) in devices() {
        let expected = case.output(device);
        let (queries, window, compressed, sinks) = case.arguments(device, FloatDType::F32);
        let keys = compressed.expect("there are compressed rows");
        // Inside of larger tensors, and with dimensions the other way round.
        let framed = |x: Tensor<3>| {
            let [batch, rows, width] = x.dims();
            let frame = Tensor::ones([batch, rows, 3], (device, DType::F32));
            let wide = Tensor::cat(vec![frame.clone(), x, frame], 2);
            wide.slice([0..batch, 0..rows, 3..3 + width])
        };
        let turned = |x: Tensor<3>| {
            let turned = x.swap_dims(0, 2).clone() * 1.0;
            turned.swap_dims(0, 2)
        };
        let heads_first = queries.swap_dims(1, 2) * 1.0;
        let output = sink_attention(
            heads_first.swap_dims(1, 2),
            WindowKeys {
                rows: framed(window.rows),
                ..window
            },
            Some(CompressedKeys {
                rows: turned(keys.rows),
                bias: turned(keys.bias),
                picks: None,
            }),
            sinks,
            case.scale,
        );
        assert_close(
            &values(output.expect(FITS)),
            &expected,
            absolute(1e-6),
            name,
        );
    }
}

fn all_picks_in_order_are_as_good_as_none() {
    let shared = Case::new(SMALL, 4);
    let mut picked = shared.clone();
    picked.sizes.picks = Some(SMALL.rows);
    picked.picks = (0..SMALL.batch * SMALL.count)
        .flat_map(|_| 0..SMALL.rows as i64)
        .collect();
    for (name, device) in devices() {
        assert_close(&picked.output(device), &shared.output(device), EXACT, name);
    }
}

fn a_pick_that_is_no_row_is_not_seen() {
    let mut case = Case::new(
        Sizes {
            picks: Some(5),
            ..SMALL
        },
        5,
    );
    for (query, picks) in case.picks.chunks_mut(5).enumerate() {
        picks[query % 5] = -1;
        picks[(query + 2) % 5] = SMALL.rows as i64;
    }
    let (output, probabilities) = case.oracle();
    for (name, device) in devices() {
        let shares = case.probabilities(device);
        assert_close(&shares, &narrow(&probabilities), absolute(1e-6), name);
        assert_close(&case.output(device), &narrow(&output), absolute(2e-6), name);
    }
}

fn no_compressed_rows_and_no_picks_are_as_good_as_no_compressed_part() {
    let case = Case::new(Sizes { rows: 0, ..SMALL }, 6);
    let some = Case::new(SMALL, 6);
    for (name, device) in devices() {
        let expected = case.output(device);
        let (queries, window, _, sinks) = case.arguments(device, FloatDType::F32);
        let none = CompressedKeys {
            rows: Tensor::zeros([2, 0, 4], (device, DType::F32)),
            bias: Tensor::zeros([2, 3, 0], (device, DType::F32)),
            picks: None,
        };
        let (_, _, keys, _) = some.arguments(device, FloatDType::F32);
        let unpicked = keys.map(|keys| CompressedKeys {
            picks: Some(Tensor::zeros([2, 3, 0], device)),
            ..keys
        });
        for keys in [Some(none), unpicked] {
            let (queries, window, sinks) = (queries.clone(), window.clone(), sinks.clone());
            let output = sink_attention(queries, window, keys, sinks, case.scale).expect(FITS);
            assert_close(&values(output), &expected, EXACT, name);
        }
    }
}

fn nothing_to_attend_from_gives_nothing() {
    for (name, device) in devices() {
        for shape in [[0, 2, 3, 4], [1, 0, 3, 4], [1, 2, 0, 4], [1, 2, 3, 0]] {
            let [batch, _, heads, width] = shape;
            let window = WindowKeys {
                rows: Tensor::zeros([batch, 5, width], (device, DType::F32)),
                bias: Tensor::zeros([batch, 5], (device, DType::F32)),
                span: 2,
            };
            let queries = Tensor::zeros(shape, (device, DType::F32));
            let sinks = Tensor::zeros([heads], (device, DType::F32));
            let output = sink_attention(queries, window, None, sinks, 1.0).expect(FITS);
            assert_eq!(output.dims(), shape, "{name}");
        }
    }
}

catalogue![
    the_sink_takes_its_share_of_a_softmax_by_hand,
    attention_agrees_with_the_oracle_at_every_size,
    splits_that_are_combined_in_turn_agree_with_the_oracle,
    attention_agrees_with_the_oracle_in_every_dtype,
    many_queries_of_16_bits_agree_with_the_oracle,
    views_are_read_where_they_are,
    all_picks_in_order_are_as_good_as_none,
    a_pick_that_is_no_row_is_not_seen,
    no_compressed_rows_and_no_picks_are_as_good_as_no_compressed_part,
    nothing_to_attend_from_gives_nothing,
];
