//! Attention over a cache, and storing its new rows, at the sizes of V4-Flash.

use std::{cell::RefCell, rc::Rc};

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::attention::{
    CachedQueries, CachedRows, CachedWindow, CompressedKeys, NewRows, Positions, RowRounding,
    WindowKeys, WindowLayout, append_rows, cached_attention, rotate_at, sink_attention,
};
use burn_ds4_ops::norm::rms_norm;

use super::{
    super::common::{Tolerance, assert_close, floats, integers, narrow, noise, values, wide},
    super::pages::in_pages,
    super::rotation::{table, turned_at},
    harness::{Case, Prepared},
};

const QUERIES: [usize; 3] = [1, 2, 5];
/// Sequences of a batch, with a query each.
const BATCH: usize = 16;
/// Queries of a prompt.
const PROMPT: usize = 2048;
const HEADS: usize = 64;
const WIDTH: usize = 512;
const ROTATED: usize = 64;
const SPAN: usize = 128;
const SLOTS: usize = SPAN - 1 + 16;
const PROMPT_SLOTS: usize = SPAN - 1 + PROMPT;
const EPSILON: f64 = 1e-6;
/// Bytes of a bf16, and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;

/// The compressed rows that a query attends to besides the window.
#[derive(Clone, Copy)]
enum Blocks {
    None,
    /// All that are complete, with this number of positions to a block.
    All(usize),
    /// Positions of a block, and the number of picks.
    Picked(usize, usize),
}

/// Positions of a page, where rows are in pages.
const PAGE: usize = 256;

pub fn cases() -> Vec<Case> {
    let blocks = [
        ("window", 4096, Blocks::None),
        ("csa", 4096, Blocks::Picked(4, 512)),
        ("csa", 32_768, Blocks::Picked(4, 512)),
        ("hca", 4096, Blocks::All(128)),
        ("hca", 32_768, Blocks::All(128)),
        ("csa_paged", 32_768, Blocks::Picked(4, 512)),
        ("hca_paged", 32_768, Blocks::All(128)),
    ];
    let sizes = QUERIES.map(|count| [1, count]);
    let sizes = sizes.into_iter().chain([[BATCH, 1], [1, PROMPT]]);
    let attention = sizes.flat_map(|sizes| {
        blocks.map(|(variant, context, blocks)| attention_case(sizes, variant, context, blocks))
    });
    attention.chain(QUERIES.map(append_case)).collect()
}

fn bf16<const D: usize>(data: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    floats(data, shape, device).cast(FloatDType::BF16)
}

/// `sizes` are sequences and queries of each.
fn attention_case(
    [batch, count]: [usize; 2],
    variant: &'static str,
    context: usize,
    blocks: Blocks,
) -> Case {
    let (ratio, rows, selected) = match blocks {
        Blocks::None => (1, 0, 0),
        Blocks::All(ratio) => (ratio, context.div_ceil(ratio), context / ratio),
        Blocks::Picked(ratio, picks) => (ratio, context.div_ceil(ratio), count * picks),
    };
    let picked = match blocks {
        Blocks::Picked(_, picks) => count * picks,
        _ => 0,
    };
    let channels = count * HEADS * WIDTH;
    let columns = SPAN - 1 + count;
    let slots = slots_for(count);
    let bytes = (2 * channels + (columns + selected) * WIDTH) * BF16_BYTES + picked * F32_BYTES;
    let input_bytes = (channels + (slots + rows) * WIDTH) * BF16_BYTES + picked * F32_BYTES;
    let mut shape = vec![("Q", count), ("H", HEADS), ("D", WIDTH), ("C", context)];
    if batch > 1 {
        shape.insert(0, ("B", batch));
    }
    Case {
        op: "cached_attention",
        shape,
        variant,
        dtype: DType::BF16,
        bytes: batch * bytes,
        flops: None,
        input_bytes: batch * input_bytes,
        build: Box::new(move |device, seed| {
            let start = context - count;
            let positions = Positions {
                angles: table(context, ROTATED, device),
                start: integers(&vec![start as i64; batch], [batch], device),
            };
            let data = noise(batch * channels, seed);
            let x = bf16(&data, [batch, count, HEADS, WIDTH], device);
            let data = noise(batch * slots * WIDTH, !seed);
            let window = bf16(&data, [batch, slots, WIDTH], device);
            let data = noise(batch * rows * WIDTH, seed ^ 5);
            let all = (rows > 0).then(|| bf16(&data, [batch, rows, WIDTH], device));
            let compressed = all.clone().map(|rows| CachedRows {
                rows: match variant.ends_with("_paged") {
                    true => in_pages(rows, PAGE / ratio),
                    false => rows.into(),
                },
                ratio,
                picking: picked > 0,
                picks: (picked > 0).then(|| {
                    let of_row = |i: usize| (i * 37 % (start / ratio)) as i64;
                    let ids: Vec<i64> = (0..batch * picked).map(of_row).collect();
                    integers(&ids, [batch, count, picked / count], device)
                }),
            });
            let sinks = floats(&noise(HEADS, seed ^ 6), [HEADS], device);
            let held = (x.clone(), positions.clone(), window.clone());
            let (others, of_heads) = (compressed.clone().zip(all), sinks.clone());
            Prepared::new(
                move || {
                    let queries = CachedQueries {
                        x: x.clone(),
                        epsilon: Some(EPSILON),
                        sinks: sinks.clone(),
                        scale: scale(),
                    };
                    let window = CachedWindow {
                        rows: window.clone(),
                        layout: WindowLayout::Ring,
                        span: SPAN,
                        causal: true,
                    };
                    cached_attention(queries, positions.clone(), window, compressed.clone())
                        .expect("arguments that fit")
                },
                move |output| {
                    let (x, positions, window) = held.clone();
                    let expected = composed(
                        x,
                        positions,
                        window,
                        start,
                        others.clone(),
                        of_heads.clone(),
                    );
                    let tolerance = Tolerance {
                        absolute: 8e-3,
                        relative: 2f64.powi(-6),
                    };
                    let [actual, expected] =
                        [output, expected].map(|x| values(x.cast(FloatDType::F32)));
                    assert_close(&actual, &expected, tolerance, variant);
                },
            )
        }),
    }
}

