//! Measures how well a checkpoint predicts a text, or token ids: perplexity, and what its
//! multi-token-prediction layer is worth.
//!
//! The text is split into windows of `--window` tokens. Each begins with the beginning-of-sequence
//! token and empty caches, so that a token is predicted from at most the tokens of its own window.
//!
//! * **Loss** and **perplexity**: the mean negative log-probability of every token of every window,
//!   given the true tokens before it, and `exp` of that. The log-softmax is computed in `f64` from
//!   the model's `f32` logits.
//! * **MTP agreement**: how often the MTP layer's best guess of the token at `t + 2`, made at
//!   position `t` from the true tokens up to `t + 1`, is the trunk's own best guess of that token
//!   given the same tokens and `t + 1`'s streams. This is the acceptance of the first draft in
//!   greedy speculative decoding, but on the given text instead of the model's own.
//! * **MTP accuracy**: how often the same guess is the true token.
//!
//! With `--flash-head`, also what a clustered head finds, by the number of clusters that it probes:
//!
//! * **recall@1**: how often its best token is that of the dense head, in the trunk and in the MTP
//!   layer;
//! * **acceptance**: how often the MTP layer's best guess by the clustered head is the trunk's own
//!   best guess by the dense one: the MTP agreement with other drafts;
//! * acceptance and speed of greedy generation, continuing the text from several positions, with
//!   drafts by either head.

mod heads;

use std::error::Error;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

use crate::shared::devices::DeviceArgs;
use crate::shared::flash::FlashArgs;
use crate::shared::load_bar::LoadBar;
use crate::shared::{
    BYTE_ORDER_MARK, Dtype, RoundingArgs, asset, load_options, note, shipped_checkpoint,
};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::{Args, value_parser};
use ds4_model::cache::{CacheConfig, Rollback};
use ds4_model::checkpoint::Checkpoint;
use ds4_model::config::ModelConfig;
use ds4_model::generate::{GenerateConfig, MAX_DRAFTS, TextTokenizer, greedy_token};
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use heads::Curve;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Positions per forward call: limits the logits that are read back at once.
const POSITIONS_PER_CALL: usize = 64;

/// Measures perplexity and multi-token prediction of a checkpoint on a text, and what a clustered
/// output head is worth.
#[derive(Debug, Args)]
pub struct Options {
    /// Directory of the checkpoint: config.json, tokenizer.json, model.safetensors or its shards.
    #[arg(short, long, default_value_os_t = shipped_checkpoint())]
    model: PathBuf,
    /// The text, UTF-8.
    #[arg(long, default_value_os_t = asset("sample.txt"))]
    file: PathBuf,
    /// Token ids in place of a text: a file with a JSON list.
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    ids: Option<PathBuf>,
    /// Tokens per window, each of which begins without context.
    #[arg(long, default_value = "256", value_name = "N")]
    window: NonZeroUsize,
    /// Tokens to use at most.
    #[arg(long, value_name = "N")]
    tokens: Option<NonZeroUsize>,
    /// Compares the flash head, which is clustered, with the dense one.
    #[arg(long)]
    flash_head: bool,
    #[command(flatten)]
    flash: FlashArgs,
    /// Tokens to generate from each of several positions of the text, to compare the heads' drafts;
    /// 0 for none.
    #[arg(long, default_value_t = 64, value_name = "N", requires = "flash_head")]
    generate: usize,
    /// Tokens to draft per step meanwhile (1 to 8).
    #[arg(long, default_value_t = 1, value_name = "K", requires = "flash_head")]
    #[arg(value_parser = value_parser!(u8).range(1..=MAX_DRAFTS as i64))]
    draft_tokens: u8,
    /// Prints the results as one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Dtype of the activations.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    #[command(flatten)]
    rounding: RoundingArgs,
}

