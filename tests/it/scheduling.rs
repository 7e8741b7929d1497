//! Who waits for whom: what many texts at once cost each other, in calls, lanes, recordings and
//! memory.

use burn::tensor::{Device, FloatDType};
use ds4_model::generate::{
    EngineConfig, FinishReason, GenerateError, Output, Request, SamplingConfig,
};

use crate::constraints::by_thirds;
use crate::engine::{
    Texts, add, alone, collect, engine, must_have_graphs, penalised, request, sampled, together,
};
use crate::two_layers::{Fixture, PAGE, every_model, every_quick_model, text};

/// Forward calls that take a GPU no longer than a chunk of a prompt.
const CALLS: usize = 4;
/// More steps than any of these texts takes.
const MOST_STEPS: usize = 400;

fn fixture() -> Fixture {
    Fixture::open(&Device::flex(), FloatDType::F32, true)
}

#[test]
fn many_short_prompts_keep_others_waiting_for_no_more_calls_than_a_chunk_takes() {
    let fixture = fixture();
    let any = text(120);
    let mut engine = engine(&fixture, &EngineConfig::default());
    let running: Vec<_> = (0..8)
        .map(|index| add(&mut engine, request(&any[index..index + 2], 60)))
        .collect();
    let mut texts = Texts::new();
    while engine.running() < running.len() {
        collect(engine.step().expect("a device that works"), &mut texts);
    }
    let joining: Vec<Request> = (0..64)
        .map(|index| request(&any[index..index + 32], 2))
        .collect();
    let joining = joining.into_iter().map(|own| add(&mut engine, own));
    let joining: Vec<_> = joining.collect();
    let mut most = 0;
    for _ in 0..MOST_STEPS {
        let before = engine.prompt_calls();
        let told: Vec<usize> = running.iter().map(|id| texts[id].len()).collect();
        collect(engine.step().expect("a device that works"), &mut texts);
        most = most.max(engine.prompt_calls() - before);
        for (id, told) in running.iter().zip(told) {
            assert!(texts[id].len() > told || told == 60, "{id} waits");
        }
        if joining.iter().all(|id| texts.contains_key(id)) {
            assert!(most <= CALLS, "{most} calls between two steps");
            let calls = engine.prompt_calls() - running.len().min(engine.prompt_calls());
            assert!(calls <= 10, "{calls} calls over 64 short prompts");
            return;
        }
    }
    panic!("{} wait", engine.waiting());
}

#[test]
fn lanes_become_fewer_when_few_texts_are_left() {
    every_quick_model(|name, fixture| {
        let any = text(120);
        let own = request(&any[..5], 70);
        let expected = alone(fixture, &own);
        let config = EngineConfig {
            lanes: 8,
            drafts: 1,
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        for index in 0..7 {
            add(&mut engine, request(&any[index..index + 4], 3));
        }
        let id = add(&mut engine, own);
        let (mut texts, mut most, mut last) = (Texts::new(), 0, 0);
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            most = most.max(engine.lanes());
            if engine.running() == 1 {
                last = engine.lanes();
            }
        }
        assert_eq!((most, last), (8, 1), "{name}");
        assert_eq!(texts[&id], expected, "{name}");
    });
}

#[test]
fn lanes_stay_while_texts_come_and_go() {
    let fixture = fixture();
    let any = text(120);
    let mut engine = engine(&fixture, &EngineConfig::default());
    add(&mut engine, request(&any[..5], 90));
    let mut lanes = Vec::new();
    while !engine.is_idle() {
        // Four in all, from time to time, and one alone in between.
        if lanes.len() % 20 == 0 && lanes.len() < 80 {
            for index in 0..3 {
                add(&mut engine, request(&any[index..index + 4], 4));
            }
        }
        engine.step().expect("a device that works");
        lanes.push(engine.lanes());
    }
    let changes = lanes.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(
        changes <= 1 && lanes.contains(&4),
        "{changes} times fewer: {lanes:?}"
    );
}

