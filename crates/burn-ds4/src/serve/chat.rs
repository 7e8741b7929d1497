//! `/v1/chat/completions`, `/v1/responses` and `/v1/messages`: requests.

use deepseek_recipe::request::{
    ConversationRequest, DEFAULT_MAX_EFFORT_MAX_TOKENS, DEFAULT_NON_THINKING_MAX_TOKENS,
    DEFAULT_THINKING_MAX_TOKENS, OutputConstraint,
};
use deepseek_recipe_core::conversation::{ReasoningEffort, ResponseFormat};
use deepseek_recipe_core::messages::InputMessage;
use deepseek_recipe_core::special_tokens::SpecialToken;
use deepseek_recipe_core::tools::ToolChoice;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::conversation::{Encoding, PromptError};
use crate::serve::app::App;
use crate::serve::convert;
use crate::serve::error::ApiError;
use crate::serve::grammar::{CallRules, Wanted};
use crate::serve::reply::Format;
use crate::serve::request::{Common, Parts, Prepared, check_log_probs, parse, whole};
use crate::serve::response_format::{ResponseFormat as AskedFormat, check_length};

/// Fields of messages.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MessageFields {
    output_config: Option<OutputConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OutputConfig {
    format: Option<AskedFormat>,
}

/// Fields of the three kinds.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    parallel_tool_calls: Option<bool>,
    #[serde(deserialize_with = "whole")]
    max_completion_tokens: Option<usize>,
    #[serde(deserialize_with = "whole")]
    max_output_tokens: Option<usize>,
    logprobs: Option<bool>,
    #[serde(deserialize_with = "whole")]
    top_logprobs: Option<usize>,
    tool_choice: Option<Value>,
}

impl Fields {
    /// Log-probabilities to list for each token of a chat.
    fn log_probs(&self) -> Result<Option<usize>, ApiError> {
        match (self.logprobs, self.top_logprobs) {
            (Some(true), top) => check_log_probs("top_logprobs", top.unwrap_or(0)).map(Some),
            (_, None | Some(0)) => Ok(None),
            (_, Some(_)) => {
                let message = "`top_logprobs` needs `logprobs`";
                Err(ApiError::invalid("top_logprobs", message))
            }
        }
    }

    /// Whether a call has to come, whichever of the kinds says so.
    fn forces_a_call(&self) -> bool {
        match &self.tool_choice {
            Some(Value::String(choice)) => choice == "required",
            Some(choice) => {
                let kind = choice.get("type").and_then(Value::as_str);
                matches!(kind, Some("any" | "tool" | "function" | "custom"))
            }
            None => false,
        }
    }

    /// How many calls an answer may have.
    fn one_call(&self, request: &ConversationRequest) -> bool {
        let anthropic = self.tool_choice.as_ref();
        let anthropic = anthropic.and_then(|choice| choice.get("disable_parallel_tool_use"));
        match self.parallel_tool_calls {
            Some(parallel) => !parallel,
            None if anthropic == Some(&Value::Bool(true)) => true,
            // A model that has to call something has been asked for one call.
            None => request.conversation.tool_choice == ToolChoice::Required,
        }
    }
}

/// Reads a request of `/v1/chat/completions`, and makes its prompt.
pub fn prepare(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let common: Common = parse(body)?;
    app.check_model(common.model.as_deref())?;
    let fields: Fields = parse(body)?;
    let log_probs = fields.log_probs()?;
    let format = common.format()?;
    let mut request = convert::chat(parse::<Map<_, _>>(body)?, app.loaded.encoding)?;
    request.conversation.response_format = format;
    let max_tokens = fields.max_completion_tokens.or(common.max_tokens);
    finish(
        app,
        common,
        &fields,
        Conversion::new(Format::Chat, request, max_tokens, log_probs),
    )
}

/// Reads a request of `/v1/responses`.
pub fn prepare_response(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let common: Common = parse(body)?;
    app.check_model(common.model.as_deref())?;
    let fields: Fields = parse(body)?;
    let max_tokens = fields.max_output_tokens;
    let mut request = convert::responses(parse(body)?, max_tokens, app.loaded.encoding)?;
    request.stream = common.streams();
    let top = fields.top_logprobs;
    let log_probs = top
        .map(|top| check_log_probs("top_logprobs", top))
        .transpose()?;
    finish(
        app,
        common,
        &fields,
        Conversion::new(Format::Responses, request, max_tokens, log_probs),
    )
}

/// Reads a request of `/v1/messages`.
pub fn prepare_message(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let (common, fields, conversion) = read_message(app, body)?;
    finish(app, common, &fields, conversion)
}

/// Tokens of the prompt of such a request.
pub fn count_message(app: &App, body: &[u8]) -> Result<usize, ApiError> {
    let (_, fields, conversion) = read_message(app, body)?;
    let prompt = encode(app, &fields, conversion.format, &conversion.request)?;
    Ok(prompt.len())
}

fn read_message(app: &App, body: &[u8]) -> Result<(Common, Fields, Conversion), ApiError> {
    let common: Common = parse(body)?;
    app.check_model(common.model.as_deref())?;
    let fields: Fields = parse(body)?;
    let own: MessageFields = parse(body)?;
    let max_tokens = common.max_tokens;
    let mut request = convert::messages(parse(body)?, max_tokens, app.loaded.encoding)?;
    if let Some(format) = own.output_config.and_then(|config| config.format) {
        request.conversation.response_format = format.read(Format::Messages)?;
    }
    let conversion = Conversion::new(Format::Messages, request, max_tokens, None);
    Ok((common, fields, conversion))
}

