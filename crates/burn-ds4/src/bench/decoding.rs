//! Decoding by the engine, at a context that nobody has computed: its steps as users get them.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use burn_ds4_ops::quant::Activations;
use ds4_model::generate::{Engine, EngineConfig, Request};
use ds4_model::model::Model;
use serde_json::{Value, json};

use crate::bench::calls::Timings;

/// Steps until all texts have a lane and, where it can be, a step is recorded.
const MOST_WARM_UPS: usize = 200;
/// Series of steps that are timed, of which the median is taken.
const SERIES: usize = 3;
/// Steps that the device has to do while the host reads the one before, where that is timed.
const AHEAD: usize = 1;
/// Selects which drafts are taken to be right.
const SEED: u64 = 7;

/// How tokens are drafted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drafts {
    /// How many a step.
    pub count: usize,
    /// Probability below which DSpark leaves one out.
    pub confidence: f64,
}

impl Drafts {
    /// What a table and a line of JSON say of it.
    pub fn json(self, model: &Model) -> Value {
        let mtp = model.mtp.as_ref();
        let mtp = mtp.and_then(|mtp| mtp.flash_head.as_ref());
        let dspark = model.dspark.as_ref();
        let dspark = dspark.and_then(|dspark| dspark.flash_head.as_ref());
        json!({
            "drafts": self.count,
            "drafter": if model.dspark.is_some() { "dspark" } else { "mtp" },
            "draft_head": if mtp.or(dspark).is_some() { "flash" } else { "dense" },
            "draft_confidence": self.confidence,
        })
    }
}

/// What is decoded.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Texts, all of the same length.
    pub batch: usize,
    /// Positions before the first step.
    pub context: usize,
    /// How tokens are drafted.
    pub drafts: Drafts,
    /// Fraction of drafts that are taken to be right; `None` for those that are.
    pub acceptance: Option<f64>,
    /// Whether a step is recorded.
    pub graphs: bool,
    /// Whether several devices work at once, where there are texts enough.
    pub overlap: bool,
    /// What products by packed weights do to their other operand.
    pub activations: Activations,
    /// Steps that are timed.
    pub samples: usize,
}

/// Times of a step.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Milliseconds of one step in a series.
    pub ms: f64,
    /// Microseconds that the host is busy with one; `None` where steps are launched.
    pub host: Option<f64>,
    /// Tokens of all texts that a step yields.
    pub tokens: f64,
}

impl Workload {
    /// What a step is called in tables.
    pub fn name(&self) -> String {
        let kind = if self.graphs { "recorded" } else { "launched" };
        match self.drafts.count {
            0 => format!("{kind}, 1 token"),
            drafts => format!("{kind}, {} tokens, drafting", 1 + drafts),
        }
    }

