//! `/v1/chat/completions`: requests, and the messages of answers.

use ds4_model::generate::chat::DSML_TOKEN;
use ds4_model::generate::{
    ChatEncoding, ChatOptions, Completion, CompletionPart, GenerateError, Message, ReasoningEffort,
    Tool, ToolCall, render_chat,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::reply::Format;
use crate::request::{Common, Parts, Prepared, check_log_probs, parse, random, whole};
use crate::response_format::ResponseFormat;
use crate::shared::answer_text::Split;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    messages: Vec<ChatMessage>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    #[serde(deserialize_with = "whole")]
    max_completion_tokens: Option<usize>,
    logprobs: Option<bool>,
    #[serde(deserialize_with = "whole")]
    top_logprobs: Option<usize>,
    chat_template_kwargs: Option<TemplateOptions>,
}

/// Options of chat templates, by which vLLM's and SGLang's clients switch reasoning on and off.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TemplateOptions {
    thinking: Option<bool>,
    enable_thinking: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<Content>,
    reasoning_content: Option<String>,
    /// The same by the name that vLLM and OpenRouter give it.
    reasoning: Option<String>,
    tool_calls: Option<Vec<Call>>,
    tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Call {
    id: Option<String>,
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    /// A string with an object, or the object.
    arguments: Option<Value>,
}

impl Fields {
    /// How much the model is to think: as the effort says, unless a switch says otherwise.
    fn effort(&self) -> Option<&str> {
        let switches = self.chat_template_kwargs.as_ref();
        let thinks = switches.and_then(|own| own.thinking.or(own.enable_thinking));
        match (thinks, self.reasoning_effort.as_deref()) {
            (Some(false), _) => None,
            (Some(true), None | Some("none")) => Some("low"),
            (_, effort) => effort,
        }
    }
}

/// Reads a request, and makes its prompt.
pub fn prepare(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let common: Common = parse(body)?;
    app.check_model(common.model.as_deref())?;
    let fields: Fields = parse(body)?;
    let effort = fields.effort();
    let options = options(effort, app.loaded.encoding)?;
    let log_probs = match (fields.logprobs, fields.top_logprobs) {
        (Some(true), top) => Some(check_log_probs("top_logprobs", top.unwrap_or(0))?),
        (_, None | Some(0)) => None,
        (_, Some(_)) => {
            let message = "`top_logprobs` needs `logprobs`";
            return Err(ApiError::invalid("top_logprobs", message));
        }
    };
    let tools = match uses_tools(fields.tool_choice.as_ref())? {
        true => fields.tools.unwrap_or_default(),
        false => Vec::new(),
    };
    let format = common.response_format.as_ref();
    let schema = format.map_or(Ok(None), ResponseFormat::schema)?;
    if schema.is_some() && !tools.is_empty() {
        let what = "a JSON format together with `tools`";
        return Err(ApiError::unsupported("response_format", what));
    }
    let has_tools = !tools.is_empty();
    let messages = messages(fields.messages, tools, schema.as_ref())?;
    let prompt = render_chat(&messages, &options);
    let prompt = prompt.and_then(|prompt| prompt.token_ids(&app.loaded.tokenizer));
    let prompt = prompt.map_err(|error| {
        let at_fault = match error {
            GenerateError::MissingSpecialToken { token } if has_tools && token == DSML_TOKEN => {
                "tools"
            }
            _ => "messages",
        };
        ApiError::of_request(&error, at_fault)
    })?;
    let parts = Parts {
        format: Format::Chat,
        prompts: vec![prompt],
        split: match (&schema, options.thinking) {
            (None, thinking) => Split::Chat { thinking },
            (Some(_), false) => Split::Content,
            (Some(_), true) => Split::Reasoning {
                end: app.reasoning_end()?,
            },
        },
        one_call: fields.parallel_tool_calls == Some(false),
        schema,
        max_tokens: fields.max_completion_tokens.or(common.max_tokens),
        log_probs,
    };
    common.prepare(parts, app)
}

/// The levels that the encoding has.
fn options(effort: Option<&str>, encoding: ChatEncoding) -> Result<ChatOptions, ApiError> {
    let (thinking, effort) = match effort {
        None | Some("none") => (false, ReasoningEffort::Low),
        Some("low") => (true, ReasoningEffort::Low),
        Some("high") => (true, ReasoningEffort::High),
        Some("max") => (true, ReasoningEffort::Max),
        Some(other) => {
            let message =
                format!("`reasoning_effort` is {other:?}, expected none, low, high or max");
            return Err(ApiError::invalid("reasoning_effort", message));
        }
    };
    Ok(ChatOptions {
        thinking,
        effort,
        encoding,
        ..ChatOptions::default()
    })
}

