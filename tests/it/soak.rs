//! Texts that join, leave and are drafted for at random, for as long as one has time: each has the
//! tokens that it has alone, and the memory stays what it was. docs/testing.md says how to run it.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::tensor::FloatDType;
use burn_ds4_ops::device::DeviceSpec;
use ds4_model::generate::{Engine, EngineConfig, Request, RequestId, SamplingConfig};

use crate::engine::{Random, add, engine, penalised, request, sampled, together};
use crate::two_layers::{Fixture, PAGE, text};

/// Tokens of all texts. With this variable, nothing else must run in the process, whose memory is
/// then measured.
const TOKENS: &str = "DS4_SOAK_TOKENS";
/// Without it.
const FEW_TOKENS: usize = 400;
/// Another device than Flex.
const DEVICE: &str = "DS4_SOAK_DEVICE";
const LONGEST_PROMPT: usize = 30;
/// Of a long run, in which prompts that begin alike are as long as a chunk.
const LONG_PROMPT: usize = 80;
/// Tokens of a chunk.
const CHUNK: usize = 32;
/// Drafts and lanes, no more than 16 tokens a step: texts are the same to the bit.
const KINDS: [[usize; 2]; 10] = [
    [0, 16],
    [1, 8],
    [0, 16],
    [2, 5],
    [0, 8],
    [1, 8],
    [0, 16],
    [3, 4],
    [0, 1],
    [7, 2],
];

/// A request, and what follows its prompt.
struct Known {
    request: Request,
    text: Vec<u32>,
}

/// Of a text in the engine.
struct Running {
    known: usize,
    /// Tokens that it has, and that it will have.
    seen: usize,
    count: usize,
}

/// Engines of a long run, and after how many of them the memory is as large as it gets: a device
/// that compiles has all kernels once each kind had each size of pages.
fn engines(device: DeviceSpec) -> [usize; 2] {
    match device {
        DeviceSpec::Flex => [2 * KINDS.len(), 5],
        _ => [3 * KINDS.len(), 2 * KINDS.len()],
    }
}

/// The model as a device computes it in use.
fn fixture(device: DeviceSpec) -> Fixture {
    let on = device.init().expect("the device is there");
    let dtype = match device != DeviceSpec::Flex && on.supports_dtype(FloatDType::BF16) {
        true => FloatDType::BF16,
        false => FloatDType::F32,
    };
    Fixture::open(&on, dtype, device == DeviceSpec::Flex)
}

/// What has happened.
#[derive(Debug, Default)]
struct Events {
    tokens: usize,
    ended: usize,
    left: usize,
    rejected: usize,
    /// Texts that went on from what was kept, and those whose pages others have got.
    resumed: usize,
    preempted: usize,
}

fn config(round: usize, is_long: bool) -> EngineConfig {
    let [drafts, lanes] = KINDS[round % KINDS.len()];
    EngineConfig {
        lanes,
        drafts,
        page: [PAGE, 2 * PAGE][(round + round / KINDS.len()) % 2],
        prefill_chunk: CHUNK,
        // Any number of texts, or few of those that begin.
        pages: [None, Some(if is_long { 16 } else { 3 })][round / 2 % 2],
        prefix_bytes: [0, 1 << 20][round % 3 / 2],
        exact_prefix: true,
        ..EngineConfig::default()
    }
}

/// Requests of all kinds, with what follows them by themselves.
fn known(
    fixture: &Fixture,
    random: &mut Random,
    [count, longest]: [usize; 2],
    is_long: bool,
) -> Vec<Known> {
    let any = text(300);
    let longest_prompt = if is_long { LONG_PROMPT } else { LONGEST_PROMPT };
    let alone = EngineConfig {
        lanes: 1,
        drafts: 0,
        prefix_bytes: 0,
        pages: None,
        ..config(0, is_long)
    };
    let kinds = [SamplingConfig::default(), sampled(1), penalised(2)];
    let known = (0..count).map(|index| {
        let length = 1 + random.below(longest_prompt);
        // Some begin alike.
        let start = random.below(8) * LONGEST_PROMPT / 2;
        let request = Request {
            sampling: SamplingConfig {
                seed: index as u64,
                ..kinds[index % kinds.len()].clone()
            },
            ..request(&any[start..start + length], longest)
        };
        let own = std::slice::from_ref(&request);
        let text = together(&mut engine(fixture, &alone), own).remove(0);
        Known { request, text }
    });
    known.collect()
}

