//! Drafts of DeepSeek-V4.1 against an independent implementation, and texts of its engine against
//! forward calls.

use burn::tensor::{Device, s};
use burn_ds4_ops::quant::Activations;
use ds4_model::cache::CacheConfig;
use ds4_model::generate::{Engine, EngineConfig, Request};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::common::{compiles_slowly, devices, integer_values, values};
use crate::engine::{must_have_graphs, request, together};
use crate::golden::assert_golden;
use crate::v41_goldens::{Fixture, PLAIN, VARIANTS, tensor};

#[test]
fn drafts_of_v41_equal_the_golden_and_are_taken_back() {
    for (name, device) in devices() {
        for (variant, activations) in VARIANTS {
            let fixture = Fixture::new(variant);
            let model = fixture.load(activations, device);
            let dspark = model.dspark.as_ref().expect("a drafter");
            let targets = &dspark.params.target_layers;
            let options = CacheConfig {
                capacity: 16,
                ..CacheConfig::default()
            };
            let mut cache = model.new_cache(options).expect("valid options");
            let mut drafter = model.new_dspark_cache(options).expect("valid options");
            let lengths = fixture.golden.get("round.tokens").ids();
            let anchors = fixture.golden.get("round.anchor").ids();
            let mut known = 0;
            for (round, (length, anchor)) in lengths.iter().zip(anchors).enumerate() {
                let what = |part: &str| format!("{name}, {variant}, round {round}: {part}");
                let golden = |part: &str| fixture.expected(&format!("s0.round{round}.{part}"));
                let new = fixture.ids(0, known..*length as usize);
                known = *length as usize;
                let tokens = tensor(&new, 1, device);
                let tapped = model.forward_tapped(tokens, &mut cache, targets, &Trace::off());
                let (_, taps) = tapped.expect("a text that fits");
                let trace = Trace::recording();
                let taps = taps.expect("layers are tapped");
                let appended = model.append_dspark(taps, &mut drafter, &trace);
                appended.expect("positions that fit");
                let context: Vec<f32> = trace.take()["dspark.context"].iter().collect();
                let expected = fixture.expected("s0.drafter.main_x");
                let expected = expected.expect("both variants have it");
                let new = (known - new.len()) * 96..known * 96;
                assert_golden(&context, &expected[new], &what("context"));

                let anchors = tensor(&[anchor], 1, device);
                let streams = model.forward_dspark(anchors.clone(), &mut drafter, &trace);
                let streams = streams.expect("a block that fits");
                let drafts = dspark.choose(streams, anchors, model.output.val(), &trace);
                let drafts = drafts.expect("finite logits");
                let records = trace.take();
                let mut compared = 0;
                let mut check = |ours: &str, theirs: &str| {
                    let Some(expected) = golden(theirs) else {
                        return;
                    };
                    let actual: Vec<f32> = records[ours].iter().collect();
                    let first = actual.len() - expected.len();
                    assert_golden(&actual[first..], &expected, &what(theirs));
                    compared += 1;
                };
                for stage in 0..3 {
                    let own = |part: &str| format!("dspark.layer{stage}.{part}");
                    for (ours, theirs, _) in PLAIN {
                        check(&own(ours), &format!("stage{stage}.{theirs}"));
                    }
                }
                check("dspark.hidden", "head_x");
                check("dspark.logits", "logits_base");
                check("dspark.confidence", "confidence");
                assert!(compared >= 7, "{}", what("too little was compared"));
                let ids = |part: &str| -> Vec<i64> {
                    let ids = golden(part).expect("ids of both variants");
                    ids.iter().map(|id| *id as i64).collect()
                };
                assert_eq!(
                    integer_values(drafts.ids),
                    ids("drafts"),
                    "{}",
                    what("drafts")
                );
                // The trunk runs over the anchor and the drafts, which are taken back.
                let verified = ids("verify_ids");
                let logits = model.forward(tensor(&verified, 1, device), &mut cache);
                let logits = values(logits.expect("a text that fits"));
                if let Some(expected) = golden("verify_logits") {
                    assert_golden(&logits, &expected, &what("verification"));
                }
                let removed = cache.remove_newest(verified.len());
                removed.expect("any number can be taken back");
                assert_eq!(cache.lengths(), [known]);
            }
        }
    }
}

