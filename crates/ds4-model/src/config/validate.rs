//! What must hold for a configuration to describe a model.

use super::error::{ConfigError, ConfigErrorKind};
use super::shape::{AttentionKind, DsparkParams, MAX_DRAFTS, ModelConfig};

/// Ids and positions are `i32` on the device.
pub(super) const MAX_INDEX: usize = i32::MAX as usize;
/// Far beyond any model, near enough that sums and pairwise products of widths stay small.
pub(super) const MAX_WIDTH: usize = 1 << 24;
pub(super) const MAX_COUNT: usize = 1 << 20;
const MAX_LAYERS: usize = 4096;
const MAX_STREAMS: usize = 64;
const MAX_SINKHORN_ITERS: usize = 1000;
const MAX_DRAFTER_LAYERS: usize = 64;

/// A broken rule. `fields` lets the reader of a file drop the rules that only break because a key
/// is missing.
pub(super) struct BrokenRule {
    pub(super) fields: &'static [&'static str],
    pub(super) message: String,
}

#[derive(Default)]
pub(super) struct Rules {
    problems: Vec<BrokenRule>,
}

impl Rules {
    pub(super) fn check(
        &mut self,
        holds: bool,
        fields: &'static [&'static str],
        message: impl FnOnce() -> String,
    ) {
        if !holds {
            self.problems.push(BrokenRule {
                fields,
                message: message(),
            });
        }
    }

    fn size(&mut self, field: &'static [&'static str; 1], value: usize, max: usize) {
        self.check((1..=max).contains(&value), field, || {
            format!("{} is {value}, expected 1 to {max}", label(field[0]))
        });
    }

    fn real(
        &mut self,
        field: &'static [&'static str; 1],
        value: f64,
        expected: &str,
        holds: impl Fn(f64) -> bool,
    ) {
        self.check(value.is_finite() && holds(value), field, || {
            format!("{} is {value}, expected {expected}", field[0])
        });
    }

    /// Whether no rule of the fields is broken so far.
    pub(super) fn is_kept(&self, fields: &[&str]) -> bool {
        let mut problems = self.problems.iter();
        problems.all(|problem| !fields.iter().any(|field| problem.fields.contains(field)))
    }

    /// An `f32` tensor of these dimensions must be addressable.
    pub(super) fn product(&mut self, fields: &'static [&'static str], dims: &[usize]) {
        let bytes = dims
            .iter()
            .fold(4u128, |product, &dim| product.saturating_mul(dim as u128));
        self.check(bytes <= isize::MAX as u128, fields, || {
            format!(
                "the product of {} does not fit in memory ({bytes} bytes)",
                fields.join(", ")
            )
        });
    }
}

/// The field, and what the released files call it where that is something else.
fn label(field: &str) -> &str {
    match field {
        "rope_head_dim" => "rope_head_dim (qk_rope_head_dim)",
        other => other,
    }
}

