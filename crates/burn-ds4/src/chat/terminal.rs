//! The terminal: lines that are edited, and interrupts.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use tokio::runtime::{Builder, Runtime};

use super::{Input, Lines};

/// Reads lines with a history.
pub struct Terminal(DefaultEditor);

impl Terminal {
    pub fn new() -> Result<Self, ReadlineError> {
        DefaultEditor::new().map(Self)
    }
}

impl Lines for Terminal {
    fn read(&mut self) -> Result<Input, Box<dyn Error>> {
        match self.0.readline("> ") {
            Ok(line) => {
                self.0.add_history_entry(&line)?;
                Ok(Input::Line(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Input::Interrupted),
            Err(ReadlineError::Eof) => Ok(Input::End),
            Err(error) => Err(error.into()),
        }
    }
}

/// Interrupts while no line is read. They do not end the program.
pub struct Interrupts {
    seen: Arc<AtomicBool>,
    _runtime: Runtime,
}

impl Interrupts {
    pub fn new() -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        // From here on, before the first line is read.
        let mut signals = {
            let _inside = runtime.enter();
            interrupts()?
        };
        let seen = Arc::new(AtomicBool::new(false));
        let flag = seen.clone();
        runtime.spawn(async move {
            while signals.recv().await.is_some() {
                flag.store(true, Ordering::Relaxed);
            }
        });
        Ok(Self {
            seen,
            _runtime: runtime,
        })
    }

    /// Whether there was one since the last call.
    pub fn take(&self) -> bool {
        self.seen.swap(false, Ordering::Relaxed)
    }
}

#[cfg(unix)]
fn interrupts() -> io::Result<tokio::signal::unix::Signal> {
    use tokio::signal::unix::{SignalKind, signal};
    signal(SignalKind::interrupt())
}

#[cfg(windows)]
fn interrupts() -> io::Result<tokio::signal::windows::CtrlC> {
    tokio::signal::windows::ctrl_c()
}
