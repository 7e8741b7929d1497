//! A layer's experts and its shared one at the sizes of a released model, in the fewest launches
//! and apart.

use std::cell::OnceCell;

use burn::tensor::{DType, Distribution, FloatDType, Tensor};
use burn_ds4_ops::moe::{Experts, expert_ffn, moe_ffn};
use burn_ds4_ops::quant::Activations;

use super::{
    super::common::{floats, integers},
    super::distributions::Random,
    super::drawn::{Batch, DrawnExperts, assert_row},
    super::experts::Stacks,
    super::packing::{FP8_BLOCKS32_PAIR, FP8_PAIR, REPACKED_FP4},
    harness::{Case, Prepared},
    moe::{self, FLASH, K, LIMIT, SMALL, WORD, bytes_of_expert, distinct, layer, routed},
};

const TOKENS: [usize; 7] = [1, 2, 5, 16, 32, 64, 2048];
/// Both kinds of experts in launches of their own, and their sum.
const APART: &str = "apart";
/// Of V4.1: a shared expert in blocks of 32x32.
const BLOCKS32: &str = "fp4_fp8_32_released";

pub fn cases() -> Vec<Case> {
    let small = case(1, SMALL, "fp4_fp8", FloatDType::F32);
    let of = |variant| TOKENS.map(|tokens| case(tokens, FLASH, variant, FloatDType::BF16));
    let flash = ["fp4_fp8", APART].into_iter().flat_map(of);
    let v41 = TOKENS.map(|tokens| case(tokens, moe::V41, BLOCKS32, FloatDType::BF16));
    std::iter::once(small).chain(flash).chain(v41).collect()
}

/// FP4 experts and a shared one of FP8, of one inner width. Those of V4.1 round as it does.
fn case(tokens: usize, shape: [usize; 3], variant: &'static str, dtype: FloatDType) -> Case {
    let [experts, d, inner] = shape;
    let of_shared = [1, d, inner];
    let (fp8, activations) = match variant {
        BLOCKS32 => (FP8_BLOCKS32_PAIR, Activations::Released32),
        _ => (FP8_PAIR, Activations::Exact),
    };
    let own = distinct(tokens, experts) * bytes_of_expert(REPACKED_FP4, shape);
    let weights = own + bytes_of_expert(fp8, of_shared);
    let x = tokens * d * DType::from(dtype).size();
    let pairs = tokens * K;
    Case {
        op: "moe_ffn",
        shape: vec![("N", tokens), ("E", experts), ("D", d), ("I", inner)],
        variant,
        dtype: dtype.into(),
        bytes: weights + 2 * x + 2 * pairs * WORD,
        flops: None,
        // All sets share the weights of the layer; each uses other experts.
        input_bytes: weights + x,
        build: Box::new(move |device, seed| {
            let mut own = layer(REPACKED_FP4, shape, device);
            let mut shared = DrawnExperts::new(fp8, of_shared, device, seed + 2);
            (own.activations, shared.activations) = (activations, activations);
            device.seed(u64::from(seed));
            let uniform = Distribution::Uniform(-1.0, 1.0);
            let x = Tensor::<2>::random([tokens, d], uniform, (device, DType::F32)).cast(dtype);
            let ids = routed(tokens, experts, seed);
            let random = &mut Random::new(u64::from(!seed));
            let weights: Vec<f32> = (0..pairs).map(|_| random.unit() / 2.0).collect();
            let run = run((&own, &shared), &x, (&ids, &weights), variant == APART);
            let expected = OnceCell::new();
            Prepared::new(run, move |output: Tensor<2>| {
                let expected = expected.get_or_init(|| {
                    let of = |experts: &DrawnExperts, ids: &[i64], weights: &[f32]| {
                        let batch = Batch {
                            x: &x,
                            ids,
                            weights,
                            limit: LIMIT,
                        };
                        experts.expected(&batch, tokens - 1)
                    };
                    let own = of(&own, &ids, &weights);
                    let all = of(&shared, &vec![0; tokens], &vec![1.0; tokens]);
                    let rounded = |value: f64| value.abs() / 128.0;
                    let both = own.into_iter().zip(all);
                    both.map(|(a, b)| (a.0 + b.0, a.1 + b.1 + rounded(a.0 + b.0)))
                        .collect::<Vec<_>>()
                });
                let output = output.cast(FloatDType::F32);
                assert_row(&output, tokens - 1, expected, variant);
            })
        }),
    }
}

type Run = Box<dyn Fn() -> Tensor<2>>;

fn run(
    (own, shared): (&DrawnExperts, &DrawnExperts),
    x: &Tensor<2>,
    (ids, weights): (&[i64], &[f32]),
    apart: bool,
) -> Run {
    let ([tokens, _], device) = (x.dims(), x.device());
    let (own, shared, x) = (own.stacks(), shared.stacks(), x.clone());
    let ids = integers(ids, [tokens, K], &device);
    let weights = floats(weights, [tokens, K], &device);
    let to_first = integers(&vec![0; tokens], [tokens, 1], &device);
    let once = floats(&vec![1.0; tokens], [tokens, 1], &device);
    Box::new(move || {
        let (x, ids, weights) = (x.clone(), ids.clone(), weights.clone());
        if apart {
            let dtype = x.dtype();
            let own = expert_ffn(x.clone(), ids, weights, &own.gate_up, &own.down, LIMIT);
            let (ids, weights) = (to_first.clone(), once.clone());
            let all = expert_ffn(x, ids, weights, &shared.gate_up, &shared.down, LIMIT);
            return (own.expect("a layer") + all.expect("an expert")).cast(dtype);
        }
        moe_ffn(x, ids, weights, experts(&own), experts(&shared)).expect("a layer")
    })
}

fn experts(stacks: &Stacks) -> Experts<'_> {
    Experts {
        gate_up: &stacks.gate_up,
        down: &stacks.down,
        limit: LIMIT,
    }
}
