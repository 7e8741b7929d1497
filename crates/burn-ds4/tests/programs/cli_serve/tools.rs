//! Reasoning and tool calls, with a checkpoint that is made to write them.

use std::path::Path;

use serde_json::{Value, json};

use super::client::Server;
use super::{CHAT, chat, content, joined, merged};
use crate::golden::root;

const END: &str = "1";
const THINK_END: &str = "6";
/// Tokens that stand in place of the last merges of the tokenizer, and their ids. OpenAI's client
/// asks for them, too.
const TOKENS: &str = include_str!("../../../../../tests/clients/tool_tokens.json");

/// The shipped checkpoint with these tokens.
pub(super) fn checkpoint(directory: &Path) {
    let asset = root().join("assets/ds4-tiny");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(asset.join(name), directory.join(name)).expect("a copy");
    }
    let tokens: Vec<(String, usize)> = serde_json::from_str(TOKENS).expect("pairs");
    let file = std::fs::read(asset.join("tokenizer.json")).expect("an asset");
    let mut file: Value = serde_json::from_slice(&file).expect("JSON");
    let vocabulary = file["model"]["vocab"].as_object_mut().expect("a map");
    vocabulary.retain(|_, id| !tokens.iter().any(|(_, new)| *id == *new));
    for (text, id) in &tokens {
        vocabulary.insert(text.clone(), json!(id));
    }
    let merges = file["model"]["merges"].as_array_mut().expect("a list");
    merges.truncate(merges.len() - tokens.len());
    let added = file["added_tokens"].as_array_mut().expect("a list");
    for (text, id) in tokens {
        let token = merged(added[0].clone(), json!({"id": id, "content": text}));
        added.push(token);
    }
    std::fs::write(directory.join("tokenizer.json"), file.to_string()).expect("a file");
}

/// A chat whose answer has these tokens, one after the other: the bias of each is far above that of
/// the next, and a token that has occurred loses it by the penalty.
pub(super) fn forced(tokens: &[&str], fields: Value) -> Value {
    let bias = tokens.iter().zip([100, 75, 50, 25]);
    let bias: Value = bias
        .map(|(token, bias)| ((*token).to_owned(), json!(bias)))
        .collect();
    let body = chat(json!({"logit_bias": bias, "repetition_penalty": 1e6, "max_tokens": 4}));
    merged(body, fields)
}

#[test]
fn reasoning_and_calls_are_apart_and_no_markup_is_in_the_text() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    checkpoint(directory.path());
    let path = directory.path().to_str().expect("a UTF-8 path");
    let server = Server::start(&["--model", path, "--name", "tools"]);
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let weather = json!({"name": "weather", "parameters": parameters});
    let tools = json!({"tools": [{"type": "function", "function": weather}]});

    let body = forced(&["1021", "1022", "1023", END], tools.clone());
    let answer = server.ask(CHAT, &body);
    let choice = &answer["choices"][0];
    assert_eq!(content(&answer), "Let me see.");
    assert_eq!(choice["finish_reason"], "tool_calls");
    let calls = choice["message"]["tool_calls"].as_array().expect("calls");
    let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
    let expected = [
        json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"}),
        json!({"name": "now", "arguments": "{}"}),
    ];
    assert_eq!(functions, expected.iter().collect::<Vec<_>>());
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let log_probs = merged(body.clone(), json!({"logprobs": true}));
    let events = server.stream(CHAT, &log_probs);
    assert_eq!(joined(&events, 0, "content"), "Let me see.");
    assert_eq!(joined(&events, 0, "finish_reason"), "tool_calls");
    let deltas = events
        .iter()
        .map(|event| &event["choices"][0]["delta"]["tool_calls"][0]);
    let calls: Vec<&Value> = deltas.filter(|call| !call.is_null()).collect();
    // Arguments come as they are written.
    assert!(calls.len() > 4, "{calls:?}");
    for (index, expected) in expected.iter().enumerate() {
        let pieces = |name: &str| -> String {
            let of_call = calls.iter().filter(|call| call["index"] == index);
            let pieces = of_call.filter_map(|call| call["function"][name].as_str());
            pieces.collect()
        };
        let joined = json!({"name": pieces("name"), "arguments": pieces("arguments")});
        assert_eq!(joined, *expected);
        let id = calls.iter().find_map(|call| {
            let id = call["id"].as_str().filter(|_| call["index"] == index)?;
            id.starts_with(&format!("call_{index:02}_")).then_some(id)
        });
        assert!(id.is_some(), "{calls:?}");
    }
    let listed = events
        .iter()
        .map(|event| &event["choices"][0]["logprobs"]["content"]);
    let listed: Vec<&Value> = listed.filter_map(Value::as_array).flatten().collect();
    assert_eq!(
        listed.len(),
        1,
        "the tokens of markup are not listed: {listed:?}"
    );

    let one = server.ask(
        CHAT,
        &merged(body.clone(), json!({"parallel_tool_calls": false})),
    );
    let message = &one["choices"][0]["message"];
    assert_eq!(message["tool_calls"].as_array().map(Vec::len), Some(1));
    // Calls that are cut off are not calls, and their beginning is no text.
    let cut = server.ask(CHAT, &merged(body.clone(), json!({"max_tokens": 2})));
    assert_eq!(content(&cut), "Let me see.");
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    // Tools that must not be called are not declared.
    let usage = |body: &Value| server.ask(CHAT, body)["usage"]["prompt_tokens"].as_u64();
    let none = merged(body.clone(), json!({"tool_choice": "none"}));
    assert!(usage(&none) < usage(&body).map(|tokens| tokens / 4));

    let ids = answer["choices"][0]["message"]["tool_calls"].as_array();
    let ids = ids.expect("calls").iter().map(|call| &call["id"]);
    let calls_ids: Vec<&Value> = ids.collect();
    let history = json!([
        {"role": "user", "content": "How is it in Rome?"},
        answer["choices"][0]["message"],
        {"role": "tool", "tool_call_id": calls_ids[1], "content": "Noon."},
        {"role": "tool", "tool_call_id": calls_ids[0], "content": "Sunny."},
    ]);
    let next = merged(tools.clone(), json!({"messages": history, "max_tokens": 2}));
    let prompt = usage(&next);
    // Other forms of the same history: arguments as an object, ids that nobody has given.
    let mut other = next.clone();
    for call in other["messages"][1]["tool_calls"]
        .as_array_mut()
        .expect("calls")
    {
        let written = call["function"]["arguments"].as_str().expect("a string");
        let object: Value = serde_json::from_str(written).expect("JSON");
        call["function"]["arguments"] = object;
        call["id"] = Value::Null;
    }
    // Results without an id are those of the calls in their order.
    for (message, text) in [(2, "Sunny."), (3, "Noon.")] {
        other["messages"][message] = json!({"role": "tool", "content": text});
    }
    assert_eq!(usage(&other), prompt);
    other["messages"][1]["tool_calls"][1]["function"]["arguments"] = Value::Null;
    server.ask(CHAT, &other);

    let effort = json!({"reasoning_effort": "high", "max_tokens": 4});
    let body = forced(&["1021", THINK_END, "1022", "1023"], merged(tools, effort));
    let message = server.ask(CHAT, &body)["choices"][0]["message"].clone();
    assert_eq!(message["reasoning_content"], "Let me see.");
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["tool_calls"].as_array().map(Vec::len), Some(2));
    let events = server.stream(CHAT, &body);
    assert_eq!(joined(&events, 0, "reasoning_content"), "Let me see.");
    assert_eq!(joined(&events, 0, "content"), "");
}