/// Whether the model may call tools.
fn uses_tools(choice: Option<&Value>) -> Result<bool, ApiError> {
    match choice {
        None => Ok(true),
        Some(Value::String(choice)) if choice == "auto" => Ok(true),
        Some(Value::String(choice)) if choice == "none" => Ok(false),
        Some(_) => Err(ApiError::unsupported(
            "tool_choice",
            "anything but \"auto\" and \"none\"",
        )),
    }
}

/// The conversation, with the tools and the schema of the answer in its first system message.
fn messages(
    given: Vec<ChatMessage>,
    mut tools: Vec<Tool>,
    schema: Option<&Value>,
) -> Result<Vec<Message>, ApiError> {
    let mut schema = schema.map(Value::to_string);
    match given.last().map(|message| message.role.as_str()) {
        Some("user" | "tool") => (),
        None => {
            let message = "`messages` is missing or empty";
            return Err(ApiError::invalid("messages", message));
        }
        // There is nothing to answer.
        Some(_) => {
            let message = "the last message must be of the role user or tool";
            return Err(ApiError::invalid("messages", message));
        }
    }
    let mut messages = Vec::with_capacity(given.len() + 1);
    let given = given.into_iter().enumerate();
    for message in given.map(|(index, message)| message.read(index)) {
        let mut message = message?;
        if let Message::System {
            tools: own,
            response_format,
            ..
        } = &mut message
        {
            own.append(&mut tools);
            *response_format = schema.take();
        }
        messages.push(message);
    }
    if !tools.is_empty() || schema.is_some() {
        let system = Message::System {
            content: String::new(),
            tools,
            response_format: schema,
        };
        messages.insert(0, system);
    }
    Ok(messages)
}

impl ChatMessage {
    fn read(self, index: usize) -> Result<Message, ApiError> {
        let text = match self.content {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                if let Some(part) = parts.iter().find(|part| part.kind != "text") {
                    let param = format!("messages[{index}].content");
                    let message = format!("a part of the type {:?}, expected text", part.kind);
                    return Err(ApiError::invalid(param, message));
                }
                parts.into_iter().filter_map(|part| part.text).collect()
            }
        };
        Ok(match self.role.as_str() {
            // In OpenAI's API, the developer's instructions are the system's under another name.
            "system" | "developer" => Message::system(text),
            "user" => Message::user(text),
            "tool" => Message::tool_result(self.tool_call_id.unwrap_or_default(), text),
            "assistant" => Message::Assistant {
                content: text,
                reasoning: self.reasoning_content.or(self.reasoning),
                tool_calls: self.tool_calls.into_iter().flatten().map(call).collect(),
            },
            other => {
                let param = format!("messages[{index}].role");
                let message = format!(
                    "the role is {other:?}, expected system, developer, user, assistant or tool"
                );
                return Err(ApiError::invalid(param, message));
            }
        })
    }
}

fn call(call: Call) -> ToolCall {
    ToolCall {
        id: call.id.unwrap_or_default(),
        name: call.function.name,
        arguments: match call.function.arguments {
            None => String::new(),
            Some(Value::String(written)) => written,
            Some(object) => object.to_string(),
        },
    }
}

/// A tool call of an answer.
fn written(call: &ToolCall) -> Value {
    json!({
        "id": format!("call_{:016x}", random()),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

/// The message of an answer.
pub fn message(completion: &Completion) -> Value {
    let calls = &completion.tool_calls;
    let mut message = json!({"role": "assistant", "content": completion.content});
    if let Some(reasoning) = &completion.reasoning {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.iter().map(written).collect();
        if completion.content.is_empty() {
            message["content"] = Value::Null;
        }
    }
    message
}

/// What a part adds to the message of an answer that had so many calls before.
pub fn delta(part: &CompletionPart, calls: usize) -> Value {
    match part {
        CompletionPart::Reasoning(text) => json!({"reasoning_content": text}),
        CompletionPart::Content(text) => json!({"content": text}),
        CompletionPart::Call(call) => {
            let mut call = written(call);
            call["index"] = json!(calls);
            json!({"tool_calls": [call]})
        }
    }
}
