//! The other APIs: responses as Codex asks for them, messages as Claude Code does, forced calls.

use serde_json::{Value, json};

use super::client::Server;
use super::tools::{checkpoint, forced};
use super::{CHAT, chat, content, merged};

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// The events of a stream.
#[track_caller]
fn events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let mut response = server.post(path, &merged(body.clone(), json!({"stream": true})));
    assert_eq!(response.status, 200, "{body}");
    let events = response.events();
    let events = events.iter().map(|event| serde_json::from_str(event));
    events.collect::<Result<_, _>>().expect("JSON")
}

fn joined(events: &[Value], kind: &str, path: &str) -> String {
    let events = events.iter().filter(|event| event["type"] == kind);
    events
        .filter_map(|event| event.pointer(path)?.as_str())
        .collect()
}

#[test]
fn every_api_gives_the_same_text_in_its_own_form() {
    let server = Server::shared();
    let text = content(&server.ask(CHAT, &chat(json!({}))));
    let question = "Who made the heaven?";
    let response = json!({
        "input": [{"role": "user", "content": [{"type": "input_text", "text": question}]}],
        "max_output_tokens": 12, "store": false, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x", "parallel_tool_calls": true,
    });
    let answer = server.ask(RESPONSES, &response);
    assert_eq!(answer["object"], "response");
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["output"][0]["content"][0]["text"], text);
    assert_eq!(answer["usage"]["output_tokens"], 12);
    let streamed = events(&server, RESPONSES, &response);
    assert_eq!(streamed[0]["type"], "response.created");
    assert_eq!(
        joined(&streamed, "response.output_text.delta", "/delta"),
        text
    );
    let last = streamed.last().expect("events");
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["usage"], answer["usage"]);
    assert_eq!(
        server.ask(RESPONSES, &merged(response, json!({"input": question})))["output"][0]["content"]
            [0]["text"],
        text
    );

    let message = json!({
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": question, "cache_control": {"type": "ephemeral"}},
        ]}],
        "max_tokens": 12, "metadata": {"user_id": "u"},
    });
    let answer = server.ask(MESSAGES, &message);
    assert_eq!(answer["type"], "message");
    assert_eq!(answer["stop_reason"], "max_tokens");
    assert_eq!(answer["content"], json!([{"type": "text", "text": text}]));
    assert_eq!(answer["usage"]["output_tokens"], 12);
    let count = server.ask("/v1/messages/count_tokens", &message);
    assert_eq!(count["input_tokens"], answer["usage"]["input_tokens"]);
    let streamed = events(&server, MESSAGES, &message);
    assert_eq!(streamed[0]["type"], "message_start");
    assert_eq!(
        joined(&streamed, "content_block_delta", "/delta/text"),
        text
    );
    assert_eq!(streamed.last().expect("events")["type"], "message_stop");
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    let thought = server.ask(MESSAGES, &merged(message, thinking));
    assert_eq!(thought["content"][0]["type"], "thinking", "{thought}");
}

