use super::*;
use crate::generate::{SamplingConfig, greedy_token};

const VOCAB: u32 = 4;
const LENGTH: usize = 3;
const TRIALS: usize = 100_000;

type Round<'a> = dyn FnMut(&[u32], &mut Sampler) -> Result<Verdict, GenerateError> + 'a;

fn sampler(seed: u64) -> Sampler {
    Sampler::new(SamplingConfig {
        temperature: 1.0,
        seed,
        ..Default::default()
    })
    .unwrap()
}

/// A language of four words: what follows a prefix, as weights that sum to 20.
fn target(prefix: &[u32]) -> Distribution {
    const ROWS: [[f64; 4]; 5] = [
        [11.0, 5.0, 3.0, 1.0],
        [2.0, 12.0, 4.0, 2.0],
        [6.0, 0.0, 7.0, 7.0],
        [1.0, 1.0, 2.0, 16.0],
        [5.0, 5.0, 5.0, 5.0],
    ];
    let row = prefix
        .iter()
        .fold(prefix.len(), |hash, &token| hash * 3 + token as usize + 1)
        % ROWS.len();
    Distribution::from_weights((0..VOCAB).zip(ROWS[row])).unwrap()
}

/// A drafter that is right often, not always, and sometimes proposes what the target excludes.
fn deterministic_draft(prefix: &[u32]) -> u32 {
    match prefix.iter().sum::<u32>() % 3 {
        0 => target(prefix).argmax(),
        1 => (target(prefix).argmax() + 1) % VOCAB,
        _ => 1,
    }
}

/// A drafter's distribution that has little to do with the target.
fn proposal(prefix: &[u32]) -> Distribution {
    let shift = prefix.iter().sum::<u32>();
    Distribution::from_weights((0..VOCAB).map(|id| (id, f64::from((id + shift) % VOCAB)))).unwrap()
}

/// Drafts two tokens after `prefix` with `next`.
fn draft_two(prefix: &[u32], mut next: impl FnMut(&[u32]) -> u32) -> Vec<u32> {
    let mut text = prefix.to_vec();
    for _ in 0..2 {
        text.push(next(&text));
    }
    text.split_off(prefix.len())
}

/// Drafts two tokens from [`proposal`].
fn sampled_drafts(prefix: &[u32], drafter: &mut Sampler) -> (Vec<u32>, Vec<Option<Distribution>>) {
    let mut proposals = Vec::new();
    let drafts = draft_two(prefix, |text| {
        let distribution = proposal(text);
        let token = drafter.sample(&distribution);
        proposals.push(Some(distribution));
        token
    });
    (drafts, proposals)
}

fn after(prefix: &[u32], accepted: &[u32]) -> Result<Distribution, GenerateError> {
    Ok(target(&[prefix, accepted].concat()))
}

/// Chi-square of sequences of three tokens, decoded in as many rounds as it takes, against the products of the target's
/// conditional probabilities. Infinite where an impossible sequence occurred.
fn chi_square(seed: u64, round: &mut Round) -> (f64, usize) {
    let mut sampler = sampler(seed);
    let mut counts = vec![0usize; (VOCAB as usize).pow(LENGTH as u32)];
    for _ in 0..TRIALS {
        let mut text = Vec::new();
        while text.len() < LENGTH {
            let verdict = round(&text, &mut sampler).unwrap();
            assert_eq!(verdict.tokens.len(), verdict.accepted + 1);
            text.extend(verdict.tokens);
        }
        let cell = text[..LENGTH]
            .iter()
            .fold(0, |cell, &token| cell * VOCAB + token);
        counts[cell as usize] += 1;
    }
    let (mut statistic, mut cells) = (0.0, 0);
    for (cell, &count) in counts.iter().enumerate() {
        let text: Vec<u32> = (0..LENGTH)
            .rev()
            .map(|place| cell as u32 / VOCAB.pow(place as u32) % VOCAB)
            .collect();
        let probability: f64 = (0..LENGTH)
            .map(|at| target(&text[..at]).probability(text[at]))
            .product();
        let expected = probability * TRIALS as f64;
        if expected > 0.0 {
            statistic += (count as f64 - expected).powi(2) / expected;
            cells += 1;
        } else if count > 0 {
            statistic = f64::INFINITY;
        }
    }
    (statistic, cells - 1)
}

/// Upper 1e-4 quantile of the chi-square distribution (Wilson and Hilferty).
fn critical(freedom: usize) -> f64 {
    let scale = 2.0 / (9.0 * freedom as f64);
    freedom as f64 * (1.0 - scale + 3.719 * scale.sqrt()).powi(3)
}

fn assert_preserves_the_target(round: &mut Round) {
    for seed in 0..3 {
        let (statistic, freedom) = chi_square(seed, round);
        assert!(
            statistic < critical(freedom),
            "seed {seed}: {statistic} with {freedom} degrees of freedom"
        );
    }
}

