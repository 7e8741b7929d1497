//! Constraints: a text has tokens that are allowed, the same whatever is combined, and other texts
//! are as they are without it.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use ds4_model::generate::{
    Constraint, ConstraintError, EngineConfig, FinishReason, GenerateError, LogitsProcessor,
    Output, Request, SamplingConfig,
};
use ds4_model::trace::Trace;

use crate::common::some;
use crate::engine::{add, alone, engine, has_graphs, request, together};
use crate::two_layers::{CAPACITY, Fixture, PAGE, every_model, every_quick_model};

const VOCABULARY: usize = 1024;
const SHORT: usize = 12;

/// Allows the tokens that, with the one before, sum to a multiple of three: a mask that is not of
/// the newest token is wrong.
#[derive(Clone, Debug)]
struct Thirds(u32);

impl Thirds {
    fn allows(&self, token: u32) -> bool {
        (self.0 + token).is_multiple_of(3)
    }

    /// Whether a text that begins after `last` follows the rule.
    fn allow_all(last: u32, text: &[u32]) -> bool {
        let mut rule = Self(last);
        text.iter().all(|token| {
            let allowed = rule.allows(*token);
            rule.0 = *token;
            allowed
        })
    }
}

fn permit(mask: &mut [u32], token: u32) {
    mask[token as usize / 32] |= 1 << (token % 32);
}

impl Constraint for Thirds {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        assert_eq!(mask.len(), VOCABULARY / 32);
        let tokens = (0..VOCABULARY as u32).filter(|token| self.allows(*token));
        tokens.for_each(|token| permit(mask, token));
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if !self.allows(token) {
            return Err(format!("{token} after {}", self.0).into());
        }
        self.0 = token;
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// What happens after some tokens, any of which are allowed.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// Only this token is allowed.
    Only(u32),
    Nothing,
    Refuses,
    /// The token before is refused.
    Rejects,
}

#[derive(Clone, Debug)]
struct After(usize, Event);

