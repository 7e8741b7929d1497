//! Clients of an engine: they send requests, and note when tokens come.

use std::collections::HashMap;
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use ds4_model::generate::{Engine, EngineConfig, Output, RequestId};

use super::requests::Arrival;

/// Steps by which what precedes a measurement is longer than it takes until steps are recorded.
const MORE_STEPS: usize = 8;
/// Seconds between two lines that tell how far a load is.
const SECONDS_BETWEEN_LINES: f64 = 10.0;
/// Steps of running texts that tell what they usually take.
const USUAL_STEPS: usize = 50;

/// Clients of an engine that has no other requests.
#[derive(Debug)]
pub struct Clients<'a> {
    engine: Engine<'a>,
    config: EngineConfig,
    start: Instant,
    /// Seconds at which a line told how far it is.
    told: f64,
    texts: HashMap<RequestId, Text>,
    /// Steps that were replayed before what counts.
    replayed: usize,
    pub seen: Seen,
}

/// A text that has not ended.
#[derive(Clone, Copy, Debug)]
struct Text {
    /// Whether it is one of those that others wait for, in a burst.
    is_late: bool,
    /// Tokens of its prompt.
    input: usize,
    /// Those that have come.
    output: usize,
    /// Seconds since the start.
    arrived: f64,
    first: f64,
    last: f64,
}

/// What clients have seen. Times are in seconds.
#[derive(Debug, Default)]
pub struct Seen {
    /// Of each text, from when it arrives to its first token.
    pub first: Vec<f64>,
    /// Of all texts, between two steps with a token of theirs.
    pub between: Vec<f64>,
    /// Of each text, the time of a token after the first.
    pub per_token: Vec<f64>,
    /// Texts that have ended, and tokens of theirs: of prompts, those of them that were not
    /// processed again, and of answers.
    pub finished: usize,
    pub input: usize,
    pub cached: usize,
    pub output: usize,
    /// Texts that have ended by an error, and the first of these.
    pub failed: usize,
    pub error: Option<String>,
    /// Calls of the engine that had a token, and the rows and the texts of these.
    pub steps: usize,
    pub rows: usize,
    pub texts: usize,
    /// The most bytes that caches have had.
    pub cache_bytes: usize,
}

/// What a burst does to texts that are running.
#[derive(Debug)]
pub struct Burst {
    /// Seconds between two steps, without it.
    pub usual: Vec<f64>,
    /// Seconds from its arrival until all of its texts have a token.
    pub seconds: f64,
    /// Seconds of all, from the first request.
    pub whole: f64,
}

impl<'a> Clients<'a> {
    pub fn new(engine: Engine<'a>, config: EngineConfig) -> Self {
        Self {
            engine,
            config,
            start: Instant::now(),
            told: 0.0,
            texts: HashMap::new(),
            replayed: 0,
            seen: Seen::default(),
        }
    }

    /// Steps that were replayed while it was looked.
    pub fn replays(&self) -> usize {
        self.engine.replays() - self.replayed
    }

    /// Sends requests when they arrive or, with a number of texts, when fewer run, until all have
    /// ended. Returns how many seconds that takes.
    pub fn run(
        &mut self,
        arrivals: Vec<Arrival>,
        at_a_time: Option<usize>,
    ) -> Result<f64, Box<dyn Error>> {
        let mut arrivals = arrivals.into_iter().peekable();
        (self.start, self.told) = (Instant::now(), 0.0);
        loop {
            let now = self.now();
            while at_a_time.is_none_or(|most| self.texts.len() < most)
                && let Some(next) = arrivals.next_if(|next| next.seconds <= now)
            {
                let arrived = at_a_time.map_or(next.seconds, |_| now);
                self.add(next, arrived, false)?;
            }
            if !self.engine.is_idle() {
                self.step()?;
                continue;
            }
            if !self.texts.is_empty() {
                return Err(format!("{} texts have no end", self.texts.len()).into());
            }
            match arrivals.peek() {
                None => return Ok(self.now()),
                Some(next) => thread::sleep(Duration::from_secs_f64(next.seconds - now)),
            }
        }
    }

    /// Has texts run side by side until a few steps have been replayed, so that kernels are
    /// compiled. Returns how many seconds that takes.
    pub fn warm_up(&mut self, arrivals: Vec<Arrival>) -> Result<f64, Box<dyn Error>> {
        let texts = arrivals.len().min(self.config.lanes);
        (self.start, self.told) = (Instant::now(), 0.0);
        for arrival in arrivals {
            self.add(arrival, 0.0, false)?;
        }
        let mut left = self.config.recording_tokens() + MORE_STEPS;
        while left > 0 && !self.engine.is_idle() {
            self.step()?;
            left -= usize::from(self.engine.running() == texts);
        }
        Ok(self.now())
    }

