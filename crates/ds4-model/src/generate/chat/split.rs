//! A completion taken apart while it arrives.

use super::json::Json;
use super::{
    ASSISTANT_TOKEN, BOS_TOKEN, DSML_TOKEN, EOS_TOKEN, LATEST_REMINDER_TOKEN, THINK_END_TOKEN,
    THINK_START_TOKEN, ToolCall, USER_TOKEN,
};
use crate::generate::error::GenerateError;
use crate::generate::stop::find_first;

const CALLS_START: &str = "\n\n<｜DSML｜tool_calls>\n";
const CALLS_END: &str = "</｜DSML｜tool_calls>";
const INVOKE_START: &str = "<｜DSML｜invoke name=\"";
const INVOKE_END: &str = "</｜DSML｜invoke>\n";
const NAME_END: &str = "\">\n";
const PARAMETER_START: &str = "<｜DSML｜parameter name=\"";
const PARAMETER_NAME_END: &str = "\" string=\"";
const KIND_END: &str = "\">";
const PARAMETER_END: &str = "</｜DSML｜parameter>\n";

/// What is not text. The longest of those that begin at the same place counts.
const MARKERS: [&str; 12] = [
    CALLS_START,
    // A tag out of place, as much of it as can be told from text.
    "\n\n<｜DSML｜",
    "</｜DSML｜",
    "<｜DSML｜",
    DSML_TOKEN,
    THINK_END_TOKEN,
    THINK_START_TOKEN,
    BOS_TOKEN,
    EOS_TOKEN,
    USER_TOKEN,
    ASSISTANT_TOKEN,
    LATEST_REMINDER_TOKEN,
];

/// A part of what the assistant says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompletionPart {
    /// The next piece of the reasoning.
    Reasoning(String),
    /// The next piece of the answer.
    Content(String),
    /// A tool call, whole. Its id is empty.
    Call(ToolCall),
}

/// Takes a completion apart while it arrives: [`parse_completion`](super::parse_completion) for
/// text in pieces.
///
/// However the text is divided, the parts joined are those of the whole text. No control token and
/// no markup of tool calls is ever part of reasoning or content: what may be the beginning of some
/// is withheld until it is decided.
///
/// Text that leaves the encoding has an [error](Self::error), and goes on as far as it can: control
/// tokens are left out where only text may stand; of tool calls that are malformed, those before
/// the first that is count, and nothing after.
///
/// ```
/// use ds4_model::generate::chat::{CompletionPart, CompletionSplitter};
///
/// let mut splitter = CompletionSplitter::new(true);
/// let reasoning = |text: &str| CompletionPart::Reasoning(text.into());
/// assert_eq!(splitter.push("Let me see.</th"), [reasoning("Let me see.")]);
/// assert_eq!(splitter.push("ink>42"), [CompletionPart::Content("42".into())]);
/// assert_eq!(splitter.finish(), []);
/// assert!(splitter.error().is_none());
/// ```
#[derive(Clone, Debug)]
pub struct CompletionSplitter {
    state: State,
    /// Text that is not decided yet.
    pending: String,
    /// Bytes of it that do not hold the end of what is being read.
    searched: usize,
    /// The call that is being read.
    call: Call,
    error: Option<String>,
}

/// What is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Reasoning,
    Content,
    /// A call or the end of all calls.
    Calls,
    Name,
    /// Like `Parameters`; without any, an empty line has their place.
    FirstParameter,
    /// A parameter or the end of the call.
    Parameters,
    ParameterName,
    Kind,
    Value,
    /// Nothing: the calls have ended.
    End,
    /// Nothing that can be understood.
    Lost,
}

#[derive(Clone, Debug, Default)]
struct Call {
    name: String,
    arguments: Vec<(String, Json)>,
    parameter: String,
    is_string: bool,
}

