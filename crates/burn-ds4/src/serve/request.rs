//! What both kinds of requests have in common.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use axum::http::StatusCode;
use deepseek_recipe::request::ConversationRequest;
use deepseek_recipe_core::conversation::ResponseFormat as WantedFormat;
use ds4_model::generate::{Request, SamplingConfig};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{
    DeserializeOwned, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde_json::Number;

use crate::serve::app::App;
use crate::serve::error::ApiError;
use crate::serve::grammar::Wanted;
use crate::serve::reply::Format;
use crate::serve::response_format::ResponseFormat;
use crate::shared::BYTE_ORDER_MARK;

/// Most stop strings.
const MAX_STOPS: usize = 16;
/// Largest entry of a logit bias, as in OpenAI's API.
const MAX_BIAS: f64 = 100.0;
/// Log-probabilities that are listed at most.
const MAX_LOG_PROBS: usize = 20;

/// Fields of both kinds of requests. Those that are not known are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Common {
    /// Name of the model.
    pub model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Tokens to generate at most, by the name that both kinds have.
    #[serde(deserialize_with = "whole")]
    pub max_tokens: Option<usize>,
    // What is beyond an f32 is out of a field's range, and not bad JSON.
    temperature: Option<f64>,
    top_p: Option<f64>,
    #[serde(deserialize_with = "whole")]
    top_k: Option<i64>,
    min_p: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    #[serde(deserialize_with = "biases")]
    logit_bias: BTreeMap<String, f64>,
    #[serde(deserialize_with = "whole")]
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    #[serde(deserialize_with = "whole")]
    n: Option<usize>,
    /// What the answer has to be like, of a chat.
    pub response_format: Option<ResponseFormat>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// A request that can be submitted.
#[derive(Debug)]
pub struct Prepared {
    /// How the answer is written.
    pub format: Format,
    /// What is answered, unless it is a text to continue.
    pub conversation: Option<ConversationRequest>,
    /// What to ask of the engine, one for each choice.
    pub requests: Vec<Request>,
    /// What the choices have to be like, until it [is read](Self::constrain).
    pub wanted: Option<Wanted>,
    /// Tokens of each prompt, which all have as many choices.
    pub prompts: Vec<usize>,
    /// Texts at which a choice ends.
    pub stops: Vec<String>,
    /// Whether a choice ends after its first tool call.
    pub one_call: bool,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// Seed of the first choice.
    pub seed: u64,
}

impl Prepared {
    /// Lets the choices be what is wanted.
    pub fn constrain(mut self, app: &App) -> Result<Self, ApiError> {
        if let Some(wanted) = self.wanted.take() {
            let conversation = self.conversation.as_ref();
            let stage = conversation.and_then(|own| own.parsing_options.thinking_initial_stage);
            let reasons = stage.is_some_and(|stage| stage.starts_in_reasoning());
            let constraint = app.constraint(wanted, self.format, reasons)?;
            for request in &mut self.requests {
                request.constraint = Some(constraint.fork());
            }
        }
        Ok(self)
    }
}

/// What kinds of requests differ in.
#[derive(Debug)]
pub struct Parts {
    /// How the answer is written.
    pub format: Format,
    /// What is answered, unless it is a text to continue.
    pub conversation: Option<ConversationRequest>,
    /// Token ids of the prompts.
    pub prompts: Vec<Vec<u32>>,
    /// Whether a choice ends after its first tool call.
    pub one_call: bool,
    /// What the content has to be like.
    pub wanted: Option<Wanted>,
    /// Tokens to generate at most, as far as they fit.
    pub max_tokens: usize,
    /// Log-probabilities to list.
    pub log_probs: Option<usize>,
}

/// Reads a whole number, also one that is written as `4.0`, as some languages write all numbers.
pub fn whole<'de, D: Deserializer<'de>, T: TryFrom<i64>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(deserializer)? else {
        return Ok(None);
    };
    // Up to where each whole number is one of f64.
    let is_exact = |value: &f64| value.fract() == 0.0 && value.abs() < (1_i64 << 53) as f64;
    let of_float = || number.as_f64().filter(is_exact).map(|value| value as i64);
    let value = number.as_i64().or_else(of_float);
    let value = value.and_then(|value| T::try_from(value).ok());
    let unlike = || D::Error::custom(format_args!("{number} is no whole number that fits"));
    value.map(Some).ok_or_else(unlike)
}

