//! Extrapolation from a few layers to the whole of V4-Flash.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_ds4_ops::quant::Activations;
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::config::ModelConfig;
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use serde_json::json;

use crate::bench::calls::{Timings, any_ids};
use crate::bench::decoding::{Drafts, Measured, Workload, append_line, devices, name_of};
use crate::bench::flash;

/// Prompts that are timed, after one that is not.
const PROMPTS: usize = 3;
/// Launched steps before the one that is accounted for.
const WARM_UPS: usize = 3;

/// How to measure.
pub struct Options {
    pub batch: usize,
    pub context: usize,
    pub samples: usize,
    /// How tokens are drafted, one way after the other.
    pub drafts: Vec<Drafts>,
    /// Fraction of drafts that are taken to be right.
    pub acceptance: f64,
    /// What products by packed weights do to their other operand.
    pub activations: Activations,
    /// Where lines of JSON go.
    pub jsonl: Option<PathBuf>,
    /// Tokens of a prompt that a call takes; all without it.
    pub chunk: Option<usize>,
    /// TB/s.
    pub copy_rate: f64,
    /// Whether several devices work at once, where there are texts enough.
    pub overlap: bool,
}

impl Options {
    /// Recorded steps without drafts.
    fn workload(&self) -> Workload {
        Workload {
            batch: self.batch,
            context: self.context,
            drafts: Drafts::default(),
            acceptance: None,
            graphs: true,
            overlap: self.overlap,
            activations: self.activations,
            samples: self.samples,
        }
    }
}

/// Steps of one number of layers: without drafts and with.
struct Depth {
    layers: usize,
    model: Model,
    times: Vec<(Workload, Measured)>,
}

/// Prints the times of recorded steps of all layers and of half of them, the time of a layer by the
/// difference, and the extrapolation to the whole model; then those of launched steps.
pub fn decoding(model: &Model, options: &Options) -> Result<(), Box<dyn Error>> {
    println!("steps                          layers      ms   host us   tokens");
    let all = model.layers.len();
    let recorded = depth(model, all, true, options)?;
    let launched = depth(model, all, false, options)?;
    let half = match all / 2 {
        // The head of fewer layers would be on another device.
        _ if model.placement.is_divided() => None,
        0 => None,
        half => Some(depth(model, half, true, options)?),
    };
    let half = half.filter(|half| half.times.len() == recorded.times.len());
    for (index, (workload, measured)) in recorded.times.iter().enumerate() {
        let layer = half
            .as_ref()
            .map(|half| per_layer(half, &recorded, index) * 1e3);
        if let Some(file) = &options.jsonl {
            workload.append(file, &recorded.model, measured, layer)?;
        }
    }
    for (workload, measured) in &launched.times {
        if let Some(file) = &options.jsonl {
            workload.append(file, &launched.model, measured, None)?;
        }
    }
    let Some(half) = half.filter(|half| !half.times.is_empty()) else {
        println!("what a layer takes is not known by one, or by launched steps");
        return Ok(());
    };
    let more = all - half.layers;
    let read = |layer: usize| flash::bytes(&model.layers[layer], options.batch);
    let bytes = (half.layers..all).map(read).sum::<f64>() / more as f64;
    let floor = bytes / options.copy_rate / 1e6;
    println!(
        "a layer, 1 token: {:.1} us, (ms of {all} layers - ms of {}) / {more}; its weights \
         {:.0} MB, {floor:.1} us at {} TB/s, {:.2} times that",
        per_layer(&half, &recorded, 0) * 1e3,
        half.layers,
        bytes / 1e6,
        options.copy_rate,
        per_layer(&half, &recorded, 0) * 1e3 / floor
    );
    extrapolate(&half, &recorded);
    Ok(())
}

/// Milliseconds of one of the layers that only the deeper model has.
fn per_layer(half: &Depth, all: &Depth, work: usize) -> f64 {
    let more = (all.layers - half.layers) as f64;
    (all.times[work].1.ms - half.times[work].1.ms) / more
}

fn extrapolate(half: &Depth, all: &Depth) {
    let whole = ModelConfig::new().layers.len();
    let missing = whole.saturating_sub(all.layers) as f64;
    for (work, (workload, measured)) in all.times.iter().enumerate() {
        let ms = measured.ms + missing * per_layer(half, all, work);
        println!(
            "{}: extrapolated to {whole} layers, ms of {} layers + {missing} times ms of a layer: \
             {ms:.3} ms, {:.1} tokens/s by {:.2} tokens a step",
            workload.name(),
            all.layers,
            measured.tokens * 1e3 / ms,
            measured.tokens
        );
    }
}

/// Steps of the first layers, as far as they can be recorded or launched.
fn depth(
    model: &Model,
    layers: usize,
    graphs: bool,
    options: &Options,
) -> Result<Depth, Box<dyn Error>> {
    let model = flash::first_layers(model, layers);
    let mut times = Vec::new();
    for drafts in [&[Drafts::default()], &options.drafts[..]].concat() {
        let workload = Workload {
            drafts,
            acceptance: (drafts.count > 0).then_some(options.acceptance),
            graphs,
            ..options.workload()
        };
        let measured = match workload.measure(&model) {
            Ok(measured) => measured,
            Err(error) if graphs => {
                let error = error.to_string();
                let lines: Vec<&str> = error.lines().map(str::trim).collect();
                println!("{}: err: {}", workload.name(), lines.join(" "));
                break;
            }
            Err(error) => return Err(error),
        };
        let host = measured
            .host
            .map_or("-".to_owned(), |host| format!("{host:.1}"));
        println!(
            "{:<30} {layers:>6} {:>7.3} {host:>9} {:>8.2}",
            workload.name(),
            measured.ms,
            measured.tokens
        );
        times.push((workload, measured));
    }
    Ok(Depth {
        layers,
        model,
        times,
    })
}

