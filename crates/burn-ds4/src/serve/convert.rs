//! From the bodies of requests to conversations, by the conversions of `deepseek-recipe`. What
//! OpenAI's clients send and it refuses is written as it wants it.

use axum::http::StatusCode;
use deepseek_recipe::anthropic::messages::request::MessagesRequest;
use deepseek_recipe::openai::chat_completion::request::ChatCompletionRequest;
use deepseek_recipe::openai::responses::request::ResponsesRequest;
use deepseek_recipe::request::{
    ConversationRequest, ConversionError, ConversionOptions, ModelVersion, ProtocolRequest,
    WebSearchBehavior,
};
use deepseek_recipe_core::tools::{ToolChoice, ToolDefinition};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::conversation::Encoding;
use crate::serve::error::ApiError;
use crate::serve::request::at_fault;

/// The name that conversions know the model by. That of the request was checked before.
const MODEL: &str = "model";
/// Fields of a chat that its conversion gets; others are read by the server.
const CHAT_FIELDS: [&str; 7] = [
    "messages",
    "tools",
    "tool_choice",
    "thinking",
    "reasoning_effort",
    "stream",
    "parallel_tool_calls",
];

type Fields = Map<String, Value>;

fn options(encoding: Encoding) -> ConversionOptions {
    let version = match encoding {
        Encoding::V4 | Encoding::V4Flash0731 => ModelVersion::DeepseekV4Pro,
        Encoding::V41Flash => ModelVersion::DeepseekV41Flash,
    };
    ConversionOptions::new()
        .with_model_versions_by_name([(MODEL, version)])
        .with_default_thinking_mode(false)
        .with_messages_web_search(WebSearchBehavior::Drop)
        // The context bounds answers.
        .with_thinking_max_tokens_upper_bound(u32::MAX)
        .with_non_thinking_max_tokens_upper_bound(u32::MAX)
}

/// `/v1/chat/completions`: the conversation, without the format of the answer.
pub fn chat(mut body: Fields, encoding: Encoding) -> Result<ConversationRequest, ApiError> {
    let continues = body.get("continue_final_message") == Some(&Value::Bool(true));
    let thinks = body.get("chat_template_kwargs").and_then(|own| {
        own.get("thinking")
            .or(own.get("enable_thinking"))?
            .as_bool()
    });
    body.retain(|name, value| CHAT_FIELDS.contains(&name.as_str()) && !value.is_null());
    if let Some(thinks) = thinks {
        let kind = ["disabled", "enabled"][usize::from(thinks)];
        body.entry("thinking").or_insert(json!({"type": kind}));
    }
    if let Some(Value::Array(messages)) = body.get_mut("messages") {
        lenient_messages(messages);
        let last = messages.last_mut().and_then(Value::as_object_mut);
        if let Some(last) = last.filter(|last| continues && is_role(last, "assistant")) {
            last.insert("prefix".into(), json!(true));
        }
    }
    let mut strict = Vec::new();
    if let Some(Value::Array(tools)) = body.get_mut("tools") {
        for tool in tools {
            lenient_tool(tool);
            // Conversion refuses strict tools beside others.
            let function = tool.get_mut("function").and_then(Value::as_object_mut);
            if function.and_then(|own| own.remove("strict")) == Some(Value::Bool(true)) {
                let mut tool = tool.clone();
                tool["function"]["strict"] = json!(true);
                strict.push(tool);
            }
        }
    }
    let mut request: ConversationRequest = converted::<ChatCompletionRequest>(body, encoding)?;
    // Tools that must not be called are not looked at.
    if !strict.is_empty() && !request.conversation.tools.is_empty() {
        let body = json!({"messages": [{"role": "user", "content": ""}], "tools": strict});
        let Value::Object(body) = body else {
            unreachable!("an object");
        };
        let normal = converted::<ChatCompletionRequest>(body, encoding)?
            .conversation
            .tools;
        for tool in &mut request.conversation.tools {
            if let Some(normal) = normal.iter().find(|normal| normal.name == tool.name) {
                tool.clone_from(normal);
            }
        }
    }
    Ok(request)
}

