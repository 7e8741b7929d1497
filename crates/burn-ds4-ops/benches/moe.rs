//! The routed experts of a layer at the sizes of the released models.

use std::cell::{OnceCell, RefCell};

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_ds4_ops::moe::{expert_ffn, swiglu};
use burn_ds4_ops::quant::Activations;

use super::{
    super::common::{floats, integers},
    super::distributions::Random,
    super::drawn::{Batch, Drawn, DrawnExperts, assert_row},
    super::packing::{FP4, FP8_PAIR, Format, REPACKED_FP4},
    harness::{Case, Prepared},
    quant_linear::bytes_of_one,
};

/// Experts per token.
pub(crate) const K: usize = 6;
pub(crate) const LIMIT: Option<f64> = Some(10.0);
/// Experts, `d_model` and inner width of the released models.
pub(crate) const FLASH: [usize; 3] = [256, 4096, 2048];
const PRO: [usize; 3] = [384, 7168, 3072];
/// The same of V4.1-Flash.
pub(crate) const V41: [usize; 3] = [384, 5120, 2304];
/// Small, to see whether everything runs.
pub(crate) const SMALL: [usize; 3] = [16, 256, 128];
const TOKENS: [usize; 13] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096, 16384];
const FP8_TOKENS: [usize; 3] = [1, 8, 4096];
/// Tokens for experts of FP4 as released files have it.
const PLAIN_TOKENS: [usize; 3] = [1, 8, 4096];
const RELEASED_TOKENS: [usize; 4] = [1, 2048, 4096, 16384];
const FP8_RELEASED_TOKENS: usize = 4096;
const V41_TOKENS: [usize; 4] = [1, 8, 64, 4096];
/// Tokens in the comparison with Burn's own operators.
const BURN_TOKENS: usize = 4096;
/// Tokens from which arithmetic may be the bound.
const ARITHMETIC_TOKENS: usize = 64;
/// Bytes of an f32 or an i32.
pub(crate) const WORD: usize = 4;

/// How the experts are computed.
#[derive(Clone, Copy, PartialEq)]
enum Method {
    /// By the operator.
    Fused,
    /// The same with both inputs rounded so.
    Rounded(Activations),
    /// Expert by expert with Burn's operators, from matrices that are dequantised each time.
    Dequantized,
    /// The same from dense matrices.
    Dense,
}

/// The cases, those with the same weights one after the other.
pub fn cases() -> Vec<Case> {
    let (fp4, bf16) = (REPACKED_FP4, FloatDType::BF16);
    let small = case(1, SMALL, ("fp4", fp4), FloatDType::F32, Method::Fused);
    let of = move |shape| {
        let tokens = TOKENS.into_iter();
        tokens.map(move |tokens| case(tokens, shape, ("fp4", fp4), bf16, Method::Fused))
    };
    let burn = [
        case(BURN_TOKENS, FLASH, ("burn", fp4), bf16, Method::Dequantized),
        case(
            BURN_TOKENS,
            FLASH,
            ("burn_dense", Format::Dense(bf16)),
            bf16,
            Method::Dense,
        ),
    ];
    let fp8 = FP8_TOKENS.map(|tokens| case(tokens, FLASH, ("fp8", FP8_PAIR), bf16, Method::Fused));
    let released = Method::Rounded(Activations::Released);
    let released =
        |(variant, format), tokens| case(tokens, FLASH, (variant, format), bf16, released);
    let fp4_released = RELEASED_TOKENS.map(|tokens| released(("fp4_released", fp4), tokens));
    let fp8_released = released(("fp8_released", FP8_PAIR), FP8_RELEASED_TOKENS);
    let plain = ("fp4_plain", FP4);
    let fp4_plain = PLAIN_TOKENS.map(|tokens| case(tokens, FLASH, plain, bf16, Method::Fused));
    let fp4 = of(FLASH).chain(fp4_released).chain(fp4_plain);
    let flash = fp4.chain(burn).chain(fp8).chain([fp8_released]);
    let v41 = V41_TOKENS.map(|tokens| {
        let method = Method::Rounded(Activations::Released32);
        case(tokens, V41, ("fp4_released32", REPACKED_FP4), bf16, method)
    });
    let flash = flash.chain(v41);
    std::iter::once(small).chain(flash).chain(of(PRO)).collect()
}

