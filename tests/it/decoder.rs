//! Recorded steps: whatever is replayed, the tokens and their logits are those of steps that are launched.

use std::cell::Cell;

use burn::module::Param;
use burn::tensor::{Int, Tensor};
use burn_ds4_ops::topk::{Windows, top_k_ids};
use ds4_model::cache::{CacheConfig, Rollback};
use ds4_model::generate::{
    Choice, Decoder, FinishReason, GenerateConfig, GenerateError, Generation,
};
use ds4_model::trace::Trace;

use crate::flash_head::{CLUSTERS, head};
use crate::verification::{CAPACITY, Fixture, bits, every_model, plain};

/// Short enough for a recording to be made, and of use, before the capacity is reached.
pub(crate) const SHORT: usize = CAPACITY - 40;

pub(crate) fn has_graphs(name: &str) -> bool {
    !name.starts_with("flex") && !cfg!(feature = "fusion")
}

/// After so many tokens of the prompt.
pub(crate) fn decoder<'a>(fixture: &'a Fixture, prompt: usize, graphs: bool) -> Decoder<'a> {
    let mut cache = fixture.cache(CAPACITY);
    let (last, before) = fixture.prompt[..prompt].split_last().expect("a prompt");
    fixture.streams(before, &mut cache, &Trace::off());
    let mut decoder = Decoder::new(&fixture.model, cache, graphs).expect("one sequence");
    decoder.set_token(*last);
    decoder
}

/// So many tokens, and the logits of those that they are known of.
pub(crate) fn decode(decoder: &mut Decoder, count: usize) -> (Vec<u32>, Vec<Option<Vec<u32>>>) {
    let (mut tokens, mut rows) = (Vec::new(), Vec::new());
    while tokens.len() < count {
        let more = decoder.decode(count - tokens.len());
        tokens.extend(more.expect("room, and finite logits"));
        rows.resize(tokens.len() - 1, None);
        let logits = decoder.logits().expect("a device that works");
        rows.push(logits.as_deref().map(bits));
    }
    (tokens, rows)
}

/// So many tokens of steps that are launched: the text of all tests.
fn launched(fixture: &Fixture, prompt: usize, count: usize) -> (Vec<u32>, Vec<Option<Vec<u32>>>) {
    decode(&mut decoder(fixture, prompt, false), count)
}

#[test]
fn replayed_steps_have_the_tokens_and_bits_of_launched_ones_across_capacities() {
    every_model(|name, fixture| {
        let count = match name {
            _ if name.starts_with("cuda") => 600,
            _ if has_graphs(name) => 240,
            _ => 60,
        };
        let (tokens, rows) = launched(fixture, SHORT, count);
        let mut decoder = decoder(fixture, SHORT, true);
        let (actual, logits) = decode(&mut decoder, count);
        assert_eq!(actual, tokens, "{name}: tokens");
        let mut compared = 0;
        for (index, (actual, expected)) in logits.iter().zip(&rows).enumerate() {
            if let (Some(actual), Some(expected)) = (actual, expected) {
                assert!(actual == expected, "{name}: logits of token {index} differ");
                compared += 1;
            }
        }
        assert!(compared > count - 20, "{name}: only {compared} compared");
        assert_eq!(decoder.positions(), SHORT - 1 + count, "{name}");
        assert_eq!(decoder.refusal(), None, "{name}");
        if has_graphs(name) {
            let replays = decoder.replays();
            assert!(replays > count - 40, "{name}: only {replays} replays");
        } else {
            assert_eq!(decoder.replays(), 0, "{name}");
        }
    });
}

#[test]
fn tokens_chosen_on_the_device_are_those_that_the_host_chooses() {
    every_model(|name, fixture| {
        let count = 24;
        let (tokens, rows) = plain(fixture, count);
        let mut cache = fixture.cache(CAPACITY);
        fixture.streams(&fixture.prompt, &mut cache, &Trace::off());
        let mut decoder = Decoder::new(&fixture.model, cache, true).expect("one sequence");
        decoder.set_token(tokens[0]);
        let (actual, logits) = decode(&mut decoder, count - 1);
        assert_eq!(actual, tokens[1..], "{name}");
        for (actual, expected) in logits.iter().zip(&rows[1..]) {
            let same = actual.as_ref().is_none_or(|row| *row == bits(expected));
            assert!(same, "{name}: logits differ");
        }
    });
}

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// Counts calls of [`unrecordable`] anew.
pub(crate) fn start_counting() {
    CALLS.set(0);
}

