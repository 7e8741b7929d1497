//! The weights of a checkpoint on devices: which tensor is held in which form.

use std::panic::resume_unwind;
use std::thread;

use burn::backend::StreamId;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::device::check_module;
use burn_ds4_ops::quant::{Activations, Fp4Layout};
use burn_ds4_ops::upload::repack_fp4_words;
use safetensors::Dtype;

use super::format::{FP4_BLOCK, StoredLinear, WeightFormat};
use super::host::{HostExperts, block_of, blocks_alike, dims};
use super::loader::{Branch, Loader};
use super::options::LoadOptions;
use crate::block::Block;
use crate::linear::{Fp4Weight, Fp8Weight, StackValues, WeightStack};
use crate::model::ModelSource;
use crate::placement::{Place, Placement, PlacementError, Portion, WeightBytes, name};
use crate::weights::{EngramTable, Initial, WeightSource, int_parameter, load_all};

/// Puts the weights of a checkpoint on a device. If the loader only reads headers, there is no
/// weight, and their bytes are counted all the same.
pub(super) struct Stored<'l, 'a> {
    pub(super) loader: Loader<'a>,
    pub(super) options: &'l LoadOptions,
    placement: &'l Placement,
    pub(super) device: Device,
    /// Whether there is anything in weights that is not finite, as their device has found out.
    pub(super) unchecked: Vec<(Tensor<1, Int>, Vec<StoredLinear<'a>>)>,
    /// What all weights asked for take on the devices.
    pub(super) bytes: WeightBytes,
    /// Why a device has not taken a weight.
    pub(super) refusal: Option<PlacementError>,
}

impl<'l, 'a> Stored<'l, 'a> {
    pub(super) fn new(
        loader: Loader<'a>,
        options: &'l LoadOptions,
        placement: &'l Placement,
        device: &Device,
    ) -> Self {
        Self {
            loader,
            options,
            placement,
            device: device.clone(),
            unchecked: Vec::new(),
            bytes: WeightBytes::default(),
            refusal: None,
        }
    }
}

impl<'l, 'a> ModelSource for Stored<'l, 'a> {
    type Weights = Self;

    fn weights(&mut self) -> &mut Self {
        self
    }

    fn placement(&self, _: usize) -> Placement {
        self.placement.clone()
    }

    /// The threads work on the stream of this one, so that the weights are as if it had made them.
    fn build_portions<T: Send>(
        &mut self,
        placement: &Placement,
        build: impl Fn(&mut Self, &Portion) -> Option<T> + Sync,
    ) -> Vec<Option<T>> {
        let portions = placement.device_portions();
        if let [alone] = &portions[..] {
            return vec![build(self, alone)];
        }
        let stream = StreamId::current();
        let (options, placement) = (self.options, self.placement);
        let (branch, reports) = self.loader.branch();
        let on_thread = |portion: &Portion, branch: Branch<'a>| {
            let mut own: Stored<'l, 'a> =
                Stored::new(branch.loader(), options, placement, &portion.device);
            let built = stream.executes(|| {
                let built = build(&mut own, portion);
                own.settle();
                built
            });
            (built, own.refusal, own.loader.into_findings())
        };
        thread::scope(|scope| {
            let threads = portions.iter().map(|portion| {
                let (branch, work) = (branch.clone(), &on_thread);
                scope.spawn(move || work(portion, branch))
            });
            let threads: Vec<_> = threads.collect();
            // Reports end when the threads have.
            drop(branch);
            for tensor in reports {
                self.loader.count(&tensor);
            }
            let results = threads.into_iter().zip(&portions).map(|(thread, portion)| {
                let (built, refusal, findings) = thread.join().unwrap_or_else(|panic| {
                    resume_unwind(panic);
                });
                self.refusal = self.refusal.take().or(refusal);
                self.loader.merge(findings, portion.is_repeated());
                built
            });
            results.collect()
        })
    }

    fn take(&mut self, block: Block, portion: &Portion) -> Option<Block> {
        let block = match portion.share {
            Some(share) => share.kept(block, &portion.device),
            None => block,
        };
        self.is_taken(&block).then_some(block)
    }