#[test]
fn texts_of_v41_are_those_of_forward_calls_with_drafts_lanes_and_kept_prompts() {
    for (name, device) in devices().iter().filter(|(name, _)| !compiles_slowly(name)) {
        let fixture = Fixture::new("exact");
        let model = fixture.load(Activations::Exact, device);
        let prompt = |sequence: usize, length: usize| -> Vec<u32> {
            let ids = fixture.ids(sequence, 0..length).into_iter();
            ids.map(|id| id as u32).collect()
        };
        let requests = [(0, 33), (1, 18), (0, 40)].map(|(sequence, length)| {
            let mut request = Request::new(&prompt(sequence, length), 20);
            request.ignore_eos = true;
            request
        });
        let config = |lanes, drafts, prefix_bytes, prefill_chunk| EngineConfig {
            lanes,
            drafts,
            prefix_bytes,
            prefill_chunk,
            exact_prefix: true,
            page: 16,
            ..EngineConfig::default()
        };
        let calls = |request: &Request| by_calls(&model, &request.prompt, 20, device);
        let expected = requests.each_ref().map(calls);
        for (lanes, drafts) in [(1, 0), (2, 0), (2, 5)] {
            let mut engine = Engine::new(&model, config(lanes, drafts, 0, 512)).expect("valid");
            let texts = together(&mut engine, &requests);
            assert_eq!(texts, expected, "{name}, {lanes} lanes, {drafts} drafts");
        }
        let mut fresh = Engine::new(&model, config(2, 5, 0, 16)).expect("valid");
        let mut keeping = Engine::new(&model, config(2, 5, 1 << 24, 16)).expect("valid");
        let expected = together(&mut fresh, &requests);
        for _ in 0..2 {
            assert_eq!(
                together(&mut keeping, &requests),
                expected,
                "{name}, kept prompts"
            );
        }
    }
}

#[test]
fn recorded_steps_with_engrams_give_the_texts_of_launched_ones() {
    for (name, device) in devices().iter().filter(|(name, _)| must_have_graphs(name)) {
        let fixture = Fixture::new("exact");
        let model = fixture.load(Activations::Exact, device);
        for (lanes, drafts) in [(2, 0), (1, 2)] {
            let config = |graphs| EngineConfig {
                lanes,
                drafts,
                graphs,
                prefix_bytes: 0,
                context: Some(256),
                ..EngineConfig::default()
            };
            let count = config(true).recording_tokens() + 12;
            let requests = [(0, 9), (1, 6)].map(|(sequence, length)| {
                let ids = fixture.ids(sequence, 0..length).into_iter();
                let prompt: Vec<u32> = ids.map(|id| id as u32).collect();
                request(&prompt, count)
            });
            let mut launching = Engine::new(&model, config(false)).expect("valid");
            let expected = together(&mut launching, &requests);
            assert!(expected.iter().all(|text| text.len() == count));
            let mut replaying = Engine::new(&model, config(true)).expect("valid");
            let what = format!("{name}, {lanes} lanes, {drafts} drafts");
            assert_eq!(together(&mut replaying, &requests), expected, "{what}");
            assert_eq!(replaying.graph_refusal(), None, "{what}");
            assert!(replaying.replays() > 8, "{what}: {}", replaying.replays());
        }
    }
}

/// The most likely tokens after a prompt, by forward calls over one token each.
fn by_calls(model: &Model, prompt: &[u32], count: usize, device: &Device) -> Vec<u32> {
    let cache = model.new_cache(CacheConfig::default());
    let mut cache = cache.expect("valid options");
    let mut next = |tokens: &[u32]| -> u32 {
        let ids: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        let logits = model.forward(tensor(&ids, 1, device), &mut cache);
        let logits = logits.expect("a text that fits").slice(s![.., -1..]);
        integer_values(logits.argmax(2))[0] as u32
    };
    // All but the last token of a prompt are processed together.
    let (before, last) = prompt.split_at(prompt.len() - 1);
    next(before);
    let mut text = vec![next(last)];
    while text.len() < count {
        let token = text[text.len() - 1];
        text.push(next(&[token]));
    }
    text
}