    /// An engine whose texts are all being decoded, by a recorded step if that is wanted.
    pub fn engine<'a>(
        &self,
        model: &'a Model,
        steps_ahead: usize,
    ) -> Result<Engine<'a>, Box<dyn Error>> {
        let steps = MOST_WARM_UPS + (SERIES + 1) * (self.samples + steps_ahead);
        let Drafts { count, confidence } = self.drafts;
        let tokens = steps * (1 + count);
        let config = EngineConfig {
            lanes: self.batch,
            drafts: count,
            draft_confidence: confidence,
            context: Some(self.context + 1 + tokens),
            graphs: self.graphs,
            overlap: self.overlap,
            steps_ahead,
            prefill_chunk: usize::MAX,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(model, config)?.with_random_contexts(0);
        if let Some(rate) = self.acceptance {
            engine = engine.with_acceptance(rate, SEED);
        }
        let vocabulary = model.config().vocab_size;
        let prompt = (0..=self.context).map(|position| (position * 7919 % vocabulary) as u32);
        let prompt: Vec<u32> = prompt.collect();
        for _ in 0..self.batch {
            engine.add(Request {
                ignore_eos: true,
                ..Request::new(&prompt, tokens)
            })?;
        }
        let groups = match self.overlap {
            true => model.placement.runs().len().min(self.batch),
            false => 1,
        };
        for _ in 0..MOST_WARM_UPS {
            for output in engine.step()? {
                output.token?;
            }
            let all = engine.running() == self.batch;
            if all && (!self.graphs || engine.graphs().recordings >= groups) {
                return Ok(engine);
            }
        }
        let reason = engine.graph_refusal().unwrap_or("the device has no graphs");
        Err(format!("no step is recorded: {reason}").into())
    }

    /// Times steps, whose outcome is read while the next one runs.
    pub fn measure(&self, model: &Model) -> Result<Measured, Box<dyn Error>> {
        let device = model.placement.last();
        let mut engine = self.engine(model, if self.graphs { AHEAD } else { 0 })?;
        let (mut times, mut tokens) = (Vec::with_capacity(SERIES), 0);
        for _ in 0..SERIES {
            let start = Instant::now();
            for _ in 0..self.samples {
                tokens += engine.step()?.len();
            }
            times.push(start.elapsed().as_secs_f64() * 1e3 / self.samples as f64);
        }
        drop(engine);
        let host = self.graphs.then(|| {
            // Far enough ahead that the host never waits for what it reads.
            let mut engine = self.engine(model, self.samples)?;
            engine.step()?;
            device.sync()?;
            let mut host = Vec::with_capacity(self.samples);
            for _ in 0..self.samples / 2 {
                let start = Instant::now();
                engine.step()?;
                host.push(start.elapsed().as_secs_f64() * 1e6);
            }
            Ok::<_, Box<dyn Error>>(Timings::new(host).median())
        });
        Ok(Measured {
            ms: Timings::new(times).median(),
            host: host.transpose()?,
            tokens: tokens as f64 / (SERIES * self.samples) as f64,
        })
    }

    /// Appends what was measured to a file, as a line of JSON.
    pub fn append(
        &self,
        file: &Path,
        model: &Model,
        measured: &Measured,
        layer_us: Option<f64>,
    ) -> Result<(), Box<dyn Error>> {
        let config = model.config();
        let mut line = self.drafts.json(model);
        for (key, value) in [
            ("model", json!("flash")),
            ("layers", json!(config.layers.len())),
            ("experts", json!(config.n_routed_experts)),
            ("context", json!(self.context)),
            ("batch", json!(self.batch)),
            ("devices", json!(devices(model))),
            ("parallel", json!(model.parallel.as_ref().map(|_| "tensor"))),
            ("overlap", json!(self.overlap)),
            ("activations", json!(name_of(self.activations))),
            (
                "kind",
                json!(if self.graphs { "recorded" } else { "launched" }),
            ),
            ("ms", json!(measured.ms)),
            ("us_per_layer", json!(layer_us)),
            ("host_us", json!(measured.host)),
            ("tokens_per_step", json!(measured.tokens)),
            ("acceptance", json!(self.acceptance)),
        ] {
            line[key] = value;
        }
        append_line(file, &line)
    }
}

/// What a line of JSON calls them.
pub const fn name_of(activations: Activations) -> &'static str {
    match activations {
        Activations::Exact => "exact",
        Activations::Released | Activations::Released32 => "released",
    }
}

/// How many devices have layers of a model, or parts of them.
pub fn devices(model: &Model) -> usize {
    let ranks = model.parallel.as_ref();
    let ranks = ranks.map_or(1, |parallel| parallel.devices().len());
    ranks.max(model.placement.runs().len())
}

/// Appends a line of JSON to a file.
pub fn append_line(file: &Path, line: &Value) -> Result<(), Box<dyn Error>> {
    let mut file = OpenOptions::new().create(true).append(true).open(file)?;
    Ok(writeln!(file, "{line}")?)
}
