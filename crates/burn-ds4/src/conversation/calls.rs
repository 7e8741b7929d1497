//! Markup of tool calls, as the parser of `deepseek-recipe` needs it.
//!
//! It takes the name of a parameter to end at a blank, a value to end at the beginning of any
//! closing tag, a tag without `string=` for the beginning of one that has it, and hands on values
//! that are no JSON. What is written so is written anew here; the rest passes as it is. Tags of
//! V4.1 have a blank after the mark.

use super::parser::Kind;

/// What marks a tag.
pub const MARK: &str = "｜DSML｜";
const PARAMETER: &str = "parameter name=\"";
const CALL_ENDS: [&str; 2] = ["</｜DSML｜invoke>", "</｜DSML｜ invoke>"];
const VALUE_ENDS: [&str; 2] = ["</｜DSML｜parameter>", "</｜DSML｜ parameter>"];
const TAG_END: &str = "\">";
const KIND: &str = "\" string=\"";
/// Tags whose end closes a value.
const CLOSING: [&str; 4] = ["parameter>", "invoke>", "tool_calls>", "calls>"];
/// Values that are no JSON and stay as they are: as strings they would mean something else.
const LITERALS: [&str; 4] = ["True", "False", "None", "NaN"];
/// Bytes of a tag, or of a number: what goes on for longer is none.
const LONGEST: usize = 512;

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Tags, and what stands between them.
    Tags,
    /// The name of a parameter, up to the end of its tag.
    Parameter,
    /// A value of which it is not known yet whether it is JSON.
    Json,
    /// A value.
    Value,
}

/// The part of an answer that begins with its calls.
#[derive(Debug)]
pub struct Calls {
    state: State,
    /// What is not decided yet.
    text: String,
    /// Where it has marks that are tokens; others are text.
    marks: Vec<usize>,
    /// Calls that have ended.
    pub ended: usize,
}

impl Calls {
    /// Begins where a tag may be next.
    pub fn new() -> Self {
        Self {
            state: State::Tags,
            text: String::new(),
            marks: Vec::new(),
            ended: 0,
        }
    }

    /// Takes the next text.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Takes the token of the mark.
    pub fn push_mark(&mut self) {
        self.marks.push(self.text.len());
        self.text.push_str(MARK);
    }

    /// Hands on what is decided; all of it, once nothing follows.
    pub fn advance(&mut self, is_end: bool, out: &mut impl FnMut(Kind, String)) {
        while match self.state {
            State::Tags => self.tags(is_end, out),
            State::Parameter => self.parameter(is_end, out),
            State::Json => self.json(is_end, out),
            State::Value => self.value(is_end, out),
        } {}
    }

    /// Takes so many bytes from the front.
    fn take(&mut self, bytes: usize) -> String {
        let rest = self.text.split_off(bytes);
        self.marks.retain(|mark| *mark >= bytes);
        self.marks.iter_mut().for_each(|mark| *mark -= bytes);
        std::mem::replace(&mut self.text, rest)
    }

    fn tags(&mut self, is_end: bool, out: &mut impl FnMut(Kind, String)) -> bool {
        let ends = CALL_ENDS.iter();
        let ends = ends.filter_map(|tag| Some((self.text.find(tag)?, tag.len())));
        let end = ends.min();
        let parameter = self.text.find(PARAMETER);
        let parameter = parameter.filter(|at| end.is_none_or(|(end, _)| *at < end));
        let (bytes, goes_on) = match (parameter, end) {
            (Some(at), _) => {
                self.state = State::Parameter;
                // The quote belongs to the name.
                let text = self.take(at + PARAMETER.len());
                out(Kind::Text, text[..text.len() - 1].to_owned());
                return true;
            }
            (None, Some((at, bytes))) => {
                self.ended += 1;
                (at + bytes, true)
            }
            (None, None) if is_end => (self.text.len(), false),
            (None, None) => {
                let tags = CALL_ENDS.iter().chain([&PARAMETER]);
                let open = tags.map(|tag| open(&self.text, tag)).max();
                (self.text.len() - open.unwrap_or(0), false)
            }
        };
        if bytes > 0 {
            let text = self.take(bytes);
            out(Kind::Text, text);
        }
        goes_on
    }

