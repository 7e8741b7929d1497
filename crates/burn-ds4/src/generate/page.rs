//! Where an answer is written.

use std::io::{self, Write};

use crate::generate::answer::{Part, Reader};

/// Dims text, and ends that.
const DIM: [&str; 2] = ["\u{1b}[2m", "\u{1b}[0m"];

/// Writes an answer as it comes.
pub struct Page<'a, W> {
    out: W,
    /// What is written before the first part.
    before: &'a str,
    /// Whether reasoning is dimmed.
    dims: bool,
    is_reasoning: bool,
}

impl<'a, W: Write> Page<'a, W> {
    /// A page that begins with this text.
    pub fn new(out: W, before: &'a str, dims: bool) -> Self {
        Self {
            out,
            before,
            dims,
            is_reasoning: false,
        }
    }

    /// Ends the last line.
    pub fn end(&mut self) -> io::Result<()> {
        self.reason(false)?;
        self.write("\n")
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let before = std::mem::take(&mut self.before);
        write!(self.out, "{before}{text}")?;
        self.out.flush()
    }

    /// Begins or ends the reasoning. Says whether it was the other.
    fn reason(&mut self, is_reasoning: bool) -> io::Result<bool> {
        let changes = is_reasoning != self.is_reasoning;
        self.is_reasoning = is_reasoning;
        if changes && self.dims {
            self.write(DIM[usize::from(!is_reasoning)])?;
        }
        Ok(changes)
    }
}

impl<W: Write> Reader for Page<'_, W> {
    fn read(&mut self, part: &Part) -> io::Result<()> {
        let is_reasoning = matches!(part, Part::Reasoning(_));
        if self.reason(is_reasoning)? && !is_reasoning {
            // The answer begins a paragraph.
            self.write("\n\n")?;
        }
        match part {
            Part::Content(text) | Part::Reasoning(text) => self.write(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_dimmed_and_the_answer_is_not() {
        let parts = [
            Part::Reasoning("w".into()),
            Part::Reasoning("hy".into()),
            Part::Content("so".into()),
        ];
        for (count, dims, expected) in [
            (3, true, "?\u{1b}[2mwhy\u{1b}[0m\n\nso\n"),
            (3, false, "?why\n\nso\n"),
            (2, true, "?\u{1b}[2mwhy\u{1b}[0m\n"),
            (0, true, "?\n"),
        ] {
            let mut out = Vec::new();
            let mut page = Page::new(&mut out, "?", dims);
            for part in &parts[..count] {
                page.read(part).expect("memory");
            }
            page.end().expect("memory");
            assert_eq!(String::from_utf8(out).as_deref(), Ok(expected));
        }
    }
}
