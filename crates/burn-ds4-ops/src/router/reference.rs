use burn::tensor::{IndexingUpdateOp, Int, Tensor};

/// Added to the sum of the chosen activations, which may underflow to zero.
const DENOMINATOR_EPSILON: f64 = 1e-20;

pub(super) fn sqrt_softplus<const D: usize>(logits: Tensor<D>) -> Tensor<D> {
    let tail = logits.clone().abs().neg().exp().log1p();
    (logits.clamp_min(0.0) + tail).sqrt()
}

pub(super) fn topk_select(scores: Tensor<2>, k: usize) -> (Tensor<2>, Tensor<2, Int>) {
    let ids = select_ids(scores.clone(), k);
    (scores.gather(1, ids.clone()), ids)
}

fn select_ids(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    let [rows, _] = scores.dims();
    let device = scores.device();
    // A taken column drops to -inf; all others stay above it, so that it cannot be taken twice.
    let nan = scores.clone().is_nan();
    let mut remaining = scores.mask_fill(nan, f32::MIN).clamp_min(f32::MIN);
    let taken = Tensor::full([rows, 1], f32::NEG_INFINITY, (&device, remaining.dtype()));
    let mut ids = Vec::with_capacity(k);
    for rank in 0..k {
        let id = remaining.clone().argmax(1);
        if rank + 1 < k {
            remaining = remaining.scatter(1, id.clone(), taken.clone(), IndexingUpdateOp::Assign);
        }
        ids.push(id);
    }
    Tensor::cat(ids, 1)
}

pub(super) fn activation_topk(
    logits: Tensor<2>,
    bias: Option<Tensor<1>>,
    k: usize,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    let scores = sqrt_softplus(logits);
    let selection = match bias {
        Some(bias) => scores.clone() + bias.unsqueeze(),
        None => scores.clone(),
    };
    let ids = select_ids(selection, k);
    (weights(scores, ids.clone(), scale), ids)
}

pub(super) fn hash_route(
    token_ids: Tensor<1, Int>,
    table: Tensor<2, Int>,
    logits: Tensor<2>,
    scale: f64,
) -> (Tensor<2>, Tensor<2, Int>) {
    let ids = table.select(0, token_ids);
    (weights(sqrt_softplus(logits), ids.clone(), scale), ids)
}

fn weights(scores: Tensor<2>, ids: Tensor<2, Int>, scale: f64) -> Tensor<2> {
    let chosen = scores.gather(1, ids);
    let sum = chosen.clone().sum_dim(1) + DENOMINATOR_EPSILON;
    chosen / sum * scale
}
