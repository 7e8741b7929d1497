//! When the engine records steps, and what becomes of texts when a device refuses to replay one.

use std::cell::RefCell;

use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use ds4_model::generate::{Engine, EngineConfig, GenerateError, LogitsProcessor, Request};

use crate::common::devices;
use crate::devices::every_pair;
use crate::dspark::{BLOCK, Trained};
use crate::engine::{
    RECORDABLE, Texts, add, alone, collect, engine, launched_calls, must_have_graphs, penalised,
    request, together, unrecordable,
};
use crate::two_layers::{Fixture, every_model};

/// Steps that are launched before one is recorded.
const LAUNCHED: usize = 4;
/// More steps than any of these texts takes.
const MOST_STEPS: usize = 200;

#[test]
fn a_step_is_recorded_when_a_few_were_launched_and_once() {
    every_model(|name, fixture| {
        if !must_have_graphs(name) {
            return;
        }
        for drafts in [0, 2] {
            let config = EngineConfig {
                drafts,
                lanes: 1,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            // Texts that are too short for a recording are enough together.
            let own = request(&fixture.prompt[..5], 2);
            let expected = alone(fixture, &own);
            let mut steps = 0;
            while engine.graphs().recordings == 0 {
                assert_eq!(engine.replays(), 0, "{name}");
                assert!(steps <= LAUNCHED, "{name}, {drafts} drafts");
                let id = add(&mut engine, own.clone());
                let mut texts = Texts::new();
                while !engine.is_idle() {
                    collect(engine.step().expect("a device that works"), &mut texts);
                    steps += 1;
                }
                assert_eq!(texts[&id], expected, "{name}, {drafts} drafts");
            }
            let recorded = engine.replays();
            assert!(recorded > 0 && steps > LAUNCHED, "{name}, {drafts} drafts");
            // The next has it from its first token on.
            let (id, mut texts) = (add(&mut engine, own.clone()), Texts::new());
            let outputs = engine.step().expect("a device that works");
            assert!(!outputs.is_empty() && engine.replays() > recorded, "{name}");
            collect(outputs, &mut texts);
            while !engine.is_idle() {
                collect(engine.step().expect("a device that works"), &mut texts);
            }
            assert_eq!(texts[&id], expected, "{name}, {drafts} drafts");
            assert_eq!(engine.graphs().recordings, 1, "{name}");
            // Another kind of steps is counted by itself.
            let other = Request {
                sampling: penalised(1),
                ..own.clone()
            };
            let expected = alone(fixture, &other);
            let texts = together(&mut engine, std::slice::from_ref(&other));
            assert_eq!(texts, [expected], "{name}, {drafts} drafts");
            assert_eq!(engine.graphs().recordings, 0, "{name}");
            assert_eq!(engine.graph_refusal(), None, "{name}");
        }
    });
}

#[test]
fn steps_of_fewer_rows_are_recorded_beside_those_of_all_when_they_are_needed_often() {
    thread_local! {
        static ROWS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    }
    let fixture = Trained::open();
    let count = 44;
    let expected = &fixture.ids("medium", "greedy")[..count];
    let own = request(&fixture.ids("medium", "input_ids"), count);
    for (name, device) in devices() {
        if !must_have_graphs(name) {
            continue;
        }
        let model = Trained::model(device, false);
        let config = EngineConfig {
            drafts: BLOCK,
            // No step has a draft to verify.
            draft_confidence: 1.0,
            ..EngineConfig::default()
        };
        let engine = Engine::new(&model, config).expect("valid options");
        let count_rows: LogitsProcessor = |logits| {
            ROWS.with_borrow_mut(|rows| rows.push(logits.dims()[1]));
            logits
        };
        let mut engine = engine.with_logits_processor(count_rows);
        let id = add(&mut engine, own.clone());
        let (mut texts, mut recordings) = (Texts::new(), Vec::new());
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            recordings.push(engine.graphs().recordings);
        }
        assert_eq!(engine.graph_refusal(), None, "{name}");
        assert_eq!(texts[&id], expected, "{name}");
        // Rows of steps that are launched or recorded: some, then all for three, of which one is
        // recorded and replayed; none while that is replayed; one for three more.
        let rows = [[1; LAUNCHED].as_slice(), &[1 + BLOCK; 3], &[1; 3]].concat();
        assert_eq!(ROWS.take(), rows, "{name}");
        recordings.dedup();
        assert_eq!(recordings, [0, 1, 2], "{name}");
        let launched = LAUNCHED + 2 + 2;
        assert_eq!(engine.replays(), count - launched, "{name}");
    }
}

