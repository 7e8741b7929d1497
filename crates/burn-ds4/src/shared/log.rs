//! Warnings of the library on the screen, and which device has what.

use ::log::{Level, LevelFilter, Log, Metadata, Record};
use ds4_model::printable::Printable;

use super::note;

struct Screen;

/// Shows them from now on.
pub fn show() {
    if ::log::set_logger(&Screen).is_ok() {
        ::log::set_max_level(LevelFilter::Info);
    }
}

impl Log for Screen {
    /// Of this project only: what graphics drivers complain about helps nobody here.
    fn enabled(&self, metadata: &Metadata) -> bool {
        let (target, level) = (metadata.target(), metadata.level());
        match level {
            Level::Error | Level::Warn => [env!("CARGO_CRATE_NAME"), "ds4_model", "burn_ds4_ops"]
                .iter()
                .any(|name| target.starts_with(name)),
            _ => level == Level::Info && target == "ds4_model::placement",
        }
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            note(line(record));
        }
    }

    fn flush(&self) {}
}

fn line(record: &Record) -> String {
    let text = Printable(record.args());
    match record.level() {
        Level::Error | Level::Warn => format!("warning: {text}"),
        _ => format!("[{text}]"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn warnings_of_the_library_are_shown_and_cannot_control_the_terminal() {
        use super::*;

        let shown = |target: &str, level: Level| {
            let metadata = Metadata::builder().target(target).level(level).build();
            Screen.enabled(&metadata)
        };
        assert!(shown("ds4_model::generate", Level::Warn));
        assert!(shown("burn_ds4_ops", Level::Error));
        assert!(!shown("ds4_model", Level::Info));
        assert!(!shown("wgpu_hal", Level::Error));
        assert!(shown("ds4_model::placement", Level::Info));
        assert!(!shown("ds4_model::placement", Level::Debug));
        let shown = |level: Level| {
            let args = format_args!("a\u{1b}[2J");
            line(&Record::builder().args(args).level(level).build())
        };
        assert_eq!(shown(Level::Warn), r"warning: a\u{1b}[2J");
        assert_eq!(shown(Level::Info), r"[a\u{1b}[2J]");
    }
}
