//! Verification is exact: the logits at a position have the same bits, however many positions a
//! forward call has.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{Tensor, TensorData};
use ds4_model::cache::{Cache, CacheConfig};
use ds4_model::generate::{MAX_DRAFTS, greedy_token};
use ds4_model::trace::Trace;

use crate::common::values;
use crate::two_layers::{CAPACITY, Fixture, PICKED_CAPACITY, bits, every_model, text};

/// In the order in which a layer computes them.
const STAGES: [&str; 12] = [
    "attention_connection.post",
    "attention_connection.comb",
    "attention_connection.collapsed",
    "attention.indexer.picks",
    "attention.output",
    "moe_connection.post",
    "moe_connection.collapsed",
    "moe.router.logits",
    "moe.router.weights",
    "moe.router.ids",
    "moe.shared",
    "moe.output",
];

#[test]
fn every_intermediate_tensor_of_a_position_has_the_same_bits_alone() {
    every_model(|name, fixture| {
        let slow = name.starts_with("wgpu");
        for count in if slow { vec![5] } else { vec![2, 3, 4, 5, 16] } {
            // More than the indexer picks from, and as many rows as the window has.
            let prompt = text(48);
            let (prefix, tokens) = prompt.split_at(prompt.len() - count);
            let prefilled = || {
                let mut cache = fixture.cache(PICKED_CAPACITY);
                fixture.streams(prefix, &mut cache, &Trace::off());
                cache
            };
            let run = |tokens: &[u32], cache: &mut Cache| {
                let trace = Trace::recording();
                let streams = fixture.streams(tokens, cache, &trace);
                (trace.take(), fixture.logits(streams))
            };
            let (together, rows) = run(tokens, &mut prefilled());
            let mut cache = prefilled();
            let mut differing: BTreeMap<(usize, usize), String> = BTreeMap::new();
            let mut compared = BTreeSet::new();
            for (position, token) in tokens.iter().enumerate() {
                let (alone, row) = run(&[*token], &mut cache);
                for (tensor, alone) in &alone {
                    let (alone, together) = (alone.as_bytes(), together[tensor].as_bytes());
                    // Others are not divided by positions.
                    if alone.len() * count != together.len() {
                        continue;
                    }
                    let (layer, stage) = tensor.split_once('.').unwrap_or_default();
                    if stage == "attention.indexer.scores" {
                        // Those of rows that later positions have made, which are hidden
                        // afterwards.
                        continue;
                    }
                    compared.insert(stage.to_owned());
                    if *alone != together[position * alone.len()..][..alone.len()] {
                        let layer = layer.trim_start_matches("layer").parse().unwrap_or(0);
                        let order = STAGES.iter().position(|known| *known == stage);
                        let place = (layer, order.unwrap_or(STAGES.len()));
                        let what = format!("{tensor} of position {position}");
                        differing.entry(place).or_insert(what);
                    }
                }
                if bits(&row[0]) != bits(&rows[position]) {
                    let what = format!("logits of position {position}");
                    differing.entry((usize::MAX, 0)).or_insert(what);
                }
            }
            for stage in STAGES {
                assert!(compared.contains(stage), "{name}: no {stage} was compared");
            }
            let differing: Vec<String> = differing.into_values().collect();
            assert!(
                differing.is_empty(),
                "{name}, {count} positions: other bits, in the order of computation: {}",
                differing.join(", ")
            );
        }
    });
}

/// Their streams are several rows to a position.
#[test]
fn mtp_streams_of_a_position_have_the_same_bits_alone() {
    every_model(|name, fixture| {
        let slow = name.starts_with("wgpu");
        for count in if slow { vec![5] } else { vec![4, 5, 16] } {
            let prompt = &fixture.prompt;
            let (next, before) = (&prompt[1..], prompt.len() - 1 - count);
            let mut trunk = fixture.cache(CAPACITY);
            let streams = fixture.streams(prompt, &mut trunk, &Trace::off());
            let mut cache = {
                let cache = fixture.model.new_mtp_cache(CacheConfig::default());
                cache.expect("the model has an MTP layer")
            };
            let run = |cache: &mut Cache, from: usize, count: usize| {
                let next: Vec<i32> = next[from..from + count]
                    .iter()
                    .map(|id| *id as i32)
                    .collect();
                let next = Tensor::from_data(TensorData::new(next, [1, count]), &fixture.device);
                let streams = streams.clone().narrow(1, from, count);
                let made = fixture
                    .model
                    .forward_mtp(streams, next, cache, &Trace::off());
                values(made.expect("the text fits the context"))
            };
            run(&mut cache, 0, before);
            let together = run(&mut cache.clone(), before, count);
            for position in 0..count {
                let alone = run(&mut cache, before + position, 1);
                assert_eq!(
                    bits(&alone),
                    bits(&together[position * alone.len()..][..alone.len()]),
                    "{name}: position {position} of {count}"
                );
            }
        }
    });
}

/// In prefill and decode steps, before and after the indexer picks.
#[test]
fn logits_have_the_same_bits_in_a_cache_of_any_capacity() {
    every_model(|name, fixture| {
        let run = |capacity: usize| {
            let mut cache = fixture.cache(capacity);
            let mut tokens = text(66);
            let mut rows = Vec::new();
            for count in [20, 1, 2, 24, 1, 16, 2] {
                let rest = tokens.split_off(count);
                let streams = fixture.streams(&tokens, &mut cache, &Trace::off());
                rows.extend(fixture.logits(streams));
                tokens = rest;
            }
            rows
        };
        let expected = run(8);
        for capacity in [66, 1000] {
            for (position, (row, expected)) in run(capacity).iter().zip(&expected).enumerate() {
                let what = format!("{name}, capacity {capacity}, position {position}");
                assert_eq!(bits(row), bits(expected), "{what}");
            }
        }
    });
}

