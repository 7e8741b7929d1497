//! A small model of your own, made of the DeepSeek-V4 mixture of experts and Burn's own layers.
//!
//! A [`MoeLayer`] takes the place of a feed-forward layer: the first block looks its experts up by
//! token id, the others choose them by score. A [`Router`] alone mixes a few output heads. The
//! weights are random; the program shows what the routers do with them.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::device::DeviceSpec;
use clap::Parser;
use ds4_model::moe::{MoeLayer, MoeLayerConfig};
use ds4_model::router::{Router, RouterConfig, Routing};
use ds4_model::trace::Trace;

const VOCABULARY: usize = 500;

/// Shape of a [`Tagger`].
#[derive(Config, Debug)]
struct TaggerConfig {
    vocabulary: usize,
    tags: usize,
    #[config(default = 64)]
    d_model: usize,
    #[config(default = 3)]
    blocks: usize,
    #[config(default = 16)]
    experts: usize,
    #[config(default = 4)]
    experts_per_token: usize,
    #[config(default = 3)]
    heads: usize,
}

impl TaggerConfig {
    fn init(&self, device: &Device) -> Tagger {
        let moe = MoeLayerConfig::new(self.d_model, 32, self.experts, self.experts_per_token);
        let block = |index: usize| TaggerBlock {
            norm: LayerNormConfig::new(self.d_model).init(device),
            moe: moe
                .clone()
                .with_hash_vocabulary((index == 0).then_some(self.vocabulary))
                .init(device),
        };
        let head = |_| LinearConfig::new(self.d_model, self.tags).init(device);
        Tagger {
            embedding: EmbeddingConfig::new(self.vocabulary, self.d_model).init(device),
            blocks: (0..self.blocks).map(block).collect(),
            head_router: RouterConfig::new(self.d_model, self.heads, 1).init_score(device),
            heads: (0..self.heads).map(head).collect(),
        }
    }
}

/// Gives every token a score per tag.
#[derive(Module, Debug)]
struct Tagger {
    embedding: Embedding,
    blocks: Vec<TaggerBlock>,
    head_router: Router,
    heads: Vec<Linear>,
}

#[derive(Module, Debug)]
struct TaggerBlock {
    norm: LayerNorm,
    moe: MoeLayer,
}

/// What [`Tagger::forward`] returns.
struct Tagged {
    /// Scores: `[batch, positions, tags]`.
    scores: Tensor<3>,
    /// The experts of each block: `[tokens, experts_per_token]`.
    experts: Vec<Tensor<2, Int>>,
    /// The head of each token: `[tokens, 1]`.
    heads: Tensor<2, Int>,
}

impl Tagger {
    fn forward(&self, token_ids: Tensor<2, Int>) -> Tagged {
        let [batch, positions] = token_ids.dims();
        let mut x = self.embedding.forward(token_ids.clone());
        let mut experts = Vec::new();
        for block in &self.blocks {
            let normed = block.norm.forward(x.clone());
            experts.push(route(&block.moe.router, normed.clone(), token_ids.clone()).ids);
            x = x + block.moe.forward(normed, token_ids.clone());
        }
        // One head per token: its column of the one-hot selection is 1, the others are 0.
        let heads = route(&self.head_router, x.clone(), token_ids).ids;
        let scores = self.heads.iter().enumerate().map(|(index, head)| {
            let chosen = heads.clone().equal_elem(index as i64).float();
            head.forward(x.clone()) * chosen.reshape([batch, positions, 1])
        });
        Tagged {
            scores: scores
                .reduce(|sum, scores| sum + scores)
                .expect("there is a head"),
            experts,
            heads,
        }
    }
}

/// Routes `[batch, positions, d_model]` without running any expert.
fn route(router: &Router, x: Tensor<3>, token_ids: Tensor<2, Int>) -> Routing {
    let (x, token_ids) = (x.flatten(0, 1), token_ids.flatten(0, 1));
    router.forward(x, token_ids, None, &Trace::off())
}

/// Builds a small model of MoE layers, routers and Burn's own layers, and shows how its tokens
/// spread over the experts.
#[derive(Debug, Parser)]
struct Args {
    /// Tokens to run through the model.
    #[arg(long, default_value_t = 256)]
    tokens: usize,
    /// Device: flex (CPU), wgpu, cuda or cuda:INDEX.
    #[arg(long, default_value_t = DeviceSpec::Flex)]
    device: DeviceSpec,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.tokens == 0 {
        return Err("`--tokens` is 0, expected at least 1".into());
    }
    let device = args.device.init()?;
    device.seed(0);
    let config = TaggerConfig::new(VOCABULARY, 8);
    let model = config.init(&device);
    let mut out = io::stdout().lock();
    writeln!(out, "{} parameters", model.num_params())?;

    let ids = Tensor::<1, Int>::arange(0..args.tokens as i64, &device);
    let output = model.forward(ids.remainder_scalar(VOCABULARY as i64).unsqueeze());
    writeln!(out, "scores {:?}", output.scores.dims())?;
    for (index, experts) in output.experts.into_iter().enumerate() {
        let load = counts(experts, config.experts)?;
        writeln!(out, "block {index}: tokens per expert {load:?}")?;
    }
    writeln!(
        out,
        "tokens per head {:?}",
        counts(output.heads, config.heads)?
    )?;
    Ok(())
}

/// How often each of `0..count` occurs.
fn counts(ids: Tensor<2, Int>, count: usize) -> Result<Vec<usize>, Box<dyn Error>> {
    let ids = ids.try_into_data()?;
    let mut counts = vec![0; count];
    for id in ids.iter::<i64>() {
        counts[id as usize] += 1;
    }
    Ok(counts)
}