    fn parameter(&mut self, is_end: bool, out: &mut impl FnMut(Kind, String)) -> bool {
        let end = self.text.find(TAG_END);
        let mark = self.marks.first().copied();
        let Some(end) = end.filter(|end| mark.is_none_or(|mark| *end < mark)) else {
            // The tag does not end: nobody knows what it means.
            if is_end || mark.is_some() || self.text.len() > LONGEST {
                self.state = State::Tags;
                out(Kind::Text, "\"".into());
                return true;
            }
            return false;
        };
        let tag = self.take(end + TAG_END.len());
        let tag = &tag[..end];
        let (name, kind) = tag.rsplit_once(KIND).unwrap_or((tag, "true"));
        let name = serde_json::Value::from(name).to_string();
        let name = name.replace(' ', "\\u0020");
        out(Kind::Text, format!("{name} string=\""));
        self.state = match kind {
            "false" => State::Json,
            _ => self.decide(true, out),
        };
        true
    }

    /// Says whether a value is a string.
    fn decide(&self, is_string: bool, out: &mut impl FnMut(Kind, String)) -> State {
        out(Kind::Text, format!("{is_string}\">"));
        State::Value
    }

    fn json(&mut self, is_end: bool, out: &mut impl FnMut(Kind, String)) -> bool {
        let end = self.closing(is_end);
        let value = &self.text[..end.unwrap_or(self.text.len())];
        let is_structure = value.trim_start().starts_with(['{', '[', '"']);
        let is_json = |value: &str| {
            LITERALS.contains(&value.trim())
                || serde_json::from_str::<serde::de::IgnoredAny>(value).is_ok()
        };
        let is_string = match end {
            _ if is_structure => false,
            Some(_) => !is_json(value),
            // It may yet go on.
            None if is_end => false,
            None if value.len() > LONGEST => true,
            None => return false,
        };
        self.state = self.decide(is_string, out);
        true
    }

    fn value(&mut self, is_end: bool, out: &mut impl FnMut(Kind, String)) -> bool {
        match self.closing(is_end) {
            Some(end) => {
                let value = self.take(end);
                out(Kind::Plain, value);
                // It may have none of its own.
                let tag = VALUE_ENDS.iter().find(|tag| self.text.starts_with(**tag));
                let own = tag.map(|tag| self.take(tag.len()));
                out(Kind::Text, own.unwrap_or_else(|| VALUE_ENDS[0].into()));
                self.state = State::Tags;
                true
            }
            None => {
                // A mark may follow, or what tells whether one closes the value.
                let open = match self.marks.first() {
                    Some(mark) => self.text.len() - (mark - "</".len()),
                    None => open(&self.text, CALL_ENDS[0]),
                };
                let bytes = self.text.len() - if is_end { 0 } else { open };
                if bytes > 0 {
                    let text = self.take(bytes);
                    out(Kind::Plain, text);
                }
                false
            }
        }
    }

    /// Where a value ends, if that is known. Marks that do not close it are text.
    fn closing(&mut self, is_end: bool) -> Option<usize> {
        while let Some(&mark) = self.marks.first() {
            let name = &self.text[mark + MARK.len()..];
            let name = name.strip_prefix(' ').unwrap_or(name);
            if self.text[..mark].ends_with("</") {
                if CLOSING.iter().any(|tag| name.starts_with(tag)) {
                    return Some(mark - "</".len());
                }
                if !is_end && CLOSING.iter().any(|tag| tag.starts_with(name)) {
                    return None;
                }
            }
            self.marks.remove(0);
        }
        None
    }
}

/// Bytes at the end of a text that may begin a tag.
pub fn open(text: &str, tag: &str) -> usize {
    let most = (tag.len() - 1).min(text.len());
    let lengths = (1..=most).rev();
    let begins = |bytes: &usize| text.as_bytes().ends_with(&tag.as_bytes()[..*bytes]);
    lengths.into_iter().find(begins).unwrap_or(0)
}