    fn is_taken(&mut self, module: &impl Module) -> bool {
        match check_module(module) {
            Ok(()) => self.settle(),
            Err(reason) => self.refuse(reason),
        }
        self.refusal.is_none()
    }

    fn enter(&mut self, place: Place) {
        self.bytes.enter(place);
    }
}

impl WeightSource for Stored<'_, '_> {
    fn arranged<const D: usize>(
        &mut self,
        name: &str,
        stored: [usize; D],
        shape: [usize; D],
        _: Initial,
        arrange: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Option<Param<Tensor<D>>> {
        self.count(&shape, DType::F32);
        let stored = self.floats(name, stored, FloatDType::F32)?;
        Some(parameter(arrange(stored)))
    }

    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Option<Param<Tensor<2>>> {
        self.count(&shape, self.options.dtype.into());
        let embedding = self.floats(name, shape, self.options.dtype)?;
        Some(parameter(embedding))
    }

    /// The matrices are f32 where the device lacks a dtype of theirs, they have several, or weights
    /// are to be expanded.
    fn stored(&mut self, names: &[String], shape: [usize; 2]) -> Option<Param<Tensor<2>>> {
        let dtype = common(names.iter().map(|name| self.held_dtype(name)));
        let matrices = names.iter().map(|name| {
            self.count(&shape, dtype.into());
            self.floats(name, shape, dtype)
        });
        let mut matrices = load_all(matrices)?;
        Some(parameter(match matrices.len() {
            1 => matrices.remove(0),
            _ => Tensor::cat(matrices, 0),
        }))
    }

    fn stack(
        &mut self,
        prefix: &str,
        experts: Option<usize>,
        parts: &[&str],
        [out, inp]: [usize; 2],
    ) -> Option<WeightStack> {
        let matrices = experts.unwrap_or(1);
        let first = experts.map_or(prefix.to_owned(), |_| format!("{prefix}.0"));
        let first = format!("{first}{}", parts.first()?);
        let shape = [matrices, parts.len(), out, inp];
        self.count_stack((prefix, &first), shape, out);
        let (matrices, sources) = self.loader.sources(prefix, experts, parts, [out, inp]);
        let rows = [matrices, parts.len()];
        let values = match self.takes(&sources, [matrices, parts.len(), out, inp]) {
            true => self.given(&sources, [matrices, parts.len(), out, inp])?,
            false => {
                let host = self.loader.stacked(&sources, rows, [out, inp])?;
                self.stack_values(host)
            }
        };
        let activations = match values {
            StackValues::Dense(_) => Activations::Exact,
            _ => self
                .loader
                .checkpoint()
                .config()
                .in_blocks(self.options.activations),
        };
        Some(WeightStack {
            activations,
            ..self.weight_stack(values)
        })
    }

    fn groups(&mut self, prefix: &str, [groups, rank, width]: [usize; 3]) -> Option<WeightStack> {
        self.count_stack((prefix, prefix), [groups, 1, rank, width], groups * rank);
        let source = [self.loader.locate(prefix, groups * rank, width)?];
        if self.takes(&source, [groups, 1, rank, width]) {
            let values = self.given(&source, [groups, 1, rank, width])?;
            return Some(self.weight_stack(values));
        }
        let rows = [groups * rank, width];
        let host = self.loader.gather(&source, rows)?.into_linear(rows);
        Some(match host.into_groups(groups) {
            Ok(host) => self.weight_stack(self.stack_values(host)),
            Err(host) => {
                let whole = self.weight_stack(self.stack_values(host.into()));
                let whole = whole.dense(self.options.dtype);
                StackValues::Dense(parameter(whole.reshape([groups, rank, width]))).into()
            }
        })
    }

    fn lookup(&mut self, prefix: &str, shape: [usize; 2]) -> Option<EngramTable> {
        self.loader.lookup(prefix, shape)
    }

    fn table(
        &mut self,
        name: &str,
        shape: [usize; 2],
        experts: usize,
    ) -> Option<Param<Tensor<2, Int>>> {
        self.count(&shape, DType::I32);
        let table = TensorData::new(self.loader.ids(name, &shape, experts)?, shape);
        Some(int_parameter(Tensor::from_data(table, &self.device)))
    }
}

impl Stored<'_, '_> {
    fn count(&mut self, shape: &[usize], dtype: DType) {
        self.bytes.tensor(shape, dtype);
    }

