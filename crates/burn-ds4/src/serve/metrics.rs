//! What the server counts, as text for Prometheus.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Display, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ds4_model::generate::{Engine, SpeculativeStats};

/// Seconds that rates are averages over.
const WINDOW: u64 = 10;
/// Upper bounds of the histograms, in seconds.
const FIRST_TOKEN: [f64; 12] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
];
const TOKEN: [f64; 12] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0,
];

/// Counts of the whole server.
#[derive(Debug)]
pub struct Metrics(Mutex<Figures>);

/// What one step did.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepFigures {
    /// Tokens of prompts that were processed, or taken from a prefix.
    pub prompt: usize,
    /// Those of them that were taken from a prefix, of texts that had their first token.
    pub cached: usize,
    /// Tokens that were generated.
    pub generated: usize,
    /// How long it took.
    pub time: Duration,
}

#[derive(Debug)]
struct Figures {
    started: Instant,
    requests: BTreeMap<&'static str, u64>,
    waiting: usize,
    running: usize,
    lanes: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    generated_tokens: usize,
    drafted: usize,
    accepted: usize,
    seconds: VecDeque<Second>,
    first_token: Histogram<12>,
    token: Histogram<12>,
}

/// What the steps of one second did.
#[derive(Clone, Copy, Debug, Default)]
struct Second {
    /// Since the start.
    number: u64,
    prefill: Rate,
    decode: Rate,
}

/// Tokens, and the time of the steps that they came from.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: usize,
    time: Duration,
}

impl Rate {
    fn add(&mut self, tokens: usize, time: Duration) {
        if tokens > 0 {
            self.tokens += tokens;
            self.time += time;
        }
    }

    fn per_second(self) -> f64 {
        match self.time {
            Duration::ZERO => 0.0,
            time => self.tokens as f64 / time.as_secs_f64(),
        }
    }
}

#[derive(Debug)]
struct Histogram<const N: usize> {
    bounds: [f64; N],
    /// Those up to each bound that are above the one before.
    counts: [u64; N],
    count: u64,
    sum: f64,
}

impl<const N: usize> Histogram<N> {
    fn new(bounds: [f64; N]) -> Self {
        Self {
            bounds,
            counts: [0; N],
            count: 0,
            sum: 0.0,
        }
    }

    fn observe(&mut self, value: f64, times: u32) {
        let bound = self.bounds.iter().position(|bound| value <= *bound);
        if let Some(bound) = bound {
            self.counts[bound] += u64::from(times);
        }
        self.count += u64::from(times);
        self.sum += value * f64::from(times);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) -> fmt::Result {
        describe(out, name, "histogram", help)?;
        let mut total = 0;
        for (bound, count) in self.bounds.iter().zip(self.counts) {
            total += count;
            writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}")?;
        }
        writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", self.count)?;
        writeln!(out, "{name}_sum {}", self.sum)?;
        writeln!(out, "{name}_count {}", self.count)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self(Mutex::new(Figures {
            started: Instant::now(),
            requests: BTreeMap::new(),
            waiting: 0,
            running: 0,
            lanes: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 0,
            drafted: 0,
            accepted: 0,
            seconds: VecDeque::new(),
            first_token: Histogram::new(FIRST_TOKEN),
            token: Histogram::new(TOKEN),
        }))
    }
}

impl Metrics {
    fn figures(&self) -> MutexGuard<'_, Figures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request by how it ended.
    pub fn request(&self, outcome: &'static str) {
        *self.figures().requests.entry(outcome).or_default() += 1;
    }

    /// Takes note of the texts that the engine has at present.
    pub fn load(&self, engine: &Engine) {
        let mut figures = self.figures();
        figures.waiting = engine.waiting();
        figures.running = engine.running();
        figures.lanes = engine.lanes();
    }

