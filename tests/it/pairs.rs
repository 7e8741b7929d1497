//! Every pair of what the engine combines: each text has the tokens that it has alone, greedily or
//! drawn, without drafts, graphs and clusters.

use std::collections::{BTreeMap, BTreeSet};

use burn_ds4_ops::quant::Activations;
use ds4_model::generate::{EngineConfig, FinishReason, Output, Request, RequestId, SamplingConfig};

use crate::common::{compiles_slowly, devices};
use crate::constraints::by_thirds;
use crate::engine::{Random, add, engine, has_graphs, penalised, request, sampled, together};
use crate::flash_head::{CLUSTERS, head};
use crate::two_layers::{Fixture, PAGE, every_model, text};
use crate::v41_goldens;

/// More than a decode step takes, so that a prompt has a prefill step and a mark after it.
const CHUNK: usize = 20;
/// Tokens of the prompts.
const PROMPTS: [usize; 4] = [1, 12, 28, 41];
/// Which of them has a constraint, where one has.
const CONSTRAINED: usize = 1;
/// Most tokens of a step of which each has the same bits alone.
const MOST_ROWS: usize = 16;

const DRAFTS: [usize; 4] = [0, 1, 3, 8];
const LANES: [usize; 3] = [1, 2, 4];
const STEPS_AHEAD: [usize; 3] = [0, 1, 3];
const LOG_PROBS: [Option<usize>; 3] = [None, Some(0), Some(3)];
/// Greedy, sampled, with penalties and bias, the same greedily; the last: each text another.
const SAMPLINGS: usize = 5;

/// Numbers of the values of each feature, which a [`Case`] has in this order.
const VALUES: [usize; 13] = [
    DRAFTS.len(),
    LANES.len(),
    STEPS_AHEAD.len(),
    LOG_PROBS.len(),
    SAMPLINGS,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
    2,
];

/// One value of each feature.
#[derive(Clone, Copy, Debug)]
struct Case {
    drafts: usize,
    lanes: usize,
    steps_ahead: usize,
    log_probs: Option<usize>,
    sampling: usize,
    graphs: bool,
    /// Whether texts have several pages.
    pages: bool,
    /// Whether a clustered head chooses the text.
    head: bool,
    /// Whether one chooses the drafts.
    draft_head: bool,
    /// Whether a stop token ends the texts.
    stops: bool,
    constraint: bool,
    /// Whether texts are kept, and the prompts come again.
    prefixes: bool,
    /// Whether texts join one after the other, and one leaves.
    joins: bool,
}

impl Case {
    fn of(values: [usize; VALUES.len()]) -> Self {
        let yes = |feature: usize| values[feature] == 1;
        Self {
            drafts: DRAFTS[values[0]],
            lanes: LANES[values[1]],
            steps_ahead: STEPS_AHEAD[values[2]],
            log_probs: LOG_PROBS[values[3]],
            sampling: values[4],
            graphs: yes(5),
            pages: yes(6),
            head: yes(7),
            draft_head: yes(8),
            stops: yes(9),
            constraint: yes(10),
            prefixes: yes(11),
            joins: yes(12),
        }
    }

    fn config(&self) -> EngineConfig {
        EngineConfig {
            lanes: self.lanes,
            drafts: self.drafts,
            prefill_chunk: CHUNK,
            page: if self.pages { PAGE } else { 256 },
            prefix_bytes: if self.prefixes { 1 << 20 } else { 0 },
            exact_prefix: true,
            graphs: self.graphs,
            steps_ahead: self.steps_ahead,
            ..EngineConfig::default()
        }
    }

    /// The kind of sampling of a text.
    fn kind(&self, index: usize) -> usize {
        match self.sampling {
            4 => (1 + index) % 4,
            kind => kind,
        }
    }
}

/// Two features with a value of each.
type Pair = [(usize, usize); 2];

fn is_possible(pair: &Pair) -> bool {
    match *pair {
        [(0, drafts), (1, lanes)] => (1 + DRAFTS[drafts]) * LANES[lanes] <= MOST_ROWS,
        _ => true,
    }
}