/// The highest logits, by a function that cannot be recorded when it is called for the third time, which is when it would be.
pub(crate) fn unrecordable(logits: Tensor<3>) -> Tensor<2, Int> {
    let device = logits.device();
    let [batch, _, vocabulary] = logits.dims();
    let calls = CALLS.get() + 1;
    CALLS.set(calls);
    let mut logits = logits.reshape([batch, vocabulary]);
    if calls == 3 {
        // No memory was left behind for this, and some devices refuse to upload.
        let nothing = Tensor::<1>::zeros([1 << 30], &device).narrow(0, 0, 1);
        let nothing = nothing + Tensor::<1>::from_data([0.0], &device);
        logits = logits + nothing.unsqueeze();
    }
    top_k_ids(logits, Windows::All, 1)
}

#[test]
fn a_recording_that_fails_leaves_the_text_as_it_is() {
    every_model(|name, fixture| {
        start_counting();
        let (tokens, rows) = launched(fixture, SHORT, 20);
        let mut decoder = decoder(fixture, SHORT, true).with_choice(unrecordable as Choice);
        if name.starts_with("cuda") {
            // Kernels with assembly are taken to write whatever they are given, and so the model is lost. That is said.
            let error = decoder.decode(20).expect_err("the weights count as failed");
            let text = error.to_string();
            assert!(
                text.contains("capture") && text.contains("loaded again"),
                "{text}"
            );
            return;
        }
        let (actual, logits) = decode(&mut decoder, 20);
        assert_eq!(actual, tokens, "{name}");
        assert!(
            logits[19].is_some() && logits[19] == rows[19],
            "{name}: logits"
        );
        assert_eq!(decoder.replays(), 0, "{name}");
        assert_eq!(decoder.refusal().is_some(), has_graphs(name), "{name}");
        if let Some(reason) = decoder.refusal() {
            assert!(reason.contains("capture"), "{name}: {reason}");
            assert!(!reason.contains('\n'), "{name}: {reason}");
        }

        // What it was tried with is not what the next text uses.
        let (actual, _) = decode(&mut self::decoder(fixture, SHORT, true), 20);
        assert_eq!(actual, tokens, "{name}: afterwards");
    });
}

#[test]
fn replays_go_on_after_positions_were_removed() {
    every_model(|name, fixture| {
        let (tokens, _) = launched(fixture, SHORT, 24);
        let mut decoder = decoder(fixture, SHORT, true);
        let (actual, _) = decode(&mut decoder, 24);
        assert_eq!(actual, tokens, "{name}");
        let replays = decoder.replays();
        for removed in [1, 3, 4] {
            let back = decoder.truncate(removed, tokens[23 - removed]);
            back.expect("as far as the cache can be rolled back");
            let (again, _) = decode(&mut decoder, removed);
            assert_eq!(again, tokens[24 - removed..], "{name}, {removed} removed");
        }
        if has_graphs(name) {
            assert_eq!(decoder.replays(), replays + 8, "{name}: recorded anew");
        }
    });
}

#[test]
fn another_thread_decodes_the_same_text_without_the_recording_of_the_first() {
    every_model(|name, fixture| {
        let (tokens, _) = launched(fixture, SHORT, 30);
        let mut decoder = decoder(fixture, SHORT, true);
        let (mut actual, _) = decode(&mut decoder, 6);
        let replays = decoder.replays();
        let rest = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // Not worth another recording.
                let (rest, _) = decode(&mut decoder, 4);
                (rest, decoder.replays())
            });
            other.join().expect("it decodes")
        });
        actual.extend(rest.0);
        assert_eq!(rest.1, replays, "{name}: replayed by another thread");
        actual.extend(decode(&mut decoder, 20).0);
        assert_eq!(actual, tokens, "{name}");
    });
}

#[test]
fn steps_that_choose_by_a_clustered_head_are_launched() {
    every_model(|name, fixture| {
        let mut fixture = fixture.clone();
        fixture.model.flash_head = Some(head(&fixture.model, CLUSTERS));
        let (tokens, _) = launched(&fixture, SHORT, 17);
        let mut decoder = decoder(&fixture, SHORT, true);
        assert_eq!(decode(&mut decoder, 17).0, tokens, "{name}");
        assert_eq!((decoder.replays(), decoder.refusal()), (0, None), "{name}");
    });
}

