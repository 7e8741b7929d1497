//! One layer on several devices: which part of each weight a device has, and what the devices do
//! together.
//!
//! Each device has the whole residual streams, cache, router, compressors, indexer, norms,
//! hyper-connections and embedding, and computes the same bits with them. It has a part of the
//! query heads and of their output projections, and of the inner width of every expert, so that all
//! devices are equally busy whichever experts a token goes to. What it computes with those is a
//! partial: the sum over all devices is the output of the attention or of the experts. So there are
//! two sums a layer. Of the output matrix it has a part of the vocabulary.
//!
//! Tokens are chosen, and drafts made, on the last device. What drafts is there alone, with a whole
//! output matrix.

use std::ops::Range;
use std::sync::Once;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::collective::{DeviceGroup, GroupRoute};
use burn_ds4_ops::quant::{FP4_BLOCK, FP8_BLOCK, fp8_block};
use burn_ds4_ops::transfer::{Movable, transfer};

use crate::attention::Attention;
use crate::block::Block;
use crate::hyper_connection::{HyperHead, Streams};
use crate::linear::{Fp4Weight, Fp8Weight, PackedLinear, StackValues, WeightStack, project_f32};
use crate::moe::{MoeLayer, SharedExpert};
use crate::norm::RmsNorm;
use crate::placement::Share;
pub use crate::placement::{Parallel, check};
use crate::weights::int_parameter;

impl Share {
    /// What a device has of a block, in memory of its own.
    fn moved(self, block: &Block, device: &Device) -> Block {
        self.block(block).map(&mut Copied(device))
    }

    /// What the device of a block keeps of it, once the rest is gone.
    pub(crate) fn kept(self, block: Block, device: &Device) -> Block {
        let own = self.moved(&block, device);
        // The memory of the whole layer is that of the next one.
        drop(block);
        // What has failed is told by whoever reads it.
        let _ = device.sync();
        own
    }

    /// The rank's rows of the output matrix, in memory of their own.
    pub(crate) fn kept_output(self, output: Tensor<2>, device: &Device) -> Tensor<2> {
        Copied(device).tensor(self.output(output))
    }

    /// The rank's part of a block, where the block is.
    pub(crate) fn block(self, block: &Block) -> Block {
        let Block { attention, moe, .. } = block;
        Block {
            attention: self.attention(attention),
            moe: self.moe(moe),
            ..block.clone()
        }
    }

    /// Some of the heads, with the groups of their output projection.
    fn attention(self, attention: &Attention) -> Attention {
        let own = attention.sinks.val();
        let heads = self.of(attention.heads);
        Attention {
            query_b: PackedLinear {
                weight: self.stack(&attention.query_b.weight, Cut::Rows(1)),
            },
            output_a: self.stack(&attention.output_a, Cut::Matrices),
            output_b: PackedLinear {
                weight: self.stack(&attention.output_b.weight, Cut::Columns),
            },
            heads: heads.len(),
            sinks: Param::from_tensor(own.slice_dim(0, heads)),
            o_groups: attention.o_groups / self.ranks,
            ..attention.clone()
        }
    }

    /// A part of the inner width of each expert.
    fn moe(self, moe: &MoeLayer) -> MoeLayer {
        MoeLayer {
            gate_up: self.stack(&moe.gate_up, Cut::Rows(2)),
            down: self.stack(&moe.down, Cut::Columns),
            shared: SharedExpert {
                gate_up: self.stack(&moe.shared.gate_up, Cut::Rows(2)),
                down: self.stack(&moe.shared.down, Cut::Columns),
                swiglu_limit: moe.shared.swiglu_limit,
            },
            ..moe.clone()
        }
    }

    /// The rows of the output matrix of a part of the vocabulary.
    fn output(self, output: Tensor<2>) -> Tensor<2> {
        let [vocabulary, _] = output.dims();
        output.slice_dim(0, self.of(vocabulary))
    }

