//! Many texts at once: whoever joins and leaves, each has the tokens and the bits that it has alone.

use std::collections::BTreeMap;

use burn::module::Param;
use burn::tensor::{Int, Tensor};
use burn_ds4_ops::topk::{Windows, top_k_ids};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{
    Batch, BatchConfig, BatchToken, FinishReason, GenerateConfig, GenerateError, Generation,
    MAX_SEQUENCES, SamplingConfig, SequenceId,
};
use ds4_model::trace::Trace;

use crate::common::{absolute, assert_close};
use crate::decoder::{decode, decoder, has_graphs, start_counting, unrecordable};
use crate::verification::{CAPACITY, Fixture, bits, every_model, plain};

fn config(graphs: bool) -> BatchConfig {
    BatchConfig {
        ignore_eos: true,
        graphs,
        ..BatchConfig::default()
    }
}

fn batch<'a>(fixture: &'a Fixture, config: BatchConfig) -> Batch<'a> {
    Batch::new(&fixture.model, &fixture.config, config).expect("valid options")
}

/// What a step tells, by sequence.
fn told(outputs: Vec<BatchToken>, texts: &mut BTreeMap<SequenceId, Vec<u32>>) -> usize {
    let count = outputs.len();
    for output in outputs {
        let token = output.token.expect("finite logits");
        texts.entry(output.sequence).or_default().push(token);
    }
    count
}

/// Steps until nothing is left.
fn drain(batch: &mut Batch, texts: &mut BTreeMap<SequenceId, Vec<u32>>) {
    while !batch.is_idle() {
        told(batch.step().expect("room, and finite logits"), texts);
    }
}

/// The same text by itself.
fn alone(fixture: &Fixture, prompt: &[u32], count: usize, sampling: &SamplingConfig) -> Vec<u32> {
    let config = GenerateConfig {
        max_new_tokens: count,
        sampling: sampling.clone(),
        ignore_eos: true,
        ..GenerateConfig::default()
    };
    let generation = Generation::new(&fixture.model, &fixture.config, config, prompt);
    let tokens: Result<_, _> = generation.expect("valid options").collect();
    tokens.expect("room, and finite logits")
}

/// Numbers without a pattern.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

struct Joined {
    prompt: Vec<u32>,
    count: usize,
    seed: u64,
    left: bool,
}

/// How much a device has time for.
struct Extent {
    /// Of all sequences.
    tokens: usize,
    /// At most, of one, and of one prompt.
    longest: usize,
    prompt: usize,
    /// At a time.
    sequences: usize,
}

