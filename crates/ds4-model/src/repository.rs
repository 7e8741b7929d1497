//! What unit tests share: files of the repository and others that are none, and wgpu.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file by its path from the repository's root.
///
/// Cargo sets the crate's directory when it runs the test. The directory at build time may be that
/// of another checkout with the same target directory.
pub(crate) fn path(relative: &str) -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("a test that cargo runs");
    Path::new(&manifest).join("../..").join(relative)
}

/// Held by a test while it works on wgpu: a device counts the memory of all threads.
pub(crate) fn alone_on_wgpu() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a FIFO, which has no writer, in place of what is there.
#[cfg(unix)]
pub(crate) fn fifo(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let _ = std::fs::remove_file(&path);
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.expect("mkfifo is everywhere").success());
    path
}

/// What `work` returns.
///
/// # Panics
///
/// If it takes a minute, as where it waits for ever.
#[cfg(unix)]
pub(crate) fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    let result = receiver.recv_timeout(std::time::Duration::from_secs(60));
    result.expect("it ends, and does not panic")
}
