//! Attention with a sink: what is hidden, what is no number, and what must not change a bit.

use super::attending::{Case, SMALL, Sizes};
use super::common::{EXACT, absolute, assert_close, devices, every_dtype, narrow, noise, some};
use burn::tensor::FloatDType;
use burn_ds4_ops::attention::MASKED;

fn a_very_large_sink_leaves_nothing() {
    let mut case = Case::new(SMALL, 7);
    case.sinks = vec![1e6; 2];
    for (name, device) in devices() {
        let output = case.output(device);
        assert_close(&output, &vec![0.0; output.len()], EXACT, name);
    }
}

fn a_very_small_sink_leaves_an_ordinary_softmax() {
    for sink in [-1e6, f32::NEG_INFINITY] {
        let mut case = Case::new(SMALL, 8);
        // Every query sees a row at least.
        case.window_bias.fill(0.0);
        case.sinks = vec![sink; 2];
        let (output, _) = case.oracle();
        for (name, device) in devices() {
            for row in case.probabilities(device).chunks(case.columns() + 6) {
                let sum: f32 = row.iter().sum();
                assert!((sum - 1.0).abs() < 1e-6, "{name} sink {sink}: {sum}");
            }
            let what = format!("{name} sink {sink}");
            assert_close(
                &case.output(device),
                &narrow(&output),
                absolute(2e-6),
                &what,
            );
        }
    }
}

fn a_query_that_sees_only_its_own_key_returns_that_key_less_the_sink() {
    let mut case = Case::new(Sizes { span: 1, ..SMALL }, 9);
    case.rows_bias.fill(MASKED);
    case.window_bias.fill(0.0);
    let (output, _) = case.oracle();
    for (name, device) in devices() {
        assert_close(&case.output(device), &narrow(&output), absolute(2e-6), name);
        let columns = case.columns() + 6;
        for (row, shares) in case.probabilities(device).chunks(columns).enumerate() {
            let own = 1 + row / SMALL.heads % SMALL.count;
            for (column, &share) in shares.iter().enumerate() {
                assert_eq!(share > 0.0, column == own, "{name} row {row}: {shares:?}");
            }
        }
    }
}

fn a_query_that_sees_nothing_gives_zeros() {
    // Few queries and many.
    for count in [3, 9] {
        let mut case = Case::new(Sizes { count, ..SMALL }, 10);
        case.rows_bias.fill(MASKED);
        case.window_bias.fill(MASKED);
        case.sinks = vec![0.3, f32::NEG_INFINITY];
        for (name, device) in devices() {
            let output = case.output(device);
            assert_close(&output, &vec![0.0; output.len()], EXACT, name);
        }
    }
}

fn logits_far_beyond_the_range_of_exp_do_not_overflow() {
    let mut case = Case::new(
        Sizes {
            picks: Some(3),
            ..SMALL
        },
        11,
    );
    // Logits of up to some 10^5, and far apart.
    case.queries.iter_mut().for_each(|v| *v *= 1e5);
    let (output, probabilities) = case.oracle();
    for (name, device) in devices() {
        // f32 dots of this size are good to about 0.01, and the exponential passes that on.
        let shares = case.probabilities(device);
        assert_close(&shares, &narrow(&probabilities), absolute(0.05), name);
        assert_close(&case.output(device), &narrow(&output), absolute(0.05), name);
    }
}

fn a_nan_in_a_query_reaches_its_own_head_only() {
    let clean = Case::new(SMALL, 12);
    let (query, head) = (4, 1);
    for poison in [f32::NAN, f32::INFINITY] {
        let mut case = clean.clone();
        case.queries[(query * SMALL.heads + head) * SMALL.width + 2] = poison;
        for (name, device) in devices() {
            let (actual, expected) = (case.output(device), clean.output(device));
            let rows = actual.chunks(SMALL.width).zip(expected.chunks(SMALL.width));
            for (row, (actual, expected)) in rows.enumerate() {
                if row == query * SMALL.heads + head {
                    assert!(actual.iter().all(|v| v.is_nan()), "{name}: {actual:?}");
                } else {
                    assert_close(actual, expected, EXACT, &format!("{name} row {row}"));
                }
            }
        }
    }
}

