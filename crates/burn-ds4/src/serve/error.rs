//! Errors, in the forms of OpenAI's and of Anthropic's API.

use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use ds4_model::cache::CacheError;
use ds4_model::generate::GenerateError;
use serde_json::{Value, json};

/// The path of Anthropic's API.
pub const MESSAGES: &str = "/v1/messages";

/// Why a request has no answer.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// Status of the response.
    pub status: StatusCode,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

impl ApiError {
    /// An error with a code for programs, or none.
    pub fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            message: message.into(),
        }
    }

    /// A parameter with a value that cannot be used.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(StatusCode::BAD_REQUEST, None, message)
        }
    }

    /// A parameter that OpenAI's API has, with a value that this server does not support.
    pub fn unsupported(param: &str, what: &str) -> Self {
        Self {
            code: Some("unsupported_value"),
            ..Self::invalid(param, format!("`{param}`: {what} is not supported yet"))
        }
    }

    /// A prompt that does not fit.
    pub fn too_long(prompt: &str, message: String) -> Self {
        Self {
            code: Some("context_length_exceeded"),
            ..Self::invalid(prompt, message)
        }
    }

    /// The engine has ended, or fails.
    pub fn failed(message: &str) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, Some("engine_failed"), message)
    }

    /// The server is about to end.
    pub fn stopping() -> Self {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, Some("stopping"), "the server is stopping")
    }

    /// An error of the library, in a request whose prompt is this parameter.
    pub fn of_request(error: &GenerateError, prompt: &str) -> Self {
        let message = error.to_string();
        match error {
            GenerateError::SamplingParameter { name, .. } => Self::invalid(*name, message),
            GenerateError::LogitBias { .. } => Self::invalid("logit_bias", message),
            GenerateError::TooManyLogProbs { .. } => Self::invalid("top_logprobs", message),
            GenerateError::EmptyStopString { .. } => Self::invalid("stop", message),
            // Of a text that has not begun: it would never fit.
            GenerateError::PromptTooLong { .. } | GenerateError::CacheMemory { .. } => {
                Self::too_long(prompt, message)
            }
            GenerateError::EmptyPrompt
            | GenerateError::PromptToken { .. }
            | GenerateError::Encode { .. }
            | GenerateError::ReservedToken { .. } => Self::invalid(prompt, message),
            _ => Self::of_engine(error),
        }
    }

    /// An error of the engine in the middle of an answer. What the device says stays in the log.
    pub fn of_engine(error: &GenerateError) -> Self {
        tracing::error!(%error, "a text has failed");
        match error {
            GenerateError::CacheMemory { .. }
            | GenerateError::Cache(CacheError::OutOfMemory { .. }) => {
                Self::failed("no memory is left for the text")
            }
            GenerateError::Constraint { .. } => {
                Self::failed("the answer cannot go on in the format that was asked for")
            }
            GenerateError::NoCandidate { .. } => Self::failed("no token can be chosen"),
            _ => Self::failed("the engine has failed"),
        }
    }

    /// The error object of OpenAI's API.
    pub fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The error object of Anthropic's API.
    pub fn message_body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }

    /// The event of OpenAI's API for responses.
    pub fn response_event(&self, sequence_number: usize) -> Value {
        json!({
            "type": "error",
            "code": self.code.unwrap_or("server_error"),
            "message": self.message,
            "param": self.param,
            "sequence_number": sequence_number,
        })
    }

    /// The response to a request for this path.
    pub fn response(&self, path: &str) -> Response {
        let mut response = json_response(&match path.starts_with(MESSAGES) {
            true => self.message_body(),
            false => self.body(),
        });
        *response.status_mut() = self.status;
        let header = match self.status {
            StatusCode::UNAUTHORIZED => Some((WWW_AUTHENTICATE, "Bearer")),
            StatusCode::TOO_MANY_REQUESTS => Some((RETRY_AFTER, "1")),
            _ => None,
        };
        if let Some((name, value)) = header {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}

impl IntoResponse for ApiError {
    /// Without a body: what is done for all requests knows their paths, and finds the error.
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// A response with this body.
pub fn json_response(body: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
