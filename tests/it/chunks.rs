//! Where a long text has other logits in other chunks: which choice turned, and by how little.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData};
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::config::ModelConfig;
use ds4_model::model::Model;
use ds4_model::router::Selection;
use ds4_model::trace::Trace;
use serde_json::{Value, json};

use crate::common::{noise, values};
use crate::golden::{Golden, root};
use crate::pipeline::copy;

/// Tokens of the text.
const LENGTH: usize = 10_000;
/// Positions of a chunk that are compared with those of several smaller ones.
const CHUNK: usize = 256;
/// A larger deviation of logits than rounding alone makes.
const TURNED: f32 = 1e-3;
/// Scores that are closer than this may change places by rounding.
const TIE: f32 = 1e-4;

/// What a position was computed with, and its logits.
struct Seen {
    /// Scores that something was chosen by, and how many were: by layer and kind.
    choices: BTreeMap<String, (Vec<f32>, usize)>,
    logits: Vec<f32>,
}

impl Seen {
    /// The indices that are chosen, ascending, and by how much the last was better than the next.
    fn chosen(scores: &[f32], count: usize) -> (Vec<usize>, f32) {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let margin = match order.get(count) {
            Some(next) => scores[order[count - 1]] - scores[*next],
            None => f32::INFINITY,
        };
        order.truncate(count);
        order.sort_unstable();
        (order, margin)
    }
}

/// Runs some positions, and tells what each was computed with.
fn run(model: &Model, cache: &mut Cache, tokens: &[u32]) -> Vec<Seen> {
    let (count, first) = (tokens.len(), cache.lengths()[0]);
    let ids: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
    let ids = TensorData::new(ids, [1, count]);
    let ids = Tensor::<2, Int>::from_data(ids, &Device::flex());
    let trace = Trace::recording();
    let streams = model.forward_streams(ids, cache, &trace);
    let logits = values(model.logits(streams.expect("the text fits the context")));
    let config: &ModelConfig = model.config();
    let records = trace.take();
    let row = |name: &str, position: usize| -> Option<Vec<f32>> {
        let all: Vec<f32> = records.get(name)?.iter().collect();
        let width = all.len() / count;
        Some(all[position * width..][..width].to_vec())
    };
    let biases: Vec<Vec<f32>> = (model.layers.iter())
        .map(|layer| match &layer.moe.router.selection {
            Selection::Score(score) => values(score.bias.val()),
            Selection::Hash(_) => Vec::new(),
        })
        .collect();
    let seen = (0..count).map(|position| {
        let mut choices = BTreeMap::new();
        for (layer, kind) in config.layers.iter().enumerate() {
            let indexer = row(&format!("layer{layer}.attention.indexer.scores"), position);
            if let (Some(mut scores), Some(ratio)) = (indexer, kind.ratio()) {
                scores.truncate((first + position + 1) / ratio);
                choices.insert(
                    format!("layer {layer} indexer"),
                    (scores, config.index_topk),
                );
            }
            if layer >= config.num_hash_layers {
                let logits = row(&format!("layer{layer}.moe.router.logits"), position);
                let scores = logits.expect("every layer has a router");
                let bias = &biases[layer];
                let biased = scores.iter().zip(bias).map(|(x, bias)| {
                    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
                    softplus.sqrt() + bias
                });
                let chosen = config.num_experts_per_tok;
                choices.insert(format!("layer {layer} router"), (biased.collect(), chosen));
            }
        }
        let logits = &logits[position * config.vocab_size..][..config.vocab_size];
        Seen {
            choices,
            logits: logits.to_vec(),
        }
    });
    seen.collect()
}

/// Pieces of 25 tokens of the golden text, one after the other.
fn text(seed: u32) -> Vec<u32> {
    let golden = Golden::open("tests/fixtures/ds4-tiny/golden.safetensors");
    let ids = golden.get("long.input_ids").ids();
    let places = (ids.len() - 25) as f32;
    let pieces = noise(LENGTH / 25, seed).into_iter().flat_map(|place| {
        let first = ((place + 1.0) / 2.0 * places) as usize;
        ids[first..first + 25].iter().map(|id| *id as u32)
    });
    pieces.collect()
}

/// The shipped checkpoint with a longer context.
fn model() -> Model {
    let config = std::fs::read(root().join("assets/ds4-tiny/config.json")).expect("an asset");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["max_position_embeddings"] = json!(LENGTH);
    let dir = copy(&[("config.json", &config.to_string())]);
    let checkpoint = Checkpoint::open(dir.path()).expect("a longer context");
    let options = LoadOptions {
        expand: true,
        drafter: false,
        ..LoadOptions::default()
    };
    checkpoint
        .load(&options, &Device::flex())
        .expect("it loads")
}

/// The first position whose logits are not the same but for rounding has a choice that turned, and
/// what it was chosen by is a tie. Prints every position of which that is true.
#[test]
#[ignore = "takes minutes"]
fn a_text_turns_in_other_chunks_only_where_a_choice_is_a_tie() {
    let model = model();
    let cache = || {
        let options = CacheConfig {
            capacity: LENGTH,
            rollback: Rollback::Bounded(1),
            ..CacheConfig::default()
        };
        model.new_cache(options).expect("valid options")
    };
    for (seed, chunk) in [(1, 64), (2, 64), (1, 128)] {
        let (mut whole, mut parts) = (cache(), cache());
        let mut first = true;
        for (index, tokens) in text(seed).chunks(CHUNK).enumerate() {
            let expected = run(&model, &mut whole, tokens);
            let actual = tokens
                .chunks(chunk)
                .flat_map(|part| run(&model, &mut parts, part));
            for (position, (a, b)) in actual.zip(&expected).enumerate() {
                let pairs = a.logits.iter().zip(&b.logits);
                let deviation = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let turned = a.choices.iter().filter_map(|(name, (scores, count))| {
                    let (chosen, margin) = Seen::chosen(scores, *count);
                    let (other, of_other) = Seen::chosen(&b.choices.get(name)?.0, *count);
                    (chosen != other).then(|| (name.clone(), margin.max(of_other)))
                });
                let turned: Vec<(String, f32)> = turned.collect();
                if deviation > TURNED || !turned.is_empty() {
                    let position = index * CHUNK + position;
                    println!("{seed} {chunk} {position}: {deviation:e} {turned:?}");
                }
                if deviation > TURNED && std::mem::take(&mut first) {
                    let (name, margin) = turned.first().expect("a choice that turned");
                    assert!(*margin < TIE, "{name}: {margin:e} is no tie");
                }
            }
        }
    }
}
