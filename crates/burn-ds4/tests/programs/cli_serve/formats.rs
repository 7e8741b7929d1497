//! Answers in a JSON format.

use serde_json::{Value, json};

use super::client::Server;
use super::{CHAT, chat, content, joined, merged};

const THINK_END: &str = "6";

/// Fields that ask for a schema, with more.
fn formatted(schema: Value, fields: Value) -> Value {
    let schema = json!({"name": "answer", "strict": true, "schema": schema});
    let format = json!({"type": "json_schema", "json_schema": schema});
    let body = chat(json!({"response_format": format, "temperature": 1.5, "max_tokens": 500}));
    merged(body, fields)
}

/// A schema whose documents are short, whatever the model says.
fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 1, "maximum": 969},
            "kind": {"enum": ["king", "prophet", "shepherd"]},
            "sons": {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": 4},
                "maxItems": 2,
            },
        },
        "required": ["name", "age", "kind", "sons"],
        "additionalProperties": false,
    })
}

/// Whether a document follows that schema.
fn is_person(document: &Value) -> bool {
    let length = |value: &Value| value.as_str().map(|text| text.chars().count());
    let sons = document["sons"].as_array();
    document.as_object().is_some_and(|fields| fields.len() == 4)
        && length(&document["name"]).is_some_and(|length| length <= 6)
        && document["age"]
            .as_u64()
            .is_some_and(|age| (1..=969).contains(&age))
        && ["king", "prophet", "shepherd"]
            .iter()
            .any(|kind| document["kind"] == *kind)
        && sons.is_some_and(|sons| {
            sons.len() <= 2 && sons.iter().all(|son| matches!(length(son), Some(1..=4)))
        })
}

#[test]
fn answers_follow_the_schema_whatever_the_seed_and_end_by_themselves() {
    let server = Server::shared();
    let mut names = std::collections::BTreeSet::new();
    for seed in 0..2 {
        let fields = json!({"seed": 10 * seed, "n": 4});
        let answer = server.ask(CHAT, &formatted(person(), fields));
        for choice in answer["choices"].as_array().expect("choices") {
            let text = choice["message"]["content"].as_str().expect("content");
            assert_eq!(choice["finish_reason"], "stop", "{text}");
            let document = serde_json::from_str(text).expect(text);
            assert!(is_person(&document), "{text}");
            names.insert(document["name"].to_string());
        }
    }
    assert!(names.len() > 4, "seeds that tell nothing: {names:?}");
    // Without a temperature.
    let answer = server.ask(CHAT, &formatted(person(), json!({"temperature": 0})));
    let document = serde_json::from_str(&content(&answer)).expect("JSON");
    assert!(is_person(&document), "{document}");
}

#[test]
fn a_formatted_answer_is_the_same_in_a_stream_with_drafts_and_beside_others() {
    let server = Server::shared();
    let without = Server::start(&["--draft-tokens", "0"]);
    let body = formatted(person(), json!({"seed": 1, "logprobs": true}));
    let whole = server.ask(CHAT, &body);
    assert_eq!(content(&without.ask(CHAT, &body)), content(&whole));
    let plain = chat(json!({"temperature": 1.2, "seed": 1, "max_tokens": 60}));
    let alone = content(&without.ask(CHAT, &plain));
    let (events, beside) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| content(&server.ask(CHAT, &plain)));
        let events = server.stream(CHAT, &body);
        (events, beside.join().expect("an answer"))
    });
    assert_eq!(joined(&events, 0, "content"), content(&whole));
    assert_eq!(joined(&events, 0, "finish_reason"), "stop");
    assert_eq!(beside, alone);
    let listed = whole["choices"][0]["logprobs"]["content"].as_array();
    let listed = listed.expect("they were asked for").iter();
    let bytes = listed
        .filter_map(|token| token["bytes"].as_array())
        .flatten();
    let bytes = bytes.map(|byte| byte.as_u64().expect("a byte") as u8);
    assert_eq!(String::from_utf8(bytes.collect()), Ok(content(&whole)));
}

#[test]
fn an_answer_that_is_cut_says_so() {
    let server = Server::shared();
    let cut = server.ask(CHAT, &formatted(person(), json!({"max_tokens": 3})));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert!(content(&cut).starts_with('{'), "{cut}");
    let stopped = server.ask(CHAT, &formatted(person(), json!({"stop": "\"age\""})));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(!content(&stopped).contains("\"age\""), "{stopped}");
}

#[test]
fn a_json_object_begins_as_one_and_is_one_if_it_ends() {
    let server = Server::shared();
    let format = json!({"type": "json_object"});
    for seed in 0..4 {
        let fields = json!({"response_format": format, "temperature": 1, "seed": seed});
        let answer = server.ask(CHAT, &merged(chat(fields), json!({"max_tokens": 40})));
        let text = content(&answer);
        assert!(text.starts_with('{'), "{text}");
        match answer["choices"][0]["finish_reason"].as_str() {
            Some("length") => (),
            Some("stop") => assert!(serde_json::from_str::<Value>(&text).is_ok(), "{text}"),
            other => panic!("{other:?}: {text}"),
        }
    }
    let text = server.ask(CHAT, &chat(json!({"response_format": {"type": "text"}})));
    assert_eq!(content(&text), content(&server.ask(CHAT, &chat(json!({})))));
}

#[test]
fn the_model_is_told_the_schema() {
    let server = Server::shared();
    let prompt = |body: &Value| server.ask(CHAT, body)["usage"]["prompt_tokens"].as_u64();
    let system = json!({"role": "system", "content": "Be brief."});
    let user = json!({"role": "user", "content": "Who?"});
    for messages in [json!([user]), json!([system, user])] {
        let body = formatted(person(), json!({"messages": messages, "max_tokens": 1}));
        let mut plain = body.clone();
        plain["response_format"] = Value::Null;
        assert!(prompt(&body) > prompt(&plain).map(|tokens| tokens + 100));
    }
}

#[test]
fn reasoning_is_free_and_the_content_after_it_follows_the_schema() {
    let server = Server::shared();
    // The bias ends the reasoning at once, but is of no use where the schema allows something else.
    let effort = json!({"reasoning_effort": "high", "logit_bias": {THINK_END: 100}});
    let body = formatted(person(), merged(effort, json!({"seed": 3})));
    let answer = server.ask(CHAT, &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let document = serde_json::from_str(&content(&answer)).expect("JSON");
    assert!(is_person(&document), "{answer}");
    assert_eq!(
        joined(&server.stream(CHAT, &body), 0, "content"),
        content(&answer)
    );

    let fields = json!({"reasoning_effort": "high", "logit_bias": {THINK_END: -100}});
    let body = formatted(
        person(),
        merged(fields, json!({"max_tokens": 30, "seed": 4})),
    );
    let answer = server.ask(CHAT, &body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
    let reasoning = message["reasoning_content"].as_str().expect("reasoning");
    assert!(reasoning.len() > 30, "{answer}");
    assert_eq!(content(&answer), "");
    let events = server.stream(CHAT, &body);
    assert_eq!(joined(&events, 0, "reasoning_content"), reasoning);
}
