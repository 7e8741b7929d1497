use burn::tensor::{FloatDType, IndexingUpdateOp, Int, Tensor};

/// Added to the sum of the chosen activations, which may underflow to zero.
const DENOMINATOR_EPSILON: f64 = 1e-20;

/// `log1p(t) / s` as a polynomial in `s²`, highest power first; relative error 1.7e-7 for `t` in 0..=1 (minimax, by Remez).
const LOG1P: [f64; 4] = [0.342_260_51, 0.395_894_61, 0.666_760_03, 1.999_999_67];
/// Below, `sqrt(softplus(x))` is `exp(x / 2)` to f32 precision.
const TAIL: f64 = -20.0;

pub(super) fn sqrt_softplus<const D: usize>(logits: Tensor<D>) -> Tensor<D> {
    // CubeCL devices panic on some operations without elements.
    if logits.shape().num_elements() == 0 {
        return logits;
    }
    // softplus(x) = max(x, 0) + log1p(t) with t = exp(-|x|). Backends compute log1p as ln(1 + t), which has no correct digit
    // left for small t, so take log1p(t) = 2·atanh(s) with s = t / (2 + t), whose quotient by s is a short polynomial in s².
    let t = logits.clone().abs().neg().exp();
    let s = t.clone() / (t + 2.0);
    let square = s.clone().square();
    let [c3, c2, c1, c0] = LOG1P;
    let quotient = square.clone() * c3 + c2;
    let quotient = quotient * square.clone() + c1;
    let quotient = quotient * square + c0;
    let root = (logits.clone().clamp_min(0.0) + s * quotient).sqrt();
    // Here the square root halves the exponent of a t that would underflow.
    let tail = logits.clone().lower_elem(TAIL);
    root.mask_where(tail, (logits * 0.5).exp())
}

pub(super) fn topk_select(scores: Tensor<2>, k: usize) -> (Tensor<2>, Tensor<2, Int>) {
    if scores.dims()[0] == 0 {
        return no_rows(&scores, k);
    }
    let ids = select_ids(scores.clone(), k);
    (scores.gather(1, ids.clone()), ids)
}

fn no_rows(like: &Tensor<2>, k: usize) -> (Tensor<2>, Tensor<2, Int>) {
    let device = like.device();
    (
        Tensor::zeros([0, k], (&device, like.dtype())),
        Tensor::zeros([0, k], &device),
    )
}

fn select_ids(scores: Tensor<2>, k: usize) -> Tensor<2, Int> {
    let [rows, _] = scores.dims();
    let device = scores.device();
    // A taken column drops to -inf; all others stay above it, so that it cannot be taken twice.
    let lowest = FloatDType::from(scores.dtype()).finfo().min;
    let nan = scores.clone().is_nan();
    let mut remaining = scores.mask_fill(nan, lowest).clamp_min(lowest);
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
    if logits.dims()[0] == 0 {
        return no_rows(&logits, k);
    }
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
    if logits.dims()[0] == 0 {
        return no_rows(&logits, table.dims()[1]);
    }
    let [vocabulary, _] = table.dims();
    let [_, experts] = logits.dims();
    let ids = table
        .select(0, token_ids.clamp(0, vocabulary as i64 - 1))
        .clamp(0, experts as i64 - 1);
    (weights(sqrt_softplus(logits), ids.clone(), scale), ids)
}

fn weights(scores: Tensor<2>, ids: Tensor<2, Int>, scale: f64) -> Tensor<2> {
    let chosen = scores.gather(1, ids);
    let sum = chosen.clone().sum_dim(1) + DENOMINATOR_EPSILON;
    chosen / sum * scale
}
