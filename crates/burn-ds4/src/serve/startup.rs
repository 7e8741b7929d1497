//! Whether the server has compiled what the first requests would otherwise wait for.

use std::sync::atomic::{AtomicBool, Ordering};

/// How far a server is that listens already.
#[derive(Debug, Default)]
pub struct Startup {
    warm: AtomicBool,
    given_up: AtomicBool,
}

impl Startup {
    /// Whether requests are answered at once.
    pub fn is_warm(&self) -> bool {
        self.warm.load(Ordering::Relaxed)
    }

    /// The kernels are compiled, or are not to be.
    pub fn finish(&self) {
        self.warm.store(true, Ordering::Relaxed);
    }

    /// Whether nobody waits any more for what is compiled.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// The server stops.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }
}
