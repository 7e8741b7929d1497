//! The trained checkpoint against independent implementations: logits, greedy continuations,
//! multi-token-prediction drafts.

use crate::common::{absolute, assert_close, compiles_slowly, devices, some, values};
use crate::golden::{Golden, root};
use burn::tensor::{Device, Int, Tensor, TensorData};
use ds4_model::cache::CacheConfig;
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::generate::{GenerateConfig, Generation, greedy_token};
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use serde_json::Value;

const PROMPTS: [&str; 3] = ["short", "medium", "long"];
const VOCABULARY: usize = 1024;
const EXPERTS: usize = 32;
const LAYERS: usize = 6;
/// Largest error of a logit.
const LOGITS: f64 = 1e-3;
/// A margin or gap below this may be decided by rounding: then, and only then, two implementations
/// may differ.
const TIE: f64 = 1e-4;

struct Fixture {
    checkpoint: Checkpoint,
    golden: Golden,
    facts: Value,
}

impl Fixture {
    fn open() -> Self {
        let facts = std::fs::read(root().join("tests/fixtures/ds4-tiny/golden.json"))
            .expect("the fixture is there");
        Self {
            checkpoint: Checkpoint::open(&root().join("assets/ds4-tiny"))
                .expect("the asset is a checkpoint"),
            golden: Golden::open("tests/fixtures/ds4-tiny/golden.safetensors"),
            facts: serde_json::from_slice(&facts).expect("the fixture is JSON"),
        }
    }

    fn load(&self, expand: bool, device: &Device) -> Model {
        let options = LoadOptions {
            expand,
            ..LoadOptions::default()
        };
        self.checkpoint
            .load(&options, device)
            .expect("the asset loads")
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.golden
            .get(name)
            .ids()
            .iter()
            .map(|id| *id as u32)
            .collect()
    }

    fn prompt(&self, prompt: &str) -> Vec<u32> {
        self.ids(&format!("{prompt}.input_ids"))
    }

    fn greedy(&self, prompt: &str) -> Vec<u32> {
        self.ids(&format!("{prompt}.greedy"))
    }

    fn fact(&self, prompt: &str, name: &str) -> &Value {
        &self.facts["prompts"][prompt][name]
    }

    fn number(&self, prompt: &str, name: &str) -> f64 {
        self.fact(prompt, name)
            .as_f64()
            .unwrap_or_else(|| panic!("no number {prompt}.{name}"))
    }
}

pub(crate) fn ids_tensor<I: Copy + Into<i64>>(ids: &[I], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.iter().map(|id| (*id).into() as i32).collect();
    let count = ids.len();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}

/// The first `rows` of `[1, positions, ..]`, from `start` on, flat.
fn rows<const D: usize>(tensor: Tensor<D>, start: usize, end: usize) -> Vec<f32> {
    values(tensor.narrow(1, start, end - start))
}

struct Outputs {
    logits: Tensor<3>,
    mtp_logits: Tensor<3>,
    records: std::collections::BTreeMap<String, TensorData>,
}

/// Trunk and MTP layer over `ids` in one call each.
fn forward(model: &Model, ids: &[u32], trace: Trace, device: &Device) -> Outputs {
    let mut cache = model
        .new_cache(CacheConfig::default())
        .expect("defaults are valid");
    let streams = model
        .forward_streams(ids_tensor(ids, device), &mut cache, &trace)
        .expect("the text fits the context");
    let mut cache = model
        .new_mtp_cache(CacheConfig::default())
        .expect("defaults are valid");
    let before_last = streams.clone().narrow(1, 0, ids.len() - 1);
    let mtp = model
        .forward_mtp(
            before_last,
            ids_tensor(&ids[1..], device),
            &mut cache,
            &trace,
        )
        .expect("the text fits the context");
    Outputs {
        logits: model.logits(streams),
        mtp_logits: model.mtp_logits(mtp),
        records: trace.take(),
    }
}

#[test]
fn logits_of_trunk_and_mtp_equal_the_golden() {
    let fixture = Fixture::open();
    for (name, device) in devices() {
        // `layer_goldens` has dense weights for devices that compile slowly.
        for &expand in some(name, &[false, true], 2) {
            let model = fixture.load(expand, device);
            for &prompt in some(name, &PROMPTS, 2) {
                let ids = fixture.prompt(prompt);
                let outputs = forward(&model, &ids, Trace::off(), device);
                for (output, which) in [
                    (outputs.logits, "logits"),
                    (outputs.mtp_logits, "mtp_logits"),
                ] {
                    let range = fixture.fact(prompt, &format!("{which}_rows"));
                    let bound = |index: usize| range[index].as_u64().expect("a row") as usize;
                    let actual = rows(output, bound(0), bound(1));
                    let expected = fixture.golden.get(&format!("{prompt}.{which}")).f32();
                    let what = format!("{name}, expand {expand}: {prompt}.{which}");
                    assert_close(&actual, &expected, absolute(LOGITS), &what);
                }
            }
        }
    }
}

