//! How far the server is with what the first requests would otherwise wait for.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Rounds of the warm-up. Where there is none, the server is ready at once.
#[derive(Debug, Default)]
pub struct Startup {
    over: AtomicUsize,
    all: AtomicUsize,
}

impl Startup {
    /// Of how many rounds how many are over.
    pub fn tell(&self, (over, all): (usize, usize)) {
        self.over.store(over, Ordering::Relaxed);
        self.all.store(all, Ordering::Relaxed);
    }

    /// The rounds that are over, and all, while there are others.
    pub fn progress(&self) -> Option<(usize, usize)> {
        let [over, all] = [&self.over, &self.all].map(|own| own.load(Ordering::Relaxed));
        (over < all).then_some((over, all))
    }
}
