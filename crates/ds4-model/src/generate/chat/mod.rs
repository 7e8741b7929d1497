//! The chat encoding of DeepSeek-V4, and its inverse.
//!
//! A conversation is [`Message`]s; [`render_chat`] lays it out as a [`ChatPrompt`], which turns
//! into text or token ids. [`parse_completion`] takes the model's answer apart,
//! [`CompletionSplitter`] does so while it arrives.
//!
//! ```text
//! <｜begin▁of▁sentence｜>{system}<｜User｜>{user}<｜Assistant｜></think>{answer}<｜end▁of▁sentence｜>...
//! ```
//!
//! * In thinking mode the assistant's turn starts with `<think>`, and reasoning stands before
//!   `</think>`; in chat mode the turn starts with `</think>` at once. There are no line breaks
//!   between the parts.
//! * Reasoning of turns before the last user message is left out, unless tools are declared.
//!   Developer messages before the last user message are left out together with it.
//! * Tools are declared at the end of the system or developer message. Calls are blocks of
//!   `<｜DSML｜tool_calls>`; their results stand as `<tool_result>` in a user turn, in the order of
//!   the calls. Neighbouring user messages and results form one turn, separated by empty lines.
//! * Maximum effort is a fixed text right after the beginning-of-sequence token, in thinking mode
//!   only.
//!
//! The fixed texts (tool instructions, response format, effort) are those of the reference encoder
//! that is released with the weights, to the letter, because the model was trained on them.
//!
//! # Injection
//! Only the encoder itself writes control tokens. [`ChatPrompt::token_ids`] encodes everything that
//! comes from messages, tool schemas and tool calls as plain text, so a user who types
//! `<｜Assistant｜>` does not open an assistant turn. [`ChatPrompt::text`] cannot make that
//! difference; encode it only if the content is trusted. Markup that is not a control token, such
//! as `</tool_result>`, is not escaped; the reference encoder has no escape for it.

mod json;
mod parse;
mod render;
mod split;

pub use parse::{Completion, parse_completion};
pub use render::{ChatPrompt, render_chat};
pub use split::{CompletionPart, CompletionSplitter};

use serde::{Deserialize, Deserializer, de};

use super::error::GenerateError;
use json::Json;

/// Beginning of the sequence.
pub const BOS_TOKEN: &str = "<｜begin▁of▁sentence｜>";
/// End of the sequence, and of every assistant turn.
pub const EOS_TOKEN: &str = "<｜end▁of▁sentence｜>";
/// Start of a user turn.
pub const USER_TOKEN: &str = "<｜User｜>";
/// Start of an assistant turn.
pub const ASSISTANT_TOKEN: &str = "<｜Assistant｜>";
/// Start of a reminder.
pub const LATEST_REMINDER_TOKEN: &str = "<｜latest_reminder｜>";
/// Start of reasoning.
pub const THINK_START_TOKEN: &str = "<think>";
/// End of reasoning.
pub const THINK_END_TOKEN: &str = "</think>";
/// Marks the tags of tool calls.
pub const DSML_TOKEN: &str = "｜DSML｜";

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Instructions of the operator; the place to declare tools.
    System {
        /// The instructions.
        content: String,
        /// Tools that the assistant may call.
        tools: Vec<Tool>,
        /// JSON schema that the answer must follow, as JSON text.
        response_format: Option<String>,
    },
    /// A task with its own tools, in place of a user message.
    Developer {
        /// The task; must not be empty.
        content: String,
        /// Tools that the assistant may call.
        tools: Vec<Tool>,
        /// JSON schema that the answer must follow, as JSON text.
        response_format: Option<String>,
    },
    /// What the user says.
    User {
        /// The text.
        content: String,
    },
    /// What the assistant said.
    Assistant {
        /// The answer.
        content: String,
        /// The reasoning that led to it.
        reasoning: Option<String>,
        /// The tool calls that follow it.
        tool_calls: Vec<ToolCall>,
    },
    /// The result of a tool call.
    ToolResult {
        /// The result.
        content: String,
        /// [`ToolCall::id`] of the call.
        call_id: String,
    },
    /// Context such as the date, usually between system and user message.
    LatestReminder {
        /// The text.
        content: String,
    },
}

impl Message {
    /// A system message without tools.
    pub fn system(content: impl Into<String>) -> Self {
        Self::System {
            content: content.into(),
            tools: Vec::new(),
            response_format: None,
        }
    }

    /// A user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::User {
            content: content.into(),
        }
    }

    /// An assistant message without reasoning or tool calls.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::Assistant {
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
        }
    }

    /// The result of the tool call with this id.
    pub fn tool_result(call_id: impl Into<String>, content: impl Into<String>) -> Self {
        Self::ToolResult {
            content: content.into(),
            call_id: call_id.into(),
        }
    }
}

/// A tool declaration.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    function: Json,
}

impl Tool {
    /// Reads a function declaration (`name`, `description`, `parameters`), bare or as the
    /// `function` of an object whose `type` is `function`. Keys keep their order.
    ///
    /// # Errors
    /// [`GenerateError::ChatJson`] for text that is not JSON or not an object with a `name`.
    pub fn from_json(text: &str) -> Result<Self, GenerateError> {
        let tool = Json::parse(text).and_then(Self::from_value);
        tool.map_err(|reason| GenerateError::ChatJson {
            argument: "tool",
            reason,
        })
    }

    fn from_value(value: Json) -> Result<Self, String> {
        let function = value.get("function").cloned().unwrap_or(value);
        match function.get("name") {
            Some(Json::String(name)) if !name.is_empty() => Ok(Self { function }),
            _ => Err("a function declaration needs a `name`".into()),
        }
    }
}

impl<'de> Deserialize<'de> for Tool {
    /// As [`from_json`](Self::from_json).
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_value(Json::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// A tool call by the assistant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Links the call to its result; may be empty. It is not part of the encoding.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// The arguments as the text of a JSON object.
    pub arguments: String,
}

/// How much the model is asked to think in thinking mode. What it is told depends on the
/// [`ChatEncoding`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// No instruction.
    #[default]
    Low,
    /// To think as thoroughly as it can, from `0731` on; before, no instruction.
    High,
    /// To think as thoroughly as it can and, from `0731` on, beyond.
    Max,
}

/// The release whose prompts a checkpoint was trained on. They differ in the text that stands for
/// the [`ReasoningEffort`].
///
/// # Source
///
/// `encoding/encoding_dsv4.py` of DeepSeek-V4-Flash and of DeepSeek-V4-Flash-0731.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChatEncoding {
    /// DeepSeek-V4 as it was released first.
    #[default]
    V4,
    /// V4-Flash-0731, and later ones such as V4-Pro-0813: the releases with a DSpark drafter.
    V4Flash0731,
}

/// How a conversation is rendered. The default is chat mode with a beginning-of-sequence token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// Whether the assistant reasons before it answers.
    pub thinking: bool,
    /// How much; without effect unless `thinking`.
    pub effort: ReasoningEffort,
    /// What the model was trained on.
    pub encoding: ChatEncoding,
    /// Whether reasoning before the last user message is left out; without effect where tools are
    /// declared.
    pub drop_thinking: bool,
    /// Whether the prompt starts with the beginning-of-sequence token.
    pub add_bos: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            thinking: false,
            effort: ReasoningEffort::default(),
            encoding: ChatEncoding::default(),
            drop_thinking: true,
            add_bos: true,
        }
    }
}