/// Runs the program.
///
/// # Errors
///
/// If the checkpoint cannot be read, or an option cannot be used.
pub fn run(args: &Options) -> Result<(), Box<dyn Error>> {
    args.flash.check(args.flash_head, "--flash-head")?;
    let devices = args.device.init(1, Some(args.window.get()))?;
    let checkpoint = Checkpoint::open(&args.model)?;
    let config = checkpoint.config();
    let tokens = read_tokens(args, config)?;
    let tokens = &tokens[..args
        .tokens
        .map_or(tokens.len(), |n| n.get().min(tokens.len()))];
    let options = load_options(args.device.first(), args.dtype, true);
    let options = args.rounding.apply(options);
    let model = checkpoint.load_with_progress(&options, &devices, LoadBar::default())?;
    let head = match args.flash_head {
        true => Some(args.flash.head(&args.model, &model)?),
        false => None,
    };

    let bar = ProgressBar::new(tokens.len() as u64).with_style(ProgressStyle::with_template(
        "Evaluating [{bar:30}] {pos}/{len} tokens ({eta})",
    )?);
    let started = Instant::now();
    let evaluator = Evaluator {
        model: &model,
        device: model.placement.first().clone(),
    };
    let mut score = Score {
        curve: head.as_ref().map(Curve::new).transpose()?,
        ..Score::default()
    };
    let window = args.window.get().min(config.max_position_embeddings);
    for window in tokens.chunks(window) {
        evaluator.window(window, &mut score, &bar)?;
    }
    bar.finish_and_clear();

    let rate = score.predicted as f64 / started.elapsed().as_secs_f64();

    let options = GenerateConfig {
        max_new_tokens: args.generate,
        drafts: args.draft_tokens.into(),
        ignore_eos: true,
        ..GenerateConfig::default()
    };
    let runs = match &head {
        Some(head) if args.generate > 0 && model.mtp.is_some() => {
            heads::generate(&model, head, tokens, &options)?
        }
        _ => Vec::new(),
    };
    let report = score.report(runs);
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        report.print(&mut out)?;
    }
    note(format_args!("[{rate:.1} tokens/s]"));
    Ok(())
}

/// The ids to predict, none of which is outside the model's vocabulary.
fn read_tokens(args: &Options, config: &ModelConfig) -> Result<Vec<u32>, Box<dyn Error>> {
    let path = args.ids.as_ref().unwrap_or(&args.file);
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{}: cannot be read: {error}", path.display()))?;
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text);
    let tokens: Vec<u32> = match args.ids {
        Some(_) => serde_json::from_str(text)
            .map_err(|error| format!("{}: not a list of ids: {error}", path.display()))?,
        None => TextTokenizer::from_dir(&args.model)?.encode_plain(text)?,
    };
    if tokens.is_empty() {
        return Err(format!("{}: the text is empty", path.display()).into());
    }
    let vocabulary = config.vocab_size;
    match tokens.iter().find(|id| **id as usize >= vocabulary) {
        None => Ok(tokens),
        Some(id) => Err(format!(
            "{}: has token {id}, but the model's vocabulary has {vocabulary}",
            path.display()
        )
        .into()),
    }
}

/// Sums over all windows.
#[derive(Debug, Default)]
struct Score {
    predicted: usize,
    negative_log_probability: f64,
    drafted: usize,
    agreed: usize,
    correct: usize,
    curve: Option<Curve>,
}

impl Score {
    fn report(&self, generation: Vec<heads::GenerationRun>) -> Report {
        let fraction = |count: usize| count as f64 / self.drafted as f64;
        let loss = self.negative_log_probability / self.predicted as f64;
        Report {
            tokens: self.predicted,
            loss,
            perplexity: loss.exp(),
            mtp: (self.drafted > 0).then(|| DraftReport {
                drafts: self.drafted,
                as_trunk: fraction(self.agreed),
                as_text: fraction(self.correct),
            }),
            flash_head: self.curve.as_ref().map(|curve| curve.report(generation)),
        }
    }
}

/// The printed results.
#[derive(Debug, Serialize)]
struct Report {
    tokens: usize,
    loss: f64,
    perplexity: f64,
    mtp: Option<DraftReport>,
    flash_head: Option<heads::HeadReport>,
}

/// Drafts of the MTP layer, and the fractions of them that are right.
#[derive(Debug, Serialize)]
struct DraftReport {
    drafts: usize,
    as_trunk: f64,
    as_text: f64,
}

impl Report {
    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "{} tokens, loss {:.3}, perplexity {:.2}",
            self.tokens, self.loss, self.perplexity
        )?;
        if let Some(mtp) = &self.mtp {
            writeln!(
                out,
                "{} MTP drafts, {:.1} % as the trunk, {:.1} % as the text",
                mtp.drafts,
                100.0 * mtp.as_trunk,
                100.0 * mtp.as_text
            )?;
        }
        match &self.flash_head {
            Some(report) => report.print(out),
            None => Ok(()),
        }
    }
}

