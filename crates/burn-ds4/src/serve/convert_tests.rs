//! Requests against those that DeepSeek's own conversion accepts.

use serde_json::Value;

use super::*;

fn cases() -> Vec<Value> {
    let text = include_str!("../../tests/data/requests.jsonl");
    crate::conversation::tests::cases("requests.jsonl", text)
}

/// The prompt of a body of `/v1/chat/completions`.
fn prompt(body: &Value) -> Result<String, ApiError> {
    let bytes = body.to_string();
    let common: Common = parse(bytes.as_bytes())?;
    let mut request = chat(parse(bytes.as_bytes())?, Encoding::V4Flash0731)?;
    request.conversation.response_format = common.format()?;
    Ok(Encoding::V4Flash0731.render(&request.conversation).prompt)
}

#[test]
fn requests_are_taken_and_refused_as_by_the_makers() {
    let mut count = 0;
    for case in cases() {
        let found = prompt(&case["body"]);
        assert_eq!(
            found.is_ok(),
            case["accept"] == true,
            "{}: {found:?}",
            case["name"]
        );
        if let (Ok(found), Some(expected)) = (found, case["prompt"].as_str()) {
            assert_eq!(found, expected, "{}", case["name"]);
        }
        count += 1;
    }
    assert!(count > 14, "{count}");
}

#[test]
fn strict_tools_are_shown_with_all_that_they_require_beside_others_that_are_not() {
    let tool = |name: &str, strict: Value| {
        json!({"type": "function", "function": {
            "name": name, "strict": strict,
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        }})
    };
    let tools = json!([tool("f", json!(true)), tool("g", Value::Null)]);
    let messages = json!([{"role": "user", "content": "u"}]);
    let found = prompt(&json!({"messages": messages, "tools": tools})).expect("a prompt");
    let shown = |name: &str| {
        let line = found
            .lines()
            .find(|line| line.contains(&format!("\"name\": \"{name}\"")));
        line.expect("a tool").to_owned()
    };
    assert!(shown("f").contains(r#""required": ["a"]"#), "{found}");
    assert!(!shown("g").contains("required"), "{found}");
}

#[test]
fn strict_tools_require_what_the_makers_do_and_keep_the_rest() {
    let string = json!({"type": "string"});
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    for schema in [
        object(json!({})),
        object(json!({"b": string, "a": {"type": "integer", "minimum": 2}})),
        object(json!({"a": {"type": "array", "items": object(json!({"x": string}))}})),
        object(json!({"a": {"anyOf": [object(json!({"x": string})), {"type": "null"}]}})),
        json!({
            "type": "object", "properties": {"a": {"$ref": "#/$def/d"}},
            "$def": {"d": object(json!({"x": string}))}, "description": "n",
        }),
    ] {
        let function = json!({"name": "f", "strict": true, "parameters": schema});
        let tools = json!([{"type": "function", "function": function}]);
        let body = json!({"messages": [{"role": "user", "content": "u"}], "tools": tools});
        let body = body.as_object().expect("an object");
        let encoding = Encoding::V4Flash0731;
        let makers = converted::<ChatCompletionRequest>(body.clone(), encoding);
        let makers = makers.expect("a request").conversation.tools;
        let ours = chat(body.clone(), encoding).expect("a request");
        assert_eq!(ours.conversation.tools, makers);
        let mut required = schema.clone();
        require_all(&mut required);
        assert_eq!(required, makers[0].parameters, "{schema}");
    }
    // What conversion drops.
    let lost = json!({"type": "string", "minLength": 2});
    let mut schema = object(json!({"a": lost}));
    require_all(&mut schema);
    assert_eq!(schema["properties"]["a"], lost);
    let mut composed = json!({"type": "object", "anyOf": [object(json!({"x": string}))]});
    let written = composed.clone();
    require_all(&mut composed);
    assert_eq!(composed, written);
}

#[test]
fn what_common_clients_send_is_taken_though_the_makers_refuse_it() {
    let user = json!({"role": "user", "content": "u"});
    let said = |answer: Value| prompt(&json!({"messages": [user, answer, user]}));
    let plain = said(json!({"role": "assistant", "content": "x"}));
    let without_calls = said(json!({"role": "assistant", "content": "x", "tool_calls": []}));
    assert_eq!(without_calls.expect("a prompt"), plain.expect("a prompt"));

    let options = json!({"messages": [user], "stream_options": {"include_usage": true}});
    assert!(prompt(&options).is_ok());

    let with = |parameters: Value| {
        let function = json!({"name": "f", "parameters": parameters});
        prompt(&json!({"messages": [user], "tools": [{"type": "function", "function": function}]}))
    };
    let typed = with(json!({"properties": {"a": {}}, "type": "object"}));
    let untyped = with(json!({"properties": {"a": {}}}));
    assert_eq!(untyped.expect("a prompt"), typed.expect("a prompt"));
}

#[test]
fn what_is_refused_names_the_field_at_fault() {
    let user = json!([{"role": "user", "content": "u"}]);
    let tool = |name: &str, parameters: Value| {
        let function = json!({"name": name, "parameters": parameters});
        json!({"type": "function", "function": function})
    };
    let object = json!({"type": "object"});
    let result = json!([{"role": "tool", "tool_call_id": "x", "content": "r"}]);
    for (body, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": result}), "messages"),
        (
            json!({"messages": user, "tools": [tool("a b", object.clone())]}),
            "tools",
        ),
        (
            json!({"messages": user, "tools": [tool("a", json!({"type": "string"}))]}),
            "tools",
        ),
        (
            json!({"messages": user, "tools": [tool("a", object.clone()), tool("a", object)]}),
            "tools",
        ),
        (json!({}), "messages"),
        (json!({"messages": [{"content": "u"}]}), "messages[0].role"),
        (
            json!({"messages": [{"role": "tool", "content": "r"}]}),
            "messages[0].tool_call_id",
        ),
        (
            json!({"messages": user, "tools": [{"type": "function"}]}),
            "tools[0].function",
        ),
        (
            json!({"messages": user, "tools": [tool("a.b", json!({"type": "object"}))]}),
            "tools",
        ),
        (
            json!({"messages": user, "reasoning_effort": "enormous"}),
            "reasoning_effort",
        ),
    ] {
        let error = prompt(&body).expect_err("it is refused").body();
        assert_eq!(error["error"]["param"], param, "{body}: {error}");
    }
}

#[test]
fn tools_of_v41_are_told_in_its_tags() {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    let messages = json!([{"role": "user", "content": "u"}]);
    let body = json!({"messages": messages, "tools": [tool], "tool_choice": "required"});
    let body = parse(body.to_string().as_bytes()).unwrap();
    let request = chat(body, Encoding::V41Flash).unwrap();
    let prompt = Encoding::V41Flash.render(&request.conversation).prompt;
    assert!(prompt.contains("<｜DSML｜ invoke name="), "{prompt}");
    assert!(prompt.ends_with("\n\n<｜DSML｜ calls>\n"), "{prompt}");
}
