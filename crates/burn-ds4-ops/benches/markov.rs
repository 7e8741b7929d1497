//! Drafts of the Markov heads of V4-Flash-0731 and V4-Pro-0813.

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::markov::markov_drafts;

use super::{
    super::common::{integer_values, integers, values, wide},
    harness::{Case, Prepared},
};

const VOCABULARY: usize = 129_280;
const PLACES: usize = 5;
const RANKS: [usize; 2] = [256, 512];
const LANES: [usize; 2] = [1, 4];
/// Candidates of a clustered head, and how far apart their ids are.
const CANDIDATES: [usize; 2] = [4096, 31];
/// Bytes of a bf16 and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;
/// The most by which rounding may change a sum of products of standard normal numbers.
const TOLERANCE: f64 = 1e-3;

pub fn cases() -> Vec<Case> {
    let every = [VOCABULARY, 1];
    let cases = RANKS.map(|rank| LANES.map(|lanes| case(lanes, rank, every)));
    let candidates = case(1, RANKS[0], CANDIDATES);
    cases.into_iter().flatten().chain([candidates]).collect()
}

fn case(lanes: usize, rank: usize, [columns, apart]: [usize; 2]) -> Case {
    // The matrix is read once for each place, whatever the lanes.
    let matrix = columns * rank * BF16_BYTES;
    let logits = lanes * PLACES * columns * F32_BYTES;
    Case {
        op: "markov_drafts",
        shape: vec![("L", lanes), ("P", PLACES), ("V", columns), ("R", rank)],
        variant: if apart == 1 { "dense" } else { "candidates" },
        dtype: DType::BF16,
        bytes: PLACES * matrix + logits,
        flops: None,
        input_bytes: 2 * VOCABULARY * rank * BF16_BYTES + logits,
        build: Box::new(move |device, _| prepared(lanes, rank, [columns, apart], device)),
    }
}

/// The id of a column is `apart` times its number.
fn prepared(lanes: usize, rank: usize, [columns, apart]: [usize; 2], device: &Device) -> Prepared {
    let normal = Distribution::Normal(0.0, 1.0);
    let matrix = || {
        let rows = Tensor::<2>::random([VOCABULARY, rank], normal, device);
        rows.cast(FloatDType::BF16)
    };
    let logits = Tensor::<3>::random([lanes, PLACES, columns], normal, device);
    let ids = (apart > 1).then(|| {
        let ids: Vec<i64> = (0..lanes * PLACES * columns)
            .map(|at| (at % columns * apart) as i64)
            .collect();
        integers(&ids, [lanes, PLACES, columns], device)
    });
    let first: Vec<i64> = (1..=lanes as i64).map(|lane| 7919 * lane).collect();
    let tokens = integers(&first, [lanes, 1], device);
    let (embedding, output) = (matrix(), matrix());
    let checked = [embedding.clone(), output.clone()];
    let all = logits.clone();
    Prepared::new(
        move || {
            markov_drafts(
                logits.clone(),
                ids.clone(),
                tokens.clone(),
                embedding.clone(),
                output.clone(),
            )
            .expect("arguments that fit")
        },
        move |drafts: Tensor<2, Int>| {
            let drafts = integer_values(drafts);
            let [embedding, output] = &checked;
            let output = wide(&values(output.clone().cast(FloatDType::F32)));
            let logits = wide(&values(all.clone()));
            for (lane, drafts) in drafts.chunks(PLACES).enumerate() {
                let mut last = first[lane] as usize;
                for (place, draft) in drafts.iter().enumerate() {
                    let row = embedding.clone().slice_dim(0, last..last + 1);
                    let before = wide(&values(row.cast(FloatDType::F32)));
                    let own = &logits[(lane * PLACES + place) * columns..][..columns];
                    let rows = output.chunks(rank).step_by(apart);
                    let products = rows.map(|row| {
                        let pairs = row.iter().zip(&before);
                        pairs.map(|(a, b)| a * b).sum::<f64>()
                    });
                    let sums: Vec<f64> = own.iter().zip(products).map(|(a, b)| a + b).collect();
                    let best = sums.iter().copied().fold(f64::MIN, f64::max);
                    last = usize::try_from(*draft).expect("a token");
                    let sum = sums[last / apart];
                    assert!(
                        last.is_multiple_of(apart) && sum >= best - TOLERANCE,
                        "lane {lane}, place {place}: {last} has {sum}, the best {best}"
                    );
                }
            }
        },
    )
}