fn pairs_of(values: &[usize; VALUES.len()]) -> impl Iterator<Item = Pair> + '_ {
    let later = |first| (first + 1..VALUES.len()).map(move |second| (first, second));
    let pairs = (0..VALUES.len()).flat_map(later);
    pairs.map(|(first, second)| [(first, values[first]), (second, values[second])])
}

/// Few cases that have every pair of values of two features.
fn cases() -> Vec<Case> {
    let mut missing = BTreeSet::new();
    let features = || VALUES.into_iter().enumerate();
    for (first, values) in features() {
        for (second, others) in features().skip(first + 1) {
            for value in 0..values {
                let all = (0..others).map(|other| [(first, value), (second, other)]);
                missing.extend(all.filter(is_possible));
            }
        }
    }
    let mut random = Random(1);
    let mut cases = Vec::new();
    while let Some(&pair) = missing.iter().next() {
        let drawn = (0..200).map(|_| {
            let mut values = VALUES.map(|count| random.below(count));
            for (feature, value) in pair {
                values[feature] = value;
            }
            values
        });
        let possible = drawn.filter(|values| pairs_of(values).all(|pair| is_possible(&pair)));
        let new = |values: &[usize; VALUES.len()]| {
            pairs_of(values)
                .filter(|pair| missing.contains(pair))
                .count()
        };
        let best = possible.max_by_key(new).expect("one of so many");
        pairs_of(&best).for_each(|pair| {
            missing.remove(&pair);
        });
        cases.push(Case::of(best));
    }
    cases
}

fn sampling(kind: usize, index: usize) -> SamplingConfig {
    let seed = index as u64;
    match kind {
        0 => SamplingConfig::default(),
        1 => sampled(seed),
        2 => penalised(seed),
        _ => SamplingConfig {
            temperature: 0.0,
            ..penalised(seed)
        },
    }
}

/// A text of tokens of the model.
fn prompt(fixture: &Fixture, count: usize) -> Vec<u32> {
    let vocabulary = fixture.model.config().vocab_size as u32;
    let text = text(count).into_iter();
    text.map(|id| id % vocabulary).collect()
}

/// Texts alone, by prompt, kind of sampling and whether there is a constraint.
struct Alone<'a> {
    fixture: &'a Fixture,
    count: usize,
    known: BTreeMap<(usize, usize, bool), Vec<u32>>,
}

impl Alone<'_> {
    /// A text of a case, and what it is to be.
    fn of(&mut self, case: &Case, index: usize) -> (Request, Vec<u32>) {
        let (kind, count) = (case.kind(index), self.count);
        let constraint = case.constraint && index == CONSTRAINED;
        let plain = request(&prompt(self.fixture, PROMPTS[index]), count);
        let plain = Request {
            sampling: sampling(kind, index),
            ..plain
        };
        let own = if constraint { by_thirds(plain) } else { plain };
        let known = self.known.entry((index, kind, constraint));
        let tokens = known.or_insert_with(|| {
            let config = EngineConfig {
                lanes: 1,
                prefill_chunk: CHUNK,
                graphs: false,
                ..EngineConfig::default()
            };
            let mut engine = engine(self.fixture, &config);
            together(&mut engine, std::slice::from_ref(&own)).remove(0)
        });
        let last = tokens[count / 2];
        let own = Request {
            log_probs: case.log_probs,
            stop_tokens: if case.stops { vec![last] } else { Vec::new() },
            ..own
        };
        let end = tokens.iter().position(|token| *token == last);
        let end = end.filter(|_| case.stops).unwrap_or(count - 1);
        (own, tokens[..=end].to_vec())
    }
}

fn check(outputs: &[Output], expected: &[u32], case: &Case, what: &str) {
    let tokens = outputs.iter().map(|output| output.token.as_ref().ok());
    let tokens: Option<Vec<u32>> = tokens.map(|token| token.copied()).collect();
    assert_eq!(tokens.as_deref(), Some(expected), "{what}");
    let end = match case.stops {
        true => FinishReason::StopToken,
        false => FinishReason::Length,
    };
    let (last, others) = outputs.split_last().expect("a token");
    assert_eq!(last.finish, Some(end), "{what}");
    assert!(
        others.iter().all(|output| output.finish.is_none()),
        "{what}"
    );
    for output in outputs {
        let listed = output.log_probs.as_ref();
        let listed = listed.map(|listed| listed.top.len());
        assert_eq!(listed, case.log_probs, "{what}");
    }
}

