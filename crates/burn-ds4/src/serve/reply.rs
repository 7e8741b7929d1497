//! Answers as each API writes them, whole and as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::http::HeaderValue;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use deepseek_recipe::anthropic::messages::request::MessagesRequest;
use deepseek_recipe::anthropic::messages::response::{MessagesChunkGenerator, MessagesResponse};
use deepseek_recipe::openai::chat_completion::request::ChatCompletionRequest;
use deepseek_recipe::openai::chat_completion::response::{
    ChatCompletionChunk, ChatCompletionChunkGenerator, ChatCompletionFinishReason,
    ChatCompletionResponse,
};
use deepseek_recipe::openai::responses::request::ResponsesRequest;
use deepseek_recipe::openai::responses::response::{
    ResponsesChunkGenerator, ResponsesResponse, ResponsesStreamEvent,
};
use deepseek_recipe::request::{ConversationRequest, ProtocolRequest};
use deepseek_recipe::response::{Accumulate, ProtocolResponse};
use deepseek_recipe::stream::{ChunkGenerator, OutputChunk};
use futures_util::{FutureExt, stream};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::serve::answer::Answer;
use crate::serve::app::{App, unix_time};
use crate::serve::error::{ApiError, json_response};
use crate::serve::log_probs::{ListedToken, of_completion};
use crate::serve::request::{Prepared, random};
use crate::serve::text::Update;
use crate::serve::tracker::Tracker;

/// The kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

impl Format {
    /// The parameter that has the prompt.
    pub fn prompt(self) -> &'static str {
        match self {
            Self::Chat | Self::Messages => "messages",
            Self::Completions => "prompt",
            Self::Responses => "input",
        }
    }

    /// The parameter that has a format of the answer.
    pub fn schema(self) -> &'static str {
        match self {
            Self::Chat | Self::Completions => "response_format",
            Self::Responses => "text.format",
            Self::Messages => "output_config.format",
        }
    }

    /// The parameter that says how long an answer may be.
    pub fn length(self) -> &'static str {
        match self {
            Self::Chat | Self::Completions | Self::Messages => "max_tokens",
            Self::Responses => "max_output_tokens",
        }
    }
}

/// A choice of a completion.
#[derive(Debug, Default)]
struct Completion {
    text: String,
    log_probs: Vec<ListedToken>,
    finish: Option<ChatCompletionFinishReason>,
}

// An answer has one.
#[allow(clippy::large_enum_variant)]
/// Writes the parts of an answer, each kind by what its API's makers have published.
enum Writer {
    Completions(Vec<Completion>),
    /// Each choice has its own calls.
    Chat(Vec<ChatCompletionChunkGenerator>, ChatCompletionResponse),
    Responses(ResponsesChunkGenerator, ResponsesResponse, usize),
    Messages(MessagesChunkGenerator, MessagesResponse),
}

