//! Calls that a grammar takes, with the shipped tokenizer, in which another token stands for the
//! mark of calls.

use ds4_model::generate::Constraint;
use serde_json::json;

use super::*;
use crate::serve::fuzz::app;
use crate::serve::grammar::tests::{THINK_END, allowed, encoded};
use crate::serve::grammar::{CallRules, Grammars};

/// One call of a tool `f`.
fn rules(parameters: &Value) -> CallRules {
    let tool = ToolDefinition {
        name: "f".into(),
        description: None,
        parameters: parameters.clone(),
        strict: None,
        defer_loading: false,
    };
    CallRules {
        tools: vec![tool],
        one_call: true,
        encoding: Encoding::V4,
    }
}

/// A constraint of one such call.
fn constraint(parameters: &Value, encoding: Encoding) -> Result<Box<dyn Constraint>, Unfit> {
    let mark = app().loaded.tokenizer.token_id(THINK_END).expect("a token");
    let rules = CallRules {
        encoding,
        ..rules(parameters)
    };
    Grammars::marked(&app().loaded, mark).constraint(Wanted::Calls(rules))
}

/// Whether a call is taken with these parameters, of which some are strings: with the tags of V4
/// and with those of V4.1.
fn takes(parameters: &Value, given: &[(&str, bool, &str)]) -> bool {
    let [one, other] = [Encoding::V4, Encoding::V41Flash].map(|of| takes_in(parameters, given, of));
    assert_eq!(one, other, "{parameters}, {given:?}");
    one
}

fn takes_in(parameters: &Value, given: &[(&str, bool, &str)], encoding: Encoding) -> bool {
    let (blank, block) = match encoding {
        Encoding::V41Flash => (" ", "calls"),
        _ => ("", "tool_calls"),
    };
    let mut text = format!("<@{blank}invoke name=\"f\">\n");
    for (name, is_string, value) in given {
        let open = format!("<@{blank}parameter name=\"{name}\" string=\"{is_string}\">");
        text += &format!("{open}{value}</@{blank}parameter>\n");
    }
    text += &format!("</@{blank}invoke>\n</@{blank}{block}>");
    let mark = app().loaded.tokenizer.token_id(THINK_END).expect("a token");
    let mut constraint = constraint(parameters, encoding).expect("a valid schema");
    let mut ids = Vec::new();
    for (index, piece) in text.split('@').enumerate() {
        ids.extend((index > 0).then_some(mark));
        ids.extend(encoded(piece));
    }
    ids.push(app().loaded.config.eos_token_id);
    ids.into_iter().all(|id| {
        let ids = allowed(constraint.as_mut());
        assert!(
            !ids.is_empty(),
            "{parameters}: nothing can follow in {text}"
        );
        ids.contains(&id) && constraint.accept(id).is_ok()
    })
}

