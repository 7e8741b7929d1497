use super::*;
use crate::generate::chat::{ChatOptions, render_chat};

fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    }
}

#[test]
fn a_plain_completion_is_its_content() {
    for completion in ["Hello.\n", "Hello.\n<｜end▁of▁sentence｜>"] {
        let parsed = parse_completion(completion, false).unwrap();
        assert_eq!(
            parsed,
            Completion {
                content: "Hello.\n".into(),
                ..Default::default()
            }
        );
    }
}

#[test]
fn reasoning_ends_at_its_token() {
    let parsed = parse_completion("Let me see.</think>42<｜end▁of▁sentence｜>", true).unwrap();
    assert_eq!(parsed.reasoning.as_deref(), Some("Let me see."));
    assert_eq!(parsed.content, "42");
    assert!(parsed.tool_calls.is_empty());
}

#[test]
fn tool_calls_are_parsed_with_typed_arguments() {
    let completion = "r</think>Wait.

<｜DSML｜tool_calls>
<｜DSML｜invoke name=\"weather\">
<｜DSML｜parameter name=\"city\" string=\"true\">Köln \"x\"
2</｜DSML｜parameter>
<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name=\"now\">

</｜DSML｜invoke>
</｜DSML｜tool_calls><｜end▁of▁sentence｜>";
    let parsed = parse_completion(completion, true).unwrap();
    assert_eq!(parsed.reasoning.as_deref(), Some("r"));
    assert_eq!(parsed.content, "Wait.");
    let expected = [
        call("", "weather", r#"{"city": "Köln \"x\"\n2", "days": 3}"#),
        call("", "now", "{}"),
    ];
    assert_eq!(parsed.tool_calls, expected);
}

#[test]
fn a_parsed_completion_renders_to_the_text_it_came_from() {
    let tail = "why</think>ok\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
        <｜DSML｜parameter name=\"a\" string=\"false\">[1, 1.4302060167127721, {\"b\": true}]\
        </｜DSML｜parameter>\n\
        </｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n\
        </｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>";
    let message = Message::from(parse_completion(tail, true).unwrap());
    let options = ChatOptions {
        thinking: true,
        ..Default::default()
    };
    assert_eq!(
        render_chat(&[Message::user("u"), message], &options)
            .unwrap()
            .text(),
        format!("<｜begin▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>{tail}")
    );
}

#[test]
fn completions_that_leave_the_encoding_are_errors() {
    let block = |inner: &str| format!("\n\n<｜DSML｜tool_calls>\n{inner}</｜DSML｜tool_calls>");
    let invoke = |inner: &str| {
        block(&format!(
            "<｜DSML｜invoke name=\"f\">\n{inner}</｜DSML｜invoke>\n"
        ))
    };
    let parameter = |kind: &str, value: &str| {
        format!("<｜DSML｜parameter name=\"p\" string=\"{kind}\">{value}</｜DSML｜parameter>\n")
    };
    let cases = [
        (true, "no end of reasoning".into(), "</think>"),
        (true, format!("r{}</think>", block("")), "｜DSML｜"),
        (true, "a<think>b</think>c".into(), "<think>"),
        (false, "a</think>b".into(), "</think>"),
        (
            false,
            "a<｜begin▁of▁sentence｜>".into(),
            "<｜begin▁of▁sentence｜>",
        ),
        (
            false,
            "a<｜end▁of▁sentence｜>b".into(),
            "\"b\" after the end",
        ),
        (false, "a\n\n<｜DSML｜tool_calls>".into(), "｜DSML｜"),
        (false, "\n\n<｜DSML｜tool_calls>\n".into(), "expected"),
        (
            false,
            "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f".into(),
            "no ",
        ),
        (false, block("text"), "found \"text"),
        (false, block("") + "more", "\"more\" after the tool calls"),
        (false, invoke("text"), "found \"text"),
        (false, invoke(&parameter("maybe", "1")), "string=\"maybe\""),
        (
            false,
            invoke(&parameter("false", "{1")),
            "\"p\" is not JSON",
        ),
        (
            false,
            invoke(&(parameter("true", "1") + &parameter("true", "2"))),
            "two parameters \"p\"",
        ),
    ];
    for (thinking, completion, expected) in cases {
        match parse_completion(&completion, thinking) {
            Err(GenerateError::Completion { reason }) => {
                assert!(reason.contains(expected), "{completion:?}: {reason}");
            }
            other => panic!("{completion:?}: {other:?}"),
        }
    }
}
