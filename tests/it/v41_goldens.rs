//! Every intermediate tensor of a random model of DeepSeek-V4.1 against an independent
//! implementation: in one call, in chunks, token by token, and with positions that are taken back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::quant::Activations;
use ds4_model::cache::{CacheConfig, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::config::{AttentionKind, ModelConfig};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::common::{compiles_slowly, devices};
use crate::golden::{Golden, assert_golden, root};

const DIR: &str = "tests/fixtures/v41-goldens";
const BATCH: usize = 2;
const LENGTH: usize = 61;
const PICKS: usize = 6;
/// Inputs of linear maps as they are, and rounded as the released model does.
pub(crate) const VARIANTS: [(&str, Activations); 2] = [
    ("exact", Activations::Exact),
    ("released", Activations::Released),
];

/// Positions of a call. Those that are taken back have other tokens.
#[derive(Clone, Copy)]
enum Call {
    Kept(usize),
    TakenBack(usize),
}
use Call::{Kept, TakenBack};

/// The noise of a software GPU's products of many rows is over the margin of a value at position
/// 20: they end before that.
fn splits(name: &str) -> Vec<(&'static str, Vec<Call>)> {
    if compiles_slowly(name) {
        let few = [[Kept(4); 15].as_slice(), &[Kept(1)]].concat();
        return vec![("first chunks", [3, 17].map(Kept).to_vec()), ("few", few)];
    }
    let mut taken_back = vec![Kept(20)];
    // As many as drafts, and as many as a rollback may be, from odd and even positions.
    for (wrong, right) in [(5, 1), (6, 2), (1, 1), (17, 3), (6, 4), (3, 18)] {
        taken_back.extend([TakenBack(wrong), Kept(right)]);
    }
    taken_back.extend([TakenBack(6); 2]);
    taken_back.extend([Kept(1); 12]);
    vec![
        ("one call", vec![Kept(LENGTH)]),
        ("token by token", vec![Kept(1); LENGTH]),
        ("chunks", [3, 1, 17, 2, 20, 5, 13].map(Kept).to_vec()),
        ("taken back", taken_back),
    ]
}

pub(crate) struct Fixture {
    pub(crate) golden: Golden,
    variant: &'static str,
    config: ModelConfig,
}

impl Fixture {
    pub(crate) fn new(variant: &'static str) -> Self {
        Self {
            golden: Golden::open(&format!("{DIR}/golden.safetensors")),
            variant,
            config: checkpoint().config().clone(),
        }
    }

    pub(crate) fn load(&self, activations: Activations, device: &Device) -> Model {
        let options = LoadOptions {
            activations,
            ..LoadOptions::default()
        };
        checkpoint()
            .load(&options, device)
            .expect("the fixture loads")
    }

    pub(crate) fn ids(&self, sequence: usize, range: Range<usize>) -> Vec<i64> {
        let ids = self.golden.get("input_ids").ids();
        ids[sequence * LENGTH..][range].to_vec()
    }

    /// The rows of a tensor of the positions of a run.
    fn of_run(&self, name: &str, run: &Run) -> Option<Vec<f32>> {
        let mut expected = self.expected(name)?;
        expected.truncate(expected.len() / LENGTH * run.positions);
        Some(expected)
    }

    pub(crate) fn expected(&self, name: &str) -> Option<Vec<f32>> {
        let name = format!("{}.{name}", self.variant);
        self.golden.find(&name).map(|golden| golden.f32())
    }
}

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&root().join(DIR)).expect("the fixture is a checkpoint")
}

pub(crate) fn tensor(ids: &[i64], batch: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(
        TensorData::new(ids.to_vec(), [batch, ids.len() / batch]),
        device,
    )
}

/// What the calls recorded, each with its first position and the number of them.
struct Run {
    positions: usize,
    records: Vec<(usize, usize, BTreeMap<String, TensorData>)>,
}

