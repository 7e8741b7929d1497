//! What the choice of the largest refuses, each by its name.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::topk::{
    MAX_COLUMNS, MAX_K, Order, Windows, top_k, top_k_ids, top_k_mask, top_k_per_row,
    top_k_per_row_decode,
};

use super::common::{assert_on_another_device, assert_refused, devices, two_devices};

fn flex() -> &'static Device {
    &devices()[0].1
}

fn logits(rows: usize) -> Tensor<2> {
    Tensor::zeros([rows, 4], (flex(), DType::F32))
}

fn entries(count: usize) -> Tensor<1, Int> {
    Tensor::zeros([count], flex())
}

fn ranges(starts: usize, ends: usize) -> Windows {
    Windows::Ranges {
        starts: entries(starts),
        ends: entries(ends),
    }
}

fn lengths(count: usize, next_n: usize) -> Windows {
    Windows::Lengths {
        lengths: entries(count),
        next_n,
    }
}

fn blocks(count: usize, ratio: usize, next_n: usize) -> Windows {
    Windows::Blocks {
        starts: entries(count),
        ratio,
        next_n,
    }
}

#[test]
fn a_k_of_none_or_above_the_limit_is_refused() {
    for k in [0, MAX_K + 1] {
        let message = format!("`k` is {k}, expected 1 to 4096");
        assert_refused(top_k_ids(logits(1), Windows::All, k), &message);
        assert_refused(top_k(logits(1), Windows::All, k, Order::Value), &message);
        assert_refused(top_k_mask(logits(1), k), &message);
    }
}

#[test]
fn logits_of_another_dtype_or_of_too_many_columns_are_refused() {
    let wide = logits(1).cast(FloatDType::F64);
    let message = "`logits` has dtype F64, expected F32, F16 or BF16";
    assert_refused(top_k_ids(wide, Windows::All, 1), message);
    let long = Tensor::zeros([0, MAX_COLUMNS + 1], flex());
    let message = "`columns of logits` is 8388609, expected at most 8388608";
    assert_refused(top_k_ids(long, Windows::All, 1), message);
}

#[test]
fn ends_of_windows_are_named_as_they_are_given() {
    let ids = |windows| top_k_ids(logits(3), windows, 1);
    let message = "`starts` has shape [2], expected [3]";
    assert_refused(ids(ranges(2, 3)), message);
    let message = "`ends` has shape [4], expected [3]";
    assert_refused(ids(ranges(3, 4)), message);
    let message = "`row_starts` has shape [2], expected [3]";
    assert_refused(top_k_per_row(logits(3), entries(2), entries(3), 1), message);
    let message = "`row_ends` has shape [4], expected [3]";
    assert_refused(top_k_per_row(logits(3), entries(3), entries(4), 1), message);
    let message = "`lengths` has shape [2], expected [3]";
    assert_refused(ids(lengths(2, 1)), message);
    let message = "`starts` has shape [2], expected [3]";
    assert_refused(ids(blocks(2, 1, 1)), message);
}

#[test]
fn rows_that_are_no_whole_sequences_are_refused() {
    let message = "`rows of logits` is 3, expected a multiple of 2, which is next_n";
    assert_refused(top_k_ids(logits(3), lengths(2, 2), 1), message);
    assert_refused(top_k_per_row_decode(logits(3), entries(2), 2, 1), message);
    let message = "`next_n` is 0, expected at least 1";
    assert_refused(top_k(logits(0), lengths(3, 0), 1, Order::Column), message);
    assert_refused(top_k_per_row_decode(logits(0), entries(0), 0, 1), message);
    // Times that many, the lengths would be as many as the rows: none.
    let message = "`lengths` has shape [2], expected [0]";
    assert_refused(top_k_ids(logits(0), lengths(2, 1 << 63), 1), message);
}

#[test]
fn blocks_of_no_tokens_or_of_too_many_are_refused() {
    let message = "`ratio` is 0, expected 1 to 268435456, with 4 columns";
    assert_refused(top_k_ids(logits(2), blocks(2, 0, 1), 1), message);
    let message = "`ratio` is 268435457, expected 1 to 268435456, with 4 columns";
    assert_refused(
        top_k_ids(logits(2), blocks(2, (1 << 28) + 1, 1), 1),
        message,
    );
    let message = "`next_n` is 1073741825, expected at most 1073741824";
    let windows = blocks(0, 1, (1 << 30) + 1);
    assert_refused(top_k_ids(logits(0), windows, 1), message);
}

#[test]
fn lengths_of_another_shape_are_refused() {
    let decode = |lengths: Tensor<2, Int>| top_k_per_row_decode(logits(4), lengths, 2, 1);
    let message = "`seq_lens` has shape [3], expected [2]";
    assert_refused(top_k_per_row_decode(logits(4), entries(3), 2, 1), message);
    let message = "`seq_lens` has shape [4, 1], expected [2, 2]";
    assert_refused(decode(entries(4).reshape([4, 1])), message);
    let deep = entries(4).reshape([2, 2, 1]);
    let message = "`dimensions of seq_lens` is 3, expected 1 or 2";
    assert_refused(top_k_per_row_decode(logits(4), deep, 2, 1), message);
}

#[test]
fn windows_on_another_device_are_refused() {
    let Some([_, second]) = two_devices() else {
        return;
    };
    let other = |count| Tensor::<1, Int>::zeros([count], second);
    let ids = |windows| top_k_ids(logits(2), windows, 1);
    let windows = Windows::Ranges {
        starts: other(2),
        ends: entries(2),
    };
    assert_on_another_device(ids(windows), ["starts", "logits"]);
    let windows = Windows::Ranges {
        starts: entries(2),
        ends: other(2),
    };
    assert_on_another_device(ids(windows), ["ends", "logits"]);
    let windows = Windows::Lengths {
        lengths: other(1),
        next_n: 2,
    };
    assert_on_another_device(ids(windows), ["lengths", "logits"]);
    let windows = Windows::Blocks {
        starts: other(2),
        ratio: 4,
        next_n: 1,
    };
    assert_on_another_device(ids(windows), ["starts", "logits"]);
    let result = top_k_per_row(logits(2), entries(2), other(2), 1);
    assert_on_another_device(result, ["row_ends", "logits"]);
    let result = top_k_per_row_decode(logits(2), other(1), 2, 1);
    assert_on_another_device(result, ["seq_lens", "logits"]);
}
