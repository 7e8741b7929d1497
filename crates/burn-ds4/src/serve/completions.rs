//! `/v1/completions`: requests.

use serde::Deserialize;

use crate::serve::app::App;
use crate::serve::error::ApiError;
use crate::serve::reply::Format;
use crate::serve::request::{Common, Parts, Prepared, check_log_probs, parse, whole};

/// Tokens of an answer, where the request does not say: OpenAI's number.
const MAX_TOKENS: usize = 16;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    prompt: Option<Prompt>,
    #[serde(deserialize_with = "whole")]
    logprobs: Option<usize>,
    echo: Option<bool>,
    suffix: Option<String>,
    #[serde(deserialize_with = "whole")]
    best_of: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

/// Reads a request, and makes its prompts.
pub fn prepare(app: &App, body: &[u8]) -> Result<Prepared, ApiError> {
    let common: Common = parse(body)?;
    app.check_model(common.model.as_deref())?;
    let fields: Fields = parse(body)?;
    if let Some(format) = &common.response_format {
        format.refuse()?;
    }
    let unsupported = [
        ("echo", fields.echo == Some(true)),
        (
            "suffix",
            fields.suffix.is_some_and(|suffix| !suffix.is_empty()),
        ),
        ("best_of", fields.best_of.is_some_and(|count| count > 1)),
    ];
    if let Some((param, _)) = unsupported.iter().find(|(_, given)| *given) {
        return Err(ApiError::unsupported(param, "this"));
    }
    let check = |count| check_log_probs("logprobs", count);
    let parts = Parts {
        format: Format::Completions,
        prompts: prompts(app, fields.prompt)?,
        conversation: None,
        one_call: false,
        wanted: None,
        max_tokens: common.max_tokens.unwrap_or(MAX_TOKENS),
        log_probs: fields.logprobs.map(check).transpose()?,
    };
    common.prepare(parts, app)
}

fn prompts(app: &App, prompt: Option<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
    let texts = match prompt {
        Some(Prompt::Text(text)) => vec![text],
        Some(Prompt::Texts(texts)) if !texts.is_empty() => texts,
        Some(Prompt::Ids(ids)) => return Ok(vec![ids]),
        Some(Prompt::Lists(lists)) => return Ok(lists),
        Some(Prompt::Texts(_)) | None => {
            let message = "`prompt` is missing or empty";
            return Err(ApiError::invalid("prompt", message));
        }
    };
    let ids = texts.iter().map(|text| app.encode(text));
    let ids = ids.collect::<Result<_, _>>();
    ids.map_err(|error| ApiError::of_request(&error, "prompt"))
}
