//! Drawn tokens: those of the operator for the logits, the seed and the position.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::sampling::{BatchParams, LaneParams, sample};
use ds4_model::generate::{EngineConfig, GenerateConfig, Generation, Request, SamplingConfig};
use ds4_model::trace::Trace;

use crate::common::{floats, integer_values};
use crate::engine::{engine, has_graphs, with_logits};
use crate::two_layers::{CAPACITY, Fixture, PAGE, every_model};

/// Tokens of a prompt.
const SHORT: usize = 16;

/// With every filter, and many candidates all the same.
fn filtered(seed: u64) -> SamplingConfig {
    SamplingConfig {
        temperature: 1.5,
        top_k: 200,
        top_p: 0.97,
        min_p: 0.002,
        seed,
        ..SamplingConfig::default()
    }
}

/// What the operator draws from rows of logits, the first of which is of the token at `position`.
fn drawn(rows: Tensor<2>, sampling: &SamplingConfig, position: usize) -> Vec<u32> {
    let ([count, columns], device) = (rows.dims(), rows.device());
    let positions = position as i32..(position + count) as i32;
    let positions = TensorData::new(positions.collect::<Vec<i32>>(), [count]);
    let positions = Tensor::<1, Int>::from_data(positions, &device);
    let lane = LaneParams {
        sampling: sampling.filters(),
        seed: sampling.seed,
        ..LaneParams::default()
    };
    let params = BatchParams::new(&vec![lane; count], columns, &device);
    let params = params.expect("valid parameters");
    let tokens = sample(rows, &params, positions).expect("arguments that fit");
    let tokens = integer_values(tokens).into_iter();
    tokens.map(|token| token as u32).collect()
}

fn flex() -> Device {
    DeviceSpec::Flex.init().expect("Flex is always present")
}

fn text(fixture: &Fixture, count: usize, sampling: SamplingConfig, graphs: bool) -> Vec<u32> {
    let config = GenerateConfig {
        max_new_tokens: count,
        sampling,
        graphs,
        ignore_eos: true,
        ..GenerateConfig::default()
    };
    let generation = Generation::new(&fixture.model, config, &fixture.prompt[..SHORT]);
    let tokens: Result<_, _> = generation.expect("valid options").collect();
    tokens.expect("finite logits")
}

#[test]
fn launched_and_replayed_steps_draw_what_the_operator_does_across_pages() {
    every_model(|name, fixture| {
        let count = if name.starts_with("cuda") { 300 } else { 40 };
        let sampling = filtered(5);
        let run = |graphs| {
            let config = EngineConfig {
                page: PAGE,
                graphs,
                steps_ahead: 0,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let request = Request {
                sampling: sampling.clone(),
                ignore_eos: true,
                ..Request::new(&fixture.prompt[..SHORT], count)
            };
            let tokens = with_logits(&mut engine, request);
            assert_eq!(engine.graph_refusal(), None, "{name}");
            let replayed = graphs && has_graphs(name);
            assert_eq!(engine.replays() > count / 3, replayed, "{name}");
            tokens
        };
        let launched = run(false);
        let (tokens, rows): (Vec<u32>, Vec<_>) = launched.into_iter().unzip();
        // The engine does not have those of the last token any more.
        let rows: Vec<f32> = rows[..count - 1]
            .iter()
            .flat_map(|row| row.as_ref().expect("of a step that is not ahead"))
            .map(|bits| f32::from_bits(*bits))
            .collect();
        let rows = floats(
            &rows,
            [count - 1, fixture.model.config().vocab_size],
            &flex(),
        );
        let expected = drawn(rows, &sampling, SHORT);
        assert_eq!(tokens[..count - 1], expected, "{name}: launched");
        let (replayed, _): (Vec<u32>, Vec<_>) = run(true).into_iter().unzip();
        assert_eq!(replayed, tokens, "{name}: replayed");
    });
}

#[test]
fn a_seed_gives_the_same_text_with_and_without_graphs_and_another_seed_another() {
    every_model(|name, fixture| {
        let run = |seed, graphs| text(fixture, 20, filtered(seed), graphs);
        let expected = run(1 << 40, false);
        assert_eq!(expected.len(), 20, "{name}");
        assert_eq!(run(1 << 40, true), expected, "{name}: with graphs");
        assert_ne!(run(2 << 40, true), expected, "{name}: another seed");
    });
}

#[test]
fn filters_and_a_seed_make_no_difference_without_a_temperature() {
    every_model(|name, fixture| {
        let expected = text(fixture, 20, SamplingConfig::default(), false);
        let sampling = SamplingConfig {
            temperature: 0.0,
            ..filtered(7)
        };
        for graphs in [false, true] {
            let actual = text(fixture, 20, sampling.clone(), graphs);
            assert_eq!(actual, expected, "{name}");
        }
        // With a temperature, it is not for want of candidates.
        assert_ne!(text(fixture, 20, filtered(7), true), expected, "{name}");
    });
}

/// Logits as vLLM changes them: bias, then penalties.
fn penalised(row: &[f32], sampling: &SamplingConfig, prompt: &[u32], output: &[u32]) -> Vec<f32> {
    let changed = row.iter().enumerate().map(|(token, logit)| {
        let is_it = |other: &&u32| **other as usize == token;
        let bias = sampling.logit_bias.iter();
        let bias = bias.filter(|(other, _)| *other as usize == token);
        let mut logit = *logit + bias.map(|(_, bias)| *bias).sum::<f32>();
        let count = output.iter().filter(is_it).count();
        if count > 0 || prompt.iter().any(|other| is_it(&other)) {
            logit = match logit > 0.0 {
                true => logit / sampling.repetition_penalty,
                false => logit * sampling.repetition_penalty,
            };
        }
        logit -= sampling.frequency_penalty * count as f32;
        logit
            - if count > 0 {
                sampling.presence_penalty
            } else {
                0.0
            }
    });
    changed.collect()
}

#[test]
fn penalties_and_bias_change_the_logits_that_a_token_is_drawn_from() {
    every_model(|name, fixture| {
        let count = 6;
        let vocabulary = fixture.model.config().vocab_size;
        for temperature in [0.0, 0.9] {
            let plain = SamplingConfig {
                temperature,
                ..filtered(4)
            };
            let without = text(fixture, count, plain.clone(), true);
            let sampling = SamplingConfig {
                repetition_penalty: 1.5,
                presence_penalty: -0.5,
                frequency_penalty: 0.75,
                // A token that would be chosen is not.
                logit_bias: vec![(3, 2.0), (without[1], f32::NEG_INFINITY)],
                ..plain
            };
            let actual = text(fixture, count, sampling.clone(), true);
            let (prompt, mut output) = (&fixture.prompt[..SHORT], Vec::new());
            let mut cache = fixture.cache(CAPACITY);
            // The last token of the prompt is part of the first step.
            fixture.streams(&prompt[..SHORT - 1], &mut cache, &Trace::off());
            while output.len() < count {
                let last = output.last().copied().unwrap_or(prompt[SHORT - 1]);
                let streams = fixture.streams(&[last], &mut cache, &Trace::off());
                let row = fixture.logits(streams).remove(0);
                let row = penalised(&row, &sampling, prompt, &output);
                let row = floats(&row, [1, vocabulary], &flex());
                output.extend(drawn(row, &sampling, SHORT + output.len()));
            }
            assert_eq!(actual, output, "{name}, {temperature}");
            assert_ne!(without, output, "{name}: no penalties");
        }
    });
}
