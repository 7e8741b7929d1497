//! What the crates warn of, of the thread that does the work.

use std::cell::RefCell;
use std::sync::Once;

use log::{LevelFilter, Log, Metadata, Record};

thread_local! {
    static KEPT: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

struct Keeper;

impl Log for Keeper {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        KEPT.with_borrow_mut(|kept| kept.push(record.args().to_string()));
    }

    fn flush(&self) {}
}

/// What the work gives, and the warnings that this thread has logged in it.
pub fn warnings_of<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    static SET: Once = Once::new();
    SET.call_once(|| {
        log::set_logger(&Keeper).expect("the only logger of the tests");
        log::set_max_level(LevelFilter::Warn);
    });
    KEPT.take();
    let result = work();
    (result, KEPT.take())
}
