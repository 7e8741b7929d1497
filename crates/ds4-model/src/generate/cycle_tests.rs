use std::cell::Cell;

use burn_ds4_ops::device::DeviceSpec;

use super::*;
use crate::cache::{CacheConfig, Rollback};
use crate::checkpoint::{Checkpoint, LoadOptions};
use crate::generate::MtpProposer;
use crate::generate::recorder::WARM_UPS;
use crate::repository;

const DRAFTS: usize = 2;
const PROMPT: [u32; 6] = [0, 70, 81, 32, 300, 12];
/// Any tokens.
const LAST: u32 = 99;
const NEXT: [u32; DRAFTS] = [17, 23];

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// The likeliest token, by a function that cannot be recorded in the third cycle, which is when it would be.
fn unrecordable(logits: Tensor<3>) -> Tensor<2, Int> {
    let device = logits.device();
    let calls = CALLS.get() + 1;
    CALLS.set(calls);
    if calls <= WARM_UPS * DRAFTS {
        return likeliest(logits);
    }
    // No memory was left behind for this, and some devices refuse to upload.
    let nothing = Tensor::<1>::zeros([1 << 30], &device).narrow(0, 0, 1);
    let nothing = nothing + Tensor::<1>::from_data([0.0], &device);
    likeliest(logits + nothing.unsqueeze())
}

/// Of the device, a model, caches that have seen the prompt, and a cycle to go on from there.
fn with_cycle(spec: DeviceSpec, test: impl FnOnce(&Model, &mut Cache, &mut MtpProposer, Cycle)) {
    let Ok(device) = spec.init() else {
        return;
    };
    let checkpoint = Checkpoint::open(&repository::path("assets/ds4-tiny")).unwrap();
    let options = LoadOptions {
        expand: spec == DeviceSpec::Flex,
        ..LoadOptions::default()
    };
    let model = checkpoint.load(&options, &device).unwrap();
    let config = checkpoint.config();
    let options = CacheConfig {
        rollback: Rollback::Bounded(DRAFTS),
        ..CacheConfig::default()
    };
    let mut trunk = model.new_cache(config, options).unwrap();
    let mut proposer = MtpProposer::new(&model, config, DRAFTS).unwrap();
    let ids = ids_tensor(&PROMPT, &device);
    let streams = model.forward_streams(ids, &mut trunk, &Trace::off());
    proposer.observe(streams.unwrap());
    let next = [&PROMPT[1..], &[LAST]].concat();
    proposer.advance(&next).unwrap();
    let cycle = Cycle::new(&model, DRAFTS).unwrap();
    test(&model, &mut trunk, &mut proposer, cycle);
}

/// Logits after the last token and its drafts, if the model still works.
fn logits(model: &Model, trunk: &mut Cache) -> Option<Vec<f32>> {
    let device = model.embedding.val().device();
    let ids = ids_tensor(&[LAST, NEXT[0], NEXT[1]], &device);
    let logits = model.forward(ids, trunk).unwrap();
    logits.try_into_vec_as::<f32>().ok()
}

#[test]
fn a_recording_that_fails_loses_no_tokens() {
    for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0), DeviceSpec::Flex] {
        with_cycle(spec, |model, trunk, proposer, mut cycle| {
            let expected = logits(model, &mut trunk.clone());
            assert!(expected.is_some(), "{spec}");
            CALLS.set(0);
            cycle.choose = unrecordable;
            let caches = Caches {
                trunk: &mut *trunk,
                mtp: proposer.cache_mut(),
            };
            let verdicts = cycle.record(caches, LAST, &NEXT).unwrap();
            let rooms = [&*trunk, proposer.cache()];
            assert!(!cycle.is_worth_recording(rooms, usize::MAX), "{spec}");
            assert_eq!(cycle.replays(), 0, "{spec}");
            if spec == DeviceSpec::Flex || cfg!(feature = "fusion") {
                // The device has no graphs: that is no failure.
                assert_eq!(cycle.refusal(), None, "{spec}");
                let tokens: usize = verdicts.iter().map(|verdict| verdict.tokens.len()).sum();
                assert_eq!(trunk.lengths(), [PROMPT.len() + tokens], "{spec}");
                assert_eq!(proposer.cache().lengths(), trunk.lengths(), "{spec}");
                return;
            }
            assert!(cycle.refusal().is_some(), "{spec}");
            assert_eq!(verdicts, [], "{spec}");
            assert_eq!(cycle.leave().unwrap(), Some(NEXT.to_vec()), "{spec}");
            assert_eq!(trunk.lengths(), [PROMPT.len()], "{spec}");
            assert_eq!(proposer.cache().lengths(), [PROMPT.len()], "{spec}");
            let after = logits(model, trunk);
            if matches!(spec, DeviceSpec::Cuda(_)) {
                // Kernels with assembly are taken to write whatever they are given, and so the model is lost.
                assert_eq!(after, None, "{spec}: the weights count as failed");
            } else {
                assert!(after == expected, "{spec}: other logits");
            }
            let mut reason = || {
                let round = cycle.explain(Err(GenerateError::EmptyPrompt));
                round.unwrap_err().to_string()
            };
            assert!(reason().contains("loaded again"), "{spec}");
            assert_eq!(reason(), "the prompt is empty", "{spec}: said twice");
        });
    }
}
