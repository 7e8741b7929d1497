//! `bench load`, by its counts: what takes how long is no matter of tests.

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::cli::run;

/// What a run has appended to a file.
fn lines(options: &str) -> Vec<Value> {
    let file = NamedTempFile::new().expect("a temporary file");
    let path = file.path().to_str().expect("a UTF-8 path");
    let options = options.split_whitespace();
    let arguments: Vec<&str> = ["load", "--json", path]
        .into_iter()
        .chain(options)
        .collect();
    run("bench", &arguments).ok();
    let text = std::fs::read_to_string(file.path()).expect("it is there");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("lines of JSON")
}

fn count(line: &Value, field: &str) -> u64 {
    let count = line[field].as_u64();
    count.unwrap_or_else(|| panic!("no count {field} in {line}"))
}

#[test]
fn every_request_of_a_load_ends_with_all_of_its_tokens() {
    let options = "--concurrency 1,3 --requests 5 --input 20 --output 6";
    let lines = lines(options);
    assert_eq!(lines.len(), 2);
    for (line, lanes) in lines.iter().zip([1, 3]) {
        for (field, expected) in [
            ("concurrency", lanes),
            ("lanes", lanes),
            ("finished", 5),
            ("failed", 0),
            ("prompt_tokens", 100),
            ("cached_tokens", 0),
            ("output_tokens", 30),
            ("drafts", 0),
            ("devices", 1),
        ] {
            assert_eq!(count(line, field), expected, "{field} of {line}");
        }
        for field in ["seconds", "warm_up_seconds", "cache_bytes"] {
            assert!(line[field].as_f64() > Some(0.0), "{field} of {line}");
        }
        let [total, own, output] = [
            "tokens_per_second",
            "tokens_per_second_per_device",
            "output_tokens_per_second",
        ]
        .map(|field| line[field].as_f64().expect("a rate"));
        assert!(
            (total / output - 130.0 / 30.0).abs() < 1e-6 && own == total,
            "{line}"
        );
        for field in ["first_token_ms", "between_tokens_ms", "token_ms"] {
            let spread = ["p50", "p99", "worst"].map(|name| line[field][name].as_f64());
            assert!(
                spread[0] > Some(0.0) && spread.is_sorted(),
                "{field} of {line}"
            );
        }
        // Without drafts, each text of a step has one token.
        let [rows, texts] = ["rows_per_step", "texts_per_step"].map(|own| line[own].as_f64());
        let tokens = texts.expect("a number") * count(line, "steps") as f64;
        assert!((tokens - 30.0).abs() < 1e-6 && rows >= texts, "{line}");
        assert_eq!(
            (&line["kind"], &line["model"]),
            (&"load".into(), &"ds4-tiny".into())
        );
        for field in [
            "layers",
            "experts",
            "prefill_chunk",
            "replays",
            "seed",
            "prefix_bytes",
        ] {
            count(line, field);
        }
        for (field, expected) in [("input", "20"), ("output", "6"), ("dtype", "f32")] {
            assert_eq!(line[field], expected, "{field} of {line}");
        }
    }
}

#[test]
fn a_mixed_load_has_the_same_requests_in_every_run_of_its_seed() {
    let options = "--concurrency 4 --requests 16 --input 16:200 --output 2:12 --rate 300 \
                   --shared 0.6 --shared-tokens 64 --constrained 0.3 --log-probs 0.3 \
                   --prefix-cache 4000000 --prefill-chunk 32 --drafts 1";
    let run = |seed: &str| lines(&format!("{options} --no-warm-up --seed {seed}")).remove(0);
    let tokens = |line: &Value| {
        assert_eq!(
            (count(line, "finished"), count(line, "failed")),
            (16, 0),
            "{line}"
        );
        ["prompt_tokens", "output_tokens"].map(|field| count(line, field))
    };
    let (first, again, other) = (run("3"), run("3"), run("4"));
    assert_eq!(tokens(&first), tokens(&again));
    assert_ne!(tokens(&first), tokens(&other));
    let [input, output] = tokens(&first);
    assert!((16 * 16..=16 * 200).contains(&input) && (32..=16 * 12).contains(&output));
    assert!(count(&first, "cached_tokens") > 0, "{first}");
    assert_eq!(first["warm_up_seconds"], Value::Null);
    assert_eq!(first["rate"], 300.0);
}

#[test]
fn a_burst_tells_what_running_texts_wait_for() {
    let options = "--concurrency 2 --burst 6 --burst-input 4:9 --input 30 --output 2000";
    let lines = lines(&format!("{options} --no-warm-up"));
    let line = &lines[0];
    assert_eq!((&line["kind"], count(line, "lanes")), (&"burst".into(), 8));
    for field in ["usual_ms", "first_token_ms", "between_tokens_ms"] {
        assert!(
            line[field]["worst"].as_f64() > Some(0.0),
            "{field} of {line}"
        );
    }
    assert_eq!(count(line, "failed"), 0);
    assert_eq!(line["burst_input"], "4:9");
    assert_eq!(line["tokens_per_second"], Value::Null);
}

#[test]
fn a_load_that_cannot_be_is_refused_with_a_reason() {
    for (options, code, named) in [
        (
            "--requests 2 --concurrency 3",
            1,
            "--requests 2 is less than --concurrency 3",
        ),
        (
            "--input 4000 --output 90:100",
            1,
            "more positions than the model has, 4096",
        ),
        (
            "--input 8 --output 8 --burst 1 --burst-input 4090",
            1,
            "more positions than the model has, 4096",
        ),
        ("--input 40:8", 2, "40 is more than 8"),
        ("--output none", 2, "--output"),
        ("--rate 0", 2, "--rate"),
        ("--shared 1.5", 2, "--shared"),
        ("--concurrency 0", 2, "--concurrency"),
        ("--burst 2 --rate 3", 2, "--burst"),
        ("--burst-input 3", 2, "--burst"),
        (
            "--burst 2 --concurrency 1 --input 20 --output 3",
            1,
            "--output is too small",
        ),
        (
            "--input 20 --output 3 --model flash --dspark --layers 2",
            1,
            "--layers 6",
        ),
    ] {
        let options = options.split_whitespace();
        let arguments: Vec<&str> = ["load"].into_iter().chain(options).collect();
        let ended = run("bench", &arguments);
        assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(named), "{arguments:?}: {ended:?}");
    }
}