#[test]
fn what_is_recorded_of_each_kind_of_step_stays_while_others_are_used() {
    every_model(|name, fixture| {
        if !must_have_graphs(name) {
            return;
        }
        let config = EngineConfig {
            lanes: 2,
            drafts: 1,
            ..EngineConfig::default()
        };
        let any = text(60);
        let with = |log_probs, sampling| Request {
            log_probs,
            sampling,
            ..request(&any[..6], 12)
        };
        let kinds = [
            request(&any[..4], 12),
            with(Some(3), SamplingConfig::default()),
            with(None, penalised(5)),
            by_thirds(request(&any[..7], 12)),
            with(Some(0), penalised(6)),
        ];
        let long = request(&any[..5], 400);
        let expected = alone(fixture, &long);
        let mut engine = engine(fixture, &config);
        let id = add(&mut engine, long);
        let mut texts = Texts::new();
        // The second time, all but the first of these is recorded.
        for (round, kinds) in [&kinds[..], &kinds[2..]].into_iter().enumerate() {
            for (index, own) in kinds.iter().enumerate() {
                let own_id = add(&mut engine, own.clone());
                let mut launched = 0;
                while engine.progress(own_id).is_some() {
                    let before = engine.replays();
                    collect(engine.step().expect("a device that works"), &mut texts);
                    launched += usize::from(engine.replays() == before);
                }
                let what = format!("{name}, round {round}, kind {index}");
                assert_eq!(texts[&own_id], alone(fixture, own), "{what}");
                assert!(round == 0 || launched == 0, "{what}: {launched} launched");
                // Back to the first kind, and to what was recorded of it.
                for _ in 0..3 {
                    let before = engine.replays();
                    collect(engine.step().expect("a device that works"), &mut texts);
                    let is_replayed = engine.replays() > before;
                    assert!(
                        is_replayed || (round, index) == (0, 0),
                        "{what}: it is gone"
                    );
                }
                let recordings = engine.graphs().recordings;
                assert_eq!(recordings, if round == 0 { (1 + index).min(4) } else { 4 });
            }
        }
        assert_eq!(engine.graph_refusal(), None, "{name}");
        assert!(engine.progress(id).is_some(), "{name}: too short");
        let told = &texts[&id];
        assert_eq!(told[..], expected[..told.len()], "{name}");
    });
}

/// Steps until no text is left, and returns what was told of all.
fn outputs(engine: &mut ds4_model::generate::Engine) -> Vec<Output> {
    let mut outputs = Vec::new();
    while !engine.is_idle() {
        outputs.extend(engine.step().expect("a device that works"));
    }
    outputs
}

#[test]
fn a_text_for_which_no_page_is_left_ends_with_an_error_that_says_how_many_are_missing() {
    let fixture = fixture();
    for drafts in [0, 3] {
        let config = EngineConfig {
            page: PAGE,
            pages: Some(3),
            drafts,
            ..EngineConfig::default()
        };
        let own = request(&text(20), 100);
        let expected = alone(&fixture, &own);
        let mut engine = engine(&fixture, &config);
        add(&mut engine, own);
        let mut told = outputs(&mut engine);
        let last = told.pop().expect("an output").token;
        let last = last.expect_err("there are no pages for all tokens");
        let is_it = matches!(
            last,
            GenerateError::CacheMemory {
                pages: 4,
                missing: 1,
                ..
            }
        );
        assert!(is_it, "{last}");
        let tokens: Result<Vec<u32>, _> = told.into_iter().map(|output| output.token).collect();
        let tokens = tokens.expect("tokens");
        assert!(tokens.len() > 2, "{drafts} drafts: {} tokens", tokens.len());
        assert_eq!(tokens[..], expected[..tokens.len()], "{drafts} drafts");
        // What never fits is refused, and what ends before it needs more has its end.
        let error = engine.add(request(&text(5 * PAGE), 1));
        let error = error.expect_err("it does not fit");
        let is_it = matches!(error, GenerateError::CacheMemory { missing: 3, .. });
        assert!(is_it, "{error}");
        let own = request(&text(20), 3 * PAGE - 20);
        let expected = alone(&fixture, &own);
        assert_eq!(together(&mut engine, &[own])[0], expected);
    }
}

#[test]
fn a_text_takes_no_page_that_it_never_reaches() {
    let fixture = fixture();
    let config = EngineConfig {
        page: PAGE,
        drafts: 3,
        ..EngineConfig::default()
    };
    let own = request(&text(10), 2 * PAGE - 10);
    let expected = alone(&fixture, &own);
    let mut engine = engine(&fixture, &config);
    let id = add(&mut engine, own);
    let mut texts = Texts::new();
    while !engine.is_idle() {
        collect(engine.step().expect("a device that works"), &mut texts);
        let capacity = engine.capacity(id).unwrap_or(0);
        assert!(capacity <= 2 * PAGE, "{capacity}");
    }
    assert_eq!(texts[&id], expected);
}

