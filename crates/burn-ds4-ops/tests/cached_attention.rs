//! Attention over a cache, and the rows that are appended to it, against `f64` oracles and against
//! themselves.

use burn::tensor::{FloatDType, IntDType, Tensor};
use burn_ds4_ops::attention::{
    CachedQueries, CachedRows, CachedWindow, DECODE_TOKENS, Positions, RowRounding, WindowLayout,
    append_rows, cached_attention,
};
use burn_ds4_ops::quant::fp8_roundtrip;

use super::caching::{EPSILON, PLAIN, PROMPT, STARTS, Text, close};
use super::common::{
    EXACT, Tolerance, absolute, assert_close, compiles_slowly, devices, every_dtype, floats,
    integers, narrow, noise, read, skip, some, values,
};

const FITS: &str = "arguments that fit";

/// Sizes that go different ways: heads that no cube divides, widths of one and of several vectors
/// to a lane, several KV splits, picks. Every second of them, from the first on, goes all ways that
/// there are without tensor cores. Every fourth has picks or not, and vectors of different sizes.
const TEXTS: [Text; 7] = [
    Text {
        width: 32,
        picks: Some(140),
        rows: 150,
        ratio: 1,
        ..PLAIN
    },
    Text {
        heads: 1,
        width: 64,
        rotated: 64,
        slots: 6,
        ..PLAIN
    },
    Text {
        count: 1,
        width: 6,
        rotated: 2,
        span: 1,
        slots: 1,
        layout: WindowLayout::Latest,
        ..PLAIN
    },
    Text {
        width: 512,
        rotated: 64,
        picks: Some(4),
        ..PLAIN
    },
    PLAIN,
    // Two tiles of heads, of which the second is not full, and fewer channels than planes have
    // slices.
    Text {
        layout: WindowLayout::Latest,
        heads: 19,
        width: 128,
        rotated: 64,
        span: 20,
        slots: 24,
        picks: Some(140),
        rows: 150,
        ratio: 1,
        ..PLAIN
    },
    Text {
        count: 5,
        width: 128,
        rotated: 64,
        span: 20,
        slots: 24,
        ratio: 1,
        rows: 300,
        ..PLAIN
    },
];

const PROMPTS: [Text; 5] = [
    // Two tiles of heads, of which the second is not full.
    Text {
        layout: WindowLayout::Latest,
        heads: 70,
        picks: Some(140),
        rows: 150,
        ratio: 1,
        ..PROMPT
    },
    Text {
        heads: 64,
        width: 512,
        span: 128,
        slots: DECODE_TOKENS + 140,
        ..PROMPT
    },
    Text {
        layout: WindowLayout::Latest,
        width: 384,
        rotated: 8,
        picks: Some(44),
        ..PROMPT
    },
    Text {
        width: 256,
        rotated: 256,
        rows: 0,
        ..PROMPT
    },
    Text {
        causal: false,
        slots: 3 * DECODE_TOKENS,
        rows: 0,
        ..PROMPT
    },
];

/// The texts for a dtype. Each makes kernels of its own, those of wide rows for seconds: a device
/// that compiles slowly has every second in f32, every fourth in other dtypes.
fn texts(name: &str, dtype: FloatDType) -> impl Iterator<Item = &'static Text> + use<> {
    some(name, &TEXTS, if dtype == FloatDType::F32 { 2 } else { 4 })
}

/// A width at which tensor cores may work. A device that compiles slowly has none, and has kernels
/// for the width of [`PLAIN`] anyway.
fn tile_width(name: &str) -> usize {
    if compiles_slowly(name) {
        PLAIN.width
    } else {
        64
    }
}

fn queries_see_what_their_positions_say_and_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        for &text in texts(name, dtype) {
            let mut starts = STARTS.to_vec();
            starts.push(-1);
            let actual = read(&text.attend(&starts, dtype, device));
            let each = text.count * text.heads * text.width;
            for (sequence, actual) in actual.chunks(each).enumerate() {
                let expected = narrow(&text.oracle(&starts, sequence));
                let what = format!("{name} {text:?} from {}", starts[sequence]);
                assert_close(actual, &expected, close(dtype), &what);
            }
        }
    });
}

