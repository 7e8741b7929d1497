//! Whole steps: the time of a forward call over one token and over several, and of the engine's
//! steps, with and without drafts, launched and recorded.

mod calls;
mod decoding;
mod flash;
mod generations;
#[path = "../../../../examples/shared/mod.rs"]
mod shared;
mod whole;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use ds4_model::checkpoint::Checkpoint;
use shared::devices::DeviceArgs;
use shared::{Dtype, finish, load_options, shipped_checkpoint};

use calls::Context;
use whole::Options;

/// Times whole forward calls, over one token and over the 2 to 5 of a verification, and the steps
/// of the engine.
#[derive(Parser)]
struct Args {
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
    /// Positions in the cache before the first call that is timed [default: 256 for tiny, 4096 for
    /// flash].
    #[arg(long)]
    context: Option<usize>,
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
    /// Appends a line of JSON for each kind of step to this file, for `flash`.
    #[arg(long)]
    jsonl: Option<PathBuf>,
    /// Tokens that are drafted per step.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    drafts: u8,
    /// Drafts with the DSpark drafter of V4-Flash-0731 in place of the MTP layer, for `flash`.
    #[arg(long)]
    dspark: bool,
    /// Tokens of a chunk of a prompt, for `flash`; 0 for none.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Only times chunks of a prompt, each after so many positions, for `flash`.
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
    /// Lets only one of several devices work at a time.
    #[arg(long)]
    no_overlap: bool,
    /// Only times the engine's steps, for `flash`.
    #[arg(long)]
    only_steps: bool,
    /// Added by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
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

fn main() -> ExitCode {
    let args = Args::parse();
    finish(match args.model {
        Which::Tiny => tiny(&args),
        Which::Flash => flash(&args),
    })
}

fn tiny(args: &Args) -> Result<(), Box<dyn Error>> {
    let devices = args.device.init(args.context)?;
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let model = checkpoint.load(
        &load_options(args.device.first(), args.dtype, true),
        &devices,
    )?;
    let context = context(args, 256);
    let samples = args.samples as usize;
    calls::steps(&model, context, samples)?;
    if args.batch > 1 {
        return Ok(());
    }
    let (tokens, drafts) = (args.tokens as usize, args.drafts.into());
    generations::generations(&model, &args.checkpoint, tokens, drafts)
}

fn flash(args: &Args) -> Result<(), Box<dyn Error>> {
    let context = context(args, 4096);
    let devices = args.device.init(Some(context.positions * context.batch))?;
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
    let model = config.init_packed_on(args.dtype.into(), &devices)?;
    for run in model.placement.runs() {
        run.device.sync()?;
        let usage = run.device.memory_pool_usage();
        let bytes = usage.map_or("an unknown number of".to_owned(), |usage| {
            usage.bytes_in_use.to_string()
        });
        println!(
            "layers {:?} on {:?}: {bytes} bytes in use",
            run.layers, run.device
        );
    }
    println!(
        "{layers} layers and {drafter}, {experts} experts, weights made in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    let options = Options {
        batch: context.batch,
        context: context.positions,
        samples: args.samples as usize,
        drafts: args.drafts.into(),
        acceptance: args.acceptance,
        jsonl: args.jsonl.clone(),
        copy_rate: args.copy_rate,
        overlap: !args.no_overlap,
    };
    match args.account {
        Some(Account::Step) => return whole::account(&model, &options, 0),
        Some(Account::Round) => return whole::account(&model, &options, options.drafts),
        Some(Account::Prompt) => return whole::account_prompt(&model, &options, args.prompt),
        None => {}
    }
    if !args.only_prompt.is_empty() {
        return args.only_prompt.iter().try_for_each(|&context| {
            let options = Options {
                context,
                jsonl: args.jsonl.clone(),
                ..options
            };
            whole::prefill(&model, &options, args.prompt)
        });
    }
    whole::decoding(&model, &options)?;
    println!("{:.1} s since the start", start.elapsed().as_secs_f64());
    if args.only_steps {
        return Ok(());
    }
    calls::steps(&model, context, options.samples)?;
    println!("{:.1} s since the start", start.elapsed().as_secs_f64());
    if args.prompt > 0 {
        whole::prefill(&model, &options, args.prompt)?;
    }
    Ok(())
}

/// Contents of the cache, which are also printed.
fn context(args: &Args, default: usize) -> Context {
    let context = Context {
        batch: args.batch as usize,
        positions: args.context.unwrap_or(default),
        drawn: args.model == Which::Flash,
    };
    let name = format!("{:?} in {:?}", args.model, args.dtype).to_lowercase();
    println!(
        "{name} on {}, {} positions before, {} sequences",
        args.device, context.positions, context.batch
    );
    context
}
