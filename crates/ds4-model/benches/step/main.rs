//! Whole steps: what a forward call over one token takes, what one over several takes, and what speculative decoding makes of it.

mod flash;
#[path = "../../../../examples/shared/mod.rs"]
mod shared;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::device::DeviceSpec;
use clap::{Parser, ValueEnum};
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::checkpoint::Checkpoint;
use ds4_model::config::ModelConfig;
use ds4_model::generate::{Decoder, GenerateConfig, Generation, MAX_DRAFTS, TextTokenizer};
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use shared::{Dtype, finish, load_options, shipped_checkpoint};

/// Positions of the largest verification: the last token and all drafts.
const MAX_POSITIONS: usize = 1 + MAX_DRAFTS;
/// Tokens of a forward call that only fills the cache.
const FILL: usize = 64;
/// Calls of each kind before the first that counts: kernels are compiled, memory is allocated.
const WARM_UPS: usize = 3;
/// Generations of which the median is taken, after one that does not count.
const GENERATIONS: usize = 5;
const PROMPT: &str = "And God said,";

/// Times whole forward calls: over one token, over the 2 to 5 of a verification, and over one token as a recorded graph.
#[derive(Parser)]
struct Args {
    /// What to run.
    #[arg(long, value_enum, default_value_t = Which::Tiny)]
    model: Which,
    /// cuda, cuda:INDEX, wgpu, flex or cpu.
    #[arg(long, default_value_t = DeviceSpec::Flex)]
    device: DeviceSpec,
    /// Dtype of the activations.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Directory of the checkpoint, for `tiny`.
    #[arg(long, default_value_os_t = shipped_checkpoint())]
    checkpoint: PathBuf,
    /// Positions in the cache before the first call that is timed [default: 256 for tiny, 4096 for flash].
    #[arg(long)]
    context: Option<usize>,
    /// Size of the vocabulary, for `flash`.
    #[arg(long, default_value_t = 129_280)]
    vocabulary: usize,
    /// Calls of each kind of which the median is taken.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Tokens to generate with and without drafts, for `tiny`.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// The trained checkpoint that comes with the repository.
    Tiny,
    /// Four layers of V4-Flash with random weights.
    Flash,
}

fn main() -> ExitCode {
    finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let device = args.device.init()?;
    let (model, config, context) = match args.model {
        Which::Tiny => {
            let checkpoint = Checkpoint::open(&args.checkpoint)?;
            let model = checkpoint.load(&load_options(args.device, args.dtype, true), &device)?;
            (model, checkpoint.config().clone(), 256)
        }
        Which::Flash => {
            let config = flash::config(args.vocabulary);
            (
                flash::model(&config, args.dtype.into(), &device),
                config,
                4096,
            )
        }
    };
    let context = args.context.unwrap_or(context);
    let name = format!("{:?} in {:?}", args.model, args.dtype).to_lowercase();
    println!("{name} on {}, {context} positions before", args.device);
    steps(&model, &config, context, args.samples as usize, &device)?;
    for graphs in [false, true] {
        decoding(&model, &config, context, args.samples as usize, graphs)?;
    }
    if args.model == Which::Tiny {
        generations(&model, &config, args)?;
    }
    Ok(())
}

/// Prints the time of a forward call over 1 to 5 positions.
fn steps(
    model: &Model,
    config: &ModelConfig,
    context: usize,
    samples: usize,
    device: &Device,
) -> Result<(), Box<dyn Error>> {
    let options = CacheConfig {
        capacity: context + MAX_POSITIONS,
        rollback: Rollback::Bounded(MAX_POSITIONS),
        ..CacheConfig::default()
    };
    let mut cache = model.new_cache(config, options)?;
    for first in (0..context).step_by(FILL) {
        let ids = ids(first, FILL.min(context - first), config, device);
        model.forward_streams(ids, &mut cache, &Trace::off())?;
    }
    let mut times = vec![Vec::new(); MAX_POSITIONS];
    for round in 0..WARM_UPS + samples {
        // All kinds in turn, so that whatever slows the machine down for a while slows all of them.
        for (positions, times) in (1..).zip(&mut times) {
            let ids = ids(context, positions, config, device);
            let time = step(model, ids, &mut cache, device)?;
            if round >= WARM_UPS {
                times.push(time);
            }
        }
    }
    println!("positions      ms   ratio   fastest   slowest");
    let times: Vec<Sorted> = times.into_iter().map(Sorted::new).collect();
    for (positions, time) in (1..).zip(&times) {
        println!(
            "{positions:>9} {:>7.3} {:>7.3} {:>9.3} {:>9.3}",
            time.median(),
            time.median() / times[0].median(),
            time.fastest(),
            time.slowest()
        );
    }
    Ok(())
}

/// Milliseconds of a forward call, logits included, until the device has finished it. The cache is as before.
fn step(
    model: &Model,
    ids: Tensor<2, Int>,
    cache: &mut Cache,
    device: &Device,
) -> Result<f64, Box<dyn Error>> {
    let [_, positions] = ids.dims();
    device.sync()?;
    let start = Instant::now();
    let logits = model.forward(ids, cache)?;
    device.sync()?;
    let time = start.elapsed().as_secs_f64() * 1e3;
    drop(logits);
    cache.truncate(positions)?;
    Ok(time)
}

