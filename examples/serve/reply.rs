//! Answers as OpenAI's API writes them, whole and as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::http::HeaderValue;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use ds4_model::generate::CompletionPart;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::answer::{Answer, Whole};
use crate::app::App;
use crate::error::{ApiError, json_response};
use crate::log_probs::{ListedToken, of_chat, of_completion};
use crate::request::{Prepared, random};
use crate::text::Update;
use crate::{chat, tracker::Tracker};

/// Which of the two kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Format {
    /// The parameter that has the prompt.
    pub fn prompt(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions => "prompt",
        }
    }

    fn log_probs(self, tokens: &[ListedToken]) -> Value {
        match (self, tokens) {
            (_, []) => Value::Null,
            (Self::Chat, tokens) => of_chat(tokens),
            (Self::Completions, tokens) => of_completion(tokens),
        }
    }

    /// A choice that has ended.
    fn whole(self, index: usize, whole: &Whole) -> Value {
        let mut choice = json!({
            "index": index,
            "logprobs": self.log_probs(&whole.log_probs),
            "finish_reason": whole.finish,
        });
        match self {
            Self::Chat => choice["message"] = chat::message(&whole.completion),
            Self::Completions => choice["text"] = json!(whole.completion.content),
        }
        choice
    }

    /// What an update adds to a choice, in the order of its parts.
    fn pieces(self, index: usize, update: &Update, calls: usize) -> Vec<Value> {
        let piece = |delta: Value, log_probs: Value, finish: Option<&str>| {
            let mut piece = json!({
                "index": index,
                "logprobs": log_probs,
                "finish_reason": finish,
            });
            match self {
                Self::Chat => piece["delta"] = delta,
                Self::Completions => {
                    piece["text"] = delta.get("content").cloned().unwrap_or_else(|| json!(""));
                }
            }
            piece
        };
        let is_call = |part: &&CompletionPart| matches!(part, CompletionPart::Call(_));
        // `calls` counts those of this update, too.
        let mut calls = calls - update.parts.iter().filter(is_call).count();
        let mut log_probs = self.log_probs(&update.log_probs);
        let mut pieces = Vec::new();
        for part in &update.parts {
            let listed = match part {
                CompletionPart::Content(_) => log_probs.take(),
                _ => Value::Null,
            };
            pieces.push(piece(chat::delta(part, calls), listed, None));
            calls += usize::from(is_call(&part));
        }
        if update.finish.is_some() {
            pieces.push(piece(json!({}), Value::Null, update.finish));
        }
        pieces
    }
}

/// What all answers, and all pieces of a stream, say of themselves.
#[derive(Debug)]
struct Heading {
    format: Format,
    id: String,
    created: u64,
    model: &'static str,
    fingerprint: &'static str,
}

impl Heading {
    fn new(format: Format, app: &'static App) -> Self {
        let prefix = match format {
            Format::Chat => "chatcmpl",
            Format::Completions => "cmpl",
        };
        Self {
            format,
            id: format!("{prefix}-{:016x}", random()),
            created: crate::app::unix_time(),
            model: &app.model,
            fingerprint: &app.fingerprint,
        }
    }

    fn object(&self, choices: Vec<Value>, streamed: bool) -> Value {
        let object = match (self.format, streamed) {
            (Format::Chat, false) => "chat.completion",
            (Format::Chat, true) => "chat.completion.chunk",
            (Format::Completions, _) => "text_completion",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }
}

/// Answers a request.
pub async fn reply(
    app: &'static App,
    prepared: Prepared,
    place: OwnedSemaphorePermit,
    tracker: std::sync::Arc<Tracker>,
) -> Result<Response, ApiError> {
    let (seed, streams, usage) = (prepared.seed, prepared.stream, prepared.include_usage);
    let mut answer = app.submit(prepared, place, tracker)?;
    let heading = Heading::new(answer.format, app);
    let mut response = match streams {
        true => stream(answer, heading, usage),
        false => {
            let wholes = answer.whole().await?;
            let choices = wholes.iter().enumerate();
            let choices = choices.map(|(index, whole)| answer.format.whole(index, whole));
            let mut body = heading.object(choices.collect(), false);
            body["usage"] = answer.usage();
            json_response(&body)
        }
    };
    let headers = response.headers_mut();
    headers.insert("x-ds4-seed", HeaderValue::from(seed));
    let deterministic = match app.deterministic {
        true => "true",
        false => "false",
    };
    headers.insert(
        "x-ds4-deterministic",
        HeaderValue::from_static(deterministic),
    );
    Ok(response)
}

/// A stream of events: pieces of the choices as they come, the usage if it is wanted, `[DONE]`.
struct Events {
    answer: Answer,
    heading: Heading,
    include_usage: bool,
    /// What comes next.
    ready: VecDeque<String>,
    ended: bool,
}

fn stream(answer: Answer, heading: Heading, include_usage: bool) -> Response {
    let mut events = Events {
        answer,
        heading,
        include_usage,
        ready: VecDeque::new(),
        ended: false,
    };
    if events.answer.format == Format::Chat {
        for index in 0..events.answer.count() {
            let delta = json!({"role": "assistant", "content": ""});
            events.send(json!({"index": index, "delta": delta, "finish_reason": null}));
        }
    }
    let events = stream::unfold(events, |mut events| async {
        let data = events.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(data)), events))
    });
    let events = Sse::new(events).keep_alive(KeepAlive::default());
    events.into_response()
}

impl Events {
    fn send(&mut self, choice: Value) {
        let mut object = self.heading.object(vec![choice], true);
        if self.include_usage {
            // As in OpenAI's API: all pieces have the field, the last one a value.
            object["usage"] = Value::Null;
        }
        self.ready.push_back(object.to_string());
    }

    async fn next(&mut self) -> Option<String> {
        while self.ready.is_empty() && !self.ended {
            match self.answer.next().await {
                Some(Ok((index, update))) => {
                    let (format, calls) = (self.answer.format, self.answer.calls(index));
                    for piece in format.pieces(index, &update, calls) {
                        self.send(piece);
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    self.ready.push_back(error.body().to_string());
                }
                None => {
                    self.ended = true;
                    if self.include_usage {
                        let mut object = self.heading.object(Vec::new(), true);
                        object["usage"] = self.answer.usage();
                        self.ready.push_back(object.to_string());
                    }
                    self.ready.push_back("[DONE]".into());
                }
            }
        }
        self.ready.pop_front()
    }
}
