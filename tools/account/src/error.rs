//! Errors of the input.

use std::path::PathBuf;

/// Why no account was made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// No line names the required columns.
    #[error(
        "no line names the columns {}: was it printed by `ncu --csv`, and not with `--page raw`?",
        columns.join(", ")
    )]
    NoHeader {
        /// The columns.
        columns: Vec<&'static str>,
    },
    /// There are columns but no launch.
    #[error("no launch was profiled")]
    Empty,
    /// A line is malformed.
    #[error("line {line}: {problem}")]
    Malformed {
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A launch lacks a metric.
    #[error("launch {id} ({kernel}) has no {metric}: name it in ncu's --metrics")]
    MissingMetric {
        /// The launch's id in ncu's output.
        id: String,
        /// Its kernel.
        kernel: String,
        /// The metric.
        metric: &'static str,
    },
    /// The step is not marked.
    #[error(
        "{found} of 2 launches of {marker} that mark the step: run the program with --account, \
         and profile it to its end"
    )]
    Unmarked {
        /// The kernel that marks it.
        marker: String,
        /// Its launches.
        found: usize,
    },
    /// More launches were asked for than there are.
    #[error("{wanted} launches were asked for, {found} were profiled")]
    TooFew {
        /// Launches asked for.
        wanted: usize,
        /// Launches there are.
        found: usize,
    },
    /// Nothing was launched between the marks.
    #[error("there is no launch between the marks")]
    NoStep,
}
