//! Verification is exact: the logits at a position have the same bits, however many positions a forward call has.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{MAX_DRAFTS, MtpProposer, greedy_token};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::common::{devices, skip, values};
use crate::golden::{Golden, root};

/// At first; the prompt ends right before, so that the text grows out of it. From then on the indexer picks.
pub(crate) const CAPACITY: usize = 128;
/// Enough for the indexer to pick from the beginning.
const PICKED_CAPACITY: usize = 256;
const PROMPT: usize = 120;

#[derive(Clone)]
pub(crate) struct Fixture {
    pub(crate) model: Model,
    pub(crate) config: ModelConfig,
    pub(crate) device: Device,
    pub(crate) prompt: Vec<u32>,
}

impl Fixture {
    fn open(device: &Device, dtype: FloatDType, expand: bool) -> Self {
        let checkpoint =
            Checkpoint::open(&root().join("assets/ds4-tiny")).expect("the asset is a checkpoint");
        let options = LoadOptions {
            dtype,
            expand,
            ..LoadOptions::default()
        };
        let golden = Golden::open("tests/fixtures/ds4-tiny/golden.safetensors");
        let ids = golden.get("long.input_ids").ids();
        Self {
            model: checkpoint.load(&options, device).expect("the asset loads"),
            config: checkpoint.config().clone(),
            device: device.clone(),
            prompt: ids[..PROMPT].iter().map(|id| *id as u32).collect(),
        }
    }

    pub(crate) fn cache(&self, capacity: usize) -> Cache {
        let options = CacheConfig {
            capacity,
            rollback: Rollback::Bounded(MAX_DRAFTS),
            ..CacheConfig::default()
        };
        let cache = self.model.new_cache(&self.config, options);
        cache.expect("the options are valid")
    }

    pub(crate) fn streams(&self, ids: &[u32], cache: &mut Cache, trace: &Trace) -> Tensor<4> {
        let count = ids.len();
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, count]), &self.device);
        let streams = self.model.forward_streams(ids, cache, trace);
        streams.expect("the cache has room")
    }

    /// Logits of each position.
    pub(crate) fn logits(&self, streams: Tensor<4>) -> Vec<Vec<f32>> {
        let logits = values(self.model.logits(streams));
        let rows = logits.chunks(self.config.vocab_size);
        rows.map(<[f32]>::to_vec).collect()
    }
}

/// Runs `test` with every dtype that a device has, and with weights as they are used there.
pub(crate) fn every_model(test: impl Fn(&str, &Fixture)) {
    for (name, device) in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            if !device.supports_dtype(dtype) {
                skip(name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            let fixture = Fixture::open(device, dtype, name == "flex");
            test(&format!("{name} {dtype:?}"), &fixture);
        }
    }
}

pub(crate) fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|value| value.to_bits()).collect()
}

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
            let prompt = &fixture.prompt[..if slow { 24 } else { 90 }];
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
                        // Those of rows that later positions have made, which are hidden afterwards.
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
            let prompt = &fixture.prompt[..if slow { 12 } else { 40 }];
            let (next, before) = (&prompt[1..], prompt.len() - 1 - count);
            let mut trunk = fixture.cache(CAPACITY);
            let streams = fixture.streams(prompt, &mut trunk, &Trace::off());
            let mut cache = {
                let cache = fixture
                    .model
                    .new_mtp_cache(&fixture.config, CacheConfig::default());
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
                values(made.expect("the cache has room"))
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

/// Who drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Drafts {
    /// The MTP layer, so many at a time.
    Mtp(usize),
    /// Nobody who knows the text: as good as all are rejected.
    Wrong(usize),
}

/// Greedy generation, one token per forward call: the tokens, and the logits that each was chosen from.
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

