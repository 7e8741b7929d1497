//! The clustered output head at the sizes of the released models and of Qwen's.

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_ds4_ops::flash_head::{FlashHead, FlashHeadOptions, flash_head_argmax};

use super::{
    super::common::{floats, noise, values, wide},
    super::heads::dot,
    harness::{Case, Prepared},
};

/// Rows and columns of the head.
const SIZES: [(usize, usize); 2] = [(129_280, 4096), (151_936, 2048)];
const TOKENS: [usize; 4] = [1, 2, 4, 8];
const PROBES: [usize; 4] = [64, 256, 512, 1024];
/// Rows of a cluster.
const CAPACITY: usize = 16;
/// Bytes of a bf16 and of an i32.
const BF16_BYTES: usize = 2;
const I32_BYTES: usize = 4;
/// The most by which rounding may change a cluster's score or a logit, for products of standard
/// normal numbers.
const TOLERANCE: f64 = 1e-3;

pub fn cases() -> Vec<Case> {
    let tokens = || TOKENS.into_iter();
    let sizes = SIZES
        .into_iter()
        .flat_map(|size| tokens().map(move |tokens| (size, tokens)));
    sizes
        .flat_map(|(size, tokens)| PROBES.map(|probes| case(size, tokens, probes)))
        .collect()
}

fn case((vocabulary, width): (usize, usize), tokens: usize, probes: usize) -> Case {
    let clusters = vocabulary / CAPACITY;
    let coarse = clusters * width * BF16_BYTES;
    // Each token counts its own clusters, though several tokens may have some in common.
    let fine = tokens * probes * CAPACITY * (width * BF16_BYTES + I32_BYTES);
    Case {
        op: "flash_head_argmax",
        shape: vec![
            ("V", vocabulary),
            ("D", width),
            ("T", tokens),
            ("P", probes),
        ],
        variant: "two_stage",
        dtype: DType::BF16,
        bytes: coarse + fine + tokens * (width * BF16_BYTES + I32_BYTES),
        flops: None,
        input_bytes: coarse + fine,
        build: Box::new(move |device, seed| {
            prepared(vocabulary, width, tokens, probes, device, seed)
        }),
    }
}

fn prepared(
    vocabulary: usize,
    width: usize,
    tokens: usize,
    probes: usize,
    device: &Device,
    seed: u32,
) -> Prepared {
    let clusters = vocabulary / CAPACITY;
    let rows = Tensor::<2>::random([vocabulary, width], Distribution::Normal(0.0, 1.0), device);
    let rows = rows.cast(FloatDType::BF16);
    // The rows of a cluster are neighbours in the vocabulary here. Their positions in it make no
    // difference to what is read.
    let means = rows
        .clone()
        .cast(FloatDType::F32)
        .reshape([clusters, CAPACITY, width]);
    let means = means.mean_dim(1).reshape([clusters, width]);
    let assignments: Vec<u32> = (0..vocabulary).map(|row| (row / CAPACITY) as u32).collect();
    let head = FlashHead::new(rows, &assignments, means, FlashHeadOptions::default())
        .expect("clusters of one size");
    let h = floats(&noise(tokens * width, seed), [tokens, width], device).cast(FloatDType::BF16);
    let (of_calls, checked) = ((head.clone(), h.clone()), (head, h));
    Prepared::new(
        move || {
            let (head, h) = &of_calls;
            flash_head_argmax(h.clone(), head, probes).expect("arguments that fit")
        },
        move |winners| {
            let (head, h) = &checked;
            let read = |tensor: Tensor<2>| wide(&values(tensor.cast(FloatDType::F32)));
            let winners: Vec<i64> = winners.into_data().iter::<i64>().collect();
            let (h, centroids) = (read(h.clone()), read(head.centroids()));
            for (token, h) in h.chunks(width).enumerate() {
                let scores: Vec<f64> = centroids.chunks(width).map(|row| dot(row, h)).collect();
                let mut descending = scores.clone();
                descending.sort_by(|a, b| b.total_cmp(a));
                let least = descending[probes - 1];
                let winner = usize::try_from(winners[token]).expect("an id");
                let cluster = winner / CAPACITY;
                assert!(
                    scores[cluster] >= least - TOLERANCE,
                    "token {token}: {winner} is of a cluster that is not chosen"
                );
                let logits = |cluster: usize| {
                    let first = cluster * CAPACITY;
                    let rows = read(head.weight().slice_dim(0, first..first + CAPACITY));
                    let logits = rows.chunks(width).map(|row| dot(row, h));
                    logits.collect::<Vec<_>>()
                };
                let own = logits(cluster)[winner % CAPACITY];
                // Only clusters that are certainly chosen, whatever the rounding.
                let sure = (0..clusters).filter(|&cluster| scores[cluster] > least + TOLERANCE);
                for other in sure {
                    let best = logits(other).into_iter().fold(f64::MIN, f64::max);
                    assert!(
                        own >= best - TOLERANCE,
                        "token {token}: {winner} has {own}, cluster {other} has {best}"
                    );
                }
            }
        },
    )
}
