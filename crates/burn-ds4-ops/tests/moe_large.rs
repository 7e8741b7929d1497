//! Experts at the sizes of the released models, and stacks beyond 4 GiB; cut down where the device
//! is no GPU.

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_ds4_ops::moe::expert_ffn;

use super::common::{devices, floats, integers, seeded, sized, some, values};
use super::distributions::Random;
use super::drawn::{Batch, DrawnExperts, assert_row, bits};
use super::packing::{FP4, FP8_PAIR, Format, REPACKED_FP4};

/// Experts per token.
const K: usize = 6;
/// Experts, d and inner, where there is no GPU.
const SMALL: [usize; 3] = [9, 136, 72];
const FLASH: [usize; 3] = [256, 4096, 2048];
const PRO: [usize; 3] = [384, 7168, 3072];

/// Two runs over each batch, some of whose rows are compared with the oracle. The first token has
/// the first and the last expert.
fn check(
    (name, device): (&str, &Device),
    format: Format,
    shape: [usize; 3],
    batches: &[usize],
    expert: impl Fn(&mut Random) -> usize,
) {
    let [experts, d, _] = shape;
    let dtype = [FloatDType::BF16, FloatDType::F16]
        .into_iter()
        .find(|&dtype| device.supports_dtype(dtype))
        .unwrap_or(FloatDType::F32);
    let drawn = DrawnExperts::new(format, shape, device, 1);
    let stacks = drawn.stacks();
    for &tokens in some(name, batches, 2) {
        let random = &mut Random::new(tokens as u64);
        let distribution = Distribution::Uniform(-1.0, 1.0);
        let x = seeded(device, tokens as u64, || {
            Tensor::<2>::random([tokens, d], distribution, (device, DType::F32)).cast(dtype)
        });
        let mut ids: Vec<i64> = (0..tokens * K).map(|_| expert(random) as i64).collect();
        ids[..2].copy_from_slice(&[experts as i64 - 1, 0]);
        let weights: Vec<f32> = (0..tokens * K).map(|_| random.unit()).collect();
        let batch = Batch {
            x: &x,
            ids: &ids,
            weights: &weights,
            limit: Some(10.0),
        };
        let run = || {
            let ids = integers(&ids, [tokens, K], device);
            let weights = floats(&weights, [tokens, K], device);
            let (x, limit) = (x.clone(), batch.limit);
            expert_ffn(x, ids, weights, &stacks.gate_up, &stacks.down, limit).unwrap()
        };
        let what = format!("{name} {format:?} {shape:?} {tokens} tokens");
        let output = run();
        let mut rows = vec![0, tokens / 2, tokens - 1];
        rows.dedup();
        for row in rows {
            assert_row(&output, row, &drawn.expected(&batch, row), &what);
        }
        let bits = |y: Tensor<2>| values(y).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert!(bits(output) == bits(run()), "{what}: two runs differ");
    }
}

type Sizes = ([usize; 3], &'static [usize]);

/// Each at its number of tokens, with any experts.
fn any_expert(format: Format, on_gpu: Sizes, elsewhere: Sizes) {
    sized(on_gpu, elsewhere, |name, device, (shape, batches)| {
        check((name, device), format, shape, batches, |random| {
            random.index(shape[0])
        });
    });
}

fn a_layer_of_v4_flash() {
    let batches = &[1, 7, 16, 17, 64, 300, 4096];
    for format in [FP4, REPACKED_FP4] {
        any_expert(format, (FLASH, batches), (SMALL, &[1, 17]));
    }
}

fn a_layer_of_v4_pro_whose_packed_weights_exceed_4_gib() {
    any_expert(REPACKED_FP4, (PRO, &[1, 16, 512]), (SMALL, &[40]));
}

fn fp8_stacks_beyond_4_gib() {
    any_expert(
        FP8_PAIR,
        ([300, 4096, 2048], &[2, 64, 512]),
        (SMALL, &[2, 40]),
    );
}

fn dense_stacks_beyond_4_gib() {
    sized([160, 4096, 2048], SMALL, |name, device, shape| {
        let dtypes = [FloatDType::BF16, FloatDType::F32];
        let dtype = dtypes.into_iter().find(|&d| device.supports_dtype(d));
        let format = Format::Dense(dtype.expect("f32 at least"));
        check((name, device), format, shape, &[2, 64], |random| {
            random.index(shape[0])
        });
    });
}

/// Each number of tokens, for two experts whose rows fill several tiles.
fn two_experts(format: Format, on_gpu: Sizes, elsewhere: Sizes) {
    sized(on_gpu, elsewhere, |name, device, (shape, batches)| {
        check((name, device), format, shape, batches, |random| {
            [3, shape[0] - 2][random.index(2)]
        });
    });
}

fn thousands_of_tokens_for_two_experts() {
    two_experts(REPACKED_FP4, (FLASH, &[4096]), (SMALL, &[40]));
}

/// Stages of shared memory are filled again and again, at a size that tools can follow.
fn hundreds_of_tokens_for_two_experts() {
    for format in [FP4, REPACKED_FP4, FP8_PAIR] {
        two_experts(format, ([5, 1024, 512], &[300]), (SMALL, &[20]));
    }
}

/// The sizes above are checked with what is drawn on the device.
fn every_bit_of_a_drawn_word_is_random() {
    for (name, device) in devices() {
        let words: Vec<u32> = bits([4096], device).try_into_vec_as().unwrap();
        for bit in 0..32 {
            let set = words.iter().filter(|&word| word >> bit & 1 == 1).count();
            assert!((1800..2300).contains(&set), "{name} bit {bit}: {set}");
        }
    }
}

catalogue![
    every_bit_of_a_drawn_word_is_random,
    a_layer_of_v4_flash,
    a_layer_of_v4_pro_whose_packed_weights_exceed_4_gib,
    fp8_stacks_beyond_4_gib,
    dense_stacks_beyond_4_gib,
    thousands_of_tokens_for_two_experts,
    hundreds_of_tokens_for_two_experts,
];