    /// Counts matrices of `parts` linears each under a prefix, in the format of the linear `first`,
    /// which has so many rows in the file. FP8 of several groups may have to be decoded.
    fn count_stack(&mut self, (prefix, first): (&str, &str), shape: [usize; 4], rows: usize) {
        let (expand, dtype) = (self.options.expand, self.options.dtype.into());
        let [matrices, _, out, inp] = shape;
        let checkpoint = self.loader.checkpoint();
        let stored = Loader::quiet(checkpoint).locate(first, rows, inp);
        let held = stored.filter(|_| !expand);
        let held = held.map(|stored| checkpoint.held(first, &stored));
        let block = held.and_then(WeightFormat::fp8_block);
        let block = block.filter(|block| rows == out || blocks_alike(matrices, out, *block));
        self.bytes.under(prefix, |bytes| match (held, block) {
            (Some(WeightFormat::Fp4), _) => bytes.fp4(shape),
            (_, Some(block)) => bytes.fp8(shape, block),
            _ => bytes.tensor(&shape, dtype),
        });
    }

    fn stored_dtype(&self, name: &str) -> Option<Dtype> {
        Some(self.loader.checkpoint().tensor(name)?.dtype)
    }

    /// The dtype that a matrix of the file has on the device, where it is read in f32.
    fn held_dtype(&self, name: &str) -> FloatDType {
        let dtype = match self.stored_dtype(name) {
            Some(Dtype::BF16) => FloatDType::BF16,
            Some(Dtype::F16) => FloatDType::F16,
            _ => FloatDType::F32,
        };
        match !self.options.expand && self.device.supports_dtype(DType::from(dtype)) {
            true => dtype,
            false => FloatDType::F32,
        }
    }

    /// Says why the device has not taken a weight.
    pub(super) fn refuse(&mut self, reason: String) {
        let device = name(&self.device);
        let refused = PlacementError::Refused { device, reason };
        self.refusal.get_or_insert(refused);
        self.loader.spoil();
    }

    /// A tensor of floats, of this dtype on the device.
    fn floats<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        dtype: FloatDType,
    ) -> Option<Tensor<D>> {
        let source = self.loader.locate_dense(name, &shape)?;
        if self.takes_floats(&source, dtype) {
            return Some(self.given_floats(&[source], dtype)?.reshape(shape));
        }
        let data = self.loader.dense_data(source, &shape)?;
        Some(self.float_tensor(data, dtype))
    }

    fn stack_values(&self, host: HostExperts) -> StackValues {
        match host {
            HostExperts::Dense(data) => {
                StackValues::Dense(parameter(self.float_tensor(data, self.options.dtype)))
            }
            HostExperts::Fp8 {
                shape: [matrices, out, inp],
                parts,
                words,
                scales,
            } => {
                let shape = [matrices, parts, out / parts, inp];
                StackValues::Fp8(self.fp8(shape, self.words(words), scales))
            }
            HostExperts::Fp4 {
                shape: [matrices, out, inp],
                words,
                scales,
            } => {
                let scales = word_aligned(scales, matrices, out * inp.div_ceil(FP4_BLOCK));
                let [words, scales] = [words, scales].map(|words| self.words(words));
                StackValues::Fp4(self.fp4([matrices, out, inp], words, scales))
            }
        }
    }

    fn weight_stack(&self, values: StackValues) -> WeightStack {
        let stack = WeightStack::from(values);
        match self.options.expand {
            true => StackValues::Dense(parameter(stack.dense(self.options.dtype))).into(),
            false => stack,
        }
    }

