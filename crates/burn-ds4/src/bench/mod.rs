//! Whole steps: the time of a forward call over one token and over several, and of the engine's
//! steps, with and without drafts, launched and recorded.

mod calls;
mod decoding;
mod flash;
mod generations;
mod whole;

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use crate::shared::devices::DeviceArgs;
use crate::shared::flash::FlashArgs;
use crate::shared::{ActivationsArg, Dtype, Head, load_options, shipped_checkpoint};
use clap::{Args, ValueEnum};
use ds4_model::checkpoint::Checkpoint;
use ds4_model::model::Model;

use calls::Context;
use decoding::Drafts;
use whole::Options;

/// Times whole forward calls, over one token and over the 2 to 5 of a verification, and the steps
/// of the engine.
#[derive(Debug, Args)]
pub struct BenchOptions {
    /// What to run.
    #[arg(long, value_enum, default_value_t = Which::Tiny)]
    model: Which,
    #[command(flatten)]
    device: DeviceArgs,
    /// Dtype of the activations.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Directory of the checkpoint, for `tiny`.
    #[arg(long, default_value_os_t = shipped_checkpoint())]
    checkpoint: PathBuf,
    /// Positions in the cache before the first call that is timed, each in turn [default: 256 for
    /// tiny, 4096 for flash].
    #[arg(long, value_delimiter = ',')]
    context: Vec<usize>,
    /// Sequences, all of the same length.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// First layers of V4-Flash, for `flash`; half of them are timed, too.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=43))]
    layers: u32,
    /// What widths and numbers of heads are divided by, 1, 2, 4 or 8, for `flash`: to try it where
    /// there is little memory or no GPU.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    shrink: u32,
    /// Routed experts of a layer, for `flash`; fewer of them take less memory.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(6..))]
    experts: u32,
    /// Size of the vocabulary, for `flash`.
    #[arg(long, default_value_t = 129_280, value_parser = clap::value_parser!(u32).range(1..))]
    vocabulary: u32,
    /// Fraction of drafts that are taken to be accepted, for `flash`.
    #[arg(long, default_value_t = 0.85, value_parser = fraction)]
    acceptance: f64,
    /// What a plain copy reaches, in TB/s, for `flash`.
    #[arg(long, default_value_t = 4.3, value_parser = positive)]
    copy_rate: f64,
    /// Appends a line of JSON for each kind of step or text to this file.
    #[arg(long)]
    jsonl: Option<PathBuf>,
    /// Tokens that are drafted per step, each number in turn.
    #[arg(long, default_value = "1", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=8))]
    drafts: Vec<u8>,
    /// Leaves out drafts, from the first that DSpark gives a smaller probability to be accepted,
    /// each value in turn.
    #[arg(long, default_value = "0", value_delimiter = ',', value_parser = fraction)]
    draft_confidence: Vec<f64>,
    /// Head that chooses the drafts, each in turn. That of `flash` has random clusters.
    #[arg(long, value_enum, default_value = "dense", value_delimiter = ',')]
    draft_head: Vec<Head>,
    #[command(flatten)]
    clusters: FlashArgs,
    /// Drafts with the DSpark drafter of V4-Flash-0731 in place of the MTP layer, for `flash`.
    #[arg(long)]
    dspark: bool,
    /// Tokens of a prompt, for `flash`; 0 for none.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Tokens of a prompt that a call takes [default: all of them].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: Option<u32>,
    /// What products by packed weights do to their other operand, for `flash`.
    #[arg(long, value_enum, default_value_t)]
    activations: ActivationsArg,
    /// Only times prompts, each after so many positions, for `flash`.
    #[arg(long, value_delimiter = ',')]
    only_prompt: Vec<usize>,
    /// Only launches a few steps, or chunks of a prompt, the last between marks, for a profiler
    /// whose output `ds4-account` reads, for `flash`.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "step")]
    account: Option<Account>,
    /// Calls of each kind of which the median is taken.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Tokens to generate without drafts and with them, for `tiny`.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Has one device work at a time, where there are several, for all of the sequences.
    #[arg(long)]
    no_overlap: bool,
    /// Only times the engine's steps, for `flash`.
    #[arg(long)]
    only_steps: bool,
}

fn fraction(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "not between 0 and 1".to_owned())
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "not a rate".to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// The trained checkpoint that comes with the repository.
    Tiny,
    /// The first layers of V4-Flash and what drafts, with random weights.
    Flash,
}

/// What a profiler looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Account {
    /// A step without drafts.
    Step,
    /// A step that verifies drafts and drafts again.
    Round,
    /// A chunk of a prompt.
    Prompt,
}

/// Runs the benchmark.
///
/// # Errors
///
/// If the checkpoint cannot be loaded, or the device fails.
pub fn run(args: &BenchOptions) -> Result<(), Box<dyn Error>> {
    match args.model {
        Which::Tiny => tiny(args),
        Which::Flash => flash(args),
    }
}

impl BenchOptions {
    /// How to draft: every number of drafts with every confidence.
    fn drafts(&self) -> Vec<Drafts> {
        let confidences = self.draft_confidence.iter();
        confidences
            .flat_map(|&confidence| {
                let counts = self.drafts.iter();
                counts.map(move |&count| Drafts {
                    count: count.into(),
                    confidence,
                })
            })
            .collect()
    }

