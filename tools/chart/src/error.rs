//! Errors of the input.

use std::fmt;
use std::path::{Path, PathBuf};

/// The line of a file that a record was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The file, as it was named by the caller.
    pub file: PathBuf,
    /// The line, counted from 1.
    pub line: usize,
}

impl Location {
    /// Line `line` of `file`.
    pub fn new(file: &Path, line: usize) -> Self {
        Self {
            file: file.to_path_buf(),
            line,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// Why no chart was made.
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
    /// A file could not be written.
    #[error("cannot write {}: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A line is malformed.
    #[error("{location}: {problem}")]
    Malformed {
        /// The line.
        location: Location,
        /// What is wrong with it.
        problem: String,
    },
    /// A file without a record.
    #[error("nothing in {}", .0.display())]
    Empty(PathBuf),
    /// The result of a measurement was wrong, so that its time means nothing.
    #[error("{0}: the result was not verified")]
    Unverified(Location),
    /// Two lines are about the same case.
    #[error("{second}: the same case as {first}")]
    Duplicate {
        /// The line that came first.
        first: Location,
        /// The one that repeats it.
        second: Location,
    },
    /// The measurements differ in something that a chart has only one of.
    #[error("several values of {field}: {}; {advice}", values.join(", "))]
    Several {
        /// The field in question.
        field: &'static str,
        /// The values found, sorted.
        values: Vec<String>,
        /// What to do about it.
        advice: String,
    },
    /// The value asked for does not occur.
    #[error("no measurement has {field} {wanted}; there is {}", values.join(", "))]
    Missing {
        /// The field in question.
        field: &'static str,
        /// The value asked for.
        wanted: String,
        /// The values found, sorted.
        values: Vec<String>,
    },
    /// There is no measurement, or none has a time.
    #[error("no measurement has a time")]
    NoTimes,
    /// The SVG could not be made.
    #[error("cannot draw: {0}")]
    Draw(String),
}
