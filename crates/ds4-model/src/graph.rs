//! Device work recorded once and replayed without the host, where the device can.
//!
//! What is recorded is not executed; a replay executes it. A recording reads and writes the buffers that its work read and wrote, so
//! whoever has one keeps the tensors of the work alive and where they are. The work may only launch: what it uploads is uploaded
//! again as it was or, on some devices, refused; and what it allocates must fit the memory that the runs before have left behind.

use std::fmt;

use burn::backend::{Backend, BackendGraph, Dispatch, ExecutionError, StreamId};
use burn::tensor::Device;

/// Why a recording was not made.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Nothing is recorded at all, on this device or as this crate was built.
    Unsupported(String),
    /// It failed.
    Failed(String),
}

impl Refusal {
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Unsupported(reason) | Self::Failed(reason) => reason,
        }
    }
}

impl From<ExecutionError> for Refusal {
    fn from(error: ExecutionError) -> Self {
        Self::Failed(brief(&error))
    }
}

/// The time before a recording: work that is done now leaves behind the memory that it will need. Dropping it gives up.
pub(crate) struct Preparation {
    device: Device,
    closed: bool,
}

impl Preparation {
    pub(crate) fn new(device: &Device) -> Result<Self, Refusal> {
        if cfg!(feature = "fusion") {
            // It chooses where a result goes when it runs a queue of operations, so that work may not end where the next replay begins.
            let reason = "fusion of operations does not promise to write in place";
            return Err(Refusal::Unsupported(reason.to_owned()));
        }
        Dispatch::graph_prepare(device.as_dispatch())?;
        Ok(Self {
            device: device.clone(),
            closed: false,
        })
    }

    /// Begins to record. Where that fails, what was done so far stands.
    pub(crate) fn start(mut self) -> Result<Window, Refusal> {
        self.device.sync()?;
        match Dispatch::graph_start_capture(self.device.as_dispatch()) {
            Ok(()) => {
                self.closed = true;
                Ok(Window {
                    device: self.device.clone(),
                    closed: false,
                })
            }
            // The words that Burn and CubeCL have for it, whose error has no kind.
            Err(error) => {
                let reason = error.to_string().to_lowercase();
                match reason.contains("graph capture is not supported") {
                    true => Err(Refusal::Unsupported(brief(&error))),
                    false => Err(error.into()),
                }
            }
        }
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        if !self.closed {
            close(&self.device);
        }
    }
}

/// The time of a recording. Dropping it throws the recording away, like a failure to [seal](Self::seal) it: every buffer that the
/// recorded work would have written then counts as failed, and so does what is computed from it.
pub(crate) struct Window {
    device: Device,
    closed: bool,
}

impl Window {
    /// Ends the recording, in which `results` were made.
    pub(crate) fn seal<T>(mut self, results: T) -> Result<Recording<T>, Refusal> {
        self.closed = true;
        let graph = Dispatch::graph_stop_capture(self.device.as_dispatch())?;
        Ok(Recording {
            graph,
            stream: StreamId::current(),
            device: self.device.clone(),
            results,
        })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if !self.closed {
            close(&self.device);
        }
    }
}

/// A device must not go on recording what comes after.
fn close(device: &Device) {
    // There is nothing to be done about an error, and nothing is wanted of the graph.
    let _ = Dispatch::graph_stop_capture(device.as_dispatch());
}

/// Recorded work, with what it results in.
pub(crate) struct Recording<T> {
    graph: BackendGraph<Dispatch>,
    stream: StreamId,
    device: Device,
    /// Holds its values after a replay.
    pub(crate) results: T,
}

impl<T> Recording<T> {
    /// Whether this thread may replay it: only the one that recorded it orders replays and other work as they come.
    pub(crate) fn is_of_this_thread(&self) -> bool {
        StreamId::current() == self.stream
    }

    /// Enqueues the recorded work.
    ///
    /// # Safety
    ///
    /// Every tensor that the recorded work read or wrote must be alive, in the same place and not in use by another thread, and this
    /// thread must be that of the recording.
    pub(crate) unsafe fn replay(&self) -> Result<(), Refusal> {
        // Safety: as the caller promises.
        Ok(unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) }?)
    }
}

impl<T> fmt::Debug for Recording<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Recording");
        debug.field("device", &self.device).finish_non_exhaustive()
    }
}

/// What happened, in one line: errors come wrapped in others, in several lines, and with a backtrace.
fn brief(error: &impl ToString) -> String {
    let filler = ["", "Caused by:", "An error happened during execution"];
    let trace = ["Backtrace:", "No backtrace", "0:"];
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    let lines = lines.take_while(|line| !trace.iter().any(|start| line.starts_with(start)));
    let lines: Vec<&str> = lines.filter(|line| !filler.contains(line)).collect();
    lines.join(" ")
}