fn prompts_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        if dtype == FloatDType::F32 {
            // Only 16 bits have a kernel of their own for them.
            return;
        }
        // Their columns are more than those of which the tolerance was made.
        let Tolerance { absolute, relative } = close(dtype);
        let tolerance = Tolerance {
            absolute: 2.0 * absolute,
            relative: 2.0 * relative,
        };
        for &text in some(name, &PROMPTS, PROMPTS.len()) {
            let starts = [0, 9, -1, 28];
            let actual = read(&text.attend(&starts, dtype, device));
            let each = text.count * text.heads * text.width;
            for (sequence, actual) in actual.chunks(each).enumerate() {
                let expected = narrow(&text.oracle(&starts, sequence));
                let what = format!("{name} {text:?} from {}", starts[sequence]);
                assert_close(actual, &expected, tolerance, &what);
            }
        }
    });
}

/// In f32.
fn agrees_with_the_oracle(text: Text) {
    let starts = [0, 9, -1];
    for (name, device) in devices() {
        let actual = values(text.attend(&starts, FloatDType::F32, device));
        let each = text.count * text.heads * text.width;
        for (sequence, actual) in actual.chunks(each).enumerate() {
            let expected = narrow(&text.oracle(&starts, sequence));
            let what = format!("{name} from {}", starts[sequence]);
            assert_close(actual, &expected, close(FloatDType::F32), &what);
        }
    }
}

fn without_channels_that_turn_queries_and_rows_are_as_they_are_normalised() {
    agrees_with_the_oracle(Text {
        rotated: 0,
        ..PLAIN
    });
}

fn queries_of_a_block_that_see_each_other_agree_with_the_oracle() {
    let block = Text {
        count: 5,
        slots: 12,
        causal: false,
        rows: 0,
        ..PLAIN
    };
    agrees_with_the_oracle(block);
    // More queries than a kernel takes.
    agrees_with_the_oracle(Text {
        count: DECODE_TOKENS + 1,
        slots: DECODE_TOKENS + 5,
        ..block
    });
}

fn more_queries_than_a_kernel_takes_agree_with_the_oracle() {
    agrees_with_the_oracle(Text {
        count: DECODE_TOKENS + 1,
        slots: DECODE_TOKENS + 5,
        ..PLAIN
    });
}

fn what_starts_beyond_the_angles_is_refused_or_not_there() {
    let text = PLAIN;
    let (absent, beyond) = ([4, -1], [4, 1 << 20]);
    for (name, device) in devices() {
        let window = text.window(&absent, FloatDType::F32, device);
        let append = |starts: &[i64]| {
            let shape = [2, text.count, text.width];
            let x = floats(&noise(2 * text.count * text.width, 10), shape, device);
            let new = text.new_rows(x, RowRounding::None);
            append_rows(new, text.place(starts, device), window.clone())
        };
        let attend = |starts: &[i64]| {
            let shape = [2, text.count, text.heads, text.width];
            let queries = CachedQueries {
                x: floats(&text.queries(2), shape, device),
                epsilon: Some(EPSILON),
                sinks: floats(&text.sinks(), [text.heads], device),
                scale: 0.8,
            };
            let window = CachedWindow {
                rows: window.clone(),
                layout: WindowLayout::Ring,
                span: text.span,
                causal: true,
            };
            let compressed = CachedRows {
                rows: floats(&text.compressed(2), [2, text.rows, text.width], device).into(),
                ratio: text.ratio,
                picking: false,
                picks: None,
            };
            cached_attention(
                queries,
                text.place(starts, device),
                window,
                Some(compressed),
            )
        };
        if name == "flex" {
            for result in [append(&beyond).map(|_| ()), attend(&beyond).map(|_| ())] {
                let message = result.expect_err(name).to_string();
                assert!(message.starts_with("`last position` is"), "{message}");
            }
            continue;
        }
        let rings = [absent, beyond].map(|starts| values(append(&starts).expect(FITS)));
        assert_eq!(rings[0], rings[1], "{name}");
        let outputs = [absent, beyond].map(|starts| values(attend(&starts).expect(FITS)));
        assert_eq!(outputs[0], outputs[1], "{name}");
    }
}

