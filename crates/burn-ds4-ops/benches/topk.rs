//! Top-k per row at the sizes of DeepSeek-V4's indexer, and longer.

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::topk::{Windows, top_k_ids, top_k_per_row};

use super::{
    super::common::{integer_values, integers, noise, values},
    super::ranking::{Ranking, window},
    harness::{Case, Prepared},
};

const ROWS: [usize; 6] = [1, 8, 32, 64, 256, 2048];
const COLUMNS: [usize; 3] = [4096, 32768, 129_280];
const K: [usize; 3] = [512, 1024, 2048];
/// Rows, columns and k for which no peer was measured.
const MORE: [(usize, usize, usize); 2] = [(1, 1 << 20, 2048), (64, 1 << 20, 2048)];
/// Most rows that are checked.
const CHECKED: usize = 16;
/// Bytes of an i32.
const WORD: usize = 4;

pub fn cases() -> Vec<Case> {
    let sizes = ROWS.into_iter().flat_map(|rows| {
        let columns = COLUMNS.into_iter();
        columns.flat_map(move |columns| K.map(|k| (rows, columns, k)))
    });
    let sizes = sizes.chain(MORE);
    let full = sizes
        .clone()
        .map(|size| case(size, "full", FloatDType::F32));
    let ragged = sizes
        .clone()
        .map(|size| case(size, "ragged", FloatDType::F32));
    let half = sizes.map(|size| case(size, "full", FloatDType::BF16));
    full.chain(ragged).chain(half).collect()
}

fn case(
    (rows, columns, k): (usize, usize, usize),
    variant: &'static str,
    dtype: FloatDType,
) -> Case {
    let dtype = DType::from(dtype);
    let logits = rows * columns * dtype.size();
    let visible = windows(rows, columns, variant, 0);
    let visible: i64 = visible.iter().map(|(start, end)| end - start).sum();
    Case {
        op: "top_k_per_row",
        shape: vec![("R", rows), ("C", columns), ("k", k)],
        variant,
        dtype,
        bytes: visible as usize * dtype.size() + (2 + k) * rows * WORD,
        flops: None,
        input_bytes: logits,
        build: Box::new(move |device, seed| {
            let windows = windows(rows, columns, variant, seed);
            let logits = normal([rows, columns], device, seed).cast(dtype);
            let bounds = |bounds: Vec<i64>| integers(&bounds, [rows], device);
            let starts = bounds(windows.iter().map(|window| window.0).collect());
            let ends = bounds(windows.iter().map(|window| window.1).collect());
            let checked = logits.clone();
            Prepared::new(
                move || {
                    if variant == "full" {
                        top_k_ids(logits.clone(), Windows::All, k).expect("arguments that fit")
                    } else {
                        top_k_per_row(logits.clone(), starts.clone(), ends.clone(), k)
                            .expect("arguments that fit")
                    }
                },
                move |ids: Tensor<2, Int>| {
                    // Checks rows that are spread evenly, as sorting takes the host long.
                    for row in (0..CHECKED.min(rows)).map(|i| i * rows / CHECKED.min(rows)) {
                        let logits = checked.clone().slice([row..row + 1, 0..columns]);
                        let logits = values(logits.cast(FloatDType::F32));
                        let ids = integer_values(ids.clone().slice([row..row + 1, 0..k]));
                        let (start, end) = windows[row];
                        let window = window(start, end, columns);
                        assert_eq!(ids, Ranking::of(&logits).ids(&window, k), "row {row}");
                    }
                },
            )
        }),
    }
}

/// Normally distributed logits, as those of a random model.
fn normal(shape: [usize; 2], device: &Device, seed: u32) -> Tensor<2> {
    device.seed(u64::from(seed));
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F32))
}

/// The window of each row: all columns, or from somewhere in the first quarter to somewhere in the
/// last.
fn windows(rows: usize, columns: usize, variant: &str, seed: u32) -> Vec<(i64, i64)> {
    if variant == "full" {
        return vec![(0, columns as i64); rows];
    }
    let part = |v: f32| ((f64::from(v) + 1.0) / 8.0 * columns as f64) as i64;
    let bounds = noise(2 * rows, seed ^ 0x5eed);
    let windows = bounds.chunks(2);
    windows
        .map(|pair| (part(pair[0]), columns as i64 - part(pair[1])))
        .collect()
}
