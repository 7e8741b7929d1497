//! How several devices share a model.

use std::ops::Range;

use burn_ds4_ops::quant::{FP4_BLOCK, FP8_BLOCK};

use super::error::PlacementError;
use crate::config::ModelConfig;

/// How several devices share a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Parallel {
    /// Each has some of the layers: one text takes as long as on one device.
    #[default]
    Layers,
    /// Each has a part of every layer: one text takes less.
    Tensor,
    /// Parts, if the devices can write to each other's memory, each can have an equal part, and no
    /// split is named; whole layers otherwise.
    Auto,
}

/// Ends of the names of weights of which each device has a part, besides the output matrix. The
/// rest of a layer is on every device.
const DIVIDED: [&str; 5] = [
    "attn.wq_b",
    "attn.wo_a",
    "attn.wo_b",
    ".experts",
    ".shared_experts",
];

/// Whether devices have parts of the weights with this prefix.
pub(crate) fn is_divided(prefix: &str) -> bool {
    DIVIDED.iter().any(|end| prefix.ends_with(end))
}

/// Checks that each of so many devices can have an equal part of every layer.
///
/// # Errors
///
/// For the first size that cannot be divided.
pub fn check(config: &ModelConfig, devices: usize) -> Result<(), PlacementError> {
    let groups = config.o_groups * config.o_lora_rank;
    let inner = config.moe_intermediate_size;
    let shared = inner * config.n_shared_experts;
    let heads = config.num_attention_heads * config.head_dim;
    // Blocks of weights with one scale must not be shared, unless there is but one.
    let block = |size: usize, block: usize| if size <= block { 8 } else { block };
    let sizes = [
        ("num_attention_heads", config.num_attention_heads, 1),
        ("o_groups", config.o_groups, 1),
        ("vocab_size", config.vocab_size, 1),
        ("the width of all heads", heads, block(heads, FP8_BLOCK)),
        ("o_groups · o_lora_rank", groups, block(groups, FP8_BLOCK)),
        ("moe_intermediate_size", inner, block(inner, FP4_BLOCK)),
        (
            "the shared experts' width",
            shared,
            block(shared, FP8_BLOCK),
        ),
    ];
    let wrong = sizes.into_iter().find(|(_, size, multiple)| {
        let is_whole = size.is_multiple_of(devices);
        !is_whole || !(size / devices).is_multiple_of(*multiple)
    });
    match wrong {
        None => Ok(()),
        Some((what, size, multiple)) => Err(PlacementError::Indivisible {
            what,
            size,
            devices,
            multiple,
        }),
    }
}

/// Checks that devices can begin with these layers, each of which is whole or not.
pub(crate) fn check_shared(
    config: &ModelConfig,
    mut begins: impl Iterator<Item = usize>,
    is_whole: bool,
) -> Result<(), PlacementError> {
    match begins.all(|layer| config.may_begin(layer)) && (is_whole || !config.keeps_layers_whole())
    {
        true => Ok(()),
        false => Err(shared_rows(config)),
    }
}

/// The error of layers that share rows.
pub(super) fn shared_rows(config: &ModelConfig) -> PlacementError {
    let begins = (0..config.layers.len()).filter(|layer| config.may_begin(*layer));
    PlacementError::SharedRows {
        begins: begins.collect(),
    }
}

/// One of equal parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Share {
    pub(crate) fn of(self, size: usize) -> Range<usize> {
        let part = size / self.ranks;
        self.rank * part..(self.rank + 1) * part
    }
}

/// Bytes that a device has of `all`, of which devices share `divided`.
pub(super) fn share_of_bytes(all: usize, divided: usize, devices: usize) -> usize {
    (all - divided).saturating_add(divided.div_ceil(devices))
}
