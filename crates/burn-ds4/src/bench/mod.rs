//! Whole steps: the time of a forward call over one token and over several, and of the engine's
//! steps, with and without drafts, launched and recorded; and many texts under load.

mod calls;
mod decoding;
mod flash;
mod generations;
mod load;
mod model;
mod whole;

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use ds4_model::model::Model;

use crate::shared::Head;
use crate::shared::flash::FlashArgs;

use calls::Context;
use decoding::Drafts;
use model::{ModelArgs, Which, fraction, positive};
use whole::Options;

/// Times whole forward calls, over one token and over the 2 to 5 of a verification, and the steps
/// of the engine; `bench load` has it decode many texts.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchOptions {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    #[command(flatten)]
    model: ModelArgs,
    /// Positions in the cache before the first call that is timed, each in turn [default: 256 for
    /// tiny, 4096 for flash].
    #[arg(long, value_delimiter = ',')]
    context: Vec<usize>,
    /// Sequences, all of the same length.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
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
    /// Tokens of a prompt, for `flash`; 0 for none.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Tokens of a prompt that a call takes [default: all of them].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: Option<u32>,
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

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Load(load::LoadOptions),
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
    match (&args.command, args.model.which) {
        (Some(BenchCommand::Load(options)), _) => load::run(options),
        (None, Which::Tiny) => tiny(args),
        (None, Which::Flash) => flash(args),
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
        let head = match (head, self.model.which) {
            (Head::Dense, _) => None,
            (Head::Flash, Which::Tiny) => Some(self.clusters.head(&self.model.checkpoint, model)?),
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
    let most = args.context.iter().copied().max();
    let mut model = args.model.make(args.batch as usize, most)?;
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
            checkpoint: &args.model.checkpoint,
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
    let start = Instant::now();
    let mut model = args.model.make(args.batch as usize, most)?;
    let options = |context: Context| Options {
        batch: context.batch,
        context: context.positions,
        samples: args.samples as usize,
        drafts: args.drafts(),
        acceptance: args.model.acceptance,
        activations: args.model.activations.into(),
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
        "{}, {positions:?} positions before, {} sequences",
        args.model.name(),
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
        drawn: args.model.which == Which::Flash,
    }
}