    /// Counts a step; `drafts` are those of all steps.
    pub fn step(&self, step: StepFigures, drafts: &SpeculativeStats) {
        let mut figures = self.figures();
        figures.prompt_tokens += step.prompt;
        figures.cached_tokens += step.cached;
        figures.generated_tokens += step.generated;
        figures.drafted = drafts.drafted;
        figures.accepted = drafts.accepted;
        let second = figures.second();
        second.prefill.add(step.prompt, step.time);
        second.decode.add(step.generated, step.time);
    }

    /// Counts the first token of a text.
    pub fn first_token(&self, time: Duration) {
        self.figures().first_token.observe(time.as_secs_f64(), 1);
    }

    /// Counts further tokens of a text, which came together.
    pub fn tokens(&self, time: Duration, count: u32) {
        let each = time.as_secs_f64() / f64::from(count.max(1));
        self.figures().token.observe(each, count);
    }

    /// All figures as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.figures().write(&mut out);
        out
    }
}

impl Figures {
    /// The present second; those that are too old are dropped.
    fn second(&mut self) -> &mut Second {
        let number = self.started.elapsed().as_secs();
        let seconds = &mut self.seconds;
        seconds.retain(|second| second.number + WINDOW > number);
        if seconds.back().is_none_or(|second| second.number != number) {
            seconds.push_back(Second {
                number,
                ..Second::default()
            });
        }
        let last = seconds.len() - 1;
        &mut seconds[last]
    }

    fn write(&mut self, out: &mut String) -> fmt::Result {
        self.second();
        let mut rates = [Rate::default(); 2];
        for second in &self.seconds {
            for (rate, part) in rates.iter_mut().zip([second.prefill, second.decode]) {
                rate.add(part.tokens, part.time);
            }
        }
        let name = "ds4_requests_total";
        describe(out, name, "counter", "Requests for text that have ended.")?;
        for (outcome, count) in &self.requests {
            writeln!(out, "{name}{{outcome=\"{outcome}\"}} {count}")?;
        }
        let gauges: [(&str, &str, &dyn Display); 5] = [
            (
                "ds4_texts_waiting",
                "Texts that wait for a lane.",
                &self.waiting,
            ),
            ("ds4_lanes_in_use", "Lanes with a text.", &self.running),
            ("ds4_lanes", "Lanes that there is memory for.", &self.lanes),
            (
                "ds4_prefill_tokens_per_second",
                "Prompt tokens, by the time of steps that had some, over the last 10 s.",
                &rates[0].per_second(),
            ),
            (
                "ds4_decode_tokens_per_second",
                "Generated tokens, by the time of steps that had some, over the last 10 s.",
                &rates[1].per_second(),
            ),
        ];
        let counters: [(&str, &str, &dyn Display); 5] = [
            (
                "ds4_prompt_tokens_total",
                "Prompt tokens that were processed, or taken from a kept text.",
                &self.prompt_tokens,
            ),
            (
                "ds4_prompt_tokens_cached_total",
                "Those of them that were taken from a kept text.",
                &self.cached_tokens,
            ),
            (
                "ds4_generated_tokens_total",
                "Tokens generated.",
                &self.generated_tokens,
            ),
            ("ds4_drafts_total", "Drafts made.", &self.drafted),
            (
                "ds4_drafts_accepted_total",
                "Drafts accepted.",
                &self.accepted,
            ),
        ];
        for (kind, figures) in [("gauge", &gauges[..]), ("counter", &counters[..])] {
            for (name, help, value) in figures {
                describe(out, name, kind, help)?;
                writeln!(out, "{name} {value}")?;
            }
        }
        self.first_token.write(
            out,
            "ds4_time_to_first_token_seconds",
            "From the request to its first token.",
        )?;
        let help = "From a token to the next of the same text.";
        self.token.write(out, "ds4_time_per_token_seconds", help)
    }
}

fn describe(out: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(out, "# HELP {name} {help}")?;
    writeln!(out, "# TYPE {name} {kind}")
}
