use burn::tensor::FloatDType;
use burn_ds4_ops::quant::{Activations, Fp4Layout};

use super::*;
use crate::config::ModelConfig;
use crate::model::{Model, Ranks};
use crate::placement::{Placement, Plan};
use crate::trace::Trace;

/// Two layers like those of V4-Flash, whose blocks of scales are divided between them.
fn config() -> ModelConfig {
    let config = ModelConfig::new();
    ModelConfig {
        vocab_size: 64,
        hidden_size: 128,
        num_attention_heads: 4,
        head_dim: 128,
        q_lora_rank: 128,
        o_groups: 2,
        o_lora_rank: 128,
        index_n_heads: 2,
        n_routed_experts: 8,
        moe_intermediate_size: 256,
        num_hash_layers: 1,
        layers: config.layers[2..4].to_vec(),
        ..config
    }
}

fn models() -> [Model; 2] {
    let flex = Device::flex();
    let whole = config().init_packed(FloatDType::F32, Activations::Exact, &flex);
    let placement = Placement::tensor(&[flex.clone(), flex], 2).expect("devices");
    let divided = whole.clone().place(placement);
    [whole, divided.expect("even numbers")]
}

/// The matrices of a stack in f32.
fn values(stack: &WeightStack) -> Tensor<3> {
    stack.dense(FloatDType::F32)
}

fn assert_same<const D: usize>(actual: Tensor<D>, expected: Tensor<D>, what: &str) {
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    assert_eq!(actual.into_data(), expected.into_data(), "{what}");
}

#[test]
fn the_parts_of_packed_weights_are_those_of_the_decoded_ones() {
    let [whole, divided] = models();
    let parallel = divided.parallel.as_ref().expect("layers in parts");
    for layer in 0..2 {
        let block = &whole.layers[layer];
        for rank in 0..2 {
            let part = match parallel.other(rank) {
                Some(rank) => &rank.layers[layer],
                None => &divided.layers[layer],
            };
            let what = |name: &str| format!("{name} of layer {layer}, rank {rank}");
            let half = |size: usize| rank * size / 2..(rank + 1) * size / 2;
            let (own, all) = (&part.attention, &block.attention);
            let expected = values(&all.query_b.weight).slice_dim(1, half(512));
            assert_same(values(&own.query_b.weight), expected, &what("wq_b"));
            let expected = values(&all.output_a).slice_dim(0, half(2));
            assert_same(values(&own.output_a), expected, &what("wo_a"));
            let expected = values(&all.output_b.weight).slice_dim(2, half(256));
            assert_same(values(&own.output_b.weight), expected, &what("wo_b"));
            let expected = values(&all.query_a.weight);
            assert_same(values(&own.query_a.weight), expected, &what("wq_a"));
            assert_eq!((own.heads, own.o_groups), (2, 1));
            let (own, all) = (&part.moe, &block.moe);
            for (own, all, name) in [
                (&own.gate_up, &all.gate_up, "experts"),
                (&own.shared.gate_up, &all.shared.gate_up, "shared expert"),
            ] {
                let all = values(all);
                let gate = all.clone().slice_dim(1, half(256));
                let up = all.slice_dim(1, 256..512).slice_dim(1, half(256));
                let expected = Tensor::cat(vec![gate, up], 1);
                assert_same(values(own), expected, &what(name));
            }
            for (own, all, name) in [
                (&own.down, &all.down, "experts' w2"),
                (&own.shared.down, &all.shared.down, "shared w2"),
            ] {
                let expected = values(all).slice_dim(2, half(256));
                assert_same(values(own), expected, &what(name));
            }
        }
    }
}

#[test]
fn scales_of_fp4_that_begin_within_a_word_are_moved() {
    // 3 rows of 2 blocks, two matrices: bytes 1 to 6 and 7 to 12, each from a new word on.
    let words = [0x0403_0201_u32, 0x0605, 0x0a09_0807, 0x0c0b];
    let words = Tensor::<2, Int>::from_data(
        burn::tensor::TensorData::new(words.to_vec(), [2, 2]),
        (&Device::flex(), burn::tensor::DType::U32),
    );
    let fp4 = Fp4Weight {
        words: int_parameter(Tensor::zeros(
            [2, 3, 8],
            (&Device::flex(), burn::tensor::DType::U32),
        )),
        scales: int_parameter(words.clone()),
        columns: 64,
        layout: Fp4Layout::Plain,
    };
    let scales = scales_of(&fp4);
    let bytes: Vec<i64> = scales.clone().into_data().iter().collect();
    assert_eq!(bytes, (1..=12).collect::<Vec<_>>());
    assert_eq!(packed(scales.clone()).into_data(), words.into_data());
    let second = packed(scales.slice_dim(2, 1..2)).into_data();
    let second: Vec<i64> = second.iter().collect();
    assert_eq!(second, [0x0006_0402, 0x000c_0a08]);
}

#[test]
fn all_ranks_have_the_same_bits() {
    let [_, model] = models();
    let flex = Device::flex();
    let mut cache = model.new_cache(Default::default()).expect("valid options");
    for count in [20, 1, 3] {
        let open = model.open(count, &mut cache).expect("a short text");
        let ids = Tensor::<1, Int>::arange(7..7 + count as i64, &flex).reshape([1, count]);
        let ids = (0, vec![ids.clone(), ids]);
        let ranks = Ranks::of(&model).expect("layers in parts");
        let passings = ranks.run_from(ids, open, &mut cache, &[], &Trace::off());
        cache.close(open).expect("it is the last step");
        let streams = passings.into_iter().map(|passing| passing.streams);
        let streams: Vec<Streams> = streams.collect();
        let logits = ranks.logits(0, streams.clone(), [1, count]);
        let [first, second] = logits.try_into().expect("two ranks");
        let expected = first.clone().into_data();
        assert!(expected.iter::<f32>().all(f32::is_finite));
        assert_same(second, first, &format!("logits of {count}"));
        let mut ready = streams.into_iter().map(|streams| streams.ready());
        let mut next = || ready.next().expect("two ranks").expect("streams that fit");
        assert_same(next(), next(), &format!("streams of {count}"));
    }
}

#[test]
fn parts_take_the_bytes_of_the_plan() {
    let flex = Device::flex();
    let [_, model] = models();
    let parallel = model.parallel.as_ref().expect("layers in parts");
    let bytes_of = |block: &Block| {
        let mut bytes = Bytes(0);
        block.visit(&mut bytes);
        bytes.0
    };
    let other = parallel.other(0).expect("two ranks");
    let own: usize = other.layers.iter().map(bytes_of).sum();
    let embedding = 64 * 128 * 4;
    let sizes = config().packed_bytes(FloatDType::F32, &[flex], 64);
    let names = ["one", "two"].map(str::to_owned);
    let plan = Plan::tensor(&sizes, &names).expect("devices");
    let head = sizes.head.div_ceil(2);
    assert_eq!(plan.bytes[0].weights, own + embedding + head + sinks());
}

/// Bytes of the sinks, which a plan counts on each device.
fn sinks() -> usize {
    2 * 4 * 2
}

struct Bytes(usize);

impl burn::module::ModuleVisitor for Bytes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        self.0 += tensor.shape().num_elements() * tensor.dtype().size();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.val();
        self.0 += tensor.shape().num_elements() * tensor.dtype().size();
    }
}
