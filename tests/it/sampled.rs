//! Drawn tokens: those of the operator for the logits, the seed and the position, and as likely as on the host.

use burn::module::Param;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::sampling::{Draws, Sampling, sample, seed_words};
use ds4_model::cache::{CacheConfig, Rollback};
use ds4_model::generate::{
    Decoder, Distribution, GenerateConfig, GenerateError, Generation, Sampler, SamplingConfig,
};
use ds4_model::trace::Trace;

use crate::common::{floats, integer_values};
use crate::decoder::{SHORT, decode, decoder, has_graphs};
use crate::verification::{Fixture, every_model};

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

/// What the operator draws from one row for each seed, at positions of their own.
fn drawn(
    rows: Tensor<2>,
    sampling: &SamplingConfig,
    seeds: &[u64],
    positions: Vec<i32>,
) -> Vec<u32> {
    let device = rows.device();
    let positions = TensorData::new(positions, [seeds.len()]);
    let draws = Draws {
        seeds: seed_words(seeds, &device),
        positions: Tensor::<1, Int>::from_data(positions, &device),
    };
    let sampling = Sampling {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
    };
    let tokens = sample(rows, &sampling, draws).expect("valid parameters");
    let tokens = integer_values(tokens).into_iter();
    tokens.map(|token| token as u32).collect()
}

fn flex() -> Device {
    DeviceSpec::Flex.init().expect("Flex is always present")
}

fn sampling_decoder<'a>(
    fixture: &'a Fixture,
    graphs: bool,
    sampling: &SamplingConfig,
) -> Decoder<'a> {
    let decoder = decoder(fixture, SHORT, graphs).with_sampling(sampling);
    decoder.expect("valid parameters")
}

fn generation<'a>(
    fixture: &'a Fixture,
    prompt: usize,
    max_new_tokens: usize,
    sampling: SamplingConfig,
    graphs: bool,
) -> Generation<'a> {
    let config = GenerateConfig {
        max_new_tokens,
        sampling,
        graphs,
        ignore_eos: true,
        ..GenerateConfig::default()
    };
    let prompt = &fixture.prompt[..prompt];
    let generation = Generation::new(&fixture.model, &fixture.config, config, prompt);
    generation.expect("valid options")
}

fn text(generation: Generation) -> Vec<u32> {
    let tokens: Result<_, _> = generation.collect();
    tokens.expect("room, and finite logits")
}

/// Logits of the token after so many of the prompt.
fn row(fixture: &Fixture, prompt: usize) -> Vec<f32> {
    let options = CacheConfig {
        rollback: Rollback::Bounded(0),
        ..CacheConfig::default()
    };
    let cache = fixture.model.new_cache(&fixture.config, options);
    let mut cache = cache.expect("valid options");
    let streams = fixture.streams(&fixture.prompt[..prompt], &mut cache, &Trace::off());
    fixture.logits(streams.narrow(1, prompt - 1, 1)).remove(0)
}

#[test]
fn launched_and_replayed_steps_draw_what_the_operator_does_across_capacities() {
    every_model(|name, fixture| {
        let count = if name.starts_with("cuda") { 300 } else { 60 };
        let sampling = filtered(5);
        let run = |graphs| {
            let mut decoder = sampling_decoder(fixture, graphs, &sampling);
            let (tokens, rows) = decode(&mut decoder, count);
            for removed in [1, 4] {
                let back = decoder.truncate(removed, tokens[count - removed - 1]);
                back.expect("as far as the cache can be rolled back");
                let (again, _) = decode(&mut decoder, removed);
                assert_eq!(again, tokens[count - removed..], "{name}: drawn again");
            }
            assert_eq!(decoder.refusal(), None, "{name}");
            let replayed = graphs && has_graphs(name);
            assert_eq!(decoder.replays() > count / 2, replayed, "{name}");
            (tokens, rows)
        };
        let (tokens, rows) = run(false);
        let rows = rows.iter().flatten().flatten();
        let rows: Vec<f32> = rows.map(|bits| f32::from_bits(*bits)).collect();
        let rows = floats(&rows, [count, fixture.config.vocab_size], &flex());
        let positions = (SHORT..SHORT + count).map(|position| position as i32);
        let expected = drawn(rows, &sampling, &vec![5; count], positions.collect());
        assert_eq!(tokens, expected, "{name}: launched");
        assert_eq!(run(true).0, tokens, "{name}: replayed");
    });
}

#[test]
fn a_seed_gives_the_same_text_with_and_without_graphs_and_another_seed_another() {
    every_model(|name, fixture| {
        let run = |seed, graphs| text(generation(fixture, SHORT, 20, filtered(seed), graphs));
        let expected = run(1 << 40, false);
        assert_eq!(expected.len(), 20, "{name}");
        assert_eq!(run(1 << 40, true), expected, "{name}: with graphs");
        assert_ne!(run(2 << 40, true), expected, "{name}: another seed");
    });
}

#[test]
fn filters_and_a_seed_make_no_difference_without_a_temperature() {
    every_model(|name, fixture| {
        let (expected, rows) = decode(&mut decoder(fixture, SHORT, false), 20);
        let sampling = SamplingConfig {
            temperature: 0.0,
            ..filtered(7)
        };
        for graphs in [false, true] {
            let mut decoder = sampling_decoder(fixture, graphs, &sampling);
            let (actual, logits) = decode(&mut decoder, 20);
            assert_eq!(actual, expected, "{name}");
            assert!(logits[19] == rows[19], "{name}: logits");
        }
        // With a temperature, it is not for want of candidates.
        let mut decoder = sampling_decoder(fixture, true, &filtered(7));
        assert_ne!(decode(&mut decoder, 20).0, expected, "{name}");
    });
}

