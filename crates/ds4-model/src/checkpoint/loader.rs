//! Hands out a checkpoint's weights and collects what is wrong with them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use burn::tensor::TensorData;
use rayon::prelude::*;

use super::codec;
use super::host::{FP4_BLOCK, FP8_BLOCK, HostLinear, LinearStack, StoredLinear, WeightFormat};
use super::{
    Checkpoint, CheckpointError, CheckpointTensor, Dtype, InvalidReason, InvalidTensor,
    LoadProgress, MisShapedTensor, MissingTensor, UnexpectedTensor, WeightErrors, names,
};

const DENSE: &str = "BF16, F16 or F32";
const LINEAR: &str = "F8_E4M3, I8 (FP4), BF16, F16 or F32";

/// Bytes of the files that are decoded at a time, about, by all threads together. The memory of the
/// host may take their pages back before the next.
const BATCH_BYTES: usize = 256 << 20;

/// Reads the weights of a model from a [`Checkpoint`], one by one.
///
/// A method that cannot return its weight returns `None` and records why. Once anything is
/// recorded, every method returns `None`, since the weights are of no more use, but goes on
/// checking. [`finish`](Self::finish) returns one error with everything. Its lists are complete
/// only if everything was asked for: a module asks for all its weights first and unwraps the
/// options afterwards, and a list of modules is read with [`load_all`].
///
/// ```no_run
/// # use ds4_model::checkpoint::{Checkpoint, CheckpointError, HostLinear, Loader};
/// struct Mlp {
///     up: HostLinear,
///     down: HostLinear,
/// }
///
/// fn mlp(loader: &mut Loader) -> Option<Mlp> {
///     let up = loader.linear("mlp.up", 256, 64);
///     let down = loader.linear("mlp.down", 64, 256);
///     Some(Mlp { up: up?, down: down? })
/// }
///
/// let checkpoint = Checkpoint::open("model".as_ref())?;
/// let mut loader = Loader::new(&checkpoint);
/// let mlp = mlp(&mut loader);
/// let mlp = loader.finish(mlp)?;
/// # Ok::<(), CheckpointError>(())
/// ```
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    asked: HashSet<&'a str>,
    counted: HashSet<&'a str>,
    skipped: Vec<String>,
    errors: WeightErrors,
    progress: Option<Box<dyn LoadProgress + 'a>>,
    /// Who is told of tensors that are read, in place of `progress`.
    reported_to: Option<Sender<CheckpointTensor<'a>>>,
    bytes_read: u64,
    bytes_total: u64,
    /// Whether the weights are of no use, those of all threads together.
    spoiled: Arc<AtomicBool>,
    /// Whether to look at names, types and shapes alone, and to return no weight.
    headers_only: bool,
}

/// What a loader on another thread is made of.
#[derive(Clone)]
pub(super) struct Branch<'a> {
    checkpoint: &'a Checkpoint,
    skipped: Vec<String>,
    reported_to: Sender<CheckpointTensor<'a>>,
    spoiled: Arc<AtomicBool>,
}

/// What a loader has found out.
pub(super) struct Findings<'a> {
    asked: HashSet<&'a str>,
    errors: WeightErrors,
}

/// All items, or `None` if one is missing. Unlike `collect`, it takes every item before it returns.
///
/// # Example
///
/// ```
/// use ds4_model::checkpoint::load_all;
///
/// let mut asked = 0;
/// let mut ask = |found| {
///     asked += 1;
///     found
/// };
/// let items = load_all([None, Some(2), Some(3)].into_iter().map(&mut ask));
/// assert_eq!(items, None);
/// assert_eq!(asked, 3);
/// ```
pub fn load_all<T>(items: impl IntoIterator<Item = Option<T>>) -> Option<Vec<T>> {
    let items: Vec<Option<T>> = items.into_iter().collect();
    items.into_iter().collect()
}

impl<'a> Branch<'a> {
    pub(super) fn loader(self) -> Loader<'a> {
        Loader {
            skipped: self.skipped,
            reported_to: Some(self.reported_to),
            spoiled: self.spoiled,
            ..Loader::new(self.checkpoint)
        }
    }
}

