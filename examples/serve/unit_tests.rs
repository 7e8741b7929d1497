//! The tests inside the modules of the server.

// Without `main`, much of it is used by nothing.
#![allow(dead_code)]

mod answer;
mod app;
mod chat;
mod completions;
mod engine;
mod error;
mod fuzz;
mod grammar;
mod log_probs;
mod metrics;
mod options;
mod reply;
mod request;
mod response_format;
mod routes;
#[path = "../shared/mod.rs"]
mod shared;
mod startup;
mod text;
mod tracker;
mod warm_up;
