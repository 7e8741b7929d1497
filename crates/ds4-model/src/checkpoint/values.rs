//! The values of a checkpoint's tensors, checked.

use burn::tensor::TensorData;
use rayon::prelude::*;
use safetensors::Dtype;

use super::codec;
use super::directory::CheckpointTensor;
use super::error::InvalidReason;
use super::host::{FP4_BLOCK, FP8_BLOCK, HostLinear, LinearStack, StoredLinear, WeightFormat};
use super::loader::Loader;

const DENSE: &str = "BF16, F16 or F32";
const LINEAR: &str = "F8_E4M3, I8 (FP4), BF16, F16 or F32";

/// Bytes of the files that are decoded at a time, about, by all threads together. The memory of the
/// host may take their pages back before the next.
const BATCH_BYTES: usize = 256 << 20;

impl<'a> Loader<'a> {
    /// A tensor of BF16, F16 or F32, in its stored type, every element of which must be finite.
    pub fn dense(&mut self, name: &str, shape: &[usize]) -> Option<TensorData> {
        let tensor = self.find(name, shape)?;
        self.count(&tensor);
        let Some(format) = WeightFormat::of_dense(tensor.dtype) else {
            self.invalid_dtype(&tensor, DENSE);
            return None;
        };
        self.check_shape(&tensor, shape).then_some(())?;
        let elements = shape.iter().product();
        let source = StoredLinear {
            format,
            weight: tensor,
            scale: None,
        };
        match self
            .gather(&[source], [1, elements])?
            .into_linear([1, elements])
        {
            HostLinear::Dense(data) => {
                let (bytes, _, dtype) = data.into_parts();
                TensorData::try_from_bytes(bytes, shape, dtype).ok()
            }
            HostLinear::Fp8 { .. } | HostLinear::Fp4 { .. } => None,
        }
    }

    /// A tensor of I64 or I32, every element of which must be in `0..upper_bound`.
    pub fn ids(&mut self, name: &str, shape: &[usize], upper_bound: usize) -> Option<Vec<i32>> {
        let tensor = self.find(name, shape)?;
        let bytes = tensor.bytes;
        let ids = match tensor.dtype {
            Dtype::I64 => {
                let ids = codec::elements(bytes, i64::from_le_bytes);
                self.checked_ids(&tensor, shape, upper_bound, ids)
            }
            Dtype::I32 => {
                let ids = codec::elements(bytes, |id| i64::from(i32::from_le_bytes(id)));
                self.checked_ids(&tensor, shape, upper_bound, ids)
            }
            _ => {
                self.invalid_dtype(&tensor, "I64 or I32");
                None
            }
        };
        self.count(&tensor);
        ids
    }

    fn checked_ids(
        &mut self,
        tensor: &CheckpointTensor<'a>,
        shape: &[usize],
        upper_bound: usize,
        ids: impl ExactSizeIterator<Item = i64> + Clone,
    ) -> Option<Vec<i32>> {
        let fits = self.check_shape(tensor, shape);
        if self.headers_only {
            return None;
        }
        let id_of = |id: i64| {
            i32::try_from(id)
                .ok()
                .filter(|&id| usize::try_from(id).is_ok_and(|id| id < upper_bound))
        };
        let bad = codec::count_bad(ids.clone(), |id| id_of(id).is_none());
        if let Some((count, first)) = bad {
            let value = ids.clone().nth(first).unwrap_or_default();
            let reason = InvalidReason::Ids {
                count,
                first,
                value,
                upper_bound,
            };
            self.invalid(tensor.name, reason);
        }
        if !fits || self.failed() {
            return None;
        }
        let Ok(mut values) = codec::reserved(ids.len()) else {
            self.invalid(tensor.name, InvalidReason::OutOfMemory);
            return None;
        };
        values.extend(ids.filter_map(id_of));
        Some(values)
    }

    /// A linear weight: `{prefix}.weight`, and `{prefix}.scale` where its type needs scales.
    pub fn linear(&mut self, prefix: &str, out: usize, inp: usize) -> Option<HostLinear> {
        let source = self.locate(prefix, out, inp)?;
        let stack = self.gather(&[source], [out, inp])?;
        Some(stack.into_linear([out, inp]))
    }