impl Constraint for After {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        match (self.0, self.1) {
            (0, Event::Nothing) => (),
            (0, Event::Refuses) => return Err("too complex".into()),
            (0, Event::Only(token)) => permit(mask, token),
            _ => mask.fill(u32::MAX),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.0 = self.0.saturating_sub(1);
        match (self.0, self.1) {
            (0, Event::Rejects) => Err(format!("not {token}").into()),
            _ => Ok(()),
        }
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Allows some tokens at any time. Its copies can be counted.
#[derive(Clone, Debug)]
struct Among(Arc<Range<u32>>);

impl Constraint for Among {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), ConstraintError> {
        let Range { start, end } = *self.0;
        (start..end).for_each(|token| permit(mask, token));
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn constrained(request: Request, constraint: impl Constraint + 'static) -> Request {
    Request {
        constraint: Some(Box::new(constraint)),
        ..request
    }
}

pub(crate) fn by_thirds(request: Request) -> Request {
    let last = request.prompt[request.prompt.len() - 1];
    constrained(request, Thirds(last))
}

fn sampled(seed: u64) -> SamplingConfig {
    SamplingConfig {
        temperature: 1.2,
        top_p: 0.97,
        repetition_penalty: 1.2,
        seed,
        ..SamplingConfig::default()
    }
}

/// All outputs of requests that begin at the same time, in their order.
fn outputs(fixture: &Fixture, config: &EngineConfig, requests: &[Request]) -> Vec<Vec<Output>> {
    let mut engine = engine(fixture, config);
    let ids = requests.iter().map(|own| add(&mut engine, own.clone()));
    let ids: Vec<_> = ids.collect();
    let mut texts: Vec<Vec<Output>> = ids.iter().map(|_| Vec::new()).collect();
    while !engine.is_idle() {
        for output in engine.step().expect("a device that works") {
            let text = ids.iter().position(|id| *id == output.request);
            texts[text.expect("a request from above")].push(output);
        }
    }
    texts
}

fn tokens(outputs: &[Output]) -> Vec<u32> {
    let tokens = outputs
        .iter()
        .map_while(|output| output.token.as_ref().ok());
    tokens.copied().collect()
}

#[test]
fn greedy_tokens_are_those_of_the_highest_logits_that_are_allowed() {
    every_quick_model(|name, fixture| {
        let count = 30;
        let prompt = &fixture.prompt[..SHORT];
        let own = request(prompt, count);
        let actual = alone(fixture, &by_thirds(own.clone()));
        assert_ne!(
            actual,
            alone(fixture, &own),
            "{name}: a rule that tells nothing"
        );
        let mut cache = fixture.cache(CAPACITY + count);
        fixture.streams(&prompt[..SHORT - 1], &mut cache, &Trace::off());
        let mut tokens = vec![prompt[SHORT - 1]];
        while tokens.len() <= count {
            let last = tokens[tokens.len() - 1];
            let streams = fixture.streams(&[last], &mut cache, &Trace::off());
            let row = fixture.logits(streams).remove(0);
            let allowed = (0..row.len()).filter(|token| Thirds(last).allows(*token as u32));
            let best = allowed.reduce(|best, token| match row[token] > row[best] {
                true => token,
                false => best,
            });
            tokens.push(best.expect("allowed tokens") as u32);
        }
        assert_eq!(actual, tokens[1..], "{name}");
    });
}

#[test]
fn texts_with_and_without_constraints_are_those_that_they_are_alone() {
    every_model(|name, fixture| {
        let count = if name.starts_with("wgpu") { 14 } else { 40 };
        let prompt = |length: usize| request(&fixture.prompt[..length], count);
        let seeded = |length: usize| Request {
            sampling: sampled(length as u64),
            ..prompt(length)
        };
        let requests = [
            by_thirds(prompt(5)),
            prompt(7),
            by_thirds(seeded(9)),
            seeded(SHORT),
        ];
        let expected = requests.each_ref().map(|own| alone(fixture, own));
        for (own, text) in requests.iter().zip(&expected) {
            let last = own.prompt[own.prompt.len() - 1];
            let follows = Thirds::allow_all(last, text);
            assert_eq!(follows, own.constraint.is_some(), "{name}: {text:?}");
        }
        // Drafts, lanes at a time, positions of a page, graphs.
        let cases = [
            (0, 4, PAGE, true),
            (1, 4, 256, true),
            (3, 4, PAGE, false),
            (3, 1, 256, true),
        ];
        for &(drafts, lanes, page, graphs) in some(name, &cases, 3) {
            let config = EngineConfig {
                drafts,
                lanes,
                page,
                graphs,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let texts = together(&mut engine, &requests);
            for (index, (actual, expected)) in texts.iter().zip(&expected).enumerate() {
                assert_eq!(actual, expected, "{name}: text {index} with {config:?}");
            }
            assert_eq!(engine.graph_refusal(), None, "{name}");
            let replays = graphs && has_graphs(name) && count > 20;
            assert!(!replays || engine.replays() > 0, "{name} with {config:?}");
        }
    });
}

#[test]
fn drafts_of_a_constrained_text_are_verified() {
    every_quick_model(|name, fixture| {
        // Most drafts are allowed.
        let own = request(&fixture.prompt[..SHORT], 40);
        let own = constrained(own, Among(Arc::new(0..VOCABULARY as u32 * 3 / 4)));
        let expected = alone(fixture, &own);
        for drafts in [1, 2] {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            let text = together(&mut engine, std::slice::from_ref(&own)).remove(0);
            assert_eq!(text, expected, "{name}, {drafts} drafts");
            assert!(engine.stats().accepted > 5, "{name}: {:?}", engine.stats());
        }
    });
}

#[test]
fn a_constrained_text_that_joins_and_leaves_changes_no_other() {
    every_model(|name, fixture| {
        let config = EngineConfig {
            drafts: 1,
            ..EngineConfig::default()
        };
        let mut engine = engine(fixture, &config);
        // The first is long enough for a recording to be worth while.
        let slow = name.starts_with("wgpu");
        let (tokens, shorter) = if slow { (60, 12) } else { (90, 24) };
        let long = request(&fixture.prompt[..7], tokens);
        let short = [5, 9].map(|length| by_thirds(request(&fixture.prompt[..length], shorter)));
        let first = add(&mut engine, long.clone());
        let mut texts = crate::engine::Texts::new();
        let mut joined = Vec::new();
        let mut steps = 0;
        while !engine.is_idle() {
            if [8, 8 + shorter - 2].contains(&steps) {
                joined.push(add(&mut engine, short[joined.len()].clone()));
            }
            let outputs = engine.step().expect("a device that works");
            crate::engine::collect(outputs, &mut texts);
            steps += 1;
        }
        assert_eq!(texts[&first], alone(fixture, &long), "{name}");
        assert_eq!(joined.len(), 2, "{name}: the first text was too short");
        for (id, own) in joined.iter().zip(&short) {
            assert_eq!(texts[id], alone(fixture, own), "{name}");
        }
        assert_eq!(engine.graph_refusal(), None, "{name}");
        assert_eq!(engine.replays() > 0, has_graphs(name), "{name}");
    });
}

#[test]
fn a_constraint_is_dropped_with_the_step_that_ends_its_text() {
    every_quick_model(|name, fixture| {
        let mut engine = engine(fixture, &EngineConfig::default());
        let own = Arc::new(0..VOCABULARY as u32);
        let short = request(&fixture.prompt[..5], 4);
        let short = constrained(short, Among(own.clone()));
        let short = add(&mut engine, short);
        add(&mut engine, request(&fixture.prompt[..7], 8));
        while engine.progress(short).is_some() {
            assert!(Arc::strong_count(&own) > 1, "{name}");
            engine.step().expect("a device that works");
        }
        assert!(!engine.is_idle(), "{name}");
        assert_eq!(Arc::strong_count(&own), 1, "{name}");
    });
}

#[test]
fn a_text_ends_where_nothing_but_its_end_is_allowed() {
    every_quick_model(|name, fixture| {
        let eos = fixture.model.config().eos_token_id;
        for drafts in [0, 2] {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let own = Request::new(&fixture.prompt[..SHORT], 30);
            let own = constrained(own, After(7, Event::Only(eos)));
            let text = outputs(fixture, &config, &[own]).remove(0);
            assert_eq!(tokens(&text).len(), 8, "{name}, {drafts} drafts");
            let last = text.last().and_then(|output| output.finish);
            assert_eq!(last, Some(FinishReason::EndOfSequence), "{name}");
        }
    });
}

#[test]
fn a_constraint_that_fails_ends_its_text_with_its_reason_and_leaves_others_alone() {
    every_quick_model(|name, fixture| {
        let cases = [
            (Event::Nothing, "it allows no token"),
            (Event::Refuses, "too complex"),
            (Event::Rejects, "not "),
        ];
        for ((event, expected), drafts) in cases.into_iter().zip([0, 1, 2]) {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let other = request(&fixture.prompt[..7], 20);
            let own = constrained(request(&fixture.prompt[..5], 20), After(4, event));
            let texts = outputs(fixture, &config, &[own, other.clone()]);
            let [own, others] = &texts[..] else {
                panic!("two texts");
            };
            assert_eq!(tokens(own).len(), 4, "{name}: {event:?}");
            assert_eq!(own.len(), 5, "{name}: {event:?}");
            let error = own[4].token.as_ref().expect_err("the constraint fails");
            let is_it = matches!(error, GenerateError::Constraint { reason }
                if reason.starts_with(expected));
            assert!(is_it, "{name}: {error}");
            assert_eq!(tokens(others), alone(fixture, &other), "{name}: {event:?}");
        }
    });
}

/// No number for any token of the first half of the vocabulary.
fn upper_half(logits: Tensor<3>) -> Tensor<3> {
    let [lanes, rows, vocabulary] = logits.dims();
    let none = logits.clone().narrow(2, 0, vocabulary / 2);
    let none = none.full_like(f32::NAN);
    logits.slice_assign([0..lanes, 0..rows, 0..vocabulary / 2], none)
}

#[test]
fn tokens_without_a_number_matter_only_where_they_are_allowed() {
    every_quick_model(|name, fixture| {
        let half = VOCABULARY as u32 / 2;
        for (allowed, count) in [(half..2 * half, 6), (0..half, 0)] {
            let engine = engine(fixture, &EngineConfig::default());
            let mut engine = engine.with_logits_processor(upper_half as LogitsProcessor);
            let own = request(&fixture.prompt[..5], 6);
            add(
                &mut engine,
                constrained(own, Among(Arc::new(allowed.clone()))),
            );
            let mut outputs = Vec::new();
            while !engine.is_idle() {
                outputs.extend(engine.step().expect("a device that works"));
            }
            let text = tokens(&outputs);
            assert_eq!(text.len(), count, "{name}");
            assert!(text.iter().all(|token| allowed.contains(token)), "{name}");
            if count == 0 {
                let error = outputs[0].token.as_ref().expect_err("no number");
                let is_it = matches!(error, GenerateError::NoCandidate { len: VOCABULARY });
                assert!(is_it, "{name}: {error}");
            }
        }
    });
}
