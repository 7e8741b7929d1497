//! Attention of a few tokens, at the sizes of the released models.

use burn::tensor::{DType, FloatDType};
use burn_ds4_ops::attention::{Positions, index_scores, rotate_at, sink_attention};

use super::{
    super::attending::{Case as Problem, Sizes},
    super::common::{
        Tolerance, absolute, assert_close, floats, integers, narrow, noise, values, wide,
    },
    super::pages::in_pages,
    super::rotation::{table, turned_at},
    harness::{Case, Prepared},
};

const QUERIES: [usize; 4] = [1, 2, 5, 16];
/// Queries of a chunk of a prompt.
const CHUNK: usize = 2048;
const HEADS: usize = 64;
const WIDTH: usize = 512;
const WINDOW: usize = 128;
/// Compressed rows of which 512 are picked, and compressed rows that are all attended to.
const PICKED: (usize, usize) = (8192, 512);
const SHARED: usize = 2048;
/// Rotated channels, and positions of the table.
const ROTATED: usize = 64;
const POSITIONS: usize = 8192;
/// Width of an indexer's head.
const INDEX_WIDTH: usize = 128;
const INDEX_ROWS: [usize; 2] = [8192, 65536];
/// Those at 4,096 and 32,768 positions, by queries that have to be rotated, in the launch or in one
/// of their own.
const ROTATED_ROWS: [usize; 2] = [1024, 8192];
const ROTATED_QUERIES: [usize; 2] = [1, 2];
const ALONE: &str = "indexer";
const TOGETHER: &str = "rotated";
const APART: &str = "rotated_apart";
const PAGED: &str = "paged";
const TOGETHER_PAGED: &str = "rotated_paged";
/// Rows of a page: of 256 positions.
const PAGE_ROWS: usize = 64;
/// The distance between rows that are checked.
const CHECKED: usize = 61;
/// Bytes of a bf16, and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;

pub fn cases() -> Vec<Case> {
    let counts = QUERIES.into_iter().chain([CHUNK]);
    let attention = counts.flat_map(|count| {
        let (rows, picks) = PICKED;
        [
            attention_case(count, "picked", rows, Some(picks)),
            attention_case(count, "shared", SHARED, None),
        ]
    });
    let scores = QUERIES
        .into_iter()
        .flat_map(|count| INDEX_ROWS.map(|rows| scores_case(count, rows, ALONE)));
    let rotated_scores = [TOGETHER, APART].into_iter().flat_map(|variant| {
        let counts = ROTATED_QUERIES.into_iter();
        counts.flat_map(move |count| ROTATED_ROWS.map(|rows| scores_case(count, rows, variant)))
    });
    let rotations = QUERIES.into_iter().flat_map(|count| {
        [
            rotation_case(count, HEADS, WIDTH),
            rotation_case(count, 1, WIDTH),
        ]
    });
    let paged_scores = [TOGETHER_PAGED, PAGED]
        .into_iter()
        .zip([ROTATED_ROWS[1], INDEX_ROWS[1]]);
    let paged_scores = paged_scores.map(|(variant, rows)| scores_case(1, rows, variant));
    let scores = scores.chain(rotated_scores).chain(paged_scores);
    attention.chain(scores).chain(rotations).collect()
}

fn rotation_case(count: usize, heads: usize, width: usize) -> Case {
    let channels = count * heads * width;
    let angles = count * ROTATED * F32_BYTES;
    Case {
        op: "rotate_at",
        shape: vec![("Q", count), ("H", heads), ("D", width)],
        variant: if heads == 1 { "keys" } else { "queries" },
        dtype: DType::BF16,
        bytes: 2 * channels * BF16_BYTES + angles,
        flops: None,
        input_bytes: channels * BF16_BYTES + POSITIONS * ROTATED * F32_BYTES,
        build: Box::new(move |device, seed| {
            let start = POSITIONS - count;
            let x = floats(&noise(channels, seed), [1, count, heads, width], device);
            let x = x.cast(FloatDType::BF16);
            let held = wide(&values(x.clone().cast(FloatDType::F32)));
            let angles = table(POSITIONS, ROTATED, device);
            let starts = integers(&[start as i64], [1], device);
            Prepared::new(
                move || {
                    rotate_at(x.clone(), angles.clone(), starts.clone(), false)
                        .expect("arguments that fit")
                },
                move |rotated| {
                    let positions: Vec<usize> = (start..start + count).collect();
                    let expected = turned_at(&held, width, ROTATED, &positions);
                    let tolerance = Tolerance {
                        absolute: 1e-6,
                        relative: 2f64.powi(-8),
                    };
                    let actual = values(rotated.cast(FloatDType::F32));
                    assert_close(&actual, &narrow(&expected), tolerance, "rotated rows");
                },
            )
        }),
    }
}