fn a_query_has_the_same_bits_alone_and_in_a_longer_cache() {
    every_dtype(|name, device, dtype| {
        for &text in texts(name, dtype) {
            for start in [0, 4, 17] {
                let together = read(&text.attend(&[start], dtype, device));
                let each = text.heads * text.width;
                for query in 0..text.count {
                    let alone = Text { count: 1, ..text };
                    let x = floats(
                        &text.queries(1),
                        [1, text.count, text.heads, text.width],
                        device,
                    );
                    let rows = floats(&text.compressed(1), [1, text.rows, text.width], device);
                    // More rows, which are visible to no query.
                    let beyond = Tensor::ones([1, 400, text.width], (device, rows.dtype()));
                    let rows = Tensor::cat(vec![rows, beyond], 1).cast(dtype);
                    let picks = text.picks.map(|picks| {
                        let all = integers(&text.picked(1), [1, text.count, picks], device);
                        all.narrow(1, query, 1)
                    });
                    let alone = alone.attend_to(
                        &[start + query as i64],
                        x.narrow(1, query, 1).cast(dtype),
                        rows,
                        picks,
                    );
                    let what = format!("{name} {text:?} query {query} from {start}");
                    let of_query = &together[query * each..(query + 1) * each];
                    assert_close(&read(&alone), of_query, EXACT, &what);
                }
            }
        }
    });
}

fn a_query_has_the_same_bits_in_any_capacity_and_beside_any_sequences() {
    // Some rows twice, some that are not complete for all queries, and places without a row.
    let picked = [0, 1, 1, 2, 4, 7, 3, 9, -1, -1];
    every_dtype(|name, device, dtype| {
        // Many queries may share the work otherwise, with more heads to a cube.
        let heads = if compiles_slowly(name) {
            PLAIN.heads
        } else {
            19
        };
        let text = Text {
            count: DECODE_TOKENS,
            heads,
            width: tile_width(name),
            slots: DECODE_TOKENS + 5,
            ratio: 2,
            rows: DECODE_TOKENS / 2,
            ..PLAIN
        };
        let each = text.heads * text.width;
        for picks in [None, Some(picked)] {
            let picking = Text {
                picks: picks.map(|picks| picks.len()),
                ..text
            };
            // The first sequence, from its query number `first` on.
            let attend = |others: &[i64], first: usize, count: usize, capacity: usize| {
                let starts = [&[first as i64], others].concat();
                let batch = starts.len();
                let x = floats(
                    &text.queries(batch),
                    [batch, text.count, text.heads, text.width],
                    device,
                );
                let shape = [batch, text.rows, text.width];
                let rows = floats(&text.compressed(batch), shape, device);
                let shape = [batch, capacity - text.rows, text.width];
                let beyond = Tensor::ones(shape, (device, rows.dtype()));
                let output = Text { count, ..picking }.attend_to(
                    &starts,
                    x.narrow(1, first, count).cast(dtype),
                    Tensor::cat(vec![rows, beyond], 1).cast(dtype),
                    picks.map(|picks| {
                        let all = picks.repeat(batch * count);
                        integers(&all, [batch, count, picks.len()], device)
                    }),
                );
                read(&output)[..count * each].to_vec()
            };
            let alone = (0..text.count).map(|query| attend(&[], query, 1, text.rows));
            let alone: Vec<f32> = alone.collect::<Vec<_>>().concat();
            for (capacity, others, count) in [
                (text.rows, &[28][..], text.count),
                (64, &[], 5),
                (64, &[3, -1, 17], 2),
                (1000, &[28], 1),
                (1000, &[3, -1, 17], text.count),
            ] {
                let actual = attend(others, 0, count, capacity);
                let what = format!("{name} {picks:?} {capacity} {others:?} {count}");
                assert_close(&actual, &alone[..count * each], EXACT, &what);
            }
        }
    });
}