#[test]
fn a_value_follows_all_that_its_schema_says_of_strings_and_of_others() {
    let string = |text: &'static str, taken: bool| (true, text, taken);
    let json = |text: &'static str, taken: bool| (false, text, taken);
    let date = "\"2026-11-27\"";
    let cases = [
        (
            json!({"type": "string"}),
            vec![
                string("", true),
                string("a</b> <c", true),
                string("a\n\"</", true),
                json("\"a\"", false),
            ],
        ),
        (
            json!({"type": "string", "minLength": 2, "maxLength": 3}),
            vec![
                string("a", false),
                string("Áb", true),
                string("a</", true),
                string("abcd", false),
            ],
        ),
        (
            json!({"type": "string", "pattern": "^a+/$"}),
            vec![
                string("aa/", true),
                string("baa/", false),
                string("aa/b", false),
            ],
        ),
        (
            json!({"type": "string", "pattern": "b\\d", "maxLength": 3}),
            vec![
                string("ab7", true),
                string("b7", true),
                string("ab", false),
                string("aab7", false),
            ],
        ),
        (
            json!({"type": "string", "pattern": "(^a|b)$"}),
            vec![
                string("a", false),
                json("\"xb\"", true),
                json("\"ba\"", false),
            ],
        ),
        (
            json!({"type": "string", "format": "date"}),
            vec![
                json(date, true),
                json("\"2026-13-27\"", false),
                string("2026-11-27", false),
            ],
        ),
        (
            json!({"type": "string", "format": "password"}),
            vec![string("x", true)],
        ),
        (
            json!({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}),
            vec![
                string("ab", true),
                string("abc", false),
                json("7", true),
                json("7.5", false),
                json("\"ab\"", false),
            ],
        ),
        (
            json!({"oneOf": [{"const": "a"}, {"type": "null"}]}),
            vec![
                string("a", true),
                string("b", false),
                json("null", true),
                json("1", false),
            ],
        ),
        (
            json!({"type": ["string", "null"], "pattern": "^x$"}),
            vec![
                string("x", true),
                string("y", false),
                json("null", true),
                json("1", false),
            ],
        ),
        (
            json!({"enum": ["a", "a</b", 1, null]}),
            vec![
                string("a", true),
                string("a</b", true),
                string("a<", false),
                json("1", true),
                json("\"a\"", false),
                json("2", false),
            ],
        ),
        (
            json!({"allOf": [{"enum": ["ab", "b"]}, {"pattern": "^a"}, {"type": "string"}]}),
            vec![string("ab", true), string("b", false), json("1", false)],
        ),
        (
            json!({}),
            vec![
                string("a", true),
                json("[1, {}]", true),
                json("\"a\"", false),
            ],
        ),
        (json!(true), vec![string("a", true), json("7", true)]),
        (
            json!({"$ref": "#/$defs/kind"}),
            vec![string("ark", true), string("cow", false)],
        ),
        (
            json!({"$ref": "#/%24defs/kind"}),
            vec![string("ark", true), string("cow", false)],
        ),
        (
            json!({"$ref": "#/properties/y"}),
            vec![json("8", true), json("12", false)],
        ),
        (
            json!({"type": "array", "items": {"$ref": "#/$defs/kind"}}),
            vec![json("[\"ark\"]", true), json("[\"cow\"]", false)],
        ),
        (
            json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
            vec![
                json("{\"x\": {\"x\": null, \"y\": 2}}", true),
                json("null", true),
                json("{\"x\": 1}", false),
                string("a", false),
            ],
        ),
        (
            json!({"enum": []}),
            vec![string("a", false), json("1", false)],
        ),
        (
            json!({"type": "string", "minLength": 2, "pattern": "^.$"}),
            vec![string("ab", false)],
        ),
        (
            json!({"anyOf": [{"type": "string", "minLength": 2, "pattern": "^.$"}, {"const": 1}]}),
            vec![string("ab", false), json("1", true)],
        ),
    ];
    for (schema, values) in cases {
        let parameters = json!({
            "type": "object",
            "properties": {"x": schema, "y": {"type": "integer", "maximum": 9}},
            "$defs": {"kind": {"title": "K", "enum": ["ark", "dove"]}},
        });
        assert!(takes(&parameters, &[]), "{schema}");
        for (is_string, value, taken) in values {
            let found = takes(&parameters, &[("x", is_string, value), ("y", false, "9")]);
            assert_eq!(found, taken, "{schema}: {is_string} {value}");
        }
    }
}

