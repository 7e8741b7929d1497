//! The options of a server.

use std::error::Error;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::HeaderValue;
use clap::{Args, FromArgMatches, value_parser};
use ds4_model::generate::{DEFAULT_PREFILL_CHUNK, EngineConfig, MAX_LANES};

use crate::conversation::Encoding;
use crate::shared::drafts::DraftArgs;
use crate::shared::place::PlaceArgs;
use crate::shared::{RoundingArgs, shipped_checkpoint};

/// Environment variable for `--api-key`, which other users of the machine cannot see.
const API_KEY: &str = "DS4_API_KEY";

/// Serves a DeepSeek-V4 checkpoint over HTTP, with the interfaces of OpenAI's and Anthropic's API.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Directory of the checkpoint: config.json, tokenizer.json, model.safetensors or its shards.
    #[arg(short, long, default_value_os_t = shipped_checkpoint())]
    pub model: PathBuf,
    /// Name of the model in requests and answers [default: that of the directory].
    #[arg(long)]
    pub name: Option<String>,
    /// Address to listen at; 0.0.0.0 for all of the machine.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen at; 0 for any that is free.
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// Where the model runs.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// What is rounded.
    #[command(flatten)]
    pub rounding: RoundingArgs,
    /// Most texts at a time.
    #[arg(long, default_value_t = 8, value_parser = value_parser!(u16).range(1..=MAX_LANES as i64))]
    pub lanes: u16,
    /// What drafts tokens.
    #[command(flatten)]
    pub drafts: DraftArgs,
    /// Release whose chat prompts the checkpoint was trained on [default: 0731 with a DSpark
    /// drafter, else v4].
    #[arg(long, value_enum)]
    pub encoding: Option<Encoding>,
    /// Most tokens of prompt and answer together [default: the model's context].
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(2..))]
    pub ctx: Option<u32>,
    /// Prompt tokens per forward call, between which other texts go on.
    #[arg(long, default_value_t = DEFAULT_PREFILL_CHUNK, value_name = "TOKENS")]
    pub prefill_chunk: usize,
    /// Bytes that are kept of texts, so that a prompt that begins like one of them need not be
    /// processed again.
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub prefix_cache: usize,
    /// Uses of kept texts only what changes no bit of the answer.
    #[arg(long)]
    pub exact_prefix: bool,
    /// Most bytes that the caches of all texts take [default: most of what a CUDA device has left
    /// once the model is loaded, and no bound elsewhere].
    #[arg(long, value_name = "BYTES")]
    pub cache_memory: Option<usize>,
    /// Launches every step anew, even where it could be replayed as a graph.
    #[arg(long)]
    pub no_graph: bool,
    /// Is ready at once, and compiles kernels when requests need them.
    #[arg(long)]
    pub no_warm_up: bool,
    /// Texts that may wait for a lane; further requests are refused.
    #[arg(long, default_value_t = 64, value_name = "TEXTS")]
    pub queue: u16,
    /// Seconds after which an answer is given up.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    pub timeout: u32,
    /// Most bytes of a request.
    #[arg(long, default_value_t = 16 << 20, value_name = "BYTES")]
    pub max_body: usize,
    /// Key that requests have to show [default: that of the environment variable DS4_API_KEY, or
    /// none].
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Origin whose pages may use the server from a browser, or *.
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Option<HeaderValue>,
}

impl Default for Options {
    /// Those of `burn-ds4 serve` without arguments.
    fn default() -> Self {
        let command = Self::augment_args(clap::Command::new("serve"));
        let matches = command.get_matches_from(["serve"]);
        Self::from_arg_matches(&matches).expect("no option is required")
    }
}

impl Options {
    /// The options of the engine, for so many drafts a step.
    pub fn engine(&self, drafts: usize) -> EngineConfig {
        let default = EngineConfig::default();
        EngineConfig {
            lanes: self.lanes.into(),
            drafts,
            draft_confidence: self.drafts.draft_confidence,
            prefill_chunk: self.prefill_chunk,
            context: self.ctx.map(|ctx| ctx as usize),
            cache_bytes: self.cache_memory,
            prefix_bytes: self.prefix_cache,
            exact_prefix: self.exact_prefix,
            graphs: !self.no_graph,
            ..default
        }
    }

    /// The time that an answer may take.
    pub fn time_limit(&self) -> Duration {
        Duration::from_secs(self.timeout.into())
    }

    /// The key that requests have to show. A key that is empty by accident would let everybody in.
    pub fn key(&self) -> Result<Option<String>, Box<dyn Error>> {
        match (&self.api_key, std::env::var(API_KEY)) {
            (Some(key), _) if key.is_empty() => Err("--api-key is empty".into()),
            (Some(key), _) => Ok(Some(key.clone())),
            (None, Ok(key)) => Ok(Some(key).filter(|key| !key.is_empty())),
            (None, Err(std::env::VarError::NotPresent)) => Ok(None),
            (None, Err(error)) => Err(format!("{API_KEY}: {error}").into()),
        }
    }

    /// The model's name in requests and answers.
    pub fn model_name(&self) -> String {
        let directory = || self.model.canonicalize().ok();
        let of = |path: &PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
        let name = self.name.clone().or_else(|| of(&directory()?));
        name.unwrap_or_else(|| "ds4".into())
    }
}
