//! From messages to a prompt.

use std::collections::HashMap;

use super::json::Json;
use super::{
    ASSISTANT_TOKEN, BOS_TOKEN, ChatEncoding, ChatOptions, DSML_TOKEN, EOS_TOKEN,
    LATEST_REMINDER_TOKEN, Message, ReasoningEffort, THINK_END_TOKEN, THINK_START_TOKEN, Tool,
    ToolCall, USER_TOKEN,
};
use crate::generate::error::GenerateError;
use crate::generate::tokenizer::TextTokenizer;

const THOROUGH: &str = "\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

";

const BEYOND: &str = "\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

";

const RESPONSE_FORMAT: &str =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// What stands before the tool schemas. The control tokens in it are real ones.
const TOOLS_BEFORE: &str = "\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a \"<｜DSML｜tool_calls>\" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name=\"$TOOL_NAME\">
<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name=\"$TOOL_NAME2\">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string=\"true\"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

";

const TOOLS_AFTER: &str = "\n\nYou MUST strictly follow the above defined tool name and parameter \
schemas to invoke tool calls.\n";

/// A run of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Control(&'static str),
    Text(String),
}

/// A rendered conversation: text in which the control tokens are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatPrompt {
    segments: Vec<Segment>,
}

impl ChatPrompt {
    /// The prompt as one string, control tokens written out.
    pub fn text(&self) -> String {
        self.segments
            .iter()
            .map(|segment| match segment {
                Segment::Control(token) => token,
                Segment::Text(text) => text.as_str(),
            })
            .collect()
    }

    /// The prompt as token ids; content cannot become a control token.
    ///
    /// # Errors
    /// [`GenerateError::MissingSpecialToken`] for a control token that the tokenizer lacks, and
    /// those of [`TextTokenizer::encode_plain`].
    pub fn token_ids(&self, tokenizer: &TextTokenizer) -> Result<Vec<u32>, GenerateError> {
        let mut ids = Vec::new();
        for segment in &self.segments {
            match segment {
                Segment::Control(token) => ids.push(
                    tokenizer
                        .token_id(token)
                        .ok_or(GenerateError::MissingSpecialToken { token })?,
                ),
                Segment::Text(text) => ids.extend(tokenizer.encode_plain(text)?),
            }
        }
        Ok(ids)
    }

    fn control(&mut self, token: &'static str) {
        self.segments.push(Segment::Control(token));
    }

    /// Appends plain text. Neighbouring runs are joined, so that words merge across them as in one
    /// string.
    fn text_run(&mut self, text: &str) {
        match self.segments.last_mut() {
            Some(Segment::Text(last)) => last.push_str(text),
            _ if text.is_empty() => (),
            _ => self.segments.push(Segment::Text(text.into())),
        }
    }

    /// Appends the encoder's own text, in which control tokens stand for themselves.
    fn template(&mut self, mut text: &str) {
        const TOKENS: [&str; 3] = [DSML_TOKEN, THINK_START_TOKEN, THINK_END_TOKEN];
        while let Some((at, token)) = TOKENS
            .iter()
            .filter_map(|token| Some((text.find(token)?, *token)))
            .min()
        {
            self.text_run(&text[..at]);
            self.control(token);
            text = &text[at + token.len()..];
        }
        self.text_run(text);
    }
}

