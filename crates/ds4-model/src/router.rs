//! Routers: which experts a token goes to, and with what weight.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_ds4_ops::router as ops;

use crate::linear::project_f32;
use crate::trace::Trace;
use crate::weights::{self, Initial, WeightSource};

/// Configuration of [`Router`].
#[derive(Config, Debug)]
pub struct RouterConfig {
    /// Width of a token.
    pub d_model: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub experts_per_token: usize,
    /// Sum of a token's routing weights.
    #[config(default = 1.0)]
    pub scale: f64,
}

impl RouterConfig {
    /// Initializes a router that chooses by score, with a zero selection bias.
    ///
    /// # Panics
    ///
    /// If `experts_per_token` is 0 or larger than `experts`.
    pub fn init_score(&self, device: &Device) -> Router {
        weights::dense(device, |source| self.build(source, "", None))
    }

    /// Initializes a router that looks the experts up by token id.
    ///
    /// Its table spreads consecutive ids over the experts; a checkpoint has a table of its own.
    ///
    /// # Panics
    ///
    /// If `experts_per_token` is 0 or larger than `experts`.
    pub fn init_hash(&self, vocabulary: usize, device: &Device) -> Router {
        weights::dense(device, |source| self.build(source, "", Some(vocabulary)))
    }

    /// The router of the tensors `{prefix}..`, which looks experts up if there is a vocabulary.
    pub(crate) fn build(
        &self,
        source: &mut impl WeightSource,
        prefix: &str,
        vocabulary: Option<usize>,
    ) -> Option<Router> {
        let (experts, k) = (self.experts, self.experts_per_token);
        assert!(
            (1..=experts).contains(&k),
            "experts_per_token must be in 1..={experts} (the number of experts), got {k}"
        );
        let gate = source.stored(&[format!("{prefix}weight")], [experts, self.d_model]);
        let selection = match vocabulary {
            Some(vocabulary) => source
                .table(&format!("{prefix}tid2eid"), [vocabulary, k], experts)
                .map(|table| Selection::Hash(HashSelection { table })),
            None => source
                .float(&format!("{prefix}bias"), [experts], Initial::Zeros)
                .map(|bias| Selection::Score(ScoreSelection { bias })),
        };
        Some(Router {
            gate: gate?,
            selection: selection?,
            experts_per_token: k,
            scale: self.scale,
        })
    }
}

/// Chooses the experts of every token and weights them by `sqrt(softplus(x · gateᵀ))`, computed in
/// f32.
#[derive(Module, Debug)]
pub struct Router {
    /// Gate weight: `[experts, d_model]`.
    pub gate: Param<Tensor<2>>,
    /// How the experts are chosen.
    pub selection: Selection,
    /// Experts per token.
    pub experts_per_token: usize,
    /// Sum of a token's routing weights.
    pub scale: f64,
}

/// How a [`Router`] chooses experts.
#[derive(Module, Debug)]
pub enum Selection {
    /// The largest biased scores.
    Score(ScoreSelection),
    /// A table indexed by token id.
    Hash(HashSelection),
}

/// Selection by score.
#[derive(Module, Debug)]
pub struct ScoreSelection {
    /// Added to the scores for the choice only: f32 `[experts]`.
    pub bias: Param<Tensor<1>>,
}

/// Selection by token id.
#[derive(Module, Debug)]
pub struct HashSelection {
    /// The experts of each token id: `[vocabulary, experts_per_token]`.
    pub table: Param<Tensor<2, Int>>,
}

/// What a [`Router`] returns.
#[derive(Clone, Debug)]
pub struct Routing {
    /// Routing weights: f32 `[tokens, experts_per_token]`.
    pub weights: Tensor<2>,
    /// Expert ids: `[tokens, experts_per_token]`.
    pub ids: Tensor<2, Int>,
}

impl Routing {
    /// Routes every token to the first expert, with weight 1.
    pub(crate) fn to_first(tokens: usize, device: &Device) -> Self {
        Self {
            weights: Tensor::ones([tokens, 1], (device, DType::F32)),
            ids: Tensor::zeros([tokens, 1], (device, DType::I32)),
        }
    }
}

impl Router {
    /// Routes the tokens `x` (`[tokens, d_model]`), whose ids are `token_ids` (`[tokens]`).
    ///
    /// A score router ignores the ids. Tokens that are true in `padding`, `[tokens]`, get expert
    /// ids -1 and weights 0; a hash router takes negative ids as padding, too.
    ///
    /// # Panics
    ///
    /// If `x` is of another width or device than the gate, or there are not as many ids, or as many
    /// marks of padding, as tokens.
    pub fn forward(
        &self,
        x: Tensor<2>,
        token_ids: Tensor<1, Int>,
        padding: Option<Tensor<1, Bool>>,
        trace: &Trace,
    ) -> Routing {
        let gate = self.gate.val();
        let logits = || project_f32(x.clone(), gate.clone());
        let routed = match &self.selection {
            Selection::Score(score) => {
                trace.record_with("logits", logits);
                ops::dense_router(
                    x,
                    gate,
                    Some(score.bias.val()),
                    padding,
                    self.experts_per_token,
                    self.scale,
                )
            }
            Selection::Hash(hash) => {
                let logits = logits();
                trace.record("logits", &logits);
                let weights = ops::HashWeights::Scored(logits);
                let token_ids = match padding {
                    Some(padding) => token_ids.mask_fill(padding, -1),
                    None => token_ids,
                };
                ops::hash_route(token_ids, hash.table.val(), weights, self.scale)
            }
        };
        let (weights, ids) = routed.expect("tokens that fit the gate, and an id for each");
        trace.record("weights", &weights);
        trace.record("ids", &ids);
        Routing { weights, ids }
    }
}