#[test]
fn parameters_are_those_that_the_schema_allows_together() {
    type Given = [(&'static str, bool, &'static str)];
    let cases: [(Value, &[(&Given, bool)]); 7] = [
        (
            json!({}),
            &[(&[], true), (&[("z", true, "a"), ("b", false, "1")], true)],
        ),
        (
            json!({"properties": {"a": {"const": 1}, "b": {}}, "required": ["b"]}),
            &[
                (&[("a", false, "1"), ("b", false, "2")], true),
                (&[("b", true, "x")], true),
                (&[("a", false, "1")], false),
                (&[("b", true, "x"), ("a", false, "1")], false),
                (&[("b", true, "x"), ("c", false, "1")], false),
            ],
        ),
        (
            json!({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}),
            &[
                (
                    &[("a", true, "x"), ("z", false, "1"), ("aa", false, "2")],
                    true,
                ),
                (&[("z", true, "x")], false),
                // It would not follow its own schema.
                (&[("a", true, "x"), ("a", false, "1")], false),
            ],
        ),
        (
            json!({"required": ["a"], "additionalProperties": {"type": "boolean"}}),
            &[
                (&[("a", false, "true")], true),
                (&[], false),
                (&[("a", false, "1")], false),
            ],
        ),
        (
            json!({"required": ["a"]}),
            &[
                (&[("a", false, "1")], true),
                (&[("a", true, "x")], true),
                (&[], false),
            ],
        ),
        (
            json!({"additionalProperties": false}),
            &[(&[], true), (&[("a", true, "x")], false)],
        ),
        (
            json!({
                "properties": {"kind": {"type": "string"}, "n": {"enum": []}},
                "oneOf": [
                    {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
                     "required": ["kind", "x"]},
                    {"$ref": "#/definitions/b"},
                ],
                "definitions": {
                    "b": {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
                },
            }),
            &[
                (&[("kind", true, "a"), ("x", false, "1")], true),
                (&[("kind", true, "b")], true),
                (&[("kind", true, "a")], false),
                (&[("kind", true, "b"), ("x", false, "1")], false),
                (&[("kind", true, "c")], false),
            ],
        ),
    ];
    for (mut schema, calls) in cases {
        schema["type"] = json!("object");
        for (given, taken) in calls {
            assert_eq!(takes(&schema, given), *taken, "{schema}: {given:?}");
        }
    }
}

#[test]
fn what_cannot_be_followed_is_refused_by_its_tool_parameter_and_keyword() {
    let of =
        |schema: Value| json!({"type": "object", "properties": {"x": schema}, "required": ["x"]});
    for (schema, words) in [
        (
            of(json!({"not": {"type": "null"}})),
            &["parameter `x`", "not"][..],
        ),
        (
            of(json!({"type": "array", "uniqueItems": true})),
            &["`x`", "uniqueItems"],
        ),
        (
            of(json!({"oneOf": [{"minimum": 1}, {"maximum": 2}]})),
            &["`x`", "oneOf"],
        ),
        (
            of(json!({"type": "string", "pattern": "("})),
            &["`x`", "unclosed group"],
        ),
        (
            of(json!({"type": "integer", "multipleOf": 982_451_653})),
            &["multipleOf", "982451653"],
        ),
        (
            of(json!({"items": {"minimum": 1, "maximum": 2, "multipleOf": 5}})),
            &["`x`"],
        ),
        (of(json!({"type": "strang"})), &["`x`", "strang"]),
        (
            of(json!({"$ref": "#/$defs/none"})),
            &["`x`", "$ref", "none"],
        ),
        (
            of(json!({"$ref": "https://example.com/s"})),
            &["`x`", "$ref", "example.com"],
        ),
        (
            of(json!({"$ref": "#/properties/x"})),
            &["$ref", "back to itself"],
        ),
        (
            of(json!({"items": {"anyOf": [{"$ref": "#/properties/x/items"}]}})),
            &["back to itself"],
        ),
        (of(json!({"enum": []})), &["`x`", "no arguments"]),
        (
            json!({"type": "object", "patternProperties": {"a": {}}}),
            &["patternProperties"],
        ),
        (json!({"type": "object", "if": {}}), &["`if`"]),
        (
            json!({"type": "object", "properties": {"a\">b": {}}}),
            &["name"],
        ),
        (json!({"$ref": "#"}), &["back to itself"]),
        (
            json!({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
            &["oneOf"],
        ),
    ] {
        let Err(Unfit::Tools(error)) = constraint(&schema, Encoding::V4) else {
            panic!("{schema}");
        };
        assert!(error.contains("tool `f`"), "{schema}: {error}");
        for word in words {
            assert!(error.contains(word), "{schema}: {error}");
        }
        for own in [
            "json0", "TEXT", "%json", "start:", "lark", "string=", "option",
        ] {
            assert!(!error.contains(own), "{schema}: {error}");
        }
    }
}

#[test]
fn what_several_parameters_refer_to_is_read_once() {
    let fields = (0..100).map(|index| {
        let text = "A field that has a long description, which is for readers only.";
        (
            format!("field{index}"),
            json!({"type": "integer", "description": text}),
        )
    });
    let big = json!({"type": "object", "properties": fields.collect::<Value>()});
    let schema = |item: &dyn Fn(usize) -> Value| {
        let properties: Value = (0..60)
            .map(|index| (format!("p{index}"), item(index)))
            .collect();
        json!({"type": "object", "properties": properties, "$defs": {"big": big}})
    };
    let alike = schema(&|index| json!({"$ref": "#/$defs/big", "description": index.to_string()}));
    assert!(takes(
        &alike,
        &[("p7", false, "{\"field3\": 1}"), ("p9", false, "{}")]
    ));
    // Each would need its own.
    let others = schema(&|index| json!({"items": {"$ref": "#/$defs/big"}, "maxItems": index}));
    let error = constraint(&others, Encoding::V4).map(drop);
    assert!(
        matches!(&error, Err(Unfit::Tools(text)) if text.contains("131072")),
        "{error:?}"
    );
}

/// A schema of these keywords and their like.
fn drawn(draw: &mut impl FnMut(usize) -> usize, depth: usize) -> Value {
    let several = |draw: &mut dyn FnMut(usize) -> usize| -> Vec<u64> {
        (0..=draw(2)).map(|_| draw(4) as u64).collect()
    };
    match draw(if depth == 0 { 8 } else { 13 }) {
        0 => json!({"type": "string", "minLength": draw(3), "maxLength": draw(5)}),
        1 => json!({"type": "string", "pattern": (["^a+$", "b", "^(a|b)", "a|^b$"][draw(4)])}),
        2 => json!({"type": "integer", "minimum": draw(9), "maximum": draw(20), "multipleOf": 3}),
        3 => json!({"enum": several(draw)}),
        4 => json!({"enum": ["a", "ab", "b</", null], "type": ["string", "null"]}),
        5 => json!({"type": "string", "format": (["date", "ipv4", "x"][draw(3)])}),
        6 => json!({"$ref": (["#/$defs/a", "#/$defs/b", "#/properties/p0", "#"][draw(4)])}),
        7 => json!({"type": (["boolean", "null", "string", "number"][draw(4)])}),
        8 => json!({"anyOf": [drawn(draw, depth - 1), drawn(draw, depth - 1)]}),
        9 => json!({"allOf": [drawn(draw, depth - 1), drawn(draw, depth - 1)]}),
        10 => json!({"oneOf": [drawn(draw, depth - 1), {"const": "q"}]}),
        11 => json!({"type": "array", "items": drawn(draw, depth - 1), "minItems": draw(2)}),
        _ => json!({
            "type": "object", "properties": {"x": drawn(draw, depth - 1)},
            "required": ([["x"], ["y"]][draw(2)]), "additionalProperties": draw(2) == 0,
        }),
    }
}

#[test]
fn whatever_a_call_has_begun_with_it_can_go_on() {
    let (loaded, mut state) = (&app().loaded, 7_u64);
    let mut draw = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mark = loaded.tokenizer.token_id(THINK_END).expect("a token");
    let grammars = Grammars::marked(loaded, mark);
    let (mut taken, mut ended) = (0, 0);
    for _ in 0..150 {
        let mut schema = json!({
            "type": "object",
            "properties": {"p0": drawn(&mut draw, 2), "p1": drawn(&mut draw, 2)},
            "required": ["p1"],
            "$defs": {"a": drawn(&mut draw, 1), "b": drawn(&mut draw, 1)},
        });
        if draw(3) == 0 {
            schema["additionalProperties"] = drawn(&mut draw, 1);
        }
        let Ok(mut constraint) = grammars.constraint(Wanted::Calls(rules(&schema))) else {
            continue;
        };
        taken += 1;
        let mut text = Vec::new();
        for _ in 0..150 {
            let ids = allowed(constraint.as_mut());
            assert!(!ids.is_empty(), "{schema}: {text:?}");
            // Marks lead to the end.
            let id = match ids.contains(&mark) && draw(3) > 0 {
                true => mark,
                false => ids[draw(ids.len())],
            };
            if id == loaded.config.eos_token_id {
                ended += 1;
                break;
            }
            constraint.accept(id).expect("an allowed token");
            text.push(loaded.tokenizer.token_bytes(id).unwrap_or_default());
        }
    }
    assert!(taken > 50 && ended > 20, "{taken} taken, {ended} ended");
}