fn assert_is_rejected(round: &mut Round) {
    for seed in 0..3 {
        let (statistic, freedom) = chi_square(seed, round);
        assert!(
            statistic > 10.0 * critical(freedom),
            "seed {seed}: {statistic} with {freedom} degrees of freedom"
        );
    }
}

#[test]
fn the_critical_value_is_that_of_the_tables() {
    // Chi-square, upper 1e-4, 50 degrees of freedom.
    assert!((critical(50) - 95.969).abs() < 0.2, "{}", critical(50));
}

#[test]
fn deterministic_drafts_keep_the_target_distribution() {
    assert_preserves_the_target(&mut |prefix, sampler| {
        verify(
            &draft_two(prefix, deterministic_draft),
            |_, accepted| after(prefix, accepted),
            sampler,
        )
    });
}

#[test]
fn drafts_from_a_proposal_keep_the_target_distribution() {
    let mut drafter = sampler(99);
    assert_preserves_the_target(&mut |prefix, sampler| {
        let (drafts, proposals) = sampled_drafts(prefix, &mut drafter);
        verify_with_proposals(
            &drafts,
            &proposals,
            |_, accepted| after(prefix, accepted),
            sampler,
        )
    });
}

#[test]
fn deterministic_and_sampled_drafts_may_be_mixed() {
    let mut drafter = sampler(98);
    assert_preserves_the_target(&mut |prefix, sampler| {
        let first = deterministic_draft(prefix);
        let second = proposal(&[prefix, &[first]].concat());
        let drafts = [first, drafter.sample(&second)];
        verify_with_proposals(
            &drafts,
            &[None, Some(second)],
            |_, accepted| after(prefix, accepted),
            sampler,
        )
    });
}

#[test]
fn drafts_of_any_origin_keep_the_target_distribution_when_treated_as_deterministic() {
    let mut drafter = sampler(96);
    assert_preserves_the_target(&mut |prefix, sampler| {
        let (drafts, _) = sampled_drafts(prefix, &mut drafter);
        verify(&drafts, |_, accepted| after(prefix, accepted), sampler)
    });
}

#[test]
fn the_statistic_rejects_accepting_any_draft_that_matches_the_argmax() {
    assert_is_rejected(&mut |prefix, sampler| {
        let mut tokens = Vec::new();
        for draft in draft_two(prefix, deterministic_draft) {
            let target = after(prefix, &tokens)?;
            if draft != target.argmax() {
                let accepted = tokens.len();
                tokens.push(sampler.sample(&target));
                return Ok(Verdict { accepted, tokens });
            }
            tokens.push(draft);
        }
        tokens.push(sampler.sample(&after(prefix, &tokens)?));
        Ok(Verdict {
            accepted: 2,
            tokens,
        })
    });
}

#[test]
fn the_statistic_rejects_redrawing_from_the_whole_target_after_a_rejection() {
    assert_is_rejected(&mut |prefix, sampler| {
        let drafts = draft_two(prefix, deterministic_draft);
        let mut verdict = verify(&drafts, |_, accepted| after(prefix, accepted), sampler)?;
        if verdict.accepted < drafts.len() {
            verdict.tokens[verdict.accepted] =
                sampler.sample(&after(prefix, &drafts[..verdict.accepted])?);
        }
        Ok(verdict)
    });
    let mut drafter = sampler(97);
    assert_is_rejected(&mut |prefix, sampler| {
        let (drafts, proposals) = sampled_drafts(prefix, &mut drafter);
        let target = |_: usize, accepted: &[u32]| after(prefix, accepted);
        let mut verdict = verify_with_proposals(&drafts, &proposals, target, sampler)?;
        if verdict.accepted < drafts.len() {
            verdict.tokens[verdict.accepted] =
                sampler.sample(&after(prefix, &drafts[..verdict.accepted])?);
        }
        Ok(verdict)
    });
}

