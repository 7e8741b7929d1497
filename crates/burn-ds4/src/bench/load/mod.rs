//! The engine under load, without HTTP: many texts at a time, arrivals at random, bursts.

mod clients;
mod figures;
mod requests;

use std::collections::HashSet;
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use burn_ds4_ops::device::launched;
use clap::{Args, value_parser};
use ds4_model::generate::{
    DEFAULT_PREFILL_CHUNK, Engine, EngineConfig, GenerateError, MAX_DRAFTS, MAX_LANES,
};
use ds4_model::model::Model;

use crate::bench::decoding::{Drafts, append_line};
use crate::bench::model::{ModelArgs, Which, fraction};
use crate::shared::warm_up::WarmUp;
use clients::Clients;
use figures::Load;
use requests::{Arrival, Lengths, TextArgs};

/// Tokens of the answers of a burst.
const BURST_OUTPUT: Lengths = Lengths {
    least: 16,
    most: 16,
};

/// Has the engine continue many texts of random tokens, without HTTP, and prints tokens a second,
/// the time to the first token and the time between two.
#[derive(Debug, Args)]
pub struct LoadOptions {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts at a time, each number in turn; with --rate, as many as run at a time at most.
    #[arg(
        long,
        default_value = "1,16,64",
        value_delimiter = ',',
        value_name = "TEXTS"
    )]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    concurrency: Vec<u32>,
    /// Texts of each run [default: twice as many as there are at a time].
    #[arg(long, value_name = "TEXTS", value_parser = value_parser!(u32).range(1..))]
    requests: Option<u32>,
    #[command(flatten)]
    texts: TextArgs,
    /// Times what texts wait for while so many others arrive at once, and nothing else. Answers of
    /// these have 16 tokens.
    #[arg(long, value_name = "TEXTS", conflicts_with_all = ["rate", "requests"])]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    burst: Option<u32>,
    /// Tokens of a prompt of the burst.
    #[arg(long, default_value = "32", value_name = "TOKENS", requires = "burst")]
    burst_input: Lengths,
    /// Tokens that are drafted per step.
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u8).range(0..=MAX_DRAFTS as i64))]
    drafts: u8,
    /// Leaves out drafts, from the first that DSpark gives a smaller probability to be accepted.
    #[arg(long, default_value_t = 0.0, value_parser = fraction)]
    draft_confidence: f64,
    /// Prompt tokens per forward call, between which texts go on.
    #[arg(long, default_value_t = DEFAULT_PREFILL_CHUNK, value_name = "TOKENS")]
    prefill_chunk: usize,
    /// Bytes that are kept of prompts, for others that begin alike.
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    prefix_cache: usize,
    /// Most bytes of the caches of all texts [default: most of what a CUDA device has left].
    #[arg(long, value_name = "BYTES")]
    cache_memory: Option<usize>,
    /// Launches every step anew, even where it could be replayed as a graph.
    #[arg(long)]
    no_graph: bool,
    /// Has one device work at a time, where there are several.
    #[arg(long)]
    no_overlap: bool,
    /// Counts the time in which kernels are compiled.
    #[arg(long)]
    no_warm_up: bool,
    /// Compiles before what `serve` does, no other texts, and counts kernels that time is left to.
    #[arg(long, conflicts_with_all = ["no_warm_up", "burst"])]
    as_served: bool,
    /// Appends a line of JSON for each number of texts to this file.
    #[arg(long, visible_alias = "json", value_name = "FILE")]
    jsonl: Option<PathBuf>,
}

/// Runs the load.
///
/// # Errors
///
/// If options do not go together or with the model, it cannot be loaded, or the device fails.
pub fn run(options: &LoadOptions) -> Result<(), Box<dyn Error>> {
    let most = options.concurrency.iter().max().copied().unwrap_or(1) as usize;
    if let Some(requests) = options.requests.filter(|count| (*count as usize) < most) {
        return Err(format!("--requests {requests} is less than --concurrency {most}").into());
    }
    let TextArgs { input, output, .. } = options.texts;
    let longest = input.most + output.most;
    let lanes = options.lanes(most);
    let positions = lanes.saturating_mul(longest);
    let model = options.model.make(lanes, Some(positions))?;
    let positions = model.config().max_position_embeddings;
    if options.longest() > positions {
        let own = format!("--input {input} and --output {output}, or --burst-input");
        let reason = format!("more positions than the model has, {positions}");
        return Err(format!("{own}: {reason}").into());
    }
    println!(
        "{}, {input} tokens in, {output} out, of seed {}",
        options.model.name(),
        options.texts.seed
    );
    for &concurrency in &options.concurrency {
        options.run_one(&model, concurrency as usize)?;
    }
    Ok(())
}

