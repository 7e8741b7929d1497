//! Warnings of the library on the screen.

use ds4_model::printable::Printable;
use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::shared::note;

struct Screen;

/// Shows warnings from now on.
pub fn show() {
    if log::set_logger(&Screen).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}

impl Log for Screen {
    /// Of this project only: what graphics drivers complain about helps nobody here.
    fn enabled(&self, metadata: &Metadata) -> bool {
        let target = metadata.target();
        metadata.level() <= Level::Warn
            && ["ds4_model", "burn_ds4_ops"]
                .iter()
                .any(|name| target.starts_with(name))
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            note(line(record));
        }
    }

    fn flush(&self) {}
}

fn line(record: &Record) -> String {
    format!("warning: {}", Printable(record.args()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_the_library_are_shown_and_cannot_control_the_terminal() {
        let shown = |target: &str, level: Level| {
            let metadata = Metadata::builder().target(target).level(level).build();
            Screen.enabled(&metadata)
        };
        assert!(shown("ds4_model::generate", Level::Warn));
        assert!(shown("burn_ds4_ops", Level::Error));
        assert!(!shown("ds4_model", Level::Info));
        assert!(!shown("wgpu_hal", Level::Error));
        let text = line(&Record::builder().args(format_args!("a\u{1b}[2J")).build());
        assert_eq!(text, r"warning: a\u{1b}[2J");
    }
}