impl Run {
    fn new(fixture: &Fixture, model: &Model, calls: &[Call], device: &Device) -> Self {
        let options = CacheConfig {
            batch: BATCH,
            // Small, so that the cache grows on the way.
            capacity: 16,
            rollback: Rollback::Bounded(17),
            ..CacheConfig::default()
        };
        let mut cache = model.new_cache(options).expect("the options are valid");
        let (mut records, mut start) = (Vec::new(), 0);
        let drafter = fixture.config.dspark.as_ref().expect("a drafter");
        let taps = &drafter.target_layers;
        for call in calls {
            let trace = Trace::recording();
            let (Kept(count) | TakenBack(count)) = *call;
            let is_kept = matches!(call, Kept(_));
            let tokens = (0..BATCH).flat_map(|sequence| {
                let ids = fixture.ids(sequence, start..(start + count).min(LENGTH));
                let wrong = move |id: i64| if is_kept { id } else { (id + 3) % 180 };
                let mut ids: Vec<i64> = ids.into_iter().map(wrong).collect();
                ids.resize(count, 5);
                ids
            });
            let tokens = tensor(&tokens.collect::<Vec<_>>(), BATCH, device);
            let run = model.forward_tapped(tokens, &mut cache, taps, &trace);
            let (streams, taps) = run.expect("the text fits the context");
            if !is_kept {
                let removed = cache.remove_newest(count);
                removed.expect("as many as can be taken back");
                continue;
            }
            trace.record("final.collapsed", &streams);
            trace.record("taps", &taps.expect("layers are tapped"));
            trace.record("logits", &model.logits(streams));
            records.push((start, count, trace.take()));
            start += count;
        }
        Self {
            positions: start,
            records,
        }
    }

    /// A tensor with a row for each position: those of each sequence. Of what has rows of earlier
    /// positions, too, those of the call.
    fn rows(&self, name: &str, width: Option<usize>) -> [Vec<f32>; BATCH] {
        let mut joined = [(); BATCH].map(|()| Vec::new());
        for (_, count, record) in &self.records {
            let data = record.get(name).unwrap_or_else(|| panic!("no {name}"));
            let data: Vec<f32> = data.iter().collect();
            let of_sequence = data.len() / BATCH;
            let own = width.map_or(of_sequence, |width| count * width);
            for (joined, data) in joined.iter_mut().zip(data.chunks(of_sequence)) {
                joined.extend(&data[of_sequence - own..]);
            }
        }
        joined
    }

    /// For each call that recorded the tensor, for each query: the sequence, the position, and its
    /// row.
    fn queries(&self, name: &str) -> Vec<(usize, usize, Vec<f32>)> {
        let mut found = Vec::new();
        for (start, count, record) in &self.records {
            let Some(data) = record.get(name) else {
                continue;
            };
            let data: Vec<f32> = data.iter().collect();
            let rows = data.chunks(data.len() / (BATCH * count)).enumerate();
            found.extend(
                rows.map(|(query, row)| (query / count, start + query % count, row.to_vec())),
            );
        }
        found
    }
}

/// Ours, theirs, and the width of those that come behind earlier rows.
pub(crate) const PLAIN: [(&str, &str, Option<usize>); 21] = [
    ("attention_connection.pre", "attn.premix", None),
    ("attention_connection.post", "hc_attn.post", None),
    ("attention_connection.comb", "hc_attn.comb", None),
    ("attention_connection.collapsed", "attn.collapsed", None),
    ("attention.low_rank", "attn.qr", None),
    ("attention.queries", "attn.q", None),
    ("attention.rows", "attn.kv", Some(64)),
    ("attention.attended", "attn.o", None),
    ("attention.output", "attn.y", None),
    ("attention.indexer.weights", "index.w", None),
    ("attention.indexer.queries", "index.q", None),
    ("moe_connection.pre", "ffn.premix", None),
    ("moe_connection.post", "hc_ffn.post", None),
    ("moe_connection.comb", "hc_ffn.comb", None),
    ("moe_connection.collapsed", "ffn.collapsed", None),
    ("moe.shared", "ffn.shared", None),
    ("engram.key", "engram.key", None),
    ("engram.value", "engram.value", None),
    ("engram.gate", "engram.gate", None),
    ("engram.output", "engram.out", None),
    ("output", "out", None),
];

