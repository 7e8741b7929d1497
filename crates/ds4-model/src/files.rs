//! Files of a checkpoint. Only regular ones are read: a FIFO or a device could block for ever, or
//! never end.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

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
    let mut bytes = Vec::new();
    let file = open(path)?;
    file.take(maximum.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > maximum {
        let message = format!("more than {maximum} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Reads a regular file of UTF-8.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let bytes = read(path, MAX_TEXT_BYTES)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
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