/// A prompt at the given context, which is processed anew each time.
struct Prompt<'a> {
    model: &'a Model,
    cache: Cache,
    shape: [usize; 2],
    context: usize,
    /// Tokens of a call.
    chunk: usize,
}

impl<'a> Prompt<'a> {
    fn new(model: &'a Model, options: &Options, tokens: usize) -> Result<Self, Box<dyn Error>> {
        let cache = CacheConfig {
            batch: options.batch,
            capacity: options.context + tokens,
            rollback: Rollback::Bounded(0),
            ..CacheConfig::default()
        };
        Ok(Self {
            model,
            cache: model.new_cache(cache)?,
            shape: [options.batch, tokens],
            context: options.context,
            chunk: options.chunk.unwrap_or(tokens),
        })
    }

    /// Calls `before` when the cache is filled, then processes the prompt. No call waits for the
    /// one before, so that devices with a part of the layers each work at different chunks.
    fn process(
        &mut self,
        before: impl FnOnce(&Device) -> Result<(), Box<dyn Error>>,
    ) -> Result<f64, Box<dyn Error>> {
        let device = self.model.placement.last();
        let normal = Distribution::Normal(0.0, 1.0);
        self.cache.fill_random(self.context, normal)?;
        let ids = any_ids(self.context, self.shape, self.model);
        for run in self.model.placement.runs() {
            run.device.sync()?;
        }
        before(device)?;
        let start = Instant::now();
        let mut last = None;
        for start in (0..self.shape[1]).step_by(self.chunk) {
            let count = self.chunk.min(self.shape[1] - start);
            let ids = ids.clone().narrow(1, start, count);
            let streams = self
                .model
                .forward_streams(ids, &mut self.cache, &Trace::off())?;
            last = Some(streams.narrow(1, count - 1, 1));
        }
        let logits = last.map(|last| self.model.logits(last));
        device.sync()?;
        drop(logits);
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Prints the speed of prefill, for a prompt at the given context.
pub fn prefill(model: &Model, options: &Options, tokens: usize) -> Result<(), Box<dyn Error>> {
    let mut prompt = Prompt::new(model, options, tokens)?;
    prompt.process(|_| Ok(()))?;
    let times: Result<Vec<f64>, _> = (0..PROMPTS).map(|_| prompt.process(|_| Ok(()))).collect();
    let time = Timings::new(times?).median();
    let (layers, whole) = (model.layers.len(), ModelConfig::new().layers.len());
    let Options { batch, context, .. } = *options;
    let chunk = prompt.chunk;
    let rate = (batch * tokens) as f64 / time;
    println!(
        "prompt, launched: {tokens} tokens of each of {batch} sequences, {chunk} a call, after \
         {context} positions in {:.1} ms, {rate:.0} tokens/s; with {whole} layers, {layers} / \
         {whole} of that: {:.0} tokens/s",
        time * 1e3,
        rate * layers as f64 / whole as f64
    );
    if let Some(file) = &options.jsonl {
        let line = json!({
            "model": "flash",
            "layers": layers,
            "experts": model.config().n_routed_experts,
            "context": context,
            "batch": batch,
            "tokens": tokens,
            "chunk": chunk,
            "devices": devices(model),
            "parallel": model.parallel.as_ref().map(|_| "tensor"),
            "activations": name_of(options.activations),
            "kind": "prompt, launched",
            "ms": time * 1e3,
            "us_per_layer": time * 1e6 / layers as f64,
            "tokens_per_second": rate,
        });
        append_line(file, &line)?;
    }
    Ok(())
}

/// Launches one step between two marks, for a profiler: the kernel of random numbers, which no step
/// has. The step has so many drafts.
pub fn account(model: &Model, options: &Options, drafts: usize) -> Result<(), Box<dyn Error>> {
    let device = model.placement.last();
    let workload = Workload {
        drafts: Drafts {
            count: drafts,
            ..Drafts::default()
        },
        acceptance: None,
        graphs: false,
        samples: 1,
        ..options.workload()
    };
    let mut engine = workload.engine(model, 0)?;
    for _ in 0..WARM_UPS {
        engine.step()?;
    }
    mark(device)?;
    engine.step()?;
    mark(device)?;
    println!(
        "one launched step of {} layers with {drafts} drafts lies between the last two launches \
         of prng_kernel",
        model.layers.len()
    );
    Ok(())
}

/// The same for a chunk of a prompt.
pub fn account_prompt(
    model: &Model,
    options: &Options,
    tokens: usize,
) -> Result<(), Box<dyn Error>> {
    let mut prompt = Prompt::new(model, options, tokens)?;
    prompt.process(|_| Ok(()))?;
    prompt.process(mark)?;
    mark(model.placement.last())?;
    println!(
        "one chunk of {tokens} tokens through {} layers lies between the last two launches of \
         prng_kernel",
        model.layers.len()
    );
    Ok(())
}

fn mark(device: &Device) -> Result<(), Box<dyn Error>> {
    device.sync()?;
    let mark = Tensor::<1>::random([1], Distribution::Uniform(0.0, 1.0), device);
    device.sync()?;
    drop(mark);
    Ok(())
}
