//! Text of a file.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::error::{ConfigError, ConfigErrorKind};
use crate::files;

/// Reads a file; an error names it.
pub(super) fn read<T>(
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    files::read_text(path)
        .map_err(|source| ConfigErrorKind::Read(source).into())
        .and_then(|text| parse(&text))
        .map_err(|error| error.at(path))
}

/// Parses an object.
pub(super) fn object(text: &str) -> Result<Map<String, Value>, ConfigError> {
    Ok(serde_json::from_str(text).map_err(ConfigErrorKind::Json)?)
}
