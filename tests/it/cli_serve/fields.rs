//! What fields of a request and options of the server do.

use serde_json::{Value, json};

use super::client::Server;
use super::{CHAT, COMPLETIONS, chat, content, merged};

#[test]
fn every_filter_and_penalty_has_its_effect() {
    let server = Server::shared();
    let text = |fields: Value| content(&server.ask(CHAT, &chat(fields)));
    let long = json!({"max_tokens": 48, "seed": 3});
    let greedy = text(long.clone());
    let hot = merged(long.clone(), json!({"temperature": 3}));
    let sampled = text(hot.clone());
    assert_ne!(sampled, greedy);
    // One candidate is left.
    for filter in [
        json!({"top_k": 1}),
        json!({"top_p": 1e-6}),
        json!({"min_p": 1}),
    ] {
        assert_eq!(
            text(merged(hot.clone(), filter.clone())),
            greedy,
            "{filter}"
        );
    }
    // All are.
    for filter in [
        json!({"top_k": 0}),
        json!({"top_k": -1}),
        json!({"top_p": 1, "min_p": 0}),
    ] {
        assert_eq!(
            text(merged(hot.clone(), filter.clone())),
            sampled,
            "{filter}"
        );
    }
    for penalty in [
        json!({"presence_penalty": 2}),
        json!({"frequency_penalty": 2}),
        json!({"repetition_penalty": 2}),
    ] {
        assert_ne!(
            text(merged(long.clone(), penalty.clone())),
            greedy,
            "{penalty}"
        );
    }
    let negative = merged(hot, json!({"seed": -3}));
    assert_eq!(text(negative.clone()), text(negative));
}

#[test]
fn roles_parts_and_both_names_of_a_length_are_taken() {
    let server = Server::shared();
    let ask = |role: &str, parts: Value| {
        let messages = json!([
            {"role": role, "content": "Be brief."},
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": null, "reasoning_content": "Hm."},
            {"role": "user", "content": parts},
        ]);
        server.ask(CHAT, &json!({"messages": messages, "max_tokens": 8}))
    };
    let whole = ask("system", json!("Who made the heaven?"));
    let parts = json!([
        {"type": "text", "text": "Who made "},
        {"type": "text", "text": "the heaven?"},
    ]);
    for role in ["system", "developer"] {
        let answer = ask(role, parts.clone());
        assert_eq!(content(&answer), content(&whole), "{role}");
        assert_eq!(answer["usage"], whole["usage"], "{role}");
    }
    let both = chat(json!({"max_completion_tokens": 3, "max_tokens": 9}));
    assert_eq!(server.ask(CHAT, &both)["usage"]["completion_tokens"], 3);
}

#[test]
fn a_server_says_whether_its_answers_are_deterministic() {
    let cases: [(&[&str], bool); 5] = [
        (&["--lanes", "16", "--drafter", "none"], true),
        (&["--lanes", "17", "--drafter", "none"], false),
        (&["--lanes", "8", "--draft-tokens", "2"], false),
        (&["--prefix-cache", "1000000"], false),
        (&["--prefix-cache", "1000000", "--exact-prefix"], true),
    ];
    for (options, expected) in cases {
        let server = Server::start(options);
        let model = server.get("/v1/models").json()["data"][0].clone();
        assert_eq!(model["deterministic"], expected, "{options:?}: {model}");
        let response = server.post(CHAT, &chat(json!({"max_tokens": 1})));
        let header = response.header("x-ds4-deterministic");
        assert_eq!(header, Some(&*expected.to_string()), "{options:?}");
    }
}

#[test]
fn options_of_the_engine_change_no_text() {
    let body = chat(json!({"temperature": 1, "seed": 4}));
    let expected = content(&Server::shared().ask(CHAT, &body));
    let options: [&[&str]; 3] = [
        &["--no-graph", "--drafter", "none", "--lanes", "1"],
        &["--prefix-cache", "1000000", "--exact-prefix"],
        &["--encoding", "v4", "--cache-memory", "100000000"],
    ];
    for options in options {
        let server = Server::start(options);
        for _ in 0..2 {
            assert_eq!(content(&server.ask(CHAT, &body)), expected, "{options:?}");
        }
    }
}

#[test]
fn a_text_that_no_memory_is_left_for_is_refused() {
    let server = Server::start(&["--cache-memory", "1000"]);
    let mut response = server.post(COMPLETIONS, &json!({"prompt": "And God said,"}));
    let error = response.json()["error"].clone();
    assert_eq!(response.status, 400, "{error}");
    assert_eq!(error["code"], "context_length_exceeded", "{error}");
}