/// Returns how many steps were replayed.
fn run(fixture: &Fixture, case: &Case, alone: &mut Alone, what: &str) -> usize {
    let texts: Vec<_> = (0..PROMPTS.len())
        .map(|index| alone.of(case, index))
        .collect();
    let mut engine = engine(fixture, &case.config());
    let mut outputs: BTreeMap<RequestId, Vec<Output>> = BTreeMap::new();
    let rounds = if case.prefixes { 2 } else { 1 };
    let mut ids = Vec::new();
    for _ in 0..rounds {
        let leaving = || add(&mut engine, request(&prompt(fixture, 5), 100));
        let leaving = case.joins.then(leaving);
        let (mut waiting, mut steps) = (texts.iter(), 0);
        loop {
            let joining = if case.joins { 1 } else { texts.len() };
            let joining = waiting.by_ref().take(joining);
            ids.extend(joining.map(|(request, _)| add(&mut engine, request.clone())));
            for output in engine.step().expect("a device that works") {
                outputs.entry(output.request).or_default().push(output);
            }
            steps += 1;
            if let Some(id) = leaving.filter(|_| steps == 3) {
                engine.abort(id).expect("it is there");
            }
            if engine.is_idle() && waiting.len() == 0 {
                break;
            }
        }
    }
    for (index, id) in ids.iter().enumerate() {
        let (_, expected) = &texts[index % texts.len()];
        check(
            &outputs[id],
            expected,
            case,
            &format!("{what}, text {index}"),
        );
    }
    assert_eq!(engine.stats().drafted > 0, case.drafts > 0, "{what}");
    assert_eq!(engine.graph_refusal(), None, "{what}");
    engine.replays()
}

#[test]
fn every_pair_of_features_gives_each_text_the_tokens_that_it_has_alone() {
    // Some of the cases where a step takes long, or another dtype has them all.
    every_model(|name, fixture| {
        let (count, every) = match name {
            _ if name.starts_with("cuda") => (48, 1),
            _ if name.starts_with("wgpu") => (6, 12),
            "flex F32" => (16, 1),
            _ => (16, 4),
        };
        check_all(name, fixture, (count, every));
    });
}

#[test]
fn pairs_of_features_give_texts_of_v41_the_tokens_that_they_have_alone() {
    let quick = devices().iter().filter(|(name, _)| !compiles_slowly(name));
    for (name, device) in quick {
        let golden = v41_goldens::Fixture::new("exact");
        let fixture = Fixture {
            model: golden.load(Activations::Exact, device),
            device: device.clone(),
            prompt: Vec::new(),
        };
        check_all(&format!("{name} V4.1"), &fixture, (16, 3));
    }
}

/// Every so many of the cases, with texts of so many tokens.
fn check_all(name: &str, fixture: &Fixture, (count, every): (usize, usize)) {
    let cases = cases();
    let (known, mut replays) = (BTreeMap::new(), 0);
    let mut alone = Alone {
        fixture,
        count,
        known,
    };
    // Clusters are those of another model, and a block of drafts has no more.
    let is_v41 = fixture.model.config().has_v41_parts();
    let most = if is_v41 { 5 } else { usize::MAX };
    for (index, case) in cases.iter().enumerate().step_by(every) {
        let case = &Case {
            drafts: case.drafts.min(most),
            ..*case
        };
        let mut own = fixture.clone();
        let clustered = |wanted: bool| {
            let wanted = wanted && !is_v41;
            wanted.then(|| head(&fixture.model, CLUSTERS))
        };
        own.model.flash_head = clustered(case.head);
        own.model.set_draft_head(clustered(case.draft_head));
        let what = format!("{name}, case {index} of {}: {case:?}", cases.len());
        let replayed = run(&own, case, &mut alone, &what);
        assert!(case.graphs || replayed == 0, "{what}");
        replays += replayed;
    }
    let texts: BTreeSet<_> = alone.known.values().collect();
    assert!(texts.len() > 15 / every, "{name}: texts that tell nothing");
    assert_eq!(replays > 0, has_graphs(name), "{name}");
}
