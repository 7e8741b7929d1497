//! What an answer has to be like, as the APIs ask for it.

use deepseek_recipe_core::conversation::ResponseFormat as Wanted;
use serde::Deserialize;
use serde_json::Value;

use crate::serve::error::ApiError;
use crate::serve::reply::Format;

/// Most bytes of a schema. What a schema is multiplied out to while it is read takes memory.
pub const MAX_SCHEMA: usize = 32 << 10;

/// The field of a request.
#[derive(Debug, Deserialize)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    /// Of a chat.
    json_schema: Option<NamedSchema>,
    regex: Option<String>,
    /// Of a message.
    schema: Option<Value>,
}

/// A schema, which is followed whether it is to be strictly or not. Its name says nothing.
#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

impl ResponseFormat {
    /// What the answer has to be like.
    pub fn read(&self, api: Format) -> Result<Wanted, ApiError> {
        let field = api.schema();
        let invalid = |message: &str| ApiError::invalid(field, format!("`{field}`: {message}"));
        let is_message = api == Format::Messages;
        match (self.kind.as_str(), &self.json_schema, &self.regex) {
            ("json_schema", ..) if is_message => match &self.schema {
                Some(schema @ Value::Object(_)) => Ok(Wanted::JsonSchema(schema.clone())),
                _ => Err(invalid("`schema` is missing, or no object")),
            },
            (kind, ..) if is_message => Err(invalid(&format!(
                "the type is {kind:?}, expected json_schema"
            ))),
            ("text", ..) => Ok(Wanted::Text),
            ("json_object", ..) => Ok(Wanted::JsonObject),
            ("json_schema", None, _) => Err(invalid("`json_schema` is missing")),
            ("json_schema", Some(named), _) => match &named.schema {
                Some(schema @ Value::Object(_)) => Ok(Wanted::JsonSchema(schema.clone())),
                _ => Err(invalid("`json_schema.schema` is missing, or no object")),
            },
            ("regex", _, Some(regex)) => Ok(Wanted::Regex(regex.clone())),
            ("regex", _, None) => Err(invalid("`regex` is missing")),
            (kind, ..) => {
                let expected = "expected text, json_object, json_schema or regex";
                Err(invalid(&format!("the type is {kind:?}, {expected}")))
            }
        }
    }

    /// Refuses all but text, where nothing else is possible.
    pub fn refuse(&self) -> Result<(), ApiError> {
        match self.kind.as_str() {
            "text" => Ok(()),
            kind => Err(ApiError::unsupported(
                Format::Completions.schema(),
                &format!("{kind:?}"),
            )),
        }
    }
}

/// Refuses a schema, or a regular expression, of more bytes than are read.
pub fn check_length(field: &str, what: &str, bytes: usize) -> Result<(), ApiError> {
    match bytes {
        0..=MAX_SCHEMA => Ok(()),
        _ => {
            let message = format!("`{field}`: {what} has {bytes} bytes, at most {MAX_SCHEMA}");
            Err(ApiError::invalid(field, message))
        }
    }
}
