//! Hands out a checkpoint's weights and collects what is wrong with them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::directory::{Checkpoint, CheckpointTensor};
use super::error::{
    CheckpointError, InvalidReason, InvalidTensor, MisShapedTensor, MissingTensor,
    UnexpectedTensor, WeightErrors,
};
use super::progress::LoadProgress;

/// Reads the weights of a model from a [`Checkpoint`], one by one.
///
/// A method that cannot return its weight returns `None` and records why. Once anything is
/// recorded, every method returns `None`, since the weights are of no more use, but goes on
/// checking. [`finish`](Self::finish) returns one error with everything. Its lists are complete
/// only if everything was asked for: a module asks for all its weights first and unwraps the
/// options afterwards, and a list of modules is read with [`load_all`](super::load_all).
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
    pub(super) headers_only: bool,
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

impl<'a> Branch<'a> {
    pub(super) fn loader(self) -> Loader<'a> {
        Loader {
            skipped: self.skipped,
            reported_to: Some(self.reported_to),
            spoiled: self.spoiled,
            ..Loader::quiet(self.checkpoint)
        }
    }
}

impl<'a> Loader<'a> {
    /// A loader that reports no progress.
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let bytes_total = checkpoint
            .tensors()
            .filter(|tensor| checkpoint.skipped(tensor.name).is_none())
            .map(|tensor| tensor.bytes.len() as u64)
            .sum();
        Self {
            bytes_total,
            ..Self::quiet(checkpoint)
        }
    }

    /// A loader that knows nothing of progress.
    pub(super) fn quiet(checkpoint: &'a Checkpoint) -> Self {
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
            bytes_total: 0,
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
        self.checkpoint.skipped(name).is_some()
            || self.skipped.iter().any(|prefix| name.starts_with(prefix))
    }

    /// Finds the tensor, which then counts as asked for, or records that it is missing or empty.
    /// Shapes of tensors with elements can be multiplied out without overflow: reading the header
    /// has checked that.
    pub(super) fn find(&mut self, name: &str, expected: &[usize]) -> Option<CheckpointTensor<'a>> {
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

    pub(super) fn invalid_dtype(&mut self, tensor: &CheckpointTensor<'a>, expected: &'static str) {
        let actual = tensor.dtype;
        self.invalid(tensor.name, InvalidReason::Dtype { actual, expected });
    }

    pub(super) fn check_shape(
        &mut self,
        tensor: &CheckpointTensor<'a>,
        expected: &[usize],
    ) -> bool {
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
}