/// Greedy generation, one token per forward call: the tokens, and the logits that each was chosen
/// from.
pub(crate) fn plain(fixture: &Fixture, count: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut cache = fixture.cache(CAPACITY);
    let streams = fixture.streams(&fixture.prompt, &mut cache, &Trace::off());
    let last = streams.dims()[1] - 1;
    let mut rows = fixture.logits(streams.narrow(1, last, 1));
    let mut tokens = vec![greedy_token(&rows[0]).expect("finite logits")];
    while tokens.len() < count {
        let token = tokens[tokens.len() - 1];
        let streams = fixture.streams(&[token], &mut cache, &Trace::off());
        rows.extend(fixture.logits(streams));
        tokens.push(greedy_token(&rows[rows.len() - 1]).expect("finite logits"));
    }
    (tokens, rows)
}

/// The same with `wanted` drafts per forward call: tokens of the text, but for every third, which
/// is wrong.
fn speculative(fixture: &Fixture, text: &[u32], wanted: usize) -> Vec<Vec<f32>> {
    let mut cache = fixture.cache(CAPACITY);
    let streams = fixture.streams(&fixture.prompt, &mut cache, &Trace::off());
    let last = streams.dims()[1] - 1;
    let mut rows = fixture.logits(streams.narrow(1, last, 1));
    while rows.len() < text.len() {
        let known = rows.len();
        let drafts = (known..known + wanted).map(|index| match text.get(index) {
            Some(token) if index % 3 != 0 => *token,
            token => token.copied().unwrap_or_default() ^ 1,
        });
        let drafts: Vec<u32> = drafts.collect();
        let input = [vec![text[known - 1]], drafts.clone()].concat();
        let streams = fixture.streams(&input, &mut cache, &Trace::off());
        let right = drafts.iter().zip(&text[known..]);
        let accepted = right.take_while(|(draft, token)| draft == token).count();
        let back = cache.remove_newest(wanted - accepted);
        back.expect("drafts can be taken back");
        rows.extend(fixture.logits(streams).into_iter().take(accepted + 1));
    }
    rows.truncate(text.len());
    rows
}

#[test]
fn speculative_and_plain_greedy_logits_are_equal_to_the_bit() {
    every_model(|name, fixture| {
        let slow = name.starts_with("wgpu");
        let drafts = if slow { 2..=2 } else { 1..=MAX_DRAFTS };
        // Past the end of the capacity and, where a token takes little time, of its double.
        let count = match name {
            "flex F32" => 48,
            _ if slow || name.starts_with("flex") => 16,
            _ => 200,
        };
        let (tokens, rows) = plain(fixture, count);
        for drafts in drafts {
            let logits = speculative(fixture, &tokens, drafts);
            for (index, (actual, expected)) in logits.iter().zip(&rows).enumerate() {
                let wrong = actual.iter().zip(expected);
                let wrong = wrong.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                let what = format!("{name}, {drafts} drafts, token {index}");
                assert_eq!(wrong, 0, "{what}: logits that differ");
            }
        }
    });
}

/// What `SamplingConfig::seed` and `Cache::truncate_to` say: the same logits, and so the same draw,
/// where positions are removed and come again by the same calls or by any of up to 16 positions.
#[test]
fn a_position_that_comes_again_after_a_rollback_has_the_bits_that_it_had() {
    every_model(|name, fixture| {
        let tokens = text(48);
        let run = |cache: &mut Cache, counts: &[usize], change: u32| -> Vec<Vec<f32>> {
            let rows = counts.iter().flat_map(|count| {
                let from = cache.lengths()[0];
                let tokens = tokens[from..from + count].iter().map(|id| id ^ change);
                let tokens: Vec<u32> = tokens.collect();
                fixture.logits(fixture.streams(&tokens, cache, &Trace::off()))
            });
            rows.collect()
        };
        let config = CacheConfig {
            capacity: CAPACITY,
            ..CacheConfig::default()
        };
        let mut cache = fixture.model.new_cache(config).expect("valid options");
        // A long call and a remainder, as a prompt is processed; then some of a text.
        let calls = [20, 17, 1, 3, 1];
        let expected = run(&mut cache, &calls, 0);
        let mut again = |first: usize, counts: &[usize], change: u32| {
            cache.truncate_to(&[first]).expect("no bound");
            // Other tokens in their place, which are removed as well.
            run(&mut cache, &[5], change);
            cache.remove_newest(5).expect("no bound");
            let rows = run(&mut cache, counts, 0);
            for (position, (row, expected)) in rows.iter().zip(&expected[first..]).enumerate() {
                let what = format!("{name}, {counts:?} from {first}, position {position} of these");
                assert_eq!(bits(row), bits(expected), "{what}");
            }
        };
        again(37, &[5], 1);
        again(37, &[2, 2, 1], 0);
        // More than 16 positions a call: the same calls.
        if !name.starts_with("wgpu") {
            again(20, &calls[1..], 1);
            again(0, &calls, 1);
        }
    });
}