#[test]
fn sequences_that_join_and_leave_at_random_have_their_texts_alone() {
    every_model(|name, fixture| {
        let extent = match name {
            // Longer than the capacity at first.
            _ if name.starts_with("cuda") => Extent {
                tokens: 1000,
                longest: 220,
                prompt: 110,
                sequences: 16,
            },
            "flex F32" => Extent {
                tokens: 120,
                longest: 30,
                prompt: 40,
                sequences: 8,
            },
            _ => Extent {
                tokens: 40,
                longest: 20,
                prompt: 16,
                sequences: 3,
            },
        };
        let drawn = SamplingConfig {
            temperature: 1.2,
            top_k: 100,
            ..SamplingConfig::default()
        };
        for (seed, sampling) in [(1, SamplingConfig::default()), (2, drawn)] {
            let config = BatchConfig {
                sampling: sampling.clone(),
                ..config(true)
            };
            let mut batch = batch(fixture, config);
            let mut random = Random(seed);
            let (mut joined, mut texts) = (BTreeMap::new(), BTreeMap::new());
            let mut tokens = 0;
            while tokens < extent.tokens {
                if batch.sequences() < extent.sequences && random.below(3) == 0 {
                    // The first is the longest, and stays.
                    let mut limits = [extent.prompt, extent.longest];
                    if !joined.is_empty() {
                        limits = limits.map(|limit| 1 + random.below(limit));
                    }
                    let [length, count] = limits;
                    let start = random.below(fixture.prompt.len() - length + 1);
                    let text = Joined {
                        prompt: fixture.prompt[start..start + length].to_vec(),
                        count,
                        seed: random.below(1 << 20) as u64,
                        left: false,
                    };
                    let id = batch.join(&text.prompt, text.count, text.seed);
                    joined.insert(id.expect("valid options"), text);
                }
                let any = 1 + random.below(joined.len().max(1));
                if random.below(8) == 0
                    && let Some((id, text)) = joined.iter_mut().nth(any)
                    && batch.positions(*id).is_some()
                {
                    batch.leave(*id).expect("it is there");
                    text.left = true;
                }
                tokens += told(batch.step().expect("room, and finite logits"), &mut texts);
            }
            drain(&mut batch, &mut texts);
            assert_eq!(batch.graph_refusal(), None, "{name}");
            assert_eq!(batch.replays() > 0, has_graphs(name), "{name}");
            assert!(batch.room() >= 2, "{name}: only {}", batch.room());
            let mut left = 0;
            for (id, text) in &joined {
                let sampling = SamplingConfig {
                    seed: text.seed,
                    ..sampling.clone()
                };
                let expected = alone(fixture, &text.prompt, text.count, &sampling);
                let actual = texts.remove(id).unwrap_or_default();
                let what = format!(
                    "{name}: sequence {id} of {} after {}",
                    text.count,
                    text.prompt.len()
                );
                if text.left {
                    left += 1;
                    assert!(actual.len() < text.count, "{what}");
                } else {
                    assert_eq!(actual.len(), text.count, "{what}");
                }
                assert_eq!(actual, expected[..actual.len()], "{what}");
            }
            if name.starts_with("cuda") {
                assert!(left > 0, "{name}: none left");
                assert!(batch.capacity() > 256, "{name}: it did not grow");
            }
        }
    });
}

#[test]
fn logits_are_those_of_a_lone_decoder_to_the_bit_beside_others_and_vacant_places() {
    every_model(|name, fixture| {
        let count = if name.starts_with("cuda") { 100 } else { 22 };
        let lengths = [14, 3, 9];
        let lone = lengths.map(|length| decode(&mut decoder(fixture, length, false), count));
        let config = BatchConfig {
            capacity: CAPACITY,
            ..config(true)
        };
        let mut batch = batch(fixture, config);
        let prompt = |length| &fixture.prompt[..length];
        let join = |batch: &mut Batch, length, count| {
            let id = batch.join(prompt(length), count, 0);
            id.expect("valid options")
        };
        let mut texts = BTreeMap::new();
        let gone = join(&mut batch, 40, count);
        let ids = lengths.map(|length| join(&mut batch, length, count));
        // The first tokens, and others.
        told(batch.step().expect("finite logits"), &mut texts);
        batch.leave(gone).expect("it is there");
        let mut compared = 0;
        while !batch.is_idle() {
            for (id, (_, rows)) in ids.iter().zip(&lone) {
                let index = texts[id].len() - 1;
                let Some(row) = batch.logits(*id).expect("a device that works") else {
                    continue;
                };
                if let Some(expected) = &rows[index] {
                    assert!(bits(&row) == *expected, "{name}: token {index} of {id}");
                    compared += 1;
                }
            }
            told(batch.step().expect("finite logits"), &mut texts);
        }
        assert_eq!(batch.room(), 4, "{name}");
        let most = lengths.len() * count;
        assert!(compared > most - 20, "{name}: {compared} of {most}");
        for (id, (tokens, _)) in ids.iter().zip(&lone) {
            assert_eq!(texts[id], *tokens, "{name}: sequence {id}");
        }
    });
}

#[test]
fn texts_go_on_across_the_growth_of_the_capacity() {
    every_model(|name, fixture| {
        let count = if name.starts_with("cuda") { 300 } else { 24 };
        let (tokens, rows) = plain(fixture, count);
        for graphs in [false, true] {
            let config = BatchConfig {
                capacity: CAPACITY,
                ..config(graphs)
            };
            let mut batch = batch(fixture, config);
            let ids = [(); 2].map(|()| {
                let id = batch.join(&fixture.prompt, count, 0);
                id.expect("valid options")
            });
            let mut texts = BTreeMap::new();
            while !batch.is_idle() {
                told(batch.step().expect("finite logits"), &mut texts);
                for id in ids {
                    let index = texts[&id].len() - 1;
                    if let Some(row) = batch.logits(id).expect("a device that works") {
                        let same = bits(&row) == bits(&rows[index]);
                        assert!(same, "{name}: logits of token {index}");
                    }
                }
            }
            for id in ids {
                assert_eq!(texts[&id], tokens, "{name}, graphs: {graphs}");
            }
            assert!(batch.capacity() > CAPACITY, "{name}");
        }
    });
}