/// A message as the encoding represents it: user messages and tool results in one turn.
enum Turn<'a> {
    System(&'a str, &'a [Tool], Option<Json>),
    Developer(&'a str, &'a [Tool], Option<Json>),
    User(Vec<Block<'a>>),
    Assistant(&'a str, Option<&'a str>, &'a [ToolCall]),
    LatestReminder(&'a str),
}

enum Block<'a> {
    Text(&'a str),
    ToolResult { content: &'a str, call_id: &'a str },
}

impl Turn<'_> {
    /// Whether the assistant answers this turn.
    fn is_answered(&self) -> bool {
        matches!(self, Self::User(_) | Self::Developer(..))
    }

    fn declares_tools(&self) -> bool {
        matches!(
            self,
            Self::System(_, tools, _) | Self::Developer(_, tools, _) if !tools.is_empty()
        )
    }
}

/// Renders a conversation up to the point where the assistant continues.
///
/// # Errors
/// [`GenerateError::EmptyPrompt`] without messages, [`GenerateError::ChatMessage`] for a developer
/// message without content, [`GenerateError::ChatJson`] for a response format that is not JSON.
pub fn render_chat(
    messages: &[Message],
    options: &ChatOptions,
) -> Result<ChatPrompt, GenerateError> {
    if messages.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    let mut turns = turns(messages)?;
    sort_tool_results(&mut turns);
    let drop_thinking = options.drop_thinking && !turns.iter().any(Turn::declares_tools);
    if options.thinking && drop_thinking {
        let last = last_answered(&turns).unwrap_or(0);
        let mut index = 0;
        turns.retain(|turn| {
            index += 1;
            index > last || !matches!(turn, Turn::Developer(..))
        });
    }

    let last = last_answered(&turns);
    let mut prompt = ChatPrompt::default();
    if options.add_bos {
        prompt.control(BOS_TOKEN);
    }
    if options.thinking {
        prompt.text_run(instruction(options.encoding, options.effort));
    }
    for (index, turn) in turns.iter().enumerate() {
        let reasons = options.thinking && (!drop_thinking || last.is_none_or(|last| index > last));
        render_turn(&mut prompt, turn, reasons);
        let next = turns.get(index + 1);
        if turn.is_answered()
            && matches!(
                next,
                None | Some(Turn::Assistant(..) | Turn::LatestReminder(_))
            )
        {
            let thinks = options.thinking && (!drop_thinking || last == Some(index));
            prompt.control(ASSISTANT_TOKEN);
            prompt.control(if thinks {
                THINK_START_TOKEN
            } else {
                THINK_END_TOKEN
            });
        }
    }
    Ok(prompt)
}

/// What the model is told about how much to think.
fn instruction(encoding: ChatEncoding, effort: ReasoningEffort) -> &'static str {
    match (encoding, effort) {
        (_, ReasoningEffort::Low) | (ChatEncoding::V4, ReasoningEffort::High) => "",
        (ChatEncoding::V4, ReasoningEffort::Max) => THOROUGH,
        (ChatEncoding::V4Flash0731, ReasoningEffort::High) => THOROUGH,
        (ChatEncoding::V4Flash0731, ReasoningEffort::Max) => BEYOND,
    }
}

fn last_answered(turns: &[Turn]) -> Option<usize> {
    turns.iter().rposition(Turn::is_answered)
}

fn turns(messages: &[Message]) -> Result<Vec<Turn<'_>>, GenerateError> {
    let mut turns: Vec<Turn> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let block = match message {
            Message::System {
                content,
                tools,
                response_format,
            } => {
                turns.push(Turn::System(
                    content,
                    tools,
                    response_schema(response_format)?,
                ));
                continue;
            }
            Message::Developer {
                content,
                tools,
                response_format,
            } => {
                if content.is_empty() {
                    return Err(GenerateError::ChatMessage {
                        index,
                        reason: "a developer message needs content",
                    });
                }
                turns.push(Turn::Developer(
                    content,
                    tools,
                    response_schema(response_format)?,
                ));
                continue;
            }
            Message::Assistant {
                content,
                reasoning,
                tool_calls,
            } => {
                turns.push(Turn::Assistant(content, reasoning.as_deref(), tool_calls));
                continue;
            }
            Message::LatestReminder { content } => {
                turns.push(Turn::LatestReminder(content));
                continue;
            }
            Message::User { content } => Block::Text(content),
            Message::ToolResult { content, call_id } => Block::ToolResult { content, call_id },
        };
        match turns.last_mut() {
            Some(Turn::User(blocks)) => blocks.push(block),
            _ => turns.push(Turn::User(vec![block])),
        }
    }
    Ok(turns)
}

fn response_schema(text: &Option<String>) -> Result<Option<Json>, GenerateError> {
    let parse = |text: &String| {
        Json::parse(text).map_err(|reason| GenerateError::ChatJson {
            argument: "response_format",
            reason,
        })
    };
    text.as_ref().map(parse).transpose()
}

