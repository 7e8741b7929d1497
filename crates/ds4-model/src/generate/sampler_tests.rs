use super::*;

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

/// A sampler at temperature 1 with one change.
fn sampler(change: impl FnOnce(&mut SamplingConfig)) -> Sampler {
    let mut config = SamplingConfig {
        temperature: 1.0,
        ..Default::default()
    };
    change(&mut config);
    Sampler::new(config).unwrap()
}

/// Logits whose softmax is proportional to `weights`.
fn logits_of(weights: &[f32]) -> Vec<f32> {
    weights.iter().map(|weight| weight.ln()).collect()
}

fn assert_distribution(actual: &Distribution, expected: &[(u32, f64)]) {
    let ids: Vec<u32> = expected.iter().map(|entry| entry.0).collect();
    assert_eq!(actual.ids(), ids, "{actual:?}");
    for &(id, probability) in expected {
        let error = (actual.probability(id) - probability).abs();
        assert!(
            error < 1e-6,
            "token {id}: {} instead of {probability}",
            actual.probability(id)
        );
    }
}

/// The same processing, written with full sorts.
fn oracle(config: &SamplingConfig, logits: &[f32]) -> Vec<(u32, f64)> {
    let mut ranked: Vec<(u32, f64)> = logits
        .iter()
        .enumerate()
        .map(|(id, &l)| (id as u32, f64::from(l)))
        .collect();
    ranked.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
    if config.top_k > 0 {
        ranked.truncate(config.top_k);
    }
    let highest = ranked[0].1;
    let weight = |logit: f64| ((logit - highest) / f64::from(config.temperature)).exp();
    let total: f64 = ranked.iter().map(|entry| weight(entry.1)).sum();
    let mut kept = Vec::new();
    let mut before = 0.0;
    for &(id, logit) in &ranked {
        if before >= f64::from(config.top_p) * total && config.top_p < 1.0 {
            break;
        }
        before += weight(logit);
        if weight(logit) >= f64::from(config.min_p) {
            kept.push((id, weight(logit)));
        }
    }
    let total: f64 = kept.iter().map(|entry| entry.1).sum();
    kept.sort_by_key(|entry| entry.0);
    kept.into_iter()
        .map(|(id, weight)| (id, weight / total))
        .collect()
}

#[test]
fn the_default_is_greedy_and_valid() {
    let config = SamplingConfig::default();
    config.validate().unwrap();
    assert_eq!(config.temperature, 0.0);
    assert_eq!(config.top_k, 0);
    assert_eq!(config.repetition_penalty, 1.0);
}

#[test]
fn a_bad_parameter_is_named_with_its_value() {
    type Set = fn(&mut SamplingConfig, f32);
    let cases: [(&str, Set, &[f32]); 4] = [
        (
            "temperature",
            |c, v| c.temperature = v,
            &[-0.1, NAN, INF, -INF],
        ),
        ("top_p", |c, v| c.top_p = v, &[0.0, -0.5, 1.01, NAN, INF]),
        ("min_p", |c, v| c.min_p = v, &[-0.01, 1.5, NAN, INF]),
        (
            "repetition_penalty",
            |c, v| c.repetition_penalty = v,
            &[0.0, -1.0, NAN, INF],
        ),
    ];
    for (parameter, set, values) in cases {
        for &bad in values {
            let mut config = SamplingConfig::default();
            set(&mut config, bad);
            match Sampler::new(config) {
                Err(GenerateError::SamplingParameter { name, value, .. }) => {
                    assert_eq!(name, parameter);
                    assert_eq!(value.to_bits(), bad.to_bits());
                }
                other => panic!("{parameter} = {bad}: {other:?}"),
            }
        }
    }
}