#[test]
fn no_text_has_more_pages_than_the_context_of_the_engine_takes_and_texts_end_there() {
    let fixture = fixture();
    let context = 8 * PAGE;
    for drafts in [0, 3] {
        let config = EngineConfig {
            page: PAGE,
            context: Some(context),
            drafts,
            ..EngineConfig::default()
        };
        let own = request(&text(100), 100);
        let expected = alone(&fixture, &own);
        let mut engine = engine(&fixture, &config);
        let id = add(&mut engine, own);
        let (mut told, mut most) = (Vec::new(), 0);
        while !engine.is_idle() {
            told.extend(engine.step().expect("a device that works"));
            most = most.max(engine.capacity(id).unwrap_or(0));
        }
        // With place for the drafts of the last step.
        assert!((context..=context + PAGE).contains(&most), "{most}");
        let last = told.last().expect("an output");
        assert_eq!(last.finish, Some(FinishReason::ContextFull));
        let tokens: Result<Vec<u32>, _> = told.into_iter().map(|output| output.token).collect();
        assert_eq!(tokens.expect("tokens"), expected[..context + 1 - 100]);
        let error = engine.add(request(&text(context + 1), 1));
        let error = error.expect_err("it is too long").to_string();
        assert!(error.contains(&format!("{context}")), "{error}");
        let short = together(&mut engine, &[request(&text(5), 3)]);
        assert_eq!(short[0].len(), 3);
    }
}

#[test]
fn prompts_that_are_processed_together_and_choices_that_share_one_are_as_alone() {
    every_quick_model(|name, fixture| {
        let any = text(120);
        // Steps have 16 tokens at most, and so do calls over several prompts.
        for (lanes, drafts, lengths) in [
            (8, 1, &[4, 3, 5, 4, 4, 1, 3][..]),
            (8, 1, &[30, 5, 4, 9]),
            (64, 0, &[30, 12, 5, 1, 2, 20]),
        ] {
            let config = EngineConfig {
                lanes,
                drafts,
                ..EngineConfig::default()
            };
            let own = |length: &usize| request(&any[100 - length..100], 6);
            let mut requests: Vec<Request> = lengths.iter().map(own).collect();
            // Choices for the last one.
            requests.extend((1..4).map(|seed| Request {
                sampling: sampled(seed),
                ..own(&lengths[lengths.len() - 1])
            }));
            let mut engine = engine(fixture, &config);
            let texts = together(&mut engine, &requests);
            let calls = engine.prompt_calls();
            assert!(
                calls < lengths.len(),
                "{name}, {lanes} lanes: {calls} calls"
            );
            for (index, (text, own)) in texts.iter().zip(&requests).enumerate() {
                let what = format!("{name}, {lanes} lanes, text {index}");
                assert_eq!(*text, alone(fixture, own), "{what}");
            }
        }
    });
}

#[test]
fn a_text_that_gives_way_has_the_tokens_that_it_has_alone() {
    let fixture = fixture();
    let any = text(120);
    for drafts in [0, 3] {
        let config = EngineConfig {
            lanes: 4,
            drafts,
            // Two of the texts fit in the end, and not all of them as they begin.
            page: PAGE,
            pages: Some(12),
            prefill_chunk: 16,
            ..EngineConfig::default()
        };
        let plain = request(&any[..20], 60);
        let requests = [
            plain.clone(),
            Request {
                sampling: penalised(3),
                ..request(&any[5..30], 60)
            },
            by_thirds(request(&any[2..12], 60)),
            Request {
                sampling: sampled(8),
                priority: 1,
                ..request(&any[7..25], 60)
            },
        ];
        let mut engine = engine(&fixture, &config);
        let ids = requests.clone().map(|own| add(&mut engine, own));
        let (mut texts, mut given_way) = (Texts::new(), 0);
        let (mut before, mut known) = (0, [[0; 2]; 4]);
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            // What is told of a text only grows, whether it has given way or not.
            for (known, id) in known.iter_mut().zip(&ids) {
                let Some(progress) = engine.progress(*id) else {
                    continue;
                };
                let own = [progress.processed, progress.generated];
                assert!(
                    own[0] >= known[0] && own[1] >= known[1],
                    "{own:?}, {known:?}"
                );
                *known = own;
            }
            // Nobody joins any more.
            let waiting = engine.waiting();
            given_way += waiting.saturating_sub(before);
            before = waiting;
        }
        assert!(given_way > 0, "{drafts} drafts: there was memory for all");
        for (id, own) in ids.iter().zip(&requests) {
            let config = EngineConfig {
                lanes: 1,
                prefill_chunk: 16,
                ..EngineConfig::default()
            };
            let own = std::slice::from_ref(own);
            let alone = together(&mut self::engine(&fixture, &config), own);
            assert_eq!(texts[id], alone[0], "{drafts} drafts, text {id}");
        }
    }
}
