//! Weights that a device takes as they are in the files: it is given their bytes, and rearranges
//! and checks them itself.

use std::mem;

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_ds4_ops::readback::Readback;
use burn_ds4_ops::upload::{Encoding, any_not_finite, floats_of, in_pieces, upload};
use rayon::prelude::*;

use super::codec;
use super::directory::{Checkpoint, CheckpointTensor};
use super::error::InvalidReason;
use super::format::{FP4_BLOCK, StoredLinear, WeightFormat};
use super::stored::{Stored, parameter};
use crate::linear::StackValues;

/// Bytes that a thread reads at a time.
const READ_BYTES: usize = 2 << 20;
/// Tensors of fewer bytes are checked sooner by the host than by a launch.
const LEAST_FLOAT_BYTES: usize = 1 << 20;

impl Checkpoint {
    /// Reads bytes of tensors of one length behind each other, from `first` on, by several threads.
    fn read_all(
        &self,
        tensors: &[CheckpointTensor<'_>],
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), (String, InvalidReason)> {
        let length = tensors[0].bytes.len();
        let chunks = bytes.par_chunks_mut(READ_BYTES).enumerate();
        chunks.into_par_iter().try_for_each(|(number, mut chunk)| {
            let mut at = first + number * READ_BYTES;
            while !chunk.is_empty() {
                let (name, from) = (tensors[at / length].name, at % length);
                let (own, rest) = chunk.split_at_mut(chunk.len().min(length - from));
                let read = self.read(name, from, own);
                read.map_err(|error| {
                    let reason = InvalidReason::Unreadable(error.to_string());
                    (name.to_owned(), reason)
                })?;
                (at, chunk) = (at + own.len(), rest);
            }
            Ok(())
        })
    }
}

impl<'a> Stored<'_, 'a> {
    /// Whether the device takes weights `[matrices, parts, out, in]` as they are: rows of whole
    /// words in a format of its own, and scales that are not divided among matrices.
    pub(super) fn takes(
        &self,
        sources: &[StoredLinear<'a>],
        [matrices, parts, out, inp]: [usize; 4],
    ) -> bool {
        let Some(first) = sources.first().filter(|_| self.gives()) else {
            return false;
        };
        let of_source = matrices * parts / sources.len();
        inp.is_multiple_of(8)
            && match (first.format, first.format.fp8_block()) {
                (WeightFormat::Fp4, _) => (out * inp.div_ceil(FP4_BLOCK)).is_multiple_of(4),
                (format, Some(block)) => {
                    first.held(inp) == format && (of_source == 1 || out.is_multiple_of(block))
                }
                (WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32, _) => {
                    self.takes_floats(first, self.options.dtype)
                }
                _ => false,
            }
    }

    /// Whether the device takes floats as they are.
    pub(super) fn takes_floats(&self, source: &StoredLinear<'a>, dtype: FloatDType) -> bool {
        let bytes = source.weight.bytes.len();
        self.gives()
            && encoding(source.format).1 == Some(dtype)
            && bytes >= LEAST_FLOAT_BYTES
            && bytes.is_multiple_of(4)
            && self.device.supports_dtype(DType::from(dtype))
    }

    /// Whether anything is given to the device as it is.
    fn gives(&self) -> bool {
        in_pieces(&self.device) && !self.loader.headers_only && !self.loader.failed()
    }

    /// Gives the device weights that it [takes](Self::takes).
    pub(super) fn given(
        &mut self,
        sources: &[StoredLinear<'a>],
        [matrices, parts, out, inp]: [usize; 4],
    ) -> Option<StackValues> {
        let (checked, dtype) = encoding(sources[0].format);
        let stack = [matrices, parts * out, inp];
        if let Some(dtype) = dtype {
            let values = self.given_floats(sources, dtype)?.reshape(stack);
            return Some(StackValues::Dense(parameter(values)));
        }
        let (codes, scales) = sources.iter().map(|of| (of.weight, of.scale)).unzip();
        let (codes, scales): (Vec<_>, Vec<_>) = (codes, scales);
        let scales: Vec<_> = scales.into_iter().flatten().collect();
        let words = self.uploaded(&codes)?;
        let values = match checked {
            Encoding::E8m0 => {
                let scales = self.uploaded(&scales)?;
                self.check(&scales, checked, sources);
                StackValues::Fp4(self.fp4(stack, words, scales))
            }
            _ => {
                self.check(&words, checked, sources);
                let scales: Vec<f32> = scales.iter().flat_map(codec::scale_values).collect();
                if !scales.iter().all(|scale| scale.is_finite()) {
                    self.loader.check_contents(sources);
                }
                StackValues::Fp8(self.fp8([matrices, parts, out, inp], words, scales))
            }
        };
        self.count_all(sources);
        Some(values)
    }

    /// Gives the device floats that it [takes](Self::takes_floats).
    pub(super) fn given_floats(
        &mut self,
        sources: &[StoredLinear<'a>],
        dtype: FloatDType,
    ) -> Option<Tensor<1>> {
        let tensors: Vec<_> = sources.iter().map(|source| source.weight).collect();
        let words = self.uploaded(&tensors)?;
        self.check(&words, encoding(sources[0].format).0, sources);
        self.count_all(sources);
        Some(floats_of(words, dtype).expect("u32, and a dtype that the device has"))
    }

    /// The bytes of tensors of one length behind each other.
    fn uploaded(&mut self, tensors: &[CheckpointTensor<'a>]) -> Option<Tensor<1, Int>> {
        let checkpoint = self.loader.checkpoint();
        let words = tensors.len() * tensors[0].bytes.len() / 4;
        let fill = |first, bytes: &mut [u8]| checkpoint.read_all(tensors, first, bytes);
        let uploaded = upload(&self.device, words, fill);
        uploaded
            .map_err(|(name, reason)| self.loader.invalid(&name, reason))
            .ok()
    }

    /// Lets the device look for what is not finite. [`settle`](Self::settle) reads the result.
    fn check(&mut self, words: &Tensor<1, Int>, of: Encoding, sources: &[StoredLinear<'a>]) {
        let found = any_not_finite(words.clone(), of).expect("words are u32");
        self.unchecked.push((found, sources.to_vec()));
    }

    fn count_all(&mut self, sources: &[StoredLinear<'a>]) {
        for tensor in sources.iter().flat_map(StoredLinear::tensors) {
            self.loader.count(&tensor);
        }
    }

    /// Records what is not finite in the weights that the device was given. The host names it, by
    /// the file.
    pub(super) fn settle(&mut self) {
        let (found, sources): (Vec<_>, Vec<_>) = mem::take(&mut self.unchecked).into_iter().unzip();
        let found = match Readback::begin_both(&found, &[]).wait_both() {
            Ok(found) => found.ints,
            Err(error) => return self.refuse(error.to_string()),
        };
        let sources = sources.iter().zip(found);
        for (sources, _) in sources.filter(|(_, found)| *found != 0) {
            if !self.loader.check_contents(sources) {
                let reason = "the device has other values than the file".to_owned();
                let name = sources[0].weight.name;
                self.loader.invalid(name, InvalidReason::Unreadable(reason));
            }
        }
    }
}

/// What a device checks of a format, and the dtype of one that is dense.
fn encoding(format: WeightFormat) -> (Encoding, Option<FloatDType>) {
    match format {
        WeightFormat::Bf16 => (Encoding::Bf16, Some(FloatDType::BF16)),
        WeightFormat::F16 => (Encoding::F16, Some(FloatDType::F16)),
        WeightFormat::F32 => (Encoding::F32, Some(FloatDType::F32)),
        // All codes of FP4 are numbers: its scales are checked.
        WeightFormat::Fp4 | WeightFormat::Fp4ScaledF32 | WeightFormat::Nvfp4 => {
            (Encoding::E8m0, None)
        }
        _ => (Encoding::E4m3, None),
    }
}