/// What has the same bits whoever computes it: codes times scales.
const ROUNDED: [&str; 2] = ["attn.kv", "index.q"];

fn check_layer(fixture: &Fixture, run: &Run, layer: usize, what: &str) {
    let golden = |name: &str| fixture.of_run(&format!("s0.layer{layer}.{name}"), run);
    for (ours, theirs, width) in PLAIN {
        let ours = format!("layer{layer}.{ours}");
        let what = format!("{what}: layer{layer}.{theirs}");
        // An indexer that has no choice to make has neither weights nor queries.
        if theirs.starts_with("index.") && run.records.iter().any(|own| !own.2.contains_key(&ours))
        {
            continue;
        }
        if let Some(expected) = golden(theirs) {
            let [actual, _] = run.rows(&ours, width);
            assert_golden(&actual, &expected, &what);
            assert!(
                !ROUNDED.contains(&theirs) || actual == expected,
                "{what}: a code differs"
            );
        }
    }
    if let (Some(shared), Some(routed)) = (golden("ffn.shared"), golden("ffn.routed")) {
        let both = shared.iter().zip(routed);
        let expected: Vec<f32> = both.map(|(one, other)| one + other).collect();
        let [actual, _] = run.rows(&format!("layer{layer}.moe.output"), None);
        assert_golden(&actual, &expected, &format!("{what}: layer{layer} experts"));
    }
    if let Some(expected) = golden("router.scores") {
        let [logits, _] = run.rows(&format!("layer{layer}.moe.router.logits"), None);
        let score = |logit: &f32| f64::from(*logit).exp().ln_1p().sqrt() as f32;
        let actual: Vec<f32> = logits.iter().map(score).collect();
        assert_golden(&actual, &expected, &format!("{what}: layer{layer} router"));
    }
    for sequence in 0..BATCH {
        check_routes(fixture, run, (sequence, layer), what);
    }
}

/// The order of a token's experts is free: compares weights by expert.
fn check_routes(fixture: &Fixture, run: &Run, (sequence, layer): (usize, usize), what: &str) {
    let experts = fixture.config.n_routed_experts;
    let by_expert = |ids: &[f32], weights: &[f32]| {
        let k = fixture.config.num_experts_per_tok;
        let mut dense = vec![0.0; run.positions * experts];
        for (slot, (id, weight)) in ids.iter().zip(weights).enumerate() {
            dense[slot / k * experts + *id as usize] = *weight;
        }
        dense
    };
    let ours = |part: &str| {
        let rows = run.rows(&format!("layer{layer}.moe.router.{part}"), None);
        rows[sequence].clone()
    };
    let theirs = |part: &str| {
        let name = format!("s{sequence}.layer{layer}.router.{part}");
        fixture
            .of_run(&name, run)
            .expect("routes of both sequences")
    };
    let actual = by_expert(&ours("ids"), &ours("weights"));
    let expected = by_expert(&theirs("ids"), &theirs("weights"));
    let chosen = |dense: &[f32]| -> Vec<bool> { dense.iter().map(|own| *own != 0.0).collect() };
    let what = format!("{what}: s{sequence}.layer{layer} experts");
    assert_eq!(chosen(&actual), chosen(&expected), "{what}");
    assert_golden(&actual, &expected, &what);
}

