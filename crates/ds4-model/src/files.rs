//! Files of a checkpoint. Only regular ones are read: a FIFO or a device could block for ever, or
//! never end.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokenizers::Tokenizer;

/// The tokenizer of a checkpoint.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// Most bytes of a configuration, an index or a tokenizer; those of releases have less than 10 MB.
pub(crate) const MAX_TEXT_BYTES: u64 = 100_000_000;

/// Opens a regular file.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    // Not after it is open: opening a FIFO waits for its writer.
    if !path.metadata()?.is_file() {
        let message = "not a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    File::open(path)
}

/// Reads a regular file of so many bytes at most.
pub(crate) fn read(path: &Path, maximum: u64) -> io::Result<Vec<u8>> {
    read_from(open(path)?, maximum)
}

/// Reads all that there is, so many bytes at most.
fn read_from(source: impl Read, maximum: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source
        .take(maximum.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > maximum {
        let message = format!("more than {maximum} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Writes a temporary file beside `path`, and renames it: no reader finds a part of the bytes, and
/// of several writers the last one counts.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static WRITERS: AtomicUsize = AtomicUsize::new(0);
    let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}-{writer}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = File::create(&temporary)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Reads a regular file of UTF-8, without the byte-order mark that an editor may have written.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let bytes = read(path, MAX_TEXT_BYTES)?;
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    if is_lfs_pointer(&bytes) {
        return Err(invalid(LFS_POINTER.into()));
    }
    let text = String::from_utf8(bytes).map_err(|error| invalid(error.to_string()))?;
    let bare = text.strip_prefix('\u{feff}').map(str::to_owned);
    Ok(bare.unwrap_or(text))
}

/// What a file is that was not fetched.
pub(crate) const LFS_POINTER: &str =
    "it is a pointer of git-LFS in place of the file, which `git lfs pull` fetches";

/// Whether a file is what git has in place of a large one that was not fetched.
pub(crate) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/spec/")
}

/// A tokenizer from the bytes of its file.
///
/// # Errors
///
/// What the library says of a file that it cannot read.
pub(crate) fn parse_tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
    // The library panics on some damaged files, such as one whose decoder is no JSON.
    let parsed = std::panic::catch_unwind(|| Tokenizer::from_bytes(bytes));
    let parsed = parsed.map_err(|_| "`tokenizers` panics on it")?;
    parsed.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_more_bytes_than_are_wanted_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 10]).unwrap();
        assert_eq!(read(&path, 10).unwrap(), [7; 10]);
        let error = read(&path, 9).unwrap_err();
        assert_eq!(error.to_string(), "more than 9 bytes");
    }

    #[test]
    fn a_text_has_no_byte_order_mark_and_is_no_pointer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for (written, expected) in [("\u{feff}{}", "{}"), ("{}", "{}"), ("\u{feff}", "")] {
            std::fs::write(&path, written).unwrap();
            assert_eq!(read_text(&path).unwrap(), expected);
        }
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        std::fs::write(&path, pointer).unwrap();
        let error = read_text(&path).unwrap_err().to_string();
        assert!(error.contains("git-LFS"), "{error}");
    }

    /// A byte at a time, each after an interruption, and an error after the last.
    struct Halting {
        left: u8,
        interrupted: bool,
    }

    impl Read for Halting {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.interrupted = !self.interrupted;
            if self.interrupted {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if self.left == 0 {
                return Err(io::Error::other("the disk is gone"));
            }
            buffer[0] = self.left;
            self.left -= 1;
            Ok(1)
        }
    }

    #[test]
    fn short_reads_are_put_together_and_an_error_among_them_is_told() {
        let halting = |left| Halting {
            left,
            interrupted: false,
        };
        assert_eq!(read_from(halting(5).take(4), 4).unwrap(), [5, 4, 3, 2]);
        let error = read_from(halting(3), 10).unwrap_err();
        assert_eq!(error.to_string(), "the disk is gone");
    }

    #[cfg(unix)]
    #[test]
    fn what_may_never_end_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let zeros = dir.path().join("zeros");
        std::os::unix::fs::symlink("/dev/zero", &zeros).unwrap();
        let fifo = crate::repository::fifo(dir.path(), "fifo");
        for path in [dir.path().to_path_buf(), zeros, fifo] {
            let error = crate::repository::in_time(move || read_text(&path).unwrap_err());
            assert_eq!(error.to_string(), "not a regular file");
        }
    }

    #[test]
    fn text_that_is_not_utf_8_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [0xff]).unwrap();
        let error = read_text(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
