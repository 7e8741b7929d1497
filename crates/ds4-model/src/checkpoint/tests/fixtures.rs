//! The fixtures hold exactly the tensors of the released layout.

use std::collections::BTreeMap;

use burn::tensor::{DType, TensorData};

use crate::checkpoint::{Checkpoint, HostExperts, HostLinear, Loader};
use crate::config::{AttentionKind, ModelConfig};

use super::repository;

/// A host weight of any kind.
#[derive(Debug, PartialEq)]
pub(super) enum Weight {
    Dense(TensorData),
    Ids(Vec<i32>),
    Linear(HostLinear),
    Experts(HostExperts),
}

/// Walks the tensor list of a whole model.
struct Walk<'a, 'b> {
    loader: &'a mut Loader<'b>,
    config: &'b ModelConfig,
    weights: BTreeMap<String, Weight>,
}

impl Walk<'_, '_> {
    fn put(&mut self, name: String, weight: Option<Weight>) {
        if let Some(weight) = weight {
            self.weights.insert(name, weight);
        }
    }

    fn dense(&mut self, name: String, shape: &[usize]) {
        let weight = self.loader.dense(&name, shape).map(Weight::Dense);
        self.put(name, weight);
    }

    fn linear(&mut self, name: String, out: usize, inp: usize) {
        let weight = self.loader.linear(&name, out, inp).map(Weight::Linear);
        self.put(name, weight);
    }

    fn compressor(&mut self, prefix: &str, ratio: usize, width: usize, head: usize) {
        let hidden = self.config.hidden_size;
        self.linear(format!("{prefix}.wkv"), width, hidden);
        self.linear(format!("{prefix}.wgate"), width, hidden);
        self.dense(format!("{prefix}.ape"), &[ratio, width]);
        self.dense(format!("{prefix}.norm.weight"), &[head]);
    }

    fn attention(&mut self, prefix: &str, kind: AttentionKind) {
        let c = self.config;
        let (hidden, head) = (c.hidden_size, c.head_dim);
        let heads = c.num_attention_heads * head;
        self.linear(format!("{prefix}.wq_a"), c.q_lora_rank, hidden);
        self.dense(format!("{prefix}.q_norm.weight"), &[c.q_lora_rank]);
        self.linear(format!("{prefix}.wq_b"), heads, c.q_lora_rank);
        self.linear(format!("{prefix}.wkv"), head, hidden);
        self.dense(format!("{prefix}.kv_norm.weight"), &[head]);
        self.dense(format!("{prefix}.attn_sink"), &[c.num_attention_heads]);
        self.linear(
            format!("{prefix}.wo_a"),
            c.o_groups * c.o_lora_rank,
            heads / c.o_groups,
        );
        self.linear(format!("{prefix}.wo_b"), hidden, c.o_groups * c.o_lora_rank);
        match kind {
            AttentionKind::Window => {}
            AttentionKind::Shared(_) => unreachable!("no fixture has shared rows"),
            AttentionKind::HeavilyCompressed { ratio } => {
                self.compressor(&format!("{prefix}.compressor"), ratio, head, head);
            }
            AttentionKind::CompressedSparse { ratio } => {
                self.compressor(&format!("{prefix}.compressor"), ratio, 2 * head, head);
                let index = c.index_head_dim;
                let prefix = format!("{prefix}.indexer");
                self.linear(
                    format!("{prefix}.wq_b"),
                    c.index_n_heads * index,
                    c.q_lora_rank,
                );
                self.linear(format!("{prefix}.weights_proj"), c.index_n_heads, hidden);
                self.compressor(&format!("{prefix}.compressor"), ratio, 2 * index, index);
            }
        }
    }

    fn moe(&mut self, prefix: &str, hashed: bool) {
        let c = self.config;
        let (hidden, inter, experts) = (c.hidden_size, c.moe_intermediate_size, c.n_routed_experts);
        self.dense(format!("{prefix}.gate.weight"), &[experts, hidden]);
        if hashed {
            let name = format!("{prefix}.gate.tid2eid");
            let shape = [c.vocab_size, c.num_experts_per_tok];
            let ids = self.loader.ids(&name, &shape, experts).map(Weight::Ids);
            self.put(name, ids);
        } else {
            self.dense(format!("{prefix}.gate.bias"), &[experts]);
        }
        let routed = format!("{prefix}.experts");
        let gate_up = self.loader.experts_gate_up(&routed, experts, inter, hidden);
        self.put(format!("{routed}.gate_up"), gate_up.map(Weight::Experts));
        let down = self.loader.experts_down(&routed, experts, hidden, inter);
        self.put(format!("{routed}.down"), down.map(Weight::Experts));
        let (shared, inter) = (
            format!("{prefix}.shared_experts"),
            c.n_shared_experts * inter,
        );
        let gate_up = self.loader.expert_gate_up(&shared, inter, hidden);
        self.put(format!("{shared}.gate_up"), gate_up.map(Weight::Experts));
        self.linear(format!("{shared}.w2"), hidden, inter);
    }

    fn hyper(&mut self, prefix: &str, mixes: usize, scales: usize) {
        let width = self.config.hc_mult * self.config.hidden_size;
        self.dense(format!("{prefix}_fn"), &[mixes, width]);
        self.dense(format!("{prefix}_base"), &[mixes]);
        self.dense(format!("{prefix}_scale"), &[scales]);
    }

