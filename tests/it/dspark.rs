//! The DSpark drafter: every intermediate tensor of a random one and every draft of a trained one,
//! against independent implementations; and the engine's texts with it.

use std::cell::RefCell;
use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor, TensorData};
use ds4_model::cache::{Cache, CacheConfig};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::dspark::{BlockDrafts, Dspark};
use ds4_model::flash_head::ProbedHead;
use ds4_model::generate::{
    Engine, EngineConfig, FinishReason, Request, SamplingConfig, TokenLogProbs,
};
use ds4_model::model::Model;
use ds4_model::placement::Placement;
use ds4_model::trace::Trace;
use serde_json::Value;

use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};

use crate::common::{absolute, assert_close, compiles_slowly, devices, integer_values, skip};
use crate::constraints::by_thirds;
use crate::devices::pairs;
use crate::ds4_tiny::ids_tensor;
use crate::engine::{Texts, add, collect, must_have_graphs, request, together};
use crate::golden::{Golden, TOLERANCE, assert_golden, root};

const RANDOM: &str = "tests/fixtures/dspark-goldens";
const TRAINED: &str = "tests/fixtures/ds4-tiny-dspark";
const PROMPTS: [&str; 3] = ["short", "medium", "long"];
const LAYERS: usize = 3;
const BLOCK: usize = 5;
/// Blocks of each case of the random model.
const ROUNDS: usize = 5;
/// A gap below this may be decided by rounding.
const TIE: f64 = 1e-5;

/// Devices on which a test is quick: others have the golden block, drafts and text.
fn quick_devices() -> impl Iterator<Item = &'static (String, Device)> {
    devices().iter().filter(|(name, _)| !compiles_slowly(name))
}

fn load(dir: &str, options: &LoadOptions, device: &Device) -> Model {
    let checkpoint = Checkpoint::open(&root().join(dir)).expect("it is a checkpoint");
    checkpoint.load(options, device).expect("it loads")
}

fn dspark(model: &Model) -> &Dspark {
    model.dspark.as_ref().expect("the checkpoint has a drafter")
}

fn rows(values: &[f32], width: usize, device: &Device) -> Tensor<3> {
    let data = TensorData::new(values.to_vec(), [1, values.len() / width, width]);
    Tensor::from_data(data, device)
}

/// All drafts of a block that begins with `anchor`, after which the cache is as before.
fn draft(model: &Model, anchor: i64, cache: &mut Cache, trace: &Trace) -> BlockDrafts {
    let tokens = ids_tensor(&[anchor], &model.embedding.val().device());
    let streams = model.forward_dspark(tokens.clone(), cache, trace);
    let streams = streams.expect("a block that fits");
    let drafts = dspark(model).choose(streams, tokens, model.output.val(), trace);
    drafts.expect("finite logits")
}

