//! Every intermediate tensor of every layer of a small random model, against Hugging Face's
//! implementation: in one call, token by token, and in chunks.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::{devices, values};
use crate::golden::{Golden, assert_golden, root};
use burn::tensor::{Device, Int, Tensor, TensorData};
use ds4_model::cache::{CacheConfig, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

const BATCH: usize = 2;
const LENGTH: usize = 37;
const LAYERS: usize = 4;
const WINDOW: usize = 8;

struct Fixture {
    checkpoint: Checkpoint,
    golden: Golden,
}

impl Fixture {
    fn open() -> Self {
        let dir = root().join("tests/fixtures/layer-goldens");
        Self {
            checkpoint: Checkpoint::open(&dir).expect("the fixture is a checkpoint"),
            golden: Golden::open("tests/fixtures/layer-goldens/golden.safetensors"),
        }
    }

    fn load(&self, device: &Device) -> Model {
        self.checkpoint
            .load(&LoadOptions::default(), device)
            .expect("the fixture loads")
    }

    fn token_ids(&self, range: std::ops::Range<usize>, device: &Device) -> Tensor<2, Int> {
        let ids = self.golden.get("input_ids").ids();
        let ids: Vec<i64> = ids
            .chunks(LENGTH)
            .flat_map(|row| row[range.clone()].to_vec())
            .collect();
        Tensor::from_data(TensorData::new(ids, [BATCH, range.len()]), device)
    }
}

/// Chunk lengths that add up to the fixture's length.
fn splits() -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("one shot", vec![LENGTH]),
        ("token by token", vec![1; LENGTH]),
        ("prefill and decode", {
            let mut split = vec![13];
            split.extend(vec![1; LENGTH - 13]);
            split
        }),
        ("chunks", vec![3, 1, 8, 2, 16, 7]),
    ]
}

/// What one call recorded, with the first position of the call.
type Records = Vec<(usize, usize, BTreeMap<String, TensorData>)>;

struct Run {
    records: Records,
    streams: Tensor<4>,
}

fn run(fixture: &Fixture, model: &Model, split: &[usize], device: &Device) -> Run {
    let options = CacheConfig {
        batch: BATCH,
        // Small, so that the cache grows on the way.
        capacity: 16,
        rollback: Rollback::Bounded(0),
        ..CacheConfig::default()
    };
    let mut cache = model.new_cache(options).expect("the options are valid");
    let trace = Trace::recording();
    let mut records = Vec::new();
    let mut streams = Vec::new();
    let mut start = 0;
    for count in split {
        let ids = fixture.token_ids(start..start + count, device);
        streams.push(
            model
                .forward_streams(ids, &mut cache, &trace)
                .expect("the text fits the context"),
        );
        records.push((start, *count, trace.take()));
        start += count;
    }
    Run {
        records,
        streams: Tensor::cat(streams, 1),
    }
}

/// Puts the calls' records of a tensor with one row per position together: `[batch, positions,
/// row]`.
fn joined(records: &Records, name: &str) -> Vec<f32> {
    let mut rows = vec![Vec::new(); BATCH * LENGTH];
    for (start, count, record) in records {
        let data = record
            .get(name)
            .unwrap_or_else(|| panic!("{name} was not recorded"));
        let data: Vec<f32> = data.iter().collect();
        let row = data.len() / (BATCH * count);
        for (index, chunk) in data.chunks(row).enumerate() {
            let (sequence, position) = (index / count, start + index % count);
            rows[sequence * LENGTH + position] = chunk.to_vec();
        }
    }
    rows.concat()
}

fn check_layers(fixture: &Fixture, run: &Run, what: &str) {
    for layer in 0..LAYERS {
        let plain = [
            ("attention_connection.post", "attn_hc.0"),
            ("attention_connection.comb", "attn_hc.1"),
            ("attention_connection.collapsed", "attn_hc.2"),
            ("attention.output", "attn.0"),
            ("moe_connection.post", "ffn_hc.0"),
            ("moe_connection.comb", "ffn_hc.1"),
            ("moe_connection.collapsed", "ffn_hc.2"),
            ("moe.router.logits", "router.0"),
            ("moe.shared", "shared"),
            ("moe.output", "moe"),
            ("output", "out"),
        ];
        for (ours, theirs) in plain {
            let actual = joined(&run.records, &format!("layer{layer}.{ours}"));
            let theirs = format!("layer{layer}.{theirs}");
            let expected = fixture.golden.get(&theirs).f32();
            assert_golden(&actual, &expected, &format!("{what}: {theirs}"));
        }
        check_router(fixture, run, layer, what);
        check_probabilities(fixture, run, layer, what);
        if layer > 0 {
            check_compressed(fixture, run, layer, what);
        }
    }
}

