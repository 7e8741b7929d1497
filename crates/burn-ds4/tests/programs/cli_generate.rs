//! The options of `generate`: where its prompt comes from, when it ends, and what it prints.

use std::fs;

use burn_ds4_ops::device::DeviceSpec;
use ds4_model::generate::{SpecialTokens, TextTokenizer};
use serde_json::Value;

use crate::cli::{golden_text, run, run_with_input};
use crate::golden::root;

#[test]
fn a_prompt_comes_from_a_file_or_from_standard_input() {
    let (text, continuation) = golden_text("short", 8);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("prompt.txt");
    fs::write(&path, format!("{text}\n")).expect("the directory is writable");
    let path = path.to_str().expect("a UTF-8 path");
    let expected = format!("{text}{continuation}\n");
    let of_file = run("generate", &["-f", path, "-n", "8"]).ok();
    assert_eq!(of_file.stdout, expected);
    let input = format!("{text}\n");
    let of_input = run_with_input("generate", &["-n", "8"], input.as_bytes()).ok();
    assert_eq!(of_input.stdout, expected);
    // The command line comes first.
    let arguments = ["-n", "8", "-p", &text];
    let of_line = run_with_input("generate", &arguments, b"another").ok();
    assert_eq!(of_line.stdout, expected);
}

#[test]
fn a_prompt_that_cannot_be_read_is_named() {
    let missing = run("generate", &["-f", "no/such/prompt"]);
    assert_eq!((missing.code, missing.stdout.as_str()), (1, ""));
    assert!(
        missing.stderr.starts_with("error: no/such/prompt: "),
        "{missing:?}"
    );
    let input = run_with_input("generate", &[], b"ab\xff");
    assert_eq!(input.code, 1, "{input:?}");
    let message = "error: standard input: the text is not UTF-8 at byte 2\n";
    assert_eq!(input.stderr, message);
    let both = run("generate", &["-f", "a", "-p", "b"]);
    assert_eq!(both.code, 2, "{both:?}");
}

#[test]
fn options_have_the_names_that_people_know_and_those_of_before() {
    let model = root().join("assets/ds4-tiny");
    let model = model.to_str().expect("a UTF-8 path");
    let sample = |arguments: [&str; 4]| {
        let rest = ["-p", "And", "-n", "16", "--seed", "5"];
        run("generate", &[&arguments, &rest[..]].concat())
            .ok()
            .stdout
    };
    let sampled = sample(["-m", model, "--temp", "1"]);
    assert_eq!(sample(["--model", model, "--temperature", "1"]), sampled);
    assert_ne!(sample(["-m", model, "--temp", "0"]), sampled);
}

#[test]
fn json_has_ids_text_reason_and_figures() {
    let (text, continuation) = golden_text("short", 12);
    let ended = run("generate", &["-p", &text, "-n", "12", "--json"]).ok();
    let report: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(report["text"], continuation);
    assert_eq!(report["finish_reason"], "length");
    let ids = |name: &str| -> Vec<u32> {
        let ids = report[name].as_array().expect("a list").iter();
        ids.map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let tokenizer = TextTokenizer::from_dir(root().join("assets/ds4-tiny")).expect("an asset");
    let decoded = |name: &str| {
        tokenizer
            .decode(&ids(name), SpecialTokens::Skip)
            .expect("known ids")
    };
    assert_eq!(decoded("ids"), continuation);
    assert_eq!(decoded("prompt_ids"), text);
    let figures = &report["figures"];
    assert_eq!((&figures["tokens"], ids("ids").len()), (&12.into(), 12));
    assert_eq!(figures["prompt_tokens"], ids("prompt_ids").len());
    assert_eq!(
        (&figures["device"], &figures["dtype"]),
        (&"flex".into(), &"f32".into())
    );
    for name in [
        "prompt_seconds",
        "seconds",
        "load_seconds",
        "tokens_per_second",
    ] {
        assert!(figures[name].as_f64() > Some(0.0), "{name}: {figures}");
    }
}

#[test]
fn the_reason_of_the_end_is_told() {
    let (text, continuation) = golden_text("short", 64);
    let stop = continuation.split_whitespace().nth(5).expect("words");
    let reason = |arguments: &[&str]| {
        let arguments = [&["-p", &text, "-n", "64"], arguments].concat();
        let told = run("generate", &arguments).ok().last_line().to_owned();
        let json = run("generate", &[&arguments[..], &["--json"]].concat()).ok();
        let json: Value = serde_json::from_str(&json.stdout).expect("JSON");
        (
            told,
            json["finish_reason"].as_str().expect("a reason").to_owned(),
        )
    };
    let cases: [(&[&str], &str, &str); 3] = [
        (&[], "; as many tokens as wanted; ", "length"),
        (&["--stop", stop], "; stopped at a text; ", "stop_string"),
        (&["-c", "30"], "; the context is full; ", "context_full"),
    ];
    for (arguments, words, expected) in cases {
        let (told, reason) = reason(arguments);
        assert!(told.contains(words), "{arguments:?}: {told}");
        assert_eq!(reason, expected, "{arguments:?}");
    }
}

#[test]
fn prompt_and_answer_are_no_longer_than_the_context() {
    let text = "And God said, Let there be light";
    let json = |arguments: &[&str]| {
        let arguments = [&["-p", text, "--json"], arguments].concat();
        let json = run("generate", &arguments).ok().stdout;
        serde_json::from_str::<Value>(&json).expect("JSON")
    };
    let length = |json: &Value, name: &str| json[name].as_array().expect("a list").len();
    let short = json(&["--ctx", "20"]);
    let prompt = length(&short, "prompt_ids");
    assert_eq!(prompt + length(&short, "ids"), 20, "{short}");
    let full = run("generate", &["-p", text, "-c", &prompt.to_string()]);
    let message = format!("error: the prompt has {prompt} tokens, and --ctx is {prompt}\n");
    assert_eq!((full.code, full.stderr), (1, message));
    assert_eq!(length(&json(&["-n", "0"]), "ids"), 0);
}

#[test]
fn options_of_a_chat_need_one() {
    for option in [["--think", "high"], ["--encoding", "v4"]] {
        let arguments = [&["-p", "a"], &option[..]].concat();
        let ended = run("generate", &arguments);
        assert_eq!(ended.code, 1, "{ended:?}");
        let message = format!("error: {} needs --chat\n", option[0]);
        assert_eq!(ended.stderr, message);
    }
}

#[test]
fn a_device_that_nobody_names_is_told() {
    let mut command = crate::cli::program("generate");
    command.args(["-p", "And", "-n", "2"]).current_dir(root());
    let output = command.output().expect("the program starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    // Which one it is depends on the machine where more than Flex is compiled in.
    let (best, is_alone) = (
        DeviceSpec::best(),
        !cfg!(any(feature = "wgpu", feature = "cuda-llvm")),
    );
    assert!(best == DeviceSpec::Flex || !is_alone, "{best}");
    let dtype = match best {
        DeviceSpec::Cuda(_) => "bf16",
        _ => "f32",
    };
    let end = format!("; {best} in {dtype}]\n");
    assert!(stderr.ends_with(&end), "{end:?}: {stderr}");
}