/// Reads a map of biases. PHP writes an empty one as an empty list.
fn biases<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    struct Biases;

    impl<'de> Visitor<'de> for Biases {
        type Value = BTreeMap<String, f64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map of token ids to biases")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(BTreeMap::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            BTreeMap::deserialize(MapAccessDeserializer::new(map))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            match list.next_element::<IgnoredAny>()? {
                None => Ok(BTreeMap::new()),
                Some(_) => Err(A::Error::invalid_type(Unexpected::Seq, &self)),
            }
        }
    }

    deserializer.deserialize_any(Biases)
}

/// Reads a body. The error names the field.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let bad = |message| ApiError::new(StatusCode::BAD_REQUEST, None, message);
    let text = std::str::from_utf8(body);
    let text = text.map_err(|error| bad(format!("the body is not UTF-8: {error}")))?;
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    // Lists would do as well, as the fields in their order.
    if !text.trim_start().starts_with('{') {
        return Err(bad("bad JSON: the body is not an object".into()));
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let (path, error) = (error.path().to_string(), error.into_inner());
        match error.is_data() {
            true => at_fault(&path, &error.to_string()),
            false => bad(format!("bad JSON: {error}")),
        }
    })?;
    let end = reader.end();
    end.map_err(|error| bad(format!("bad JSON: {error}")))?;
    Ok(value)
}

/// What does not fit, at this place of a body. The field that is missing is the one at fault, and
/// not the object that lacks it.
pub fn at_fault(path: &str, error: &str) -> ApiError {
    let missing = error.strip_prefix("missing field `");
    let missing = missing.and_then(|rest| Some(rest.split_once('`')?.0));
    let field = match (path, missing) {
        (".", None) => return ApiError::new(StatusCode::BAD_REQUEST, None, error),
        (".", Some(name)) => name.to_owned(),
        (_, None) => path.to_owned(),
        (_, Some(name)) => format!("{path}.{name}"),
    };
    ApiError::invalid(&field, format!("`{field}`: {error}"))
}

impl Common {
    /// Whether the answer is streamed.
    pub fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// What the answer has to be like.
    pub fn format(&self) -> Result<WantedFormat, ApiError> {
        let format = self.response_format.as_ref();
        format.map_or(Ok(WantedFormat::Text), |format| format.read(Format::Chat))
    }

    /// Checks the fields, and what the request asks for, against the model.
    pub fn prepare(self, parts: Parts, app: &App) -> Result<Prepared, ApiError> {
        let n = self.n.unwrap_or(1);
        let texts = n.saturating_mul(parts.prompts.len());
        let most = match parts.format {
            Format::Chat | Format::Completions => app.most_texts(),
            // An answer of these has no choices.
            Format::Responses | Format::Messages => 1,
        };
        if n == 0 || texts > most {
            let message = format!("`n`: {texts} texts are wanted, expected 1 to {most}");
            return Err(ApiError::invalid("n", message));
        }
        let (sampling, seed) = (self.sampling(app)?, self.seed.map(|seed| seed as u64));
        let seed = seed.unwrap_or_else(draw_seed);
        let mut requests = Vec::new();
        for prompt in &parts.prompts {
            let max_new_tokens = new_tokens(prompt.len(), &parts, app)?;
            for _ in 0..n {
                let sampling = SamplingConfig {
                    // Alike, the choices would be one.
                    seed: seed.wrapping_add(requests.len() as u64),
                    ..sampling.clone()
                };
                requests.push(Request {
                    sampling,
                    stop_tokens: app.loaded.defaults.stop_tokens.clone(),
                    log_probs: parts.log_probs,
                    ..Request::new(prompt, max_new_tokens)
                });
            }
        }
        let prompt = parts.format.prompt();
        for request in &requests {
            let checked = request.validate(&app.loaded.config);
            checked.map_err(|error| ApiError::of_request(&error, prompt))?;
        }
        Ok(Prepared {
            format: parts.format,
            conversation: parts.conversation,
            requests,
            wanted: parts.wanted,
            prompts: parts.prompts.iter().map(Vec::len).collect(),
            stops: self.stops()?,
            one_call: parts.one_call,
            stream: self.streams(),
            include_usage: self
                .stream_options
                .as_ref()
                .is_some_and(|options| options.include_usage == Some(true)),
            seed,
        })
    }

