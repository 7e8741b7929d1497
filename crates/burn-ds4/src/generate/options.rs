//! The command line.

use std::path::PathBuf;

use clap::{Args, value_parser};
use ds4_model::generate::{GenerateConfig, SamplingConfig};

#[cfg(feature = "protocols")]
use crate::conversation::{Conversation, Effort, Encoding, InputMessage};
use crate::shared::drafts::DraftArgs;
use crate::shared::flash::FlashArgs;
use crate::shared::place::PlaceArgs;
use crate::shared::{Head, RoundingArgs, drafting_checkpoint};

/// Tokens that continue a prompt, where nothing else is asked for.
const TOKENS: usize = 128;

/// Continues a prompt with a DeepSeek-V4 checkpoint; at a terminal without one, it chats.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct Options {
    /// Text to continue [default: what standard input has; at a terminal, a chat].
    #[arg(short, long, conflicts_with = "file")]
    pub prompt: Option<String>,
    /// File with the text to continue. A line break at its end does not count.
    #[arg(short, long)]
    pub file: Option<PathBuf>,
    /// Encodes the prompt as a user's message in a chat.
    #[cfg(feature = "protocols")]
    #[arg(long)]
    pub chat: bool,
    /// Prints ids, text, the reason of the end and figures as JSON, at the end.
    #[arg(long)]
    pub json: bool,
    /// Which checkpoint, and how it generates.
    #[command(flatten)]
    pub model: ModelOptions,
}

/// Which checkpoint, and how it generates.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct ModelOptions {
    /// Directory of the checkpoint: config.json, tokenizer.json, model.safetensors or its shards.
    #[arg(short, long, default_value_os_t = drafting_checkpoint())]
    pub model: PathBuf,
    /// Tokens to generate at most [default: 128; for each answer of a chat, a quarter of the
    /// context, 4096 at most].
    #[arg(short = 'n', long)]
    pub tokens: Option<usize>,
    /// Most tokens of prompt and answer together [default: the model's context].
    #[arg(short, long, value_name = "TOKENS", value_parser = value_parser!(u32).range(2..))]
    pub ctx: Option<u32>,
    /// Sampling temperature; 0 always takes the most likely token [default: that of the
    /// checkpoint's generation_config.json, as for the next four, or 0].
    #[arg(long, visible_alias = "temperature", value_name = "TEMPERATURE")]
    pub temp: Option<f32>,
    /// Samples among this many most likely tokens; 0 for all.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Samples among the most likely tokens that hold this fraction of the probability.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Samples among tokens at least this likely, relative to the most likely.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that have occurred; 1 for none.
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the output has, -2 to 2.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token as often as the output has it, -2 to 2.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Seed of the sampling. The same seed gives the same text, with drafts or without.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// What drafts tokens.
    #[command(flatten)]
    pub drafts: DraftArgs,
    /// Head that chooses the text. The flash head is approximate: it may choose other tokens than
    /// the dense one.
    #[arg(long, value_enum, default_value_t = Head::Dense)]
    pub head: Head,
    /// Head that chooses the drafts. The text is the same; with the flash head, fewer drafts may be
    /// accepted.
    #[arg(long, value_enum, default_value_t = Head::Dense)]
    pub draft_head: Head,
    /// The clustered head.
    #[command(flatten)]
    pub flash: FlashArgs,
    /// Stops at this text; may be given several times.
    #[arg(long)]
    pub stop: Vec<String>,
    /// Lets the model think before it answers, so much.
    #[cfg(feature = "protocols")]
    #[arg(long, value_enum, value_name = "EFFORT")]
    pub think: Option<Effort>,
    /// Release whose chat prompts the checkpoint was trained on [default: 0731 with a DSpark
    /// drafter, else v4].
    #[cfg(feature = "protocols")]
    #[arg(long, value_enum)]
    pub encoding: Option<Encoding>,
    /// In a chat, uses what was computed for earlier turns only where it changes no bit of the
    /// answer.
    #[arg(long)]
    pub exact_prefix: bool,
    /// Where the model runs.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Launches every step anew, even where it could be replayed as a graph. The text is the same.
    #[arg(long)]
    pub no_graph: bool,
    /// What is rounded.
    #[command(flatten)]
    pub rounding: RoundingArgs,
}

impl Options {
    /// Whether the prompt is a message.
    pub fn is_chat(&self) -> bool {
        #[cfg(feature = "protocols")]
        return self.chat;
        #[cfg(not(feature = "protocols"))]
        false
    }
}

impl ModelOptions {
    /// A conversation of these messages, in which the model thinks as much as it is told to.
    #[cfg(feature = "protocols")]
    pub fn conversation(&self, messages: Vec<InputMessage>) -> Conversation {
        crate::chat::conversation(messages, self.think)
    }

    /// Whether the model is to think.
    pub fn thinks(&self) -> bool {
        #[cfg(feature = "protocols")]
        return self.think.is_some();
        #[cfg(not(feature = "protocols"))]
        false
    }

    /// How to generate: what the arguments say, and else the checkpoint.
    pub fn config(&self, defaults: GenerateConfig) -> GenerateConfig {
        let sampling = defaults.sampling;
        GenerateConfig {
            max_new_tokens: self.tokens.unwrap_or(TOKENS),
            sampling: SamplingConfig {
                temperature: self.temp.unwrap_or(sampling.temperature),
                top_k: self.top_k.unwrap_or(sampling.top_k),
                top_p: self.top_p.unwrap_or(sampling.top_p),
                min_p: self.min_p.unwrap_or(sampling.min_p),
                repetition_penalty: self
                    .repetition_penalty
                    .unwrap_or(sampling.repetition_penalty),
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                seed: self.seed,
                ..sampling
            },
            draft_confidence: self.drafts.draft_confidence,
            stop_strings: self.stop.clone(),
            graphs: !self.no_graph,
            ..defaults
        }
    }
}