#[test]
fn a_recorded_step_serves_those_that_join_after_it() {
    every_model(|name, fixture| {
        if !has_graphs(name) {
            return;
        }
        let mut batch = batch(fixture, config(true));
        let join = |batch: &mut Batch, length: usize, count| {
            let id = batch.join(&fixture.prompt[..length], count, 0);
            id.expect("valid options")
        };
        let mut texts = BTreeMap::new();
        let first = join(&mut batch, 5, 40);
        let second = join(&mut batch, 7, 5);
        assert_eq!(batch.graphs().recordings, 0, "{name}");
        while batch.positions(second).is_some() {
            told(batch.step().expect("finite logits"), &mut texts);
        }
        let usage = batch.graphs();
        assert_eq!(usage.recordings, 1, "{name}");
        assert!(usage.bytes.is_some(), "{name}: {usage:?}");
        let replays = batch.replays();
        let third = join(&mut batch, 12, 9);
        for _ in 0..8 {
            told(batch.step().expect("finite logits"), &mut texts);
        }
        assert_eq!(batch.replays(), replays + 8, "{name}: recorded anew");
        // A third place: what was recorded has another shape.
        let fourth = join(&mut batch, 3, 30);
        let fifth = join(&mut batch, 4, 30);
        assert_eq!((batch.room(), batch.graphs().recordings), (4, 0), "{name}");
        drain(&mut batch, &mut texts);
        let greedy = SamplingConfig::default();
        let all = [(first, 5, 40), (second, 7, 5), (third, 12, 9)];
        for (id, length, count) in [&all[..], &[(fourth, 3, 30), (fifth, 4, 30)]].concat() {
            let expected = alone(fixture, &fixture.prompt[..length], count, &greedy);
            assert_eq!(texts[&id], expected, "{name}: sequence {id}");
        }
    });
}

#[test]
fn more_sequences_than_have_the_same_bits_differ_by_rounding() {
    every_model(|name, fixture| {
        if !name.ends_with("F32") {
            return;
        }
        let count = if name.starts_with("cuda") { 40 } else { 3 };
        let mut batch = batch(fixture, config(true));
        let join = |start: usize| {
            let id = batch.join(&fixture.prompt[start..start + 6], count, 0);
            id.expect("valid options")
        };
        let ids: Vec<SequenceId> = (0..17).map(join).collect();
        let mut texts = BTreeMap::new();
        told(batch.step().expect("finite logits"), &mut texts);
        for (start, id) in ids.iter().enumerate().step_by(8) {
            let text = [&fixture.prompt[start..start + 6], &texts[id][..1]].concat();
            let mut cache = fixture.cache(CAPACITY);
            let streams = fixture.streams(&text, &mut cache, &Trace::off());
            let expected = fixture.logits(streams).pop().expect("a position");
            let row = batch.logits(*id).expect("a device that works");
            let row = row.expect("those of the last step");
            assert_close(&row, &expected, absolute(1e-3), &format!("{name}, {id}"));
        }
        drain(&mut batch, &mut texts);
        assert!(texts.values().all(|text| text.len() == count), "{name}");
        // No step of so many is recorded, nor tried to be.
        let graphs = (batch.replays(), batch.graph_refusal());
        assert_eq!((batch.room(), graphs), (32, (0, None)), "{name}");
    });
}