#[test]
fn the_ends_of_every_range_are_accepted() {
    for (top_p, min_p) in [(1.0, 0.0), (f32::MIN_POSITIVE, 1.0)] {
        let config = SamplingConfig {
            temperature: f32::MAX,
            top_k: usize::MAX,
            top_p,
            min_p,
            repetition_penalty: f32::MAX,
            seed: u64::MAX,
        };
        let distribution = Sampler::new(config)
            .unwrap()
            .distribution(&[1.0, f32::MAX, f32::MIN], &[1, 2])
            .unwrap();
        assert!((distribution.probabilities().iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }
}

#[test]
fn a_config_is_read_from_json_with_defaults_and_without_unknown_keys() {
    let config: SamplingConfig =
        serde_json::from_str(r#"{"temperature": 0.5, "top_k": 3}"#).unwrap();
    assert_eq!(
        config,
        SamplingConfig {
            temperature: 0.5,
            top_k: 3,
            ..Default::default()
        }
    );
    assert!(serde_json::from_str::<SamplingConfig>(r#"{"temprature": 0.5}"#).is_err());
}

#[test]
fn the_greedy_token_is_the_highest_logit_and_the_lower_id_of_a_tie() {
    assert_eq!(greedy_token(&[0.5, 2.0, -1.0, 2.0]).unwrap(), 1);
    assert_eq!(greedy_token(&[NAN, -3.0, NAN, -2.0]).unwrap(), 3);
    assert_eq!(greedy_token(&[1.0, INF, NAN, INF]).unwrap(), 1);
    assert_eq!(greedy_token(&[-0.0, 0.0]).unwrap(), 0);
}

#[test]
fn logits_without_a_candidate_are_an_error_at_any_temperature() {
    let cases: [&[f32]; 4] = [&[], &[NAN, NAN], &[-INF, -INF], &[NAN, -INF]];
    for logits in cases {
        assert!(
            matches!(greedy_token(logits), Err(GenerateError::NoCandidate { len }) if len == logits.len())
        );
        for (temperature, repetition_penalty) in [(0.0, 1.0), (0.0, 1.5), (1.0, 1.0)] {
            let sampler = sampler(|c| {
                (c.temperature, c.repetition_penalty, c.top_k) =
                    (temperature, repetition_penalty, 2)
            });
            assert!(matches!(
                sampler.distribution(logits, &[]),
                Err(GenerateError::NoCandidate { .. })
            ));
        }
    }
}

#[test]
fn temperature_zero_puts_all_mass_on_the_greedy_token() {
    let sampler = Sampler::new(SamplingConfig {
        top_k: 2,
        top_p: 0.5,
        ..Default::default()
    })
    .unwrap();
    assert_eq!(
        sampler.distribution(&[0.0, 3.0, 3.0], &[]).unwrap(),
        Distribution::one_hot(1)
    );
}

#[test]
fn temperature_divides_the_logits() {
    let logits = logits_of(&[1.0, 4.0]);
    assert_distribution(
        &sampler(|_| ()).distribution(&logits, &[]).unwrap(),
        &[(0, 0.2), (1, 0.8)],
    );
    let half = sampler(|c| c.temperature = 0.5)
        .distribution(&logits, &[])
        .unwrap();
    assert_distribution(&half, &[(0, 1.0 / 17.0), (1, 16.0 / 17.0)]);
    let double = sampler(|c| c.temperature = 2.0)
        .distribution(&logits, &[])
        .unwrap();
    assert_distribution(&double, &[(0, 1.0 / 3.0), (1, 2.0 / 3.0)]);
}

#[test]
fn extreme_temperatures_and_logits_stay_finite() {
    let logits = [f32::MAX, f32::MIN, 0.0];
    let cold = sampler(|c| c.temperature = 1e-45)
        .distribution(&logits, &[])
        .unwrap();
    assert_eq!(cold, Distribution::one_hot(0));
    let hot = sampler(|c| c.temperature = f32::MAX)
        .distribution(&[1.0, -1.0], &[])
        .unwrap();
    assert_distribution(&hot, &[(0, 0.5), (1, 0.5)]);
}

#[test]
fn top_k_keeps_the_highest_and_the_lower_ids_of_a_tie() {
    let logits = logits_of(&[2.0, 1.0, 4.0, 2.0, 2.0]);
    let top = |k| sampler(|c| c.top_k = k).distribution(&logits, &[]).unwrap();
    assert_distribution(&top(1), &[(2, 1.0)]);
    assert_distribution(&top(3), &[(0, 0.25), (2, 0.5), (3, 0.25)]);
    assert_eq!(top(5), top(0));
    assert_eq!(top(99), top(0));
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_its_mass() {
    let logits = logits_of(&[1.0, 4.0, 2.0, 1.0]);
    let top = |p| sampler(|c| c.top_p = p).distribution(&logits, &[]).unwrap();
    assert_distribution(&top(0.01), &[(1, 1.0)]);
    assert_distribution(&top(0.49), &[(1, 1.0)]);
    assert_distribution(&top(0.51), &[(1, 2.0 / 3.0), (2, 1.0 / 3.0)]);
    assert_distribution(&top(0.8), &[(0, 1.0 / 7.0), (1, 4.0 / 7.0), (2, 2.0 / 7.0)]);
    assert_eq!(top(0.9).ids(), [0, 1, 2, 3]);
}

#[test]
fn top_p_measures_the_mass_that_top_k_has_left() {
    let logits = logits_of(&[4.0, 3.0, 3.0]);
    let alone = sampler(|c| c.top_p = 0.5)
        .distribution(&logits, &[])
        .unwrap();
    assert_distribution(&alone, &[(0, 4.0 / 7.0), (1, 3.0 / 7.0)]);
    let after_top_k = sampler(|c| (c.top_k, c.top_p) = (2, 0.5))
        .distribution(&logits, &[])
        .unwrap();
    assert_distribution(&after_top_k, &[(0, 1.0)]);
}

#[test]
fn min_p_is_relative_to_the_most_probable_token() {
    let logits = logits_of(&[1.0, 10.0, 4.0]);
    let min = |p| sampler(|c| c.min_p = p).distribution(&logits, &[]).unwrap();
    assert_distribution(&min(0.3), &[(1, 10.0 / 14.0), (2, 4.0 / 14.0)]);
    assert_distribution(
        &min(0.05),
        &[(0, 1.0 / 15.0), (1, 10.0 / 15.0), (2, 4.0 / 15.0)],
    );
    assert_distribution(&min(1.0), &[(1, 1.0)]);
}

#[test]
fn the_repetition_penalty_weakens_each_token_of_the_history_once() {
    let sampler = sampler(|c| c.repetition_penalty = 2.0);
    let distribution = sampler.distribution(&[2.0, -1.0, 1.0], &[0, 1, 0]).unwrap();
    let weights = [1.0f64.exp(), (-2.0f64).exp(), 1.0f64.exp()];
    let total: f64 = weights.iter().sum();
    assert_distribution(
        &distribution,
        &[
            (0, weights[0] / total),
            (1, weights[1] / total),
            (2, weights[2] / total),
        ],
    );
}

#[test]
fn the_repetition_penalty_can_change_the_greedy_token() {
    let penalty = Sampler::new(SamplingConfig {
        repetition_penalty: 1.5,
        ..Default::default()
    })
    .unwrap();
    assert_eq!(penalty.distribution(&[2.0, 1.9], &[]).unwrap().argmax(), 0);
    assert_eq!(penalty.distribution(&[2.0, 1.9], &[0]).unwrap().argmax(), 1);
}

#[test]
fn a_history_token_without_a_logit_is_an_error() {
    let result = sampler(|c| c.repetition_penalty = 1.1).distribution(&[0.0, 1.0], &[1, 7]);
    assert!(matches!(
        result,
        Err(GenerateError::HistoryToken {
            index: 1,
            token: 7,
            vocab_size: 2
        })
    ));
}

#[test]
fn nan_and_negative_infinity_are_never_candidates() {
    let distribution = sampler(|_| ())
        .distribution(&[0.0, NAN, -INF, 0.0], &[])
        .unwrap();
    assert_distribution(&distribution, &[(0, 0.5), (3, 0.5)]);
}

#[test]
fn positive_infinities_share_the_mass_equally() {
    let logits = [1e30, INF, NAN, INF, INF];
    let third = 1.0 / 3.0;
    let all = sampler(|c| c.repetition_penalty = 3.0)
        .distribution(&logits, &[3])
        .unwrap();
    assert_distribution(&all, &[(1, third), (3, third), (4, third)]);
    let two = sampler(|c| c.top_k = 2).distribution(&logits, &[]).unwrap();
    assert_distribution(&two, &[(1, 0.5), (3, 0.5)]);
}

#[test]
fn partial_selection_equals_a_full_sort_on_a_whole_vocabulary() {
    let mut random = sampler(|c| c.seed = 5);
    // Rounded to quarters, so that ties cross every boundary.
    let logits: Vec<f32> = (0..129_280)
        .map(|_| ((random.uniform() as f32 - 0.5) * 48.0).round() / 4.0)
        .collect();
    for (temperature, top_k, top_p, min_p) in [
        (1.0, 0, 0.999, 0.0),
        (8.0, 0, 0.9, 0.0),
        (1.0, 50, 1.0, 0.0),
        (2.0, 1000, 0.7, 0.01),
        (1.5, 0, 1.0, 0.2),
    ] {
        let sampler = sampler(|c| {
            (c.temperature, c.top_k, c.top_p, c.min_p) = (temperature, top_k, top_p, min_p)
        });
        let actual = sampler.distribution(&logits, &[]).unwrap();
        assert_distribution(&actual, &oracle(sampler.config(), &logits));
        assert!((actual.probabilities().iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }
}

#[test]
fn seed_zero_is_the_published_chacha12_keystream_of_the_zero_key() {
    // draft-strombergson-chacha-test-vectors, TC1, 12 rounds, 256-bit key: 9b f4 9a 6a 07 55 f9 53 | 81 1f ce 12 5f 26 83 d5
    let mut sampler = sampler(|c| c.seed = 0);
    for block in [0x53f9_5507_6a9a_f49b_u64, 0xd583_265f_12ce_1f81] {
        assert_eq!(sampler.uniform(), (block >> 11) as f64 * 2f64.powi(-53));
    }
}

#[test]
fn a_seed_fixes_the_tokens_and_another_seed_changes_them() {
    let distribution = Distribution::from_weights((0..100).map(|id| (id, 1.0))).unwrap();
    let draw = |seed| {
        let mut sampler = sampler(|c| c.seed = seed);
        (0..32)
            .map(|_| sampler.sample(&distribution))
            .collect::<Vec<_>>()
    };
    assert_eq!(draw(7), draw(7));
    assert_ne!(draw(7), draw(8));
    assert_ne!(draw(7), draw(7 << 40));
}

#[test]
fn draws_have_the_frequencies_of_the_distribution() {
    let distribution = Distribution::from_weights([(3, 0.5), (10, 0.3), (11, 0.2)]).unwrap();
    let mut sampler = sampler(|c| c.seed = 1);
    let draws = 100_000;
    let mut counts = std::collections::BTreeMap::<u32, f64>::new();
    for _ in 0..draws {
        *counts.entry(sampler.sample(&distribution)).or_default() += 1.0;
    }
    assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [3, 10, 11]);
    for (id, probability) in distribution.iter() {
        // Five standard deviations.
        let bound = 5.0 * (probability * (1.0 - probability) / f64::from(draws)).sqrt();
        assert!(
            (counts[&id] / f64::from(draws) - probability).abs() < bound,
            "token {id}: {}",
            counts[&id]
        );
    }
}