#[test]
fn every_api_has_its_own_errors() {
    let server = Server::shared();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (fields, status, kind, word) in [
        (json!({"model": "claude"}), 404, "not_found_error", "claude"),
        (json!({"messages": []}), 400, "invalid_request_error", ""),
        (
            json!({"messages": 1}),
            400,
            "invalid_request_error",
            "messages",
        ),
        (
            json!({"temperature": -1}),
            400,
            "invalid_request_error",
            "temperature",
        ),
        (
            json!({"tools": [{"name": "f"}]}),
            400,
            "invalid_request_error",
            "schema",
        ),
    ] {
        let body = json!({"messages": messages, "max_tokens": 2});
        let mut response = server.post(MESSAGES, &merged(body, fields.clone()));
        let error = response.json();
        assert_eq!(response.status, status, "{fields}: {error}");
        assert_eq!(error["type"], "error", "{error}");
        assert_eq!(error["error"]["type"], kind, "{error}");
        let message = error["error"]["message"].as_str().expect("a message");
        assert!(message.contains(word), "{fields}: {error}");
    }
    for (fields, param, word) in [
        (json!({"input": 7}), "input", "list of input items"),
        (
            json!({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}),
            "input",
            "x",
        ),
        (
            json!({"reasoning": {"effort": "enormous"}}),
            "reasoning.effort",
            "enormous",
        ),
        (
            json!({"max_output_tokens": 0}),
            "max_output_tokens",
            "at least 1",
        ),
    ] {
        let body = merged(json!({"input": "Hi"}), fields.clone());
        let mut response = server.post(RESPONSES, &body);
        let error = response.json()["error"].clone();
        assert_eq!(response.status, 400, "{fields}: {error}");
        assert_eq!(error["param"], param, "{fields}: {error}");
        assert!(
            error["message"].as_str().expect("a message").contains(word),
            "{error}"
        );
    }
    let locked = Server::start(&["--api-key", "k"]);
    let body = json!({"messages": messages, "max_tokens": 1}).to_string();
    let status = |headers: &[(&str, &str)]| {
        let mut response = locked.open("POST", MESSAGES, headers, body.as_bytes());
        (response.status, response.json()["error"]["type"].clone())
    };
    assert_eq!(status(&[]), (401, json!("authentication_error")));
    assert_eq!(status(&[("x-api-key", "k")]), (200, Value::Null));
    assert_eq!(status(&[("authorization", "Bearer k")]), (200, Value::Null));
}

