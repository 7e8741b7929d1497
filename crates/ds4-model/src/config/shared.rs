//! What must hold for what V4.1 has and V4 has not.

use burn_ds4_ops::quant::Activations;

use super::shape::{AttentionKind, CacheFormat, EngramParams, ModelConfig, SharedRows};
use super::validate::{MAX_COUNT, MAX_INDEX, MAX_WIDTH, Rules};

/// Columns of a row of a table with one scale.
const TABLE_BLOCK: usize = 32;
/// Finding primes takes their square roots.
const MAX_PRIME: usize = 1 << 30;
const MAX_PRIMES: usize = 4096;

impl ModelConfig {
    /// What the layer has or reads of rows that several share.
    pub(crate) fn shared(&self, layer: usize) -> Option<SharedRows> {
        match self.layers.get(layer) {
            Some(AttentionKind::Shared(shared)) => Some(*shared),
            _ => None,
        }
    }

    /// Whether some layers read compressed rows of others.
    pub fn shares_rows(&self) -> bool {
        let mut layers = self.layers.iter();
        layers.any(|kind| matches!(kind, AttentionKind::Shared(_)))
    }

    /// Whether each layer is on one device as a whole: devices do not have parts of those of V4.1
    /// yet.
    pub fn keeps_layers_whole(&self) -> bool {
        let taps_inputs = self.dspark.as_ref().is_some_and(|own| own.taps_inputs);
        self.late_pre_mix || self.shares_rows() || self.engram.is_some() || taps_inputs
    }

    /// Whether a device can begin with this layer: it and those after it share no rows and no picks
    /// with layers before it.
    pub fn may_begin(&self, layer: usize) -> bool {
        let own = |later| self.shared(later);
        let mut shared = (layer..self.layers.len()).filter_map(own);
        shared.all(|own| own.rows_of >= layer && own.picks_of >= layer)
    }

    /// Whether a part is as in DeepSeek-V4.1, and in no V4.
    pub fn has_v41_parts(&self) -> bool {
        self.keeps_layers_whole()
            || !self.query_norm
            || self.cache_format == CacheFormat::Whole
            || self.weight_block == 32
    }

    /// What packed products do to their inputs, in the blocks of the model.
    pub(crate) fn in_blocks(&self, activations: Activations) -> Activations {
        match activations {
            Activations::Released if self.weight_block == 32 => Activations::Released32,
            activations => activations,
        }
    }

    pub(super) fn sharing(&self, rules: &mut Rules) {
        let field = &["layers"];
        for (layer, kind) in self.layers.iter().enumerate() {
            let AttentionKind::Shared(own) = *kind else {
                continue;
            };
            rules.check(own.layer == layer, field, || {
                format!("layer {layer} names itself {}", own.layer)
            });
            let maker = self.shared(own.rows_of).filter(|_| own.rows_of <= layer);
            rules.check(maker.is_some_and(SharedRows::makes_rows), field, || {
                let source = own.rows_of;
                format!(
                    "layer {layer} reads rows of layer {source} (kv_source_layer_ids), which makes \
                     none"
                )
            });
            let (ratio, of) = (own.ratio, maker.map_or(own.ratio, |maker| maker.ratio));
            rules.check(ratio == of, field, || {
                let source = own.rows_of;
                format!(
                    "compress_ratios[{layer}] is {ratio}, but {of} in layer {source}, whose rows \
                     it reads"
                )
            });
            let picker = self.shared(own.picks_of).filter(|_| own.picks_of <= layer);
            rules.check(picker.is_some_and(SharedRows::picks), field, || {
                let source = own.picks_of;
                format!(
                    "layer {layer} takes picks of layer {source} (index_source_layer_ids), which \
                     has none"
                )
            });
            rules.check(picker.is_none_or(|of| of.rows_of == own.rows_of), field, || {
                format!(
                    "layer {layer} takes picks of layer {} (index_source_layer_ids) among rows of \
                     another than layer {} (kv_source_layer_ids)",
                    own.picks_of, own.rows_of
                )
            });
        }
        let mtp = self.num_mtp_layers;
        let fields = &["late_pre_mix", "num_mtp_layers"];
        rules.check(!self.late_pre_mix || mtp == 0, fields, || {
            format!("num_mtp_layers is {mtp}, expected 0 beside late_pre_mix")
        });
        let block = self.weight_block;
        rules.check([32, 128].contains(&block), &["weight_block"], || {
            format!("weight_block is {block}, expected 32 or 128")
        });
    }