    /// Has texts run, and others arrive all at once when they do. What is seen then is what comes
    /// until all of these have a token, and of times between tokens those of the former.
    pub fn burst(
        &mut self,
        running: Vec<Arrival>,
        late: Vec<Arrival>,
    ) -> Result<Burst, Box<dyn Error>> {
        let (texts, count) = (running.len(), late.len());
        (self.start, self.told) = (Instant::now(), 0.0);
        for arrival in running {
            self.add(arrival, 0.0, false)?;
        }
        let mut left = self.config.recording_tokens() + MORE_STEPS + USUAL_STEPS;
        while left > 0 {
            if left == USUAL_STEPS {
                self.seen = Seen::default();
            }
            self.step_of_running(texts)?;
            left -= usize::from(self.engine.running() == texts);
        }
        let usual = std::mem::take(&mut self.seen).between;
        self.replayed = self.engine.replays();
        let arrived = self.now();
        for arrival in late {
            self.add(arrival, arrived, true)?;
        }
        while self.seen.first.len() + self.seen.failed < count {
            self.step_of_running(texts)?;
        }
        let whole = self.now();
        Ok(Burst {
            usual,
            seconds: whole - arrived,
            whole,
        })
    }

    fn step_of_running(&mut self, texts: usize) -> Result<(), Box<dyn Error>> {
        self.step()?;
        let running = self.texts.values().filter(|text| !text.is_late).count();
        match running < texts {
            true => {
                let reason = "a text has ended before all of the burst had a token";
                let error = self.seen.error.as_deref();
                let error = error.unwrap_or("--output is too small");
                Err(format!("{reason}: {error}").into())
            }
            false => Ok(()),
        }
    }

    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn add(&mut self, arrival: Arrival, arrived: f64, is_late: bool) -> Result<(), Box<dyn Error>> {
        let input = arrival.request.prompt.len();
        let request = self.engine.add(arrival.request)?;
        let text = Text {
            is_late,
            input,
            output: 0,
            arrived,
            first: 0.0,
            last: 0.0,
        };
        self.texts.insert(request, text);
        Ok(())
    }

    fn step(&mut self) -> Result<(), Box<dyn Error>> {
        let lanes = self.engine.lanes();
        let outputs = self.engine.step()?;
        let (now, engine, seen) = (self.now(), &self.engine, &mut self.seen);
        seen.cache_bytes = seen.cache_bytes.max(engine.cache_bytes());
        if !outputs.is_empty() {
            // Those of the step are gone where all texts have ended.
            seen.rows += lanes.max(engine.lanes()) * (1 + self.config.drafts);
            seen.steps += 1;
        }
        for output in outputs {
            self.take(output, now)?;
        }
        if now >= self.told + SECONDS_BETWEEN_LINES {
            self.told = now;
            let (engine, seen) = (&self.engine, &self.seen);
            let (running, left) = (engine.running(), self.texts.len());
            let (steps, replays) = (seen.steps, self.replays());
            eprintln!(
                "{now:.0} s: {running} of {left} texts are decoded, {} have ended, {steps} steps, \
                 {replays} replays",
                seen.finished
            );
        }
        Ok(())
    }

    fn take(&mut self, output: Output, now: f64) -> Result<(), Box<dyn Error>> {
        let (seen, id) = (&mut self.seen, output.request);
        let text = self.texts.get_mut(&id);
        let text = text.ok_or_else(|| format!("a token of request {id}, which has ended"))?;
        if let Err(error) = output.token {
            seen.failed += 1;
            seen.error.get_or_insert_with(|| error.to_string());
            self.texts.remove(&id);
            return Ok(());
        }
        text.output += 1;
        if text.output == 1 {
            text.first = now;
            seen.first.push(now - text.arrived);
        } else if text.last < now && !text.is_late {
            seen.between.push(now - text.last);
        }
        seen.texts += usize::from(text.last < now);
        text.last = now;
        if output.finish.is_some() {
            seen.finished += 1;
            seen.input += text.input;
            seen.cached += output.cached;
            seen.output += text.output;
            if text.output > 1 {
                let tokens = (text.output - 1) as f64;
                seen.per_token.push((now - text.first) / tokens);
            }
            self.texts.remove(&id);
        }
        Ok(())
    }
}
