//! Why a configuration was refused.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::printable::{Printable, place};

/// A configuration that cannot be used, and the file it came from.
#[derive(Debug, Error)]
pub struct ConfigError {
    /// The file, where there is one.
    pub path: Option<PathBuf>,
    /// What is wrong.
    pub kind: ConfigErrorKind,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}: ", place(path))?;
        }
        write!(f, "{}", self.kind)
    }
}

impl ConfigError {
    pub(crate) fn at(mut self, path: &Path) -> Self {
        self.path = Some(path.to_path_buf());
        self
    }
}

impl From<ConfigErrorKind> for ConfigError {
    fn from(kind: ConfigErrorKind) -> Self {
        Self { path: None, kind }
    }
}

/// The reasons for which a configuration is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// The file could not be read, or is no regular file, such as a FIFO.
    #[error("cannot be read: {0}")]
    Read(std::io::Error),
    /// The text is not JSON, or not a JSON object.
    #[error("not a JSON object: {}", Printable(.0))]
    Json(serde_json::Error),
    /// Another architecture than DeepSeek-V4 and V4.1.
    #[error(
        "model_type is `{}`, only `deepseek_v4` and `deepseek_v41` are supported",
        Printable(model_type)
    )]
    UnsupportedArchitecture {
        /// The `model_type` found.
        model_type: String,
    },
    /// Keys are missing, contradict each other or have values no model can have.
    #[error("{}", Printable(invalid(missing, contradictory)))]
    Invalid {
        /// Missing keys, sorted.
        missing: Vec<String>,
        /// One sentence per contradiction or impossible value, naming the keys and the values,
        /// sorted.
        contradictory: Vec<String>,
    },
}

fn invalid(missing: &[String], contradictory: &[String]) -> String {
    let mut parts = Vec::new();
    if !missing.is_empty() {
        parts.push(format!("missing: {}", missing.join(", ")));
    }
    if !contradictory.is_empty() {
        parts.push(format!("contradictory: {}", contradictory.join("; ")));
    }
    parts.join(". ")
}