#[test]
fn a_recording_of_fewer_rows_that_fails_loses_no_tokens() {
    let fixture = Trained::open();
    let count = 44;
    let expected = &fixture.ids("medium", "greedy")[..count];
    let own = request(&fixture.ids("medium", "input_ids"), count);
    for (name, device) in devices() {
        // On CUDA, the weights count as lost then.
        if !must_have_graphs(name) || name.starts_with("cuda") {
            continue;
        }
        let model = Trained::model(device, false);
        let config = EngineConfig {
            drafts: BLOCK,
            draft_confidence: 1.0,
            ..EngineConfig::default()
        };
        let engine = Engine::new(&model, config).expect("valid options");
        // Steps with all drafts are recorded, and two of those before the next recording launched.
        RECORDABLE.set(launched_calls() + 1 + 2);
        let mut engine = engine.with_logits_processor(unrecordable);
        let texts = together(&mut engine, std::slice::from_ref(&own));
        assert_eq!(texts, [expected], "{name}");
        assert!(engine.replays() > 1, "{name}");
        assert!(engine.graph_refusal().is_some(), "{name}");
        assert_eq!(engine.graphs().recordings, 0, "{name}");
    }
}

/// Makes a device record what it is given, so that it refuses to replay.
struct Occupied(Device);

impl Occupied {
    fn new(device: &Device) -> Self {
        Dispatch::graph_prepare(device.as_dispatch()).expect("nothing else is recorded");
        Dispatch::graph_start_capture(device.as_dispatch()).expect("it was prepared");
        Self(device.clone())
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        // Nothing of that can be of use.
        let _ = Dispatch::graph_stop_capture(self.0.as_dispatch());
    }
}

/// Decodes two texts until a step is replayed, then refuses a replay on `device`, and sees what
/// becomes of the texts, and of others of the same model afterwards.
fn refuse_a_replay(name: &str, fixture: &Fixture, device: &Device, drafts: usize) {
    let config = EngineConfig {
        drafts,
        ..EngineConfig::default()
    };
    let requests = [5, 12].map(|length| request(&fixture.prompt[..length], 60));
    let requests = [
        requests[0].clone(),
        Request {
            sampling: penalised(3),
            ..requests[1].clone()
        },
    ];
    let expected = requests.each_ref().map(|own| alone(fixture, own));
    let mut engine = engine(fixture, &config);
    let ids = requests.each_ref().map(|own| add(&mut engine, own.clone()));
    let mut texts = Texts::new();
    while engine.replays() < 4 {
        assert!(!engine.is_idle(), "{name}: no step was replayed");
        collect(engine.step().expect("a device that works"), &mut texts);
    }
    let occupied = Occupied::new(device);
    let mut steps = 0..MOST_STEPS;
    let error = loop {
        assert!(steps.next().is_some(), "{name}: it goes on for ever");
        match engine.step() {
            Ok(outputs) => collect(outputs, &mut texts),
            Err(error) => break error,
        };
    };
    drop(occupied);
    let named = format!("{device:?}");
    let is_it = matches!(&error, GenerateError::Device { device, .. } if *device == named);
    assert!(is_it, "{name}, {drafts} drafts: {error}");
    // What was told before is right.
    for (id, expected) in ids.iter().zip(&expected) {
        let told = &texts[id];
        assert!(
            told.len() < expected.len(),
            "{name}: nothing was left to do"
        );
        assert_eq!(told[..], expected[..told.len()], "{name}, {drafts} drafts");
    }
    drop(engine);
    let mut engine = self::engine(fixture, &config);
    let ids = requests.each_ref().map(|own| add(&mut engine, own.clone()));
    let mut texts = Texts::new();
    let mut steps = 0..MOST_STEPS;
    while !engine.is_idle() {
        assert!(steps.next().is_some(), "{name}: it goes on for ever");
        match engine.step() {
            Ok(outputs) => collect(outputs, &mut texts),
            // Kernels with assembly are taken to write whatever they are given, so that the weights
            // count as failed. That is said.
            Err(error) => {
                assert!(name.starts_with("cuda"), "{name}: {error}");
                assert!(matches!(error, GenerateError::Device { .. }), "{error}");
                eprintln!("{name}: the model has to be loaded again");
                return;
            }
        };
    }
    for (id, expected) in ids.iter().zip(&expected) {
        assert_eq!(texts[id], *expected, "{name}, {drafts} drafts: afterwards");
    }
    assert!(engine.replays() > 0, "{name}: afterwards");
}

#[test]
fn a_replay_that_fails_is_an_error_that_names_the_device_and_new_texts_are_served() {
    every_model(|name, fixture| {
        if must_have_graphs(name) {
            for drafts in [0, 2] {
                refuse_a_replay(name, &fixture.clone(), &fixture.device, drafts);
            }
        }
    });
}

#[test]
fn a_step_of_which_one_device_fails_in_a_replay_is_an_error_that_names_it() {
    every_pair(|name, _, divided| {
        if must_have_graphs(name) {
            let placement = &divided.model.placement;
            for device in [placement.first(), placement.last()] {
                refuse_a_replay(name, divided, device, 0);
            }
        }
    });
}