/// The 99.9th percentile of chi-square, by Wilson and Hilferty.
fn limit(degrees: usize) -> f64 {
    let share = 2.0 / (9.0 * degrees as f64);
    degrees as f64 * (1.0 - share + 3.09 * share.sqrt()).powi(3)
}

/// How far tokens are from how often they should be, and the degrees of freedom. What is rare is counted together.
fn chi_square(tokens: &[u32], distribution: &Distribution) -> (f64, usize) {
    let (mut statistic, mut classes) = (0.0, 0);
    let (mut rare, mut rare_expected) = (0, 0.0);
    let mut add = |count: usize, expected: f64| {
        statistic += (count as f64 - expected).powi(2) / expected;
        classes += 1;
    };
    for (id, probability) in distribution.iter() {
        let count = tokens.iter().filter(|token| **token == id).count();
        let expected = probability * tokens.len() as f64;
        if expected < 5.0 {
            rare += count;
            rare_expected += expected;
        } else {
            add(count, expected);
        }
    }
    if rare_expected > 0.0 {
        add(rare, rare_expected);
    }
    (statistic, classes - 1)
}

#[test]
fn first_tokens_of_many_seeds_have_the_distribution_of_the_host() {
    const PROMPT: usize = 6;
    every_model(|name, fixture| {
        let row = row(fixture, PROMPT);
        let seeds: Vec<u64> = (0..2000).map(|i| i * 0x1_0000_0001).collect();
        let samplings = [
            SamplingConfig {
                temperature: 1.0,
                ..SamplingConfig::default()
            },
            filtered(0),
        ];
        for sampling in samplings {
            let what = format!("{name}, {sampling:?}");
            let rows = floats(&row, [1, row.len()], &fixture.device);
            let rows = rows.repeat_dim(0, seeds.len());
            let positions = vec![PROMPT as i32; seeds.len()];
            let tokens = drawn(rows, &sampling, &seeds, positions);

            for number in [3, 1000] {
                let seed = seeds[number];
                let sampling = SamplingConfig {
                    seed,
                    ..sampling.clone()
                };
                let first = text(generation(fixture, PROMPT, 1, sampling, true));
                assert_eq!(first, [tokens[number]], "{what}: seed {seed}");
            }

            let sampler = Sampler::new(sampling).expect("valid parameters");
            let distribution = sampler.distribution(&row, &[]).expect("finite logits");
            let ids = distribution.ids();
            let other = tokens.iter().find(|token| !ids.contains(token));
            assert_eq!(other, None, "{what}: not kept on the host");
            let (statistic, degrees) = chi_square(&tokens, &distribution);
            assert!(degrees > 5, "{what}: only {degrees} degrees of freedom");
            assert!(
                statistic < limit(degrees),
                "{what}: {statistic} with {degrees} degrees of freedom"
            );
        }
    });
}

#[test]
fn nothing_is_drawn_where_no_logit_is_a_number() {
    every_model(|name, fixture| {
        let mut broken = fixture.clone();
        let output = broken.model.output.val();
        broken.model.output = Param::from_tensor(output.full_like(f32::NAN));
        let vocabulary = fixture.config.vocab_size;
        let is_expected = |error: &GenerateError| matches!(error, GenerateError::NoCandidate { len } if *len == vocabulary);
        let mut decoder = sampling_decoder(&broken, true, &filtered(0));
        let error = decoder.decode(100).expect_err("nothing can be drawn");
        assert!(is_expected(&error), "{name}: {error}");

        let penalised = SamplingConfig {
            repetition_penalty: 1.3,
            ..filtered(0)
        };
        for sampling in [SamplingConfig::default(), filtered(0), penalised] {
            let mut generation = generation(&broken, 3, 10, sampling, true);
            let error = generation.next().expect("an error").expect_err("no token");
            assert!(is_expected(&error), "{name}: {error}");
            assert!(generation.next().is_none(), "{name}: it is over");
        }
    });
}

#[test]
fn a_repetition_penalty_is_applied_by_the_host() {
    every_model(|name, fixture| {
        let (prompt, count) = (24, 6);
        for temperature in [0.0, 0.9] {
            let sampling = SamplingConfig {
                temperature,
                repetition_penalty: 1.5,
                ..filtered(4)
            };
            let error = decoder(fixture, 2, false).with_sampling(&sampling);
            assert!(
                matches!(
                    error,
                    Err(GenerateError::SamplingParameter { name, .. }) if name == "repetition_penalty"
                ),
                "{name}"
            );

            let actual = text(generation(fixture, prompt, count, sampling.clone(), true));
            let mut sampler = Sampler::new(sampling).expect("valid parameters");
            let mut history = fixture.prompt[..prompt].to_vec();
            let mut cache = fixture.cache(256);
            let mut input = history.clone();
            while history.len() < prompt + count {
                let streams = fixture.streams(&input, &mut cache, &Trace::off());
                let last = fixture.logits(streams.narrow(1, input.len() - 1, 1));
                let distribution = sampler.distribution(&last[0], &history);
                let token = sampler.sample(&distribution.expect("finite logits"));
                history.push(token);
                input = vec![token];
            }
            assert_eq!(actual, history[prompt..], "{name}, {temperature}");
        }
    });
}
