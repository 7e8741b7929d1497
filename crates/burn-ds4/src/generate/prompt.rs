//! Where the prompt comes from.

use std::error::Error;
use std::fs;
use std::io::{self, IsTerminal, Read};

use crate::generate::options::Options;
use crate::shared::BYTE_ORDER_MARK;

/// What is continued where nobody says anything else.
pub const DEFAULT: &str = "And God said,";

/// What to continue.
#[derive(Debug, PartialEq, Eq)]
pub enum Prompt {
    /// This text.
    Text(String),
    /// What somebody says at a terminal.
    Chat,
}

impl Prompt {
    /// The prompt of the command line, of a file, of standard input or of nothing, in this order.
    pub fn of(args: &Options) -> Result<Self, Box<dyn Error>> {
        if let Some(prompt) = &args.prompt {
            return Ok(Self::Text(prompt.clone()));
        }
        if let Some(path) = &args.file {
            let text = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            return Ok(Self::Text(text_of(text, &path.display().to_string())?));
        }
        if !io::stdin().is_terminal() {
            let mut text = Vec::new();
            io::stdin().lock().read_to_end(&mut text)?;
            let text = text_of(text, "standard input")?;
            return Ok(Self::Text(match text.is_empty() {
                true => DEFAULT.into(),
                false => text,
            }));
        }
        match io::stdout().is_terminal() && !args.json {
            true => Ok(Self::Chat),
            false => Ok(Self::Text(DEFAULT.into())),
        }
    }
}

/// Text without the line break that ends a file, and without the mark that may begin it.
fn text_of(bytes: Vec<u8>, place: &str) -> Result<String, String> {
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("{place}: the text is not UTF-8 at byte {at}")
    })?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.remove(0);
    }
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_break_at_the_end_is_left_out() {
        for (given, expected) in [
            ("a\nb\n", "a\nb"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a", "a"),
            ("\n", ""),
            ("\u{feff}a\n", "a"),
            ("a\u{feff}", "a\u{feff}"),
        ] {
            assert_eq!(text_of(given.into(), "f").as_deref(), Ok(expected));
        }
        let error = text_of(b"ab\xff\n".to_vec(), "f").unwrap_err();
        assert_eq!(error, "f: the text is not UTF-8 at byte 2");
    }
}
