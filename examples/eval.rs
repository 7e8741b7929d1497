//! Measures how well a checkpoint predicts a text: perplexity, and what its multi-token-prediction layer is worth.
//!
//! The text is cut into windows of `--window` tokens. Each begins anew, with the beginning-of-sequence token and empty caches, so that
//! a token is predicted from at most the tokens of its own window.
//!
//! * **Perplexity**: `exp` of the mean negative log-probability of every token of every window, given the true tokens before it. The
//!   log-softmax is computed in `f64` from the model's `f32` logits.
//! * **MTP agreement**: how often the MTP layer's best guess of the token at `t + 2`, made at position `t` from the true tokens up to
//!   `t + 1`, is the trunk's own best guess of that token given the same tokens and `t + 1`'s streams. This is the acceptance of the first
//!   draft in greedy speculative decoding, but on the given text instead of the model's own.
//! * **MTP accuracy**: how often the same guess is the true token.

mod shared;

use std::error::Error;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_ds4_ops::device::DeviceSpec;
use clap::Parser;
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadBar};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{TextTokenizer, greedy_token};
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use indicatif::{ProgressBar, ProgressStyle};
use shared::{Dtype, asset, load_options, shipped_checkpoint};

/// Positions per forward call: bounds the logits that are read back at once.
const CHUNK: usize = 64;

/// Measures perplexity and multi-token prediction of a checkpoint on a text.
#[derive(Debug, Parser)]
struct Args {
    /// Directory of the checkpoint: config.json, tokenizer.json, model.safetensors or its shards.
    #[arg(long, default_value_os_t = shipped_checkpoint())]
    model: PathBuf,
    /// The text, UTF-8.
    #[arg(long, default_value_os_t = asset("sample.txt"))]
    file: PathBuf,
    /// Tokens per window, each of which begins without context.
    #[arg(long, default_value = "256", value_name = "N")]
    window: NonZeroUsize,
    /// Tokens of the text to use at most.
    #[arg(long, value_name = "N")]
    tokens: Option<NonZeroUsize>,
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX.
    #[arg(long, default_value_t = DeviceSpec::Flex)]
    device: DeviceSpec,
    /// Dtype of the activations.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
}

fn main() -> ExitCode {
    shared::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let device = args.device.init()?;
    let checkpoint = Checkpoint::open(&args.model)?;
    let config = checkpoint.config();
    let tokens = read_tokens(&args.file, &TextTokenizer::from_dir(&args.model)?, config)?;
    let tokens = &tokens[..args
        .tokens
        .map_or(tokens.len(), |n| n.get().min(tokens.len()))];
    let options = load_options(args.device, args.dtype, true);
    let model = checkpoint.load_with_progress(&options, &device, LoadBar::new())?;

    let bar = ProgressBar::new(tokens.len() as u64).with_style(ProgressStyle::with_template(
        "Evaluating [{bar:30}] {pos}/{len} tokens ({eta})",
    )?);
    let started = Instant::now();
    let evaluator = Evaluator {
        model: &model,
        config,
        device,
    };
    let mut score = Score::default();
    let window = args.window.get().min(config.max_position_embeddings);
    for window in tokens.chunks(window) {
        evaluator.window(window, &mut score, &bar)?;
    }
    bar.finish_and_clear();

    let mut out = io::stdout().lock();

    writeln!(
        out,
        "{} tokens, perplexity {:.3}",
        score.predicted,
        score.perplexity()
    )?;
    if score.drafted > 0 {
        let percent = |count: usize| 100.0 * count as f64 / score.drafted as f64;
        writeln!(
            out,
            "{} MTP drafts, {:.1} % as the trunk, {:.1} % as the text",
            score.drafted,
            percent(score.agreed),
            percent(score.correct)
        )?;
    }
    let rate = score.predicted as f64 / started.elapsed().as_secs_f64();
    eprintln!("[{rate:.1} tokens/s]");
    Ok(())
}

fn read_tokens(
    path: &Path,
    tokenizer: &TextTokenizer,
    config: &ModelConfig,
) -> Result<Vec<u32>, Box<dyn Error>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{}: cannot be read: {error}", path.display()))?;
    let tokens = tokenizer.encode_plain(&text)?;
    if tokens.is_empty() {
        return Err(format!("{}: the text is empty", path.display()).into());
    }
    match tokens
        .iter()
        .find(|token| **token as usize >= config.vocab_size)
    {
        None => Ok(tokens),
        Some(token) => Err(format!(
            "the tokenizer gives token {token}, but the model's vocabulary has {}",
            config.vocab_size
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
}

impl Score {
    fn perplexity(&self) -> f64 {
        (self.negative_log_probability / self.predicted as f64).exp()
    }
}

struct Evaluator<'a> {
    model: &'a Model,
    config: &'a ModelConfig,
    device: Device,
}

impl Evaluator<'_> {
    fn window(
        &self,
        tokens: &[u32],
        score: &mut Score,
        bar: &ProgressBar,
    ) -> Result<(), Box<dyn Error>> {
        // Token t + 1 of the sequence is what position t predicts.
        let sequence = [&[self.config.bos_token_id], tokens].concat();
        let options = CacheConfig {
            capacity: tokens.len().min(self.config.max_position_embeddings),
            rollback: Rollback::Bounded(0),
            ..CacheConfig::default()
        };
        let mut cache = self.model.new_cache(self.config, options)?;
        let mut mtp_cache = match self.model.mtp {
            Some(_) => Some(self.model.new_mtp_cache(self.config, options)?),
            None => None,
        };
        let (mut trunk, mut drafts) = (Vec::new(), Vec::new());
        for start in (0..tokens.len()).step_by(CHUNK) {
            let end = (start + CHUNK).min(tokens.len());
            let next = &sequence[start + 1..end + 1];
            let streams = self.model.forward_streams(
                self.ids(&sequence[start..end]),
                &mut cache,
                &Trace::off(),
            )?;
            for (row, target) in rows(self.model.logits(streams.clone()))?.iter().zip(next) {
                score.negative_log_probability += negative_log_probability(row, *target);
                trunk.push(greedy_token(row)?);
            }
            if let Some(cache) = &mut mtp_cache {
                drafts.extend(self.drafts(streams, next, cache)?);
            }
            bar.inc(next.len() as u64);
        }
        score.predicted += tokens.len();
        // The draft of position t is for token t + 2, which the trunk predicts at t + 1; the last draft is for a token beyond the window.
        for (position, draft) in drafts.iter().take(tokens.len() - 1).enumerate() {
            score.drafted += 1;
            score.agreed += usize::from(*draft == trunk[position + 1]);
            score.correct += usize::from(*draft == sequence[position + 2]);
        }
        Ok(())
    }

    fn drafts(
        &self,
        streams: Tensor<4>,
        next: &[u32],
        cache: &mut Cache,
    ) -> Result<Vec<u32>, Box<dyn Error>> {
        let streams = self
            .model
            .forward_mtp(streams, self.ids(next), cache, &Trace::off())?;
        let rows = rows(self.model.mtp_logits(streams))?;
        Ok(rows
            .iter()
            .map(|row| greedy_token(row))
            .collect::<Result<_, _>>()?)
    }

    fn ids(&self, ids: &[u32]) -> Tensor<2, Int> {
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let count = ids.len();
        Tensor::from_data(TensorData::new(ids, [1, count]), &self.device)
    }
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