impl LoadOptions {
    /// Lanes for so many texts at a time.
    fn lanes(&self, concurrency: usize) -> usize {
        let burst = self.burst.unwrap_or(0) as usize;
        (concurrency + burst).min(MAX_LANES)
    }

    /// Tokens of the longest text.
    fn longest(&self) -> usize {
        let burst = self.burst_input.most + BURST_OUTPUT.most;
        burst.max(self.texts.input.most + self.texts.output.most)
    }

    fn config(&self, concurrency: usize) -> EngineConfig {
        EngineConfig {
            context: Some(self.longest()),
            lanes: self.lanes(concurrency),
            drafts: self.drafts.into(),
            draft_confidence: self.draft_confidence,
            prefill_chunk: self.prefill_chunk,
            prefix_bytes: self.prefix_cache,
            cache_bytes: self.cache_memory,
            graphs: !self.no_graph,
            overlap: !self.no_overlap,
            ..EngineConfig::default()
        }
    }

    fn clients<'a>(
        &self,
        model: &'a Model,
        config: &EngineConfig,
    ) -> Result<Clients<'a>, Box<dyn Error>> {
        let engine = Engine::new(model, config.clone())?;
        let drafts_by_chance = self.model.which == Which::Flash && self.drafts > 0;
        let engine = match drafts_by_chance {
            true => engine.with_acceptance(self.model.acceptance, self.texts.seed),
            false => engine,
        };
        Ok(Clients::new(engine, config.clone()))
    }

    /// Texts of the burst, which begin like none of these.
    fn late(&self, texts: &TextArgs, vocabulary: usize) -> Vec<Arrival> {
        let late = texts.with_seed(!texts.seed);
        let late = late.with_lengths(self.burst_input, BURST_OUTPUT);
        late.arrivals(self.burst.unwrap_or(0) as usize, vocabulary)
    }

    fn run_one(&self, model: &Model, concurrency: usize) -> Result<(), Box<dyn Error>> {
        let vocabulary = model.config().vocab_size;
        let config = self.config(concurrency);
        let mut warm_up = None;
        let mut served = HashSet::new();
        if self.as_served {
            let started = Instant::now();
            let mut own = WarmUp::new(model, &config);
            let (ended, kernels) = launched(|| -> Result<(), GenerateError> {
                while !own.step()? {}
                Ok(())
            });
            ended?;
            model.placement.last().sync()?;
            (warm_up, served) = (Some(started.elapsed().as_secs_f64()), kernels);
        } else if !self.no_warm_up {
            // Texts of their own, so that none is known when time counts.
            let texts = self.texts.with_seed(self.texts.seed.wrapping_add(1));
            let arrivals = texts.arrivals(concurrency, vocabulary);
            let mut clients = self.clients(model, &config)?;
            warm_up = Some(match self.burst {
                None => clients.warm_up(arrivals)?,
                Some(_) => {
                    clients
                        .burst(arrivals, self.late(&texts, vocabulary))?
                        .whole
                }
            });
        }
        // Steps of texts before may still run.
        model.placement.last().sync()?;
        let mut clients = self.clients(model, &config)?;
        let mut compiled = None;
        let (burst, seconds) = match self.burst {
            None => {
                let requests = self
                    .requests
                    .map_or(2 * concurrency, |count| count as usize);
                let at_a_time = self.texts.rate.is_none().then_some(concurrency);
                let arrivals = self.texts.arrivals(requests, vocabulary);
                let run = || clients.run(arrivals, at_a_time);
                let seconds = match self.as_served {
                    true => {
                        let (seconds, kernels) = launched(run);
                        compiled = Some([served.len(), kernels.difference(&served).count()]);
                        seconds?
                    }
                    false => run()?,
                };
                (None, seconds)
            }
            Some(_) => {
                let running = self.texts.arrivals(concurrency, vocabulary);
                let burst = clients.burst(running, self.late(&self.texts, vocabulary))?;
                let seconds = burst.seconds;
                (Some(burst), seconds)
            }
        };
        let load = Load {
            options: self,
            model,
            concurrency,
            lanes: config.lanes,
            seconds,
            warm_up,
            compiled,
            replays: clients.replays(),
            seen: clients.seen,
            burst,
        };
        load.print();
        if let Some(file) = &self.jsonl {
            append_line(file, &load.json())?;
        }
        Ok(())
    }

    fn drafting(&self) -> Drafts {
        Drafts {
            count: self.drafts.into(),
            confidence: self.draft_confidence,
        }
    }
}
