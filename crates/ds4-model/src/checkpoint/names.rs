//! Tensor names that are not the model's.

/// What names of the tensors of what drafts begin with.
pub(super) const DRAFTER: &str = "mtp.";

/// Copies of the trunk's embedding and head that some converted checkpoints carry.
const KNOWN_COPIES: [&str; 2] = ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"];

/// Routing biases of images, which this model does not take.
const IMAGE_BIAS: &str = ".ffn.gate.bias_vl";
/// Tensors that only the DSpark drafter has.
const DSPARK: [&str; 4] = ["main_proj", "main_norm", "markov_head", "confidence_head"];

/// Whether a tensor is left out without a word.
pub(super) fn is_ignored(name: &str) -> bool {
    KNOWN_COPIES.contains(&name) || name.ends_with(IMAGE_BIAS)
}

/// Whether only a DSpark drafter has a tensor of this name, or a second layer that drafts.
pub(super) fn is_dspark(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(DRAFTER) else {
        return false;
    };
    let mut parts = rest.split('.');
    parts.next() != Some("0") || parts.any(|part| DSPARK.contains(&part))
}

/// The name of a tensor in a released checkpoint, for one that older conversions call otherwise.
pub(super) fn released(name: &str) -> Option<String> {
    let (layer, rest) = name.strip_prefix(DRAFTER)?.split_once('.')?;
    let released = match rest {
        "markov_head.embed.weight" => "markov_head.markov_w1.weight",
        "markov_head.head.weight" => "markov_head.markov_w2.weight",
        _ => return None,
    };
    Some(format!("mtp.{layer}.{released}"))
}