#[test]
fn calls_go_out_and_come_back_in_every_api() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    checkpoint(directory.path());
    let path = directory.path().to_str().expect("a UTF-8 path");
    let server = Server::start(&["--model", path, "--name", "tools"]);
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    // Claude Code and Codex send what only their makers' servers have, too.
    let body = forced(
        &["1021", "1022", "1023", "1"],
        json!({
            "tools": [
                {"name": "weather", "input_schema": schema},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
        }),
    );
    let answer = server.ask(MESSAGES, &body);
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    let blocks = answer["content"].as_array().expect("blocks");
    assert_eq!(blocks[0]["text"], "Let me see.");
    assert_eq!(blocks[1]["input"], json!({"city": "Rome"}));
    let streamed = events(&server, MESSAGES, &body);
    let input = joined(&streamed, "content_block_delta", "/delta/partial_json");
    assert_eq!(input, "{\"city\": \"Rome\"}{}");
    let result = |id: &Value| json!({"type": "tool_result", "tool_use_id": id, "content": "x"});
    let history = json!([
        {"role": "user", "content": "How is it in Rome?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result(&blocks[2]["id"]), result(&blocks[1]["id"])]},
    ]);
    server.ask(
        MESSAGES,
        &merged(body, json!({"messages": history, "max_tokens": 1})),
    );

    let body = forced(
        &["1021", "1022", "1023", "1"],
        json!({
            "input": "How is it in Rome?",
            "max_output_tokens": 4,
            "tools": [
                {"type": "function", "name": "weather", "parameters": schema, "strict": false},
                {"type": "custom", "name": "apply_patch"},
                {"type": "web_search"},
            ],
        }),
    );
    let answer = server.ask(RESPONSES, &body);
    let output = answer["output"].as_array().expect("items");
    assert_eq!(output[1]["type"], "function_call", "{answer}");
    assert_eq!(output[1]["arguments"], "{\"city\": \"Rome\"}");
    let mut input = vec![json!({"role": "user", "content": "How is it in Rome?"})];
    input.extend(output.iter().cloned());
    for call in &output[1..] {
        input.push(json!({
            "type": "function_call_output", "call_id": call["call_id"], "output": "Sunny",
        }));
    }
    let next = merged(body, json!({"input": input, "max_output_tokens": 1}));
    server.ask(RESPONSES, &next);
}

#[test]
fn a_call_that_has_to_come_comes_with_arguments_of_its_schema() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    checkpoint(directory.path());
    let path = directory.path().to_str().expect("a UTF-8 path");
    let server = Server::start(&["--model", path, "--name", "tools"]);
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "units": {"type": "array", "items": {"const": "C"}, "maxItems": 1},
            "who": {"$ref": "#/$defs/name"},
            "since": {"type": "string", "format": "date"},
        },
        "required": ["city", "days", "units", "who", "since"],
        "$defs": {"name": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}},
        "additionalProperties": false,
    });
    let function = |name: &str| {
        let function = json!({"name": name, "parameters": schema});
        json!({"type": "function", "function": function})
    };
    let tools = json!([function("weather"), function("tides")]);
    let named = json!({"type": "function", "function": {"name": "tides"}});
    for (choice, names) in [
        (json!("required"), &["weather", "tides"][..]),
        (named, &["tides"]),
    ] {
        for seed in 0..3 {
            let fields = json!({"temperature": 1.5, "seed": seed, "max_tokens": 300});
            let body = merged(chat(fields), json!({"tools": tools, "tool_choice": choice}));
            let answer = server.ask(CHAT, &body);
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
            let calls = choice["message"]["tool_calls"].as_array().expect("calls");
            assert_eq!(calls.len(), 1, "{answer}");
            let function = &calls[0]["function"];
            assert!(
                names.iter().any(|name| function["name"] == *name),
                "{answer}"
            );
            let arguments = function["arguments"].as_str().expect("text");
            let arguments: Value = serde_json::from_str(arguments).expect("JSON");
            assert!(
                ["Rome", "Oslo"]
                    .iter()
                    .any(|city| arguments["city"] == *city)
            );
            assert!((1..=9).contains(&arguments["days"].as_i64().expect("a number")));
            assert!(arguments["units"].as_array().expect("a list").len() < 2);
            let who = arguments["who"].as_str().unwrap_or_default();
            assert!(who.chars().count() < 5, "{arguments}");
            let since = arguments["since"].as_str().expect("a string");
            assert!(
                since.len() == 10 && since.matches('-').count() == 2,
                "{since}"
            );
        }
    }
    // What cannot be followed is known before anything is generated.
    let parameters = json!({"properties": {"x": {"type": "array", "uniqueItems": true}}});
    let tool = json!([{"name": "f", "parameters": parameters}]);
    let mut refused = server.post(
        CHAT,
        &chat(json!({"tools": tool, "tool_choice": "required"})),
    );
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status, &error["param"]), (400, &json!("tools")));
    let message = error["message"].as_str().expect("a message");
    for word in ["tool `f`", "parameter `x`", "uniqueItems"] {
        assert!(message.contains(word), "{message}");
    }
    // In thinking mode nothing can be forced.
    let fields = json!({"tools": tools, "tool_choice": "required", "reasoning_effort": "high"});
    let mut refused = server.post(CHAT, &chat(fields));
    assert_eq!(
        (refused.status, refused.json()["error"]["param"].clone()),
        (400, json!("tool_choice"))
    );
    // A strict tool requires what the prompt shows as required: all properties.
    let letters = ["a", "b", "c", "d"];
    let properties = letters.map(|name| (name.to_owned(), json!({"type": "boolean"})));
    let inner = json!({"type": "object", "properties": Value::from_iter(properties)});
    let parameters = json!({"type": "object", "properties": {"in": inner, "out": inner}});
    let strict = json!([{"name": "moon", "strict": true, "parameters": parameters}]);
    let fields = json!({"tools": strict, "tool_choice": "required", "max_tokens": 300});
    let answer = server.ask(CHAT, &chat(fields));
    let arguments = &answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    let arguments: Value = serde_json::from_str(arguments.as_str().expect("text")).expect("JSON");
    for part in ["in", "out"] {
        let part = arguments[part].as_object().expect("an object");
        assert!(part.keys().eq(letters), "{arguments}");
    }
    // Strict tools leave free whether there is a call, a format what is said without one.
    let format = json!({"type": "json_schema", "json_schema": {"schema": {"const": 7}}});
    let days = json!({"type": "object", "properties": {"days": {"type": "boolean"}}});
    let strict = json!({"name": "moon", "strict": true, "parameters": days});
    let strict = json!([{"type": "function", "function": strict}, function("tides")]);
    let fields = json!({"tools": strict, "response_format": format, "logit_bias": {"1020": -100}});
    let answer = server.ask(CHAT, &chat(merged(fields, json!({"max_tokens": 300}))));
    let message = &answer["choices"][0]["message"];
    assert!(
        message["content"] == "7" || message["tool_calls"][0].is_object(),
        "{answer}"
    );
    let regex = json!({"type": "regex", "regex": "(ab){3}"});
    let answer = server.ask(CHAT, &chat(json!({"response_format": regex})));
    assert_eq!(content(&answer), "ababab");
}