    pub(super) fn candidate_blocks(&self, rules: &mut Rules) {
        let Some(candidates) = self.candidates else {
            return;
        };
        let layer = candidates.layer;
        let source = self.shared(layer).filter(|shared| shared.picks());
        rules.check(source.is_some(), &["candidates", "layers"], || {
            format!(
                "candidate_source_layer_id is {layer}, which is not among index_source_layer_ids"
            )
        });
        let others = self.layers.iter().skip(layer);
        let differs = others.clone().find_map(|kind| match kind {
            AttentionKind::Shared(own) if source.is_some_and(|of| of.rows_of != own.rows_of) => {
                Some(own.layer)
            }
            _ => None,
        });
        rules.check(differs.is_none(), &["candidates", "layers"], || {
            let other = differs.unwrap_or_default();
            format!(
                "candidate_source_layer_id is {layer}, but layer {other} reads rows of another \
                 layer (kv_source_layer_ids)"
            )
        });
        let (blocks, size) = (candidates.blocks, candidates.block_size);
        for (name, value) in [
            ("candidate_topk_blocks", blocks),
            ("candidate_block_size", size),
        ] {
            rules.check((1..=MAX_COUNT).contains(&value), &["candidates"], || {
                format!("{name} is {value}, expected 1 to {MAX_COUNT}")
            });
        }
        // The last block may have one row: there are as many candidates as picks all the same.
        let sure = blocks
            .saturating_sub(1)
            .saturating_mul(size)
            .saturating_add(1);
        rules.check(
            sure >= self.index_topk,
            &["candidates", "index_topk"],
            || {
                format!(
                    "candidate_topk_blocks {blocks} of candidate_block_size {size} are too few for \
                 index_topk {}",
                    self.index_topk
                )
            },
        );
        let most = burn_ds4_ops::topk::MAX_K;
        rules.check(blocks <= most, &["candidates"], || {
            format!("candidate_topk_blocks is {blocks}, expected at most {most}")
        });
    }

    pub(super) fn engrams(&self, engram: &EngramParams, rules: &mut Rules) {
        let field = &["engram"];
        let (layers, count) = (&engram.layers, self.layers.len());
        let ascending = layers.is_sorted_by(|a, b| a < b) && !layers.is_empty();
        let known = layers.last().is_none_or(|last| *last < count);
        rules.check(ascending && known, &["engram", "layers"], || {
            format!(
                "engram_layer_ids is {layers:?}, expected ascending numbers of the {count} layers"
            )
        });
        for (name, value, range) in [
            ("engram_max_ngram_size", engram.max_ngram, 2..=64),
            ("engram_n_heads", engram.heads, 1..=1 << 10),
            ("engram_head_dim", engram.head_dim, 1..=MAX_WIDTH),
            ("engram_vocab_size", engram.vocab_size, 1..=MAX_PRIME),
            (
                "engram_compressed_vocab_size",
                engram.compressed_vocab_size,
                1..=MAX_WIDTH,
            ),
        ] {
            rules.check(range.contains(&value), field, || {
                let (least, most) = (range.start(), range.end());
                format!("{name} is {value}, expected {least} to {most}")
            });
        }
        let width = engram.head_dim;
        rules.check(width.is_multiple_of(TABLE_BLOCK), field, || {
            format!("engram_head_dim is {width}, expected a multiple of {TABLE_BLOCK}")
        });
        let (pad, vocab) = (engram.pad_token_id, self.vocab_size);
        rules.check((pad as usize) < vocab, &["engram", "vocab_size"], || {
            format!("engram_pad_token_id {pad} is not below vocab_size {vocab}")
        });
        let primes = layers
            .len()
            .saturating_mul(engram.max_ngram)
            .saturating_mul(engram.heads);
        rules.check(primes <= MAX_PRIMES, field, || {
            format!(
                "engram_layer_ids, engram_max_ngram_size and engram_n_heads need {primes} primes"
            )
        });
        if !rules.is_kept(field) {
            return;
        }
        let rows: Vec<u64> = engram.rows.iter().map(|rows| *rows as u64).collect();
        let expected = engram.table_rows();
        rules.check(rows == expected, field, || {
            format!("engram_num_embeddings is {rows:?}, but the primes add up to {expected:?}")
        });
        let streams = [self.hc_mult.saturating_add(1), self.hidden_size];
        let inputs = [engram.columns(), engram.head_dim];
        rules.product(
            &["engram", "hc_mult", "hidden_size"],
            &[streams, inputs].concat(),
        );
        let most = rows.iter().max().copied().unwrap_or(0);
        rules.check(most <= MAX_INDEX as u64, field, || {
            format!("engram_num_embeddings is {rows:?}, expected at most {MAX_INDEX}")
        });
    }
}

impl EngramParams {
    /// The rows that each table has: the sum of its primes.
    pub(crate) fn table_rows(&self) -> Vec<u64> {
        let mut primes = self.primes();
        let tables = self.layers.iter();
        let tables = tables.map(|_| primes.by_ref().take(self.columns()).sum());
        tables.collect()
    }

    /// What hashes are taken modulo, by layer, n-gram size and head: ascending, none twice.
    pub(crate) fn primes(&self) -> impl Iterator<Item = u64> + use<> {
        let is_prime = |number: &u64| {
            let mut divisors = (2..).take_while(|divisor| divisor * divisor <= *number);
            *number > 1 && divisors.all(|divisor: u64| !number.is_multiple_of(divisor))
        };
        (self.vocab_size as u64..).filter(is_prime)
    }
}
