//! Tensor names that are not the model's, and those that stand for one of the model's.

use std::fmt;

/// What names of the tensors of what drafts begin with.
pub(super) const DRAFTER: &str = "mtp.";

/// Copies of the trunk's embedding and head that some converted checkpoints carry.
const KNOWN_COPIES: [&str; 2] = ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"];

/// Routing biases of images, which this model does not take.
const IMAGE_BIAS: &str = ".ffn.gate.bias_vl";
/// The biases of a router, and the table that is in their place where token ids choose experts.
pub(super) const BIAS: &str = ".ffn.gate.bias";
pub(super) const TABLE: &str = ".ffn.gate.tid2eid";
/// What names of the tables of engrams end with, before weights and scales.
pub(super) const ENGRAM_TABLE: &str = ".engram.embed";
/// What names of the tensors that see images begin with.
const IMAGES: [&str; 6] = [
    "vision.",
    "aligner.",
    "image_start",
    "image_end",
    "image_newline",
    "image_pad",
];
/// The scale of a whole NVFP4 tensor, as a factor and as a divisor.
pub(super) const FACTOR: &str = ".weight_scale_2";
pub(super) const DIVISOR: &str = ".weight_global_scale";
/// Tensors that only the DSpark drafter has.
const DSPARK: [&str; 4] = ["main_proj", "main_norm", "markov_head", "confidence_head"];

/// Why a tensor of this name is left out, whatever else there is.
pub(super) fn skipped(name: &str) -> Option<&'static str> {
    let is_of_images = name.ends_with(IMAGE_BIAS) || IMAGES.iter().any(|of| name.starts_with(of));
    match name.rsplit('.').next().unwrap_or_default() {
        _ if KNOWN_COPIES.contains(&name) => Some("copies"),
        _ if is_of_images => Some("images"),
        // Activations and caches are exact here.
        "input_scale" | "input_global_scale" | "output_scale" | "q_scale" | "k_scale"
        | "v_scale" | "kv_scale" => Some("scales of activations"),
        _ => None,
    }
}

/// Whether only a DSpark drafter has a tensor of this name, or a second layer that drafts.
pub(super) fn is_dspark(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(DRAFTER) else {
        return false;
    };
    let mut parts = rest.split('.');
    parts.next() != Some("0") || parts.any(|part| DSPARK.contains(&part))
}

/// Whose names the tensors of a checkpoint have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dialect {
    /// Those of the released checkpoints.
    #[default]
    Released,
    /// Those of the released checkpoints with `model.` in front.
    Prefixed,
    /// Those of the modules of Hugging Face `transformers`.
    Transformers,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Released => "of the release",
            Self::Prefixed => "of the release, with a prefix",
            Self::Transformers => "of transformers",
        })
    }
}

/// Parts of names that only `transformers` has.
const TRANSFORMERS: [&str; 3] = ["embed_tokens", "self_attn", "mlp"];

/// What stands in front of all names, longest first.
const PREFIXES: [&str; 4] = [
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
];

/// A name of `transformers`, or of an older conversion, and the released one.
type Renamed = (&'static str, &'static str);

/// Beginnings of names outside layers.
const TRUNK: [Renamed; 4] = [
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    ("stages.", DRAFTER),
];
/// What holds layers.
const LAYERS: [&str; 2] = ["layers.", DRAFTER];
/// Beginnings of names in a layer. The first that fits counts.
#[rustfmt::skip]
const LAYER: [Renamed; 29] = [
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.q_a_proj.", "attn.wq_a."),
    ("self_attn.q_a_norm.", "attn.q_norm."),
    ("self_attn.q_b_proj.", "attn.wq_b."),
    ("self_attn.kv_proj.", "attn.wkv."),
    ("self_attn.kv_norm.", "attn.kv_norm."),
    ("self_attn.o_a_proj.", "attn.wo_a."),
    ("self_attn.o_b_proj.", "attn.wo_b."),
    ("self_attn.compressor.kv_proj.", "attn.compressor.wkv."),
    ("self_attn.compressor.gate_proj.", "attn.compressor.wgate."),
    ("self_attn.compressor.position_bias", "attn.compressor.ape"),
    ("self_attn.compressor.kv_norm.", "attn.compressor.norm."),
    ("self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.compressor.indexer.scorer.weights_proj.", "attn.indexer.weights_proj."),
    ("self_attn.compressor.indexer.weights_proj.", "attn.indexer.weights_proj."),
    ("self_attn.compressor.indexer.kv_proj.", "attn.indexer.compressor.wkv."),
    ("self_attn.compressor.indexer.gate_proj.", "attn.indexer.compressor.wgate."),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"),
    ("self_attn.compressor.indexer.kv_norm.", "attn.indexer.compressor.norm."),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.gate.", "ffn.gate."),
    ("mlp.experts.", "ffn.experts."),
    ("mlp.shared_experts.", "ffn.shared_experts."),
    ("markov_head.embed.weight", "markov_head.markov_w1.weight"),
    ("markov_head.head.weight", "markov_head.markov_w2.weight"),
];
/// Parts of an expert.
const EXPERT: [Renamed; 3] = [
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
];
/// Ends of names.
const ENDS: [Renamed; 3] = [
    (SCALE_INV, ".scale"),
    (".weight_scale", ".scale"),
    (".weight_packed", ".weight"),
];
const SCALE_INV: &str = ".weight_scale_inv";

