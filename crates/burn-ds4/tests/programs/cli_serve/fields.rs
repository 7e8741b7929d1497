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
    // The parts of a message are paragraphs.
    let whole = ask("system", json!("Who made\n\nthe heaven?"));
    let parts = json!([
        {"type": "text", "text": "Who made"},
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
fn values_are_taken_as_common_clients_write_them() {
    let server = Server::shared();
    let prompt = json!({"prompt": "And God said,", "max_tokens": 4});
    let sampled = json!({"temperature": 1.5, "seed": 7, "n": 2, "top_k": 40, "max_tokens": 5});
    let floats = json!({
        "temperature": 1.5, "seed": 7.0, "n": 2.0, "top_k": 40.0, "max_tokens": 5.0,
    });
    let texts = |path: &str, body: &Value| -> Vec<Value> {
        let answer = server.ask(path, body);
        let choices = answer["choices"].as_array().expect("choices").clone();
        choices
            .into_iter()
            .map(|choice| choice["message"]["content"].clone())
            .collect()
    };
    assert_eq!(texts(CHAT, &chat(floats)), texts(CHAT, &chat(sampled)));
    let usual = content(&server.ask(COMPLETIONS, &prompt));
    for empty in [
        json!({"suffix": ""}),
        json!({"suffix": null}),
        json!({"logit_bias": []}),
        json!({"logit_bias": null}),
        json!({"logprobs": 1.0, "best_of": 1.0}),
    ] {
        let answer = server.ask(COMPLETIONS, &merged(prompt.clone(), empty.clone()));
        assert_eq!(content(&answer), usual, "{empty}");
    }
    let marked = format!("\u{feff}{prompt}");
    let mut response = server.open("POST", COMPLETIONS, &[], marked.as_bytes());
    assert_eq!(content(&response.json()), usual);
    for (field, param) in [
        (json!({"max_tokens": 4.5}), "max_tokens"),
        (json!({"n": 1e300}), "n"),
        (json!({"seed": 9_007_199_254_740_993.0_f64}), "seed"),
        (json!({"logit_bias": [1]}), "logit_bias"),
    ] {
        let mut response = server.post(COMPLETIONS, &merged(prompt.clone(), field));
        assert_eq!(response.status, 400);
        assert_eq!(response.json()["error"]["param"], param);
    }
}

#[test]
fn instructions_that_a_prompt_shares_with_another_are_not_processed_again() {
    let server = Server::start(&["--prefix-cache", "300000000", "--lanes", "1"]);
    let instructions: Vec<String> = (0..60)
        .map(|line| format!("Line {line}: the number is {}.", line * 37 % 101))
        .collect();
    let ask = |question: &str, n: usize| {
        let messages = json!([
            {"role": "system", "content": instructions.join(" ")},
            {"role": "user", "content": question},
        ]);
        let body = json!({"messages": messages, "max_tokens": 4, "n": n});
        let usage = server.ask(CHAT, &body)["usage"].clone();
        let details = &usage["prompt_tokens_details"]["cached_tokens"];
        [&usage["prompt_tokens"], details].map(|count| count.as_u64().expect("a number"))
    };
    let [prompt, cached] = ask("Who made the heaven?", 1);
    assert!(
        (700..1000).contains(&prompt) && cached == 0,
        "{cached} of {prompt}"
    );
    // Another question has the instructions up to a mark, the same one all but its end.
    let [_, shared] = ask("And how is the weather?", 1);
    assert_eq!(shared, 512);
    let [_, same] = ask("Who made the heaven?", 1);
    assert!(same + 8 > prompt, "{same} of {prompt}");
    server.await_metric("ds4_prompt_tokens_cached_total", (shared + same) as f64);
    // A prompt of several choices counts once.
    assert_eq!(ask("Who made the heaven?", 3), [prompt, same]);
}

#[test]
fn messages_are_taken_as_common_clients_write_them() {
    let server = Server::shared();
    let tokens = |message: Value| {
        let messages = json!([{"role": "user", "content": "Who?"}, message, {"role": "user"}]);
        let body = json!({"messages": messages, "max_tokens": 1, "reasoning_effort": "high"});
        server.ask(CHAT, &body)["usage"]["prompt_tokens"].clone()
    };
    let said = |content: Value| tokens(json!({"role": "user", "content": content}));
    let part = |text: Value| json!([{"type": "text", "text": text}]);
    assert_eq!(said(part(Value::Null)), said(json!("")));
    let answer = |fields: Value| {
        let message = json!({"role": "assistant", "content": "He."});
        tokens(merged(message, fields))
    };
    let by_name = |name: &str| answer(json!({name: "It is plain to see."}));
    assert_eq!(by_name("reasoning"), by_name("reasoning_content"));
    let both = json!({"reasoning": "Hm.", "reasoning_content": "It is plain to see."});
    assert_eq!(answer(both), by_name("reasoning_content"));

    // Reasoning is switched on and off by names of chat templates, too.
    let reasons = |fields: Value| {
        let answer = server.ask(CHAT, &chat(fields));
        answer["choices"][0]["message"]["reasoning_content"].is_string()
    };
    for name in ["thinking", "enable_thinking"] {
        assert!(
            reasons(json!({"chat_template_kwargs": {name: true}})),
            "{name}"
        );
        let off = json!({"chat_template_kwargs": {name: false}, "reasoning_effort": "high"});
        assert!(!reasons(off), "{name}");
    }
    assert!(!reasons(json!({"chat_template_kwargs": {"other": 1}})));
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
