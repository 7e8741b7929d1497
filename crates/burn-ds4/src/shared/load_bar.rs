//! A progress bar for loading a checkpoint, and for processing a prompt.

use std::time::{Duration, Instant};

use ds4_model::checkpoint::LoadProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What a bar says, and its parts.
type Kind = [&'static str; 2];

const LOADING: Kind = [
    "Loading weights",
    "{msg} [{bar:30}] {bytes}/{total_bytes} ({eta})",
];
const PROMPT: Kind = [
    "Processing the prompt",
    "{msg} [{bar:30}] {pos}/{len} tokens ({eta})",
];

/// A progress bar on standard error, which is cleared at the end.
///
/// It appears once the work has taken more than a second, and only if standard error is a terminal.
#[derive(Debug)]
pub struct LoadBar {
    started: Instant,
    delay: Duration,
    target: Option<ProgressDrawTarget>,
    bar: Option<ProgressBar>,
    kind: Kind,
}

impl Default for LoadBar {
    /// A bar for loading, whose second begins now.
    fn default() -> Self {
        Self::with_target(Duration::from_secs(1), ProgressDrawTarget::stderr())
    }
}

impl LoadBar {
    /// A bar that appears on `target` once the work has taken more than `delay`.
    pub fn with_target(delay: Duration, target: ProgressDrawTarget) -> Self {
        Self {
            started: Instant::now(),
            delay,
            target: Some(target),
            bar: None,
            kind: LOADING,
        }
    }

    /// The same for the tokens of a prompt.
    pub fn of_prompt(mut self) -> Self {
        self.kind = PROMPT;
        self
    }
}

impl LoadProgress for LoadBar {
    fn update(&mut self, read: u64, total: u64) {
        if self.bar.is_none() && self.started.elapsed() > self.delay {
            self.bar = self.target.take().map(|target| {
                ProgressBar::with_draw_target(Some(total), target)
                    .with_style(style(self.kind[1]))
                    .with_message(self.kind[0])
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

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
#[path = "load_bar_tests.rs"]
mod tests;