#[test]
fn a_generation_of_any_length_is_that_without_graphs() {
    every_model(|name, fixture| {
        let prompt = &fixture.prompt[..SHORT];
        let run = |graphs, max_new_tokens| {
            let config = GenerateConfig {
                max_new_tokens,
                graphs,
                ignore_eos: true,
                ..GenerateConfig::default()
            };
            let generation = Generation::new(&fixture.model, &fixture.config, config, prompt);
            let mut generation = generation.expect("valid options");
            let tokens: Result<Vec<u32>, _> = generation.by_ref().collect();
            let tokens = tokens.expect("room, and finite logits");
            assert_eq!(generation.finish_reason(), Some(FinishReason::Length));
            assert_eq!(generation.graph_refusal(), None, "{name}");
            tokens
        };
        let expected = run(false, 24);
        assert_eq!(expected.len(), 24, "{name}");
        for length in [1, 17, 18, 24] {
            assert_eq!(run(true, length), expected[..length], "{name}, {length}");
        }
    });
}

#[test]
fn a_step_without_a_number_among_its_logits_chooses_nothing() {
    every_model(|name, fixture| {
        let mut broken = fixture.clone();
        let output = broken.model.output.val();
        broken.model.output = Param::from_tensor(output.full_like(f32::NAN));
        for graphs in [false, true] {
            let mut decoder = decoder(&broken, 3, graphs);
            let error = decoder.decode(100).expect_err("nothing can be chosen");
            let expected = fixture.config.vocab_size;
            assert!(
                matches!(error, GenerateError::NoCandidate { len } if len == expected),
                "{name}: {error}"
            );
        }
    });
}

/// Runs steps ahead, with and without a recording, as far as `limit` lets it: so many tokens, and whether steps were ahead when they
/// were all there.
fn decode_ahead(decoder: &mut Decoder, count: usize, limit: usize) -> (Vec<u32>, bool) {
    let mut tokens = Vec::new();
    while tokens.len() < count {
        let more = decoder.decode(limit - tokens.len());
        tokens.extend(more.expect("room, and finite logits"));
    }
    let logits = decoder.logits().expect("a device that works");
    (tokens, logits.is_none())
}

#[test]
fn tokens_read_late_are_those_of_launched_steps_across_capacities() {
    every_model(|name, fixture| {
        let count = match name {
            _ if name.starts_with("cuda") => 600,
            _ if has_graphs(name) => 180,
            _ => 40,
        };
        let (tokens, _) = launched(fixture, SHORT, count);
        // The cache can be rolled back by less than the last of them.
        for steps in [1, 2, 100] {
            let mut decoder = decoder(fixture, SHORT, true).with_steps_ahead(steps);
            let (actual, ahead) = decode_ahead(&mut decoder, count, count);
            assert!(!ahead, "{name}, {steps}: more steps than tokens");
            assert_eq!(actual, tokens, "{name}, {steps}");
            assert_eq!(decoder.positions(), SHORT - 1 + count, "{name}, {steps}");
        }
    });
}

#[test]
fn steps_that_ran_ahead_in_vain_leave_nothing_behind() {
    every_model(|name, fixture| {
        let (tokens, rows) = launched(fixture, SHORT, 20);
        let mut decoder = decoder(fixture, SHORT, true).with_steps_ahead(2);
        let (actual, ahead) = decode_ahead(&mut decoder, 9, 100);
        assert_eq!(actual, tokens[..9], "{name}");
        assert_eq!(ahead, has_graphs(name), "{name}");
        assert_eq!(decoder.positions(), SHORT - 1 + 9, "{name}");

        // Another text for a while, then the first again.
        decoder.set_token(tokens[8] ^ 1);
        let logits = decoder.logits().expect("a device that works");
        assert_eq!(logits.is_none(), ahead, "{name}: logits of a step in vain");
        assert_eq!(decoder.positions(), SHORT - 1 + 9, "{name}");
        decode_ahead(&mut decoder, 1, 100);
        let back = decoder.truncate(2, tokens[7]);
        back.expect("as far as the cache can be rolled back");
        assert_eq!(decoder.positions(), SHORT - 1 + 8, "{name}");
        let (actual, _) = decode_ahead(&mut decoder, 4, 100);
        assert_eq!(actual, tokens[8..12], "{name}");

        // The choice of the steps ahead is not that of the tokens to come.
        let mut decoder = decoder.with_choice(third);
        assert_eq!(decoder.positions(), SHORT - 1 + 12, "{name}");
        let other = decoder.decode(1).expect("room");
        assert_ne!(other, [tokens[12]], "{name}");
        let logits = decoder.logits().expect("a device that works");
        assert!(logits.as_deref().map(bits) == rows[12], "{name}: logits");
    });
}

