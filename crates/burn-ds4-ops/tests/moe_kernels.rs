//! Experts in every format and dtype, at sizes that fit no tile and batches that choose between the
//! ways of computing them.

use burn::tensor::{FloatDType, Tensor};

use super::common::{
    EXACT, FLOATS, assert_close, compiles_slowly, devices, dtypes, every_dtype, is_gpu, some,
    some_of_half,
};
use super::experts::{Layer, Size, few_and_many, size};
use super::packing::{FP4, FP8, FP8_PAIR, Format, REPACKED_FP4, every_format};

const F32: Format = Format::Dense(FloatDType::F32);

const SIZES: [Size; 10] = [
    size([0, 2, 5, 40, 24]),
    size([1, 1, 1, 40, 24]),
    size([1, 6, 64, 96, 64]),
    size([2, 2, 5, 520, 136]),
    size([7, 6, 5, 96, 64]),
    size([16, 1, 5, 520, 136]),
    size([17, 2, 1, 40, 24]),
    size([17, 2, 64, 96, 136]),
    size([64, 2, 5, 40, 136]),
    size([300, 2, 64, 40, 24]),
];

/// Sizes that a software driver would take too long for.
const LARGER: [Size; 8] = [
    size([16, 6, 64, 520, 136]),
    size([17, 6, 64, 1032, 264]),
    size([64, 6, 5, 520, 136]),
    size([300, 6, 64, 520, 264]),
    size([300, 6, 5, 1000, 520]),
    size([16, 6, 5, 96, 2080]),
    size([100, 6, 12, 264, 96]),
    size([90, 6, 8, 520, 200]),
];

/// Kernels differ by the format, by the dtype, and by the size. A device that compiles slowly has
/// FP4 in f32 at every size; FP4 in another dtype, and other formats in f32, at every third.
fn sums_are_exact_at_any_size(format: Format) {
    for (name, device) in devices() {
        let larger = if is_gpu(name) { &LARGER[..] } else { &[] };
        let sizes = SIZES.iter().chain(larger).copied().enumerate();
        let sizes: Vec<(usize, Size)> = sizes.collect();
        for dtype in dtypes(name, device) {
            let step = match (format, dtype) {
                (FP4, FloatDType::F32) => 1,
                (FP4 | REPACKED_FP4, _) | (_, FloatDType::F32) => 3,
                _ if compiles_slowly(name) => continue,
                _ => 1,
            };
            for &(i, size) in some(name, &sizes, step) {
                let mut layer = Layer::exact(size, format, dtype, i as u64);
                layer.check(&format!("{name} {format:?} {dtype:?}"), device);
                // Cuts most gates and ups. The sum stays exact: so far from zero, SiLU of the limit
                // is the limit.
                layer.limit = Some(64.0);
                layer.check(&format!("{name} {format:?} {dtype:?}"), device);
            }
        }
    }
}

fn fp4_experts_of_any_size_give_exact_sums() {
    sums_are_exact_at_any_size(FP4);
}

fn repacked_fp4_experts_of_any_size_give_exact_sums() {
    sums_are_exact_at_any_size(REPACKED_FP4);
}

fn fp8_experts_of_any_size_give_exact_sums() {
    sums_are_exact_at_any_size(FP8_PAIR);
}

fn dense_experts_of_any_size_give_exact_sums() {
    sums_are_exact_at_any_size(F32);
}

fn experts_of_any_format_are_what_f32_sums_can_be() {
    for (name, device) in devices() {
        every_format(name, device, |format| {
            for dtype in FLOATS.into_iter().filter(|&d| device.supports_dtype(d)) {
                // Where kernels compile slowly, floats in their dtype and packed weights in f32.
                // Other tests have packed weights in f16.
                let is_own = match format {
                    Format::Dense(of) => of == dtype,
                    _ => dtype == FloatDType::F32,
                };
                if compiles_slowly(name) && !is_own {
                    continue;
                }
                let cases = [(3, None), (5, Some(1.0)), (40, Some(10.0))];
                let step = if dtype == FloatDType::F32 { 2 } else { 3 };
                for &(tokens, limit) in some(name, &cases, step) {
                    let size = size([tokens, 2, 5, 200, 72]);
                    let mut layer = Layer::random(size, format, dtype, tokens as u64);
                    layer.limit = limit;
                    layer.check(&format!("{name} {format:?} {dtype:?}"), device);
                }
            }
        });
    }
}

fn block_rows_of_fp8_start_anew_for_gate_and_up() {
    every_dtype(|name, device, dtype| {
        for &inner in some_of_half(name, dtype, &[100, 1, 129, 300], 4) {
            for &tokens in some_of_half(name, dtype, &[1, 40], 2) {
                let size = size([tokens, 1, 2, 260, inner]);
                let layer = Layer::exact(size, FP8_PAIR, dtype, inner as u64);
                layer.check(name, device);
            }
        }
        // In a single part they go through.
        let layer = Layer::exact(size([6, 1, 2, 260, 100]), FP8, dtype, 1);
        layer.check(&format!("{name} one part"), device);
    });
}