fn rows_go_to_the_slots_of_their_positions() {
    let text = Text {
        width: 128,
        rotated: 64,
        ..PLAIN
    };
    let starts = [0, 7, -3, 12];
    for (name, device) in devices() {
        for count in [1, 4, 9, 14] {
            for integer in [IntDType::I32, IntDType::I64] {
                if !device.supports_dtype(integer) {
                    skip(name, &format!("{integer:?}").to_lowercase());
                    continue;
                }
                let all: Vec<f32> = (0..4).flat_map(|s| text.projected(s)).collect();
                let all = floats(&all, [4, text.positions(), text.width], device);
                let x = all.narrow(1, 0, count);
                let old = noise(4 * text.slots * text.width, 9);
                let ring = floats(&old, [4, text.slots, text.width], device);
                let kept = ring.clone();
                let positions = text.place(&starts, device);
                let positions = Positions {
                    start: positions.start.cast(integer),
                    ..positions
                };
                let new = text.new_rows(x, RowRounding::None);
                let actual = values(append_rows(new, positions, ring).expect(FITS));
                assert_eq!(values(kept), old, "{name}: somebody else's ring");
                let mut expected = old;
                for (sequence, start) in starts.iter().enumerate() {
                    let Ok(start) = usize::try_from(*start) else {
                        continue;
                    };
                    let rows = &text.projected(sequence)[..count * text.width];
                    let size = text.slots * text.width;
                    text.put(&mut expected[sequence * size..][..size], rows, start);
                }
                let what = format!("{name} {count} rows {integer:?}");
                assert_close(&actual, &expected, absolute(2e-6), &what);
            }
        }
    }
}

fn content_is_rounded_as_by_its_operator() {
    let text = Text {
        width: 192,
        rotated: 64,
        ..PLAIN
    };
    for (name, device) in devices() {
        let x = floats(
            &text.projected(0),
            [1, text.positions(), text.width],
            device,
        );
        let append = |rounding| {
            let x = x.clone().narrow(1, 0, 4);
            let ring = Tensor::zeros([1, 4, text.width], (device, x.dtype()));
            let positions = text.place(&[12], device);
            append_rows(text.new_rows(x, rounding), positions, ring).expect(FITS)
        };
        let (plain, rounded) = (append(RowRounding::None), append(RowRounding::Content));
        let content = fp8_roundtrip(plain.clone().narrow(2, 0, 128), 64).expect(FITS);
        let expected = Tensor::cat(vec![content, plain.narrow(2, 128, 64)], 2);
        assert_eq!(values(rounded), values(expected), "{name}");
    }
}

fn a_nan_reaches_the_head_or_the_queries_that_see_it_only() {
    let plain = Text { heads: 4, ..PLAIN };
    every_dtype(|name, device, dtype| {
        let picking = Text {
            width: tile_width(name),
            picks: Some(4),
            ..plain
        };
        let prompt = (!compiles_slowly(name)).then_some(PROMPT);
        for text in [plain, picking].into_iter().chain(prompt) {
            // For prompts, hidden rows must be finite.
            let spoils_rows = text.count <= DECODE_TOKENS;
            let run = |spoil: bool| {
                let mut x = text.queries(1);
                if spoil {
                    x[text.width + 3] = f32::NAN;
                }
                let x = floats(&x, [1, text.count, text.heads, text.width], device);
                let mut rows = text.compressed(1);
                if spoil && spoils_rows {
                    // Block 3 is complete from position 11 on: the second query's.
                    rows[3 * text.width] = f32::NAN;
                }
                let rows = floats(&rows, [1, text.rows, text.width], device);
                read(&text.attend_to(&[10], x.cast(dtype), rows.cast(dtype), None))
            };
            let (spoilt, whole) = (run(true), run(false));
            let what = format!("{name} {text:?}");
            let each = text.heads * text.width;
            let compared = if spoils_rows { each } else { whole.len() };
            for (at, (spoilt, whole)) in spoilt.iter().zip(&whole).take(compared).enumerate() {
                let head = at / text.width;
                if head != 1 {
                    assert_eq!(spoilt, whole, "{what}: head {head}");
                }
            }
            assert!(
                !spoils_rows || spoilt[each..].iter().all(|x| x.is_nan()),
                "{what}"
            );
            let own = &spoilt[text.width..2 * text.width];
            assert!(own.iter().all(|x| x.is_nan()), "{what}: its own head");
        }
    });
}

