use burn::tensor::{Bool, Int, Tensor};

/// Burn's top-k unrolls in k on a GPU: beyond this, compiling it takes longer than sorting the row.
const MAX_UNROLLED_K: usize = 64;

pub(super) fn top_k_mask(scores: Tensor<2>, k: usize) -> Tensor<2, Bool> {
    let [rows, columns] = scores.dims();
    let device = scores.device();
    // CubeCL devices panic on some operations without elements.
    if k >= columns || rows == 0 {
        return Tensor::<2, Int>::ones([rows, columns], &device).equal_elem(1);
    }
    // Whatever compares false with everything, or lies beyond what a backend starts its search from, would leave marks over.
    let nan = scores.clone().is_nan();
    let scores = scores.mask_fill(nan, f32::MIN).clamp(f32::MIN, f32::MAX);
    // Only the k-th value is taken from Burn, whose order among equals is not specified.
    let largest = if k <= MAX_UNROLLED_K {
        scores.clone().topk(k, 1)
    } else {
        scores.clone().sort_descending(1)
    };
    let threshold = largest.slice([0..rows, k - 1..k]);
    let above = scores.clone().greater(threshold.clone());
    let equal = scores.equal(threshold);
    let room = above.clone().int().sum_dim(1).neg() + k as i64;
    let rank = equal.clone().int().cumsum(1);
    let first_equals = equal.bool_and(rank.lower_equal(room));
    above.bool_or(first_equals)
}

pub(super) fn top_k_columns(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    let [rows, columns] = scores.dims();
    let device = scores.device();
    if rows == 0 {
        return Tensor::zeros([0, k], &device);
    }
    let mask = top_k_mask(scores, k).int();
    let column = Tensor::<1, Int>::arange(0..columns as i64, &device)
        .unsqueeze::<2>()
        .expand([rows, columns]);
    // The i-th marked column of a row goes to slot i; the others add nothing to slot 0.
    let slot = (mask.clone().cumsum(1) - 1) * mask.clone();
    Tensor::<2, Int>::zeros([rows, k], &device).scatter(
        1,
        slot,
        column * mask,
        burn::tensor::IndexingUpdateOp::Add,
    )
}
