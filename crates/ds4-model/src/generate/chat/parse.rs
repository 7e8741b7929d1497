//! From a completion back to reasoning, content and tool calls.

use super::json::Json;
use super::{
    BOS_TOKEN, DSML_TOKEN, EOS_TOKEN, Message, THINK_END_TOKEN, THINK_START_TOKEN, ToolCall,
};
use crate::generate::error::GenerateError;

const CALLS_START: &str = "\n\n<｜DSML｜tool_calls>\n";
const CALLS_END: &str = "</｜DSML｜tool_calls>";
const INVOKE_START: &str = "<｜DSML｜invoke name=\"";
const INVOKE_END: &str = "</｜DSML｜invoke>\n";
const PARAMETER_START: &str = "<｜DSML｜parameter name=\"";
const PARAMETER_END: &str = "</｜DSML｜parameter>\n";

/// What the assistant has said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The reasoning; `None` outside thinking mode.
    pub reasoning: Option<String>,
    /// The answer.
    pub content: String,
    /// The tool calls; their ids are empty.
    pub tool_calls: Vec<ToolCall>,
}

impl From<Completion> for Message {
    fn from(completion: Completion) -> Self {
        let Completion {
            reasoning,
            content,
            tool_calls,
        } = completion;
        Self::Assistant {
            content,
            reasoning,
            tool_calls,
        }
    }
}

/// Takes apart the text that continues a prompt of [`render_chat`](super::render_chat), decoded
/// with its special tokens.
///
/// `thinking` is the mode of the prompt. The end-of-sequence token may be there or not.
///
/// # Errors
/// [`GenerateError::Completion`] where the text leaves the encoding: reasoning without end, tool
/// calls that are truncated or malformed, text after the tool calls or after the end, a control
/// token where only text may stand.
pub fn parse_completion(text: &str, thinking: bool) -> Result<Completion, GenerateError> {
    let text = match text.split_once(EOS_TOKEN) {
        Some((text, "")) => text,
        Some((_, rest)) => {
            return Err(bad(format!(
                "{} after the end of the sequence",
                excerpt(rest)
            )));
        }
        None => text,
    };
    let (reasoning, text) = match thinking {
        true => {
            let parts = text.split_once(THINK_END_TOKEN);
            let (reasoning, text) =
                parts.ok_or_else(|| bad(format!("the reasoning has no {THINK_END_TOKEN}")))?;
            (Some(reasoning), text)
        }
        false => (None, text),
    };
    let (content, calls) = match text.split_once(CALLS_START) {
        Some((content, calls)) => (content, Some(calls)),
        None => (text, None),
    };
    for token in [BOS_TOKEN, THINK_START_TOKEN, THINK_END_TOKEN, DSML_TOKEN] {
        if content.contains(token) || reasoning.is_some_and(|reasoning| reasoning.contains(token)) {
            return Err(bad(format!("{token} where only text may stand")));
        }
    }
    Ok(Completion {
        reasoning: reasoning.map(Into::into),
        content: content.into(),
        tool_calls: calls.map_or(Ok(Vec::new()), tool_calls)?,
    })
}

fn bad(reason: String) -> GenerateError {
    GenerateError::Completion { reason }
}

/// The start of a text, quoted, for a message.
fn excerpt(text: &str) -> String {
    format!("{:?}", text.chars().take(24).collect::<String>())
}

/// What is left of a block of tool calls.
struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    fn starts(&mut self, tag: &str) -> bool {
        let rest = self.0.strip_prefix(tag);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, tag: &str) -> Result<(), GenerateError> {
        let found = excerpt(self.0);
        if self.starts(tag) {
            Ok(())
        } else {
            Err(bad(format!("expected {tag:?}, found {found}")))
        }
    }

    fn until(&mut self, end: &str) -> Result<&'a str, GenerateError> {
        let (value, rest) = self
            .0
            .split_once(end)
            .ok_or_else(|| bad(format!("no {end:?} after {}", excerpt(self.0))))?;
        self.0 = rest;
        Ok(value)
    }
}

/// Reads the calls behind the opening tag.
fn tool_calls(text: &str) -> Result<Vec<ToolCall>, GenerateError> {
    let mut reader = Reader(text);
    let mut calls = Vec::new();
    while !reader.starts(CALLS_END) {
        reader.expect(INVOKE_START)?;
        let name = reader.until("\">\n")?;
        let mut arguments: Vec<(String, Json)> = Vec::new();
        // A call without parameters has an empty line in their place.
        reader.starts("\n");
        while !reader.starts(INVOKE_END) {
            reader.expect(PARAMETER_START)?;
            let (parameter, value) = read_parameter(&mut reader)?;
            if arguments.iter().any(|(name, _)| *name == parameter) {
                return Err(bad(format!(
                    "the call of {name:?} has two parameters {parameter:?}"
                )));
            }
            arguments.push((parameter, value));
        }
        calls.push(ToolCall {
            id: String::new(),
            name: name.into(),
            arguments: Json::Object(arguments).to_string(),
        });
    }
    match reader.0 {
        "" => Ok(calls),
        rest => Err(bad(format!("{} after the tool calls", excerpt(rest)))),
    }
}

fn read_parameter(reader: &mut Reader) -> Result<(String, Json), GenerateError> {
    let name = reader.until("\" string=\"")?;
    let is_string = match reader.until("\">")? {
        "true" => true,
        "false" => false,
        other => {
            return Err(bad(format!(
                "the parameter {name:?} is marked string={}",
                excerpt(other)
            )));
        }
    };
    let value = reader.until(PARAMETER_END)?;
    let value = match is_string {
        true => Json::String(value.into()),
        false => Json::parse(value)
            .map_err(|error| bad(format!("the parameter {name:?} is not JSON: {error}")))?,
    };
    Ok((name.into(), value))
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