/// A tensor of `transformers` that has the weights of all experts of a layer, and its parts.
pub(super) struct Stack {
    /// How its name ends.
    pub(super) end: &'static str,
    /// The parts of each expert, one below the other.
    pub(super) parts: &'static [&'static str],
    /// What a name ends with behind the part.
    pub(super) of: &'static str,
}

/// All such tensors.
#[rustfmt::skip]
pub(super) const STACKS: [Stack; 4] = [
    Stack { end: ".ffn.experts.gate_up_proj", parts: &["w1", "w3"], of: "weight" },
    Stack { end: ".ffn.experts.down_proj", parts: &["w2"], of: "weight" },
    Stack { end: ".ffn.experts.gate_up_proj_scale_inv", parts: &["w1", "w3"], of: "scale" },
    Stack { end: ".ffn.experts.down_proj_scale_inv", parts: &["w2"], of: "scale" },
];

/// The name among the modules of `transformers` of a tensor with a released one. It has none of
/// what drafts.
pub(super) fn transformers(name: &str) -> String {
    if name.starts_with(DRAFTER) {
        return name.to_owned();
    }
    let named = |name: &str, table: &[Renamed]| {
        let mut fitting = table.iter();
        let other = fitting.find_map(|(other, own)| Some((*other, name.strip_prefix(own)?)));
        other.map_or(name.to_owned(), |(other, rest)| format!("{other}{rest}"))
    };
    let Some((layer, rest)) = layer(name) else {
        let prefix = ["model.", ""][usize::from(name.starts_with("head."))];
        return format!("{prefix}{}", named(name, &TRUNK));
    };
    let mut rest = match rest.strip_suffix(".scale") {
        Some(start) => format!("{start}{SCALE_INV}"),
        None => rest.to_owned(),
    };
    if rest.starts_with("ffn.") {
        for (other, released) in EXPERT {
            rest = rest.replace(released, other);
        }
    }
    format!("model.{layer}{}", named(&rest, &LAYER))
}

/// The name of the tensor of all experts of a layer that has this part of one, and its place there:
/// the expert, and the part of it.
pub(super) fn stack_of(name: &str) -> Option<(String, [usize; 2])> {
    let (layer, rest) = name.split_once(".ffn.experts.")?;
    let [expert, part, of] = rest.split('.').collect::<Vec<_>>()[..] else {
        return None;
    };
    let mut stacks = STACKS.iter().filter(|stack| stack.of == of);
    let (stack, index) = stacks.find_map(|stack| {
        let index = stack.parts.iter().position(|own| *own == part)?;
        Some((stack, index))
    })?;
    // No two names are one place.
    let number = expert.parse().ok();
    let number = number.filter(|number: &usize| number.to_string() == expert)?;
    Some((format!("{layer}{}", stack.end), [number, index]))
}

/// The name of a tensor in a released checkpoint and whose name it has, for one that others call
/// otherwise.
pub(super) fn released(name: &str) -> Option<(String, Dialect)> {
    let prefix = PREFIXES.iter().find(|prefix| name.starts_with(**prefix));
    let bare = &name[prefix.map_or(0, |prefix| prefix.len())..];
    let trunk = begun(bare, &TRUNK).unwrap_or(bare.to_owned());
    let renamed = match layer(&trunk) {
        Some((layer, rest)) => format!("{layer}{}", in_layer(rest)),
        None => trunk,
    };
    let mut parts = bare.split('.');
    let dialect = match (parts.any(|part| TRANSFORMERS.contains(&part)), prefix) {
        (true, _) => Dialect::Transformers,
        (false, Some(_)) => Dialect::Prefixed,
        (false, None) => Dialect::Released,
    };
    (renamed != name).then_some((renamed, dialect))
}

/// `layers.3.` and what follows.
fn layer(name: &str) -> Option<(&str, &str)> {
    let holder = LAYERS.iter().find(|holder| name.starts_with(**holder))?;
    let (number, _) = name[holder.len()..].split_once('.')?;
    name.split_at_checked(holder.len() + number.len() + 1)
}

fn in_layer(name: &str) -> String {
    let mut renamed = begun(name, &LAYER).unwrap_or(name.to_owned());
    if renamed.starts_with("ffn.") {
        for (other, released) in EXPERT {
            renamed = renamed.replace(other, released);
        }
    }
    for (other, released) in ENDS {
        if let Some(start) = renamed.strip_suffix(other) {
            renamed = format!("{start}{released}");
        }
    }
    renamed
}

/// The name with its beginning replaced by that of the first entry that fits.
fn begun(name: &str, table: &[Renamed]) -> Option<String> {
    let mut fitting = table.iter();
    fitting.find_map(|(other, released)| Some(format!("{released}{}", name.strip_prefix(other)?)))
}
