//! Grammars of the shipped tokenizer.

use ds4_model::generate::{Constraint, SpecialTokens};
use serde_json::{Value, json};

use super::{Grammars, MAX_MESSAGE, Unfit, Wanted};
use crate::serve::fuzz::app;

pub(crate) const THINK_END: &str = "</think>";

fn grammars() -> Grammars {
    Grammars::new(&app().loaded)
}

fn constraint(schema: Value) -> Box<dyn Constraint> {
    grammars()
        .constraint(Wanted::Json(schema))
        .expect("a valid schema")
}

pub(crate) fn allowed(constraint: &mut dyn Constraint) -> Vec<u32> {
    let words = app().loaded.config.vocab_size.div_ceil(32);
    let mut mask = vec![0; words];
    constraint.allow(&mut mask).expect("it can go on");
    let ids = 0..32 * words as u32;
    ids.filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1)
        .collect()
}

pub(crate) fn encoded(text: &str) -> Vec<u32> {
    let ids = app().loaded.tokenizer.encode_plain(text);
    ids.expect("text")
}

/// How much of a text is allowed, and whether it may end there.
fn follow(constraint: &mut dyn Constraint, text: &str) -> (String, bool) {
    let mut taken = Vec::new();
    for id in encoded(text) {
        if !allowed(constraint).contains(&id) {
            break;
        }
        constraint.accept(id).expect("an allowed token");
        taken.push(id);
    }
    let text = app().loaded.tokenizer.decode(&taken, SpecialTokens::Keep);
    let ends = allowed(constraint).contains(&app().loaded.config.eos_token_id);
    (text.expect("tokens of the tokenizer"), ends)
}

