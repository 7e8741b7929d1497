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
/// Bytes of a bf16 and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;
/// The most by which rounding may change a sum of products of standard normal numbers.
const TOLERANCE: f64 = 1e-3;

pub fn cases() -> Vec<Case> {
    let cases = RANKS.map(|rank| LANES.map(|lanes| case(lanes, rank)));
    cases.into_iter().flatten().collect()
}

fn case(lanes: usize, rank: usize) -> Case {
    // The matrix is read once for each place, whatever the lanes.
    let matrix = VOCABULARY * rank * BF16_BYTES;
    let logits = lanes * PLACES * VOCABULARY * F32_BYTES;
    Case {
        op: "markov_drafts",
        shape: vec![("L", lanes), ("P", PLACES), ("V", VOCABULARY), ("R", rank)],
        variant: "dense",
        dtype: DType::BF16,
        bytes: PLACES * matrix + logits,
        flops: None,
        input_bytes: 2 * matrix + logits,
        build: Box::new(move |device, _| prepared(lanes, rank, device)),
    }
}

fn prepared(lanes: usize, rank: usize, device: &Device) -> Prepared {
    let normal = Distribution::Normal(0.0, 1.0);
    let matrix = || {
        let rows = Tensor::<2>::random([VOCABULARY, rank], normal, device);
        rows.cast(FloatDType::BF16)
    };
    let logits = Tensor::<3>::random([lanes, PLACES, VOCABULARY], normal, device);
    let first: Vec<i64> = (1..=lanes as i64).map(|lane| 7919 * lane).collect();
    let tokens = integers(&first, [lanes, 1], device);
    let (embedding, output) = (matrix(), matrix());
    let checked = [embedding.clone(), output.clone()];
    let all = logits.clone();
    Prepared::new(
        move || {
            markov_drafts(
                logits.clone(),
                None,
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
                    let own = &logits[(lane * PLACES + place) * VOCABULARY..][..VOCABULARY];
                    let products = output.chunks(rank).map(|row| {
                        let pairs = row.iter().zip(&before);
                        pairs.map(|(a, b)| a * b).sum::<f64>()
                    });
                    let sums: Vec<f64> = own.iter().zip(products).map(|(a, b)| a + b).collect();
                    let best = sums.iter().copied().fold(f64::MIN, f64::max);
                    let chosen = usize::try_from(*draft).expect("a token");
                    assert!(
                        sums[chosen] >= best - TOLERANCE,
                        "lane {lane}, place {place}: {chosen} has {}, the best {best}",
                        sums[chosen]
                    );
                    last = chosen;
                }
            }
        },
    )
}
