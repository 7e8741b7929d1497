//! What the server compiles while no text is there.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use ds4_model::generate::{EngineConfig, GenerateError};
use ds4_model::model::Model;

use crate::serve::engine::Job;
use crate::serve::startup::Startup;
use crate::shared::warm_up::WarmUp;

/// Between two lines in the log that say how far the warm-up is.
const PAUSE: Duration = Duration::from_secs(5);

/// The warm-up of a server, which goes on while there is no text.
pub struct Warming<'a> {
    warm_up: WarmUp<'a>,
    startup: Arc<Startup>,
    started: Instant,
    told: Option<Instant>,
}

impl<'a> Warming<'a> {
    /// For an engine of this configuration. `startup` is told how far it is.
    pub fn new(model: &'a Model, config: &EngineConfig, startup: Arc<Startup>) -> Self {
        let warm_up = WarmUp::new(model, config);
        startup.tell(warm_up.progress());
        Self {
            warm_up,
            startup,
            started: Instant::now(),
            told: None,
        }
    }

    /// Takes a step. Returns whether it was the last one.
    fn step(&mut self) -> Result<bool, GenerateError> {
        let (over, rounds) = self.warm_up.progress();
        let started = self.started;
        let seconds = || started.elapsed().as_secs_f32();
        if self.told.is_none_or(|told| told.elapsed() >= PAUSE) {
            self.told = Some(Instant::now());
            tracing::info!(
                over,
                rounds,
                seconds = seconds(),
                "warming up: compiling kernels"
            );
        }
        let is_over = self.warm_up.step()?;
        self.startup.tell(self.warm_up.progress());
        if over == 0 && self.warm_up.progress().0 > 0 {
            tracing::info!(
                seconds = seconds(),
                "ready: what every request needs is compiled"
            );
        }
        if is_over {
            tracing::info!(seconds = seconds(), "warm: kernels are compiled");
        }
        Ok(is_over)
    }
}

/// Waits for a text, or none if no further one comes. Meanwhile, the server warms up.
pub fn wait(
    jobs: &Receiver<Job>,
    warming: &mut Option<Warming<'_>>,
) -> Result<Option<Job>, GenerateError> {
    while let Some(own) = warming {
        match jobs.try_recv() {
            Ok(job) => {
                own.warm_up.pause();
                return Ok(Some(job));
            }
            Err(TryRecvError::Disconnected) => return Ok(None),
            Err(TryRecvError::Empty) if own.step()? => *warming = None,
            Err(TryRecvError::Empty) => {}
        }
    }
    Ok(jobs.recv().ok())
}
