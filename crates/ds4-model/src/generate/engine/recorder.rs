//! Steps with the same launches, which are recorded once and replayed where the device can.

use std::cell::Cell;
use std::thread::{self, ThreadId};

use burn::tensor::Device;
use burn_ds4_ops::scratch;

use crate::generate::error::{GenerateError, device_error};
use crate::graph::{Preparation, Recording, Refusal};

/// Runs that a recording must be of use for: as many as it costs twice over.
pub(super) const WORTH_RECORDING: usize = 16;
/// Runs before a recording, which leave the memory behind that it takes.
pub(super) const WARM_UPS: usize = 2;
/// Kinds of steps of which a group of lanes keeps recordings: those that were replayed last. Each
/// recording holds the memory that a step works with.
pub(super) const MOST_KINDS: usize = 4;

thread_local! {
    /// How often this thread has dropped what operators keep between launches.
    static FORGOTTEN: Cell<u64> = const { Cell::new(0) };
    /// What [`launches`] counts.
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// Notes that this thread gives devices work other than a replay.
pub(super) fn note_launch() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// The current thread, and how often it has given devices work other than a replay.
pub(super) fn launches() -> (ThreadId, u64) {
    (thread::current().id(), LAUNCHES.get())
}

/// What operators keep between launches is part of every recording of the thread. After it is
/// dropped, replays would write to memory that is in use by others.
pub(super) fn forget_what_is_kept() {
    FORGOTTEN.set(FORGOTTEN.get() + 1);
    scratch::forget();
}

/// How an attempt to record ended, after the runs before it.
pub(super) enum Outcome<R> {
    /// Recorded, a part for each device, and replayed once: the run after those.
    Recorded(Vec<Recording<R>>),
    /// One of them failed.
    Broken(GenerateError),
    /// Nothing can be recorded. The runs remain valid.
    Refused(Refusal),
    /// What the work has written so far counts as failed, in those runs as well.
    Spoiled(Refusal),
}

/// Work that is recorded: a part for each of some devices, which are done one after the other.
pub(super) trait Recordable {
    /// What a part results in.
    type Results;

    /// Whether parts wait for each other while they run, so that none may be waited for before all
    /// are launched.
    fn is_joint(&self) -> bool;

    /// Launches all parts.
    fn launch(&mut self) -> Result<(), GenerateError>;

    /// Does the work of a part, so that it can be recorded.
    fn work(&mut self, part: usize) -> Result<Self::Results, GenerateError>;

    /// Does what follows on the replay of a part.
    fn follow(&mut self, part: usize, results: &Self::Results);
}

/// Launches work a few times, records it and replays it, and returns the outcome of the recording.
///
/// # Safety
///
/// Every tensor that the work reads or writes must be alive and in its place after it, and not be
/// in use by another thread.
pub(super) unsafe fn record<W: Recordable>(
    devices: &[Device],
    work: &mut W,
) -> Outcome<W::Results> {
    let preparations: Result<Vec<_>, _> = devices.iter().map(Preparation::new).collect();
    let preparations = match preparations {
        Ok(preparations) => preparations,
        Err(refusal) => return Outcome::Refused(refusal),
    };
    for _ in 0..WARM_UPS {
        if let Err(error) = work.launch() {
            return Outcome::Broken(error);
        }
    }
    let mut recordings = Vec::new();
    for (part, preparation) in preparations.into_iter().enumerate() {
        // No device may do anything while another one records. What has failed is told by whoever
        // reads it.
        let _: Result<Vec<_>, _> = devices.iter().map(Device::sync).collect();
        let capture = match preparation.start() {
            Ok(capture) => capture,
            Err(refusal) if part == 0 => return Outcome::Refused(refusal),
            Err(refusal) => return spoiled_by(refusal),
        };
        let results = work.work(part);
        let results = results.map_err(|error| Refusal::Failed(error.to_string()));
        match results.and_then(|results| capture.end(results)) {
            Ok(recording) => recordings.push(recording),
            Err(refusal) => return spoiled_by(refusal),
        }
        // Parts that wait for others are replayed when all are recorded.
        let replayed = match work.is_joint() {
            true if part + 1 < devices.len() => 0..0,
            true => 0..devices.len(),
            false => part..part + 1,
        };
        for part in replayed {
            let recording: &Recording<_> = &recordings[part];
            // SAFETY: the caller guarantees it, and this is the thread that has recorded it.
            if let Err(refusal) = unsafe { recording.replay() } {
                return spoiled_by(refusal);
            }
            work.follow(part, &recording.results);
        }
    }
    Outcome::Recorded(recordings)
}

fn spoiled_by<R>(refusal: Refusal) -> Outcome<R> {
    forget_what_is_kept();
    Outcome::Spoiled(refusal)
}

#[derive(Debug)]
struct KeptRecording<R, K> {
    /// A part for each device, in the order of a step.
    recordings: Vec<Recording<R>>,
    /// What its step does.
    kind: K,
    /// Drafts that it verifies.
    drafts: usize,
    /// Epoch of what it works on.
    epoch: Vec<u64>,
    /// [`FORGOTTEN`] when it was made.
    forgotten: u64,
    /// Bytes by which the memory of each device grew when it was made, where they tell.
    bytes: Option<Vec<u64>>,
}

impl<R, K> KeptRecording<R, K> {
    /// Whether it is of this epoch and thread, and none has failed since it was made.
    fn is_current(&self, epoch: &[u64]) -> bool {
        let is_own = self.recordings.iter().all(Recording::is_of_this_thread);
        is_own && self.epoch == epoch && self.forgotten == FORGOTTEN.get()
    }
}

/// The recordings of a group of lanes, by the kind of their step and the drafts that they verify,
/// and the outcome of the attempts to make them.
#[derive(Debug)]
pub(super) struct Recorder<R, K> {
    /// Those that were replayed last come last.
    kept: Vec<KeptRecording<R, K>>,
    /// Whether the last step was a replay: of the last one.
    is_newest: bool,
    graphs: bool,
    refusal: Option<String>,
    replays: usize,
}

impl<R, K: Copy + PartialEq> Recorder<R, K> {
    pub(super) fn new(graphs: bool) -> Self {
        Self {
            kept: Vec::new(),
            is_newest: false,
            graphs,
            refusal: None,
            replays: 0,
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

    /// Recordings that there are.
    pub(super) fn count(&self) -> usize {
        self.kept.len()
    }

    /// Bytes by which the memory of the devices grew for them, where they tell.
    pub(super) fn bytes(&self) -> Option<u64> {
        let all = self.kept.iter().map(|kept| kept.bytes.as_ref());
        all.map(|bytes| bytes.map(|bytes| bytes.iter().sum::<u64>()))
            .sum()
    }

    /// What the last part of the last step results in, if that was a replay.
    pub(super) fn results(&self) -> Option<&R> {
        let newest = self.kept.last().filter(|_| self.is_newest);
        newest?.recordings.last().map(|last| &last.results)
    }

    /// Notes that a step is launched. What cannot be replayed any more is dropped.
    pub(super) fn note_launch(&mut self, epoch: &[u64]) {
        self.keep_current(epoch);
        self.is_newest = false;
    }

    /// Drops what cannot be replayed any more.
    pub(super) fn keep_current(&mut self, epoch: &[u64]) {
        let newest = self.kept.last();
        self.is_newest &= newest.is_some_and(|newest| newest.is_current(epoch));
        self.kept.retain(|kept| kept.is_current(epoch));
    }

    /// Bytes by which the memory of each device grew for recordings of other kinds than `kind`, of
    /// all without one, where known.
    pub(super) fn bytes_of_others(&self, kind: Option<K>) -> Vec<u64> {
        let others = self.kept.iter().filter(|kept| Some(kept.kind) != kind);
        let known: Vec<&Vec<u64>> = others.filter_map(|kept| kept.bytes.as_ref()).collect();
        let devices = known.first().map_or(0, |bytes| bytes.len());
        let sum = |device: usize| known.iter().map(|bytes| bytes[device]).sum();
        (0..devices).map(sum).collect()
    }

    /// Drops the recordings of all but so many kinds, besides those of `kind`. The others are those
    /// that were replayed last.
    pub(super) fn keep_kinds(&mut self, most: usize, kind: K) {
        let mut kinds = Vec::new();
        for own in self.kept.iter().rev().map(|kept| kept.kind) {
            if own != kind && !kinds.contains(&own) && kinds.len() < most {
                kinds.push(own);
            }
        }
        let is_kept = |own: &K| *own == kind || kinds.contains(own);
        self.is_newest &= self.kept.last().is_some_and(|last| is_kept(&last.kind));
        self.kept.retain(|kept| is_kept(&kept.kind));
    }

    /// Drops the recordings, with the memory that they hold.
    pub(super) fn forget(&mut self) {
        self.kept.clear();
        self.is_newest = false;
    }

    /// Keeps a recording of a step of this kind that verifies `drafts` drafts, which has been
    /// replayed once. The memory of each device grew by so many bytes for it.
    pub(super) fn keep(
        &mut self,
        recordings: Vec<Recording<R>>,
        (kind, drafts): (K, usize),
        epoch: Vec<u64>,
        bytes: Option<Vec<u64>>,
    ) {
        self.is_newest = true;
        self.kept.push(KeptRecording {
            recordings,
            kind,
            drafts,
            epoch,
            forgotten: FORGOTTEN.get(),
            bytes,
        });
        self.replays += 1;
    }

    /// The fewest drafts, at least `drafts`, that a recording of a step of this kind verifies.
    pub(super) fn fitting(&self, kind: K, drafts: usize) -> Option<usize> {
        let own = self.kept.iter().filter(|kept| kept.kind == kind);
        let recorded = own.map(|kept| kept.drafts);
        recorded.filter(|recorded| *recorded >= drafts).min()
    }

    /// Replays the recording of a step of this kind that verifies `drafts` drafts, and after each
    /// part what `follow` does; `false` if there is none of this epoch and thread, or another has
    /// failed since it was made.
    ///
    /// # Safety
    ///
    /// While the epoch is `epoch`, every tensor of the recorded work must be alive, in the same
    /// place and not in use by another thread.
    pub(super) unsafe fn replay(
        &mut self,
        (kind, drafts): (K, usize),
        epoch: &[u64],
        mut follow: impl FnMut(usize, &R),
    ) -> Result<bool, GenerateError> {
        let is_it = |kept: &KeptRecording<R, K>| kept.kind == kind && kept.drafts == drafts;
        let index = self.kept.iter().position(is_it);
        let Some(index) = index.filter(|index| self.kept[*index].is_current(epoch)) else {
            return Ok(false);
        };
        self.kept[index..].rotate_left(1);
        let kept = self.kept.last().expect("the one that was found");
        for (part, recording) in kept.recordings.iter().enumerate() {
            // SAFETY: the caller guarantees it, and this is the thread of the recording.
            let replayed = unsafe { recording.replay() };
            replayed.map_err(|refusal| {
                // It counts as failed with all that the step would have written.
                forget_what_is_kept();
                device_error(recording.device(), refusal.reason())
            })?;
            follow(part, &recording.results);
        }
        self.is_newest = true;
        self.replays += 1;
        Ok(true)
    }

    /// Stops trying, and logs the reason once.
    pub(super) fn refuse(&mut self, refusal: &Refusal) {
        self.graphs = false;
        if let Refusal::Failed(reason) = refusal {
            log::warn!("decoding goes on without graphs, a step cannot be recorded: {reason}");
            self.refusal = Some(reason.clone());
        }
    }
}

/// Where a device cannot tell what the work would only have read, the weights count as failed with
/// what it would have written.
pub(super) fn spoiled(refusal: &Refusal, error: GenerateError) -> GenerateError {
    // What was launched with the weights counts as failed too, and other models share what
    // operators keep between calls.
    forget_what_is_kept();
    let reason = refusal.reason();
    let device = match &error {
        GenerateError::Device { device, .. } => device.clone(),
        _ => "a device".to_owned(),
    };
    let reason = format!(
        "a step could not be recorded ({reason}), and now none can be launched either ({error}): \
         the model has to be loaded again"
    );
    GenerateError::Device { device, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_of_other_kinds_go_first_and_their_results_with_them() {
        let mut recorder: Recorder<(), char> = Recorder::new(true);
        let of = |recorder: &mut Recorder<(), char>, kind, drafts, bytes| {
            recorder.keep(Vec::new(), (kind, drafts), vec![1], bytes);
        };
        of(&mut recorder, 'a', 0, Some(vec![1, 20]));
        of(&mut recorder, 'b', 2, None);
        of(&mut recorder, 'c', 1, Some(vec![300, 4000]));
        of(&mut recorder, 'a', 3, Some(vec![50_000, 600_000]));
        assert_eq!(recorder.bytes_of_others(Some('a')), [300, 4000]);
        assert_eq!(recorder.bytes_of_others(Some('c')), [50_001, 600_020]);
        assert_eq!(recorder.bytes_of_others(None), [50_301, 604_020]);
        assert_eq!(recorder.bytes(), None);
        recorder.keep_kinds(1, 'b');
        assert_eq!((recorder.count(), recorder.is_newest), (3, true));
        assert_eq!(recorder.fitting('c', 0), None);
        // What was replayed last is among them.
        recorder.keep_kinds(0, 'b');
        assert_eq!((recorder.count(), recorder.is_newest), (1, false));
        assert_eq!(recorder.bytes_of_others(Some('b')), [0; 0]);
    }

    #[test]
    fn what_is_of_an_old_epoch_goes_whatever_its_kind_and_its_results_with_it() {
        let mut recorder: Recorder<(), char> = Recorder::new(true);
        for (kind, epoch) in [('a', 1), ('b', 1), ('a', 2)] {
            recorder.keep(Vec::new(), (kind, 0), vec![epoch], None);
        }
        recorder.keep_current(&[2]);
        assert_eq!((recorder.count(), recorder.is_newest), (1, true));
        assert_eq!(recorder.fitting('b', 0), None);
        recorder.keep_current(&[3]);
        assert_eq!((recorder.count(), recorder.is_newest), (0, false));
        recorder.keep(Vec::new(), ('a', 0), vec![3], None);
        // Another has failed since.
        FORGOTTEN.set(FORGOTTEN.get() + 1);
        recorder.keep_current(&[3]);
        assert_eq!(recorder.count(), 0);
    }
}
