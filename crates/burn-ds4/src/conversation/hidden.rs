//! Calls in an answer that may have none: they are left out, with all that follows them.

use super::calls::{MARK, open};

/// Withholds text that may begin a call.
#[derive(Debug, Default)]
pub struct HiddenCalls {
    withheld: String,
    found: bool,
}

impl HiddenCalls {
    /// Takes the next text, and returns what is no call.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.withheld.push_str(text);
        let tag = format!("<{MARK}");
        let mut from = 0;
        while let Some(at) = self.withheld[from..].find(&tag).map(|at| from + at) {
            match begins_call(&self.withheld[at..]) {
                Some(false) => from = at + tag.len(),
                begins => {
                    self.found = begins.is_some();
                    return self.emit(at);
                }
            }
        }
        let end = self.withheld.len() - open(&self.withheld, &tag);
        self.emit(end)
    }

    /// What was withheld, once no text follows.
    pub fn finish(&mut self) -> String {
        match self.found {
            true => String::new(),
            false => std::mem::take(&mut self.withheld),
        }
    }

    /// Text up to there, without line breaks at its end, which may belong to a call.
    fn emit(&mut self, end: usize) -> String {
        let end = self.withheld[..end].trim_end_matches('\n').len();
        let rest = self.withheld.split_off(end);
        std::mem::replace(&mut self.withheld, rest)
    }
}

/// Whether a text that begins with a mark begins with a call; `None` where more of it tells.
fn begins_call(text: &str) -> Option<bool> {
    let tag = format!("<{MARK}");
    let after = |text, prefix: &str| strip(text, prefix);
    // V4.1 has a blank there.
    let unspaced = |rest| str::strip_prefix(rest, ' ').unwrap_or(rest);
    let result = after(text, &tag).map(unspaced).and_then(|rest| {
        let rest = match ["tool_calls>", "calls>"].map(|name| after(rest, name)) {
            [Ok(rest), _] | [_, Ok(rest)] => unspaced(after(rest.trim_start(), &tag)?),
            [Err(None), _] | [_, Err(None)] if !rest.is_empty() => return Err(None),
            _ => rest,
        };
        after(rest, "invoke name=\"")
    });
    match result {
        Ok(_) => Some(true),
        Err(decided) => decided,
    }
}

/// The text after a prefix; else whether it is known that it has another one.
fn strip<'a>(text: &'a str, prefix: &str) -> Result<&'a str, Option<bool>> {
    match text.strip_prefix(prefix) {
        Some(rest) => Ok(rest),
        None if prefix.starts_with(text) => Err(None),
        None => Err(Some(false)),
    }
}
