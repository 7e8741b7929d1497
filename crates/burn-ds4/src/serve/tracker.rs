//! What is known of a request when it has ended: one line in the log, one count.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::http::{Method, Request, StatusCode};

use crate::serve::metrics::Metrics;

/// Paths that ask for text.
const GENERATING: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
];

/// Follows a request until its response is sent, or nobody wants it any more.
#[derive(Debug)]
pub struct Tracker {
    metrics: Arc<Metrics>,
    method: Method,
    path: String,
    started: Instant,
    /// Whether it asks for text.
    generates: bool,
    facts: Mutex<Facts>,
}

#[derive(Debug, Default)]
struct Facts {
    status: Option<StatusCode>,
    outcome: Option<&'static str>,
    prompt: usize,
    generated: usize,
}

impl Tracker {
    /// Begins with the head of a request.
    pub fn new<B>(request: &Request<B>, metrics: Arc<Metrics>) -> Self {
        let path = request.uri().path();
        let generates = GENERATING.contains(&path);
        Self {
            metrics,
            method: request.method().clone(),
            path: path.to_owned(),
            started: Instant::now(),
            generates: generates && request.method() == Method::POST,
            facts: Mutex::default(),
        }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of the response, whose body may still be to come.
    pub fn responded(&self, status: StatusCode) {
        let outcome = match status {
            StatusCode::TOO_MANY_REQUESTS => "rejected",
            StatusCode::SERVICE_UNAVAILABLE => "unavailable",
            status if status.is_server_error() => "failed",
            status if status.is_client_error() => "invalid",
            _ if self.generates => {
                self.facts().status = Some(status);
                return;
            }
            _ => "completed",
        };
        let mut facts = self.facts();
        facts.status = Some(status);
        facts.outcome.get_or_insert(outcome);
    }

    /// Takes note of the tokens of the prompts.
    pub fn prompt(&self, tokens: usize) {
        self.facts().prompt = tokens;
    }

    /// Counts a generated token.
    pub fn generated(&self) {
        self.facts().generated += 1;
    }

    /// Takes note that the answer has taken too long, unless it has ended already.
    pub fn late(&self) {
        self.facts().outcome.get_or_insert("timeout");
    }

    /// Takes note of how the text has ended.
    pub fn end(&self, outcome: &'static str) {
        self.facts().outcome = Some(outcome);
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        let Facts {
            status,
            outcome,
            prompt,
            generated,
        } = std::mem::take(&mut *self.facts());
        let outcome = outcome.unwrap_or("disconnected");
        if self.generates {
            self.metrics.request(outcome);
        }
        tracing::info!(
            method = %self.method,
            path = %self.path,
            status = status.map(|status| status.as_u16()),
            outcome,
            prompt,
            generated,
            ms = self.started.elapsed().as_millis() as u64,
            "request"
        );
    }
}
