//! The clustered head.

use burn::tensor::Device;
use burn_ds4_ops::flash_head::{
    FlashHead, FlashHeadOptions, flash_head_argmax, flash_head_candidates, flash_head_logits,
};

use super::super::common::{integer_values, values};
use super::super::heads::{Case, Sizes};
use super::draw::Draw;

pub fn flash_head(data: &[u8]) {
    let draw = &mut Draw::new(data);
    match draw.one_in(4) {
        true => made(draw),
        false => asked(draw),
    }
}

/// Parts that need not fit.
fn made(draw: &mut Draw) {
    let (vocabulary, width, clusters) = (draw.size(9), draw.size(4), draw.size(4));
    let (rows, centroids) = (draw.rows(vocabulary, width), draw.rows(clusters, width));
    let (dtype, of_centroids) = (draw.dtype(), draw.dtype());
    let lm_head = draw.tensor(&rows.values, [vocabulary, width], dtype).0;
    let centroids = draw
        .tensor(&centroids.values, [clusters, width], of_centroids)
        .0;
    let assignments: Vec<u32> = match draw.one_in(2) {
        true => (0..vocabulary)
            .map(|row| (row % clusters.max(1)) as u32)
            .collect(),
        false => (0..vocabulary)
            .map(|_| draw.index(clusters) as u32)
            .collect(),
    };
    let special = (0..draw.below(3)).map(|_| draw.index(vocabulary) as u32);
    let options = FlashHeadOptions {
        special_tokens: special.collect(),
        norms: None,
    };
    let given = (lm_head.dims()[0], centroids.dims()[0]);
    if let Ok(head) = FlashHead::new(lm_head, &assignments, centroids, options) {
        assert_eq!((head.vocabulary(), head.clusters()), given);
        let ids = integer_values(head.ids());
        let inside = |id: &i64| (-1..given.0 as i64).contains(id);
        assert!(ids.iter().all(inside), "{ids:?}");
    }
}

fn asked(draw: &mut Draw) {
    let clusters = 1 + draw.below(6);
    let sizes = Sizes {
        vocabulary: clusters * (1 + draw.below(4)) - usize::from(clusters > 2 && draw.one_in(2)),
        width: 1 + draw.below(6),
        clusters,
    };
    let Sizes {
        vocabulary, width, ..
    } = sizes;
    let rows = draw.tame_values(vocabulary * width);
    let special: Vec<u32> = (0..draw.below(3))
        .map(|_| draw.below(vocabulary) as u32)
        .collect();
    let dtype = draw.dtype();
    let assignments = (0..vocabulary).map(|row| (row % clusters) as u32).collect();
    let device = Device::flex();
    let parts = (draw.pick(&[0, 1, 2, 3, 16, 17]), draw.below(clusters + 2));
    let (tokens, probes) = parts;
    if vocabulary < clusters {
        return;
    }
    let case = Case::with_assignments(&rows, sizes, assignments, dtype, &special, &device);
    let h = draw.rows(tokens, width);
    let of_h = draw.dtype();
    let (given, _) = draw.tensor(&h.values, [tokens, width], of_h);
    let fits = (1..=16).contains(&tokens) && (1..=clusters).contains(&probes);
    let greedy = draw.settle(flash_head_argmax(given.clone(), &case.head, probes), fits);
    let candidates = draw.settle(
        flash_head_candidates(given.clone(), &case.head, probes),
        fits,
    );
    let all = draw.settle(flash_head_logits(given.clone(), &case.head, probes), fits);
    let (Some(greedy), Some(candidates), Some(all)) = (greedy, candidates, all) else {
        return;
    };
    let greedy = integer_values(greedy);
    let logits = values(all.clone());
    case.check_all(all, candidates, "flex");
    let dense = (probes == clusters).then(|| case.dense(&given));
    for (token, &greedy) in greedy.iter().enumerate() {
        let logits = &logits[token * vocabulary..][..vocabulary];
        let wins = |x: &f32| !x.is_nan() && *x > f32::NEG_INFINITY;
        let highest = logits.iter().copied().filter(wins).reduce(f32::max);
        let first = highest.and_then(|highest| logits.iter().position(|x| *x == highest));
        assert_eq!(greedy, first.map_or(-1, |first| first as i64), "{logits:?}");
        if let Some(dense) = dense.as_ref().filter(|_| h.tame[token]) {
            assert_eq!(greedy, dense[token]);
        }
    }
}