/// `/v1/responses`, whose answer has so many tokens at most.
pub fn responses(
    mut body: Fields,
    max_tokens: Option<usize>,
    encoding: Encoding,
) -> Result<ConversationRequest, ApiError> {
    bound(&mut body, "max_output_tokens", max_tokens);
    converted::<ResponsesRequest>(body, encoding)
}

/// `/v1/messages`, whose answer has so many tokens at most.
pub fn messages(
    mut body: Fields,
    max_tokens: Option<usize>,
    encoding: Encoding,
) -> Result<ConversationRequest, ApiError> {
    bound(&mut body, "max_tokens", max_tokens);
    let choice = body
        .get("tool_choice")
        .and_then(|choice| choice.get("type"));
    let is_any = choice.is_some_and(|kind| kind == "any");
    let mut request = converted::<MessagesRequest>(body, encoding)?;
    let conversation = &mut request.conversation;
    // Conversion takes it for `auto`.
    if is_any && !conversation.tools.is_empty() {
        if conversation.thinking_mode {
            let message = "Thinking mode does not support this tool_choice";
            return Err(ApiError::invalid("tool_choice", message));
        }
        conversation.tool_choice = ToolChoice::Required;
        request.parsing_options.starts_in_tool_calls = true;
    }
    Ok(request)
}

/// Writes a length as conversion wants it: a whole number above 0 that it has place for. That of
/// the request is checked later.
fn bound(body: &mut Fields, name: &str, length: Option<usize>) {
    if let Some(length) = length {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        body.insert(name.into(), json!(length.max(1)));
    }
}

fn converted<R: ProtocolRequest + DeserializeOwned>(
    mut body: Fields,
    encoding: Encoding,
) -> Result<ConversationRequest, ApiError> {
    body.insert("model".into(), json!(MODEL));
    let request: Result<R, _> = serde_path_to_error::deserialize(Value::Object(body));
    let request = request.map_err(|error| {
        let (path, error) = (error.path().to_string(), error.into_inner());
        at_fault(&path, &error.to_string())
    })?;
    request.convert(options(encoding)).map_err(refusal)
}

/// What a conversion refuses, with the field at fault.
fn refusal(error: ConversionError) -> ApiError {
    let detail = match error {
        ConversionError::BadRequest { detail } => detail,
        ConversionError::Internal { detail } => return ApiError::failed(&detail),
    };
    // Told by words of its messages.
    let fields = [
        ("tool_choice", &["tool_choice", "'tool_call'"][..]),
        (
            "messages",
            &[
                "'tool_calls'",
                "tool_call_id",
                "message",
                "tool_use",
                "thinking",
            ],
        ),
        ("max_tokens", &["max_tokens"]),
        ("input", &["input", "call_id"]),
        ("tools", &["tools", "Tool ", "tool ", "function"]),
        ("stop", &["stop", "Stop"]),
    ];
    let has = |words: &[&str]| words.iter().any(|word| detail.contains(word));
    match fields.iter().find(|(_, words)| has(words)) {
        Some((field, _)) => ApiError::invalid(*field, detail),
        None => ApiError::new(StatusCode::BAD_REQUEST, None, detail),
    }
}

fn is_role(message: &Fields, role: &str) -> bool {
    message.get("role").is_some_and(|given| given == role)
}

fn is_null(value: Option<&Value>) -> bool {
    value.is_none_or(Value::is_null)
}

