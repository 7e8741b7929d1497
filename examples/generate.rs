//! Continues a prompt with a DeepSeek-V4 checkpoint, streaming the text.
//!
//! Without arguments it runs the small trained checkpoint that comes with the repository, on the
//! CPU.

mod shared;

use std::error::Error;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn_ds4_ops::device::DeviceSpec;
use clap::Parser;
use ds4_model::checkpoint::LoadOptions;
use ds4_model::generate::{ChatOptions, GenerateConfig, Message, SamplingConfig};
use ds4_model::model::Model;
use ds4_model::pipeline::Pipeline;
use shared::chat::{Effort, Encoding};
use shared::drafts::DraftArgs;
use shared::flash::FlashArgs;
use shared::load_bar::LoadBar;
use shared::{Dtype, Head, finish, load_options, note, shipped_checkpoint};

/// Tokens of the prompt that a warm-up has, at most: a longer one takes hardly any other kernels.
const WARM_UP_PROMPT: usize = 64;
/// Pieces of text after which a warm-up has launched, recorded and replayed a step.
const WARM_UP_PIECES: usize = 8;

/// Continues a prompt with a DeepSeek-V4 checkpoint.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
struct Args {
    /// Directory of the checkpoint: config.json, tokenizer.json, model.safetensors or its shards.
    #[arg(long, default_value_os_t = shipped_checkpoint())]
    model: PathBuf,
    /// Text to continue.
    #[arg(short, long, default_value = "And God said,")]
    prompt: String,
    /// Tokens to generate at most.
    #[arg(short = 'n', long, default_value_t = 128)]
    tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token [default: that of the
    /// checkpoint's generation_config.json, as for the next four, or 0].
    #[arg(long)]
    temperature: Option<f32>,
    /// Samples among this many most likely tokens; 0 for all.
    #[arg(long)]
    top_k: Option<usize>,
    /// Samples among the most likely tokens that hold this fraction of the probability.
    #[arg(long)]
    top_p: Option<f32>,
    /// Samples among tokens at least this likely, relative to the most likely.
    #[arg(long)]
    min_p: Option<f32>,
    /// Divides the logits of tokens that have occurred; 1 for none.
    #[arg(long)]
    repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the output has, -2 to 2.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtracted from the logit of a token as often as the output has it, -2 to 2.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Seed of the sampling. The same seed gives the same text, with drafts or without.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    drafts: DraftArgs,
    /// Head that chooses the text. The flash head is approximate: it may choose other tokens than
    /// the dense one.
    #[arg(long, value_enum, default_value_t = Head::Dense)]
    head: Head,
    /// Head that chooses the drafts. The text is the same; with the flash head, fewer drafts may be
    /// accepted.
    #[arg(long, value_enum, default_value_t = Head::Dense)]
    draft_head: Head,
    #[command(flatten)]
    flash: FlashArgs,
    /// Stops at this text; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// Encodes the prompt as a user's message in a chat.
    #[arg(long)]
    chat: bool,
    /// Lets the model think before it answers, so much.
    #[arg(long, value_enum, value_name = "EFFORT", requires = "chat")]
    think: Option<Effort>,
    /// Release whose chat prompts the checkpoint was trained on [default: 0731 with a DSpark
    /// drafter, else v4].
    #[arg(long, value_enum, requires = "chat")]
    encoding: Option<Encoding>,
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX.
    #[arg(long, default_value_t = DeviceSpec::Flex)]
    device: DeviceSpec,
    /// Dtype of the activations.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Launches every step anew, even where it could be replayed as a graph. The text is the same.
    #[arg(long)]
    no_graph: bool,
    /// Rounds cached rows to FP8 and FP4 and back, as the released model was trained with.
    #[arg(long)]
    quantized_cache: bool,
}

fn main() -> ExitCode {
    finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    // What is wrong with the arguments is told before anything is loaded.
    config(args, GenerateConfig::default()).validate()?;
    args.drafts.check()?;
    let drafts = args.drafts.is_wanted(args.device);
    if args.draft_head == Head::Flash && !drafts {
        return Err("--draft-head flash needs drafts, --draft-tokens 1 to 8".into());
    }
    let flash = args.head == Head::Flash || args.draft_head == Head::Flash;
    args.flash
        .check(flash, "--head flash or --draft-head flash")?;
    let device = args.device.init()?;

    let started = Instant::now();
    let options = LoadOptions {
        quantized_cache: args.quantized_cache,
        ..load_options(args.device, args.dtype, drafts)
    };
    let bar = LoadBar::default();
    let mut pipeline = Pipeline::open_with_progress(&args.model, &options, &device, bar)?;
    if flash {
        choose_heads(args, &mut pipeline.model)?;
    }
    let loaded = started.elapsed();
    let prompt = match args.chat {
        true => pipeline.encode_chat(
            &[Message::user(&args.prompt)],
            &chat_options(args, &pipeline),
        )?,
        false => pipeline.encode(&args.prompt)?,
    };
    let config = GenerateConfig {
        drafts: args.drafts.drafts(args.device, &pipeline.model)?,
        ..config(args, pipeline.defaults.clone())
    };
    let has_drafts = config.drafts > 0;
    let warmed_up = warm_up(args, &pipeline, &config, &prompt)?;

    let mut generation = pipeline.generate(config, &prompt)?;
    let started = Instant::now();
    generation.prefill()?;
    let prefilled = started.elapsed();

    let mut out = io::stdout().lock();
    if !args.chat {
        write!(out, "{}", args.prompt)?;
        out.flush()?;
    }
    let started = Instant::now();
    let mut written = Ok(());
    generation.stream(|text| {
        written = write!(out, "{text}").and_then(|()| out.flush());
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    let elapsed = started.elapsed().as_secs_f64();
    written?;
    writeln!(out)?;

    if let Some(reason) = generation.graph_refusal() {
        note(format_args!(
            "[without graphs, a step cannot be recorded: {reason}]"
        ));
    }
    // The first token comes with the prompt.
    let rate = generation.generated().saturating_sub(1) as f64 / elapsed;
    let stats = generation.stats();
    let drafts = if has_drafts {
        format!(
            ", drafts {} accepted {} ({:.1} %)",
            stats.drafted,
            stats.accepted,
            100.0 * stats.acceptance()
        )
    } else {
        String::new()
    };
    let warmed_up = warmed_up.map_or_else(String::new, |time| {
        format!(", kernels compiled in {:.2} s", time.as_secs_f64())
    });
    note(format_args!(
        "[{} tokens, {rate:.1} tokens/s{drafts}; prompt {} tokens in {:.2} s, loaded in {:.2} \
         s{warmed_up}]",
        generation.generated(),
        prompt.len(),
        prefilled.as_secs_f64(),
        loaded.as_secs_f64(),
    ));
    Ok(())
}

/// How the message is rendered.
fn chat_options(args: &Args, pipeline: &Pipeline) -> ChatOptions {
    let encoding = args.encoding.map_or(pipeline.chat.encoding, Into::into);
    ChatOptions {
        thinking: args.think.is_some(),
        effort: args.think.map(Into::into).unwrap_or_default(),
        encoding,
        ..pipeline.chat
    }
}

/// How to generate: what the arguments say, and else the checkpoint.
fn config(args: &Args, defaults: GenerateConfig) -> GenerateConfig {
    let sampling = defaults.sampling;
    GenerateConfig {
        max_new_tokens: args.tokens,
        sampling: SamplingConfig {
            temperature: args.temperature.unwrap_or(sampling.temperature),
            top_k: args.top_k.unwrap_or(sampling.top_k),
            top_p: args.top_p.unwrap_or(sampling.top_p),
            min_p: args.min_p.unwrap_or(sampling.min_p),
            repetition_penalty: args
                .repetition_penalty
                .unwrap_or(sampling.repetition_penalty),
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            seed: args.seed,
            ..sampling
        },
        draft_confidence: args.drafts.draft_confidence,
        stop_strings: args.stop.clone(),
        graphs: !args.no_graph,
        ..defaults
    }
}

/// Begins the same generation where kernels are compiled at their first use, so that the rates do
/// not include compilation.
fn warm_up(
    args: &Args,
    pipeline: &Pipeline,
    config: &GenerateConfig,
    prompt: &[u32],
) -> Result<Option<Duration>, Box<dyn Error>> {
    if args.device == DeviceSpec::Flex {
        return Ok(None);
    }
    let started = Instant::now();
    // Caches of other sizes may have other kernels.
    let capacity = Some(config.initial_capacity(prompt.len()));
    let prompt = &prompt[..prompt.len().min(WARM_UP_PROMPT)];
    let config = GenerateConfig {
        capacity,
        ..config.clone()
    };
    let mut pieces = 0;
    let mut generation = pipeline.generate(config, prompt)?;
    generation.stream(|_| {
        pieces += 1;
        match pieces < WARM_UP_PIECES {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    })?;
    Ok(Some(started.elapsed()))
}

/// Puts the flash head where the arguments ask for it.
fn choose_heads(args: &Args, model: &mut Model) -> Result<(), Box<dyn Error>> {
    let head = args.flash.head(&args.model, model)?;
    if args.head == Head::Flash {
        let (probes, clusters) = (head.probes(), head.head().clusters());
        let kind = match probes == clusters {
            true => "exact",
            false => "approximate",
        };
        note(format_args!(
            "[{kind} flash head: {probes} of {clusters} clusters are probed for a token]"
        ));
        model.flash_head = Some(head.clone());
    }
    if args.draft_head == Head::Flash {
        model.set_draft_head(Some(head));
    }
    Ok(())
}