#[test]
fn a_recording_that_fails_loses_no_tokens_of_any_sequence() {
    every_model(|name, fixture| {
        let mut batch = batch(fixture, config(true)).with_choice(unrecordable);
        let lengths = [4, 11];
        let ids = lengths.map(|length| {
            let id = batch.join(&fixture.prompt[..length], 20, 0);
            id.expect("valid options")
        });
        start_counting();
        if name.starts_with("cuda") {
            // Kernels with assembly are taken to write whatever they are given, and so the model is lost. That is said.
            let error = batch.step().expect_err("the weights count as failed");
            let text = error.to_string();
            assert!(text.contains("loaded again"), "{text}");
            return;
        }
        let mut texts = BTreeMap::new();
        drain(&mut batch, &mut texts);
        assert_eq!(batch.replays(), 0, "{name}");
        assert_eq!(batch.graph_refusal().is_some(), has_graphs(name), "{name}");
        for (id, length) in ids.iter().zip(lengths) {
            let prompt = &fixture.prompt[..length];
            let expected = alone(fixture, prompt, 20, &SamplingConfig::default());
            assert_eq!(texts[id], expected, "{name}: sequence {id}");
        }
    });
}

#[test]
fn sequences_end_by_length_by_the_end_token_and_where_the_context_ends() {
    every_model(|name, fixture| {
        let prompt = &fixture.prompt[..6];
        let expected = alone(fixture, prompt, 20, &SamplingConfig::default());
        let end = expected[3];
        let stop = expected
            .iter()
            .position(|token| *token == end)
            .expect("it is there");
        for graphs in [false, true] {
            let model_config = ModelConfig {
                eos_token_id: end,
                max_position_embeddings: 40,
                ..fixture.config.clone()
            };
            let ends = |ignore_eos| {
                let config = BatchConfig {
                    ignore_eos,
                    ..config(graphs)
                };
                let batch = Batch::new(&fixture.model, &model_config, config);
                let mut batch = batch.expect("valid options");
                let mut ids = Vec::new();
                for count in [1, 2, 20, 100] {
                    ids.push(batch.join(prompt, count, 0).expect("valid options"));
                }
                let mut ends: Vec<(Vec<u32>, Option<FinishReason>)> = vec![(Vec::new(), None); 4];
                while !batch.is_idle() {
                    for output in batch.step().expect("room, and finite logits") {
                        let index = ids.iter().position(|id| *id == output.sequence);
                        let (text, finish) = &mut ends[index.expect("it has joined")];
                        assert_eq!(*finish, None, "{name}: a token after the last");
                        text.push(output.token.expect("finite logits"));
                        *finish = output.finish;
                    }
                }
                assert_eq!(batch.sequences(), 0, "{name}");
                ends
            };
            let all = ends(true);
            let [one, two, twenty, rest] = &all[..] else {
                panic!("four sequences");
            };
            let length = Some(FinishReason::Length);
            assert_eq!(*one, (expected[..1].to_vec(), length), "{name}");
            assert_eq!(*two, (expected[..2].to_vec(), length), "{name}");
            assert_eq!(*twenty, (expected.clone(), length), "{name}");
            assert_eq!(rest.0[..20], expected, "{name}");
            // The last token is in no cache.
            assert_eq!(
                (rest.0.len(), rest.1),
                (35, Some(FinishReason::ContextFull)),
                "{name}"
            );
            let ended = (
                expected[..=stop].to_vec(),
                Some(FinishReason::EndOfSequence),
            );
            assert_eq!(ends(false)[2..], [ended.clone(), ended], "{name}");
        }
    });
}

#[test]
fn a_sequence_without_a_number_among_its_logits_is_told_so() {
    every_model(|name, fixture| {
        let mut broken = fixture.clone();
        let output = broken.model.output.val();
        broken.model.output = Param::from_tensor(output.full_like(f32::NAN));
        let mut batch = batch(&broken, config(true));
        let error = batch
            .join(&fixture.prompt[..3], 5, 0)
            .expect_err("no candidate");
        let expected = fixture.config.vocab_size;
        let is_it = |error: &GenerateError| matches!(error, GenerateError::NoCandidate { len } if *len == expected);
        assert!(is_it(&error), "{name}: {error}");
        assert!(batch.is_idle(), "{name}");
    });
}

/// The likeliest token but, after the first, in the first place of a batch.
fn chooses_nothing_first(logits: Tensor<3>) -> Tensor<2, Int> {
    let [batch, _, vocabulary] = logits.dims();
    let ids = top_k_ids(logits.reshape([batch, vocabulary]), Windows::All, 1);
    match batch {
        1 => ids,
        _ => ids.slice_fill([0..1, 0..1], -1),
    }
}

