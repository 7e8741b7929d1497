//! The server as its clients see it: endpoints, streams, errors, seeds, limits, signals.

mod apis;
mod client;
mod errors;
mod fields;
mod formats;
mod limits;
mod load;
mod tools;

use serde_json::{Value, json};

use crate::cli::golden_text;
pub(crate) use client::{PATIENCE, Server};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A chat of one question, with more fields. It has a seed: no test may depend on one that the
/// server draws, so only a `null` asks for that.
fn chat(fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Who made the heaven?"}]);
    merged(
        json!({"messages": messages, "max_tokens": 12, "seed": 0}),
        fields,
    )
}

fn merged(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// What the pieces of a stream say of a choice, joined: the field `name` of message or choice.
fn joined(events: &[Value], index: u64, name: &str) -> String {
    let choices = events.iter().flat_map(|event| {
        let choices = event["choices"].as_array().expect("choices");
        choices.iter().filter(|choice| choice["index"] == index)
    });
    choices
        .filter_map(|choice| choice["delta"][name].as_str().or(choice[name].as_str()))
        .collect()
}

/// Text of the first choice.
#[track_caller]
fn content(answer: &Value) -> String {
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str();
    let text = text.or(choice["text"].as_str());
    text.unwrap_or_else(|| panic!("{answer}")).to_owned()
}

#[test]
fn a_completion_is_the_golden_text() {
    let server = Server::shared();
    let (prompt, continuation) = golden_text("short", 24);
    let answer = server.ask(COMPLETIONS, &json!({"prompt": prompt, "max_tokens": 24}));
    assert_eq!(content(&answer), continuation);
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    let defaults = server.ask(COMPLETIONS, &json!({"prompt": [prompt, "In"]}));
    assert!(continuation.starts_with(&content(&defaults)), "{defaults}");
    assert_eq!(defaults["choices"][1]["index"], 1);
    assert_eq!(defaults["usage"]["completion_tokens"], 32);
}

#[test]
fn a_chat_has_a_message_and_says_how_it_was_made() {
    let server = Server::shared();
    let fields = json!({"unknown": [1], "stop": null, "seed": null});
    let mut response = server.post(CHAT, &chat(fields));
    assert_eq!(response.header("x-ds4-deterministic"), Some("true"));
    let seed: u64 = response.header("x-ds4-seed").unwrap().parse().unwrap();
    assert!(seed < 1 << 53, "{seed}");
    let answer = response.json();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "ds4-tiny");
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["role"], "assistant");
    assert!(content(&answer).len() > 5, "{answer}");
    let (usage, model) = (
        &answer["usage"],
        &server.get("/v1/models").json()["data"][0],
    );
    assert_eq!(usage["completion_tokens"], 12);
    let total = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"], total);
    assert_eq!(answer["system_fingerprint"], model["system_fingerprint"]);
    assert_eq!(model["deterministic"], true);
    assert_eq!(server.get("/v1/models/ds4-tiny").json(), *model);
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    let page = server.get("/").text();
    assert!(page.starts_with("<!doctype html>"), "{page}");
}

#[test]
fn a_stream_joined_is_the_whole_answer() {
    let server = Server::shared();
    let sampled = json!({"temperature": 1, "seed": 5, "n": 2, "stop": ["e the", "zz"]});
    let prompt = json!({"prompt": "And God said,", "max_tokens": 12});
    for (path, body) in [
        (CHAT, chat(json!({}))),
        (CHAT, chat(sampled.clone())),
        (CHAT, chat(json!({"reasoning_effort": "high"}))),
        (COMPLETIONS, merged(prompt, sampled)),
    ] {
        let whole = server.ask(path, &body);
        let events = server.stream(path, &body);
        for choice in whole["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap();
            let message = if path == CHAT {
                &choice["message"]
            } else {
                choice
            };
            for name in ["content", "reasoning_content", "text", "role"] {
                let expected = message[name].as_str().unwrap_or_default();
                assert_eq!(joined(&events, index, name), expected, "{body}: {name}");
            }
            let finish = joined(&events, index, "finish_reason");
            assert_eq!(finish, choice["finish_reason"], "{body}");
        }
        assert!(
            events.iter().all(|event| event.get("usage").is_none()),
            "{body}"
        );
        let options = json!({"stream_options": {"include_usage": true}});
        let events = server.stream(path, &merged(body, options));
        let last = events.last().unwrap();
        assert_eq!(last["usage"], whole["usage"]);
        assert_eq!(last["choices"], json!([]));
    }
}

#[test]
fn the_same_seed_gives_the_same_text_whatever_else_runs() {
    let server = Server::shared();
    let body = |seed: u64| chat(json!({"temperature": 1.2, "seed": seed, "max_tokens": 24}));
    let alone = content(&server.ask(CHAT, &body(1)));
    let texts: Vec<(u64, String)> = std::thread::scope(|scope| {
        let others = (0..8u64).map(|other| {
            let (server, body) = (&server, &body);
            scope.spawn(move || {
                let seed = 1 + other % 4;
                (seed, content(&server.ask(CHAT, &body(seed))))
            })
        });
        let others: Vec<_> = others.collect();
        others
            .into_iter()
            .map(|other| other.join().unwrap())
            .collect()
    });
    for (seed, text) in &texts {
        assert_eq!(
            *text == alone,
            *seed == 1,
            "{seed}: {text:?}, alone {alone:?}"
        );
    }
    // A seed that the server has drawn gives the text again.
    let unseeded = chat(json!({"temperature": 1.2, "seed": null}));
    let mut response = server.post(CHAT, &unseeded);
    let seed: u64 = response.header("x-ds4-seed").unwrap().parse().unwrap();
    let again = server.ask(CHAT, &merged(unseeded, json!({"seed": seed})));
    assert_eq!(content(&again), content(&response.json()));
}