    pub(super) fn fp8(
        &self,
        [matrices, parts, out, inp]: [usize; 4],
        words: Tensor<1, Int>,
        scales: Vec<f32>,
    ) -> Fp8Weight {
        let block = block_of([matrices * parts, out, inp], scales.len());
        let blocks = parts * out.div_ceil(block);
        let scales = TensorData::new(scales, [matrices, blocks, inp.div_ceil(block)]);
        Fp8Weight {
            words: int_parameter(words.reshape([matrices, parts * out, inp.div_ceil(4)])),
            scales: parameter(self.float_tensor(scales, FloatDType::F32)),
            parts,
            columns: inp,
        }
    }

    /// The bytes of the scales of each matrix begin with a word.
    pub(super) fn fp4(
        &self,
        [matrices, out, inp]: [usize; 3],
        words: Tensor<1, Int>,
        scales: Tensor<1, Int>,
    ) -> Fp4Weight {
        let layout = match self.options.expand {
            true => Fp4Layout::Plain,
            false => Fp4Layout::fastest_on(&self.device),
        };
        let words = match layout {
            Fp4Layout::Plain => words,
            Fp4Layout::Repacked => repack_fp4_words(words).expect("words are u32"),
        };
        let scale_words = (out * inp.div_ceil(FP4_BLOCK)).div_ceil(4);
        Fp4Weight {
            words: int_parameter(words.reshape([matrices, out, inp.div_ceil(8)])),
            scales: int_parameter(scales.reshape([matrices, scale_words])),
            columns: inp,
            layout,
        }
    }

    fn words(&self, words: Vec<u32>) -> Tensor<1, Int> {
        let length = words.len();
        let device = (&self.device, DType::U32);
        Tensor::from_data(TensorData::new(words, [length]), device)
    }

    fn float_tensor<const D: usize>(&self, data: TensorData, dtype: FloatDType) -> Tensor<D> {
        let (flat, shape) = flat(data);
        let device = (&self.device, dtype.into());
        Tensor::<1>::from_data(flat, device).reshape::<D, _>(shape)
    }
}

/// The data as one row, and the shape it is to have. A device may leave gaps between several rows,
/// and kernels would copy them at each use.
fn flat<const D: usize>(data: TensorData) -> (TensorData, [usize; D]) {
    let (shape, dtype) = (dims::<D>(&data), data.dtype());
    let length: usize = shape.iter().product();
    (
        TensorData::from_bytes(data.into_bytes(), [length], dtype),
        shape,
    )
}

/// The dtype that matrices on top of each other have: f32 where they have several.
fn common(mut dtypes: impl Iterator<Item = FloatDType>) -> FloatDType {
    let first = dtypes.next().unwrap_or(FloatDType::F32);
    match dtypes.all(|dtype| dtype == first) {
        true => first,
        false => FloatDType::F32,
    }
}

pub(super) fn parameter<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}

/// Makes the bytes of every matrix start at a new word. In `words`, they are packed one matrix
/// after the other, four bytes to a word.
fn word_aligned(words: Vec<u32>, matrices: usize, bytes: usize) -> Vec<u32> {
    if bytes.is_multiple_of(4) || matrices == 1 {
        return words;
    }
    let flat: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    flat.chunks(bytes)
        .take(matrices)
        .flat_map(|matrix| {
            matrix.chunks(4).map(|chunk| {
                let mut word = [0; 4];
                word[..chunk.len()].copy_from_slice(chunk);
                u32::from_le_bytes(word)
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_two_dtypes_become_f32_and_of_one_stay_as_they_are() {
        let (bf16, f16, f32) = (FloatDType::BF16, FloatDType::F16, FloatDType::F32);
        assert_eq!(common([bf16, f16].into_iter()), f32);
        assert_eq!(common([bf16, bf16].into_iter()), bf16);
        assert_eq!(common([f16].into_iter()), f16);
    }

    #[test]
    fn bytes_of_every_matrix_start_at_a_word() {
        // Two matrices of three bytes each: 1 2 3, 4 5 6.
        let packed = vec![0x0403_0201, 0x7f7f_0605];
        assert_eq!(
            word_aligned(packed.clone(), 2, 3),
            [0x0003_0201, 0x0006_0504]
        );
        assert_eq!(word_aligned(packed.clone(), 1, 6), packed);
        assert_eq!(word_aligned(packed.clone(), 2, 4), packed);
    }
}