/// Not the highest logit.
fn third(logits: Tensor<3>) -> Tensor<2, Int> {
    let [_, _, vocabulary] = logits.dims();
    top_k_ids(logits.reshape([1, vocabulary]), Windows::All, 3).narrow(1, 2, 1)
}

#[test]
fn another_thread_takes_over_from_steps_ahead() {
    every_model(|name, fixture| {
        let (tokens, _) = launched(fixture, SHORT, 30);
        let mut decoder = decoder(fixture, SHORT, true).with_steps_ahead(2);
        let (mut actual, ahead) = decode_ahead(&mut decoder, 6, 100);
        assert_eq!(ahead, has_graphs(name), "{name}");
        let rest = std::thread::scope(|scope| {
            let other = scope.spawn(|| decode_ahead(&mut decoder, 4, 8).0);
            other.join().expect("it decodes")
        });
        actual.extend(rest);
        // On one thread, a recording of the other is of no use.
        actual.extend(decode_ahead(&mut decoder, 20, 100).0);
        assert_eq!(actual, tokens, "{name}");
        drop(decoder);
        let mut decoder = self::decoder(fixture, SHORT, true).with_steps_ahead(1);
        let again = decode_ahead(&mut decoder, 20, 20).0;
        assert_eq!(again, tokens[..20], "{name}: after steps in flight");
    });
}

#[test]
fn a_full_context_ends_what_runs_ahead_after_its_last_token() {
    every_model(|name, fixture| {
        let mut config = fixture.config.clone();
        config.max_position_embeddings = SHORT + 25;
        let options = CacheConfig {
            rollback: Rollback::Bounded(1),
            ..CacheConfig::default()
        };
        let text = |graphs| {
            let mut cache = fixture.model.new_cache(&config, options).expect("options");
            let (last, before) = fixture.prompt[..SHORT].split_last().expect("a prompt");
            fixture.streams(before, &mut cache, &Trace::off());
            let decoder = Decoder::new(&fixture.model, cache, graphs).expect("one sequence");
            let mut decoder = decoder.with_steps_ahead(1);
            decoder.set_token(*last);
            let mut tokens = Vec::new();
            loop {
                match decoder.decode(usize::MAX) {
                    Ok(more) => tokens.extend(more),
                    Err(error) => return (tokens, error),
                }
            }
        };
        let (expected, error) = text(false);
        assert_eq!(expected.len(), 26, "{name}: {error}");
        let (tokens, again) = text(true);
        assert_eq!(tokens, expected, "{name}");
        assert_eq!(again.to_string(), error.to_string(), "{name}");
    });
}

#[test]
fn a_generation_that_ends_while_steps_or_cycles_are_ahead_has_the_text_of_launched_ones() {
    every_model(|name, fixture| {
        let run = |eos, drafts, graphs, max_new_tokens| {
            let mut config = fixture.config.clone();
            config.eos_token_id = eos;
            let options = GenerateConfig {
                max_new_tokens,
                drafts,
                graphs,
                ..GenerateConfig::default()
            };
            let prompt = &fixture.prompt[..SHORT];
            let generation = Generation::new(&fixture.model, &config, options, prompt);
            let mut generation = generation.expect("valid options");
            let tokens: Result<Vec<u32>, _> = generation.by_ref().collect();
            let reason = generation.finish_reason().expect("it has ended");
            let tokens = tokens.expect("room, and finite logits");
            (tokens, reason, generation.replays())
        };
        let (tokens, ..) = run(u32::MAX, 0, false, 24);
        let end = (14..24).find(|&end| !tokens[..end].contains(&tokens[end]));
        let end = end.expect("a token that was not there before");
        for drafts in [0, 1] {
            let (actual, reason, replays) = run(tokens[end], drafts, true, 64);
            assert_eq!(actual, tokens[..end], "{name}, {drafts} drafts");
            assert_eq!(reason, FinishReason::EndOfSequence, "{name}");
            assert_eq!(replays > 1, has_graphs(name), "{name}: {replays} replays");
        }
    });
}
