//! Requests that cannot be answered.

use serde_json::{Value, json};

use super::client::Server;
use super::{CHAT, COMPLETIONS, chat, merged};
use crate::cli::run;

/// Asserts an error object with this status, and a parameter and a word of its message.
#[track_caller]
fn refused(server: &Server, path: &str, body: &[u8], status: u16, param: &str, word: &str) {
    let mut response = server.open("POST", path, &[], body);
    let answer = response.json();
    let (body, error) = (String::from_utf8_lossy(body), &answer["error"]);
    let body: String = body.chars().take(200).collect();
    assert_eq!(response.status, status, "{body}: {answer}");
    assert_eq!(
        error["param"].as_str().unwrap_or_default(),
        param,
        "{body}: {answer}"
    );
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains(word), "{body}: {answer}");
    assert_eq!(error["type"], "invalid_request_error", "{body}: {answer}");
    assert!(error.get("code").is_some(), "{answer}");
    assert!(
        !message.contains('/') || message.contains("there is no"),
        "{answer}"
    );
}

/// A format of this schema.
fn schema(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
}

#[test]
fn bodies_that_are_not_requests_are_refused() {
    let server = Server::shared();
    let bodies: [(&[u8], &str); 8] = [
        (b"", "bad JSON"),
        (b"{\"messages\": [", "bad JSON"),
        (b"[]", "bad JSON"),
        (b"null", "bad JSON"),
        (b"{} {}", "bad JSON"),
        (b"{\"model\": \"\xff\"}", "UTF-8"),
        (b"{\"model\": \"\\ud800\"}", "bad JSON"),
        (b"{\"seed\": 1e999}", "bad JSON"),
    ];
    for (body, word) in bodies {
        refused(&server, CHAT, body, 400, "", word);
    }
    let nested = "[".repeat(100_000);
    refused(
        &server,
        COMPLETIONS,
        format!("{{\"x\": {nested}").as_bytes(),
        400,
        "",
        "bad JSON",
    );
}

#[test]
fn the_field_at_fault_is_named() {
    let server = Server::shared();
    let message = |message: Value| json!({"messages": [message]});
    let user = |content: Value| message(json!({"role": "user", "content": content}));
    let fields = [
        (json!({"max_tokens": "8"}), "max_tokens", "string"),
        (json!({"max_tokens": -1}), "max_tokens", "-1"),
        (json!({"max_tokens": 0}), "max_tokens", "at least 1"),
        (json!({"temperature": -1}), "temperature", "-1"),
        (json!({"temperature": 1e60}), "temperature", "finite"),
        (json!({"top_p": 2}), "top_p", "2"),
        (json!({"min_p": -0.5}), "min_p", "between"),
        (json!({"top_k": -2}), "top_k", "-2"),
        (json!({"presence_penalty": 3}), "presence_penalty", "3"),
        (json!({"frequency_penalty": -3}), "frequency_penalty", "-3"),
        (
            json!({"repetition_penalty": 0}),
            "repetition_penalty",
            "above 0",
        ),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", "token id"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias", "101"),
        (
            json!({"logit_bias": {"99999": 1}}),
            "logit_bias",
            "vocabulary",
        ),
        (json!({"logit_bias": 1}), "logit_bias", "map"),
        (json!({"seed": 1.5}), "seed", "1.5"),
        (json!({"stop": 1}), "stop", "list of strings"),
        (json!({"stop": [""]}), "stop", "empty"),
        (json!({"n": 0}), "n", "0 texts"),
        (json!({"n": 1000}), "n", "1000 texts"),
        (json!({"stream": "yes"}), "stream", "boolean"),
        (json!({"top_logprobs": 2}), "top_logprobs", "logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
            "21",
        ),
        (
            json!({"tool_choice": "sometimes"}),
            "tool_choice",
            "required",
        ),
        (
            json!({"reasoning_effort": "enormous"}),
            "reasoning_effort",
            "enormous",
        ),
        (
            json!({"tools": [{"type": "web_search"}]}),
            "tools[0].type",
            "web_search",
        ),
        (json!({"messages": []}), "messages", "Empty"),
        (json!({"messages": "hi"}), "messages", "string"),
        (
            message(json!({"content": "hi"})),
            "messages[0].role",
            "role",
        ),
        (
            message(json!({"role": "tool", "content": "hi"})),
            "messages[0].tool_call_id",
            "tool_call_id",
        ),
        (user(json!(7)), "messages[0]", "a list"),
        (
            user(json!([{"type": "image_url"}])),
            "messages[0].image_url",
            "image_url",
        ),
    ];
    for (field, param, word) in fields {
        let body = chat(field).to_string();
        refused(&server, CHAT, body.as_bytes(), 400, param, word);
    }
    let formats = [
        (json!("json_object"), "", "json_object"),
        (json!({}), ".type", "type"),
        (json!({"type": "grammar"}), "", "grammar"),
        (json!({"type": "json_schema"}), "", "missing"),
        (schema(json!(null)), "", "missing"),
        (schema(json!([1])), "", "no object"),
        (schema(json!({"x": "y".repeat(1 << 15)})), "", "32768"),
        (schema(json!({"type": "strang"})), "", "strang"),
        (
            schema(json!({"type": "array", "uniqueItems": true})),
            "",
            "uniqueItems",
        ),
    ];
    for (format, place, word) in formats {
        let body = chat(json!({"response_format": format})).to_string();
        let param = format!("response_format{place}");
        refused(&server, CHAT, body.as_bytes(), 400, &param, word);
    }
    let tool = json!({"type": "function", "function": {"name": "weather"}});
    let format = json!({"tools": [tool], "response_format": {"type": "json_object"}});
    let body = chat(format).to_string();
    refused(&server, CHAT, body.as_bytes(), 400, "tools", "DSML");
    let role = json!([{"role": "robot", "content": ""}, {"role": "user", "content": "hi"}]);
    let body = json!({"messages": role}).to_string();
    refused(
        &server,
        CHAT,
        body.as_bytes(),
        400,
        "messages[0].role",
        "robot",
    );
    let fields = [
        (json!({}), "prompt", "missing"),
        (json!({"prompt": []}), "prompt", "empty"),
        (json!({"prompt": [[]]}), "prompt", "empty"),
        (json!({"prompt": [4096]}), "prompt", "4096"),
        (json!({"prompt": {}}), "prompt", "list of token ids"),
        (
            json!({"prompt": "a", "echo": true}),
            "echo",
            "not supported",
        ),
        (
            json!({"prompt": "a", "suffix": "b"}),
            "suffix",
            "not supported",
        ),
        (json!({"prompt": "a", "logprobs": 30}), "logprobs", "30"),
        (
            json!({"prompt": "a", "response_format": {"type": "json_object"}}),
            "response_format",
            "not supported",
        ),
    ];
    for (body, param, word) in fields {
        refused(
            &server,
            COMPLETIONS,
            body.to_string().as_bytes(),
            400,
            param,
            word,
        );
    }
    // The shipped tokenizer has no token for the markup of tools.
    let body = chat(json!({"tools": [tool]})).to_string();
    refused(&server, CHAT, body.as_bytes(), 400, "tools", "DSML");
}