#[test]
fn several_choices_are_those_of_the_following_seeds() {
    let server = Server::shared();
    let body = |seed: u64| chat(json!({"temperature": 1.2, "seed": seed}));
    let both = server.ask(CHAT, &merged(body(7), json!({"n": 2})));
    for (index, seed) in [(0, 7), (1, 8)] {
        let alone = server.ask(CHAT, &body(seed));
        let (choice, alone) = (&both["choices"][index], &alone["choices"][0]);
        assert_eq!(choice["message"], alone["message"]);
        assert_eq!(choice["index"], index);
    }
    assert_eq!(both["usage"]["completion_tokens"], 24);
}

#[test]
fn a_text_ends_before_a_stop_string() {
    let server = Server::shared();
    let (prompt, continuation) = golden_text("short", 64);
    let stop = "Speak unto";
    let (before, _) = continuation.split_once(stop).unwrap();
    for stop in [json!(stop), json!(["no such text", stop])] {
        let body = json!({"prompt": prompt, "max_tokens": 64, "stop": stop});
        let answer = server.ask(COMPLETIONS, &body);
        assert_eq!(content(&answer), before);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn log_probabilities_are_those_of_the_tokens_of_the_text() {
    let server = Server::shared();
    let body = chat(json!({"logprobs": true, "top_logprobs": 3}));
    let answer = server.ask(CHAT, &body);
    let listed = answer["choices"][0]["logprobs"]["content"].clone();
    let listed = listed.as_array().unwrap();
    let mut bytes = Vec::new();
    for token in listed {
        let log_prob = token["logprob"].as_f64().unwrap();
        assert!((-20.0..=0.0).contains(&log_prob), "{token}");
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Without a temperature, the most likely token is chosen.
        assert_eq!(top[0]["token"], token["token"]);
        bytes.extend(
            token["bytes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|byte| byte.as_u64().unwrap() as u8),
        );
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), content(&answer));
    let events = server.stream(CHAT, &body);
    let pieces = events.iter().flat_map(|event| {
        let listed = event["choices"][0]["logprobs"]["content"].as_array();
        listed.cloned().unwrap_or_default()
    });
    assert_eq!(pieces.collect::<Vec<Value>>(), *listed);

    let body = json!({"prompt": "And God said,", "max_tokens": 6, "logprobs": 2});
    let answer = server.ask(COMPLETIONS, &body);
    let (text, log_probs) = (content(&answer), &answer["choices"][0]["logprobs"]);
    let list = |name: &str| log_probs[name].as_array().unwrap().clone();
    let tokens = list("tokens");
    let tokens: Vec<&str> = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), text);
    for (index, offset) in list("text_offset").iter().enumerate() {
        assert_eq!(*offset, tokens[..index].concat().chars().count());
        let top = list("top_logprobs")[index].clone();
        assert_eq!(
            top[tokens[index]], log_probs["token_logprobs"][index],
            "{top}"
        );
    }
    let without = server.ask(CHAT, &chat(json!({})));
    assert_eq!(without["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn metrics_count_what_was_done() {
    let server = Server::start(&["--draft-tokens", "1"]);
    server.ask(CHAT, &chat(json!({"n": 2})));
    server.post(CHAT, &json!({}));
    let prompt = server.ask(CHAT, &chat(json!({})))["usage"]["prompt_tokens"].as_f64();
    for (name, expected) in [
        ("ds4_requests_total{outcome=\"completed\"}", 2.0),
        ("ds4_requests_total{outcome=\"invalid\"}", 1.0),
        ("ds4_generated_tokens_total", 36.0),
        ("ds4_prompt_tokens_total", 3.0 * prompt.unwrap()),
        ("ds4_lanes_in_use", 0.0),
        ("ds4_texts_waiting", 0.0),
        ("ds4_time_to_first_token_seconds_count", 3.0),
        ("ds4_time_to_first_token_seconds_bucket{le=\"+Inf\"}", 3.0),
        ("ds4_time_per_token_seconds_count", 33.0),
    ] {
        server.await_metric(name, expected);
    }
    assert!(server.metric("ds4_drafts_total") > 0.0);
    assert!(server.metric("ds4_drafts_accepted_total") <= server.metric("ds4_drafts_total"));
    for name in [
        "ds4_prefill_tokens_per_second",
        "ds4_decode_tokens_per_second",
    ] {
        // They are of the last ten seconds, which may have passed on a machine that has other work.
        let mut tries = 0..10;
        while server.metric(name) == 0.0 {
            assert!(tries.next().is_some(), "{name}");
            server.ask(CHAT, &chat(json!({})));
        }
    }
}