    /// A part of each of some matrices, or some of them.
    fn stack(self, stack: &WeightStack, cut: Cut) -> WeightStack {
        let values = match &stack.values {
            StackValues::Dense(values) => {
                let [_, rows, columns] = values.dims();
                let own = self.part(values.val(), cut, [(rows, 1), (columns, 1)]);
                StackValues::Dense(Param::from_tensor(own))
            }
            StackValues::Fp8(fp8) => {
                let ([_, rows, _], columns) = (fp8.words.dims(), fp8.columns);
                let words = self.part(fp8.words.val(), cut, [(rows, 1), (columns, 4)]);
                let block = fp8_block(fp8.scales.dims(), [rows, columns], fp8.parts);
                let blocks = [rows, columns].map(|of| (of, block.unwrap_or(FP8_BLOCK)));
                StackValues::Fp8(Fp8Weight {
                    words: int_parameter(words),
                    scales: Param::from_tensor(self.part(fp8.scales.val(), cut, blocks)),
                    columns: self.columns(columns, cut),
                    parts: fp8.parts,
                })
            }
            StackValues::Fp4(fp4) => {
                let ([_, rows, _], columns) = (fp4.words.dims(), fp4.columns);
                let words = self.part(fp4.words.val(), cut, [(rows, 1), (columns, 8)]);
                let blocks = [(rows, 1), (columns, FP4_BLOCK)];
                StackValues::Fp4(Fp4Weight {
                    words: int_parameter(words),
                    scales: int_parameter(packed(self.part(scales_of(fp4), cut, blocks))),
                    columns: self.columns(columns, cut),
                    layout: fp4.layout,
                })
            }
        };
        WeightStack {
            values,
            activations: stack.activations,
        }
    }

    /// A part of a tensor `[matrices, rows, columns]` whose elements have a block of the weights
    /// each: the weights' rows and how many a block has of them, and the same for columns.
    fn part<K: Basic>(
        self,
        x: Tensor<3, K>,
        cut: Cut,
        [(rows, height), (columns, width)]: [(usize, usize); 2],
    ) -> Tensor<3, K> {
        let [matrices, tall, wide] = x.dims();
        match cut {
            Cut::Matrices => x.slice_dim(0, self.of(matrices)),
            Cut::Columns => x.slice_dim(2, blocks(&self.of(columns), width)),
            Cut::Rows(parts) => {
                let own = blocks(&self.of(rows / parts), height);
                let count = own.len();
                let x = x.reshape([matrices, parts, tall / parts, wide]);
                let x = x.slice_dim(2, own);
                x.reshape([matrices, parts * count, wide])
            }
        }
    }

    fn columns(self, columns: usize, cut: Cut) -> usize {
        match cut {
            Cut::Columns => self.of(columns).len(),
            Cut::Rows(_) | Cut::Matrices => columns,
        }
    }
}

/// What a rank has of a stack of matrices.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Some of them.
    Matrices,
    /// Some rows of each of so many linears on top of each other.
    Rows(usize),
    /// Some columns.
    Columns,
}

/// The blocks that a range has parts of: it begins with one, or is inside of one.
fn blocks(own: &Range<usize>, block: usize) -> Range<usize> {
    own.start / block..own.end.div_ceil(block)
}

/// The scales of FP4 weights, one byte to an element: `[matrices, rows, blocks]`.
fn scales_of(fp4: &Fp4Weight) -> Tensor<3, Int> {
    let words = fp4.scales.val();
    let ([matrices, count], [_, rows, _]) = (words.dims(), fp4.words.dims());
    let blocks = fp4.columns.div_ceil(FP4_BLOCK);
    let bytes = (0..4).map(|byte| {
        let byte = words.clone().bitwise_right_shift_scalar(8 * byte);
        byte.bitwise_and_scalar(0xff_u32).unsqueeze_dim::<3>(2)
    });
    let bytes = Tensor::cat(bytes.collect(), 2).reshape([matrices, 4 * count]);
    let bytes = bytes.narrow(1, 0, rows * blocks);
    bytes.reshape([matrices, rows, blocks])
}

