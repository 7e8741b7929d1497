//! From a completion back to reasoning, content and tool calls.

use super::split::excerpt;
use super::{CompletionPart, CompletionSplitter, EOS_TOKEN, Message, ToolCall};
use crate::generate::error::GenerateError;

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

impl Extend<CompletionPart> for Completion {
    fn extend<T: IntoIterator<Item = CompletionPart>>(&mut self, parts: T) {
        for part in parts {
            match part {
                CompletionPart::Reasoning(text) => {
                    self.reasoning.get_or_insert_default().push_str(&text);
                }
                CompletionPart::Content(text) => self.content.push_str(&text),
                CompletionPart::Call(call) => self.tool_calls.push(call),
            }
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
/// token where only text may stand. [`CompletionSplitter`] goes on there.
///
/// # Example
///
/// ```
/// use ds4_model::generate::parse_completion;
///
/// let completion = parse_completion("one and one</think>Two.<｜end▁of▁sentence｜>", true)?;
/// assert_eq!(completion.reasoning.as_deref(), Some("one and one"));
/// assert_eq!(completion.content, "Two.");
/// # Ok::<(), ds4_model::generate::GenerateError>(())
/// ```
pub fn parse_completion(text: &str, thinking: bool) -> Result<Completion, GenerateError> {
    let text = match text.split_once(EOS_TOKEN) {
        Some((text, "")) => text,
        Some((_, rest)) => {
            return Err(GenerateError::Completion {
                reason: format!("{} after the end of the sequence", excerpt(rest)),
            });
        }
        None => text,
    };
    let mut splitter = CompletionSplitter::new(thinking);
    let mut completion = Completion {
        reasoning: thinking.then(String::new),
        ..Completion::default()
    };
    completion.extend(splitter.push(text));
    completion.extend(splitter.finish());
    splitter.error().map_or(Ok(completion), Err)
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
