//! Continues after a failed check.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::Mutex,
};

/// Messages of the panics since the last [`catching`], on any thread: a device's own thread may be
/// the one that fails.
static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Stores panic messages for [`catching`] instead of printing them. The test harness prints them.
#[allow(dead_code)]
pub fn report_panics_here() {
    panic::set_hook(Box::new(|info| {
        MESSAGES
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .push(info.to_string());
    }));
}

/// Runs `work`. A panic becomes an error with its message and location.
pub fn catching<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    let messages = std::mem::take(
        &mut *MESSAGES
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner()),
    );
    result.map_err(|_| messages.join("\n"))
}