/// Scales as FP4 weights have them: four a word, those of each matrix from a new word on.
fn packed(scales: Tensor<3, Int>) -> Tensor<2, Int> {
    let [matrices, rows, blocks] = scales.dims();
    let bytes = scales.reshape([matrices, rows * blocks]);
    let missing = (4 - rows * blocks % 4) % 4;
    let bytes = match missing {
        0 => bytes,
        _ => {
            let like = (&bytes.device(), bytes.dtype());
            let zeros = Tensor::zeros([matrices, missing], like);
            Tensor::cat(vec![bytes, zeros], 1)
        }
    };
    let words = (rows * blocks).div_ceil(4);
    let bytes = bytes.reshape([matrices, words, 4]);
    let shifted = (0..4_usize).map(|byte| {
        let own = bytes.clone().narrow(2, byte, 1);
        own.bitwise_left_shift_scalar(8 * byte as u32)
    });
    let word = shifted.reduce(|word, byte| word.bitwise_or(byte));
    word.expect("four bytes").reshape([matrices, words])
}

/// Copies modules to a device, each tensor as one row: a device may leave gaps between several, and
/// kernels would copy them at each use. A part of a tensor may still be a view of the whole, whose
/// memory is wanted back: an operation that changes nothing makes a tensor of its own from it.
struct Copied<'d>(&'d Device);

impl Copied<'_> {
    fn tensor<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.moved(tensor, |row| row * 1.0)
    }

    fn moved<const D: usize, K: Movable>(
        &self,
        tensor: Tensor<D, K>,
        own: impl FnOnce(Tensor<1, K>) -> Tensor<1, K>,
    ) -> Tensor<D, K> {
        let shape = tensor.dims();
        let count: usize = shape.iter().product();
        let row: Tensor<1, K> = tensor.reshape([count]);
        let row = match row.device() == *self.0 {
            true => own(row),
            false => transfer(row, self.0),
        };
        row.reshape(shape)
    }
}

impl ModuleMapper for Copied<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| self.tensor(tensor))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| self.moved(tensor, |row| row.bitwise_or_scalar(0)))
    }
}

/// What a device other than the last has, besides parts of the output matrix.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) embedding: Tensor<2>,
    pub(crate) layers: Vec<Block>,
    pub(crate) head: HyperHead,
    pub(crate) norm: RmsNorm,
}

/// The devices that have parts of every layer of a [`Model`](crate::model::Model), the last of
/// which is that of the model's own modules.
#[derive(Clone, Debug)]
pub struct TensorParallel {
    group: DeviceGroup,
    others: Vec<Rank>,
    /// A part of the output matrix for each rank.
    output: Vec<Tensor<2>>,
}

impl TensorParallel {
    /// What the ranks have: those other than the last, and a part of the output matrix each.
    pub(crate) fn new(devices: &[Device], others: Vec<Rank>, output: Vec<Tensor<2>>) -> Self {
        let group = DeviceGroup::new(devices);
        let parallel = Self {
            group: group.expect("there are devices"),
            others,
            output,
        };
        parallel.warn_of_copies();
        parallel
    }

    /// The devices of all ranks.
    pub fn devices(&self) -> &[Device] {
        self.group.devices()
    }

    /// How they exchange what they have.
    pub fn route(&self) -> &GroupRoute {
        self.group.route()
    }

    pub(crate) fn group(&self) -> &DeviceGroup {
        &self.group
    }

    pub(crate) fn ranks(&self) -> usize {
        self.group.devices().len()
    }

    /// What a rank other than the last has.
    pub(crate) fn other(&self, rank: usize) -> Option<&Rank> {
        self.others.get(rank)
    }

