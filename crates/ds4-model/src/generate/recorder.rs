//! Work of the same launches again and again, a step or a round, which is recorded once and replayed where the device can.

use std::cell::Cell;

use burn::tensor::Device;
use burn_ds4_ops::device::forget_scratch;

use super::error::GenerateError;
use super::target::device_error;
use crate::graph::{Preparation, Recording, Refusal};

/// Runs that a recording must be of use for, as many as it costs twice over.
pub(super) const WORTH_RECORDING: usize = 16;
/// Runs before a recording. The first copies what it writes, of which the state before is kept; from the second on, each is like all
/// the others.
pub(super) const WARM_UPS: usize = 2;

thread_local! {
    /// How often this thread has forgotten what operators keep between launches.
    static FORGOTTEN: Cell<u64> = const { Cell::new(0) };
}

/// What operators keep between launches is part of every recording of the thread, whose replays would write to memory that is others' by
/// then.
fn forget_what_is_kept() {
    FORGOTTEN.set(FORGOTTEN.get() + 1);
    forget_scratch();
}

/// How an attempt to record ended, after the runs before it.
pub(super) enum Outcome<R> {
    /// Recorded, and replayed once, which is the run after those.
    Recorded(Recording<R>),
    /// One of them failed.
    Broken(GenerateError),
    /// Nothing can be recorded. What was run stands.
    Refused(Refusal),
    /// What the work has written so far counts as failed, in those runs as well.
    Spoiled(Refusal),
}

/// Runs work a few times, records it and replays it: what came of the runs that were launched, and of the recording.
///
/// # Safety
///
/// Every tensor that `work` reads or writes must be alive and in its place after it, and not be in use by another thread.
pub(super) unsafe fn record<C, T, R>(
    device: &Device,
    context: &mut C,
    launch: impl Fn(&mut C) -> Result<T, GenerateError>,
    work: impl FnOnce(&mut C) -> Result<R, GenerateError>,
) -> (Vec<T>, Outcome<R>) {
    let mut launched = Vec::with_capacity(WARM_UPS + 1);
    let preparation = match Preparation::new(device) {
        Ok(preparation) => preparation,
        Err(refusal) => return (launched, Outcome::Refused(refusal)),
    };
    for _ in 0..WARM_UPS {
        match launch(context) {
            Ok(result) => launched.push(result),
            Err(error) => return (launched, Outcome::Broken(error)),
        }
    }
    let window = match preparation.start() {
        Ok(window) => window,
        Err(refusal) => return (launched, Outcome::Refused(refusal)),
    };
    let results = work(context).map_err(|error| Refusal::Failed(error.to_string()));
    let recording = results.and_then(|results| window.seal(results));
    let replayed = recording.and_then(|recording| {
        // Safety: as the caller promises, and this is the thread that has recorded it.
        unsafe { recording.replay() }?;
        Ok(recording)
    });
    match replayed {
        Ok(recording) => (launched, Outcome::Recorded(recording)),
        Err(refusal) => {
            forget_what_is_kept();
            (launched, Outcome::Spoiled(refusal))
        }
    }
}

#[derive(Debug)]
struct Kept<R, E> {
    recording: Recording<R>,
    /// Of what it works on.
    epoch: E,
    /// [`FORGOTTEN`] when it was made.
    forgotten: u64,
}

/// The recording of whoever decodes, and what became of the attempts to make one.
#[derive(Debug)]
pub(super) struct Recorder<R, E> {
    recording: Option<Kept<R, E>>,
    /// What is recorded, in one word.
    work: &'static str,
    graphs: bool,
    refusal: Option<String>,
    replays: usize,
    /// Of a run whose earlier neighbours gave tokens in the same call.
    late: Option<GenerateError>,
}

impl<R, E: PartialEq> Recorder<R, E> {
    pub(super) fn new(work: &'static str, graphs: bool) -> Self {
        Self {
            recording: None,
            work,
            graphs,
            refusal: None,
            replays: 0,
            late: None,
        }
    }

    /// Whether a recording may be tried.
    pub(super) fn is_wanted(&self) -> bool {
        self.graphs
    }

    /// Why there are no recordings, though they were wanted and the device has them.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Runs that were replayed.
    pub(super) fn replays(&self) -> usize {
        self.replays
    }

    /// What the recording results in, if there is one.
    pub(super) fn results(&self) -> Option<&R> {
        let kept = self.recording.as_ref();
        kept.map(|kept| &kept.recording.results)
    }

    /// Drops the recording, with the memory that it holds on to.
    pub(super) fn forget(&mut self) {
        self.recording = None;
    }

    /// Keeps a recording that has been replayed once.
    pub(super) fn keep(&mut self, recording: Recording<R>, epoch: E) {
        self.recording = Some(Kept {
            recording,
            epoch,
            forgotten: FORGOTTEN.get(),
        });
        self.replays += 1;
    }

    /// Replays the recording; `false` if there is none of this epoch and thread, or another has failed since it was made.
    ///
    /// # Safety
    ///
    /// While the epoch is `epoch`, every tensor of the recorded work must be alive, in the same place and not in use by another thread.
    pub(super) unsafe fn replay(&mut self, epoch: &E) -> Result<bool, GenerateError> {
        let Some(kept) = &self.recording else {
            return Ok(false);
        };
        let recording = &kept.recording;
        let is_current = kept.epoch == *epoch && recording.is_of_this_thread();
        if !is_current || kept.forgotten != FORGOTTEN.get() {
            return Ok(false);
        }
        // Safety: as the caller promises, and this is the thread of the recording.
        unsafe { recording.replay() }.map_err(|refusal| device_error(refusal.reason()))?;
        self.replays += 1;
        Ok(true)
    }

    /// Tries no more, and says why, once.
    pub(super) fn refuse(&mut self, refusal: &Refusal) {
        self.graphs = false;
        if let Refusal::Failed(reason) = refusal {
            let work = self.work;
            log::warn!("decoding goes on without graphs, a {work} cannot be recorded: {reason}");
            self.refusal = Some(reason.clone());
        }
    }

    /// What came of several runs, of which `last` is one more. An error comes after what came before it, with the next call of
    /// [`late`](Self::late).
    pub(super) fn in_time<T>(
        &mut self,
        mut results: Vec<T>,
        last: Result<T, GenerateError>,
    ) -> Result<Vec<T>, GenerateError> {
        match last {
            Ok(last) => results.push(last),
            Err(error) if results.is_empty() => return Err(error),
            Err(error) => self.late = Some(error),
        }
        Ok(results)
    }

    /// Keeps an error for after what came before it.
    pub(super) fn defer(&mut self, error: GenerateError) {
        self.late = Some(error);
    }

    /// Whether an error waits for what came before it.
    pub(super) fn is_late(&self) -> bool {
        self.late.is_some()
    }

    /// The error that was not in time.
    pub(super) fn late(&mut self) -> Result<(), GenerateError> {
        self.late.take().map_or(Ok(()), Err)
    }

    /// Another text has nothing to do with what went wrong in the last.
    pub(super) fn forget_late(&mut self) {
        self.late = None;
    }
}

/// Where a device cannot tell what the work would only have read, the weights count as failed with what it would have written.
pub(super) fn spoiled(refusal: &Refusal, error: GenerateError) -> GenerateError {
    // What was launched with them counts as failed in turn, and other models share what operators keep between calls.
    forget_what_is_kept();
    let reason = refusal.reason();
    device_error(format!(
        "a step could not be recorded ({reason}), and now none can be launched either ({error}): the model has to be loaded again"
    ))
}