fn a_nan_in_a_row_reaches_those_that_see_it() {
    let mut clean = Case::new(Sizes { rows: 0, ..SMALL }, 13);
    clean.window_bias.fill(0.0);
    let mut case = clean.clone();
    // The last row of the first sequence: its last query alone sees it.
    let last = case.columns() - 1;
    case.window[last * SMALL.width] = f32::NAN;
    let size = SMALL.heads * SMALL.width;
    for (name, device) in devices() {
        let (actual, expected) = (case.output(device), clean.output(device));
        for query in 0..SMALL.batch * SMALL.count {
            let range = query * size..(query + 1) * size;
            if query == SMALL.count - 1 {
                assert!(actual[range].iter().any(|v| v.is_nan()), "{name}");
            } else {
                let what = format!("{name} query {query}");
                assert_close(&actual[range.clone()], &expected[range], EXACT, &what);
            }
        }
    }
}

fn a_query_has_the_same_bits_alone() {
    // Compressed rows, and picks. Where kernels compile slowly, each kernel has one of two dtypes
    // at least.
    let columns = [
        (400, Some(290)),
        (0, None),
        (13, None),
        (300, None),
        (40, Some(9)),
    ];
    let counts = [(2, 3), (1, 1), (1, 2), (1, 16), (1, 3), (1, 4), (1, 5)];
    every_dtype(|name, device, dtype| {
        let step = if dtype == FloatDType::F32 { 2 } else { 3 };
        for &(rows, picks) in some(name, &columns, step) {
            for &(batch, count) in some(name, &counts, 3) {
                let sizes = Sizes {
                    batch,
                    count,
                    heads: 3,
                    width: 24,
                    span: 11,
                    rows,
                    picks,
                };
                let case = Case::new(sizes, 14);
                let together = case.output_in(device, dtype);
                for (query, together) in together.chunks(3 * 24).enumerate() {
                    let alone = case.alone(query).output_in(device, dtype);
                    let what = format!("{name} {sizes:?} query {query}");
                    assert_close(together, &alone, EXACT, &what);
                }
            }
        }
    });
}

fn rows_that_are_hidden_behind_all_others_change_no_bit() {
    // Those of one cube, and of several more.
    for (seen, rows) in [(13, 50), (13, 300), (140, 300)] {
        let sizes = Sizes {
            batch: 1,
            count: 3,
            heads: 3,
            width: 24,
            span: 11,
            rows: seen,
            picks: None,
        };
        let short = Case::new(sizes, 15);
        let mut long = short.clone();
        long.sizes.rows = rows;
        long.rows.extend(noise((rows - seen) * 24, 16));
        long.rows_bias = short
            .rows_bias
            .chunks(seen)
            .flat_map(|bias| [bias, &vec![MASKED; rows - seen]].concat())
            .collect();
        for (name, device) in devices() {
            // Where there is no kernel, other shapes may round differently.
            if name != "flex" {
                let what = format!("{name}, {seen} of {rows}");
                assert_close(&long.output(device), &short.output(device), EXACT, &what);
            }
        }
    }
}

catalogue![
    a_very_large_sink_leaves_nothing,
    a_very_small_sink_leaves_an_ordinary_softmax,
    a_query_that_sees_only_its_own_key_returns_that_key_less_the_sink,
    a_query_that_sees_nothing_gives_zeros,
    logits_far_beyond_the_range_of_exp_do_not_overflow,
    a_nan_in_a_query_reaches_its_own_head_only,
    a_nan_in_a_row_reaches_those_that_see_it,
    a_query_has_the_same_bits_alone,
    rows_that_are_hidden_behind_all_others_change_no_bit,
];