impl<'a> Loader<'a> {
    /// A loader that reports no progress.
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let bytes_total = checkpoint
            .tensors()
            .filter(|tensor| !names::is_ignored(tensor.name))
            .map(|tensor| tensor.bytes.len() as u64)
            .sum();
        Self {
            checkpoint,
            asked: HashSet::new(),
            counted: HashSet::new(),
            skipped: Vec::new(),
            errors: WeightErrors {
                dir: checkpoint.dir().to_path_buf(),
                ..WeightErrors::default()
            },
            progress: None,
            reported_to: None,
            bytes_read: 0,
            bytes_total,
            spoiled: Arc::default(),
            headers_only: false,
        }
    }

    /// A loader that checks names, types and shapes, and returns no weight.
    pub(super) fn of_headers(checkpoint: &'a Checkpoint) -> Self {
        Self {
            headers_only: true,
            ..Self::new(checkpoint)
        }
    }

    /// What loaders on other threads are made of, and what they tell of the tensors that they have
    /// read.
    pub(super) fn branch(&self) -> (Branch<'a>, Receiver<CheckpointTensor<'a>>) {
        let (reported_to, reports) = channel();
        let branch = Branch {
            checkpoint: self.checkpoint,
            skipped: self.skipped.clone(),
            reported_to,
            spoiled: self.spoiled.clone(),
        };
        (branch, reports)
    }

    /// Takes what a loader on another thread has found out, which others may have asked for the
    /// same.
    pub(super) fn merge(&mut self, findings: Findings<'a>, is_repeated: bool) {
        self.asked.extend(findings.asked);
        self.errors.extend(findings.errors, is_repeated);
    }

    /// Ends a loader on another thread.
    pub(super) fn into_findings(self) -> Findings<'a> {
        Findings {
            asked: self.asked,
            errors: self.errors,
        }
    }

    /// Says that the weights are of no use any more.
    pub(super) fn spoil(&self) {
        self.spoiled.store(true, Ordering::Relaxed);
    }

    /// Reports the bytes read so far to `progress`, for example a closure.
    pub fn with_progress(mut self, progress: impl LoadProgress + 'a) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Declares that tensors whose names begin with `prefix` are left out on purpose, such as those
    /// of an MTP layer that is not used.
    pub fn skip_prefix(&mut self, prefix: &str) {
        let checkpoint = self.checkpoint;
        let skipped: u64 = checkpoint
            .tensors()
            .filter(|tensor| tensor.name.starts_with(prefix) && !self.is_left_out(tensor.name))
            .map(|tensor| tensor.bytes.len() as u64)
            .sum();
        self.bytes_total -= skipped;
        self.skipped.push(prefix.to_string());
    }

    /// Whether the checkpoint has that tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.tensor(name).is_some()
    }

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

    /// Returns `value`, if it is there, nothing was wrong and every tensor was asked for.
    ///
    /// # Errors
    /// [`CheckpointError::Weights`] with all missing, unexpected, mis-shaped and invalid tensors.
    /// Its lists are empty only where `value` is `None` for a reason of the caller's own.
    pub fn finish<T>(mut self, value: Option<T>) -> Result<T, CheckpointError> {
        if let Some(mut progress) = self.progress.take() {
            progress.finish();
        }
        for tensor in self.checkpoint.tensors() {
            if !self.asked.contains(tensor.name) && !self.is_left_out(tensor.name) {
                self.errors.unexpected.push(UnexpectedTensor {
                    name: tensor.name.to_string(),
                    dtype: tensor.dtype,
                    shape: tensor.shape.to_vec(),
                });
            }
        }
        self.errors.sort();
        match value {
            Some(value) if self.errors.is_empty() => Ok(value),
            _ => Err(CheckpointError::Weights(Box::new(self.errors))),
        }
    }

    /// Whether the weights are of no use any more.
    pub(super) fn failed(&self) -> bool {
        if !self.errors.is_empty() {
            self.spoil();
        }
        self.spoiled.load(Ordering::Relaxed)
    }

    fn is_left_out(&self, name: &str) -> bool {
        names::is_ignored(name) || self.skipped.iter().any(|prefix| name.starts_with(prefix))
    }

    /// Finds the tensor, which then counts as asked for, or records that it is missing or empty.
    /// Shapes of tensors with elements can be multiplied out without overflow: reading the header
    /// has checked that.
    fn find(&mut self, name: &str, expected: &[usize]) -> Option<CheckpointTensor<'a>> {
        let Some(tensor) = self.checkpoint.tensor(name) else {
            self.errors.missing.push(MissingTensor {
                name: name.to_string(),
                expected: expected.to_vec(),
            });
            return None;
        };
        self.asked.insert(tensor.name);
        if tensor.bytes.is_empty() {
            self.invalid(tensor.name, InvalidReason::Empty);
            return None;
        }
        Some(tensor)
    }

    /// Reports the tensor as read; one that is used twice counts once. The memory of the host may
    /// take its pages back.
    pub(super) fn count(&mut self, tensor: &CheckpointTensor<'a>) {
        if !self.headers_only {
            self.checkpoint.release(tensor.name);
        }
        if let Some(reported_to) = &self.reported_to {
            // Nobody listens any more where the load was given up.
            let _ = reported_to.send(*tensor);
            return;
        }
        if !self.counted.insert(tensor.name) || self.is_left_out(tensor.name) {
            return;
        }
        self.bytes_read += tensor.bytes.len() as u64;
        if let Some(progress) = &mut self.progress {
            progress.update(self.bytes_read, self.bytes_total);
        }
    }

    /// Records tensors that are missing and too many to name.
    pub(super) fn count_missing(&mut self, more: usize) {
        self.errors.more_missing = self.errors.more_missing.saturating_add(more);
    }

    pub(super) fn invalid(&mut self, name: &str, reason: InvalidReason) {
        self.errors.invalid.push(InvalidTensor {
            name: name.to_string(),
            reason,
        });
    }

    fn invalid_dtype(&mut self, tensor: &CheckpointTensor<'a>, expected: &'static str) {
        let actual = tensor.dtype;
        self.invalid(tensor.name, InvalidReason::Dtype { actual, expected });
    }

    fn check_shape(&mut self, tensor: &CheckpointTensor<'a>, expected: &[usize]) -> bool {
        let fits = tensor.shape == expected;
        if !fits {
            self.errors.mis_shaped.push(MisShapedTensor {
                name: tensor.name.to_string(),
                expected: expected.to_vec(),
                actual: tensor.shape.to_vec(),
            });
        }
        fits
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