fn attention_case(count: usize, variant: &'static str, rows: usize, picks: Option<usize>) -> Case {
    let selected = picks.map_or(rows, |picks| count * picks);
    let columns = WINDOW - 1 + count;
    let heads = count * HEADS * WIDTH;
    let bytes = (2 * heads + (columns + selected) * WIDTH) * BF16_BYTES;
    let biases = (columns + count * picks.unwrap_or(rows)) * F32_BYTES;
    let ids = count * picks.unwrap_or(0) * F32_BYTES;
    Case {
        op: "sink_attention",
        shape: vec![
            ("Q", count),
            ("H", HEADS),
            ("D", WIDTH),
            ("C", WINDOW + picks.unwrap_or(rows)),
        ],
        variant,
        dtype: DType::BF16,
        bytes: bytes + biases + ids,
        flops: Some((4 * heads * (WINDOW + picks.unwrap_or(rows))) as u64),
        input_bytes: (heads + (columns + rows) * WIDTH) * BF16_BYTES + count * rows * F32_BYTES,
        build: Box::new(move |device, seed| {
            let sizes = Sizes {
                batch: 1,
                count,
                heads: HEADS,
                width: WIDTH,
                span: WINDOW,
                rows,
                picks,
            };
            let mut problem = Problem::new(sizes, seed).rounded(FloatDType::BF16, device);
            problem.scale = (WIDTH as f64).powf(-0.5);
            problem.window_bias.fill(0.0);
            problem.rows_bias.fill(0.0);
            let scale = problem.scale;
            let (queries, window, compressed, sinks) = problem.arguments(device, FloatDType::BF16);
            Prepared::new(
                move || {
                    let (queries, window) = (queries.clone(), window.clone());
                    sink_attention(queries, window, compressed.clone(), sinks.clone(), scale)
                        .expect("arguments that fit")
                },
                move |output| {
                    // Check the last query only: the oracle is slow.
                    let (expected, _) = problem.alone(count - 1).oracle();
                    let actual = values(output.cast(FloatDType::F32));
                    let last = &actual[(count - 1) * HEADS * WIDTH..];
                    // Without a kernel, logits and weights are rounded to bf16.
                    let tolerance = Tolerance {
                        absolute: 1e-3,
                        relative: 2f64.powi(-8),
                    };
                    assert_close(last, &narrow(&expected), tolerance, variant);
                },
            )
        }),
    }
}

fn scores_case(count: usize, rows: usize, variant: &'static str) -> Case {
    let queries = count * HEADS * INDEX_WIDTH;
    let inputs = (queries + rows * INDEX_WIDTH) * BF16_BYTES + count * HEADS * F32_BYTES;
    Case {
        op: "index_scores",
        shape: vec![("Q", count), ("H", HEADS), ("D", INDEX_WIDTH), ("R", rows)],
        variant,
        dtype: DType::BF16,
        bytes: inputs + count * rows * F32_BYTES,
        flops: Some((2 * queries * rows) as u64),
        input_bytes: inputs,
        build: Box::new(move |device, seed| {
            let bf16 = |values: &[f32], shape: [usize; 3]| {
                floats(values, shape, device).cast(FloatDType::BF16)
            };
            let queries = bf16(&noise(queries, seed), [count, HEADS, INDEX_WIDTH]);
            let keys = bf16(&noise(rows * INDEX_WIDTH, !seed), [1, rows, INDEX_WIDTH]);
            let weights = noise(count * HEADS, seed ^ 3);
            let weights_on_device = floats(&weights, [1, count, HEADS], device);
            let queries = queries.reshape([1, count, HEADS, INDEX_WIDTH]);
            let positions = Positions {
                angles: table(POSITIONS, ROTATED, device),
                start: integers(&[(POSITIONS - count) as i64], [1], device),
            };
            let turned = {
                let positions = positions.clone();
                move |queries| {
                    rotate_at(
                        queries,
                        positions.angles.clone(),
                        positions.start.clone(),
                        false,
                    )
                    .expect("arguments that fit")
                }
            };
            let held = match variant {
                ALONE | PAGED => queries.clone(),
                _ => turned(queries.clone()),
            };
            let checked = (held.reshape([1, count * HEADS, INDEX_WIDTH]), keys.clone());
            let paged = match variant {
                PAGED | TOGETHER_PAGED => in_pages(keys, PAGE_ROWS),
                _ => keys.into(),
            };
            Prepared::new(
                move || {
                    let queries = queries.clone();
                    let (queries, rotation) = match variant {
                        ALONE | PAGED => (queries, None),
                        APART => (turned(queries), None),
                        _ => (queries, Some(positions.clone())),
                    };
                    let (keys, weights) = (paged.clone(), weights_on_device.clone());
                    index_scores(queries, keys, weights, 1.0, None, rotation)
                        .expect("arguments that fit")
                },
                move |scores| {
                    let read = |tensor: &burn::tensor::Tensor<3>| {
                        wide(&values(tensor.clone().cast(FloatDType::F32)))
                    };
                    let (queries, keys) = (read(&checked.0), read(&checked.1));
                    // Check the last query only, and some of the rows.
                    let last = count - 1;
                    let queries = &queries[last * HEADS * INDEX_WIDTH..];
                    let weights = &weights[last * HEADS..];
                    let actual = values(scores);
                    let actual: Vec<f32> = actual[last * rows..]
                        .iter()
                        .copied()
                        .step_by(CHECKED)
                        .collect();
                    let expected: Vec<f64> = keys
                        .chunks(INDEX_WIDTH)
                        .step_by(CHECKED)
                        .map(|key| {
                            let heads = queries.chunks(INDEX_WIDTH).zip(weights);
                            heads
                                .map(|(query, weight)| {
                                    let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                                    f64::from(*weight) * dot.max(0.0)
                                })
                                .sum()
                        })
                        .collect();
                    assert_close(&actual, &narrow(&expected), absolute(1e-4), "scores");
                },
            )
        }),
    }
}