    /// Sets the head of a model that drafts are chosen with.
    fn set_draft_head(&self, head: Head, model: &mut Model) -> Result<(), Box<dyn Error>> {
        let head = match (head, self.model) {
            (Head::Dense, _) => None,
            (Head::Flash, Which::Tiny) => Some(self.clusters.head(&self.checkpoint, model)?),
            (Head::Flash, Which::Flash) => Some(flash::draft_head(model, self.clusters.probes)?),
        };
        if let Some(head) = &head {
            let (probes, clusters) = (head.probes(), head.head().clusters());
            println!("drafts by a clustered head, {probes} of {clusters} clusters probed");
        }
        model.set_draft_head(head);
        Ok(())
    }
}

fn tiny(args: &BenchOptions) -> Result<(), Box<dyn Error>> {
    let devices = args
        .device
        .init(args.batch as usize, args.context.iter().copied().max())?;
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let options = load_options(args.device.first(), args.dtype, true);
    let mut model = checkpoint.load(&options, &devices)?;
    for context in contexts(args, 256) {
        calls::steps(&model, context, args.samples as usize)?;
    }
    if args.batch > 1 {
        return Ok(());
    }
    for &head in &args.draft_head {
        args.set_draft_head(head, &mut model)?;
        let texts = generations::Texts {
            model: &model,
            checkpoint: &args.checkpoint,
            tokens: args.tokens as usize,
            drafts: args.drafts(),
            jsonl: args.jsonl.as_deref(),
        };
        texts.measure()?;
    }
    Ok(())
}

fn flash(args: &BenchOptions) -> Result<(), Box<dyn Error>> {
    let [contexts, prompts] = [contexts(args, 4096), prompts(args)];
    let most = contexts.iter().chain(&prompts);
    let most = most.map(|context| context.positions * context.batch).max();
    let devices = args.device.init(args.batch as usize, most)?;
    let start = Instant::now();
    let [layers, experts, vocabulary, shrink] =
        [args.layers, args.experts, args.vocabulary, args.shrink].map(|number| number as usize);
    if !shrink.is_power_of_two() {
        return Err(format!("--shrink must be 1, 2, 4 or 8, not {shrink}").into());
    }
    let config = flash::config(layers, experts, vocabulary, shrink);
    let (config, drafter) = match args.dspark {
        true if layers < 6 => return Err("--dspark needs --layers 6 or more".into()),
        true => (flash::with_dspark(config), "DSpark"),
        false => (config, "MTP"),
    };
    config.validate()?;
    for device in devices.devices() {
        device.seed(0);
    }
    let mut model = config.init_packed_on(args.dtype.into(), args.activations.into(), &devices)?;
    let placed = model.placement.runs().iter();
    let placed = placed.map(|run| (run.layers.clone(), &run.device));
    let parts = model
        .parallel
        .iter()
        .flat_map(|parallel| parallel.devices());
    let parts = parts.map(|device| (0..layers, device));
    let whole = placed.filter(|_| model.parallel.is_none());
    for (layers, device) in whole.chain(parts) {
        device.sync()?;
        let usage = device.memory_pool_usage();
        let bytes = usage.map_or("an unknown number of".to_owned(), |usage| {
            usage.bytes_in_use.to_string()
        });
        println!("layers {layers:?} on {device:?}: {bytes} bytes in use");
    }
    println!(
        "{layers} layers and {drafter}, {experts} experts, weights made in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    let options = |context: Context| Options {
        batch: context.batch,
        context: context.positions,
        samples: args.samples as usize,
        drafts: args.drafts(),
        acceptance: args.acceptance,
        activations: args.activations.into(),
        jsonl: args.jsonl.clone(),
        chunk: args.chunk.map(|chunk| chunk as usize),
        copy_rate: args.copy_rate,
        overlap: !args.no_overlap,
    };
    if let Some(account) = args.account {
        let options = options(contexts[0]);
        return match account {
            Account::Step => whole::account(&model, &options, 0),
            Account::Round => whole::account(&model, &options, options.drafts[0].count),
            Account::Prompt => whole::account_prompt(&model, &options, args.prompt),
        };
    }
    if !prompts.is_empty() {
        let mut prompts = prompts.into_iter();
        return prompts
            .try_for_each(|context| whole::prefill(&model, &options(context), args.prompt));
    }
    for context in contexts {
        let options = options(context);
        for &head in &args.draft_head {
            args.set_draft_head(head, &mut model)?;
            whole::decoding(&model, &options)?;
            println!("{:.1} s since the start", start.elapsed().as_secs_f64());
        }
        if args.only_steps {
            continue;
        }
        calls::steps(&model, context, options.samples)?;
        println!("{:.1} s since the start", start.elapsed().as_secs_f64());
        if args.prompt > 0 {
            whole::prefill(&model, &options, args.prompt)?;
        }
    }
    Ok(())
}

/// Contents of the cache, one after the other, which are also printed.
fn contexts(args: &BenchOptions, default: usize) -> Vec<Context> {
    let default = [default];
    let positions = match &args.context[..] {
        [] => &default[..],
        positions => positions,
    };
    println!(
        "{} on {}, {positions:?} positions before, {} sequences",
        format!("{:?} in {:?}", args.model, args.dtype).to_lowercase(),
        args.device,
        args.batch
    );
    let context = |&positions: &usize| context(args, positions);
    positions.iter().map(context).collect()
}

/// The same before chunks that alone are timed.
fn prompts(args: &BenchOptions) -> Vec<Context> {
    let context = |&positions: &usize| context(args, positions);
    args.only_prompt.iter().map(context).collect()
}

fn context(args: &BenchOptions, positions: usize) -> Context {
    Context {
        batch: args.batch as usize,
        positions,
        drawn: args.model == Which::Flash,
    }
}