/// Lets texts join and leave until there are so many tokens, and the rest end.
fn run(
    engine: &mut Engine,
    known: &[Known],
    random: &mut Random,
    tokens: usize,
    events: &mut Events,
) {
    let mut running: BTreeMap<RequestId, Running> = BTreeMap::new();
    let until = events.tokens + tokens;
    while events.tokens < until || !engine.is_idle() {
        if events.tokens < until && engine.waiting() < 2 {
            let index = random.below(known.len());
            let count = 1 + random.below(known[index].text.len());
            let request = Request {
                max_new_tokens: count,
                ..known[index].request.clone()
            };
            // Some are choices for one prompt.
            for _ in 0..1 + usize::from(random.below(4) == 0) {
                let text = Running {
                    known: index,
                    seen: 0,
                    count,
                };
                running.insert(add(engine, request.clone()), text);
            }
        }
        if random.below(100) == 0 && !running.is_empty() {
            let index = random.below(running.len());
            let id = *running.keys().nth(index).expect("it is one of them");
            engine.abort(id).expect("it is there");
            running.remove(&id);
            events.left += 1;
        }
        let had_lane = |id: &&RequestId| engine.capacity(**id).is_some();
        let before: Vec<RequestId> = running.keys().filter(had_lane).copied().collect();
        let outputs = engine.step().expect("a device that works");
        let is_there = |id: &RequestId| engine.progress(*id).is_some();
        let has_lane = |id: &RequestId| engine.capacity(*id).is_some();
        let gone = before.iter().filter(|id| is_there(id) && !has_lane(id));
        events.preempted += gone.count();
        for output in outputs {
            let text = running.get_mut(&output.request).expect("it has not left");
            let token = output.token.expect("finite logits");
            let expected = known[text.known].text[text.seen];
            assert_eq!(
                token, expected,
                "token {} of {:?}",
                text.seen, output.request
            );
            text.seen += 1;
            events.tokens += 1;
            events.resumed += usize::from(text.seen == 1 && output.cached > 0);
            assert_eq!(output.finish.is_some(), text.seen == text.count);
            if output.finish.is_some() {
                running.remove(&output.request);
                events.ended += 1;
            }
        }
    }
    assert!(running.is_empty(), "texts were lost");
    events.rejected += engine.stats().drafted - engine.stats().accepted;
}

/// Bytes of memory that a process has, `self` or a number, where the system tells.
pub(crate) fn resident(process: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes << 10)
}

#[test]
fn texts_that_come_and_go_for_long_are_those_that_they_are_alone() {
    let wanted = std::env::var(TOKENS).ok();
    let tokens = wanted.as_ref().map_or(FEW_TOKENS, |wanted| {
        wanted.parse().expect("a number of tokens")
    });
    let device = std::env::var(DEVICE).map_or(DeviceSpec::Flex, |name| {
        name.parse()
            .unwrap_or_else(|error| panic!("{DEVICE}: {error}"))
    });
    let [long, warm_up] = engines(device);
    let (count, longest, engines) = match wanted {
        Some(_) => (48, 120, long),
        None => (6, 16, KINDS.len()),
    };
    let fixture = fixture(device);
    if wanted.is_some() {
        println!("{device}, {:?}", fixture.model.output.val().dtype());
    }
    let mut random = Random(1);
    let is_long = wanted.is_some();
    let known = known(&fixture, &mut random, [count, longest], is_long);
    let (mut events, mut memory) = (Events::default(), Vec::new());
    let started = Instant::now();
    for round in 0..engines {
        let mut engine = engine(&fixture, &config(round, is_long));
        run(
            &mut engine,
            &known,
            &mut random,
            tokens.div_ceil(engines),
            &mut events,
        );
        drop(engine);
        memory.extend(resident("self"));
        if wanted.is_some() {
            let seconds = started.elapsed().as_secs();
            println!("{seconds} s, {events:?}, memory {:?}", memory.last());
        }
    }
    assert!(events.tokens >= tokens);
    assert!(
        events.ended > 0 && events.left > 0 && events.rejected > 0 && events.preempted > 0,
        "{events:?}"
    );
    assert!(!is_long || events.resumed > 0, "{events:?}");
    if let (Some(_), [_, ..]) = (wanted, &memory[..]) {
        let most = |part: &[u64]| part.iter().copied().max().expect("some engines");
        let [before, after] = [&memory[..warm_up], &memory[warm_up..]].map(most);
        assert!(
            after <= before + before / 100,
            "{before} bytes grew to {after}"
        );
    }
}