#[test]
fn at_temperature_zero_the_output_is_that_of_plain_greedy_decoding() {
    // Logits depend on the history through the penalty, so a wrong prefix would show.
    let config = SamplingConfig {
        repetition_penalty: 1.3,
        ..Default::default()
    };
    let logits = |length: usize| -> Vec<f32> {
        (0..64)
            .map(|id| ((length * 5 + id * 13) % 67) as f32 / 10.0 - 1.0)
            .collect()
    };
    let mut plain = vec![2];
    let greedy = Sampler::new(config.clone()).unwrap();
    while plain.len() < 40 {
        plain.push(
            greedy
                .distribution(&logits(plain.len()), &plain)
                .unwrap()
                .argmax(),
        );
    }
    let unpenalised: Vec<u32> = (1..40)
        .map(|length| greedy_token(&logits(length)).unwrap())
        .collect();
    assert_ne!(plain[1..], unpenalised, "the penalty must matter here");
    for drafts in 1..=4 {
        let mut sampler = Sampler::new(config.clone()).unwrap();
        let mut stats = SpeculativeStats::default();
        let mut text = vec![2];
        while text.len() < 40 {
            // Right in three of four positions.
            let guess = |at: usize| {
                plain.get(at).map_or(
                    0,
                    |&token| if at % 4 == 3 { (token + 1) % 64 } else { token },
                )
            };
            let drafts: Vec<u32> = (0..drafts)
                .map(|offset| guess(text.len() + offset))
                .collect();
            let verdict = verify(
                &drafts,
                |index, accepted| {
                    assert_eq!(accepted, &drafts[..index]);
                    let history = [&text[..], accepted].concat();
                    greedy.distribution(&logits(history.len()), &history)
                },
                &mut sampler,
            )
            .unwrap();
            stats.record(drafts.len(), verdict.accepted);
            text.extend(verdict.tokens);
        }
        assert_eq!(text[..40], plain);
        assert!(
            stats.acceptance() > 0.3 && stats.acceptance() < 1.0,
            "{stats:?}"
        );
    }
}

#[test]
fn drafts_behind_the_first_that_falls_are_not_evaluated() {
    let mut asked = Vec::new();
    let verdict = verify(
        &[5, 6, 7],
        |index, _| {
            asked.push(index);
            Ok::<_, GenerateError>(Distribution::one_hot(if index == 1 {
                9
            } else {
                index as u32 + 5
            }))
        },
        &mut sampler(0),
    )
    .unwrap();
    assert_eq!(
        verdict,
        Verdict {
            accepted: 1,
            tokens: vec![5, 9]
        }
    );
    assert_eq!(asked, [0, 1]);
}

#[test]
fn accepted_drafts_are_followed_by_one_token_more() {
    let target =
        |index: usize, _: &[u32]| Ok::<_, GenerateError>(Distribution::one_hot(index as u32 + 5));
    let verdict = verify(&[5, 6], target, &mut sampler(0)).unwrap();
    assert_eq!(
        verdict,
        Verdict {
            accepted: 2,
            tokens: vec![5, 6, 7]
        }
    );
    let verdict = verify(&[], target, &mut sampler(0)).unwrap();
    assert_eq!(
        verdict,
        Verdict {
            accepted: 0,
            tokens: vec![5]
        }
    );
}

#[test]
fn a_proposal_equal_to_the_target_always_stands() {
    let distribution = target(&[]);
    let mut sampler = sampler(4);
    for _ in 0..1000 {
        let draft = sampler.sample(&distribution);
        let verdict = verify_with_proposals(
            &[draft],
            &[Some(distribution.clone())],
            |_, accepted| after(&[], accepted),
            &mut sampler,
        );
        assert_eq!(verdict.unwrap().accepted, 1);
    }
}

#[test]
fn a_draft_outside_its_own_proposal_falls() {
    let verdict = verify_with_proposals(
        &[3],
        &[Some(Distribution::one_hot(2))],
        |_, _| Ok::<_, GenerateError>(Distribution::one_hot(3)),
        &mut sampler(0),
    );
    assert_eq!(
        verdict.unwrap(),
        Verdict {
            accepted: 0,
            tokens: vec![3]
        }
    );
}

#[test]
fn a_missing_proposal_is_an_error() {
    let result = verify_with_proposals(
        &[1, 2],
        &[None],
        |_, accepted| after(&[], accepted),
        &mut sampler(0),
    );
    assert!(matches!(
        result,
        Err(GenerateError::ProposalCount {
            drafts: 2,
            proposals: 1
        })
    ));
}

#[test]
fn an_error_of_the_target_is_passed_on() {
    let result = verify(
        &[1],
        |_, _| Err(GenerateError::NoCandidate { len: 4 }),
        &mut sampler(0),
    );
    assert!(matches!(result, Err(GenerateError::NoCandidate { len: 4 })));
}

#[test]
fn statistics_count_each_position_of_a_round() {
    let mut stats = SpeculativeStats::default();
    assert_eq!(stats.acceptance(), 0.0);
    stats.record(1, 1);
    stats.record(3, 2);
    stats.record(3, 0);
    stats.record(0, 0);
    assert_eq!((stats.rounds, stats.drafted, stats.accepted), (4, 7, 3));
    let positions: Vec<_> = stats
        .per_position
        .iter()
        .map(|position| (position.drafted, position.accepted))
        .collect();
    assert_eq!(positions, [(3, 2), (2, 1), (2, 0)]);
    assert!((stats.acceptance() - 3.0 / 7.0).abs() < 1e-15);
}