#[test]
fn what_is_not_there_is_not_found() {
    let server = Server::shared();
    let body = chat(json!({"model": "gpt"})).to_string();
    refused(&server, CHAT, body.as_bytes(), 404, "", "there is no model");
    let found = chat(json!({"model": "ds4-tiny", "max_tokens": 1}));
    server.ask(CHAT, &found);
    refused(&server, "/v1/embeddings", b"{}", 404, "", "there is no");
    assert_eq!(server.get("/v1/models/gpt").status, 404);
    assert_eq!(server.get("/v1/models/%ff").status, 404);
    let mut wrong = server.get(CHAT);
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("POST")));
    let error = wrong.json();
    assert_eq!(error["error"]["code"], "method_not_allowed");
}

#[test]
fn a_prompt_that_leaves_no_place_for_an_answer_is_refused() {
    let server = Server::shared();
    let prompt = |tokens: usize| json!({"prompt": vec![7; tokens], "max_tokens": 9});
    let mut response = server.post(COMPLETIONS, &prompt(4096));
    assert_eq!(response.status, 400);
    assert_eq!(response.json()["error"]["code"], "context_length_exceeded");
    let limited = Server::start(&["--ctx", "32", "--max-body", "1000", "--name", "small"]);
    refused(
        &limited,
        COMPLETIONS,
        prompt(32).to_string().as_bytes(),
        400,
        "prompt",
        "32",
    );
    let answer = limited.ask(COMPLETIONS, &merged(prompt(30), json!({"model": "small"})));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    refused(&limited, COMPLETIONS, &[b' '; 1001], 413, "", "1000");
}

#[test]
fn options_that_cannot_be_used_end_with_one_line() {
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--lanes", "0"], 2, "--lanes"),
        (&["--prefill-chunk", "0"], 1, "prefill_chunk"),
        (&["--ctx", "5000"], 1, "--ctx"),
        (&["--api-key", ""], 1, "--api-key"),
        (&["--cors", "\u{1}"], 2, "--cors"),
        (&["--model", "no/such/dir"], 1, "no/such/dir"),
        (&["--device", "cuda:4096"], 1, "cuda:4096"),
    ];
    for (arguments, code, named) in cases {
        let ended = run("serve", arguments);
        assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
        let first = ended.stderr.lines().next().unwrap_or_default();
        assert!(
            first.starts_with("error: ") && first.contains(named),
            "{ended:?}"
        );
        assert_eq!(ended.stdout, "", "{arguments:?}");
    }
}