impl ModelConfig {
    /// Checks that the configuration describes a model: sizes that are zero, out of proportion or
    /// do not divide, constants that are not numbers.
    ///
    /// # Errors
    /// [`ConfigErrorKind::Invalid`] with every rule that is broken.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut contradictory: Vec<String> = self
            .problems()
            .into_iter()
            .map(|problem| problem.message)
            .collect();
        if contradictory.is_empty() {
            return Ok(());
        }
        contradictory.sort();
        Err(ConfigErrorKind::Invalid {
            missing: Vec::new(),
            contradictory,
        }
        .into())
    }

    pub(super) fn problems(&self) -> Vec<BrokenRule> {
        let mut rules = Rules::default();
        self.sizes(&mut rules);
        self.relations(&mut rules);
        self.constants(&mut rules);
        self.products(&mut rules);
        if let Some(dspark) = &self.dspark {
            self.drafter(dspark, &mut rules);
        }
        self.sharing(&mut rules);
        self.candidate_blocks(&mut rules);
        if let Some(engram) = &self.engram {
            self.engrams(engram, &mut rules);
        }
        rules.problems
    }

    fn sizes(&self, rules: &mut Rules) {
        rules.size(&["vocab_size"], self.vocab_size, MAX_INDEX);
        rules.size(&["hidden_size"], self.hidden_size, MAX_WIDTH);
        rules.size(
            &["num_attention_heads"],
            self.num_attention_heads,
            MAX_COUNT,
        );
        rules.size(&["head_dim"], self.head_dim, MAX_WIDTH);
        rules.size(&["rope_head_dim"], self.rope_head_dim, MAX_WIDTH);
        rules.size(&["q_lora_rank"], self.q_lora_rank, MAX_WIDTH);
        rules.size(&["o_groups"], self.o_groups, MAX_COUNT);
        rules.size(&["o_lora_rank"], self.o_lora_rank, MAX_WIDTH);
        rules.size(&["sliding_window"], self.sliding_window, MAX_INDEX);
        rules.size(&["index_n_heads"], self.index_n_heads, MAX_COUNT);
        rules.size(&["index_head_dim"], self.index_head_dim, MAX_WIDTH);
        rules.size(&["index_topk"], self.index_topk, burn_ds4_ops::topk::MAX_K);
        rules.size(&["n_routed_experts"], self.n_routed_experts, MAX_COUNT);
        rules.size(
            &["num_experts_per_tok"],
            self.num_experts_per_tok,
            MAX_COUNT,
        );
        rules.size(&["n_shared_experts"], self.n_shared_experts, MAX_COUNT);
        rules.size(
            &["moe_intermediate_size"],
            self.moe_intermediate_size,
            MAX_WIDTH,
        );
        rules.size(&["hc_mult"], self.hc_mult, MAX_STREAMS);
        rules.size(
            &["hc_sinkhorn_iters"],
            self.hc_sinkhorn_iters,
            MAX_SINKHORN_ITERS,
        );
        rules.size(
            &["max_position_embeddings"],
            self.max_position_embeddings,
            MAX_INDEX,
        );

        let layers = self.layers.len();
        rules.check((1..=MAX_LAYERS).contains(&layers), &["layers"], || {
            format!(
                "the number of layers (num_hidden_layers) is {layers}, expected 1 to {MAX_LAYERS}"
            )
        });
        let bad_ratio = self.layers.iter().enumerate().find_map(|(layer, kind)| {
            let ratio = kind.ratio()?;
            (!(1..=MAX_INDEX).contains(&ratio)).then_some((layer, ratio))
        });
        if let Some((layer, ratio)) = bad_ratio {
            rules.check(false, &["layers"], || {
                format!(
                    "layer {layer} compresses {ratio} tokens into one row, expected 1 to \
                     {MAX_INDEX}"
                )
            });
        }
    }

    fn relations(&self, rules: &mut Rules) {
        let (heads, groups) = (self.num_attention_heads, self.o_groups);
        rules.check(
            groups == 0 || heads.is_multiple_of(groups),
            &["num_attention_heads", "o_groups"],
            || format!("num_attention_heads {heads} is not divisible by o_groups {groups}"),
        );

        let (rope, head) = (self.rope_head_dim, self.head_dim);
        rules.check(rope.is_multiple_of(2), &["rope_head_dim"], || {
            format!("rope_head_dim (qk_rope_head_dim) is {rope}, channels are rotated in pairs")
        });
        rules.check(rope <= head, &["rope_head_dim", "head_dim"], || {
            format!("rope_head_dim (qk_rope_head_dim) {rope} is larger than head_dim {head}")
        });
        let indexed = |kind: &AttentionKind| match kind {
            AttentionKind::CompressedSparse { .. } | AttentionKind::Shared(_) => true,
            AttentionKind::Window | AttentionKind::HeavilyCompressed { .. } => false,
        };
        let indexed = self.layers.iter().any(indexed);
        let index_head = self.index_head_dim;
        rules.check(
            !indexed || rope <= index_head,
            &["rope_head_dim", "index_head_dim", "layers"],
            || {
                format!(
                    "rope_head_dim (qk_rope_head_dim) {rope} is larger than index_head_dim \
                     {index_head}"
                )
            },
        );

        let (picked, experts) = (self.num_experts_per_tok, self.n_routed_experts);
        rules.check(
            picked <= experts,
            &["num_experts_per_tok", "n_routed_experts"],
            || format!("num_experts_per_tok {picked} is larger than n_routed_experts {experts}"),
        );

        let (hashed, layers) = (self.num_hash_layers, self.layers.len());
        rules.check(hashed <= layers, &["num_hash_layers", "layers"], || {
            format!("num_hash_layers {hashed} is larger than the number of layers {layers}")
        });
        let mtp = self.num_mtp_layers;
        rules.check(mtp <= 1, &["num_mtp_layers"], || {
            format!(
                "num_mtp_layers (num_nextn_predict_layers) is {mtp}, at most one \
                 multi-token-prediction layer is supported"
            )
        });

        for (fields, id) in [
            (&["bos_token_id", "vocab_size"], self.bos_token_id),
            (&["eos_token_id", "vocab_size"], self.eos_token_id),
        ] {
            let vocab = self.vocab_size;
            rules.check((id as usize) < vocab, fields, || {
                format!("{} {id} is not below vocab_size {vocab}", fields[0])
            });
        }
    }

    fn drafter(&self, dspark: &DsparkParams, rules: &mut Rules) {
        let field = &["dspark"];
        for (name, value, max) in [
            ("dspark_block_size", dspark.block_size, MAX_DRAFTS),
            ("dspark_markov_rank", dspark.markov_rank, MAX_WIDTH),
            (
                "layers of the DSpark drafter",
                dspark.layers,
                MAX_DRAFTER_LAYERS,
            ),
        ] {
            rules.check((1..=max).contains(&value), field, || {
                format!("{name} is {value}, expected 1 to {max}")
            });
        }
        let targets = &dspark.target_layers;
        let ascending = targets.is_sorted_by(|a, b| a < b) && !targets.is_empty();
        let layers = self.layers.len();
        let known = targets.last().is_none_or(|last| *last < layers);
        rules.check(ascending && known, &["dspark", "layers"], || {
            format!(
                "dspark_target_layer_ids is {targets:?}, expected ascending numbers of the \
                 {layers} layers"
            )
        });
        let (noise, vocab) = (dspark.noise_token_id, self.vocab_size);
        rules.check((noise as usize) < vocab, &["dspark", "vocab_size"], || {
            format!("dspark_noise_token_id {noise} is not below vocab_size {vocab}")
        });
        if let Some([experts, picked]) = dspark.experts {
            let fits = (1..=experts).contains(&picked) && experts <= MAX_COUNT;
            rules.check(fits, field, || {
                format!(
                    "dspark_num_experts_per_tok is {picked} of dspark_n_routed_experts {experts}"
                )
            });
        }
        let mtp = self.num_mtp_layers;
        rules.check(mtp == 0, &["dspark", "num_mtp_layers"], || {
            format!("num_mtp_layers is {mtp}, expected 0 beside the DSpark drafter")
        });
        rules.product(
            &["vocab_size", "dspark"],
            &[self.vocab_size, dspark.markov_rank],
        );
        rules.product(
            &["hidden_size", "dspark"],
            &[self.hidden_size, targets.len(), self.hidden_size],
        );
    }

    fn constants(&self, rules: &mut Rules) {
        let positive = |value: f64| value > 0.0;
        let small = |value: f64| value > 0.0 && value < 1.0;
        rules.real(
            &["routed_scaling_factor"],
            self.routed_scaling_factor,
            "a positive number",
            positive,
        );
        if let Some(limit) = self.swiglu_limit {
            rules.real(&["swiglu_limit"], limit, "a positive number", positive);
        }
        rules.real(&["hc_eps"], self.hc_eps, "a number between 0 and 1", small);
        rules.real(
            &["rms_norm_eps"],
            self.rms_norm_eps,
            "a number between 0 and 1",
            small,
        );
        for (field, theta) in [
            (&["rope_theta"], self.rope_theta),
            (&["compress_rope_theta"], self.compress_rope_theta),
        ] {
            rules.real(field, theta, "a number above 1", |theta| theta > 1.0);
        }
        if let Some(yarn) = &self.yarn {
            rules.real(&["yarn.factor"], yarn.factor, "at least 1", |factor| {
                factor >= 1.0
            });
            rules.size(
                &["yarn.original_max_position_embeddings"],
                yarn.original_max_position_embeddings,
                MAX_INDEX,
            );
            rules.real(
                &["yarn.beta_slow"],
                yarn.beta_slow,
                "a positive number",
                positive,
            );
            let (fast, slow) = (yarn.beta_fast, yarn.beta_slow);
            rules.check(
                fast.is_finite() && fast > slow,
                &["yarn.beta_fast", "yarn.beta_slow"],
                || format!("yarn.beta_fast {fast} is not above yarn.beta_slow {slow}"),
            );
        }
    }

    fn products(&self, rules: &mut Rules) {
        let (hidden, streams) = (self.hidden_size, self.hc_mult);
        rules.product(&["vocab_size", "hidden_size"], &[self.vocab_size, hidden]);
        rules.product(
            &["vocab_size", "num_experts_per_tok"],
            &[self.vocab_size, self.num_experts_per_tok],
        );
        rules.product(
            &["num_attention_heads", "head_dim", "q_lora_rank"],
            &[self.num_attention_heads, self.head_dim, self.q_lora_rank],
        );
        rules.product(
            &["num_attention_heads", "head_dim", "o_lora_rank"],
            &[self.num_attention_heads, self.head_dim, self.o_lora_rank],
        );
        rules.product(
            &["o_groups", "o_lora_rank", "hidden_size"],
            &[self.o_groups, self.o_lora_rank, hidden],
        );
        rules.product(
            &["index_n_heads", "index_head_dim", "q_lora_rank"],
            &[self.index_n_heads, self.index_head_dim, self.q_lora_rank],
        );
        rules.product(
            &["n_routed_experts", "moe_intermediate_size", "hidden_size"],
            &[self.n_routed_experts, 2, self.moe_intermediate_size, hidden],
        );
        rules.product(
            &["n_shared_experts", "moe_intermediate_size", "hidden_size"],
            &[self.n_shared_experts, 2, self.moe_intermediate_size, hidden],
        );
        rules.product(
            &["hc_mult", "hidden_size"],
            &[streams.saturating_add(2), streams, streams, hidden],
        );
        let ratio = self.layers.iter().filter_map(|kind| kind.ratio()).max();
        rules.product(
            &["layers", "head_dim"],
            &[
                2,
                ratio.unwrap_or(0),
                self.head_dim.max(self.index_head_dim),
            ],
        );
    }
}
