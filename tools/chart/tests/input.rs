//! Reading lines and settling on some of them.

mod common;

use std::path::Path;

use common::{measurements, ours, peer};
use ds4_chart::error::Error;
use ds4_chart::input::{Located, Measurement, Peer, Shape, parse, read};
use ds4_chart::select::{Wanted, select};

fn message<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

/// What is said about `line` as the second line of a file.
fn complaint(line: &str) -> String {
    message(measurements(&[
        ours(r#""N":1"#, "v", 2.0),
        line.to_string(),
    ]))
}

#[test]
fn a_line_is_read_with_its_place_and_its_columns_in_order() {
    let lines = [
        String::new(),
        ours(r#""R":8,"C":4096,"k":512"#, "full", 2.5),
    ];
    let read = measurements(&lines).unwrap();
    assert_eq!(read.len(), 1);
    let (location, m) = &read[0];
    assert_eq!(location.to_string(), "ours.jsonl:2");
    assert_eq!(m.shape.to_string(), "R=8 C=4096 k=512");
    assert_eq!(
        (m.op.as_str(), m.variant.as_str(), m.dtype.as_str()),
        ("sort", "full", "f32")
    );
    assert_eq!(
        (m.us, m.share_of_copy, m.verified),
        (Some(2.5), Some(0.25), true)
    );
    assert_eq!(m.codegen.as_deref(), Some("nvrtc"));
}

#[test]
fn shapes_are_equal_in_any_order_of_columns() {
    let shape = |text| serde_json::from_str::<Shape>(text).unwrap();
    assert_eq!(shape(r#"{"N":1,"E":2}"#), shape(r#"{"E":2,"N":1}"#));
    assert_ne!(shape(r#"{"N":1,"E":2}"#), shape(r#"{"N":2,"E":1}"#));
    assert_ne!(shape(r#"{"N":1}"#), shape(r#"{"N":1,"E":2}"#));
}

#[test]
fn a_null_time_is_accepted_and_a_missing_one_is_not() {
    let line = ours(r#""N":1"#, "v", 2.0);
    let null = measurements(&[line.replace(r#""us":2,"#, r#""us":null,"#)]).unwrap();
    assert_eq!(null[0].1.us, None);
    assert!(complaint(&line.replace(r#""us":2,"#, "")).contains("missing field `us`"));
}

#[test]
fn a_malformed_line_is_named_by_file_and_line() {
    for (damage, expected) in [
        ("{", "EOF"),
        ("not json", "expected"),
        (&ours(r#""N":0"#, "v", 2.0), "N is 0"),
        (&ours(r#""N":1,"N":2"#, "v", 2.0), "two columns N"),
        (&ours("", "v", 2.0), "shape is empty"),
        (&ours(r#""N":"many""#, "v", 2.0), "invalid type"),
        (&ours(r#""N":2"#, "v", -1.0), "-1 us is not a time"),
        (
            &ours(r#""N":2"#, "v", 2.0).replace("true", "1"),
            "invalid type",
        ),
    ] {
        let said = complaint(damage);
        assert!(said.starts_with("ours.jsonl:2: "), "{said}");
        assert!(said.contains(expected), "{said} does not say {expected}");
    }
}

#[test]
fn a_peer_needs_a_time_and_says_whether_it_has_a_floor() {
    let peers = |line: String| -> Result<Located<Peer>, Error> { parse(Path::new("p"), &line) };
    let line = peer(r#""N":1"#, "v", 2.0, "null");
    assert_eq!(peers(line.clone()).unwrap()[0].1.floor_us, None);
    assert!(
        message(peers(line.replace(r#""us":2,"#, r#""us":null,"#))).contains("a peer has no time")
    );
    assert!(
        message(peers(line.replace(r#","floor_us":null"#, "")))
            .contains("missing field `floor_us`")
    );
    assert!(message(peers(line.replace("null", "-1.0"))).contains("-1 us is not a floor"));
}

#[test]
fn a_file_that_is_empty_or_absent_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.jsonl");
    std::fs::write(&empty, "\n\n").unwrap();
    let said = message(read::<Measurement>(&[empty]));
    assert!(
        said.starts_with("nothing in ") && said.ends_with("empty.jsonl"),
        "{said}"
    );
    let said = message(read::<Measurement>(&[folder.path().join("absent.jsonl")]));
    assert!(
        said.starts_with("cannot read ") && said.contains("absent.jsonl"),
        "{said}"
    );
}

#[test]
fn a_wrong_result_is_refused_even_if_it_would_not_be_shown() {
    let wrong = ours(r#""N":2"#, "v", 2.0)
        .replace("true", "false")
        .replace("nvrtc", "llvm");
    let lines = measurements(&[ours(r#""N":1"#, "v", 2.0), wrong]).unwrap();
    let wanted = Wanted {
        codegen: Some("nvrtc".into()),
        dtype: None,
    };
    assert_eq!(
        message(select(lines, &wanted)),
        "ours.jsonl:2: the result was not verified"
    );
}

#[test]
fn of_several_code_generators_one_must_be_chosen() {
    let line = ours(r#""N":1"#, "v", 2.0);
    let lines = || {
        measurements(&[
            line.clone(),
            line.replace("nvrtc", "llvm").replace("2,", "3,"),
        ])
        .unwrap()
    };
    let choose = |codegen: Option<&str>| {
        let wanted = Wanted {
            codegen: codegen.map(str::to_string),
            dtype: None,
        };
        select(lines(), &wanted)
    };
    assert_eq!(
        message(choose(None)),
        "several values of codegen: llvm, nvrtc; choose one with --codegen"
    );
    assert_eq!(
        message(choose(Some("gcc"))),
        "no measurement has codegen gcc; there is llvm, nvrtc"
    );
    let chosen = choose(Some("llvm")).unwrap();
    assert_eq!((chosen.len(), chosen[0].1.us), (1, Some(3.0)));
}

#[test]
fn of_several_element_types_one_must_be_chosen_and_operators_do_not_mix() {
    let line = ours(r#""N":1"#, "v", 2.0);
    let both = |other: String| measurements(&[line.clone(), other]).unwrap();
    let said = message(select(
        both(line.replace("f32", "bf16")),
        &Wanted::default(),
    ));
    assert_eq!(
        said,
        "several values of dtype: bf16, f32; choose one with --dtype"
    );
    let wanted = Wanted {
        codegen: None,
        dtype: Some("bf16".into()),
    };
    let chosen = select(both(line.replace("f32", "bf16")), &wanted).unwrap();
    assert_eq!((chosen.len(), chosen[0].1.dtype.as_str()), (1, "bf16"));
    let said = message(select(
        both(line.replace("sort", "topk")),
        &Wanted::default(),
    ));
    assert_eq!(
        said,
        "several values of op: sort, topk; a chart shows one operator"
    );
}

#[test]
fn without_any_time_there_is_nothing_to_show() {
    let line = ours(r#""N":1"#, "v", 2.0).replace(r#""us":2,"#, r#""us":null,"#);
    let lines = measurements(&[line]).unwrap();
    assert_eq!(
        message(select(lines, &Wanted::default())),
        "no measurement has a time"
    );
}
