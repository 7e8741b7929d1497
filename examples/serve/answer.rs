//! An answer while it is generated: the choices of a request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http::StatusCode;
use ds4_model::generate::{Completion, GenerateError};
use serde_json::{Value, json};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, timeout_at};

use crate::engine::{Event, NoToken};
use crate::error::ApiError;
use crate::log_probs::ListedToken;
use crate::reply::Format;
use crate::text::{ChoiceText, Update};
use crate::tracker::Tracker;

/// The choices of a request. Those that still run are given up when this is dropped.
#[derive(Debug)]
pub struct Answer {
    /// How it is written.
    pub format: Format,
    choices: Vec<Choice>,
    /// Tokens of each prompt.
    prompts: Vec<usize>,
    deadline: Instant,
    tracker: Arc<Tracker>,
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

/// A choice that has ended.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    /// Reasoning, text and calls.
    pub completion: Completion,
    /// Tokens of the text.
    pub log_probs: Vec<ListedToken>,
    /// Why it ended.
    pub finish: Option<&'static str>,
}

fn timeout(message: &str) -> ApiError {
    ApiError::new(StatusCode::GATEWAY_TIMEOUT, Some("timeout"), message)
}

impl Answer {
    /// An answer to prompts of so many tokens each, that is waited for until `deadline`. All
    /// prompts have as many choices.
    pub fn new(
        format: Format,
        choices: Vec<Choice>,
        prompts: Vec<usize>,
        deadline: Instant,
        tracker: Arc<Tracker>,
    ) -> Self {
        Self {
            format,
            choices,
            prompts,
            deadline,
            tracker,
        }
    }

    /// Number of choices.
    pub fn count(&self) -> usize {
        self.choices.len()
    }

    /// Tool calls that a choice has so far.
    pub fn calls(&self, choice: usize) -> usize {
        self.choices[choice].text.calls
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
                let choice = &mut self.choices[index];
                let update = choice.text.push(&token);
                if update.finish.is_some() {
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

    /// All choices, once they have ended.
    pub async fn whole(&mut self) -> Result<Vec<Whole>, ApiError> {
        let mut wholes = vec![Whole::default(); self.count()];
        while let Some(next) = self.next().await {
            let (index, update) = next?;
            let whole = &mut wholes[index];
            whole.completion.extend(update.parts);
            whole.log_probs.extend(update.log_probs);
            whole.finish = whole.finish.or(update.finish);
        }
        Ok(wholes)
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
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }
}