/// Slots of the window.
fn slots_for(count: usize) -> usize {
    if count < PROMPT { SLOTS } else { PROMPT_SLOTS }
}

fn scale() -> f64 {
    (WIDTH as f64).powf(-0.5)
}

/// Computes the same by the operators that `cached_attention` replaces.
fn composed(
    x: Tensor<4>,
    positions: Positions,
    window: Tensor<3>,
    start: usize,
    compressed: Option<(CachedRows, Tensor<3>)>,
    sinks: Tensor<1>,
) -> Tensor<4> {
    let device = x.device();
    let [batch, count, _, _] = x.dims();
    let Positions {
        angles,
        start: first,
    } = positions;
    let x = rms_norm(x, None, EPSILON).expect("rows");
    let x = rotate_at(x, angles.clone(), first.clone(), false).expect("positions of the table");
    let columns = SPAN - 1 + count;
    let slots: Vec<i64> = (0..columns)
        .map(|column| ((start + 1 + column - SPAN) % slots_for(count)) as i64)
        .collect();
    let slots: Tensor<1, Int> = integers(&slots, [columns], &device);
    let window = WindowKeys {
        rows: window.select(1, slots),
        bias: Tensor::zeros([batch, columns], (&device, DType::F32)),
        span: SPAN,
    };
    let keys = compressed.map(|(cached, all)| {
        let [_, rows, _] = all.dims();
        let hidden = |query: usize, row: usize| (row + 1) * cached.ratio > start + query + 1;
        let queries = (0..batch).flat_map(|_| 0..count);
        let bias = queries.flat_map(|query| {
            (0..rows).map(move |row| if hidden(query, row) { -1e30 } else { 0.0 })
        });
        let bias: Vec<f32> = bias.collect();
        CompressedKeys {
            rows: all,
            bias: floats(&bias, [batch, count, rows], &device),
            picks: cached.picks,
        }
    });
    let output = sink_attention(x, window, keys, sinks, scale()).expect("arguments that fit");
    rotate_at(output, angles, first, true).expect("positions of the table")
}

fn append_case(count: usize) -> Case {
    const POSITIONS: usize = 4096;
    let channels = count * WIDTH;
    Case {
        op: "append_rows",
        shape: vec![("Q", count), ("D", WIDTH)],
        variant: "window",
        dtype: DType::BF16,
        bytes: 2 * channels * BF16_BYTES + WIDTH * F32_BYTES + count * ROTATED * F32_BYTES,
        flops: None,
        input_bytes: (channels + SLOTS * WIDTH) * BF16_BYTES + POSITIONS * ROTATED * F32_BYTES,
        build: Box::new(move |device, seed| {
            let start = POSITIONS - count;
            let x = bf16(&noise(channels, seed), [1, count, WIDTH], device);
            let held = wide(&values(x.clone().cast(FloatDType::F32)));
            let new = NewRows {
                x,
                norm: Tensor::ones([WIDTH], (device, DType::F32)),
                epsilon: EPSILON,
                rounding: RowRounding::None,
            };
            let positions = Positions {
                angles: table(POSITIONS, ROTATED, device),
                start: integers(&[start as i64], [1], device),
            };
            let ring = Tensor::<3>::zeros([1, SLOTS, WIDTH], (device, DType::BF16));
            // Without another reference, the ring is updated in place.
            let state = Rc::new(RefCell::new(Some(ring)));
            let left = state.clone();
            Prepared::new(
                move || {
                    let ring = state.take().expect("what the last call left");
                    let ring = append_rows(new.clone(), positions.clone(), ring);
                    state.replace(Some(ring.expect("arguments that fit")));
                },
                move |()| {
                    let ring = left.borrow().clone().expect("what the last call left");
                    let positions: Vec<usize> = (start..start + count).collect();
                    let mut rows = held.clone();
                    for row in rows.chunks_mut(WIDTH) {
                        let squares: f64 = row.iter().map(|x| x * x).sum();
                        let factor = 1.0 / (squares / WIDTH as f64 + EPSILON).sqrt();
                        row.iter_mut().for_each(|x| *x *= factor);
                    }
                    let expected = turned_at(&rows, WIDTH, ROTATED, &positions);
                    let actual = values(ring.cast(FloatDType::F32));
                    for (row, position) in expected.chunks(WIDTH).zip(&positions) {
                        let at = position % SLOTS * WIDTH;
                        // Without a kernel, rows are also rounded once they are normalised.
                        let tolerance = Tolerance {
                            absolute: 1e-2,
                            relative: 2f64.powi(-7),
                        };
                        let actual = &actual[at..at + WIDTH];
                        assert_close(actual, &narrow(row), tolerance, "a new row");
                    }
                },
            )
        }),
    }
}