#[test]
fn a_sequence_that_cannot_go_on_leaves_the_others_alone() {
    every_model(|name, fixture| {
        let mut batch = batch(fixture, config(true)).with_choice(chooses_nothing_first);
        let prompt = &fixture.prompt[..8];
        let ids = [(); 2].map(|()| batch.join(prompt, 20, 0).expect("valid options"));
        let mut texts: BTreeMap<SequenceId, Vec<u32>> = BTreeMap::new();
        let mut errors = Vec::new();
        while !batch.is_idle() {
            for output in batch.step().expect("a device that works") {
                match output.token {
                    Ok(token) => texts.entry(output.sequence).or_default().push(token),
                    Err(error) => errors.push((output.sequence, error)),
                }
            }
        }
        assert!(
            matches!(errors[..], [(id, GenerateError::NoCandidate { .. })] if id == ids[0]),
            "{name}: {errors:?}"
        );
        let expected = alone(fixture, prompt, 20, &SamplingConfig::default());
        assert_eq!(texts[&ids[0]], expected[..1], "{name}");
        assert_eq!(texts[&ids[1]], expected, "{name}");
    });
}

#[test]
fn what_a_batch_cannot_do_is_a_typed_error() {
    every_model(|name, fixture| {
        if name != "flex F32" {
            return;
        }
        let short = ModelConfig {
            max_position_embeddings: 20,
            ..fixture.config.clone()
        };
        let made = Batch::new(&fixture.model, &short, config(true));
        let mut batch = made.expect("valid options");
        let message = |result: Result<SequenceId, GenerateError>| match result {
            Ok(id) => panic!("{id} has joined"),
            Err(error) => error.to_string(),
        };
        let empty = message(batch.join(&[], 3, 0));
        assert_eq!(empty, "the prompt is empty");
        let long = message(batch.join(&fixture.prompt[..21], 3, 0));
        assert_eq!(long, "the prompt has 21 tokens, the model's context 20");
        let unknown = message(batch.join(&[1, 5000], 3, 0));
        assert_eq!(
            unknown,
            "`prompt[1]` is token 5000, but the model's vocabulary has 1024"
        );
        let none = message(batch.join(&[1], 0, 0));
        assert_eq!(none, "max_tokens must be at least 1");
        assert!(batch.is_idle());
        assert!(batch.step().expect("nothing to do").is_empty());

        let mut ids = Vec::new();
        for _ in 0..MAX_SEQUENCES {
            ids.push(batch.join(&[1], 3, 0).expect("there is room"));
        }
        let full = message(batch.join(&[1], 3, 0));
        assert_eq!(
            full,
            "the batch has 64 sequences already, as many as it can have"
        );
        let gone = ids[40];
        batch.leave(gone).expect("it is there");
        let error = batch.leave(gone).expect_err("it has left");
        assert_eq!(error.to_string(), "sequence 40 is not in the batch");
        assert_eq!(
            (batch.positions(gone), batch.logits(gone).ok()),
            (None, Some(None))
        );
        let new = batch.join(&[1, 2], 3, 0).expect("there is room again");
        assert!(!ids.contains(&new));
        assert_eq!((batch.sequences(), batch.room()), (64, 64));

        let refused = |config: BatchConfig| match Batch::new(&fixture.model, &short, config) {
            Ok(_) => panic!("a batch"),
            Err(error) => error.to_string(),
        };
        let chunk = BatchConfig {
            prefill_chunk: 0,
            ..config(true)
        };
        assert_eq!(refused(chunk), "`prefill_chunk` is 0, expected at least 1");
        let capacity = BatchConfig {
            capacity: 0,
            ..config(true)
        };
        assert_eq!(refused(capacity), "capacity must be at least 1");
        let penalty = BatchConfig {
            sampling: SamplingConfig {
                repetition_penalty: 1.5,
                ..SamplingConfig::default()
            },
            ..config(true)
        };
        let error = refused(penalty);
        assert!(
            error.starts_with("sampling parameter `repetition_penalty` is 1.5"),
            "{error}"
        );
    });
}
