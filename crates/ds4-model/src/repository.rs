//! Files of the repository that unit tests read.

use std::path::{Path, PathBuf};

/// A file by its path from the repository's root.
///
/// Cargo tells where the crate is when it runs the test. Where it was when the test was built may be another checkout that shares
/// the target directory.
pub(crate) fn path(relative: &str) -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("a test that cargo runs");
    Path::new(&manifest).join("../..").join(relative)
}
