//! The server's modules stand here as they do in the example, whose paths begin at its root.

#![no_main]
#![allow(dead_code)]

#[path = "../../examples/serve/answer.rs"]
mod answer;
#[path = "../../examples/serve/app.rs"]
mod app;
#[path = "../../examples/serve/chat.rs"]
mod chat;
#[path = "../../examples/serve/completions.rs"]
mod completions;
#[path = "../../examples/serve/engine.rs"]
mod engine;
#[path = "../../examples/serve/error.rs"]
mod error;
#[path = "../../examples/serve/fuzz.rs"]
mod fuzz;
#[path = "../../examples/serve/grammar.rs"]
mod grammar;
#[path = "../../examples/serve/log_probs.rs"]
mod log_probs;
#[path = "../../examples/serve/metrics.rs"]
mod metrics;
#[path = "../../examples/serve/options.rs"]
mod options;
#[path = "../../examples/serve/reply.rs"]
mod reply;
#[path = "../../examples/serve/request.rs"]
mod request;
#[path = "../../examples/serve/response_format.rs"]
mod response_format;
#[path = "../../examples/shared/mod.rs"]
mod shared;
#[path = "../../examples/serve/startup.rs"]
mod startup;
#[path = "../../examples/serve/text.rs"]
mod text;
#[path = "../../examples/serve/tracker.rs"]
mod tracker;
#[path = "../../examples/serve/warm_up.rs"]
mod warm_up;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::request(data));
