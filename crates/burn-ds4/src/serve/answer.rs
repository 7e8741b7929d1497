//! An answer while it is generated: the choices of a request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http::StatusCode;
use deepseek_recipe::request::ConversationRequest;
use ds4_model::generate::GenerateError;
use serde_json::{Value, json};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, timeout_at};

use crate::serve::engine::{Event, NoToken};
use crate::serve::error::ApiError;
use crate::serve::reply::Format;
use crate::serve::text::{ChoiceText, Update};
use crate::serve::tracker::Tracker;

/// The choices of a request. Those that still run are given up when this is dropped.
#[derive(Debug)]
pub struct Answer {
    /// How it is written.
    pub format: Format,
    /// What it answers, unless it continues a text.
    pub conversation: Option<ConversationRequest>,
    /// The choices of all prompts, each of which has as many.
    pub choices: Vec<Choice>,
    /// Tokens of each prompt.
    pub prompts: Vec<usize>,
    /// When it is given up.
    pub deadline: Instant,
    /// Tells configurations apart that may answer differently.
    pub fingerprint: &'static str,
    /// Who takes note of it.
    pub tracker: Arc<Tracker>,
}

impl Drop for Answer {
    /// One that could not be written until its deadline was not polled any more.
    fn drop(&mut self) {
        if Instant::now() >= self.deadline {
            self.tracker.late();
        }
    }
}

/// A text, and where its tokens come from, until it has ended.
#[derive(Debug)]
pub struct Choice {
    /// Its text.
    pub text: ChoiceText,
    /// Dropping it gives up the text.
    pub events: Option<Receiver<Event>>,
}

fn timeout(message: &str) -> ApiError {
    ApiError::new(StatusCode::GATEWAY_TIMEOUT, Some("timeout"), message)
}

impl Answer {
    /// Number of choices.
    pub fn count(&self) -> usize {
        self.choices.len()
    }

    /// What comes next, and of which choice; `None` once all have ended. After an error, nothing
    /// comes.
    pub async fn next(&mut self) -> Option<Result<(usize, Update), ApiError>> {
        let next = timeout_at(self.deadline, poll_fn(|context| self.poll(context))).await;
        let error = match next {
            Ok(None) => {
                self.tracker.end("completed");
                return None;
            }
            Ok(Some((index, Some(Ok(token))))) => {
                let of_each = (self.choices.len() / self.prompts.len().max(1)).max(1);
                let prompt = self.prompts[index / of_each];
                let choice = &mut self.choices[index];
                let update = choice.text.push(&token, prompt, self.fingerprint);
                if update.finish().is_some() {
                    choice.events = None;
                }
                self.tracker.generated();
                return Some(Ok((index, update)));
            }
            Ok(Some((index, Some(Err(NoToken::Failed(error)))))) => self.failure(index, &error),
            Ok(Some((_, Some(Err(NoToken::Behind))))) => timeout("the answer is not read"),
            Ok(Some((_, None))) => ApiError::failed("the engine has ended"),
            Ok(Some((_, Some(Err(NoToken::Late))))) | Err(_) => {
                timeout("the answer has taken too long")
            }
        };
        self.choices.clear();
        self.tracker.end(match error.status {
            StatusCode::GATEWAY_TIMEOUT => "timeout",
            _ => "failed",
        });
        Some(Err(error))
    }

    /// An event of any choice, `None` where none runs any more.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Option<Event>)>> {
        let mut runs = false;
        for (index, choice) in self.choices.iter_mut().enumerate() {
            let Some(events) = &mut choice.events else {
                continue;
            };
            runs = true;
            if let Poll::Ready(event) = events.poll_recv(context) {
                return Poll::Ready(Some((index, event)));
            }
        }
        match runs {
            true => Poll::Pending,
            false => Poll::Ready(None),
        }
    }

    fn failure(&self, choice: usize, error: &GenerateError) -> ApiError {
        match self.choices[choice].text.tokens {
            0 => ApiError::of_request(error, self.format.prompt()),
            _ => ApiError::of_engine(error),
        }
    }

    /// Tokens so far.
    pub fn usage(&self) -> Value {
        let prompt: usize = self.prompts.iter().sum();
        let tokens = self.choices.iter().map(|choice| choice.text.tokens);
        let completion: usize = tokens.sum();
        // A prompt counts once, however many choices it has: so does what was known of it.
        let of_each = (self.choices.len() / self.prompts.len().max(1)).max(1);
        let cached = self.choices.chunks(of_each).map(|choices| {
            let cached = choices.iter().map(|choice| choice.text.cached);
            cached.min().unwrap_or(0)
        });
        let cached: usize = cached.sum();
        let mut usage = json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        });
        let reasoning = self
            .choices
            .iter()
            .filter_map(|choice| choice.text.reasoning);
        if let Some(reasoning) = reasoning.reduce(|all, one| all + one) {
            usage["completion_tokens_details"] = json!({"reasoning_tokens": reasoning});
        }
        usage
    }
}