/// Messages as common clients write them.
fn lenient_messages(messages: &mut [Value]) {
    // Ids of calls that have no result yet.
    let mut open: Vec<String> = Vec::new();
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        if is_role(message, "developer") {
            // In OpenAI's API, the developer's instructions are the system's under another name.
            message.insert("role".into(), json!("system"));
        }
        if let Some(reasoning) = message.remove("reasoning")
            && is_null(message.get("reasoning_content"))
        {
            message.insert("reasoning_content".into(), reasoning);
        }
        match message.get_mut("content") {
            Some(Value::Array(parts)) => parts.iter_mut().for_each(|part| {
                if part.get("text").is_some_and(Value::is_null) {
                    part["text"] = json!("");
                }
            }),
            content if is_null(content.as_deref()) => {
                message.insert("content".into(), json!(""));
            }
            _ => (),
        }
        // Clients that keep an answer in an object of theirs send back a list without calls.
        let calls = message.get("tool_calls");
        if is_null(calls) || calls == Some(&json!([])) {
            message.remove("tool_calls");
        }
        if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
            open.clear();
            for (index, call) in calls
                .iter_mut()
                .filter_map(Value::as_object_mut)
                .enumerate()
            {
                open.push(lenient_call(call, index));
            }
        }
        if is_role(message, "tool") {
            let id = message.get("tool_call_id").and_then(Value::as_str);
            let at = id.map_or(Some(0), |id| open.iter().position(|open| open == id));
            if let Some(at) = at.filter(|at| *at < open.len()) {
                message.insert("tool_call_id".into(), json!(open.remove(at)));
            }
        }
    }
}

/// A call of an earlier answer. Returns its id.
fn lenient_call(call: &mut Fields, index: usize) -> String {
    call.entry("type").or_insert(json!("function"));
    if is_null(call.get("id")) {
        call.insert("id".into(), json!(format!("call_{index:02}")));
    }
    if let Some(Value::Object(function)) = call.get_mut("function") {
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => json!("{}"),
            Some(object @ Value::Object(_)) => json!(object.to_string()),
            Some(other) => other.clone(),
        };
        function.insert("arguments".into(), arguments);
    }
    call["id"].as_str().unwrap_or_default().to_owned()
}

/// A tool, which may be its function alone. An empty schema asks for nothing, and one without a
/// type is that of an object: arguments are nothing else.
fn lenient_tool(tool: &mut Value) {
    if tool.get("function").is_none() && tool.get("name").is_some() {
        *tool = json!({"function": tool.take()});
    }
    let Some(tool) = tool.as_object_mut() else {
        return;
    };
    if tool.contains_key("function") {
        tool.entry("type").or_insert(json!("function"));
    }
    let Some(Value::Object(function)) = tool.get_mut("function") else {
        return;
    };
    match function
        .get_mut("parameters")
        .and_then(Value::as_object_mut)
    {
        Some(schema) if schema.is_empty() => {
            function.remove("parameters");
        }
        Some(schema) if is_null(schema.get("type")) => {
            schema.insert("type".into(), json!("object"));
        }
        _ => (),
    }
}

/// Requires all properties of the parameters of a strict tool, and no others, where conversion
/// does. It also drops keywords, which are to be followed: an object with some that compose it is
/// left as it is.
pub fn require_all(schema: &mut Value) {
    let Some(keywords) = schema.as_object_mut() else {
        return;
    };
    if keywords.get("type").is_some_and(|kind| kind == "object") {
        let composed = ["allOf", "anyOf", "oneOf", "$ref"];
        if composed.iter().any(|name| keywords.contains_key(*name)) {
            return;
        }
        let properties = keywords.get("properties").and_then(Value::as_object);
        let names: Vec<&String> = properties.into_iter().flat_map(Fields::keys).collect();
        let required = json!(names);
        keywords.insert("required".into(), required);
        keywords.insert("additionalProperties".into(), json!(false));
    }
    for (name, value) in keywords {
        match (name.as_str(), value) {
            ("properties" | "$def", Value::Object(own)) => own.values_mut().for_each(require_all),
            ("anyOf", Value::Array(own)) => own.iter_mut().for_each(require_all),
            ("items", own) => require_all(own),
            _ => (),
        }
    }
}

/// Whether any of the tools is to be followed to the letter.
pub fn has_strict(tools: &[ToolDefinition]) -> bool {
    tools.iter().any(|tool| tool.strict == Some(true))
}

#[cfg(test)]
use crate::serve::request::{Common, parse};

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