#[test]
fn documents_that_follow_the_schema_are_allowed_to_their_end_and_others_to_their_fault() {
    let schema = json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["ark", "Árk 書"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "names": {"type": "array", "items": {"$ref": "#/$defs/name"}, "maxItems": 2},
        },
        "required": ["kind", "count"],
        "additionalProperties": false,
        "$defs": {"name": {"type": "string", "maxLength": 3}},
    });
    let cases = [
        (r#"{"kind":"ark","count":7}"#, "", true),
        (
            r#"{"kind": "Árk 書", "count": 99, "names": ["a", "b\n\""]}"#,
            "",
            true,
        ),
        ("{\n  \"kind\": \"ark\",\n  \"count\": 0\n}", "", true),
        (r#"{"kind":"ark","count":7"#, "", false),
        (r#"{"kind":"cow","count":7}"#, "cow", false),
        (r#"{"count":7}"#, "count", false),
        (r#"{"kind":"ark","count":100}"#, "0}", false),
        (r#"{"kind":"ark","count":1,"names":["abcd"]}"#, "d\"", false),
        (
            r#"{"kind":"ark","count":1,"names":["a","b","c"]}"#,
            ",\"c",
            false,
        ),
        (r#"{"kind":"ark","count":1,"other":1}"#, "other", false),
        (r#"{"kind":"ark","count":1} {"#, "{", true),
        ("[]", "[", false),
    ];
    for (text, fault, ends) in cases {
        let (taken, may_end) = follow(constraint(schema.clone()).as_mut(), text);
        if fault.is_empty() {
            assert_eq!(taken, text);
        } else {
            let most = text.rfind(fault).expect("a part of the text") + fault.len();
            assert!(taken.len() < most, "{text}: {taken}");
        }
        assert!(!fault.is_empty() || may_end == ends, "{text}");
    }
}

#[test]
fn what_a_schema_only_hints_at_is_left_out() {
    let schema = json!({
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "password", "maxLength": 2},
            "uniqueItems": {"type": "array", "items": {"const": 1}, "uniqueItems": false},
            "kind": {"const": {"format": "password"}},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["format", "uniqueItems", "kind", "day"],
        "additionalProperties": false,
    });
    let document = |day: &str| {
        let kind = r#"{"format":"password"}"#;
        format!(r#"{{"format":"ab","uniqueItems":[1,1],"kind":{kind},"day":"{day}"}}"#)
    };
    let (good, bad) = (document("2026-11-27"), document("2026-13-27"));
    assert_eq!(
        follow(constraint(schema.clone()).as_mut(), &good),
        (good, true)
    );
    assert_ne!(follow(constraint(schema).as_mut(), &bad).0, bad);
    let error = grammars().constraint(Wanted::Regex("a(".into()));
    assert_eq!(
        error.map(|_| ()),
        Err(Unfit::Format(
            "invalid regex \"a(\" (in regex): regex parse error: a( ^ error: unclosed group".into()
        ))
    );
    let schema = json!({"oneOf": [{"minimum": 1}, {"maximum": 2}]});
    let error = grammars().constraint(Wanted::Json(schema));
    let Err(Unfit::Format(error)) = error.map(|_| ()) else {
        panic!("it is taken");
    };
    assert!(
        error.contains("oneOf") && !error.contains("option"),
        "{error}"
    );
}

#[test]
fn any_object_is_allowed_where_the_schema_says_no_more() {
    let text = r#"{"a": [1, -2.5e3, null, {"b": "cé\n"}], "d": {}}"#;
    let mut object = constraint(json!({"type": "object"}));
    assert_eq!(follow(object.as_mut(), text), (text.to_owned(), true));
}

#[test]
fn control_tokens_and_endless_white_space_are_no_part_of_a_document() {
    let loaded = &app().loaded;
    let added = |id: &u32| loaded.tokenizer.is_added(*id);
    assert!((0..1024).any(|id| added(&id)), "the tokenizer has some");
    let mut text = constraint(json!({"type": "string"}));
    for piece in ["\"", "a"] {
        follow(text.as_mut(), piece);
        let ids = allowed(text.as_mut());
        assert!(ids.len() > 100, "{piece}: {} tokens", ids.len());
        assert!(!ids.iter().any(added), "{piece}");
    }
    // Markup that is spelled out is text like any other.
    let (taken, _) = follow(text.as_mut(), "</think><｜User｜>");
    assert_eq!(taken, "</think><｜User｜>");
    let mut object = constraint(json!({"type": "object"}));
    let pieces = ["{", "\n", "\n", " ", "\n"].map(|piece| follow(object.as_mut(), piece).0);
    assert_eq!(pieces, ["{", "\n", "", " ", ""]);
}

#[test]
fn nothing_but_an_end_follows_a_document_and_a_fork_goes_on_by_itself() {
    let eos = app().loaded.config.eos_token_id;
    let mut answer = constraint(json!({"enum": ["yes", "no"]}));
    follow(answer.as_mut(), "\"");
    let mut fork = answer.fork();
    assert_eq!(follow(fork.as_mut(), "no\"").0, "no\"");
    assert_eq!(allowed(fork.as_mut()), [eos]);
    fork.accept(eos).expect("the end");
    assert_eq!(allowed(fork.as_mut()), [eos]);
    assert_eq!(follow(answer.as_mut(), "yes\""), ("yes\"".into(), true));
    assert!(answer.fork().accept(eos).is_ok());
}

#[test]
fn reasoning_goes_before_and_does_not_end_the_answer() {
    let (grammars, loaded) = (grammars(), &app().loaded);
    let (eos, end) = (
        loaded.config.eos_token_id,
        loaded.tokenizer.token_id(THINK_END),
    );
    let end = end.expect("a token of the tokenizer");
    let answer = grammars
        .constraint(Wanted::Json(json!({"const": 7})))
        .expect("a schema");
    let mut answer = grammars.after_reasoning(answer, end);
    for _ in 0..2 {
        let ids = allowed(answer.as_mut());
        assert!(ids.contains(&end) && !ids.contains(&eos));
        assert!(
            !ids.iter()
                .any(|id| *id != end && loaded.tokenizer.is_added(*id))
        );
        let reasoning = "Is it 8, {\"or\"?</think>";
        assert_eq!(follow(answer.as_mut(), reasoning).0, reasoning);
    }
    let mut fork = answer.fork();
    for answer in [&mut answer, &mut fork] {
        answer.accept(end).expect("the end of the reasoning");
        assert_eq!(follow(answer.as_mut(), "8"), (String::new(), false));
        assert_eq!(follow(answer.as_mut(), "7"), ("7".into(), true));
    }
}

#[test]
fn schemas_that_cannot_be_followed_are_refused_in_one_short_line() {
    let cases = [
        (json!({"type": "strang"}), "strang"),
        (
            json!({"type": "string", "minLength": 3, "maxLength": 1}),
            "minLength",
        ),
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"$ref": "https://example.com/schema"}), ""),
        (json!({"$ref": "#/$defs/none"}), ""),
        (json!({"type": "string", "pattern": "("}), "unclosed group"),
        (
            json!({"type": "integer", "multipleOf": 982_451_653}),
            "multipleOf",
        ),
        (
            json!({"items": {"minimum": 1, "maximum": 2, "multipleOf": 5}}),
            "",
        ),
        (json!({"enum": []}), ""),
        (json!({"anyOf": 1}), "anyOf"),
        (json!({"type": "\n".repeat(1000)}), ""),
    ];
    for (schema, word) in cases {
        let error = grammars().constraint(Wanted::Json(schema.clone()));
        let Unfit::Format(error) = error.expect_err(&schema.to_string()) else {
            panic!("{schema}");
        };
        assert!(error.contains(word), "{schema}: {error}");
        let is_short = !error.is_empty() && error.chars().count() <= MAX_MESSAGE;
        assert!(is_short && !error.contains(char::is_control), "{error:?}");
    }
}

#[test]
fn schemas_that_multiply_out_or_go_deep_end_soon() {
    let letters = |prefix: &str| -> Vec<Value> {
        let names = ('a'..='j').map(|letter| format!("{prefix}{letter}"));
        names
            .map(|name| json!({"properties": {name.clone(): {"const": 1}}, "required": [name]}))
            .collect()
    };
    let all: Vec<Value> = (0..9)
        .map(|index| json!({"anyOf": letters(&index.to_string())}))
        .collect();
    let recursive = json!({"type": "array", "items": {"$ref": "#"}});
    let properties: Value = (0..2500)
        .map(|index| (format!("{index:x}"), json!({})))
        .collect();
    let schemas = [
        json!({"allOf": all}),
        // Each takes some of the stack.
        json!({"properties": properties}),
        json!({"type": "string", "pattern": "((a{1,1000}b?){1,1000}c?){1,1000}"}),
        json!({"type": "array", "items": {"enum": [1]}, "minItems": 1_000_000_000}),
        json!({"type": "string", "minLength": 1_000_000_000}),
        json!({"allOf": [recursive.clone(), recursive]}),
    ];
    for schema in schemas {
        // Taken or refused, but not for ever.
        drop(grammars().constraint(Wanted::Json(schema)));
    }
}