/// Prints the time of greedy decoding, token by token, and what of it is the device's and the host's where a step is replayed.
fn decoding(
    model: &Model,
    config: &ModelConfig,
    context: usize,
    samples: usize,
    graphs: bool,
) -> Result<(), Box<dyn Error>> {
    let device = model.embedding.val().device();
    let options = CacheConfig {
        capacity: context + 5 * (samples + FILL),
        rollback: Rollback::Bounded(1),
        ..CacheConfig::default()
    };
    let mut cache = model.new_cache(config, options)?;
    for first in (0..context).step_by(FILL) {
        let ids = ids(first, FILL.min(context - first), config, &device);
        model.forward_streams(ids, &mut cache, &Trace::off())?;
    }
    let mut decoder = Decoder::new(model, cache, graphs)?;
    let kind = if graphs { "recorded" } else { "launched" };
    let start = Instant::now();
    for _ in 0..WARM_UPS {
        decoder.decode(usize::MAX)?;
    }
    let warm_up = start.elapsed().as_secs_f64() * 1e3;
    if graphs && decoder.replays() == 0 {
        let reason = decoder.refusal().unwrap_or("the device has no graphs");
        println!("decode, {kind}: err: {reason}");
        return Ok(());
    }
    let mut tokens = Vec::with_capacity(samples);
    for _ in 0..samples {
        let start = Instant::now();
        decoder.decode(1)?;
        tokens.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let token = Sorted::new(tokens);
    print!(
        "decode, {kind}: ok, {:.3} ms a token with its id read back (fastest {:.3}, slowest {:.3}; {warm_up:.0} ms until then)",
        token.median(),
        token.fastest(),
        token.slowest()
    );
    if !graphs {
        println!();
        return Ok(());
    }
    let mut host = Vec::with_capacity(samples);
    for _ in 0..samples {
        device.sync()?;
        let start = Instant::now();
        decoder.replay()?;
        host.push(start.elapsed().as_secs_f64() * 1e6);
    }
    device.sync()?;
    let start = Instant::now();
    for _ in 0..samples {
        decoder.replay()?;
    }
    device.sync()?;
    let replay = start.elapsed().as_secs_f64() * 1e3 / samples as f64;
    let mut decoder = decoder.with_steps_ahead(1);
    let start = Instant::now();
    for sample in 0..samples {
        decoder.decode(samples - sample)?;
    }
    let late = start.elapsed().as_secs_f64() * 1e3 / samples as f64;
    println!(
        "; with its id read a step late {late:.3} ms; one of many replays {replay:.3} ms, of the host {:.1} us a replay",
        Sorted::new(host).median()
    );
    Ok(())
}

/// Any tokens, for the positions from `first` on.
fn ids(first: usize, count: usize, config: &ModelConfig, device: &Device) -> Tensor<2, Int> {
    let id = |position: usize| (position * 7919 % config.vocab_size) as i32;
    let ids: Vec<i32> = (first..first + count).map(id).collect();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}

/// Prints tokens a second of greedy decoding, without and with a draft: launched, and as graphs.
fn generations(model: &Model, config: &ModelConfig, args: &Args) -> Result<(), Box<dyn Error>> {
    let tokenizer = TextTokenizer::from_dir(&args.checkpoint)?;
    let mut prompt = vec![config.bos_token_id];
    prompt.extend(tokenizer.encode(PROMPT)?);
    let kinds = [(0, false), (0, true), (1, false), (1, true)];
    let mut rates = vec![Vec::new(); kinds.len()];
    let (mut acceptance, mut replays) = (0.0, 0);
    for round in 0..=GENERATIONS {
        for ((drafts, graphs), rates) in kinds.into_iter().zip(&mut rates) {
            let options = GenerateConfig {
                max_new_tokens: args.tokens as usize,
                drafts,
                graphs,
                ignore_eos: true,
                ..GenerateConfig::default()
            };
            let mut generation = Generation::new(model, config, options, &prompt)?;
            generation.prefill()?;
            let start = Instant::now();
            let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?.len();
            let seconds = start.elapsed().as_secs_f64();
            if round > 0 {
                // The first token comes with the prompt.
                rates.push((tokens - 1) as f64 / seconds);
            }
            acceptance = generation.stats().acceptance();
            replays = generation.replays();
        }
    }
    let rates: Vec<Sorted> = rates.into_iter().map(Sorted::new).collect();
    let [launched, plain, rounds, cycles] = [0, 1, 2, 3].map(|kind| rates[kind].median());
    println!(
        "generate: {plain:.1} tokens/s; with --no-graph {launched:.1} tokens/s; with --mtp 1 {cycles:.1} tokens/s ({:.3} times that \
         without it, {replays} rounds replayed, {:.1} % of drafts accepted); with both {rounds:.1} tokens/s",
        cycles / plain,
        100.0 * acceptance
    );
    Ok(())
}

/// Measurements in order.
struct Sorted(Vec<f64>);

impl Sorted {
    fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The middle value; the mean of both where there are two.
    fn median(&self) -> f64 {
        let last = self.0.len() - 1;
        f64::midpoint(self.0[last / 2], self.0[last.div_ceil(2)])
    }

    fn fastest(&self) -> f64 {
        self.0[0]
    }

    fn slowest(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}
