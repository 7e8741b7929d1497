//! The engine: a text has the tokens that it has alone and without drafts, whatever is combined.

use std::collections::BTreeMap;

use burn::module::Param;
use burn::tensor::{FloatDType, Tensor};
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::sampling::MAX_COLUMNS;
use ds4_model::generate::{
    Engine, EngineConfig, FinishReason, GenerateError, LogitsProcessor, MAX_DRAFTS, MAX_LANES,
    Output, Progress, Request, RequestId, SamplingConfig, greedy_token,
};
use ds4_model::trace::Trace;

use crate::common::{few, skip, some};
use crate::flash_head::{CLUSTERS, head};
use crate::two_layers::{
    CAPACITY, Fixture, PAGE, bits, every_model, every_model_in, every_quick_model, text,
};
use crate::warnings::warnings_of;

/// Tokens of a prompt that has no prefill step of its own.
const SHORT: usize = 12;

/// Whether a device replays steps: CPUs do not.
pub(crate) fn has_graphs(name: &str) -> bool {
    !name.starts_with("flex") && !cfg!(feature = "fusion")
}

/// [`has_graphs`], and reports where it is not so.
pub(crate) fn must_have_graphs(name: &str) -> bool {
    let has = has_graphs(name);
    if !has {
        skip(name, "graphs");
    }
    has
}

pub(crate) fn engine<'a>(fixture: &'a Fixture, config: &EngineConfig) -> Engine<'a> {
    Engine::new(&fixture.model, config.clone()).expect("valid options")
}

/// No end-of-sequence token ends the text.
pub(crate) fn request(prompt: &[u32], max_new_tokens: usize) -> Request {
    Request {
        ignore_eos: true,
        ..Request::new(prompt, max_new_tokens)
    }
}

pub(crate) fn sampled(seed: u64) -> SamplingConfig {
    SamplingConfig {
        temperature: 1.2,
        top_k: 100,
        top_p: 0.97,
        min_p: 0.002,
        seed,
        ..SamplingConfig::default()
    }
}

pub(crate) fn penalised(seed: u64) -> SamplingConfig {
    SamplingConfig {
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(5, 4.0), (17, f32::NEG_INFINITY)],
        ..sampled(seed)
    }
}

pub(crate) type Texts = BTreeMap<RequestId, Vec<u32>>;

/// Adds tokens to the texts, and returns how many there are.
pub(crate) fn collect(outputs: Vec<Output>, texts: &mut Texts) -> usize {
    let count = outputs.len();
    for output in outputs {
        let token = output.token.expect("finite logits");
        texts.entry(output.request).or_default().push(token);
    }
    count
}

pub(crate) fn add(engine: &mut Engine, request: Request) -> RequestId {
    engine.add(request).expect("a valid request")
}

/// Steps until no text is left.
fn drain(engine: &mut Engine) -> Texts {
    let mut texts = Texts::new();
    while !engine.is_idle() {
        collect(engine.step().expect("a device that works"), &mut texts);
    }
    texts
}

