//! Progress of loading.

/// Told how many bytes of a checkpoint have been read. Closures `FnMut(u64, u64)` implement it.
pub trait LoadProgress {
    /// `read` of `total` bytes have been read.
    fn update(&mut self, read: u64, total: u64);

    /// Loading has ended, with or without success.
    fn finish(&mut self) {}
}

impl<F: FnMut(u64, u64)> LoadProgress for F {
    fn update(&mut self, read: u64, total: u64) {
        self(read, total);
    }
}
