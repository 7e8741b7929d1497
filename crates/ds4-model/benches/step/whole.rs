//! What a few layers say about the whole of V4-Flash.

use std::error::Error;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use burn_ds4_ops::attention::FEW_TOKENS;
use ds4_model::cache::{CacheConfig, Rollback};
use ds4_model::config::ModelConfig;
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::calls::{Sorted, any_ids};
use crate::flash;
use crate::recorded::{Measured, Sequences, Work};

/// Prompts that are timed, after one that is not.
const PROMPTS: usize = 3;
/// Launched steps before the one that is accounted for.
const WARM_UPS: usize = 3;

/// How to measure.
pub struct Options {
    pub batch: usize,
    pub context: usize,
    pub samples: usize,
    /// Share of drafts that stand.
    pub acceptance: f64,
    /// TB/s.
    pub copy_rate: f64,
}

/// Replays of one number of layers.
struct Depth {
    layers: usize,
    /// Of each kind of work that could be recorded, in the order of [`Work::ALL`].
    times: Vec<Measured>,
}

/// Prints the times of recorded steps of all layers and of half of them, what a layer takes by the difference, and what follows for the
/// whole model.
pub fn recorded(
    model: &Model,
    config: &ModelConfig,
    options: &Options,
) -> Result<(), Box<dyn Error>> {
    let layers = model.layers.len();
    let mut depths = Vec::new();
    println!("recorded                       layers      ms   host us");
    for layers in [layers / 2, layers] {
        if layers == 0 {
            continue;
        }
        match depth(model, config, layers, options) {
            Ok(depth) => depths.push(depth),
            Err(error) => {
                let error = error.to_string();
                let lines: Vec<&str> = error.lines().map(str::trim).collect();
                println!("recorded: err: {}", lines.join(" "));
                return Ok(());
            }
        }
    }
    let [half, all] = &depths[..] else {
        println!("what a layer takes is not known by one");
        return Ok(());
    };
    let more = layers - half.layers;
    let read = |layer: usize| flash::bytes(&model.layers[layer], options.batch);
    let bytes = (half.layers..layers).map(read).sum::<f64>() / more as f64;
    let floor = bytes / options.copy_rate / 1e6;
    println!(
        "a layer, 1 token: {:.1} us, (ms of {layers} layers - ms of {}) / {more}; its weights {:.0} MB, {floor:.1} us at {} TB/s, {:.2} \
         times that",
        per_layer(half, all, 0) * 1e3,
        half.layers,
        bytes / 1e6,
        options.copy_rate,
        per_layer(half, all, 0) * 1e3 / floor
    );
    extrapolate(half, all, options);
    Ok(())
}

/// Milliseconds of one of the layers that only the deeper model has.
fn per_layer(half: &Depth, all: &Depth, work: usize) -> f64 {
    let more = (all.layers - half.layers) as f64;
    (all.times[work].replay - half.times[work].replay) / more
}

fn extrapolate(half: &Depth, all: &Depth, options: &Options) {
    let whole = ModelConfig::new().layers.len();
    let missing = whole.saturating_sub(all.layers) as f64;
    let times = (0..all.times.len())
        .map(|work| all.times[work].replay + missing * per_layer(half, all, work));
    let times: Vec<f64> = times.collect();
    let (sequences, acceptance) = (options.batch as f64, options.acceptance);
    println!(
        "{whole} layers, ms of {} layers + {missing} times ms of a layer: 1 token {:.3} ms, {:.1} tokens/s, {sequences} / ms",
        all.layers,
        times[0],
        sequences * 1e3 / times[0]
    );
    let (Some(verification), Some(round)) = (times.get(1), times.get(2)) else {
        return;
    };
    println!(
        "2 tokens: {:.3} times 1 token with {} layers, {:.3} times with {whole}",
        all.times[1].replay / all.times[0].replay,
        all.layers,
        verification / times[0]
    );
    println!(
        "{whole} layers with --mtp 1: a round {round:.3} ms, {:.1} tokens/s, {sequences} (1 + {acceptance}) / ms, if {:.0} % of the \
         drafts stand",
        sequences * (1.0 + acceptance) * 1e3 / round,
        100.0 * acceptance
    );
}

fn depth(
    model: &Model,
    config: &ModelConfig,
    layers: usize,
    options: &Options,
) -> Result<Depth, Box<dyn Error>> {
    let config = flash::first(config, layers);
    let model = Model {
        layers: model.layers[..layers].to_vec(),
        ..model.clone()
    };
    let mut times = Vec::new();
    for work in Work::ALL {
        if options.batch * work.positions() > FEW_TOKENS {
            println!(
                "{:<30} {layers:>6}       -         - (more than {FEW_TOKENS} tokens)",
                work.name()
            );
            break;
        }
        let sizes = [options.batch, options.context];
        let sequences = Sequences::new(&model, &config, work, sizes, options.samples)?;
        let measured = sequences.measure()?;
        println!(
            "{:<30} {layers:>6} {:>7.3} {:>9.1}",
            work.name(),
            measured.replay,
            measured.host
        );
        times.push(measured);
    }
    if times.is_empty() {
        return Err(format!("the batch is larger than {FEW_TOKENS}").into());
    }
    Ok(Depth { layers, times })
}

/// Prints the speed at which a prompt goes in, a chunk of it at the given context.
pub fn prefill(
    model: &Model,
    config: &ModelConfig,
    options: &Options,
    tokens: usize,
) -> Result<(), Box<dyn Error>> {
    let device = model.embedding.val().device();
    let cache = CacheConfig {
        batch: options.batch,
        capacity: options.context + tokens,
        rollback: Rollback::Bounded(0),
        ..CacheConfig::default()
    };
    let mut cache = model.new_cache(config, cache)?;
    let mut times = Vec::with_capacity(PROMPTS);
    for prompt in 0..=PROMPTS {
        cache.fill_random(options.context, Distribution::Normal(0.0, 1.0))?;
        let ids = any_ids(options.context, [options.batch, tokens], config, &device);
        device.sync()?;
        let start = Instant::now();
        let streams = model.forward_streams(ids, &mut cache, &Trace::off())?;
        let logits = model.logits(streams.narrow(1, tokens - 1, 1));
        device.sync()?;
        let time = start.elapsed().as_secs_f64();
        drop(logits);
        if prompt > 0 {
            times.push(time);
        }
    }
    let time = Sorted::new(times).median();
    let (layers, whole) = (model.layers.len(), ModelConfig::new().layers.len());
    let rate = (options.batch * tokens) as f64 / time;
    println!(
        "prompt, launched: {tokens} tokens of each of {} sequences in {:.1} ms, {rate:.0} tokens/s; with {whole} layers, {layers} / \
         {whole} of that: {:.0} tokens/s",
        options.batch,
        time * 1e3,
        rate * layers as f64 / whole as f64
    );
    Ok(())
}

/// Launches one step between two marks, for a profiler: the kernel of random numbers, which no step has.
pub fn account(
    model: &Model,
    config: &ModelConfig,
    options: &Options,
) -> Result<(), Box<dyn Error>> {
    let device = model.embedding.val().device();
    let sizes = [options.batch, options.context];
    let mut sequences = Sequences::new(model, config, Work::Step, sizes, 1)?;
    for _ in 0..WARM_UPS {
        sequences.launch()?;
    }
    mark(&device)?;
    sequences.launch()?;
    mark(&device)?;
    println!(
        "one launched step of {} layers lies between the last two launches of prng_kernel",
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