#[test]
fn streams_and_experts_of_every_layer_equal_the_golden() {
    let fixture = Fixture::open();
    assert!(
        fixture.number("short", "min_router_gap") > TIE,
        "the fixture has no tie to excuse"
    );
    for (name, device) in devices() {
        let model = fixture.load(false, device);
        let ids = fixture.prompt("short");
        let records = forward(&model, &ids, Trace::recording(), device).records;
        for layer in 0..=LAYERS {
            let ours = if layer < LAYERS {
                format!("layer{layer}")
            } else {
                "mtp".to_string()
            };
            if layer < LAYERS {
                let actual: Vec<f32> = records[&format!("{ours}.output")].iter().collect();
                let expected = fixture
                    .golden
                    .get(&format!("short.layer.{layer}.out"))
                    .f32();
                assert_close(
                    &actual,
                    &expected,
                    absolute(1e-4),
                    &format!("{name}: {ours} output"),
                );
            }
            let dense = |ids: Vec<i64>, weights: Vec<f32>| {
                let mut dense = vec![0.0; ids.len() / 6 * EXPERTS];
                for (slot, (id, weight)) in ids.iter().zip(weights).enumerate() {
                    dense[slot / 6 * EXPERTS + *id as usize] = weight;
                }
                dense
            };
            let record = |part: &str| &records[&format!("{ours}.moe.router.{part}")];
            let actual = dense(
                record("ids").iter().collect(),
                record("weights").iter().collect(),
            );
            let golden = |part: &str| fixture.golden.get(&format!("short.router.{layer}.{part}"));
            let expected = dense(golden("ids").ids(), golden("weights").f32());
            let chosen = |dense: &[f32]| dense.iter().map(|w| *w != 0.0).collect::<Vec<_>>();
            assert_eq!(chosen(&actual), chosen(&expected), "{name}: {ours} experts");
            assert_close(
                &actual,
                &expected,
                absolute(1e-4),
                &format!("{name}: {ours} weights"),
            );
        }
    }
}

/// Compares token by token; a difference is a tie only where the golden margin says so.
fn assert_tokens(actual: &[u32], expected: &[u32], margins: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of tokens");
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            a == e,
            "{what}: token {index} is {a}, not {e}; the golden margin there is {}, {}",
            margins[index],
            if f64::from(margins[index]) < TIE {
                "a tie"
            } else {
                "so this is an error"
            }
        );
    }
}

#[test]
fn greedy_continuations_equal_the_golden_with_and_without_drafts() {
    let fixture = Fixture::open();
    for (name, device) in devices() {
        // A software GPU takes seconds a token: there, the first tokens of one prompt have to do.
        let fast = name == "flex" || name.starts_with("cuda");
        let model = fixture.load(name == "flex", device);
        for prompt in PROMPTS {
            let expected = fixture.greedy(prompt);
            let count = if fast { expected.len() } else { 6 };
            let margins = fixture.golden.get(&format!("{prompt}.greedy_margin")).f32();
            let drafts: &[usize] = match (fast, prompt) {
                (true, "short") => &[0, 1, 2, 3, 4],
                (true, _) => &[0, 1, 4],
                (false, "short") => &[0, 2],
                (false, _) => &[],
            };
            for drafts in drafts {
                let config = GenerateConfig {
                    max_new_tokens: count,
                    drafts: *drafts,
                    prefill_chunk: 50,
                    ..GenerateConfig::default()
                };
                let ids = fixture.prompt(prompt);
                let mut generation =
                    Generation::new(&model, config, &ids).expect("the prompt is valid");
                let actual: Vec<u32> = generation
                    .by_ref()
                    .collect::<Result<_, _>>()
                    .expect("the model generates");
                let what = format!("{name}, {drafts} drafts: {prompt}");
                assert_tokens(&actual, &expected[..count], &margins, &what);
                if fast && *drafts == 1 {
                    let steps = fixture.number(prompt, "spec_rounds_after_first_token") as usize;
                    assert_eq!(generation.stats().steps, steps, "{what}: steps");
                }
            }
        }
    }
}

#[test]
fn every_mtp_draft_and_its_acceptance_equal_the_golden() {
    let fixture = Fixture::open();
    // Greedy continuations have drafts on devices that compile slowly.
    let devices = devices().iter().filter(|(name, _)| !compiles_slowly(name));
    for (name, device) in devices {
        let model = fixture.load(name == "flex", device);
        for &prompt in &PROMPTS {
            let greedy = fixture.greedy(prompt);
            let ids = [fixture.prompt(prompt), greedy.clone()].concat();
            let outputs = forward(&model, &ids, Trace::off(), device);
            let best = |logits: Tensor<3>, start: usize, end: usize| -> Vec<u32> {
                rows(logits, start, end)
                    .chunks(VOCABULARY)
                    .map(|row| greedy_token(row).expect("finite logits"))
                    .collect()
            };
            // The row of a position predicts the next token, that of the MTP layer the one after
            // it.
            let first = ids.len() - greedy.len() - 1;
            let next = best(outputs.logits, first, ids.len() - 1);
            assert_eq!(next, greedy, "{name}: {prompt} teacher-forced");
            let drafts = best(outputs.mtp_logits, first, ids.len() - 1);
            assert_eq!(
                drafts,
                fixture.ids(&format!("{prompt}.mtp_drafts")),
                "{name}: {prompt} drafts"
            );
            let accepted = drafts
                .iter()
                .zip(&greedy[1..])
                .filter(|(draft, token)| draft == token);
            let expected = fixture.fact(prompt, "accepted").as_u64().expect("a count");
            assert_eq!(
                accepted.count() as u64,
                expected,
                "{name}: {prompt} accepted"
            );
        }
    }
}
