//! What the routers refuse, each by its name.

use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::router::{HashWeights, activation_topk, dense_router, hash_route, topk_select};

use super::common::{
    assert_on_another_device, assert_refused, devices, integers, two_devices, values,
};

fn flex() -> &'static Device {
    &devices()[0].1
}

fn zeros<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::zeros(shape, (device, DType::F32))
}

fn padding(count: usize, device: &Device) -> Tensor<1, Bool> {
    zeros([count], device).greater_elem(0.0)
}

fn table(device: &Device) -> Tensor<2, Int> {
    integers(&[0, 1, 2, 3], [2, 2], device)
}

#[test]
fn a_k_of_none_or_of_more_than_there_are_is_refused() {
    for k in [0, 5] {
        let message = format!("`k` is {k}, expected 1 to 4, the number of columns");
        assert_refused(topk_select(zeros([1, 4], flex()), k), &message);
        let message = format!("`k` is {k}, expected 1 to 4, the number of experts");
        let logits = zeros([1, 4], flex());
        assert_refused(activation_topk(logits, None, None, k, 1.0), &message);
        let (x, gate) = (zeros([1, 8], flex()), zeros([4, 8], flex()));
        assert_refused(dense_router(x, gate, None, None, k, 1.0), &message);
    }
    let message = "`k` is 1, expected 1 to 0, the number of columns";
    assert_refused(topk_select(zeros([2, 3, 0], flex()), 1), message);
}

#[test]
fn scores_of_another_dtype_are_refused() {
    let wide = |shape| zeros::<2>(shape, flex()).cast(FloatDType::F64);
    let is_refused = |argument| format!("`{argument}` has dtype F64, expected F32, F16 or BF16");
    assert_refused(topk_select(wide([1, 4]), 2), &is_refused("scores"));
    let result = activation_topk(wide([1, 4]), None, None, 2, 1.0);
    assert_refused(result, &is_refused("logits"));
    let result = dense_router(zeros([1, 8], flex()), wide([4, 8]), None, None, 2, 1.0);
    assert_refused(result, &is_refused("gate"));
    let weights = HashWeights::Scored(wide([1, 4]));
    let result = hash_route(integers(&[0], [1], flex()), table(flex()), weights, 1.0);
    assert_refused(result, &is_refused("logits"));
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let (x, gate) = (|| zeros([1, 8], flex()), || zeros([4, 8], flex()));
    let result = dense_router(x(), zeros([4, 9], flex()), None, None, 2, 1.0);
    assert_refused(result, "`gate` has shape [4, 9], expected [4, 8]");
    let result = dense_router(x(), gate(), None, Some(padding(2, flex())), 2, 1.0);
    assert_refused(result, "`padding` has shape [2], expected [1]");
    let bias = Some(zeros([3], flex()));
    let result = activation_topk(zeros([1, 4], flex()), bias, None, 2, 1.0);
    assert_refused(result, "`bias` has shape [3], expected [4]");
    let bias = Some(zeros([4], flex()).cast(FloatDType::BF16));
    let result = activation_topk(zeros([1, 4], flex()), bias, None, 2, 1.0);
    assert_refused(result, "`bias` has dtype BF16, expected F32");
    let weights = HashWeights::Scored(zeros([1, 4], flex()));
    let result = hash_route(integers(&[0, 0], [2], flex()), table(flex()), weights, 1.0);
    assert_refused(result, "`logits` has shape [1, 4], expected [2, 4]");
}

#[test]
fn a_table_of_nothing_is_refused() {
    let empty = |shape| {
        let table = Tensor::zeros(shape, (flex(), DType::I32));
        let weights = HashWeights::Uniform { experts: 4 };
        hash_route(integers(&[0], [1], flex()), table, weights, 1.0)
    };
    let message = "`rows of table` is 0, expected at least 1";
    assert_refused(empty([0, 2]), message);
    let message = "`columns of table` is 0, expected at least 1";
    assert_refused(empty([2, 0]), message);
}

#[test]
fn experts_that_an_id_cannot_name_are_refused() {
    let uniform = |experts| {
        let weights = HashWeights::Uniform { experts };
        hash_route(integers(&[1], [1], flex()), table(flex()), weights, 1.0)
    };
    for experts in [0, 1 << 31, (1 << 32) + 1] {
        let message = format!("`experts` is {experts}, expected 1 to 2147483647");
        assert_refused(uniform(experts), &message);
    }
    let (_, ids) = uniform((1 << 31) - 1).expect("as many as ids can name");
    assert_eq!(ids.into_data().iter::<i64>().collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn parts_on_another_device_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let select = |bias, padding| activation_topk(zeros([1, 4], first), bias, padding, 2, 1.0);
    let result = select(Some(zeros([4], second)), None);
    assert_on_another_device(result, ["bias", "logits"]);
    let result = select(None, Some(padding(1, second)));
    assert_on_another_device(result, ["padding", "logits"]);
    let dense = |gate, bias| dense_router(zeros([1, 8], first), gate, bias, None, 2, 1.0);
    let result = dense(zeros([4, 8], second), None);
    assert_on_another_device(result, ["gate", "x"]);
    let result = dense(zeros([4, 8], first), Some(zeros([4], second)));
    assert_on_another_device(result, ["bias", "x"]);
    let hash = |table, device| {
        let weights = HashWeights::Scored(zeros([1, 4], device));
        hash_route(integers(&[0], [1], first), table, weights, 1.0)
    };
    let result = hash(table(second), first);
    assert_on_another_device(result, ["table", "token_ids"]);
    let result = hash(table(first), second);
    assert_on_another_device(result, ["logits", "token_ids"]);
}

fn a_dimension_of_nothing_has_nothing_selected() {
    for (name, device) in devices() {
        for (shape, expected) in [([2, 0, 6], [2, 0, 3]), ([0, 2, 6], [0, 2, 3])] {
            let (best, ids) = topk_select(zeros(shape, device), 3).expect("no rows are fine");
            assert_eq!((best.dims(), ids.dims()), (expected, expected), "{name}");
            assert_eq!(ids.dtype(), DType::I32, "{name}");
            assert!(values(best).is_empty(), "{name}");
        }
    }
}

catalogue![a_dimension_of_nothing_has_nothing_selected];