fn case(
    tokens: usize,
    shape: [usize; 3],
    (variant, format): (&'static str, Format),
    dtype: FloatDType,
    method: Method,
) -> Case {
    let [experts, d, inner] = shape;
    let weights = distinct(tokens, experts) * bytes_of_expert(format, shape);
    let x = tokens * d * DType::from(dtype).size();
    let pairs = tokens * K;
    Case {
        op: "expert_ffn",
        shape: vec![("N", tokens), ("E", experts), ("D", d), ("I", inner)],
        variant,
        dtype: dtype.into(),
        bytes: weights + x + (2 * pairs + tokens * d) * WORD,
        flops: (tokens >= ARITHMETIC_TOKENS).then_some(6 * (pairs * d * inner) as u64),
        // All sets share the weights of the layer; each uses other experts.
        input_bytes: weights + x,
        build: Box::new(move |device, seed| {
            let mut layer = layer(format, shape, device);
            if let Method::Rounded(activations) = method {
                layer.activations = activations;
            }
            device.seed(u64::from(seed));
            let uniform = Distribution::Uniform(-1.0, 1.0);
            let x = Tensor::<2>::random([tokens, d], uniform, (device, DType::F32)).cast(dtype);
            let ids = routed(tokens, experts, seed);
            let random = &mut Random::new(u64::from(!seed));
            let weights: Vec<f32> = (0..pairs).map(|_| random.unit() / 2.0).collect();
            let run = match method {
                Method::Fused | Method::Rounded(_) => fused(&layer, &x, &ids, &weights),
                Method::Dequantized | Method::Dense => {
                    by_expert(&layer, &x, &ids, &weights, method)
                }
            };
            let expected = OnceCell::new();
            Prepared::new(run, move |output: Tensor<2>| {
                let batch = Batch {
                    x: &x,
                    ids: &ids,
                    weights: &weights,
                    limit: LIMIT,
                };
                let mut rows = vec![0, tokens - 1];
                rows.dedup();
                let expected = expected.get_or_init(|| {
                    let rows = rows.iter();
                    rows.map(|&row| layer.expected(&batch, row))
                        .collect::<Vec<_>>()
                });
                for (row, expected) in rows.into_iter().zip(expected) {
                    assert_row(&output, row, expected, variant);
                }
            })
        }),
    }
}

/// Bytes that a kernel reads of each expert.
pub(crate) fn bytes_of_expert(format: Format, [_, d, inner]: [usize; 3]) -> usize {
    bytes_of_one(format, 2 * inner, d) + bytes_of_one(format.of_down(), d, inner)
}

/// What identifies a layer: format, shape and device.
type Key = (Format, [usize; 3], String);

thread_local! {
    /// The layer drawn last: one takes gigabytes.
    static LAYER: RefCell<Option<(Key, DrawnExperts)>> = const { RefCell::new(None) };
}

pub(crate) fn layer(format: Format, shape: [usize; 3], device: &Device) -> DrawnExperts {
    let key = (format, shape, format!("{device:?}"));
    LAYER.with_borrow_mut(|last| {
        if last.as_ref().is_none_or(|(of, _)| *of != key) {
            // Free it before the next one is drawn.
            *last = None;
        }
        let (_, layer) = last.get_or_insert_with(|| {
            let layer = DrawnExperts::new(format, shape, device, 1);
            (key, layer)
        });
        layer.clone()
    })
}

/// How many experts are in use if all are equally likely.
pub(crate) fn distinct(tokens: usize, experts: usize) -> usize {
    let unused = (1.0 - K as f64 / experts as f64).powi(tokens as i32);
    (experts as f64 * (1.0 - unused)).round() as usize
}

/// Experts for each token, no two the same, as many in total as [`distinct`] says, for any seed.
pub(crate) fn routed(tokens: usize, experts: usize, seed: u32) -> Vec<i64> {
    let random = &mut Random::new(u64::from(seed) + 1);
    let mut pool: Vec<usize> = (0..experts).collect();
    let choose = |pool: &mut [usize], count: usize, random: &mut Random| {
        for slot in 0..count {
            pool.swap(slot, slot + random.index(pool.len() - slot));
        }
    };
    choose(&mut pool, experts, random);
    pool.truncate(distinct(tokens, experts));
    let mut ids = Vec::new();
    let mut uses = vec![0; experts];
    for _ in 0..tokens {
        choose(&mut pool, K, random);
        ids.extend_from_slice(&pool[..K]);
        pool[..K].iter().for_each(|&id| uses[id] += 1);
    }
    // An expert that was left out replaces one that is in use more than once.
    for id in pool {
        while uses[id] == 0 {
            let pair = random.index(ids.len());
            if uses[ids[pair]] > 1 {
                uses[ids[pair]] -= 1;
                uses[id] += 1;
                ids[pair] = id;
            }
        }
    }
    let used = uses.iter().filter(|&&uses| uses > 0).count();
    assert_eq!(used, distinct(tokens, experts));
    ids.into_iter().map(|id| id as i64).collect()
}

type Run = Box<dyn Fn() -> Tensor<2>>;

fn fused(layer: &DrawnExperts, x: &Tensor<2>, ids: &[i64], weights: &[f32]) -> Run {
    let ([tokens, _], device) = (x.dims(), x.device());
    let (stacks, x) = (layer.stacks(), x.clone());
    let ids = integers(ids, [tokens, K], &device);
    let weights = floats(weights, [tokens, K], &device);
    Box::new(move || {
        let (x, ids, weights) = (x.clone(), ids.clone(), weights.clone());
        expert_ffn(x, ids, weights, &stacks.gate_up, &stacks.down, LIMIT).expect("a layer")
    })
}

/// The work of one expert, prepared on the host.
struct ExpertGroup {
    /// Rows of x.
    rows: Tensor<1, Int>,
    /// `[rows, 1]`
    weights: Tensor<2>,
    gate_up: Drawn,
    down: Drawn,
    /// Both matrices, if they are dense.
    dense: Option<[Tensor<2>; 2]>,
}

impl ExpertGroup {
    fn matrices(&self, dtype: FloatDType) -> [Tensor<2>; 2] {
        self.dense.clone().unwrap_or_else(|| {
            [&self.gate_up, &self.down].map(|stack| {
                let matrices = stack.weights().dequantize(dtype);
                matrices.expect("a stack of one").squeeze_dim(0)
            })
        })
    }

    fn run(&self, x: &Tensor<2>, dtype: FloatDType) -> Tensor<2> {
        let [gate_up, down] = self.matrices(dtype);
        let x = x.clone().select(0, self.rows.clone());
        let hidden = x.matmul(gate_up.transpose()).cast(FloatDType::F32);
        let [rows, width] = hidden.dims();
        let gate = hidden.clone().slice([0..rows, 0..width / 2]);
        let up = hidden.slice([0..rows, width / 2..width]);
        let hidden = (swiglu(gate, up, LIMIT).expect("arguments that fit") * self.weights.clone())
            .cast(dtype);
        hidden.matmul(down.transpose()).cast(FloatDType::F32)
    }
}

/// The best that Burn's operators make of it: one product for each expert. That the ids are sorted
/// beforehand, on the host, is in their favour.
fn by_expert(
    layer: &DrawnExperts,
    x: &Tensor<2>,
    ids: &[i64],
    weights: &[f32],
    method: Method,
) -> Run {
    let ([tokens, d], device) = (x.dims(), x.device());
    let dtype = FloatDType::from(x.dtype());
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&pair| ids[pair]);
    let groups = order.chunk_by(|&a, &b| ids[a] == ids[b]).map(|pairs| {
        let expert = ids[pairs[0]] as usize;
        let rows: Vec<i64> = pairs.iter().map(|&pair| (pair / K) as i64).collect();
        let weights: Vec<f32> = pairs.iter().map(|&pair| weights[pair]).collect();
        let mut group = ExpertGroup {
            rows: integers(&rows, [rows.len()], &device),
            weights: floats(&weights, [rows.len(), 1], &device),
            gate_up: layer.gate_up.one(expert),
            down: layer.down.one(expert),
            dense: None,
        };
        group.dense = (method == Method::Dense).then(|| group.matrices(dtype));
        group
    });
    let groups: Vec<ExpertGroup> = groups.collect();
    let mut positions = vec![0; order.len()];
    for (position, &pair) in order.iter().enumerate() {
        positions[pair] = position as i64;
    }
    let (positions, x) = (integers(&positions, [positions.len()], &device), x.clone());
    Box::new(move || {
        let outputs = groups.iter().map(|group| group.run(&x, dtype)).collect();
        let outputs = Tensor::cat(outputs, 0).select(0, positions.clone());
        let outputs: Tensor<3> = outputs.reshape([tokens, K, d]);
        outputs.sum_dim(1).squeeze_dim(1)
    })
}