struct Evaluator<'a> {
    model: &'a Model,
    device: Device,
}

impl Evaluator<'_> {
    fn window(
        &self,
        tokens: &[u32],
        score: &mut Score,
        bar: &ProgressBar,
    ) -> Result<(), Box<dyn Error>> {
        let config = self.model.config();
        // Token t + 1 of the sequence is what position t predicts.
        let sequence = [&[config.bos_token_id], tokens].concat();
        let options = CacheConfig {
            capacity: tokens.len().min(config.max_position_embeddings),
            rollback: Rollback::Bounded(0),
            ..CacheConfig::default()
        };
        let mut cache = self.model.new_cache(options)?;
        let mut mtp_cache = match self.model.mtp {
            Some(_) => Some(self.model.new_mtp_cache(options)?),
            None => None,
        };
        let (mut trunk, mut drafts) = (Vec::new(), Vec::new());
        let (mut found, mut found_drafts) = (Vec::new(), Vec::new());
        for start in (0..tokens.len()).step_by(POSITIONS_PER_CALL) {
            let end = (start + POSITIONS_PER_CALL).min(tokens.len());
            let next = &sequence[start + 1..end + 1];
            let streams = self.model.forward_streams(
                self.ids(&sequence[start..end]),
                &mut cache,
                &Trace::off(),
            )?;
            if let Some(curve) = &score.curve {
                found.push(curve.tokens(&self.model.hidden(streams.clone()))?);
            }
            for (row, target) in rows(self.model.logits(streams.clone()))?.iter().zip(next) {
                score.negative_log_probability += negative_log_probability(row, *target);
                trunk.push(greedy_token(row)?);
            }
            if let Some(cache) = &mut mtp_cache {
                let streams =
                    self.model
                        .forward_mtp(streams, self.ids(next), cache, &Trace::off())?;
                if let (Some(curve), Some(mtp)) = (&score.curve, &self.model.mtp) {
                    found_drafts.push(curve.tokens(&mtp.hidden(streams.clone()))?);
                }
                for row in rows(self.model.mtp_logits(streams))? {
                    drafts.push(greedy_token(&row)?);
                }
            }
            bar.inc(next.len() as u64);
        }
        score.predicted += tokens.len();
        // The draft of position t is for token t + 2, which the trunk predicts at t + 1; the last
        // draft is for a token beyond the window.
        for (position, draft) in drafts.iter().take(tokens.len() - 1).enumerate() {
            score.drafted += 1;
            score.agreed += usize::from(*draft == trunk[position + 1]);
            score.correct += usize::from(*draft == sequence[position + 2]);
        }
        if let Some(curve) = &mut score.curve {
            curve.count(&joined(&found), &trunk);
            curve.count_drafts(&joined(&found_drafts), &drafts, &trunk[1..]);
        }
        Ok(())
    }

    fn ids(&self, ids: &[u32]) -> Tensor<2, Int> {
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let count = ids.len();
        Tensor::from_data(TensorData::new(ids, [1, count]), &self.device)
    }
}

/// What the parts of a window gave for each number of probes, in one piece each.
fn joined(parts: &[Vec<Vec<u32>>]) -> Vec<Vec<u32>> {
    let heads = parts.first().map_or(0, Vec::len);
    (0..heads)
        .map(|head| parts.iter().flat_map(|part| &part[head]).copied().collect())
        .collect()
}

/// Reads `[1, rows, vocabulary]` back, row by row.
fn rows(logits: Tensor<3>) -> Result<Vec<Vec<f32>>, Box<dyn Error>> {
    let [_, _, vocabulary] = logits.dims();
    let values = logits.try_into_vec_as::<f32>()?;
    Ok(values.chunks(vocabulary).map(<[f32]>::to_vec).collect())
}

fn negative_log_probability(logits: &[f32], target: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    let sum: f64 = logits
        .iter()
        .map(|logit| (f64::from(*logit) - largest).exp())
        .sum();
    largest + sum.ln() - f64::from(logits[target as usize])
}
