//! Recorded cycles of speculative decoding: text and acceptance are those of rounds that are launched, and the text is that without
//! drafts.

use ds4_model::generate::{
    FinishReason, GenerateConfig, Generation, MAX_DRAFTS, SamplingConfig, SpeculativeStats,
};

use crate::decoder::has_graphs;
use crate::flash_head::{CLUSTERS, head};
use crate::verification::{Fixture, every_model};

/// What came of a generation.
struct Text {
    tokens: Vec<u32>,
    stats: SpeculativeStats,
    replays: usize,
}

fn text(name: &str, fixture: &Fixture, config: GenerateConfig) -> Text {
    let config = GenerateConfig {
        ignore_eos: true,
        ..config
    };
    let generation = Generation::new(&fixture.model, &fixture.config, config, &fixture.prompt);
    let mut generation = generation.expect("valid options");
    let tokens: Result<Vec<u32>, _> = generation.by_ref().collect();
    assert_eq!(generation.finish_reason(), Some(FinishReason::Length));
    assert_eq!(generation.graph_refusal(), None, "{name}");
    Text {
        tokens: tokens.expect("room, and finite logits"),
        stats: generation.stats().clone(),
        replays: generation.replays(),
    }
}

fn greedy(drafts: usize, graphs: bool, max_new_tokens: usize) -> GenerateConfig {
    GenerateConfig {
        max_new_tokens,
        drafts,
        graphs,
        ..GenerateConfig::default()
    }
}

#[test]
fn recorded_cycles_have_the_text_and_the_acceptance_of_launched_rounds_across_capacities() {
    every_model(|name, fixture| {
        // The cache grows from 256 positions to 512, of which the prompt takes 120.
        let (count, most) = match name {
            _ if name.starts_with("cuda") => (900, MAX_DRAFTS),
            _ if has_graphs(name) => (190, 1),
            "flex F32" => (150, 2),
            _ => (60, 1),
        };
        let plain = text(name, fixture, greedy(0, true, count));
        for drafts in 1..=most {
            let launched = text(name, fixture, greedy(drafts, false, count));
            let recorded = text(name, fixture, greedy(drafts, true, count));
            let what = format!("{name}, {drafts} drafts");
            assert_eq!(launched.tokens, plain.tokens, "{what}: launched");
            assert_eq!(recorded.tokens, plain.tokens, "{what}: recorded");
            assert_eq!(recorded.stats, launched.stats, "{what}");
            assert!(recorded.stats.accepted > 0, "{what}: no draft stood");
            assert!(
                recorded.stats.acceptance() < 1.0,
                "{what}: all drafts stood"
            );
            assert_eq!(launched.replays, 0, "{what}");
            if has_graphs(name) {
                let rounds = recorded.stats.rounds;
                let replays = recorded.replays;
                assert!(replays > rounds / 2, "{what}: {replays} of {rounds}");
            } else {
                assert_eq!(recorded.replays, 0, "{what}");
            }
        }
    });
}

#[test]
fn a_text_of_any_length_with_recorded_cycles_is_the_beginning_of_a_longer_one() {
    every_model(|name, fixture| {
        let plain = text(name, fixture, greedy(0, false, 64)).tokens;
        // The first token comes with the prompt; a recording of two drafts is worth while for 48 more.
        for length in [48, 49, 51, 64] {
            let recorded = text(name, fixture, greedy(2, true, length));
            assert_eq!(recorded.tokens, plain[..length], "{name}, {length}");
            if length % 2 == 1 {
                let launched = text(name, fixture, greedy(2, false, length));
                assert_eq!(recorded.stats, launched.stats, "{name}, {length}");
            }
            let expected = has_graphs(name) && length > 48;
            assert_eq!(recorded.replays > 0, expected, "{name}, {length}");
            // To the end, though the last round may be of fewer drafts.
            let launched = recorded.stats.rounds - recorded.replays.min(recorded.stats.rounds);
            assert!(!expected || launched <= 2, "{name}, {length}: {launched}");
        }
    });
}

#[test]
fn rounds_that_draw_or_choose_by_a_clustered_head_are_launched() {
    every_model(|name, fixture| {
        let mut other = fixture.clone();
        let mtp = other
            .model
            .mtp
            .as_mut()
            .expect("the asset has an MTP layer");
        mtp.flash_head = Some(head(&fixture.model, CLUSTERS));
        let expected = text(name, fixture, greedy(0, false, 40)).tokens;
        let clustered = text(name, &other, greedy(1, true, 40));
        assert_eq!(clustered.tokens, expected, "{name}");
        assert_eq!(clustered.replays, 0, "{name}");

        let sampling = SamplingConfig {
            temperature: 0.5,
            ..SamplingConfig::default()
        };
        let drawn = |graphs| {
            let sampling = sampling.clone();
            let config = greedy(1, graphs, 40);
            text(name, fixture, GenerateConfig { sampling, ..config })
        };
        let (graphs, none) = (drawn(true), drawn(false));
        assert_eq!(graphs.tokens, none.tokens, "{name}");
        assert_eq!(graphs.replays, 0, "{name}");
    });
}
