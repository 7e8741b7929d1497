//! How far loading has come.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Told how many bytes of a checkpoint have been read. Closures `FnMut(u64, u64)` are one.
pub trait LoadProgress {
    /// `read` of `total` bytes have been read.
    fn update(&mut self, read: u64, total: u64);

    /// Loading has ended, well or not.
    fn finish(&mut self) {}
}

impl<F: FnMut(u64, u64)> LoadProgress for F {
    fn update(&mut self, read: u64, total: u64) {
        self(read, total);
    }
}

/// A progress bar on standard error that appears once loading has taken more than a second, and not at all where standard error is not a
/// terminal. It is cleared at the end.
#[derive(Debug)]
pub struct LoadBar {
    started: Instant,
    delay: Duration,
    target: Option<ProgressDrawTarget>,
    bar: Option<ProgressBar>,
}

impl Default for LoadBar {
    fn default() -> Self {
        Self::new()
    }
}

impl LoadBar {
    /// A bar whose second begins now.
    pub fn new() -> Self {
        Self::with_target(Duration::from_secs(1), ProgressDrawTarget::stderr())
    }

    pub(super) fn with_target(delay: Duration, target: ProgressDrawTarget) -> Self {
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