/// A request whose conversation is known.
struct Conversion {
    format: Format,
    request: ConversationRequest,
    max_tokens: usize,
    log_probs: Option<usize>,
}

impl Conversion {
    fn new(
        format: Format,
        request: ConversationRequest,
        max_tokens: Option<usize>,
        log_probs: Option<usize>,
    ) -> Self {
        // DeepSeek's API has the same lengths where none is given.
        let conversation = &request.conversation;
        let default = match (conversation.thinking_mode, conversation.reasoning_effort) {
            (false, _) => DEFAULT_NON_THINKING_MAX_TOKENS,
            (true, Some(ReasoningEffort::Max)) => DEFAULT_MAX_EFFORT_MAX_TOKENS,
            (true, _) => DEFAULT_THINKING_MAX_TOKENS,
        };
        Self {
            format,
            request,
            max_tokens: max_tokens.unwrap_or(default as usize),
            log_probs,
        }
    }
}

fn finish(
    app: &App,
    common: Common,
    fields: &Fields,
    conversion: Conversion,
) -> Result<Prepared, ApiError> {
    let Conversion {
        format,
        mut request,
        max_tokens,
        log_probs,
    } = conversion;
    // Those of `stop_sequences` are there.
    let stops = &mut request.parsing_options.stop_sequences;
    stops.extend(common.stops()?);
    let prompt = encode(app, fields, format, &request)?;
    let one_call = fields.one_call(&request);
    let wanted = wanted(&request, format, (one_call, app.loaded.encoding))?;
    let parts = Parts {
        format,
        prompts: vec![prompt],
        one_call,
        wanted,
        max_tokens,
        log_probs,
        conversation: Some(request),
    };
    common.prepare(parts, app)
}

/// The prompt of a conversation.
fn encode(
    app: &App,
    fields: &Fields,
    format: Format,
    request: &ConversationRequest,
) -> Result<Vec<u32>, ApiError> {
    let loaded = &app.loaded;
    let conversation = &request.conversation;
    if fields.forces_a_call() && conversation.tools.is_empty() {
        let message = "`tool_choice`: a call is asked for, and there are no tools";
        return Err(ApiError::invalid("tool_choice", message));
    }
    let prompt = loaded.encoding.encode(conversation, &loaded.tokenizer);
    prompt.map_err(|error| match &error {
        PromptError::MissingSpecialToken { token } if token == SpecialToken::Dsml.default_str() => {
            ApiError::invalid("tools", error.to_string())
        }
        PromptError::MissingSpecialToken { .. } => {
            ApiError::invalid(format.prompt(), error.to_string())
        }
        PromptError::Text(error) => ApiError::of_request(error, format.prompt()),
    })
}

/// What an answer has to be like, if that is more than a prompt can ask for.
fn wanted(
    request: &ConversationRequest,
    api: Format,
    (one_call, encoding): (bool, Encoding),
) -> Result<Option<Wanted>, ApiError> {
    let conversation = &request.conversation;
    let format = match &conversation.response_format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some(Wanted::Json(serde_json::json!({"type": "object"}))),
        ResponseFormat::JsonSchema(schema) => Some(Wanted::Json(schema.clone())),
        ResponseFormat::Regex(regex) => Some(Wanted::Regex(regex.clone())),
    };
    if let Some(format) = &format {
        let field = api.schema();
        let begun = |message: &InputMessage| {
            matches!(message, InputMessage::Assistant { prefix: true, .. })
        };
        if conversation.messages.last().is_some_and(begun) {
            let message = format!("`{field}`: an answer that has begun can have no format");
            return Err(ApiError::invalid(field, message));
        }
        let bytes = match format {
            Wanted::Regex(regex) => regex.len(),
            Wanted::Json(schema) => schema.to_string().len(),
            Wanted::Calls(_) | Wanted::CallsOr(..) => 0,
        };
        check_length(field, "the schema", bytes)?;
    }
    let has_tools = request.parsing_options.parse_tool_calls && !conversation.tools.is_empty();
    let required = conversation.tool_choice == ToolChoice::Required;
    let is_ruled = required || format.is_some() || convert::has_strict(&conversation.tools);
    if !has_tools || !is_ruled {
        return Ok(format);
    }
    let mut tools = conversation.tools.clone();
    // Arguments follow schemas as they are written, of which strict tools lose a part.
    if let Some(OutputConstraint::ToolCalls { tools: given, .. }) =
        &request.inference_options.output_constraint
    {
        for tool in &mut tools {
            if let Some(given) = given.iter().find(|given| given.name == tool.name) {
                tool.parameters.clone_from(&given.parameters);
            }
            if tool.strict == Some(true) {
                convert::require_all(&mut tool.parameters);
            }
        }
    }
    for tool in &tools {
        let name = format!("the schema of tool `{}`", tool.name);
        check_length("tools", &name, tool.parameters.to_string().len())?;
    }
    let rules = CallRules {
        tools,
        one_call,
        encoding,
    };
    Ok(Some(match required {
        true => Wanted::Calls(rules),
        false => Wanted::CallsOr(rules, format.map(Box::new)),
    }))
}
