//! A progress bar for loading a checkpoint.

use std::time::{Duration, Instant};

use ds4_model::checkpoint::LoadProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar on standard error, which is cleared at the end.
///
/// It appears once loading has taken more than a second, and only if standard error is a terminal.
#[derive(Debug)]
pub struct LoadBar {
    started: Instant,
    delay: Duration,
    target: Option<ProgressDrawTarget>,
    bar: Option<ProgressBar>,
}

impl Default for LoadBar {
    /// A bar whose second begins now.
    fn default() -> Self {
        Self::with_target(Duration::from_secs(1), ProgressDrawTarget::stderr())
    }
}

impl LoadBar {
    /// A bar that appears on `target` once loading has taken more than `delay`.
    pub fn with_target(delay: Duration, target: ProgressDrawTarget) -> Self {
        Self {
            started: Instant::now(),
            delay,
            target: Some(target),
            bar: None,
        }
    }
}

impl LoadProgress for LoadBar {
    fn update(&mut self, read: u64, total: u64) {
        if self.bar.is_none() && self.started.elapsed() > self.delay {
            self.bar = self.target.take().map(|target| {
                ProgressBar::with_draw_target(Some(total), target)
                    .with_style(style())
                    .with_message("Loading weights")
            });
        }
        if let Some(bar) = &self.bar {
            bar.set_position(read);
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for LoadBar {
    fn drop(&mut self) {
        self.finish();
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} ({eta})")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}
