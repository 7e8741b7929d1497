//! Drafts of a Markov head.

use burn::tensor::{DType, FloatDType, Tensor, TensorData};

use super::super::common::integer_values;
use super::super::markov::{Asked, oracle};
use super::draw::Draw;

pub fn markov(data: &[u8]) {
    let draw = &mut Draw::new(data);
    let [lanes, places, vocabulary] = [draw.size(3), draw.size(5), draw.size(30)];
    let rank = draw.size(9);
    let columns = match draw.one_in(2) {
        true => Some(draw.size(12)),
        false => None,
    };
    // Numbers whose sums are exact in f32, so that ties are ties in f64, too. The rows of one lane
    // may hold anything.
    let width = columns.unwrap_or(vocabulary);
    let mut logits = draw.tame_values(lanes * places * width);
    let tame = draw.spoil_rows(&mut logits, lanes);
    let candidates: Vec<i64> = (0..columns.map_or(0, |_| logits.len()))
        .map(|_| draw.index(vocabulary))
        .collect();
    for (logit, id) in logits.iter_mut().zip(&candidates) {
        if !(0..vocabulary as i64).contains(id) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let tokens: Vec<i64> = (0..lanes).map(|_| draw.index(vocabulary)).collect();
    let (logits, _) = draw.tensor(&logits, [lanes, places, width], FloatDType::F32);
    let ids = columns.map(|columns| {
        let data = TensorData::new(candidates, [lanes, places, columns]);
        let data = data.convert_dtype(DType::I32);
        Tensor::from_data(data, (&logits.device(), DType::I32))
    });
    let tokens = draw.integers(&tokens, [lanes, 1]);
    let matrix = |draw: &mut Draw| {
        let values = draw.tame_values(vocabulary * rank);
        let dtype = draw.dtype();
        draw.tensor(&values, [vocabulary, rank], dtype).0
    };
    let (embedding, output) = (matrix(draw), matrix(draw));
    let asked = Asked {
        logits,
        ids,
        tokens,
        embedding,
        output,
    };
    let drafts = asked.clone().run();
    let fits = rank > 0 && (vocabulary > 0 || width == 0);
    let Some(drafts) = draw.settle(drafts, fits) else {
        return;
    };
    assert_eq!(
        (drafts.dims(), drafts.dtype()),
        ([lanes, places], DType::I32)
    );
    if lanes * places * width == 0 {
        assert_eq!(integer_values(drafts), vec![-1; lanes * places]);
        return;
    }
    let (actual, expected) = (integer_values(drafts), oracle(&asked));
    for lane in (0..lanes).filter(|lane| tame[*lane]) {
        let own = lane * places..(lane + 1) * places;
        assert_eq!(actual[own.clone()], expected[own], "lane {lane}");
    }
}