fn a_token_does_not_depend_on_the_tokens_next_to_it() {
    every_dtype(|name, device, dtype| {
        // Kernels for 8, 16 and 32 pairs, of one of the formats where they compile slowly.
        let mut formats = [FP4, FP8_PAIR];
        if dtype != FloatDType::F32 {
            formats.reverse();
        }
        for &format in some(name, &formats, 2) {
            let layer = Layer::random(size([16, 2, 6, 264, 136]), format, dtype, 3);
            let stacks = layer.stacks(device);
            let alone = (0..16).map(|t| layer.tokens(t..t + 1).run_with(&stacks, device));
            let alone: Vec<f32> = alone.flatten().collect();
            for &tokens in some_of_half(name, dtype, &[5, 2, 3, 8, 9, 16], 6) {
                let together = layer.tokens(0..tokens).run_with(&stacks, device);
                let what = format!("{name} {format:?} {tokens} tokens");
                assert_close(&together, &alone[..tokens * 264], EXACT, &what);
            }
        }
    });
}

fn two_runs_give_the_same_bits() {
    every_dtype(|name, device, dtype| {
        for &tokens in some_of_half(name, dtype, &[300, 7], 2) {
            let layer = Layer::random(size([tokens, 2, 6, 96, 72]), FP4, dtype, 3);
            let stacks = layer.stacks(device);
            let [first, second] = [0, 1].map(|_| {
                let output = layer.run_with(&stacks, device);
                output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            assert!(first == second, "{name} {tokens} tokens");
        }
    });
}

fn what_is_not_finite_stays_in_its_token() {
    every_dtype(|name, device, dtype| {
        for limit in [None, Some(10.0)] {
            for tokens in [4, 40] {
                let mut layer = Layer::random(size([tokens, 2, 5, 136, 72]), FP4, dtype, 4);
                layer.limit = limit;
                let expected = layer.run(device);
                layer.x[2 * 136 - 1] = f32::NAN;
                layer.x[2 * 136] = f32::INFINITY;
                let actual = layer.run(device);
                let what = format!("{name} {tokens} tokens, limit {limit:?}");
                assert_close(&actual[..136], &expected[..136], EXACT, &what);
                assert_close(&actual[3 * 136..], &expected[3 * 136..], EXACT, &what);
                assert!(actual[136..272].iter().all(|v| v.is_nan()), "{what}");
            }
        }
    });
}

fn x_and_ids_may_be_views() {
    every_dtype(|name, device, dtype| {
        for layer in some(name, &few_and_many(FP4, dtype), 2) {
            let stacks = layer.stacks(device);
            let Size { tokens, k, d, .. } = layer.size;
            let (x, ids) = (layer.x(device), layer.ids(device));
            let check = |x: Tensor<2>, view| {
                let actual = layer.run_on(&stacks, x, layer.ids(device));
                layer.check_output(&actual, &format!("{name} {view}"));
            };
            check(column_major(x.clone()), "transposed");
            let wider = Tensor::cat(vec![x.clone().neg(), x.clone()], 1);
            check(wider.slice([0..tokens, d..2 * d]), "columns of a wider x");
            let odd = Tensor::cat(vec![x.clone().slice([0..tokens, 0..1]), x.clone()], 1);
            check(
                odd.slice([0..tokens, 1..d + 1]),
                "columns from an odd one on",
            );
            let higher = Tensor::cat(vec![x.clone().neg(), x.clone()], 0);
            check(
                higher.slice([tokens..2 * tokens, 0..d]),
                "rows of a higher x",
            );

            let more = Tensor::cat(vec![ids.clone().zeros_like(), ids], 1);
            let some = more.slice([0..tokens, k..2 * k]);
            let actual = layer.run_on(&stacks, x, some);
            layer.check_output(&actual, &format!("{name} columns of wider ids"));
        }
    });
}

/// The same values, stored column by column.
fn column_major(x: Tensor<2>) -> Tensor<2> {
    x.transpose().mul_scalar(1.0).transpose()
}

catalogue![
    fp4_experts_of_any_size_give_exact_sums,
    repacked_fp4_experts_of_any_size_give_exact_sums,
    fp8_experts_of_any_size_give_exact_sums,
    dense_experts_of_any_size_give_exact_sums,
    experts_of_any_format_are_what_f32_sums_can_be,
    block_rows_of_fp8_start_anew_for_gate_and_up,
    a_token_does_not_depend_on_the_tokens_next_to_it,
    two_runs_give_the_same_bits,
    what_is_not_finite_stays_in_its_token,
    x_and_ids_may_be_views,
];