/// The order of a token's experts is free: compares weights by expert.
fn check_router(fixture: &Fixture, run: &Run, layer: usize, what: &str) {
    let by_expert = |ids: Vec<i64>, weights: Vec<f32>| {
        let mut dense = vec![0.0; BATCH * LENGTH * 8];
        for (slot, (id, weight)) in ids.iter().zip(weights).enumerate() {
            dense[slot / 3 * 8 + *id as usize] = weight;
        }
        dense
    };
    let ids = joined(&run.records, &format!("layer{layer}.moe.router.ids"));
    let weights = joined(&run.records, &format!("layer{layer}.moe.router.weights"));
    let actual = by_expert(ids.iter().map(|id| *id as i64).collect(), weights);
    let golden = |part| fixture.golden.get(&format!("layer{layer}.router.{part}"));
    let expected = by_expert(golden(2).ids(), golden(1).f32());
    let chosen = |dense: &[f32]| {
        dense
            .iter()
            .map(|weight| *weight != 0.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        chosen(&actual),
        chosen(&expected),
        "{what}: layer{layer} experts"
    );
    assert_golden(&actual, &expected, &format!("{what}: layer{layer} weights"));
}

/// Ours have the window's columns relative to the query; theirs have a column per position, then
/// one per compressed row.
fn check_probabilities(fixture: &Fixture, run: &Run, layer: usize, what: &str) {
    let golden = fixture.golden.get(&format!("layer{layer}.attn.1"));
    let [_, heads, _, columns] = golden.shape[..] else {
        panic!("probabilities have four dimensions")
    };
    let topk = (layer % 2 == 1).then(|| {
        fixture
            .golden
            .get(&format!("layer{layer}.indexer_topk"))
            .ids()
    });
    let mut actual = vec![0.0; golden.values.len()];
    let mut picked = vec![BTreeSet::new(); BATCH * LENGTH];
    for (start, count, record) in &run.records {
        let data: Vec<f32> = record[&format!("layer{layer}.attention.probabilities")]
            .iter()
            .collect();
        let width = data.len() / (BATCH * count * heads);
        let picks: Option<Vec<i64>> = record
            .get(&format!("layer{layer}.attention.indexer.picks"))
            .map(|picks| picks.iter().collect());
        let window = WINDOW - 1 + count;
        for (index, probability) in data.iter().enumerate() {
            if *probability == 0.0 {
                continue;
            }
            let (query, column) = (index / width, index % width);
            let (query, head) = (query / heads, query % heads);
            let (sequence, position) = (query / count, start + query % count);
            let column = if column < window {
                start + column - (WINDOW - 1)
            } else {
                let row = column - window;
                let row = match &picks {
                    Some(picks) => picks[query * (width - window) + row] as usize,
                    None => row,
                };
                picked[sequence * LENGTH + position].insert(row as i64);
                LENGTH + row
            };
            actual[((sequence * heads + head) * LENGTH + position) * columns + column] =
                *probability;
        }
    }
    let name = format!("{what}: layer{layer} probabilities");
    assert_golden(&actual, &golden.f32(), &name);
    if let Some(topk) = topk {
        for (query, (picked, topk)) in picked.iter().zip(topk.chunks(3)).enumerate() {
            let topk: BTreeSet<i64> = topk.iter().copied().filter(|row| *row >= 0).collect();
            assert_eq!(*picked, topk, "{what}: layer{layer} picks of query {query}");
        }
    }
}

fn check_compressed(fixture: &Fixture, run: &Run, layer: usize, what: &str) {
    let (_, _, last) = run.records.last().expect("there was a call");
    let golden = fixture.golden.get(&format!("layer{layer}.compressor.0"));
    let [_, _, rows, width] = golden.shape[..] else {
        panic!("compressed rows have four dimensions")
    };
    let ours = &last[&format!("layer{layer}.attention.compressed")];
    let stored = ours.shape()[1];
    let data: Vec<f32> = ours.iter().collect();
    let actual: Vec<f32> = data
        .chunks(stored * width)
        .flat_map(|sequence| sequence[..rows * width].to_vec())
        .collect();
    let name = format!("{what}: layer{layer} compressed rows");
    assert_golden(&actual, &golden.f32(), &name);

    if layer.is_multiple_of(2) {
        return;
    }
    let golden = fixture.golden.get(&format!("layer{layer}.indexer_scores"));
    let theirs = golden.f32();
    let (mut actual, mut expected) = (Vec::new(), Vec::new());
    for (start, count, record) in &run.records {
        // Recorded only where there are more rows than picks.
        let Some(scores) = record.get(&format!("layer{layer}.attention.indexer.scores")) else {
            continue;
        };
        let stored = scores.shape()[2];
        for (index, score) in scores.iter::<f32>().enumerate() {
            let (query, row) = (index / stored, index % stored);
            let (sequence, position) = (query / count, start + query % count);
            if row < (position + 1) / 4 {
                actual.push(score);
                expected.push(theirs[(sequence * LENGTH + position) * rows + row]);
            }
        }
    }
    assert!(
        actual.len() > BATCH * LENGTH,
        "{what}: too few scores were compared"
    );
    assert_golden(&actual, &expected, &format!("{what}: layer{layer} scores"));
}

#[test]
fn every_intermediate_equals_the_golden_one_shot_incremental_and_chunked() {
    let fixture = Fixture::open();
    for (name, device) in devices() {
        let model = fixture.load(device);
        for (split, counts) in splits() {
            if name == "wgpu" && split == "prefill and decode" {
                // The other splits have both, and a software GPU is slow.
                continue;
            }
            let what = format!("{name}, {split}");
            let run = run(&fixture, &model, &counts, device);
            check_layers(&fixture, &run, &what);

            let head = model.head.forward(run.streams.clone());
            let norm = model.norm.forward(head.clone());
            let logits = values(model.logits(run.streams.clone()));
            for (theirs, actual) in [
                ("hc_head", values(head)),
                ("final_norm", values(norm)),
                ("logits", logits.clone()),
                ("logits_incremental", logits),
            ] {
                let expected = fixture.golden.get(theirs).f32();
                assert_golden(&actual, &expected, &format!("{what}: {theirs}"));
            }
        }
    }
}

#[test]
fn mtp_streams_and_logits_equal_the_golden_one_shot_and_chunked() {
    let fixture = Fixture::open();
    let length = LENGTH - 1;
    for (name, device) in devices() {
        let model = fixture.load(device);
        let golden = fixture.golden.get("layer3.out");
        let [_, _, n, d] = golden.shape[..] else {
            panic!("streams have four dimensions")
        };
        let trunk =
            Tensor::<4>::from_data(TensorData::new(golden.f32(), [BATCH, LENGTH, n, d]), device);
        for counts in [vec![length], vec![1; length], vec![9, 2, 1, 24]] {
            let options = CacheConfig {
                batch: BATCH,
                capacity: 16,
                ..CacheConfig::default()
            };
            let mut cache = model.new_mtp_cache(options).expect("the options are valid");
            let mut start = 0;
            let mut streams = Vec::new();
            for count in &counts {
                let input = trunk
                    .clone()
                    .slice([0..BATCH, start..start + count, 0..n, 0..d]);
                let next = fixture.token_ids(start + 1..start + 1 + count, device);
                streams.push(
                    model
                        .forward_mtp(input, next, &mut cache, &Trace::off())
                        .expect("the text fits the context"),
                );
                start += count;
            }
            let streams = Tensor::cat(streams, 1);
            let what = format!("{name}, {} calls", counts.len());
            let logits = values(model.mtp_logits(streams.clone()));
            let golden = |name| fixture.golden.get(name).f32();
            assert_golden(
                &values(streams),
                &golden("mtp.state"),
                &format!("{what}: state"),
            );
            assert_golden(&logits, &golden("mtp.logits"), &format!("{what}: logits"));
        }
    }
}

#[test]
fn rotary_frequencies_equal_the_golden_ones() {
    let fixture = Fixture::open();
    let layout = ds4_model::cache::CacheLayout::trunk(fixture.checkpoint.config());
    for (rotary, name) in [
        (layout.rotary, "inv_freq.main"),
        (layout.compressed_rotary, "inv_freq.compress"),
    ] {
        let expected = fixture.golden.get(name).f32();
        for (actual, expected) in rotary.frequencies().iter().zip(&expected) {
            assert!(
                (actual / expected - 1.0).abs() < 3e-7,
                "{name}: {actual} != {expected}"
            );
        }
        assert_eq!(rotary.frequencies().len(), expected.len());
    }
}