#[test]
fn every_intermediate_tensor_of_a_block_equals_the_golden() {
    let golden = Golden::open(&format!("{RANDOM}/golden.safetensors"));
    for (name, device) in devices() {
        let cases = match compiles_slowly(name) {
            true => &["window"][..],
            false => &[
                "short",
                "window",
                "long",
                "kvq.short",
                "kvq.window",
                "kvq.long",
            ],
        };
        for case in cases {
            let prompt = case.trim_start_matches("kvq.");
            let options = LoadOptions {
                quantized_cache: prompt.len() < case.len(),
                ..LoadOptions::default()
            };
            let model = load(RANDOM, &options, device);
            let options = CacheConfig {
                capacity: 16,
                ..CacheConfig::default()
            };
            let mut cache = model.new_dspark_cache(options).expect("valid options");
            let width = golden.get(&format!("{prompt}.taps")).shape[1];
            let append = |name: &str, cache: &mut Cache| {
                let taps = golden.get(name).f32();
                let trace = Trace::recording();
                let taps = rows(&taps, width, device);
                let appended = model.append_dspark(taps, cache, &trace);
                appended.expect("positions that fit");
                trace.take()["dspark.context"]
                    .try_to_vec::<f32>()
                    .expect("f32")
            };
            let context = append(&format!("{prompt}.taps"), &mut cache);
            let what = format!("{name}, {case}: context of the prompt");
            assert_golden(
                &context,
                &golden.get(&format!("{prompt}.main_x")).f32(),
                &what,
            );
            // With rounded rows, what a round was told last is not among the golden tensors.
            for round in 0..ROUNDS {
                let key = |part: &str| format!("{case}.round{round}.{part}");
                let blocks = format!("{prompt}.round{round}.block_ids");
                let anchor = match golden.find(&key("block_ids")) {
                    Some(block) => block.ids()[0],
                    None if round == 0 => golden.get(&blocks).ids()[0],
                    None => golden
                        .get(&format!("{case}.round{}.next_anchor", round - 1))
                        .ids()[0],
                };
                let trace = Trace::recording();
                let drafts = draft(&model, anchor, &mut cache, &trace);
                let records = trace.take();
                let check = |record: &str, part: &str| {
                    if let Some(expected) = golden.find(&key(part)) {
                        let actual = records[record].try_to_vec::<f32>().expect("f32");
                        let first = actual.len() - expected.values.len();
                        let what = format!("{name}, {}", key(part));
                        assert_golden(&actual[first..], &expected.f32(), &what);
                    }
                };
                for layer in 0..LAYERS {
                    let record = |part: &str| format!("dspark.layer{layer}.{part}");
                    let part = |part: &str| format!("stage{layer}.{part}");
                    check(&record("attention.rows"), &part("block_kv"));
                    check(&record("attention.output"), &part("attn"));
                    check(&record("output"), &part("out"));
                }
                check("dspark.hidden", "head_x");
                check("dspark.logits", "logits_base");
                check("dspark.confidence", "confidence");
                let expected = golden.get(&key("drafts")).ids();
                let what = format!("{name}, {}", key("drafts"));
                assert_eq!(integer_values(drafts.ids), expected, "{what}");
                if golden.find(&key("commit_taps")).is_none() {
                    continue;
                }
                let context = append(&key("commit_taps"), &mut cache);
                if let Some(expected) = golden.find(&key("commit_main_x")) {
                    assert_golden(&context, &expected.f32(), &what);
                }
                assert_rows(&model, &mut cache, &golden, &key("after"), name);
            }
        }
    }
}

/// Compares the rows that a draft sees with golden rings, in which the row of a position is in slot
/// `position % slots`.
fn assert_rows(model: &Model, cache: &mut Cache, golden: &Golden, key: &str, name: &str) {
    let trace = Trace::recording();
    draft(model, 0, cache, &trace);
    let records: BTreeMap<String, TensorData> = trace.take();
    let positions = cache.lengths()[0];
    for layer in 0..LAYERS {
        let ring = golden.get(&format!("{key}.ring{layer}"));
        let [slots, width] = [ring.shape[0], ring.shape[1]];
        let ring = ring.f32();
        let seen = records[&format!("dspark.layer{layer}.attention.rows")].try_to_vec::<f32>();
        let seen = seen.expect("f32");
        assert_eq!(seen.len(), (slots + BLOCK) * width, "{name}, {key}");
        for position in positions.saturating_sub(slots)..positions {
            let row = (position + slots - positions) * width;
            let slot = position % slots * width;
            let what = format!("{name}, {key}.ring{layer}, position {position}");
            assert_golden(&seen[row..row + width], &ring[slot..slot + width], &what);
        }
    }
}

#[test]
fn taps_of_the_trunk_equal_the_golden() {
    let golden = Golden::open(&format!("{RANDOM}/golden.safetensors"));
    for (name, device) in quick_devices() {
        let model = load(RANDOM, &LoadOptions::default(), device);
        let targets = &dspark(&model).params.target_layers;
        for prompt in ["short", "window", "long"] {
            let mut cache = model
                .new_cache(CacheConfig::default())
                .expect("valid options");
            let prompt_ids = golden.get(&format!("{prompt}.input_ids")).ids();
            let tokens = ids_tensor(&prompt_ids, device);
            let tapped = model.forward_tapped(tokens, &mut cache, targets, &Trace::off());
            let (_, taps) = tapped.expect("a text that fits");
            let taps = taps.expect("layers are tapped").into_data();
            let expected = golden.get(&format!("{prompt}.taps")).f32();
            let what = format!("{name}: taps of {prompt}");
            assert_golden(&taps.try_to_vec::<f32>().expect("f32"), &expected, &what);
        }
    }
}

/// What is known of the trained drafter.
struct Trained {
    golden: Golden,
    facts: Value,
}

