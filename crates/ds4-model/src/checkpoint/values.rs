//! The values of a checkpoint's tensors, checked.

use burn::tensor::TensorData;
use rayon::prelude::*;
use safetensors::Dtype;

use super::codec;
use super::directory::CheckpointTensor;
use super::error::InvalidReason;
use super::format::{FP4_BLOCK, PACKED, Packed, StoredLinear, WeightFormat};
use super::host::{HostLinear, LinearStack};
use super::loader::Loader;
use super::names::{DIVISOR, FACTOR};

/// Rows and columns of the FP8 blocks of V4.1.
const BLOCKS32: [usize; 2] = [32, 32];
const DENSE: &str = "BF16, F16 or F32";
const LINEAR: &str = "F8_E4M3, I8, U8 or F4 (FP4), BF16, F16 or F32";
/// Of FP8, and of FP4.
const SCALES: [&str; 2] = ["F8_E8M0, F32 or BF16", "F8_E8M0, U8, F8_E4M3, F32 or BF16"];

/// Bytes of the files that are decoded at a time, about, by all threads together. The memory of the
/// host may take their pages back before the next.
const BATCH_BYTES: usize = 256 << 20;

impl<'a> Loader<'a> {
    /// A tensor of BF16, F16 or F32, in its stored type, every element of which must be finite.
    pub fn dense(&mut self, name: &str, shape: &[usize]) -> Option<TensorData> {
        let source = self.locate_dense(name, shape)?;
        self.dense_data(source, shape)
    }

    /// Finds a tensor of BF16, F16 or F32, and checks its shape.
    pub(super) fn locate_dense(&mut self, name: &str, shape: &[usize]) -> Option<StoredLinear<'a>> {
        let tensor = self.find(name, shape)?;
        self.count(&tensor);
        let Some(format) = WeightFormat::of_dense(tensor.dtype) else {
            self.invalid_dtype(&tensor, DENSE);
            return None;
        };
        let fits = self.check_shape(&tensor, shape);
        fits.then(|| StoredLinear::dense(format, tensor))
    }

    pub(super) fn dense_data(
        &mut self,
        source: StoredLinear<'a>,
        shape: &[usize],
    ) -> Option<TensorData> {
        let elements = shape.iter().product();
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
        let dense = WeightFormat::of_dense(weight.dtype);
        let of_codes = |(_, codes, ..): &&Packed| codes.contains(&weight.dtype);
        let mut formats = PACKED.iter().filter(of_codes);
        let usual = formats.clone().next();
        let stored = match weight.dtype {
            Dtype::I8 | Dtype::U8 => [out, inp.div_ceil(2)],
            // A row begins with a whole byte.
            Dtype::F4 => [out, inp.saturating_add(inp % 2)],
            _ => [out, inp],
        };
        let fits = (dense.is_some() || usual.is_some()) && self.check_shape(&weight, &stored);
        if let Some(format) = dense {
            return fits.then_some(StoredLinear::dense(format, weight));
        }
        let Some(usual) = usual else {
            self.invalid_dtype(&weight, LINEAR);
            return None;
        };

        let name = format!("{prefix}.scale");
        let kind = self.checkpoint().tensor(&name).map(|scale| scale.dtype);
        let of_kind = |(_, _, scales, _): &&Packed| kind.is_some_and(|kind| scales.contains(&kind));
        let found = formats.find(of_kind);
        let &(format, .., block) = found.unwrap_or(usual);
        let blocks = [out.div_ceil(block[0]), inp.div_ceil(block[1])];
        let scale = self.find(&name, &blocks)?;
        if found.is_none() {
            self.invalid_dtype(&scale, SCALES[usize::from(block[0] == 1)]);
            return None;
        }
        let has_blocks32 = self.checkpoint().config().weight_block == BLOCKS32[0];
        let whole = match *scale.shape {
            _ if block[0] == 1 || scale.shape == blocks => None,
            [rows] | [rows, 1] if rows == out && out > 1 => Some([1, inp]),
            [rows, blocks] if [rows, blocks] == [out, inp.div_ceil(FP4_BLOCK)] => {
                Some([1, FP4_BLOCK])
            }
            [] | [1] => Some([out, inp]),
            [rows, blocks]
                if has_blocks32 && [rows, blocks] == [out, inp].map(|n| n.div_ceil(32)) =>
            {
                Some(BLOCKS32)
            }
            _ => None,
        };
        let mut source = StoredLinear::dense(format, weight);
        (source.scale, source.block) = (Some(scale), whole.unwrap_or(block));
        if whole.is_some() {
            source.format = match whole == Some(BLOCKS32) {
                true => WeightFormat::Fp8Blocks32,
                false => WeightFormat::Fp8Rows,
            };
        }
        let mut fits = (whole.is_some() || self.check_shape(&scale, &blocks)) && fits;
        if format == WeightFormat::Nvfp4 {
            let names = [DIVISOR, FACTOR].map(|end| format!("{prefix}{end}"));
            let name = names.iter().find(|name| self.contains(name));
            let global = self.find(name.unwrap_or(&names[1]), &[])?;
            if global.dtype != Dtype::F32 {
                self.invalid_dtype(&global, "F32");
                return None;
            }
            fits &= global.bytes.len() == 4 || self.check_shape(&global, &[]);
            source.global = Some(global);
        }
        fits.then_some(source)
    }

    /// Records values, codes and scales that are not finite, and says whether there are any.
    pub(super) fn check_contents(&mut self, sources: &[StoredLinear<'a>]) -> bool {
        let found: Vec<_> = sources.par_iter().map(bad_contents).collect();
        let mut any = false;
        for (source, [bad, bad_scales]) in sources.iter().zip(found) {
            let global = source.global.filter(|_| !source.factor().is_finite());
            any |= bad.is_some() || bad_scales.is_some() || global.is_some();
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
            if let Some(global) = global {
                let reason = InvalidReason::NonFiniteScales { count: 1, first: 0 };
                self.invalid(global.name, reason);
            }
        }
        any
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
            let name = first.weight.name;
            let prefix = name.strip_suffix(".weight").unwrap_or(name);
            let held = self.checkpoint().held(prefix, first);
            stack = LinearStack::zeros(held, sources.len(), shape);
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
            for tensor in sources.iter().flat_map(StoredLinear::tensors) {
                self.count(&tensor);
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
        // All codes are numbers.
        WeightFormat::Fp4 | WeightFormat::Fp4ScaledF32 | WeightFormat::Nvfp4 => None,
        _ => codec::count_bad(bytes.iter(), |&code| codec::is_e4m3_nan(code)),
    };
    let bad_scales = source.scale.and_then(|scale| match scale.dtype {
        Dtype::F32 => codec::not_finite_f32(scale.bytes),
        Dtype::BF16 => codec::not_finite_bf16(scale.bytes),
        Dtype::F8_E4M3 => codec::count_bad(scale.bytes.iter(), |&code| codec::is_e4m3_nan(code)),
        _ => codec::count_bad(scale.bytes.iter(), |&code| codec::is_e8m0_nan(code)),
    });
    [bad, bad_scales]
}
