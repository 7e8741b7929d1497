//! Tensor names that are not the model's.

/// Copies of the trunk's embedding and head that some converted checkpoints carry.
const KNOWN_COPIES: [&str; 2] = ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"];

pub(super) fn is_known_copy(name: &str) -> bool {
    KNOWN_COPIES.contains(&name)
}

/// Tensors that only the DSpark drafter has: it puts three stages and its heads under `mtp`.
pub(super) fn is_dspark(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("mtp.") else {
        return false;
    };
    let mut parts = rest.split('.');
    parts.next() != Some("0")
        || parts.any(|part| {
            ["main_proj", "main_norm", "markov_head", "confidence_head"].contains(&part)
        })
}
