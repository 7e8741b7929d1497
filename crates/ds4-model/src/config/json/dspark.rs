//! The keys of the DSpark drafter.

use super::keys::{ID, Keys, SIZE, SIZES};
use crate::config::shape::{DsparkParams, ModelConfig};

const PREFIX: &str = "dspark_";
const BLOCK_SIZE: &str = "dspark_block_size";
const TARGET_LAYERS: &str = "dspark_target_layer_ids";
const NOISE_TOKEN: &str = "dspark_noise_token_id";
const MARKOV_RANK: &str = "dspark_markov_rank";
const EXPERTS: &str = "dspark_n_routed_experts";
const EXPERTS_PER_TOKEN: &str = "dspark_num_experts_per_tok";

/// Reads the drafter, if there is one. `num_nextn_predict_layers` says nothing of it then, but for
/// V4.1: released files have 1 for three layers. Returns whether its layers are told, if there is
/// one.
pub(super) fn read(keys: &mut Keys, config: &mut ModelConfig, is_v41: bool) -> bool {
    let mut known = vec![BLOCK_SIZE, TARGET_LAYERS, NOISE_TOKEN, MARKOV_RANK];
    if is_v41 {
        known.extend([EXPERTS, EXPERTS_PER_TOKEN]);
    }
    let unknown = keys.names_with(PREFIX);
    if unknown.is_empty() {
        return true;
    }
    for key in unknown.iter().filter(|key| !known.contains(&key.as_str())) {
        keys.contradiction(
            "dspark",
            format!("{key} is not a key of a supported drafter"),
        );
    }
    let block_size = keys.required("dspark", &[BLOCK_SIZE], SIZE);
    let target_layers = keys.required("dspark", &[TARGET_LAYERS], SIZES);
    let noise_token_id = keys.required("dspark", &[NOISE_TOKEN], ID);
    let markov_rank = keys.required("dspark", &[MARKOV_RANK], SIZE);
    let layers = match is_v41 {
        true => keys.optional("dspark", &["num_nextn_predict_layers"], SIZE),
        false => layers(keys),
    };
    let mut number = |key| {
        is_v41
            .then(|| keys.required("dspark", &[key], SIZE))
            .flatten()
    };
    let experts = number(EXPERTS).zip(number(EXPERTS_PER_TOKEN));
    config.num_mtp_layers = 0;
    config.dspark = Some(DsparkParams {
        block_size: block_size.unwrap_or(1),
        target_layers: target_layers.unwrap_or_default(),
        noise_token_id: noise_token_id.unwrap_or(0),
        markov_rank: markov_rank.unwrap_or(1),
        layers: layers.unwrap_or(1),
        taps_inputs: is_v41,
        experts: experts.map(<[usize; 2]>::from),
    });
    layers.is_some()
}

/// `n_mtp_layers`, or the entries of `compress_ratios` that are not the trunk's.
fn layers(keys: &mut Keys) -> Option<usize> {
    let stated = keys.optional("dspark", &["n_mtp_layers"], SIZE);
    let trunk = keys.peek("num_hidden_layers", SIZE);
    let entries = keys
        .peek("compress_ratios", SIZES)
        .map(|ratios| ratios.len());
    let more = entries
        .zip(trunk)
        .map(|(entries, trunk)| entries.saturating_sub(trunk));
    stated.or(more.filter(|more| *more > 0))
}