#[test]
fn an_answer_without_choices_has_one_ends_at_stop_strings_and_is_forced_by_tools_only() {
    let server = Server::shared();
    let question = "Who made the heaven?";
    let response = json!({"input": question, "max_output_tokens": 12});
    let message = json!({
        "messages": [{"role": "user", "content": question}], "max_tokens": 12,
    });
    for (path, body, text, choice) in [
        (
            RESPONSES,
            response,
            "/output/0/content/0/text",
            json!("required"),
        ),
        (MESSAGES, message, "/content/0/text", json!({"type": "any"})),
    ] {
        for extra in [json!({"n": 2}), json!({"tool_choice": choice})] {
            let refused = server.post(path, &merged(body.clone(), extra.clone()));
            assert_eq!(refused.status, 400, "{path} {extra}");
        }
        let text_of = |answer: Value| answer.pointer(text).expect("text").as_str().map(Into::into);
        let whole: String = text_of(server.ask(path, &body)).expect("text");
        let stop = &whole[whole.len() / 2..];
        let stopped = server.ask(path, &merged(body, json!({"stop": [stop]})));
        assert_eq!(
            text_of(stopped),
            whole.split_once(stop).map(|(head, _)| head.to_owned())
        );
    }
}

/// A schema whose documents are short.
fn king() -> Value {
    json!({
        "type": "object",
        "properties": {"king": {"enum": ["Saul", "David"]}, "reign": {"type": "boolean"}},
        "required": ["king", "reign"],
        "additionalProperties": false,
    })
}

#[test]
fn every_api_holds_its_answer_to_a_format_in_its_own_field() {
    let server = Server::shared();
    let fields = json!({"temperature": 1.5, "seed": 3});
    let question = "Who was king?";
    let messages = json!([{"role": "user", "content": question}]);
    let format = |schema: &Value| json!({"type": "json_schema", "name": "k", "schema": schema});
    let asked = |path: &str, schema: &Value| match path {
        CHAT => json!({"messages": messages, "response_format": {
            "type": "json_schema", "json_schema": {"schema": schema},
        }}),
        RESPONSES => json!({"input": question, "text": {"format": format(schema)}}),
        _ => json!({"messages": messages, "max_tokens": 99, "output_config": {
            "format": format(schema),
        }}),
    };
    let long = json!({"type": "object", "description": "x".repeat(1 << 15)});
    for (path, text, field) in [
        (CHAT, "/choices/0/message/content", "response_format"),
        (RESPONSES, "/output/0/content/0/text", "text.format"),
        (MESSAGES, "/content/0/text", "output_config.format"),
    ] {
        let answer = server.ask(path, &merged(asked(path, &king()), fields.clone()));
        let document = answer.pointer(text).and_then(Value::as_str).expect("text");
        let document: Value = serde_json::from_str(document).expect("JSON");
        assert!(
            document["king"] == "Saul" || document["king"] == "David",
            "{answer}"
        );
        assert!(document["reign"].is_boolean(), "{answer}");
        for (schema, word) in [
            (&long, "32768"),
            (
                &json!({"type": "array", "uniqueItems": true}),
                "uniqueItems",
            ),
            (&json!({"$ref": "#"}), "back to itself"),
        ] {
            let mut refused = server.post(path, &asked(path, schema));
            let error = refused.json()["error"].clone();
            assert_eq!(refused.status, 400, "{path} {word}: {error}");
            let message = error["message"].as_str().expect("a message");
            assert!(
                message.contains(word) && message.contains(field),
                "{path}: {message}"
            );
        }
    }
    // The model is told of it, and an answer that has begun would not follow it.
    let tokens =
        |body: &Value| server.ask("/v1/messages/count_tokens", body)["input_tokens"].as_u64();
    let plain = json!({"messages": messages, "max_tokens": 1});
    assert!(tokens(&asked(MESSAGES, &king())) > tokens(&plain).map(|tokens| tokens + 20));
    let begun = json!([messages[0], {"role": "assistant", "content": "Da"}]);
    let begun = json!({"messages": begun, "continue_final_message": true, "max_tokens": 2});
    server.ask(CHAT, &begun);
    for format in [
        asked(CHAT, &king())["response_format"].clone(),
        json!({"type": "json_object"}),
    ] {
        let mut refused = server.post(
            CHAT,
            &merged(begun.clone(), json!({"response_format": format})),
        );
        let error = refused.json()["error"].clone();
        assert_eq!(
            (refused.status, &error["param"]),
            (400, &json!("response_format")),
            "{error}"
        );
    }
    let other = json!({"messages": messages, "output_config": {"format": {"type": "text"}}});
    assert_eq!(server.post(MESSAGES, &other).status, 400);
}