/// An event of a stream, with a name where its API has names.
type Named = (Option<&'static str>, Value);

/// What a generator makes of a part, for which it waits for nothing.
fn chunks<G: ChunkGenerator>(generator: &mut G, chunk: OutputChunk) -> Vec<G::Chunk> {
    generator.generate(chunk).now_or_never().unwrap_or_default()
}

fn value(of: impl serde::Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

fn started<R: ProtocolRequest>(
    conversation: &ConversationRequest,
    id: &str,
    model: &str,
) -> (
    <R::Response as ProtocolResponse>::ChunkGenerator,
    R::Response,
) {
    let generator = R::chunk_generator(conversation, id.to_owned(), model.to_owned());
    let response = R::Response::new(id.to_owned(), model.to_owned(), unix_time(), 0, 0);
    (generator, response)
}

impl Writer {
    fn new(answer: &Answer, heading: &Heading) -> Self {
        let (id, model, count) = (&heading.id, heading.model, answer.count());
        let Some(conversation) = &answer.conversation else {
            return Self::Completions((0..count).map(|_| Completion::default()).collect());
        };
        match answer.format {
            Format::Responses => {
                let (generator, response) = started::<ResponsesRequest>(conversation, id, model);
                Self::Responses(generator, response, 0)
            }
            Format::Messages => {
                let (generator, response) = started::<MessagesRequest>(conversation, id, model);
                Self::Messages(generator, response)
            }
            Format::Chat | Format::Completions => {
                let start = || started::<ChatCompletionRequest>(conversation, id, model);
                let generators = (0..count).map(|_| start().0).collect();
                Self::Chat(generators, start().1)
            }
        }
    }

    /// Events of what a token adds to a choice.
    fn events(&mut self, heading: &Heading, index: usize, update: Update) -> Vec<Named> {
        let mut events = Vec::new();
        if let Self::Completions(_) = self {
            let piece = Completion::of(update);
            if !piece.text.is_empty() || piece.finish.is_some() {
                events.push((None, heading.object(vec![piece.choice(index)], true)));
            }
            return events;
        }
        for chunk in update.chunks {
            match self {
                Self::Completions(_) => (),
                Self::Chat(generators, _) => {
                    for chunk in chunks(&mut generators[index], chunk) {
                        let choices = chat_choices(chunk, index);
                        events.push((None, heading.object(choices, true)));
                    }
                }
                Self::Responses(generator, _, next) => {
                    for event in chunks(generator, chunk) {
                        *next += 1;
                        events.push((event_name(&event), value(event)));
                    }
                }
                Self::Messages(generator, _) => {
                    for event in chunks(generator, chunk) {
                        events.push((Some(event.event_type()), value(event)));
                    }
                }
            }
        }
        events
    }

    /// Takes what a token adds to a choice of an answer that is written whole.
    fn add(&mut self, index: usize, update: Update) {
        if let Self::Completions(all) = self {
            let piece = Completion::of(update);
            let whole = &mut all[index];
            whole.text += &piece.text;
            whole.log_probs.extend(piece.log_probs);
            whole.finish = whole.finish.or(piece.finish);
            return;
        }
        for chunk in update.chunks {
            match self {
                Self::Completions(_) => (),
                Self::Chat(generators, response) => {
                    for mut chunk in chunks(&mut generators[index], chunk) {
                        chunk
                            .choices
                            .iter_mut()
                            .for_each(|choice| choice.index = index as u32);
                        response.accumulate(chunk);
                    }
                }
                Self::Responses(generator, response, _) => {
                    let events = chunks(generator, chunk).into_iter();
                    events.for_each(|event| response.accumulate(event));
                }
                Self::Messages(generator, response) => {
                    let events = chunks(generator, chunk).into_iter();
                    events.for_each(|event| response.accumulate(event));
                }
            }
        }
    }

    /// The whole answer.
    fn whole(self, heading: &Heading, usage: Value) -> Value {
        let choices = match self {
            Self::Responses(_, response, _) => return value(response),
            Self::Messages(_, response) => return value(response),
            Self::Completions(all) => {
                let choices = all.iter().enumerate();
                choices.map(|(index, whole)| whole.choice(index)).collect()
            }
            Self::Chat(_, mut response) => {
                response.choices.sort_by_key(|choice| choice.index);
                response.choices.into_iter().map(whole_choice).collect()
            }
        };
        let mut object = heading.object(choices, false);
        object["usage"] = usage;
        object
    }

    /// The last event of a stream that fails.
    fn error(&self, error: &ApiError) -> Named {
        match self {
            Self::Completions(_) | Self::Chat(..) => (None, error.body()),
            Self::Responses(_, _, next) => (Some("error"), error.response_event(*next)),
            Self::Messages(..) => (Some("error"), error.message_body()),
        }
    }
}

impl Completion {
    fn of(update: Update) -> Self {
        let mut piece = Self {
            finish: update.finish().map(Into::into),
            log_probs: update.log_probs,
            ..Self::default()
        };
        for chunk in update.chunks {
            if let OutputChunk::Content { content, .. } = chunk {
                piece.text += &content;
            }
        }
        piece
    }

    fn choice(&self, index: usize) -> Value {
        let log_probs = match &self.log_probs[..] {
            [] => Value::Null,
            tokens => of_completion(tokens),
        };
        json!({
            "index": index,
            "logprobs": log_probs,
            "finish_reason": self.finish,
            "text": self.text,
        })
    }
}

/// The choices of a chunk, which has one.
fn chat_choices(chunk: ChatCompletionChunk, index: usize) -> Vec<Value> {
    let choices = chunk.choices.into_iter().map(|mut choice| {
        choice.index = index as u32;
        value(choice)
    });
    choices.collect()
}

/// A choice that is written whole. As in OpenAI's API, calls alone have no content.
fn whole_choice(choice: impl serde::Serialize) -> Value {
    let mut choice = value(choice);
    let message = &mut choice["message"];
    if message.get("tool_calls").is_some() && message["content"] == "" {
        message["content"] = Value::Null;
    }
    choice
}

fn event_name(event: &ResponsesStreamEvent) -> Option<&'static str> {
    ResponsesResponse::sse_event_name(event)
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
            Format::Chat => "chatcmpl-",
            Format::Completions => "cmpl-",
            Format::Responses => "resp_",
            Format::Messages => "msg_",
        };
        Self {
            format,
            id: format!("{prefix}{:016x}", random()),
            created: unix_time(),
            model: &app.model,
            fingerprint: &app.fingerprint,
        }
    }

    fn object(&self, choices: Vec<Value>, streamed: bool) -> Value {
        let object = match (self.format, streamed) {
            (Format::Completions, _) => "text_completion",
            (_, false) => "chat.completion",
            (_, true) => "chat.completion.chunk",
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
    tracker: Arc<Tracker>,
) -> Result<Response, ApiError> {
    let (seed, streams, usage) = (prepared.seed, prepared.stream, prepared.include_usage);
    let mut answer = app.submit(prepared, place, tracker)?;
    let heading = Heading::new(answer.format, app);
    let mut writer = Writer::new(&answer, &heading);
    let mut response = if streams {
        stream(Events {
            answer,
            heading,
            writer,
            include_usage: usage,
            ready: VecDeque::new(),
            ended: false,
        })
    } else {
        while let Some(next) = answer.next().await {
            let (index, update) = next?;
            writer.add(index, update);
        }
        json_response(&writer.whole(&heading, answer.usage()))
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

/// A stream of events: pieces of the choices as they come, and what ends it.
struct Events {
    answer: Answer,
    heading: Heading,
    writer: Writer,
    include_usage: bool,
    /// What comes next.
    ready: VecDeque<Event>,
    ended: bool,
}

fn stream(events: Events) -> Response {
    let events = stream::unfold(events, |mut events| async {
        let event = events.next().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    let events = Sse::new(events).keep_alive(KeepAlive::default());
    events.into_response()
}

fn event((name, data): Named) -> Event {
    let event = Event::default();
    // As in the API, the name comes first: some clients read a line at a time.
    let event = match name {
        Some(name) => event.event(name),
        None => event,
    };
    event.data(data.to_string())
}

impl Events {
    /// Whether the API is one whose streams have objects with choices, and an end of their own.
    fn has_choices(&self) -> bool {
        matches!(self.answer.format, Format::Chat | Format::Completions)
    }

    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.ended {
            let next = self.answer.next().await;
            self.ended = !matches!(next, Some(Ok(_)));
            match next {
                Some(Ok((index, update))) => {
                    let usage = self.include_usage && self.has_choices();
                    for mut named in self.writer.events(&self.heading, index, update) {
                        if usage {
                            // As in OpenAI's API: all pieces have the field, the last one a value.
                            named.1["usage"] = Value::Null;
                        }
                        self.ready.push_back(event(named));
                    }
                }
                Some(Err(error)) => self.ready.push_back(event(self.writer.error(&error))),
                None if self.has_choices() => {
                    if self.include_usage {
                        let mut object = self.heading.object(Vec::new(), true);
                        object["usage"] = self.answer.usage();
                        self.ready.push_back(event((None, object)));
                    }
                    self.ready.push_back(Event::default().data("[DONE]"));
                }
                None => (),
            }
        }
        self.ready.pop_front()
    }
}
