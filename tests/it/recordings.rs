//! What becomes of texts when a device refuses to replay a recorded step.

use burn::backend::{Backend, Dispatch};
use burn::tensor::Device;
use ds4_model::generate::{EngineConfig, GenerateError, Request, SamplingConfig};

use crate::common::some;
use crate::devices::every_pair;
use crate::engine::{Texts, add, alone, collect, engine, must_have_graphs, penalised, request};
use crate::two_layers::{Fixture, every_model};

/// More steps than any of these texts takes.
const MOST_STEPS: usize = 200;

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
        // A device that is occupied records what it hands back, too, and does not send it.
        overlap: false,
        ..EngineConfig::default()
    };
    // Enough for a recording to be worth while.
    let count = config.recording_tokens() + 14;
    let requests = [(5, SamplingConfig::default()), (12, penalised(3))];
    let requests = requests.map(|(length, sampling)| Request {
        sampling,
        ..request(&fixture.prompt[..length], count)
    });
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
    // CUDA lets no device of the process wait while one of them records, so that it names all.
    let is_named = |device: &String| match name.starts_with("cuda") {
        true => device.contains(&named),
        false => *device == named,
    };
    let is_it = matches!(&error, GenerateError::Device { device, .. } if is_named(device));
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
    // A model for each, since CUDA may lose its weights.
    for drafts in [0, 2] {
        every_model(|name, fixture| {
            if must_have_graphs(name) && some(name, &[0, 2], 2).any(|own| *own == drafts) {
                refuse_a_replay(name, fixture, &fixture.device, drafts);
            }
        });
    }
}

#[test]
fn a_step_of_which_one_device_fails_in_a_replay_is_an_error_that_names_it() {
    // With the first, nothing of the step is done; with the last, a part of it is.
    for place in [1, 0] {
        every_pair(|name, _, divided| {
            let placement = &divided.model.placement;
            let device = [placement.first(), placement.last()][place];
            if must_have_graphs(name) && some(name, &[1, 0], 2).any(|own| *own == place) {
                refuse_a_replay(name, divided, device, 0);
            }
        });
    }
}