    /// Adds up what the ranks from `first` on have of the output that is pending.
    pub(crate) fn sum(&self, first: usize, partials: Vec<Streams>) -> Vec<Streams> {
        let (mut outputs, mut rest) = (Vec::new(), Vec::new());
        for streams in partials {
            let Streams::Pending {
                output,
                streams,
                coefficients,
            } = streams
            else {
                unreachable!("a sub-layer leaves its output pending");
            };
            outputs.push(output);
            rest.push((streams, coefficients));
        }
        let sums = self.group.all_reduce(first, outputs);
        let sums = sums.expect("outputs of one sub-layer on the devices of the group");
        let sums = sums.into_iter().zip(rest);
        sums.map(|(output, (streams, coefficients))| Streams::Pending {
            output,
            streams,
            coefficients,
        })
        .collect()
    }

    /// The logits of the ranks from `first` on, each of its own part of the vocabulary, and of all
    /// others; of hidden states `[rows, d_model]`: f32 `[rows, vocabulary]`.
    pub(crate) fn logits(&self, first: usize, hidden: Vec<Tensor<2>>) -> Vec<Tensor<2>> {
        let parts = hidden.into_iter().zip(&self.output[first..]);
        let parts = parts.map(|(hidden, output)| project_f32(hidden, output.clone()));
        let all = self.group.all_gather(first, parts.collect());
        let all = all.expect("logits of the same rows on the devices of the group");
        let ranks = self.ranks();
        let all = all.into_iter().map(|all| {
            let [rows, part] = all.dims();
            let rows = rows / ranks;
            let all = all.reshape([ranks, rows, part]);
            all.swap_dims(0, 1).reshape([rows, ranks * part])
        });
        all.collect()
    }

    /// Says once, in the log, if exchanges go through the host.
    fn warn_of_copies(&self) {
        static SAID: Once = Once::new();
        if let GroupRoute::Host { reason } = self.route() {
            SAID.call_once(|| {
                log::warn!("exchanges between devices go through the host's memory: {reason}");
            });
        }
    }
}

/// Divides a model's layers one by one, so that none but the one at hand is whole on a device.
pub(crate) struct Divider<'d> {
    devices: &'d [Device],
    others: Vec<Vec<Block>>,
}

impl<'d> Divider<'d> {
    /// `devices` are those of all ranks, which may be none: nothing is divided then.
    pub(crate) fn new(devices: &'d [Device]) -> Self {
        let others = vec![Vec::new(); devices.len().saturating_sub(1)];
        Self { devices, others }
    }

    /// Takes the next layer, which is on the last device. Returns what stays there.
    pub(crate) fn take(&mut self, block: Block) -> Block {
        let ranks = self.devices.len();
        let Some((last, _)) = self.devices.split_last() else {
            return block;
        };
        for (rank, layers) in self.others.iter_mut().enumerate() {
            layers.push(Share { rank, ranks }.moved(&block, &self.devices[rank]));
        }
        let rank = ranks - 1;
        let own = Share { rank, ranks }.kept(block, last);
        for device in &self.devices[..rank] {
            // As there.
            let _ = device.sync();
        }
        own
    }

    /// The parts of all ranks, with the other weights that each needs.
    pub(crate) fn finish(
        self,
        embedding: &Tensor<2>,
        head: &HyperHead,
        norm: &RmsNorm,
        output: &Tensor<2>,
    ) -> Option<TensorParallel> {
        let ranks = self.devices.len();
        if ranks < 2 {
            return None;
        }
        let others = self.others.into_iter().zip(self.devices);
        let others = others.map(|(layers, device)| Rank {
            embedding: Copied(device).tensor(embedding.clone()),
            layers,
            head: head.clone().map(&mut Copied(device)),
            norm: norm.clone().map(&mut Copied(device)),
        });
        let parts = self
            .devices
            .iter()
            .enumerate()
            .map(|(rank, device)| Share { rank, ranks }.kept_output(output.clone(), device));
        Some(TensorParallel::new(
            self.devices,
            others.collect(),
            parts.collect(),
        ))
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "parallel_tests.rs"]
mod tests;
