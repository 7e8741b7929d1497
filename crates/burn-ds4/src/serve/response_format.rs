//! `response_format`: what an answer has to be like.

use deepseek_recipe_core::conversation::ResponseFormat as Wanted;
use serde::Deserialize;
use serde_json::Value;

use crate::serve::error::ApiError;

/// Name of the field, for errors.
const FIELD: &str = "response_format";
/// Most bytes of a schema. What a schema is multiplied out to while it is read takes memory.
pub const MAX_SCHEMA: usize = 32 << 10;

/// The field of a request.
#[derive(Debug, Deserialize)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
    regex: Option<String>,
}

/// A schema, which is followed whether it is to be strictly or not. Its name says nothing.
#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

impl ResponseFormat {
    /// What the answer has to be like.
    pub fn read(&self) -> Result<Wanted, ApiError> {
        let (text, wanted) = match (self.kind.as_str(), &self.json_schema, &self.regex) {
            ("text", ..) => return Ok(Wanted::Text),
            ("json_object", ..) => return Ok(Wanted::JsonObject),
            ("json_schema", None, _) => return Err(invalid("`json_schema` is missing")),
            ("json_schema", Some(named), _) => match &named.schema {
                Some(schema @ Value::Object(_)) => {
                    (schema.to_string(), Wanted::JsonSchema(schema.clone()))
                }
                _ => return Err(invalid("`json_schema.schema` is missing, or no object")),
            },
            ("regex", _, Some(regex)) => (regex.clone(), Wanted::Regex(regex.clone())),
            ("regex", _, None) => return Err(invalid("`regex` is missing")),
            (kind, ..) => {
                let expected = "expected text, json_object, json_schema or regex";
                return Err(invalid(&format!("the type is {kind:?}, {expected}")));
            }
        };
        match text.len() {
            0..=MAX_SCHEMA => Ok(wanted),
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