impl Trained {
    fn open() -> Self {
        let facts = std::fs::read(root().join(TRAINED).join("golden.json"));
        Self {
            golden: Golden::open(&format!("{TRAINED}/golden.safetensors")),
            facts: serde_json::from_slice(&facts.expect("it is there")).expect("JSON"),
        }
    }

    fn model(device: &Device, expand: bool) -> Model {
        let options = LoadOptions {
            expand,
            ..LoadOptions::default()
        };
        load("assets/ds4-tiny-dspark", &options, device)
    }

    fn ids(&self, prompt: &str, key: &str) -> Vec<u32> {
        let ids = self.facts[prompt][key].as_array().expect("a list");
        let ids = ids.iter().map(|id| id.as_u64().expect("an id") as u32);
        ids.collect()
    }

    fn rounds(&self, prompt: &str) -> &[Value] {
        self.facts[prompt]["rounds"].as_array().expect("a list")
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn every_draft_and_confidence_of_the_trained_drafter_equals_the_golden() {
    let fixture = Trained::open();
    for (name, device) in devices() {
        let model = Trained::model(device, name == "flex");
        let slow = compiles_slowly(name);
        for prompt in if slow { &PROMPTS[..1] } else { &PROMPTS[..] } {
            let text = [
                fixture.ids(prompt, "input_ids"),
                fixture.ids(prompt, "greedy"),
            ]
            .concat();
            let text: Vec<i64> = text.into_iter().map(i64::from).collect();
            let rounds = fixture.rounds(prompt);
            let rounds = if slow { &rounds[..2] } else { rounds };
            let last = rounds.last().expect("rounds")["pos"]
                .as_u64()
                .expect("a position");
            let mut trunk = model
                .new_cache(CacheConfig::default())
                .expect("valid options");
            let tokens = ids_tensor(&text[..last as usize], device);
            let targets = &dspark(&model).params.target_layers;
            let tapped = model.forward_tapped(tokens, &mut trunk, targets, &Trace::off());
            let (_, taps) = tapped.expect("a text that fits");
            let taps = taps.expect("layers are tapped");
            let mut cache = model
                .new_dspark_cache(CacheConfig::default())
                .expect("valid");
            for (index, round) in rounds.iter().enumerate() {
                let what = format!("{name}, {prompt}: round {index}");
                let position = round["pos"].as_u64().expect("a position") as usize;
                let known = cache.lengths()[0];
                let new = taps.clone().narrow(1, known, position - known);
                let appended = model.append_dspark(new, &mut cache, &Trace::off());
                appended.expect("positions that fit");
                let anchor = round["anchor"].as_i64().expect("a token");
                let trace = Trace::recording();
                let drafts = draft(&model, anchor, &mut cache, &trace);
                let gaps = ["min_draft_margin", "draft_router_gap"].map(|gap| number(&round[gap]));
                if gaps.iter().any(|gap| *gap < TIE) {
                    continue;
                }
                let expected = round["drafts"].as_array().expect("a list").iter();
                let expected: Vec<i64> = expected.map(|id| id.as_i64().expect("an id")).collect();
                assert_eq!(integer_values(drafts.ids.clone()), expected, "{what}");
                let confidence = dspark(&model)
                    .confidence(&drafts)
                    .into_data()
                    .try_to_vec::<f32>()
                    .expect("f32");
                let sigmoid = |logit: &f32| 1.0 / (1.0 + (-logit).exp());
                let confidence: Vec<f32> = confidence.iter().map(sigmoid).collect();
                let expected = round["confidence"].as_array().expect("a list").iter();
                let expected: Vec<f32> = expected.map(|value| number(value) as f32).collect();
                // The golden file has four digits.
                let allowed = TOLERANCE + 5e-5;
                assert_close(&confidence, &expected, absolute(allowed), &what);
                let key = format!("{prompt}.round{index}.logits_base");
                if let Some(expected) = fixture.golden.find(&key) {
                    let records = trace.take();
                    let actual = records["dspark.logits"].try_to_vec::<f32>().expect("f32");
                    assert_close(&actual, &expected.f32(), absolute(1e-3), &what);
                }
            }
        }
    }
}

#[test]
fn greedy_text_and_the_acceptance_of_every_round_equal_the_golden() {
    let fixture = Trained::open();
    for (name, device) in devices() {
        let model = Trained::model(device, name == "flex");
        let slow = compiles_slowly(name);
        for prompt in if slow { &PROMPTS[..1] } else { &PROMPTS[..] } {
            let expected = fixture.ids(prompt, "greedy");
            let count = if slow { 6 } else { expected.len() };
            let config = EngineConfig {
                drafts: BLOCK,
                graphs: false,
                prefill_chunk: 50,
                page: 16,
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(&model, config).expect("valid options");
            let id = add(
                &mut engine,
                request(&fixture.ids(prompt, "input_ids"), count),
            );
            let (mut texts, mut lengths) = (Texts::new(), Vec::new());
            while !engine.is_idle() {
                let outputs = engine.step().expect("a device that works");
                if !outputs.is_empty() {
                    lengths.push(collect(outputs, &mut texts));
                }
            }
            let what = format!("{name}: {prompt}");
            assert_eq!(texts[&id], expected[..count], "{what}");
            // The first step has no drafts; the last may run past the end.
            let rounds = fixture
                .rounds(prompt)
                .iter()
                .zip(&lengths[1..lengths.len() - 1]);
            for (index, (round, length)) in rounds.enumerate() {
                let gaps = ["min_draft_margin", "draft_router_gap", "verify_topk_gap"];
                let tie = gaps.iter().any(|gap| number(&round[gap]) < TIE);
                let accepted = round["accepted"].as_u64().expect("a count") as usize;
                assert!(tie || *length == 1 + accepted, "{what}: round {index}");
            }
        }
    }
}

fn sampled(seed: u64, penalties: f32) -> SamplingConfig {
    SamplingConfig {
        temperature: 0.8,
        top_k: 50,
        seed,
        repetition_penalty: 1.0 + penalties,
        presence_penalty: penalties,
        ..SamplingConfig::default()
    }
}

#[test]
fn texts_are_those_without_drafts_whatever_is_combined() {
    let fixture = Trained::open();
    for (name, device) in quick_devices() {
        let mut model = Trained::model(device, name == "flex");
        let any = fixture.ids("long", "input_ids");
        let of = |range: std::ops::Range<usize>, sampling| Request {
            sampling,
            ..request(&any[range], 40)
        };
        let requests = [
            of(0..1, SamplingConfig::default()),
            of(10..47, sampled(3, 0.0)),
            of(0..90, sampled(4, 0.2)),
        ];
        let plain = EngineConfig {
            lanes: 1,
            graphs: false,
            ..EngineConfig::default()
        };
        let alone: Vec<Vec<u32>> = requests
            .iter()
            .map(|request| {
                let mut engine = Engine::new(&model, plain.clone()).expect("valid options");
                together(&mut engine, std::slice::from_ref(request)).remove(0)
            })
            .collect();
        let cases = [(5, 0.0, false), (3, 0.0, true), (4, 0.4, false)];
        for (drafts, draft_confidence, clustered) in cases {
            let dspark = model.dspark.as_mut().expect("a drafter");
            dspark.flash_head = clustered.then(|| {
                let output = model.output.val();
                let clusters = output.dims()[0] / 16;
                let head = FlashHead::build(output, clusters, &BuildOptions::default(), |_| {});
                ProbedHead::new(head.expect("a matrix"), clusters / 4).expect("fewer than all")
            });
            let config = EngineConfig {
                lanes: 3,
                drafts,
                draft_confidence,
                page: 16,
                prefill_chunk: 32,
                ..EngineConfig::default()
            };
            assert!(drafts == 5 || config.is_deterministic());
            let lanes = if drafts == 5 { 2 } else { 3 };
            let mut engine = Engine::new(&model, EngineConfig { lanes, ..config });
            let engine = engine.as_mut().expect("valid options");
            let texts = together(engine, &requests);
            let what = format!("{name}, {drafts} drafts, confidence {draft_confidence}");
            assert_eq!(texts, alone, "{what}, clustered {clustered}");
            let stats = engine.stats();
            assert_eq!(stats.dropped, 0, "{what}");
            let accepted = 1..stats.drafted;
            assert!(accepted.contains(&stats.accepted), "{what}: {stats:?}");
        }
    }
}

#[test]
fn texts_of_unequal_lengths_have_the_drafts_that_they_have_alone() {
    let fixture = Trained::open();
    for (name, device) in quick_devices() {
        let model = Trained::model(device, name == "flex");
        let any = fixture.ids("long", "input_ids");
        // Shorter and longer than the window; the last is drawn.
        let requests = [(0..3, 0.0), (20..61, 0.0), (0..130, 0.8)].map(|(range, temperature)| {
            let sampling = SamplingConfig {
                temperature,
                ..SamplingConfig::default()
            };
            Request {
                sampling,
                ..request(&any[range], 40)
            }
        });
        let run = |lanes: usize, requests: &[Request]| {
            let config = EngineConfig {
                lanes,
                // With the next token, 15 rows of three lanes, as many as those of their blocks.
                drafts: 4,
                prefill_chunk: 32,
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(&model, config).expect("valid options");
            let texts = together(&mut engine, requests);
            (texts, engine.stats().drafted, engine.stats().accepted)
        };
        let alone: Vec<_> = requests
            .iter()
            .map(|request| run(1, std::slice::from_ref(request)))
            .collect();
        assert!(alone.iter().all(|text| text.2 > 0), "{name}: {alone:?}");
        let texts: Vec<_> = alone.iter().map(|text| text.0[0].clone()).collect();
        let drafted = alone.iter().map(|text| text.1).sum();
        let accepted = alone.iter().map(|text| text.2).sum();
        let together = run(3, &requests);
        assert_eq!(together, (texts, drafted, accepted), "{name}");
    }
}

#[test]
fn a_prompt_that_begins_like_a_text_before_has_the_drafts_of_a_fresh_one() {
    let (_, device) = &devices()[0];
    let (fixture, model) = (Trained::open(), Trained::model(device, true));
    let text = fixture.ids("long", "input_ids");
    let run = |prefix_bytes: usize| {
        let config = EngineConfig {
            drafts: BLOCK,
            lanes: 8,
            prefill_chunk: 32,
            prefix_bytes,
            exact_prefix: true,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, config).expect("valid options");
        // Longer than the window, so that the rows of its beginning are overwritten meanwhile.
        together(&mut engine, &[request(&text[..200], 8)]);
        let (drafted, accepted) = (engine.stats().drafted, engine.stats().accepted);
        // Differs from the text after 150 tokens.
        let other = [&text[..150], &text[40..60]].concat();
        let id = add(&mut engine, request(&other, 30));
        let (mut texts, mut steps) = (Texts::new(), 0);
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            steps += usize::from(texts.is_empty());
        }
        let stats = engine.stats();
        let drafts = [stats.drafted - drafted, stats.accepted - accepted];
        (texts.remove(&id), drafts, steps)
    };
    let (fresh, reused) = (run(0), run(256 << 20));
    assert!(fresh.1[1] > 0, "{fresh:?}");
    assert_eq!((&reused.0, reused.1), (&fresh.0, fresh.1));
    // Four chunks less.
    assert_eq!(reused.2 + 4, fresh.2);
}

#[test]
fn drafts_in_which_the_drafter_has_no_confidence_are_left_out() {
    let (fixture, drafts) = (Trained::open(), BLOCK);
    let (_, device) = &devices()[0];
    let model = Trained::model(device, true);
    let prompt = fixture.ids("medium", "input_ids");
    let acceptance = [0.0, 0.5, 1.0].map(|draft_confidence| {
        let config = EngineConfig {
            drafts,
            draft_confidence,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, config).expect("valid options");
        together(&mut engine, &[request(&prompt, 60)]);
        let stats = engine.stats();
        assert_eq!(stats.dropped, 0);
        (stats.drafted, stats.acceptance())
    });
    let [all, likely, none] = acceptance;
    assert!(
        likely.0 < all.0 && likely.0 > 0 && none.0 == 0,
        "{acceptance:?}"
    );
    assert!(likely.1 > 1.2 * all.1, "{acceptance:?}");
}

#[test]
fn drafts_that_are_left_out_are_not_verified() {
    thread_local! {
        /// Rows of each step.
        static ROWS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    }
    let (_, device) = &devices()[0];
    let (fixture, model) = (Trained::open(), Trained::model(device, true));
    let count = 60;
    let expected = &fixture.ids("medium", "greedy")[..count];
    let requests = [request(&fixture.ids("medium", "input_ids"), count)];
    for draft_confidence in [0.0, 0.3, 1.0] {
        let config = EngineConfig {
            drafts: BLOCK,
            draft_confidence,
            // Steps before a recording verify all.
            graphs: false,
            ..EngineConfig::default()
        };
        let engine = Engine::new(&model, config).expect("valid options");
        let mut engine = engine.with_logits_processor(|logits| {
            ROWS.with_borrow_mut(|rows| rows.push(logits.dims()[1]));
            logits
        });
        assert_eq!(together(&mut engine, &requests)[0], expected);
        let (rows, drafted) = (ROWS.take(), engine.stats().drafted);
        let verified: usize = rows.iter().map(|rows| rows - 1).sum();
        match draft_confidence {
            0.0 => assert_eq!(verified, BLOCK * rows.len()),
            1.0 => assert_eq!((verified, rows.len()), (0, count)),
            // Those after the end of the text do not count as made.
            _ => {
                let sizes: Vec<usize> = (1..=BLOCK).filter(|size| rows.contains(size)).collect();
                assert!(sizes.len() > 2, "{rows:?}");
                let stats = engine.stats();
                assert!(
                    (drafted..drafted + BLOCK).contains(&verified),
                    "{rows:?} {stats:?}"
                );
            }
        }
    }
}

/// A token with what is told of it.
type Told = (u32, Option<TokenLogProbs>, Option<FinishReason>);

fn told(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<Told>> {
    let ids: Vec<_> = requests
        .iter()
        .map(|request| add(engine, request.clone()))
        .collect();
    let mut texts = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for output in engine.step().expect("a device that works") {
            let text = ids.iter().position(|id| *id == output.request);
            let token = output.token.expect("finite logits");
            let text: &mut Vec<Told> = &mut texts[text.expect("a request from above")];
            text.push((token, output.log_probs, output.finish));
        }
    }
    texts
}

#[test]
fn stop_tokens_constraints_and_log_probabilities_are_those_without_drafts() {
    let fixture = Trained::open();
    for (name, device) in quick_devices() {
        let model = Trained::model(device, name == "flex");
        let any = fixture.ids("long", "input_ids");
        let of = |range: std::ops::Range<usize>, sampling| Request {
            sampling,
            log_probs: Some(3),
            ..request(&any[range], 40)
        };
        let config = |lanes, drafts, draft_confidence| EngineConfig {
            lanes,
            drafts,
            draft_confidence,
            page: 16,
            prefill_chunk: 32,
            ..EngineConfig::default()
        };
        let without = |request: &Request| {
            let mut engine = Engine::new(&model, config(1, 0, 0.0)).expect("valid options");
            told(&mut engine, std::slice::from_ref(request)).remove(0)
        };
        let mut stopped = of(0..70, SamplingConfig::default());
        let whole = without(&stopped);
        // Between the drafts of a step, wherever these begin.
        stopped.stop_tokens = vec![whole[17].0];
        let requests = [
            stopped,
            by_thirds(of(10..47, SamplingConfig::default())),
            by_thirds(of(3..40, sampled(7, 0.2))),
            Request {
                log_probs: None,
                ..of(5..30, sampled(3, 0.0))
            },
        ];
        let expected: Vec<Vec<Told>> = requests.iter().map(without).collect();
        let last = expected[0].last().and_then(|last| last.2);
        assert_eq!(last, Some(FinishReason::StopToken), "{name}");
        assert!(expected[0].len() <= 18, "{name}");
        assert_ne!(expected[1], without(&of(10..47, SamplingConfig::default())));
        for (lanes, drafts, confidence) in [(1, 5, 0.0), (1, 5, 0.3), (2, 5, 0.3), (4, 3, 0.0)] {
            let mut engine = Engine::new(&model, config(lanes, drafts, confidence));
            let engine = engine.as_mut().expect("valid options");
            let what = format!("{name}: {lanes} lanes, {drafts} drafts, {confidence}");
            assert!(engine.stats().accepted == 0, "{what}");
            let texts = told(engine, &requests);
            for (index, (text, expected)) in texts.iter().zip(&expected).enumerate() {
                let ids = |text: &[Told]| text.iter().map(|told| told.0).collect::<Vec<_>>();
                assert_eq!(ids(text), ids(expected), "{what}: text {index}");
                for ((_, own, end), (_, other, expected)) in text.iter().zip(expected) {
                    assert_eq!(end, expected, "{what}: text {index}");
                    let values = |told: &Option<TokenLogProbs>| {
                        let told = told.as_ref();
                        told.map(|told| (told.chosen, told.top.clone()))
                    };
                    assert_eq!(values(own), values(other), "{what}: text {index}");
                }
            }
            assert!(engine.stats().accepted > 0, "{what}");
        }
    }
}

#[test]
fn a_round_of_drafts_and_verification_is_one_recording() {
    let fixture = Trained::open();
    for (name, device) in devices() {
        if !must_have_graphs(name) {
            continue;
        }
        if compiles_slowly(name) {
            skip(name, "speed");
            continue;
        }
        let model = Trained::model(device, false);
        let expected = fixture.ids("medium", "greedy");
        let own = request(&fixture.ids("medium", "input_ids"), expected.len());
        for (draft_confidence, recordings) in [(0.0, 1..=1), (0.3, 2..=1 + BLOCK)] {
            let config = EngineConfig {
                drafts: BLOCK,
                draft_confidence,
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(&model, config).expect("valid options");
            // A text before has made the step worth recording.
            together(&mut engine, std::slice::from_ref(&own));
            let id = add(&mut engine, own.clone());
            let (mut texts, mut steps, replays) = (Texts::new(), 0, engine.replays());
            while !engine.is_idle() {
                let outputs = engine.step().expect("a device that works");
                steps += usize::from(!outputs.is_empty());
                collect(outputs, &mut texts);
            }
            let what = format!("{name}, {draft_confidence}: {:?}", engine.graphs());
            assert_eq!(engine.graph_refusal(), None, "{what}");
            assert_eq!(texts[&id], expected, "{what}");
            assert!(recordings.contains(&engine.graphs().recordings), "{what}");
            // Those before a recording are launched.
            let replays = engine.replays() - replays;
            assert!(
                replays + 2 * 6 >= steps && replays > steps / 2,
                "{what}: {replays} of {steps}"
            );
        }
    }
}

#[test]
fn a_text_may_end_in_the_first_of_the_steps_that_are_recorded() {
    let fixture = Trained::open();
    for (name, device) in devices() {
        if !must_have_graphs(name) {
            continue;
        }
        let model = Trained::model(device, false);
        // Both prompts are processed in one chunk.
        let prompt = &fixture.ids("long", "input_ids")[..120];
        let config = EngineConfig {
            lanes: 2,
            drafts: 3,
            draft_confidence: 1e-9,
            steps_ahead: 0,
            prefix_bytes: 1 << 26,
            ..EngineConfig::default()
        };
        let engine = Engine::new(&model, config).expect("valid options");
        // Each step adds as many tokens as it can.
        let mut engine = engine.with_acceptance(1.0, 0);
        for count in [200, 2] {
            add(&mut engine, request(prompt, count));
        }
        let outputs = engine.step().expect("a text that can be kept");
        assert_eq!(engine.graphs().recordings, 4, "{name}");
        let ended = outputs.iter().filter(|output| output.finish.is_some());
        assert_eq!(ended.count(), 1, "{name}");
    }
}

#[test]
fn steps_that_are_recorded_begin_where_the_recording_before_has_ended() {
    let fixture = Trained::open();
    let count = 60;
    let expected = &fixture.ids("short", "greedy")[..count];
    let own = request(&fixture.ids("short", "input_ids"), count);
    for (name, pair) in pairs() {
        if !must_have_graphs(&name) {
            continue;
        }
        let model = Trained::model(&pair[0], false);
        let layers = model.layers.len();
        let placement = Placement::new(&pair, &[1, layers - 1]);
        let model = model.place(placement.expect("layers for each device"));
        let model = model.expect("a placement of as many layers");
        let config = EngineConfig {
            lanes: 2,
            drafts: 1,
            draft_confidence: 0.3,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, config).expect("valid options");
        let texts = together(&mut engine, &[own.clone(), own.clone()]);
        assert_eq!(engine.graph_refusal(), None, "{name}");
        assert!(engine.replays() > 2, "{name}");
        assert_eq!(texts, [expected, expected], "{name}");
    }
}

#[test]
fn more_drafts_than_a_block_has_are_an_error() {
    let (_, device) = &devices()[0];
    let model = Trained::model(device, true);
    for (drafts, draft_confidence, named) in [
        (BLOCK + 1, 0.0, "`drafts` is 6, expected 0..=5"),
        (1, f64::NAN, "`draft_confidence` is NaN"),
        (1, 1.5, "`draft_confidence` is 1.5"),
    ] {
        let config = EngineConfig {
            drafts,
            draft_confidence,
            ..EngineConfig::default()
        };
        let error = Engine::new(&model, config).expect_err("an option out of range");
        assert!(error.to_string().contains(named), "{error}");
    }
}