/// The same with drafts, which [`Cache::room`] keeps from making the cache grow before it has to.
pub(crate) fn speculative(
    fixture: &Fixture,
    count: usize,
    drafts: Drafts,
) -> (Vec<u32>, Vec<Vec<f32>>, [usize; 2]) {
    let mut cache = fixture.cache(CAPACITY);
    let (wanted, mut proposer) = match drafts {
        Drafts::Mtp(wanted) => {
            let proposer = MtpProposer::new(&fixture.model, &fixture.config, wanted);
            (wanted, Some(proposer.expect("the model has an MTP layer")))
        }
        Drafts::Wrong(wanted) => (wanted, None),
    };
    let streams = fixture.streams(&fixture.prompt, &mut cache, &Trace::off());
    let last = streams.dims()[1] - 1;
    let mut rows = fixture.logits(streams.clone().narrow(1, last, 1));
    let mut tokens = vec![greedy_token(&rows[0]).expect("finite logits")];
    let mut unseen = tokens.clone();
    if let Some(proposer) = &mut proposer {
        proposer.observe(streams);
        let known = proposer.advance(&fixture.prompt[1..]);
        known.expect("as many tokens as positions, but one");
    }
    let mut counts = [0, 0];
    while tokens.len() < count {
        let next = tokens[tokens.len() - 1];
        let number = wanted.min(cache.room() - 1);
        let guesses = match &mut proposer {
            Some(proposer) => {
                let guesses = proposer.draft(&unseen, number).expect("the cache has room");
                if number > 0 {
                    unseen.clear();
                }
                guesses
            }
            None => (0..number as u32)
                .map(|i| (next * 7 + i + 11) % 1024)
                .collect(),
        };
        let input = [vec![next], guesses.clone()].concat();
        let streams = fixture.streams(&input, &mut cache, &Trace::off());
        let verified = fixture.logits(streams.clone());
        let chosen = verified
            .iter()
            .map(|row| greedy_token(row).expect("finite logits"));
        let chosen: Vec<u32> = chosen.collect();
        let standing = guesses
            .iter()
            .zip(&chosen)
            .take_while(|(a, b)| a == b)
            .count();
        counts[0] += standing;
        counts[1] += guesses.len() - standing;
        cache
            .truncate(guesses.len() - standing)
            .expect("drafts can be taken back");
        if let Some(proposer) = &mut proposer {
            proposer.observe(streams.narrow(1, 0, standing + 1));
        }
        unseen.extend(&chosen[..=standing]);
        tokens.extend(&chosen[..=standing]);
        rows.extend(verified.into_iter().take(standing + 1));
    }
    tokens.truncate(count);
    rows.truncate(count);
    (tokens, rows, counts)
}

#[test]
fn speculative_and_plain_greedy_logits_are_equal_to_the_bit() {
    every_model(|name, fixture| {
        let slow = name.starts_with("wgpu");
        let drafts = if slow {
            vec![Drafts::Mtp(4), Drafts::Wrong(2)]
        } else {
            let all = (1..=MAX_DRAFTS).map(Drafts::Mtp);
            all.chain([Drafts::Wrong(4)]).collect()
        };
        // Past the end of the capacity and, where a token takes no time, of its double.
        let count = match name {
            "flex F32" => 144,
            _ if slow || name.starts_with("flex") => 16,
            _ => 64,
        };
        let (tokens, rows) = plain(fixture, count);
        for drafts in drafts {
            let what = format!("{name}, {drafts:?}");
            let (actual, logits, [accepted, rejected]) = speculative(fixture, count, drafts);
            for (index, (actual, expected)) in logits.iter().zip(&rows).enumerate() {
                let wrong = actual.iter().zip(expected);
                let wrong = wrong.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                assert_eq!(wrong, 0, "{what}: logits of token {index} that differ");
            }
            assert_eq!(actual, tokens, "{what}: tokens");
            assert!(rejected > 0, "{what}: no draft was taken back");
            if let Drafts::Mtp(_) = drafts {
                assert!(accepted > 0, "{what}: no draft was accepted");
            }
        }
    });
}
