//! Files of the repository that unit tests read.

use std::path::{Path, PathBuf};

/// A file by its path from the repository's root.
///
/// Cargo sets the crate's directory when it runs the test. The directory at build time may be that
/// of another checkout with the same target directory.
pub(crate) fn path(relative: &str) -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("a test that cargo runs");
    Path::new(&manifest).join("../..").join(relative)
}