impl CompletionSplitter {
    /// A splitter for the text that continues a prompt of [`render_chat`](super::render_chat),
    /// decoded with its special tokens, up to the end-of-sequence token; `thinking` is the mode of
    /// the prompt.
    pub fn new(thinking: bool) -> Self {
        Self {
            state: match thinking {
                true => State::Reasoning,
                false => State::Content,
            },
            pending: String::new(),
            searched: 0,
            call: Call::default(),
            error: None,
        }
    }

    /// Takes the next piece of text and returns the parts that it completes, none of them empty.
    pub fn push(&mut self, text: &str) -> Vec<CompletionPart> {
        self.pending.push_str(text);
        self.parts(false)
    }

    /// Ends the text, and returns what was withheld.
    pub fn finish(&mut self) -> Vec<CompletionPart> {
        let parts = self.parts(true);
        let found = excerpt(&self.pending);
        let expected = |tag: &str| Some(format!("expected {tag:?}, found {found}"));
        let missing = |end: &str| Some(format!("no {end:?} after {found}"));
        let error = match self.state {
            State::Reasoning => Some(format!("the reasoning has no {THINK_END_TOKEN}")),
            State::Calls => expected(INVOKE_START),
            State::FirstParameter | State::Parameters => expected(PARAMETER_START),
            State::Name => missing(NAME_END),
            State::ParameterName => missing(PARAMETER_NAME_END),
            State::Kind => missing(KIND_END),
            State::Value => missing(PARAMETER_END),
            State::Content | State::End | State::Lost => None,
        };
        if let Some(reason) = error {
            self.lose(reason);
        }
        parts
    }

    /// Whether the text that comes next is part of the answer, as far as that is known.
    pub fn is_content(&self) -> bool {
        self.state == State::Content
    }

    /// Where the text has left the encoding, first.
    pub fn error(&self) -> Option<GenerateError> {
        let reason = self.error.clone()?;
        Some(GenerateError::Completion { reason })
    }

    fn parts(&mut self, ended: bool) -> Vec<CompletionPart> {
        let mut parts = Vec::new();
        while self.advance(&mut parts, ended) {}
        parts
    }

    /// Reads on; `false` where that takes more text.
    fn advance(&mut self, parts: &mut Vec<CompletionPart>, ended: bool) -> bool {
        let next = match self.state {
            State::Reasoning | State::Content => return self.read_text(parts, ended),
            State::Calls => match self.expect(&[CALLS_END, INVOKE_START]) {
                Some(CALLS_END) => State::End,
                Some(_) => State::Name,
                None => return false,
            },
            State::Name => match self.until(NAME_END) {
                Some(name) => {
                    self.call.name = name;
                    State::FirstParameter
                }
                None => return false,
            },
            State::FirstParameter | State::Parameters => {
                let tags = [INVOKE_END, PARAMETER_START, "\n"];
                let count = 2 + usize::from(self.state == State::FirstParameter);
                match self.expect(&tags[..count]) {
                    Some(INVOKE_END) => {
                        parts.push(CompletionPart::Call(std::mem::take(&mut self.call).end()));
                        State::Calls
                    }
                    Some(PARAMETER_START) => State::ParameterName,
                    Some(_) => State::Parameters,
                    None => return false,
                }
            }
            State::ParameterName => match self.until(PARAMETER_NAME_END) {
                Some(name) => {
                    self.call.parameter = name;
                    State::Kind
                }
                None => return false,
            },
            State::Kind => match self.until(KIND_END) {
                Some(kind) => match self.call.set_kind(&kind) {
                    Ok(()) => State::Value,
                    Err(reason) => return self.lose(reason),
                },
                None => return false,
            },
            State::Value => match self.until(PARAMETER_END) {
                Some(value) => match self.call.add(value) {
                    Ok(()) => State::Parameters,
                    Err(reason) => return self.lose(reason),
                },
                None => return false,
            },
            State::End if self.pending.is_empty() => return false,
            State::End => {
                let found = excerpt(&self.pending);
                return self.lose(format!("{found} after the tool calls"));
            }
            State::Lost => {
                self.pending.clear();
                return false;
            }
        };
        self.state = next;
        true
    }

