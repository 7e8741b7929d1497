//! Text of files on a terminal.

use std::fmt::{self, Display, Write};
use std::path;

/// Shows text that comes from a file so that it cannot control a terminal: control characters,
/// line breaks included, and those that change the direction of text are escaped.
///
/// The errors of this crate show names and values of files in this way.
///
/// ```
/// use ds4_model::printable::Printable;
///
/// let name = "norm\u{1b}[2J\n";
/// assert_eq!(Printable(name).to_string(), r"norm\u{1b}[2J\n");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Printable<T>(pub T);

impl<T: Display> Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaped(f), "{}", self.0)
    }
}

/// A path, which may be named by a file.
pub(crate) fn place(path: &path::Path) -> Printable<path::Display<'_>> {
    Printable(path.display())
}

struct Escaped<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars()
            .try_for_each(|character| match is_control(character) {
                true => write!(self.0, "{}", character.escape_default()),
                false => self.0.write_char(character),
            })
    }
}

/// Controls, separators of lines and marks of direction.
fn is_control(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_escaped_and_nothing_else_is() {
        for (text, shown) in [
            ("", ""),
            ("layers.0.attn_norm.weight", "layers.0.attn_norm.weight"),
            ("a \\ \"b\" é 世界 ｜▁｜", "a \\ \"b\" é 世界 ｜▁｜"),
            ("\u{1b}]0;x\u{7}", r"\u{1b}]0;x\u{7}"),
            ("a\nb\r\tc", r"a\nb\r\tc"),
            ("\u{0}\u{7f}\u{9b}1m\u{9f}", r"\u{0}\u{7f}\u{9b}1m\u{9f}"),
            (
                "\u{202e}cba\u{2069}\u{2028}",
                r"\u{202e}cba\u{2069}\u{2028}",
            ),
        ] {
            assert_eq!(Printable(text).to_string(), shown);
        }
    }
}
