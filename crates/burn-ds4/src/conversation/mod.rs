//! Conversations, as [`Conversation`] of DeepSeek's own crates: how they become prompts, and how
//! answers are taken apart again.

mod calls;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod hidden;
mod parser;
mod pieces;

use std::collections::HashMap;
use std::sync::LazyLock;

use clap::ValueEnum;
pub use deepseek_recipe_core::conversation::{Conversation, ReasoningEffort};
pub use deepseek_recipe_core::messages::InputMessage;
use deepseek_recipe_core::prompt::Prompt;
use deepseek_recipe_encoding::dsv4::DeepseekV4Encoding;
use deepseek_recipe_encoding::dsv41::DeepseekV41Encoding;
use deepseek_recipe_encoding::{PromptEncoding, RenderedPrompt};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{GenerateError, TextTokenizer};

pub(crate) use calls::MARK;
pub(crate) use parser::AnswerParser;

/// The release whose chat prompts a checkpoint was trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Encoding {
    /// DeepSeek-V4 as it was released first.
    V4,
    /// V4-Flash-0731 and later ones, such as V4-Pro-0813: the releases with a DSpark drafter.
    #[value(name = "0731")]
    V4Flash0731,
    /// V4.1-Flash.
    #[value(name = "v4.1")]
    V41Flash,
}

/// How much a model is asked to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Effort {
    /// As much as it does without an instruction.
    Low,
    /// As `low` for the first release, thoroughly for later ones.
    High,
    /// As much as there is an instruction for.
    Max,
}

impl From<Effort> for ReasoningEffort {
    fn from(effort: Effort) -> Self {
        match effort {
            Effort::Low => Self::Low,
            Effort::High => Self::High,
            Effort::Max => Self::Max,
        }
    }
}

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The encoding needs a token that the tokenizer lacks.
    #[error("tokenizer.json has no special token `{token}`, which this conversation needs")]
    MissingSpecialToken {
        /// The token's text.
        token: String,
    },
    /// A text cannot be encoded.
    #[error(transparent)]
    Text(#[from] GenerateError),
}

impl Encoding {
    /// The encoding of a checkpoint, as its layers and its drafter tell.
    pub fn of(config: &ModelConfig) -> Self {
        match config.dspark {
            _ if config.has_v41_parts() => Self::V41Flash,
            Some(_) => Self::V4Flash0731,
            None => Self::V4,
        }
    }

    /// The prompt of a conversation, up to where the assistant goes on. Results of tools stand in
    /// the order of their calls, whatever the ids are.
    pub fn render(self, conversation: &Conversation) -> RenderedPrompt {
        static V4: LazyLock<DeepseekV4Encoding> = LazyLock::new(DeepseekV4Encoding::new);
        static V41: LazyLock<DeepseekV41Encoding> = LazyLock::new(DeepseekV41Encoding::new);

        let mut conversation = conversation.clone();
        in_call_order(&mut conversation.messages);
        match self {
            Self::V4 => {
                // The text that asks for most was that for `high` later.
                conversation.reasoning_effort = match conversation.reasoning_effort {
                    Some(ReasoningEffort::Max) => Some(ReasoningEffort::High),
                    _ => Some(ReasoningEffort::Low),
                };
                V4.render_conversation(&conversation)
            }
            Self::V4Flash0731 => V4.render_conversation(&conversation),
            Self::V41Flash => V41.render_conversation(&conversation),
        }
    }

    /// The ids of that prompt. Nothing that the conversation says becomes a control token.
    ///
    /// # Errors
    ///
    /// If the tokenizer lacks a token, or cannot encode a text.
    pub fn encode(
        self,
        conversation: &Conversation,
        tokenizer: &TextTokenizer,
    ) -> Result<Vec<u32>, PromptError> {
        let rendered = self.render(conversation);
        let (text, mut ids, mut start) = (&rendered.prompt, Vec::new(), 0);
        for range in &rendered.special_ranges {
            ids.extend(tokenizer.encode_plain(&text[start..range.start])?);
            let token = &text[range.clone()];
            ids.push(tokenizer.token_id(token).ok_or_else(|| {
                let token = token.to_owned();
                PromptError::MissingSpecialToken { token }
            })?);
            start = range.end;
        }
        ids.extend(tokenizer.encode_plain(&text[start..])?);
        Ok(ids)
    }
}

/// Gives the calls of each turn ids that sort in their order, and results the ids of their calls:
/// the encodings sort both by id.
fn in_call_order(messages: &mut [InputMessage]) {
    let mut ids: HashMap<String, String> = HashMap::new();
    for message in messages {
        match message {
            InputMessage::Assistant {
                tool_calls: Some(calls),
                ..
            } => {
                ids.clear();
                for (index, call) in calls.iter_mut().enumerate() {
                    let id = format!("call_{index:06}");
                    ids.insert(std::mem::replace(&mut call.id, id.clone()), id);
                }
            }
            InputMessage::Tool {
                tool_call_id: Some(id),
                ..
            } => {
                if let Some(new) = ids.get(id) {
                    id.clone_from(new);
                }
            }
            _ => (),
        }
    }
}

/// Instructions.
pub(crate) fn system(text: &str) -> InputMessage {
    InputMessage::System {
        content: Prompt::plain(text),
        image_sources: Vec::new(),
        tools: None,
    }
}

/// What the user says.
pub(crate) fn user(text: &str) -> InputMessage {
    InputMessage::User {
        content: Prompt::plain(text),
        image_sources: Vec::new(),
    }
}

/// What the assistant has said.
pub(crate) fn assistant(content: String, reasoning: Option<String>) -> InputMessage {
    InputMessage::Assistant {
        content,
        reasoning_content: reasoning,
        tool_calls: None,
        prefix: false,
    }
}

#[cfg(test)]
pub(crate) mod tests;