    fn read_text(&mut self, parts: &mut Vec<CompletionPart>, ended: bool) -> bool {
        let found = find_first(&self.pending, &MARKERS, ended);
        let at = found.as_ref().map_or(self.pending.len(), |found| found.at);
        let rest = self.pending.split_off(at);
        let text = std::mem::replace(&mut self.pending, rest);
        let reasons = self.state == State::Reasoning;
        if !text.is_empty() {
            parts.push(match reasons {
                true => CompletionPart::Reasoning(text),
                false => CompletionPart::Content(text),
            });
        }
        let Some(marker) = found.and_then(|found| found.complete.filter(|_| !found.is_open)) else {
            return false;
        };
        let marker = MARKERS[marker];
        self.pending.drain(..marker.len());
        match marker {
            THINK_END_TOKEN if reasons => self.state = State::Content,
            CALLS_START if !reasons => self.state = State::Calls,
            _ if marker.contains(DSML_TOKEN) => {
                return self.lose(out_of_place(DSML_TOKEN));
            }
            _ => self.note(out_of_place(marker)),
        }
        true
    }

    /// Takes one of these tags, which has to be next. `None` where that takes more text, or none of
    /// them can be next.
    fn expect<'a>(&mut self, tags: &[&'a str]) -> Option<&'a str> {
        let tag = tags
            .iter()
            .find(|tag| self.pending.starts_with(**tag))
            .copied();
        match tag {
            Some(tag) => {
                self.pending.drain(..tag.len());
            }
            None if tags.iter().any(|tag| tag.starts_with(&self.pending)) => (),
            None => {
                let found = excerpt(&self.pending);
                self.lose(format!("expected {:?}, found {found}", tags[1]));
            }
        }
        tag
    }

    /// Takes the text before `end`, and `end`.
    fn until(&mut self, end: &str) -> Option<String> {
        let from = self.pending.floor_char_boundary(self.searched);
        let Some(at) = self.pending[from..].find(end) else {
            self.searched = self.pending.len().saturating_sub(end.len());
            return None;
        };
        self.searched = 0;
        let rest = self.pending.split_off(from + at + end.len());
        let mut value = std::mem::replace(&mut self.pending, rest);
        value.truncate(from + at);
        Some(value)
    }

    fn note(&mut self, reason: String) {
        self.error.get_or_insert(reason);
    }

    /// Gives up what follows. `true`, since there is text to be dropped.
    fn lose(&mut self, reason: String) -> bool {
        self.note(reason);
        self.state = State::Lost;
        true
    }
}

impl Call {
    fn set_kind(&mut self, kind: &str) -> Result<(), String> {
        self.is_string = match kind {
            "true" => true,
            "false" => false,
            other => {
                let (name, other) = (&self.parameter, excerpt(other));
                return Err(format!("the parameter {name:?} is marked string={other}"));
            }
        };
        Ok(())
    }

    fn add(&mut self, value: String) -> Result<(), String> {
        let name = std::mem::take(&mut self.parameter);
        let value = match self.is_string {
            true => Json::String(value),
            false => Json::parse(&value)
                .map_err(|error| format!("the parameter {name:?} is not JSON: {error}"))?,
        };
        if self.arguments.iter().any(|(known, _)| *known == name) {
            let call = &self.name;
            return Err(format!("the call of {call:?} has two parameters {name:?}"));
        }
        self.arguments.push((name, value));
        Ok(())
    }

    fn end(self) -> ToolCall {
        ToolCall {
            id: String::new(),
            name: self.name,
            arguments: Json::Object(self.arguments).to_string(),
        }
    }
}

fn out_of_place(token: &str) -> String {
    format!("{token} where only text may stand")
}

/// The start of a text, quoted, for a message.
pub(super) fn excerpt(text: &str) -> String {
    format!("{:?}", text.chars().take(24).collect::<String>())
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