#[test]
fn schemas_of_tools_have_a_bound_in_every_api() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    checkpoint(directory.path());
    let path = directory.path().to_str().expect("a UTF-8 path");
    let server = Server::start(&["--model", path, "--name", "tools"]);
    let long = "x".repeat(1 << 15);
    let schema = json!({"type": "object", "properties": {"a": {"const": long}}});
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (path, body) in [
        (
            CHAT,
            json!({
                "messages": messages, "tool_choice": "required",
                "tools": [{"name": "long", "parameters": schema}],
            }),
        ),
        (
            RESPONSES,
            json!({
                "input": "Hi", "tool_choice": "required",
                "tools": [{"type": "function", "name": "long", "parameters": schema}],
            }),
        ),
        (
            MESSAGES,
            json!({
                "messages": messages, "max_tokens": 9, "tool_choice": {"type": "any"},
                "tools": [{"name": "long", "input_schema": schema}],
            }),
        ),
    ] {
        let mut refused = server.post(path, &body);
        let error = refused.json()["error"].clone();
        assert_eq!(refused.status, 400, "{path}: {error}");
        let message = error["message"].as_str().expect("a message");
        assert!(
            message.contains("32768") && message.contains("`long`"),
            "{path}: {message}"
        );
    }
}

#[test]
fn a_prompt_is_counted_whatever_the_context_and_lengths_are_clamped() {
    let server = Server::start(&["--ctx", "40", "--lanes", "1", "--queue", "1"]);
    let said = |words: usize| {
        let text = "And it came to pass. ".repeat(words);
        json!({"messages": [{"role": "user", "content": text}], "max_tokens": 5_000_000_000_u64})
    };
    let count = |words: usize| {
        let counted = server.ask("/v1/messages/count_tokens", &said(words));
        counted["input_tokens"].as_u64().expect("a number")
    };
    assert!(count(30) > 40 && count(30) > count(20));
    assert_eq!(server.post(MESSAGES, &said(30)).status, 400);
    let answer = server.ask(MESSAGES, &said(1));
    assert_eq!(answer["stop_reason"], "max_tokens", "{answer}");
    let input = json!({"input": "Hi", "max_output_tokens": 5e9});
    assert_eq!(server.ask(RESPONSES, &input)["status"], "incomplete");
}

#[test]
fn the_name_of_an_event_comes_before_its_data() {
    let server = Server::shared();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (path, body) in [
        (RESPONSES, json!({"input": "Hi", "max_output_tokens": 2})),
        (MESSAGES, json!({"messages": messages, "max_tokens": 2})),
    ] {
        let text = server
            .post(path, &merged(body, json!({"stream": true})))
            .text();
        let events = text.split("\n\n").filter(|event| !event.is_empty());
        for event in events {
            let starts = event
                .lines()
                .map(|line| line.split_once(": ").map(|(name, _)| name));
            let starts: Vec<_> = starts.collect();
            assert_eq!(starts, [Some("event"), Some("data")], "{path}: {event}");
        }
    }
}