/// Brings the results of one turn into the order of the calls, whatever order the tools finished
/// in.
fn sort_tool_results(turns: &mut [Turn]) {
    let mut order: HashMap<&str, usize> = HashMap::new();
    for turn in turns {
        match turn {
            Turn::Assistant(_, _, calls) if !calls.is_empty() => {
                let numbered = calls
                    .iter()
                    .enumerate()
                    .filter(|(_, call)| !call.id.is_empty());
                order = numbered
                    .map(|(rank, call)| (call.id.as_str(), rank))
                    .collect();
            }
            Turn::User(blocks) => {
                let rank = |block: &Block| match block {
                    Block::ToolResult { call_id, .. } => {
                        Some(order.get(call_id).copied().unwrap_or(0))
                    }
                    Block::Text(_) => None,
                };
                let slots: Vec<usize> = (0..blocks.len())
                    .filter(|&at| rank(&blocks[at]).is_some())
                    .collect();
                let (mut results, mut texts): (Vec<Block>, Vec<Block>) = std::mem::take(blocks)
                    .into_iter()
                    .partition(|block| rank(block).is_some());
                results.sort_by_key(|block| rank(block));
                // Texts stay where they are; results fill the slots of results.
                let total = results.len() + texts.len();
                let (mut results, mut texts) = (results.drain(..), texts.drain(..));
                let merged = (0..total).filter_map(|at| match slots.binary_search(&at) {
                    Ok(_) => results.next(),
                    Err(_) => texts.next(),
                });
                *blocks = merged.collect();
            }
            _ => (),
        }
    }
}

fn render_turn(prompt: &mut ChatPrompt, turn: &Turn, reasons: bool) {
    match turn {
        Turn::System(content, tools, response_format) => {
            prompt.text_run(content);
            render_tools(prompt, tools, response_format);
        }
        Turn::Developer(content, tools, response_format) => {
            prompt.control(USER_TOKEN);
            prompt.text_run(content);
            render_tools(prompt, tools, response_format);
        }
        Turn::User(blocks) => {
            prompt.control(USER_TOKEN);
            for (index, block) in blocks.iter().enumerate() {
                prompt.text_run(if index == 0 { "" } else { "\n\n" });
                match block {
                    Block::Text(text) => prompt.text_run(text),
                    Block::ToolResult { content, .. } => {
                        prompt.text_run(&format!("<tool_result>{content}</tool_result>"));
                    }
                }
            }
        }
        Turn::Assistant(content, reasoning, calls) => {
            if reasons {
                prompt.text_run(reasoning.unwrap_or_default());
                prompt.control(THINK_END_TOKEN);
            }
            prompt.text_run(content);
            render_calls(prompt, calls);
            prompt.control(EOS_TOKEN);
        }
        Turn::LatestReminder(content) => {
            prompt.control(LATEST_REMINDER_TOKEN);
            prompt.text_run(content);
        }
    }
}

fn render_tools(prompt: &mut ChatPrompt, tools: &[Tool], response_format: &Option<Json>) {
    if !tools.is_empty() {
        prompt.text_run("\n\n");
        prompt.template(TOOLS_BEFORE);
        let schemas: Vec<String> = tools.iter().map(|tool| tool.function.to_string()).collect();
        prompt.text_run(&schemas.join("\n"));
        prompt.template(TOOLS_AFTER);
    }
    if let Some(schema) = response_format {
        prompt.text_run("\n\n");
        prompt.text_run(RESPONSE_FORMAT);
        prompt.text_run(&schema.to_string());
    }
}

fn render_calls(prompt: &mut ChatPrompt, calls: &[ToolCall]) {
    if calls.is_empty() {
        return;
    }
    prompt.template("\n\n<｜DSML｜tool_calls>\n");
    for call in calls {
        prompt.template("<｜DSML｜invoke name=\"");
        prompt.text_run(&call.name);
        prompt.text_run("\">\n");
        // Arguments that are not an object are passed on as they are, as the one parameter
        // `arguments`.
        let arguments = match Json::parse(&call.arguments) {
            Ok(Json::Object(entries)) => entries,
            _ => vec![("arguments".into(), Json::String(call.arguments.clone()))],
        };
        for (index, (name, value)) in arguments.iter().enumerate() {
            prompt.template(if index == 0 {
                "<｜DSML｜parameter name=\""
            } else {
                "\n<｜DSML｜parameter name=\""
            });
            prompt.text_run(name);
            match value {
                Json::String(value) => prompt.text_run(&format!("\" string=\"true\">{value}")),
                value => prompt.text_run(&format!("\" string=\"false\">{value}")),
            }
            prompt.template("</｜DSML｜parameter>");
        }
        prompt.template("\n</｜DSML｜invoke>\n");
    }
    prompt.template("</｜DSML｜tool_calls>");
}

#[cfg(test)]
#[path = "render_tests.rs"]
mod tests;
