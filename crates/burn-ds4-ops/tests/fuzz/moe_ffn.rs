//! Experts beside one that all tokens share.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::moe::moe_ffn as multiply;

use super::super::common::{assert_within, read};
use super::super::experts::{Layer, Size};
use super::super::packing::{DENSE, FP4, FP8_PAIR, Format, REPACKED_FP4};
use super::super::sharing::{Both, experts};
use super::super::sums::smallest;
use super::draw::Draw;
use super::moe::{LIMITS, any_size};

const FORMATS: [Format; 6] = [FP4, REPACKED_FP4, FP8_PAIR, DENSE[0], DENSE[1], DENSE[2]];

pub fn moe_ffn(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let device = &Device::flex();
    let size = any_size(draw);
    let Size {
        tokens,
        k,
        experts: count,
        d,
        ..
    } = size;
    let formats = [draw.pick(&FORMATS), draw.pick(&FORMATS)];
    let (shared, dtype, seed) = (draw.size(10), draw.dtype(), draw.seed() >> 1);
    let mut both = Both::random((size, shared), formats, dtype, seed);
    // A layer has one shared expert.
    let number = draw.pick(&[1, 1, 1, 1, 1, 1, 1, 0, 2]);
    if number != 1 {
        let size = Size {
            experts: number,
            ..both.shared.size
        };
        both.shared = Layer::random(Size { tokens: 0, ..size }, formats[1], dtype, seed);
    }
    both.own.limit = draw.pick(&LIMITS);
    both.shared.limit = draw.pick(&LIMITS);
    let limits = [both.own.limit, both.shared.limit];
    let mut fits = number == 1 && limits.into_iter().flatten().all(|limit| limit >= 0.0);
    both.own.ids = (0..tokens * k)
        .map(|_| draw.below(count + 1) as i64 - 1)
        .collect();
    if tokens * k > 0 && draw.one_in(8) {
        both.own.ids[0] = draw.index(count);
    }
    fits &= both.own.ids.iter().all(|id| *id < count as i64);

    let stacks = both.stacks(device);
    let x = draw.rows(tokens, d);
    let (given, held) = draw.tensor(&x.values, [tokens, d], dtype);
    let ids = draw.integers(&both.own.ids, [tokens, k]);
    let weights = draw
        .tensor(&both.own.weights, [tokens, k], FloatDType::F32)
        .0;
    let own = experts(&stacks.own, both.own.limit);
    let shared = experts(&stacks.shared, both.shared.limit);
    let output = multiply(given, ids, weights, own, shared);
    let Some(output) = draw.settle(output, fits) else {
        return;
    };
    assert_eq!((output.dims(), output.dtype()), ([tokens, d], dtype.into()));
    let actual = read(&output);
    if actual.is_empty() {
        return;
    }
    both.own.x.clone_from(&held);
    both.shared.x = held;
    for token in (0..tokens).filter(|&token| x.tame[token]) {
        let (expected, allowed) = both.tokens(token..token + 1).expected();
        // Factors of the hidden layers that are themselves below the normal range.
        let allowed = |at: usize| allowed[at] + 8.0 * smallest(dtype);
        assert_within(&actual[token * d..][..d], &expected, allowed, "experts");
    }
}
