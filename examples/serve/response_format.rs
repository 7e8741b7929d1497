//! `response_format`: what an answer has to be like.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::ApiError;

/// Name of the field, for errors.
const FIELD: &str = "response_format";
/// Most bytes of a schema. What a schema is multiplied out to while it is read takes memory.
const MAX_SCHEMA: usize = 32 << 10;

/// The field of a request.
#[derive(Debug, Deserialize)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
}

/// A schema, which is followed whether it is to be strictly or not.
#[derive(Debug, Deserialize)]
struct NamedSchema {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "strict", default)]
    _strict: Option<bool>,
    schema: Option<Value>,
}

impl ResponseFormat {
    /// The JSON schema that the answer has to follow, `None` for any text.
    pub fn schema(&self) -> Result<Option<Value>, ApiError> {
        let named = match (self.kind.as_str(), &self.json_schema) {
            ("text", _) => return Ok(None),
            ("json_object", _) => return Ok(Some(json!({"type": "object"}))),
            ("json_schema", Some(named)) => named,
            ("json_schema", None) => return Err(invalid("`json_schema` is missing")),
            (kind, _) => {
                let expected = "expected text, json_object or json_schema";
                return Err(invalid(&format!("the type is {kind:?}, {expected}")));
            }
        };
        let Some(schema @ Value::Object(_)) = &named.schema else {
            return Err(invalid("`json_schema.schema` is missing, or no object"));
        };
        match schema.to_string().len() {
            0..=MAX_SCHEMA => Ok(Some(schema.clone())),
            bytes => Err(invalid(&format!(
                "the schema has {bytes} bytes, at most {MAX_SCHEMA}"
            ))),
        }
    }

    /// Refuses all but text, where nothing else is possible.
    pub fn refuse(&self) -> Result<(), ApiError> {
        match self.kind.as_str() {
            "text" => Ok(()),
            kind => Err(ApiError::unsupported(FIELD, &format!("{kind:?}"))),
        }
    }
}

fn invalid(message: &str) -> ApiError {
    ApiError::invalid(FIELD, format!("`{FIELD}`: {message}"))
}