    /// How tokens are chosen: as the request says, and else as the checkpoint does.
    fn sampling(&self, app: &App) -> Result<SamplingConfig, ApiError> {
        let default = &app.loaded.defaults.sampling;
        let top_k = match self.top_k {
            None => default.top_k,
            // Both mean all.
            Some(-1 | 0) => 0,
            Some(top_k) => usize::try_from(top_k).map_err(|_| {
                let message = format!("`top_k` is {top_k}, expected -1, 0 or above");
                ApiError::invalid("top_k", message)
            })?,
        };
        let or = |given: Option<f64>, default| given.map_or(default, |given| given as f32);
        Ok(SamplingConfig {
            temperature: or(self.temperature, default.temperature),
            top_k,
            top_p: or(self.top_p, default.top_p),
            min_p: or(self.min_p, default.min_p),
            repetition_penalty: or(self.repetition_penalty, default.repetition_penalty),
            presence_penalty: or(self.presence_penalty, default.presence_penalty),
            frequency_penalty: or(self.frequency_penalty, default.frequency_penalty),
            logit_bias: self.logit_bias()?,
            seed: 0,
        })
    }

    fn logit_bias(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let entries = self.logit_bias.iter().map(|(token, bias)| {
            let invalid = |message| Err(ApiError::invalid("logit_bias", message));
            let Ok(id) = token.parse() else {
                return invalid(format!("`logit_bias`: {token:?} is not a token id"));
            };
            match bias.abs() <= MAX_BIAS {
                true => Ok((id, *bias as f32)),
                false => invalid(format!(
                    "`logit_bias[{id}]` is {bias}, expected between -{MAX_BIAS} and {MAX_BIAS}"
                )),
            }
        });
        entries.collect()
    }

    /// Texts at which an answer ends.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        let reason = if stops.len() > MAX_STOPS {
            format!("`stop` has {} strings, at most {MAX_STOPS}", stops.len())
        } else if let Some(index) = stops.iter().position(String::is_empty) {
            format!("`stop`: string {index} is empty")
        } else {
            return Ok(stops);
        };
        Err(ApiError::invalid("stop", reason))
    }
}

/// Tokens that a text of so many may go on for.
fn new_tokens(prompt: usize, parts: &Parts, app: &App) -> Result<usize, ApiError> {
    if parts.max_tokens == 0 {
        let field = parts.format.length();
        let message = format!("`{field}` is 0, expected at least 1");
        return Err(ApiError::invalid(field, message));
    }
    match app.context.checked_sub(prompt).filter(|left| *left > 0) {
        Some(left) => Ok(parts.max_tokens.min(left)),
        None => {
            let context = app.context;
            let message = format!(
                "the prompt has {prompt} tokens, the context {context}, of which the answer needs \
                 some"
            );
            Err(ApiError::too_long(parts.format.prompt(), message))
        }
    }
}

/// Refuses more log-probabilities than the engine lists.
pub fn check_log_probs(param: &str, count: usize) -> Result<usize, ApiError> {
    match count <= MAX_LOG_PROBS {
        true => Ok(count),
        false => {
            let message = format!("`{param}` is {count}, expected 0 to {MAX_LOG_PROBS}");
            Err(ApiError::invalid(param, message))
        }
    }
}

/// A random number: the keys of hash maps are drawn by the system.
pub fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// A seed that every client can read, and send again.
fn draw_seed() -> u64 {
    random() >> 11
}