    /// Finds the tensors of a linear weight, and checks their types and shapes.
    pub(super) fn locate(
        &mut self,
        prefix: &str,
        out: usize,
        inp: usize,
    ) -> Option<StoredLinear<'a>> {
        let weight = self.find(&format!("{prefix}.weight"), &[out, inp])?;
        let (stored, scales, scale_types) = match weight.dtype {
            Dtype::F8_E4M3 => (
                [out, inp],
                Some([out.div_ceil(FP8_BLOCK), inp.div_ceil(FP8_BLOCK)]),
                "F8_E8M0 or F32",
            ),
            Dtype::I8 => (
                [out, inp.div_ceil(2)],
                Some([out, inp.div_ceil(FP4_BLOCK)]),
                "F8_E8M0",
            ),
            _ => ([out, inp], None, DENSE),
        };
        let Some(scales) = scales else {
            let Some(format) = WeightFormat::of_dense(weight.dtype) else {
                self.invalid_dtype(&weight, LINEAR);
                return None;
            };
            return self.check_shape(&weight, &stored).then_some(StoredLinear {
                format,
                weight,
                scale: None,
            });
        };

        let fits = self.check_shape(&weight, &stored);
        let scale = self.find(&format!("{prefix}.scale"), &scales)?;
        let format = match (weight.dtype, scale.dtype) {
            (Dtype::F8_E4M3, Dtype::F8_E8M0) => WeightFormat::Fp8ScaledE8m0,
            (Dtype::F8_E4M3, Dtype::F32) => WeightFormat::Fp8ScaledF32,
            (Dtype::I8, Dtype::F8_E8M0) => WeightFormat::Fp4,
            _ => {
                self.invalid_dtype(&scale, scale_types);
                return None;
            }
        };
        let source = StoredLinear {
            format,
            weight,
            scale: Some(scale),
        };
        (self.check_shape(&scale, &scales) && fits).then_some(source)
    }

    /// Records values, codes and scales that are not finite.
    fn check_contents(&mut self, sources: &[StoredLinear<'a>]) {
        let found: Vec<_> = sources.par_iter().map(bad_contents).collect();
        for (source, [bad, bad_scales]) in sources.iter().zip(found) {
            if let Some((count, first)) = bad {
                let reason = match source.weight.dtype {
                    Dtype::F8_E4M3 => InvalidReason::NanCodes { count, first },
                    _ => InvalidReason::NonFinite { count, first },
                };
                self.invalid(source.weight.name, reason);
            }
            if let (Some(scale), Some((count, first))) = (source.scale, bad_scales) {
                self.invalid(scale.name, InvalidReason::NonFiniteScales { count, first });
            }
        }
    }

    /// Checks the contents of the sources, which have one format and shape, and stacks them if
    /// nothing was wrong.
    pub(super) fn gather(
        &mut self,
        sources: &[StoredLinear<'a>],
        shape: [usize; 2],
    ) -> Option<LinearStack> {
        if self.headers_only {
            return None;
        }
        let Some(first) = sources.first() else {
            return (!self.failed()).then(|| LinearStack::F32(Vec::new()));
        };
        let mut stack = None;
        if !self.failed() {
            stack = LinearStack::zeros(first.format, sources.len(), shape);
            if stack.is_none() {
                self.invalid(first.weight.name, InvalidReason::OutOfMemory);
            }
        }
        let batch = (BATCH_BYTES / first.weight.bytes.len().max(1)).max(1);
        for (index, sources) in sources.chunks(batch).enumerate() {
            self.check_contents(sources);
            if self.failed() {
                stack = None;
            }
            if let Some(stack) = &mut stack {
                stack.fill(index * batch, sources, shape);
            }
            for source in sources {
                self.count(&source.weight);
                if let Some(scale) = &source.scale {
                    self.count(scale);
                }
            }
        }
        stack
    }
}

/// The numbers of values or codes that are not finite, and of such scales, each with the first.
fn bad_contents(source: &StoredLinear<'_>) -> [Option<(usize, usize)>; 2] {
    let bytes = source.weight.bytes;
    let bad = match source.format {
        WeightFormat::F32 => codec::not_finite_f32(bytes),
        WeightFormat::Bf16 => codec::not_finite_bf16(bytes),
        WeightFormat::F16 => codec::not_finite_f16(bytes),
        WeightFormat::Fp8ScaledE8m0 | WeightFormat::Fp8ScaledF32 => {
            codec::count_bad(bytes.iter(), |&code| codec::is_e4m3_nan(code))
        }
        // All codes are numbers.
        WeightFormat::Fp4 => None,
    };
    let bad_scales = source.scale.and_then(|scale| match scale.dtype {
        Dtype::F32 => codec::not_finite_f32(scale.bytes),
        _ => codec::count_bad(scale.bytes.iter(), |&code| codec::is_e8m0_nan(code)),
    });
    [bad, bad_scales]
}