fn a_vacant_sequence_gives_zeros_whatever_its_queries_are() {
    let block = Text {
        slots: 12,
        causal: false,
        rows: 0,
        ..PLAIN
    };
    every_dtype(|name, device, dtype| {
        let prompt = (!compiles_slowly(name)).then_some(PROMPT);
        for text in [PLAIN, block].into_iter().chain(prompt) {
            let each = text.count * text.heads * text.width;
            let shape = [2, text.count, text.heads, text.width];
            let run = |spoil: bool| {
                let mut x = text.queries(2);
                if spoil {
                    x[each + 3] = f32::NAN;
                    x[2 * each - 1] = f32::INFINITY;
                }
                let rows = floats(&text.compressed(2), [2, text.rows, text.width], device);
                let x = floats(&x, shape, device).cast(dtype);
                read(&text.attend_to(&[4, -1], x, rows.cast(dtype), None))
            };
            let (spoilt, whole) = (run(true), run(false));
            assert!(spoilt[each..].iter().all(|x| *x == 0.0), "{name} {text:?}");
            assert_eq!(spoilt[..each], whole[..each], "{name} {text:?}");
        }
    });
}

fn starts_and_picks_may_have_any_integer_dtype() {
    let starts = [9, 17];
    let picked: Vec<i64> = (0..starts.len() * PLAIN.count)
        .flat_map(|i| [0, 2, 3 + i as i64, 9])
        .collect();
    every_dtype(|name, device, dtype| {
        if compiles_slowly(name) && dtype != FloatDType::F32 {
            // Integers are read alike whatever the dtype of the rows.
            return;
        }
        let text = Text {
            width: tile_width(name),
            picks: Some(4),
            ..PLAIN
        };
        let attend = |integer| {
            let shape = [starts.len(), text.count, text.heads, text.width];
            let x = floats(&text.queries(starts.len()), shape, device);
            let shape = [starts.len(), text.rows, text.width];
            let rows = floats(&text.compressed(starts.len()), shape, device);
            let picks = integers(&picked, [starts.len(), text.count, 4], device);
            let positions = text.place(&starts, device);
            let positions = Positions {
                start: positions.start.cast(integer),
                ..positions
            };
            let (x, rows) = (x.cast(dtype), rows.cast(dtype));
            read(&text.attend_at(&starts, positions, x, rows, Some(picks.cast(integer))))
        };
        let expected = attend(IntDType::I32);
        for integer in [IntDType::I64, IntDType::U32] {
            if device.supports_dtype(integer) {
                assert_eq!(attend(integer), expected, "{name} {integer:?}");
            }
        }
    });
}

/// Though tensor cores may work on one and not on the other.
fn all_rows_of_a_layer_that_picks_have_the_bits_of_picks_in_order() {
    every_dtype(|name, device, dtype| {
        let picking: Vec<Text> = TEXTS
            .into_iter()
            .filter(|text| text.picks.is_some())
            .collect();
        // The first has one KV split with all rows and several with the picks. That is two kernels.
        for text in some(name, &picking, 3) {
            let (count, rows) = (text.count, text.rows);
            // As an indexer picks: none where there are no more.
            let given = (0..count).flat_map(|_| (0..rows as i64).chain([-1; 200]));
            let picks = integers(&given.collect::<Vec<_>>(), [1, count, rows + 200], device);
            for start in [0, 4, 28] {
                let attend = |picks| {
                    let shape = [1, count, text.heads, text.width];
                    let x = floats(&text.queries(1), shape, device).cast(dtype);
                    let rows = floats(&text.compressed(1), [1, rows, text.width], device);
                    read(&text.attend_to(&[start], x, rows.cast(dtype), picks))
                };
                let what = format!("{name} {text:?} from {start}");
                assert_close(&attend(None), &attend(Some(picks.clone())), EXACT, &what);
            }
        }
    });
}

catalogue![
    all_rows_of_a_layer_that_picks_have_the_bits_of_picks_in_order,
    queries_see_what_their_positions_say_and_agree_with_the_oracle,
    prompts_agree_with_the_oracle,
    without_channels_that_turn_queries_and_rows_are_as_they_are_normalised,
    what_starts_beyond_the_angles_is_refused_or_not_there,
    a_query_has_the_same_bits_alone_and_in_a_longer_cache,
    a_query_has_the_same_bits_in_any_capacity_and_beside_any_sequences,
    rows_go_to_the_slots_of_their_positions,
    content_is_rounded_as_by_its_operator,
    a_nan_reaches_the_head_or_the_queries_that_see_it_only,
    a_vacant_sequence_gives_zeros_whatever_its_queries_are,
    starts_and_picks_may_have_any_integer_dtype,
    queries_of_a_block_that_see_each_other_agree_with_the_oracle,
    more_queries_than_a_kernel_takes_agree_with_the_oracle,
];