/// Rows that several layers read, and the picks among them.
fn check_shared(fixture: &Fixture, run: &Run, layer: usize, what: &str) {
    let AttentionKind::Shared(shared) = fixture.config.layers[layer] else {
        return;
    };
    let name = |part: &str| format!("layer{layer}.attention.{part}");
    let (_, _, last) = run.records.last().expect("there was a call");
    if shared.makes_rows() {
        for (ours, theirs) in [("compressed", "comp.row"), ("index_keys", "index.key")] {
            let expected = fixture.expected(&format!("s0.layer{layer}.{theirs}"));
            let mut expected = expected.expect("rows of each layer that makes some");
            // Rows and keys are 64 wide.
            expected.truncate(run.positions / shared.ratio * 64);
            let actual: Vec<f32> = last[&name(ours)].iter().take(expected.len()).collect();
            assert!(
                actual == expected,
                "{what}: layer{layer}.{theirs} has another code"
            );
        }
        if run.records.len() == 1
            && let Some(expected) = fixture.expected(&format!("s0.layer{layer}.comp.latent"))
        {
            let actual: Vec<f32> = last[&name("latent")].iter().take(expected.len()).collect();
            assert_golden(
                &actual,
                &expected,
                &format!("{what}: layer{layer}.comp.latent"),
            );
        }
    }
    if !shared.picks() {
        return;
    }
    let visible = |position: usize| (position + 1) / shared.ratio;
    if let Some(theirs) = fixture.expected(&format!("s0.layer{layer}.index.scores")) {
        let rows = theirs.len() / LENGTH;
        let (mut actual, mut expected) = (Vec::new(), Vec::new());
        for (sequence, position, scores) in run.queries(&name("indexer.scores")) {
            if sequence == 0 {
                actual.extend(&scores[..visible(position)]);
                expected.extend(&theirs[position * rows..][..visible(position)]);
            }
        }
        assert!(actual.len() > 50, "{what}: too few scores were compared");
        assert_golden(&actual, &expected, &format!("{what}: layer{layer} scores"));
    }
    for sequence in 0..BATCH {
        let of = format!("s{sequence}.layer{layer}");
        let golden = |part: &str| fixture.expected(&format!("{of}.index.{part}"));
        let own = |part: &str| {
            let queries = run.queries(&name(part)).into_iter();
            queries.filter(|query| query.0 == sequence)
        };
        let what = format!("{what}: {of}, query at");
        let picks = golden("picks").expect("picks of both sequences");
        // As numbers, or as a mask of all rows.
        let numbers = own("indexer.picks").map(|(_, at, row)| {
            let places = row.iter().map(|pick| *pick as usize);
            (at, places.collect::<Vec<usize>>())
        });
        let masks = own("indexer.picked").map(|(_, at, row)| {
            let places = (0..row.len()).filter(|place| row[*place] != 0.0);
            (at, places.collect())
        });
        let mut compared = 0;
        for (at, ours) in numbers.chain(masks) {
            let ours = ours.into_iter().filter(|place| *place < visible(at));
            let theirs = picks[at * PICKS..][..PICKS].iter();
            let theirs = theirs
                .filter(|pick| **pick >= 0.0)
                .map(|pick| *pick as usize);
            let [ours, theirs] = [ours.collect(), theirs.collect::<BTreeSet<_>>()];
            assert_eq!(ours, theirs, "{what} {at}");
            compared += 1;
        }
        assert!(
            2 * compared > run.positions,
            "{what}: {compared} are too few"
        );
        let Some(candidates) = golden("candidates") else {
            continue;
        };
        let rows = candidates.len() / LENGTH;
        for (_, at, row) in own("indexer.candidates") {
            let expected = &candidates[at * rows..][..visible(at)];
            assert_eq!(&row[..visible(at)], expected, "{what} {at}");
        }
    }
}

#[test]
fn every_intermediate_of_v41_equals_the_golden_in_any_calls() {
    for (name, device) in devices() {
        for (variant, activations) in VARIANTS {
            let fixture = Fixture::new(variant);
            let model = fixture.load(activations, device);
            for (split, calls) in splits(name) {
                let what = format!("{name}, {variant}, {split}");
                let run = Run::new(&fixture, &model, &calls, device);
                for layer in 0..fixture.config.layers.len() {
                    check_layer(&fixture, &run, layer, &what);
                    check_shared(&fixture, &run, layer, &what);
                }
                for ours in ["final.collapsed", "taps", "logits"] {
                    for (sequence, actual) in run.rows(ours, None).iter().enumerate() {
                        let name = format!("s{sequence}.{ours}");
                        if let Some(expected) = fixture.of_run(&name, &run) {
                            assert_golden(actual, &expected, &format!("{what}: {name}"));
                        }
                    }
                }
            }
        }
    }
}