    fn block(&mut self, prefix: &str, kind: AttentionKind, hashed: bool) {
        let (hidden, streams) = (self.config.hidden_size, self.config.hc_mult);
        self.dense(format!("{prefix}.attn_norm.weight"), &[hidden]);
        self.dense(format!("{prefix}.ffn_norm.weight"), &[hidden]);
        self.hyper(&format!("{prefix}.hc_attn"), (2 + streams) * streams, 3);
        self.hyper(&format!("{prefix}.hc_ffn"), (2 + streams) * streams, 3);
        self.attention(&format!("{prefix}.attn"), kind);
        self.moe(&format!("{prefix}.ffn"), hashed);
    }

    fn model(&mut self) {
        let c = self.config;
        let hidden = c.hidden_size;
        self.dense("embed.weight".to_string(), &[c.vocab_size, hidden]);
        self.dense("norm.weight".to_string(), &[hidden]);
        self.linear("head".to_string(), c.vocab_size, hidden);
        self.hyper("hc_head", c.hc_mult, 1);
        for (layer, &kind) in c.layers.iter().enumerate() {
            self.block(&format!("layers.{layer}"), kind, layer < c.num_hash_layers);
        }
        for mtp in 0..c.num_mtp_layers {
            let prefix = format!("mtp.{mtp}");
            self.block(&prefix, AttentionKind::Window, false);
            self.linear(format!("{prefix}.e_proj"), hidden, hidden);
            self.linear(format!("{prefix}.h_proj"), hidden, hidden);
            for norm in ["enorm", "hnorm", "norm"] {
                self.dense(format!("{prefix}.{norm}.weight"), &[hidden]);
            }
            self.hyper(&format!("{prefix}.hc_head"), c.hc_mult, 1);
        }
    }
}

/// All weights of the model that the checkpoint's configuration describes, and no tensor left over.
pub(super) fn load_model(checkpoint: &Checkpoint) -> BTreeMap<String, Weight> {
    let mut loader = Loader::new(checkpoint);
    let mut walk = Walk {
        loader: &mut loader,
        config: checkpoint.config(),
        weights: BTreeMap::new(),
    };
    walk.model();
    let weights = walk.weights;
    loader.finish(Some(weights)).unwrap()
}

#[test]
fn the_trained_checkpoint_loads_in_the_released_formats() {
    let checkpoint = Checkpoint::open(&repository::path("assets/ds4-tiny")).unwrap();
    let weights = load_model(&checkpoint);
    for layer in ["layers.0", "layers.5", "mtp.0"] {
        for (leaf, shape) in [("gate_up", [32, 128, 256]), ("down", [32, 256, 64])] {
            let Weight::Experts(experts) = &weights[&format!("{layer}.ffn.experts.{leaf}")] else {
                panic!("{layer} {leaf}");
            };
            assert!(matches!(experts, HostExperts::Fp4 { .. }));
            assert_eq!(experts.shape(), shape);
        }
        let query = &weights[&format!("{layer}.attn.wq_b")];
        assert!(matches!(
            query,
            Weight::Linear(HostLinear::Fp8 { shape: [512, 128], scales, .. })
                if scales.len() == 4
        ));
    }
    let Weight::Ids(ids) = &weights["layers.1.ffn.gate.tid2eid"] else {
        panic!("no ids");
    };
    assert_eq!(ids.len(), 1024 * 6);
    let Weight::Dense(embed) = &weights["embed.weight"] else {
        panic!("no embedding");
    };
    assert_eq!(embed.dtype(), DType::BF16);
}

#[test]
fn the_random_model_loads_in_f32() {
    let checkpoint = Checkpoint::open(&repository::path("tests/fixtures/layer-goldens")).unwrap();
    let weights = load_model(&checkpoint);
    let Weight::Experts(experts) = &weights["layers.3.ffn.experts.gate_up"] else {
        panic!("no experts");
    };
    let HostExperts::Dense(data) = experts else {
        panic!("{experts:?}");
    };
    assert_eq!(data.dtype(), DType::F32);
    assert_eq!(experts.shape(), [8, 64, 64]);
}

#[test]
fn stacked_experts_hold_the_bytes_of_the_file() {
    let checkpoint = Checkpoint::open(&repository::path("assets/ds4-tiny")).unwrap();
    let weights = load_model(&checkpoint);
    let Weight::Experts(HostExperts::Fp4 { words, scales, .. }) =
        &weights["layers.2.ffn.experts.gate_up"]
    else {
        panic!("no experts");
    };
    let stored = |expert: usize, leaf: &str, part: &str| {
        let name = format!("layers.2.ffn.experts.{expert}.{leaf}.{part}");
        checkpoint.tensor(&name).unwrap().bytes.to_vec()
    };
    let bytes = |words: &[u32]| {
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let (rows, row_words, row_scales) = (128, 32, 8);
    for expert in [0, 9, 31] {
        let words = bytes(&words[expert * rows * row_words..][..rows * row_words]);
        let expected = [
            stored(expert, "w1", "weight"),
            stored(expert, "w3", "weight"),
        ]
        .concat();
        assert!(words == expected, "codes of expert {expert}");
        let scales = bytes(&scales[expert * rows * row_scales / 4..][..rows * row_scales / 4]);
        let expected = [stored(expert, "w1", "scale"), stored(expert, "w3", "scale")].concat();
        assert!(scales == expected, "scales of expert {expert}");
    }
}