/// The texts of requests that begin at the same time.
pub(crate) fn together(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<u32>> {
    let add = |request: &Request| add(engine, request.clone());
    let ids: Vec<RequestId> = requests.iter().map(add).collect();
    let mut texts = drain(engine);
    let texts = ids.iter().map(|id| texts.remove(id).unwrap_or_default());
    texts.collect()
}

/// The text of a request by itself, without drafts and graphs.
pub(crate) fn alone(fixture: &Fixture, request: &Request) -> Vec<u32> {
    alone_in_chunks(fixture, request, EngineConfig::default().prefill_chunk)
}

/// The same with a prompt in chunks of so many tokens, which rounding depends on.
fn alone_in_chunks(fixture: &Fixture, request: &Request, prefill_chunk: usize) -> Vec<u32> {
    let config = EngineConfig {
        lanes: 1,
        graphs: false,
        prefill_chunk,
        ..EngineConfig::default()
    };
    together(&mut engine(fixture, &config), std::slice::from_ref(request)).remove(0)
}

#[test]
fn greedy_tokens_are_those_of_the_highest_logits() {
    every_model(|name, fixture| {
        let count = few(name, 30, 12);
        let prompt = &fixture.prompt[..SHORT];
        let actual = alone(fixture, &request(prompt, count));
        let mut cache = fixture.cache(CAPACITY);
        fixture.streams(&prompt[..SHORT - 1], &mut cache, &Trace::off());
        let mut tokens = vec![prompt[SHORT - 1]];
        while tokens.len() <= count {
            let streams = fixture.streams(&tokens[tokens.len() - 1..], &mut cache, &Trace::off());
            let row = fixture.logits(streams).remove(0);
            tokens.push(greedy_token(&row).expect("finite logits"));
        }
        assert_eq!(actual, tokens[1..], "{name}");
    });
}

/// Numbers without a pattern.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

/// How much a device has time for: tokens of all texts, at most of one, and of one prompt.
fn extent(name: &str) -> [usize; 3] {
    match name {
        _ if name.starts_with("cuda") => [700, 120, 60],
        "flex F32" => [200, 30, 50],
        _ if name.starts_with("wgpu") => [30, 12, 20],
        _ => [60, 20, 20],
    }
}

/// By dtype, so that a filter takes one of them: on CUDA, most of the time goes into kernels.
fn join_and_leave_at_random(dtype: FloatDType) {
    every_model_in(&[dtype], |name, fixture| {
        let [most, longest, prompt] = extent(name);
        let any = text(120);
        let cases = [(2, 1, 8), (1, 0, 8), (3, 3, 4)];
        for &(seed, drafts, lanes) in &cases[..few(name, cases.len(), 1)] {
            let config = EngineConfig {
                drafts,
                lanes,
                page: PAGE,
                prefill_chunk: 32,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let mut random = Random(seed);
            let mut requests: BTreeMap<RequestId, (Request, bool)> = BTreeMap::new();
            let (mut texts, mut tokens) = (Texts::new(), 0);
            while tokens < most {
                if random.below(3) == 0 {
                    let length = 1 + random.below(prompt);
                    let start = random.below(any.len() - length + 1);
                    let count = 1 + random.below(longest);
                    let kinds = [SamplingConfig::default(), sampled(9), penalised(4)];
                    let request = Request {
                        sampling: SamplingConfig {
                            seed: random.below(1 << 20) as u64,
                            ..kinds[random.below(3)].clone()
                        },
                        ..request(&any[start..start + length], count)
                    };
                    let id = add(&mut engine, request.clone());
                    requests.insert(id, (request, false));
                }
                let index = random.below(requests.len().max(1));
                if random.below(9) == 0
                    && let Some((id, (_, left))) = requests.iter_mut().nth(index)
                    && engine.progress(*id).is_some()
                {
                    engine.abort(*id).expect("it is there");
                    *left = true;
                }
                tokens += collect(engine.step().expect("a device that works"), &mut texts);
            }
            for (id, rest) in drain(&mut engine) {
                texts.entry(id).or_default().extend(rest);
            }
            assert_eq!(engine.graph_refusal(), None, "{name}");
            for (id, (request, left)) in &requests {
                // The same, but for what is combined.
                let expected = alone_in_chunks(fixture, request, config.prefill_chunk);
                let actual = texts.remove(id).unwrap_or_default();
                let what = format!("{name}, {drafts} drafts: request {id}");
                assert_eq!(actual.len() < expected.len(), *left, "{what}");
                assert_eq!(actual, expected[..actual.len()], "{what}");
            }
            let left = requests.values().filter(|(_, left)| *left).count();
            if name.starts_with("cuda") || name == "flex F32" {
                assert!(left > 0, "{name}: none left");
            }
        }
    });
}

#[test]
fn texts_in_f32_that_join_and_leave_at_random_are_those_that_they_are_alone() {
    join_and_leave_at_random(FloatDType::F32);
}

#[test]
fn texts_in_bf16_that_join_and_leave_at_random_are_those_that_they_are_alone() {
    join_and_leave_at_random(FloatDType::BF16);
}

/// The tokens of one text, with the logits of each where they are known.
pub(crate) fn with_logits(engine: &mut Engine, request: Request) -> Vec<(u32, Option<Vec<u32>>)> {
    let id = add(engine, request);
    let mut tokens = Vec::new();
    while !engine.is_idle() {
        let outputs = engine.step().expect("a device that works");
        let outputs = outputs.into_iter().filter(|output| output.request == id);
        tokens.extend(outputs.map(|output| (output.token.expect("finite logits"), None)));
        if let Some(row) = engine.logits(id).expect("a device that works") {
            let last = tokens.last_mut().expect("logits come with a token");
            last.1 = Some(bits(&row));
        }
    }
    tokens
}

#[test]
fn logits_are_those_of_a_lone_text_to_the_bit_with_drafts_and_beside_others() {
    every_model(|name, fixture| {
        let count = few(name, 32, 14);
        let one = EngineConfig {
            graphs: false,
            steps_ahead: 0,
            ..EngineConfig::default()
        };
        let own = request(&fixture.prompt, count);
        let expected = with_logits(&mut engine(fixture, &one), own.clone());
        let known = expected.iter().filter(|(_, row)| row.is_some()).count();
        assert_eq!(known, count - 1, "{name}: all but those of the last token");
        for &(drafts, neighbours) in some(name, &[(2, 2), (0, 3), (2, 0)], 3) {
            let config = EngineConfig {
                drafts,
                page: PAGE,
                graphs: true,
                ..one.clone()
            };
            let mut engine = engine(fixture, &config);
            for neighbour in 0..neighbours {
                add(
                    &mut engine,
                    request(&fixture.prompt[..9 + neighbour], count),
                );
            }
            let actual = with_logits(&mut engine, own.clone());
            let mut compared = 0;
            assert_eq!(actual.len(), expected.len(), "{name}");
            for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                let what = format!("{name}, {drafts} drafts, {neighbours} beside, token {index}");
                assert_eq!(actual.0, expected.0, "{what}");
                if let (Some(actual), Some(expected)) = (&actual.1, &expected.1) {
                    assert!(actual == expected, "{what}: logits");
                    compared += 1;
                }
            }
            assert!(compared > count / 3, "{name}: only {compared} compared");
        }
    });
}

#[test]
fn a_recorded_step_with_penalties_serves_texts_of_any_length() {
    every_model(|name, fixture| {
        if !has_graphs(name) {
            return;
        }
        let config = EngineConfig {
            lanes: 1,
            page: PAGE,
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        let requests = [
            (5, penalised(1), 24),
            (7, sampled(2), 24),
            (9, penalised(3), 40),
        ];
        let requests = requests.map(|(length, sampling, count)| Request {
            sampling,
            ..request(&fixture.prompt[..length], count)
        });
        let ids = requests.clone().map(|own| add(&mut engine, own));
        let texts = drain(&mut engine);
        for (id, request) in ids.iter().zip(&requests) {
            assert_eq!(texts[id], alone(fixture, request), "{name}: text {id}");
        }
        // Two steps are launched before each of two kinds is recorded. The last text has more pages
        // than that for which its step was.
        assert_eq!(engine.replays(), 24 + 24 + 40 - 4, "{name}");
    });
}

#[test]
fn a_recorded_step_serves_texts_that_join_after_it() {
    every_model(|name, fixture| {
        if !has_graphs(name) {
            return;
        }
        let requests = [(5, 100), (7, 34), (12, 9), (3, 20), (4, 20)];
        let requests = requests.map(|(length, count)| request(&fixture.prompt[..length], count));
        let expected = requests.each_ref().map(|own| alone(fixture, own));
        for &drafts in some(name, &[1, 0], 2) {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let mut ids = vec![add(&mut engine, requests[0].clone())];
            ids.push(add(&mut engine, requests[1].clone()));
            let mut texts = Texts::new();
            while engine.graphs().recordings == 0 || engine.lanes() < 2 {
                assert_eq!(engine.graph_refusal(), None, "{name}");
                assert!(!engine.is_idle(), "{name}: no step was recorded");
                collect(engine.step().expect("a device that works"), &mut texts);
            }
            assert!(engine.graphs().bytes.is_some(), "{name}");
            while engine.progress(ids[1]).is_some() {
                collect(engine.step().expect("a device that works"), &mut texts);
            }
            let replays = engine.replays();
            ids.push(add(&mut engine, requests[2].clone()));
            collect(engine.step().expect("a device that works"), &mut texts);
            collect(engine.step().expect("a device that works"), &mut texts);
            assert!(engine.replays() > replays, "{name}: recorded anew");
            assert_eq!(
                (engine.lanes(), engine.graphs().recordings),
                (2, 1),
                "{name}"
            );
            // A third lane: what was recorded has another shape.
            ids.extend([3, 4].map(|index| add(&mut engine, requests[index].clone())));
            for (id, rest) in drain(&mut engine) {
                texts.entry(id).or_default().extend(rest);
            }
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(texts[id], *expected, "{name}: {id}");
            }
        }
    });
}

#[test]
fn more_tokens_a_step_than_have_the_same_bits_give_texts_all_the_same() {
    every_quick_model(|name, fixture| {
        // Where steps are recorded, enough for that to be worth while.
        let count = if has_graphs(name) { 48 } else { 6 };
        // The second fills all lanes that there may be.
        for (texts, drafts, most) in [(20, 2, 32), (MAX_LANES - 20, 0, MAX_LANES)] {
            let requests: Vec<Request> = (0..texts)
                .map(|index| request(&fixture.prompt[..4 + index % 20], count))
                .collect();
            let texts = [false, true].map(|graphs| {
                let config = EngineConfig {
                    drafts,
                    graphs,
                    ..EngineConfig::default()
                };
                let mut engine = engine(fixture, &config);
                let ids: Vec<RequestId> = requests
                    .iter()
                    .map(|own| add(&mut engine, own.clone()))
                    .collect();
                let (mut texts, mut lanes) = (Texts::new(), 0);
                while !engine.is_idle() {
                    collect(engine.step().expect("a device that works"), &mut texts);
                    lanes = lanes.max(engine.lanes());
                }
                assert_eq!(lanes, most, "{name}");
                let replays = graphs && has_graphs(name);
                assert_eq!(engine.graph_refusal(), None, "{name}");
                assert_eq!(engine.replays() > 0, replays, "{name}");
                ids.iter().map(|id| texts[id].clone()).collect::<Vec<_>>()
            });
            let [launched, texts] = texts;
            assert_eq!(launched, texts, "{name}: recorded steps");
            assert!(texts.iter().all(|text| text.len() == count), "{name}");
            let same = texts.iter().zip(&requests).take(20);
            let same = same.filter(|(text, request)| {
                let first = Request {
                    max_new_tokens: 6,
                    ..(*request).clone()
                };
                text[..6] == alone(fixture, &first)
            });
            let same = same.count();
            // Near ties may go either way.
            assert!(same >= 15, "{name}: only {same} of 20 are those alone");
        }
    });
}

thread_local! {
    pub(crate) static CALLS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The logits as they are, by a function that cannot be recorded when it is called for the third
/// time, which is when it would be.
pub(crate) fn unrecordable(logits: Tensor<3>) -> Tensor<3> {
    let device = logits.device();
    CALLS.set(CALLS.get() + 1);
    // Nothing is recorded on the CPU, where this would but take long.
    if CALLS.get() != 3 || Ok(&device) == DeviceSpec::Flex.init().as_ref() {
        return logits;
    }
    // No memory was left behind for this, and some devices refuse to upload.
    let nothing = Tensor::<1>::zeros([1 << 30], &device).narrow(0, 0, 1);
    let nothing = nothing + Tensor::<1>::from_data([0.0], &device);
    logits + nothing.unsqueeze()
}

#[test]
fn a_recording_that_fails_loses_no_tokens() {
    every_model(|name, fixture| {
        // Enough for a recording to be worth while.
        let requests = [(5, 60), (SHORT, 20)];
        let requests = requests.map(|(length, count)| request(&fixture.prompt[..length], count));
        let expected = requests.each_ref().map(|own| alone(fixture, own));
        for &drafts in some(name, &[0, 2], 2) {
            let config = EngineConfig {
                drafts,
                lanes: 1,
                ..EngineConfig::default()
            };
            CALLS.set(0);
            let engine = engine(fixture, &config);
            let mut engine = engine.with_logits_processor(unrecordable as LogitsProcessor);
            let id = add(&mut engine, requests[0].clone());
            if name.starts_with("cuda") {
                // Kernels with assembly are taken to write whatever they are given, and so the
                // model is lost. That is said.
                let error = loop {
                    match engine.step() {
                        Ok(_) => assert!(!engine.is_idle(), "the weights count as failed"),
                        Err(error) => break error.to_string(),
                    }
                };
                let said = error.contains("capture") && error.contains("loaded again");
                assert!(said, "{error}");
                return;
            }
            let texts = drain(&mut engine);
            assert_eq!(texts[&id], expected[0], "{name}");
            assert_eq!(engine.replays(), 0, "{name}");
            let reason = engine.graph_refusal();
            assert_eq!(reason.is_some(), has_graphs(name), "{name}");
            if let Some(reason) = reason {
                assert!(reason.contains("capture"), "{name}: {reason}");
                assert!(!reason.contains('\n'), "{name}: {reason}");
            }
            let id = add(&mut engine, requests[1].clone());
            let texts = drain(&mut engine);
            assert_eq!(texts[&id], expected[1], "{name}: afterwards");
        }
    });
}

#[test]
fn another_thread_goes_on_without_the_recording_of_the_first() {
    every_model(|name, fixture| {
        // Few enough for the other thread not to record.
        let own = request(&fixture.prompt[..SHORT], 24);
        let expected = alone(fixture, &own);
        let mut engine = engine(fixture, &EngineConfig::default());
        let id = add(&mut engine, own);
        let mut texts = Texts::new();
        let steps = |engine: &mut Engine, texts: &mut Texts, count: usize| {
            for _ in 0..count {
                collect(engine.step().expect("a device that works"), texts);
            }
        };
        steps(&mut engine, &mut texts, 8);
        assert_eq!(engine.replays() > 0, has_graphs(name), "{name}");
        std::thread::scope(|scope| {
            let other = scope.spawn(|| steps(&mut engine, &mut texts, 6));
            other.join().expect("it decodes");
        });
        for (_, rest) in drain(&mut engine) {
            texts.entry(id).or_default().extend(rest);
        }
        assert_eq!(texts[&id], expected, "{name}");
    });
}

#[test]
fn text_chosen_by_clustered_heads_that_probe_all_is_that_of_the_dense_head() {
    every_model(|name, fixture| {
        let mut clustered = fixture.clone();
        clustered.model.flash_head = Some(head(&fixture.model, CLUSTERS));
        let mtp = clustered.model.mtp.as_mut().expect("an MTP layer");
        mtp.flash_head = Some(head(&fixture.model, CLUSTERS));
        for (sampling, drafts) in [(SamplingConfig::default(), 2), (penalised(7), 1)] {
            let own = Request {
                sampling,
                ..request(&fixture.prompt[..SHORT], few(name, 40, 20))
            };
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let mut engine = engine(&clustered, &config);
            let text = together(&mut engine, std::slice::from_ref(&own)).remove(0);
            assert_eq!(text, alone(fixture, &own), "{name}, {drafts} drafts");
            assert_eq!(engine.graph_refusal(), None, "{name}");
            assert!(engine.stats().accepted > 0, "{name}");
        }
    });
}

#[test]
fn a_long_prompt_stalls_others_for_one_chunk_at_a_time() {
    every_quick_model(|name, fixture| {
        let any = text(120);
        let config = EngineConfig {
            prefill_chunk: 16,
            steps_ahead: 0,
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        let requests = [request(&any[..3], 30), request(&any[..100], 4)];
        let first = add(&mut engine, requests[0].clone());
        let mut texts = Texts::new();
        while texts.is_empty() {
            collect(engine.step().expect("a device that works"), &mut texts);
        }
        let second = add(&mut engine, requests[1].clone());
        let mut seen = Vec::new();
        while !texts.contains_key(&second) {
            let before = texts[&first].len();
            collect(engine.step().expect("a device that works"), &mut texts);
            assert!(texts[&first].len() > before, "{name}: it stalled");
            seen.extend(
                engine
                    .progress(second)
                    .filter(|progress| progress.generated == 0),
            );
        }
        let processed: Vec<usize> = seen.iter().map(|progress| progress.processed).collect();
        assert_eq!(processed, [16, 32, 48, 64, 80, 96], "{name}");
        let expected = Progress {
            prompt: 100,
            processed: 16,
            generated: 0,
        };
        assert_eq!(seen[0], expected, "{name}");
        for (id, rest) in drain(&mut engine) {
            texts.entry(id).or_default().extend(rest);
        }
        for (id, request) in [first, second].iter().zip(&requests) {
            let own = std::slice::from_ref(request);
            let alone = together(&mut self::engine(fixture, &config), own);
            assert_eq!(texts[id], alone[0], "{name}");
        }
    });
}

#[test]
fn a_prompt_that_begins_like_a_text_before_continues_from_it() {
    every_quick_model(|name, fixture| {
        let any = text(120);
        for (exact, drafts) in [(true, 0), (true, 1), (false, 0)] {
            let config = EngineConfig {
                drafts,
                prefill_chunk: 32,
                prefix_bytes: usize::MAX,
                exact_prefix: exact,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let before = [request(&any[..90], 10), request(&any[60..90], 3)];
            let before = together(&mut engine, &before);
            let fresh = |own: &Request| {
                let config = EngineConfig {
                    prefix_bytes: 0,
                    ..config.clone()
                };
                together(
                    &mut self::engine(fixture, &config),
                    std::slice::from_ref(own),
                )
                .remove(0)
            };
            // The conversation goes on; another begins like it; one is shorter; one is the same;
            // one begins like none; one is all that is kept of a text.
            let on = [&any[..90], &before[0], &any[100..110]].concat();
            let mut other = any[..100].to_vec();
            other[70] ^= 1;
            let whole = [&any[60..90], &before[1][..2]].concat();
            // Positions that need not be processed.
            let cases = [
                (on, if exact { 64 } else { 99 }),
                (other, 64),
                (any[..40].to_vec(), 32),
                (any[..90].to_vec(), if exact { 64 } else { 85 }),
                (any[30..60].to_vec(), 0),
                (whole, if exact { 0 } else { 25 }),
            ];
            for (prompt, kept) in cases {
                let own = request(&prompt, 8);
                let id = add(&mut engine, own.clone());
                let mut outputs = engine.step().expect("a device that works");
                let processed = engine.progress(id).map(|progress| progress.processed);
                let next = (kept + 32 - kept % 32).min(prompt.len() - 1);
                let placed = next == prompt.len() - 1;
                if !placed {
                    assert_eq!(processed, Some(next), "{name}, exact: {exact}");
                }
                while !engine.is_idle() {
                    outputs.extend(engine.step().expect("a device that works"));
                }
                let what = format!("{name}, exact: {exact}, {} tokens", prompt.len());
                let cached: Vec<usize> = outputs.iter().map(|output| output.cached).collect();
                assert_eq!(cached, [kept; 8], "{what}");
                let mut texts = Texts::new();
                collect(outputs, &mut texts);
                if exact {
                    assert_eq!(texts[&id], fresh(&own), "{what}");
                }
            }
        }
    });
}

#[test]
fn what_is_kept_of_texts_is_bounded_by_bytes() {
    every_model(|name, fixture| {
        if name != "flex F32" {
            return;
        }
        let any = text(120);
        let kept = |prefix_bytes| {
            let config = EngineConfig {
                prefill_chunk: 32,
                prefix_bytes,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            // The first is used again before the third comes, so that the second goes.
            for range in [0..60, 50..110, 0..60, 20..80] {
                together(&mut engine, &[request(&any[range], 2)]);
            }
            [0..60, 50..110, 20..80].map(|range| {
                let id = add(&mut engine, request(&any[range], 1));
                engine.step().expect("a device that works");
                let known = engine
                    .progress(id)
                    .is_none_or(|progress| progress.processed > 32);
                drain(&mut engine);
                known
            })
        };
        assert_eq!(kept(usize::MAX), [true, true, true]);
        assert_eq!(kept(1), [false, false, false]);
        assert_eq!(kept(0), [false, false, false]);
    });
}

#[test]
fn texts_of_any_lengths_are_decoded_by_one_step_and_have_the_pages_that_they_need() {
    every_quick_model(|name, fixture| {
        let any = text(120);
        let config = EngineConfig {
            page: PAGE,
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        let requests = [request(&any[..3], 25), request(&any[..110], 6)];
        let ids = requests.clone().map(|request| add(&mut engine, request));
        let mut texts = Texts::new();
        let mut sizes = None;
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            let [short, long] = ids.map(|id| engine.capacity(id));
            sizes = sizes.or(short.zip(long));
        }
        assert_eq!(sizes, Some((PAGE, 8 * PAGE)), "{name}");
        for (id, request) in ids.iter().zip(&requests) {
            assert_eq!(texts[id], alone(fixture, request), "{name}");
        }
    });
}

#[test]
fn memory_for_caches_is_bounded_and_texts_wait_for_it() {
    every_quick_model(|name, fixture| {
        let config = EngineConfig {
            page: PAGE,
            // For two texts, and one more for the one of them that needs it.
            pages: Some(3),
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        let requests = [3, 5, 7, 9].map(|length| request(&fixture.prompt[..length], 12));
        let ids = requests.clone().map(|request| add(&mut engine, request));
        let (mut texts, mut most) = (Texts::new(), 0);
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            most = most.max(engine.running());
            let pages = ids.map(|id| engine.capacity(id).unwrap_or(0));
            assert!(pages.iter().sum::<usize>() <= 3 * PAGE, "{name}");
        }
        assert_eq!(most, 2, "{name}");
        for (id, request) in ids.iter().zip(&requests) {
            assert_eq!(texts[id], alone(fixture, request), "{name}");
        }

        // So few bytes that no text fits.
        let config = EngineConfig {
            cache_bytes: Some(1000),
            ..EngineConfig::default()
        };
        let mut engine = self::engine(fixture, &config);
        let error = engine.add(request(&fixture.prompt, 4));
        let error = error.expect_err("it never fits").to_string();
        assert!(error.contains("cache_bytes"), "{error}");
        // Bytes for three texts by themselves, of which one prompt is on its way, or a few more.
        let config = EngineConfig {
            page: PAGE,
            ..EngineConfig::default()
        };
        let bytes = {
            let mut engine = self::engine(fixture, &config);
            let id = add(&mut engine, request(&fixture.prompt[..3], 4));
            while engine.capacity(id).is_none() {
                engine.step().expect("a device that works");
            }
            engine.cache_bytes()
        };
        let config = EngineConfig {
            cache_bytes: Some(6 * bytes),
            ..config
        };
        let mut engine = self::engine(fixture, &config);
        let ids = requests.clone().map(|request| add(&mut engine, request));
        let (mut texts, mut most) = (Texts::new(), 0);
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            most = most.max(engine.running());
            assert!(engine.cache_bytes() <= 6 * bytes, "{name}");
        }
        assert!((1..4).contains(&most), "{name}: {most}");
        for (id, request) in ids.iter().zip(&requests) {
            assert_eq!(texts[id], alone(fixture, request), "{name}");
        }
    });
}

#[test]
fn texts_end_by_length_by_a_stop_token_and_where_the_context_ends() {
    every_quick_model(|name, fixture| {
        for drafts in [0, 2] {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let prompt = &fixture.prompt[..SHORT];
            let tokens = alone(fixture, &request(prompt, 30));
            let end = (9..30).find(|&end| !tokens[..end].contains(&tokens[end]));
            let end = end.expect("a token that was not there before");
            let mut short = fixture.clone();
            short.model.config.max_position_embeddings = SHORT + 20;
            let mut ending = fixture.clone();
            ending.model.config.eos_token_id = tokens[end];
            let own = |max_new_tokens| request(prompt, max_new_tokens);
            let stopping = Request {
                stop_tokens: vec![tokens[end]],
                ..own(30)
            };
            let ended = Request {
                ignore_eos: false,
                ..own(30)
            };
            let cases = [
                (fixture, own(7), 7, FinishReason::Length),
                (fixture, own(1), 1, FinishReason::Length),
                (fixture, stopping, end + 1, FinishReason::StopToken),
                (&ending, ended, end + 1, FinishReason::EndOfSequence),
                (&ending, own(30), 30, FinishReason::Length),
                (&short, own(30), 21, FinishReason::ContextFull),
            ];
            for (fixture, own, count, reason) in cases {
                let mut engine = engine(fixture, &config);
                add(&mut engine, own);
                let mut outputs = Vec::new();
                while !engine.is_idle() {
                    outputs.extend(engine.step().expect("a device that works"));
                }
                let finish: Vec<_> = outputs.iter().map(|output| output.finish).collect();
                let text: Result<Vec<u32>, _> =
                    outputs.into_iter().map(|output| output.token).collect();
                let text = text.expect("finite logits");
                assert_eq!(text, tokens[..count], "{name}, {drafts} drafts: {reason:?}");
                assert_eq!(finish[count - 1], Some(reason), "{name}, {drafts} drafts");
                assert!(finish[..count - 1].iter().all(Option::is_none), "{name}");
            }
        }
    });
}

#[test]
fn drafts_count_up_to_the_end_of_a_text_and_none_in_its_first_step() {
    every_quick_model(|name, fixture| {
        let config = EngineConfig {
            drafts: 2,
            ..EngineConfig::default()
        };
        let run = |own: Request| {
            // Each step adds three tokens.
            let mut engine = engine(fixture, &config).with_acceptance(1.0, 0);
            let text = together(&mut engine, &[own]).remove(0);
            (text, engine.stats().clone())
        };
        let own = request(&fixture.prompt[..SHORT], 12);
        let (text, _) = run(own.clone());
        let is_new = |end: &usize| !text[..*end].contains(&text[*end]);
        let ends: Vec<usize> = (3..text.len()).filter(is_new).collect();
        assert!(ends.iter().any(|end| end % 3 < 2), "{name}: {text:?}");
        for end in ends {
            let (ended, stats) = run(Request {
                stop_tokens: vec![text[end]],
                ..own.clone()
            });
            assert_eq!(ended, text[..=end], "{name}");
            let drafted = 2 * (end / 3 - 1) + end % 3;
            let expected = (end / 3, drafted, drafted);
            let actual = (stats.steps, stats.drafted, stats.accepted);
            assert_eq!(actual, expected, "{name}: {end} tokens before the last");
        }
    });
}

/// No number at all for the text in the first lane.
fn nothing_first(logits: Tensor<3>) -> Tensor<3> {
    let [_, rows, vocabulary] = logits.dims();
    let none = logits.clone().narrow(0, 0, 1).full_like(f32::NAN);
    logits.slice_assign([0..1, 0..rows, 0..vocabulary], none)
}

#[test]
fn a_text_without_a_number_among_its_logits_ends_and_leaves_the_others_alone() {
    every_model(|name, fixture| {
        let requests = [5, SHORT].map(|length| request(&fixture.prompt[..length], 10));
        let engine = engine(fixture, &EngineConfig::default());
        let mut engine = engine.with_logits_processor(nothing_first as LogitsProcessor);
        let ids = requests.clone().map(|request| add(&mut engine, request));
        let (mut texts, mut errors) = (Texts::new(), Vec::new());
        while !engine.is_idle() {
            for output in engine.step().expect("a device that works") {
                match output.token {
                    Ok(token) => texts.entry(output.request).or_default().push(token),
                    Err(error) => errors.push((output.request, error)),
                }
            }
        }
        let expected = fixture.model.config().vocab_size;
        assert!(
            matches!(
                errors[..],
                [(id, GenerateError::NoCandidate { len }), ..] if id == ids[0] && len == expected
            ),
            "{name}: {errors:?}"
        );
    });
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    every_model(|name, fixture| {
        let config = EngineConfig {
            graphs: false,
            steps_ahead: 0,
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        let own = Request {
            log_probs: Some(3),
            ..request(&fixture.prompt[..SHORT], 6)
        };
        let id = add(&mut engine, own);
        let mut compared = 0;
        while !engine.is_idle() {
            let outputs = engine.step().expect("a device that works");
            let Some(logits) = engine.logits(id).expect("a device that works") else {
                continue;
            };
            let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - highest).exp()).sum();
            let of = |token: u32| f64::from(logits[token as usize] - highest) - sum.ln();
            let mut best: Vec<u32> = (0..logits.len() as u32).collect();
            best.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            for output in outputs {
                let token = output.token.expect("finite logits");
                let listed = output.log_probs.expect("they were asked for");
                let near = |actual: f32, token| (f64::from(actual) - of(token)).abs() < 1e-4;
                assert!(near(listed.chosen, token), "{name}: {}", listed.chosen);
                let ids: Vec<u32> = listed.top.iter().map(|(id, _)| *id).collect();
                assert_eq!(ids, best[..3], "{name}");
                assert!(
                    listed.top.iter().all(|(id, value)| near(*value, *id)),
                    "{name}"
                );
                compared += 1;
            }
        }
        assert_eq!(compared, 5, "{name}");
    });
}

#[test]
fn nothing_is_chosen_where_no_logit_is_a_number() {
    every_model(|name, fixture| {
        let mut broken = fixture.clone();
        let output = broken.model.output.val();
        broken.model.output = Param::from_tensor(output.full_like(f32::NAN));
        for drafts in [0, 2] {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let mut engine = engine(&broken, &config);
            add(&mut engine, request(&fixture.prompt[..3], 100));
            let mut outputs = Vec::new();
            while !engine.is_idle() {
                outputs.extend(engine.step().expect("a device that works"));
            }
            assert_eq!(outputs.len(), 1, "{name}");
            let error = outputs.remove(0).token.expect_err("nothing can be chosen");
            let expected = fixture.model.config().vocab_size;
            let is_it = matches!(error, GenerateError::NoCandidate { len } if len == expected);
            assert!(is_it, "{name}: {error}");
        }
    });
}

#[test]
fn drafts_without_a_number_are_dropped_and_the_text_is_as_without_drafts() {
    every_model(|name, fixture| {
        // Enough for a step to be recorded.
        let count = 40;
        let own = Request {
            sampling: sampled(6),
            ..request(&fixture.prompt[..SHORT], count)
        };
        let expected = alone(fixture, &own);
        let mut damaged = fixture.clone();
        let mtp = damaged.model.mtp.as_mut().expect("an MTP layer");
        let weight = mtp.stream_norm.weight.val();
        mtp.stream_norm.weight = Param::from_tensor(weight.full_like(f32::NAN));
        let mut clustered = damaged.clone();
        let mtp = clustered.model.mtp.as_mut().expect("an MTP layer");
        mtp.flash_head = Some(head(&fixture.model, 4));
        let cases = [(&damaged, 1), (&clustered, 1), (&damaged, 3)];
        for (fixture, drafts) in &cases[..few(name, cases.len(), 1)] {
            let config = EngineConfig {
                drafts: *drafts,
                lanes: 1,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let (mut texts, warnings) =
                warnings_of(|| together(&mut engine, std::slice::from_ref(&own)));
            assert_eq!(texts.remove(0), expected, "{name}, {drafts} drafts");
            // Once, though each step drops some.
            let name_of = "the MTP layer (`mtp.0`)";
            let warning = format!("{name_of} has no numbers to draft by: its drafts are dropped");
            assert_eq!(warnings, [warning], "{name}, {drafts} drafts");
            let stats = engine.stats();
            assert_eq!((stats.drafted, stats.accepted), (0, 0), "{name}");
            // All of each step but the first, as far as the text wants tokens after the next.
            let dropped: usize = (0..count - 1).map(|wanted| wanted.min(*drafts)).sum();
            assert_eq!(stats.dropped, dropped, "{name}, {drafts} drafts");
            assert_eq!(engine.graph_refusal(), None, "{name}");
            assert_eq!(engine.replays() > 0, has_graphs(name), "{name}");
        }
    });
}

#[test]
fn what_an_engine_cannot_do_is_a_typed_error() {
    every_model(|name, fixture| {
        if name != "flex F32" {
            return;
        }
        let refused = |config: EngineConfig| {
            let error = Engine::new(&fixture.model, config).expect_err("it cannot");
            error.to_string()
        };
        let base = EngineConfig::default;
        let cases = [
            (
                EngineConfig { lanes: 0, ..base() },
                "lanes must be at least 1",
            ),
            (
                EngineConfig {
                    lanes: 257,
                    ..base()
                },
                "`lanes` is 257, expected 1..=256",
            ),
            (
                EngineConfig {
                    drafts: MAX_DRAFTS + 1,
                    ..base()
                },
                "`drafts` is 9, expected 0..=8",
            ),
            (
                EngineConfig {
                    prefill_chunk: 0,
                    ..base()
                },
                "`prefill_chunk` is 0, expected at least 1",
            ),
            (
                EngineConfig { page: 0, ..base() },
                "page must be at least 1",
            ),
        ];
        for (config, expected) in cases {
            assert_eq!(refused(config), expected);
        }
        let mut large = fixture.clone();
        large.model.config.vocab_size = MAX_COLUMNS + 1;
        let error = Engine::new(&large.model, base()).expect_err("it cannot");
        let expected =
            "the model's vocabulary has 1048577 tokens, at most 1048576 can be chosen from";
        assert_eq!(error.to_string(), expected);

        let mut plain = fixture.clone();
        plain.model.mtp = None;
        let config = EngineConfig {
            drafts: 1,
            ..base()
        };
        let error = Engine::new(&plain.model, config).expect_err("it cannot");
        assert!(matches!(error, GenerateError::NoDrafter), "{error}");

        let mut engine = engine(fixture, &base());
        let sampling = |change: fn(&mut SamplingConfig)| {
            let mut request = request(&[1], 1);
            change(&mut request.sampling);
            request
        };
        let cases = [
            (request(&[], 1), "the prompt is empty"),
            (request(&[1], 0), "max_new_tokens must be at least 1"),
            (
                request(&[1, 1 << 20], 1),
                "`prompt[1]` is token 1048576, but the model's vocabulary has",
            ),
            (
                request(&vec![1; 100_000], 1),
                "the prompt has 100000 tokens, the context",
            ),
            (
                Request {
                    log_probs: Some(21),
                    ..request(&[1], 1)
                },
                "`log_probs` is 21, expected at most 20",
            ),
            (
                sampling(|sampling| sampling.temperature = f32::NAN),
                "sampling parameter `temperature` is NaN",
            ),
            (
                sampling(|sampling| sampling.top_p = 0.0),
                "sampling parameter `top_p` is 0",
            ),
            (
                sampling(|sampling| sampling.min_p = 1.5),
                "sampling parameter `min_p` is 1.5",
            ),
            (
                sampling(|sampling| sampling.repetition_penalty = 0.0),
                "sampling parameter `repetition_penalty` is 0",
            ),
            (
                sampling(|sampling| sampling.presence_penalty = 2.5),
                "sampling parameter `presence_penalty` is 2.5",
            ),
            (
                sampling(|sampling| sampling.frequency_penalty = -3.0),
                "sampling parameter `frequency_penalty` is -3",
            ),
            (
                sampling(|sampling| sampling.logit_bias = vec![(1, 0.5), (1, 0.5)]),
                "`logit_bias[1]`: token 1 has an entry already",
            ),
            (
                sampling(|sampling| sampling.logit_bias = vec![(u32::MAX, 0.5)]),
                "`logit_bias[0]`: token 4294967295 is outside the vocabulary",
            ),
            (
                sampling(|sampling| sampling.logit_bias = vec![(1, f32::INFINITY)]),
                "`logit_bias[0]`: inf is neither a number nor -inf",
            ),
        ];
        for (request, expected) in cases {
            let error = engine.add(request).expect_err("it cannot").to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        assert!(engine.is_idle());
        let id = add(&mut engine, request(&[1], 1));
        drain(&mut engine);
        let error = engine.abort(id).expect_err("it has ended").to_string();
        assert_eq!(error, "request 0 is not known, or has ended");
        assert_eq!(engine.step().expect("nothing to do").len(), 0);
    });
}
