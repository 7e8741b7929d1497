//! Device work that is recorded once and replayed without the host, where the device supports it.
//!
//! Recording does not execute the work; a replay does. A recording reads and writes the buffers
//! that its work read and wrote, so its owner keeps the tensors of the work alive and in place. The
//! work may only launch kernels: an upload is repeated with the same data or, on some devices,
//! refused. What the work allocates must fit the memory that the runs before have left behind.

use std::fmt;

use burn::backend::{Backend, BackendGraph, Dispatch, ExecutionError, StreamId};
use burn::tensor::Device;

/// Why a recording was not made.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Nothing can be recorded on this device, or with this build of the crate.
    Unsupported(String),
    /// Recording failed.
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

/// The time before a recording: runs of the work leave behind the memory that the recording will
/// need. Dropping this abandons the recording.
pub(crate) struct Preparation {
    device: Device,
    closed: bool,
}

impl Preparation {
    pub(crate) fn new(device: &Device) -> Result<Self, Refusal> {
        if cfg!(feature = "fusion") {
            // Fusion chooses the buffer of a result when it runs a queue of operations, so a run
            // may not end in the buffers where the next replay begins.
            let reason = "fusion of operations does not promise to write in place";
            return Err(Refusal::Unsupported(reason.to_owned()));
        }
        Dispatch::graph_prepare(device.as_dispatch())?;
        Ok(Self {
            device: device.clone(),
            closed: false,
        })
    }

    /// Begins to record. If that fails, the work done so far remains valid.
    pub(crate) fn start(mut self) -> Result<Capture, Refusal> {
        self.device.sync()?;
        match Dispatch::graph_start_capture(self.device.as_dispatch()) {
            Ok(()) => {
                self.closed = true;
                Ok(Capture {
                    device: self.device.clone(),
                    closed: false,
                })
            }
            // Burn and CubeCL have no kind of error for this, only a message.
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

/// A recording in progress. Dropping it discards the recording, and so does a failure to
/// [end](Self::end) it: every buffer that the recorded work would have written then counts as
/// failed, and so does everything that is computed from it.
pub(crate) struct Capture {
    device: Device,
    closed: bool,
}

impl Capture {
    /// Ends the recording, in which `results` were computed.
    pub(crate) fn end<T>(mut self, results: T) -> Result<Recording<T>, Refusal> {
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

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.closed {
            close(&self.device);
        }
    }
}

/// Ends a recording, so that the device does not record later work.
fn close(device: &Device) {
    // An error cannot be handled here, and the graph is not wanted.
    let _ = Dispatch::graph_stop_capture(device.as_dispatch());
}

/// Recorded work and its results.
pub(crate) struct Recording<T> {
    graph: BackendGraph<Dispatch>,
    stream: StreamId,
    device: Device,
    /// Tensors that hold the results after a replay.
    pub(crate) results: T,
}

impl<T> Recording<T> {
    /// Whether this thread may replay it. Only the thread that recorded it keeps replays and other
    /// work in order.
    pub(crate) fn is_of_this_thread(&self) -> bool {
        StreamId::current() == self.stream
    }

    /// What the device is called in errors.
    pub(crate) fn device(&self) -> String {
        crate::placement::name(&self.device)
    }

    /// Enqueues the recorded work.
    ///
    /// # Safety
    ///
    /// Every tensor that the recorded work read or wrote must be alive, in the same place and not
    /// in use by another thread, and this thread must be that of the recording.
    pub(crate) unsafe fn replay(&self) -> Result<(), Refusal> {
        // SAFETY: the caller guarantees it.
        Ok(unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) }?)
    }
}

impl<T> fmt::Debug for Recording<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Recording");
        debug.field("device", &self.device).finish_non_exhaustive()
    }
}

/// An error's message in one line: errors come nested, in several lines, and with a backtrace.
fn brief(error: &impl ToString) -> String {
    let filler = ["", "Caused by:", "An error happened during execution"];
    let trace = ["Backtrace:", "No backtrace", "0:"];
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    let lines = lines.take_while(|line| !trace.iter().any(|start| line.starts_with(start)));
    let lines: Vec<&str> = lines.filter(|line| !filler.contains(line)).collect();
    lines.join(" ")
}
