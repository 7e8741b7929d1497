//! The program as a user runs it: what they print, how they end.

use std::io::Write;
#[cfg(unix)]
use std::process::Child;
use std::process::{Command, Stdio};

use burn::tensor::FloatDType;
use burn_ds4_ops::device::DeviceSpec;
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::placement::Plan;
use serde_json::Value;

use crate::golden::{golden, root};
pub(crate) use ds4_test_support::{Ended, golden_text, number_before};

/// A command of the program.
pub(crate) fn program(name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ds4"));
    command.arg(name);
    command
}

/// Runs a command in the repository's root.
pub(crate) fn run(name: &str, arguments: &[&str]) -> Ended {
    run_with_input(name, arguments, b"")
}

/// The same, with something on standard input.
pub(crate) fn run_with_input(name: &str, arguments: &[&str], input: &[u8]) -> Ended {
    let mut command = program(name);
    command.args(arguments).current_dir(root());
    if ["generate", "serve"].contains(&name) && !arguments.contains(&"--device") {
        // What is expected is of the CPU, whatever else there is and a driver says of it.
        command.args(["--device", "flex"]);
    }
    if name == "serve" && !arguments.contains(&"--port") {
        // The usual port may be somebody else's.
        command.args(["--port", "0"]);
    }
    command.stdin(Stdio::piped());
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = output.spawn().expect("the program starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    // A program that has an error to tell may not read it.
    let _ = stdin.write_all(input);
    drop(stdin);
    let output = child.wait_with_output().expect("the program ends");
    Ended::of(output)
}

/// Sends a signal, `TERM` or `INT`, to a program.
#[cfg(unix)]
pub(crate) fn signal(child: &Child, name: &str) {
    let signal = format!("-{name}");
    let status = Command::new("kill")
        .args([&signal, &child.id().to_string()])
        .status();
    assert!(status.expect("kill runs").success());
}

#[test]
fn generate_without_arguments_continues_its_own_prompt_and_ends_with_a_rate() {
    let ended = run("generate", &[]).ok();
    let text = ended
        .stdout
        .strip_prefix("And God said,")
        .expect("the prompt comes first");
    assert!(text.split_whitespace().count() > 60, "{text}");
    assert!(
        number_before(ended.last_line(), " tokens,") == 128.0,
        "{}",
        ended.last_line()
    );
    assert!(
        number_before(ended.last_line(), " tokens/s") > 0.0,
        "{}",
        ended.last_line()
    );
    // It drafts with what the checkpoint has.
    assert!(
        ended.last_line().contains("drafts"),
        "{}",
        ended.last_line()
    );
}

#[test]
fn generate_prints_the_golden_continuation_with_and_without_drafts() {
    for (prompt, count) in [("short", "64"), ("medium", "24")] {
        let tokens: f64 = count.parse().expect("a number");
        let (text, continuation) = golden_text(prompt, tokens as usize);
        for (option, drafts, more) in [
            ("--draft-tokens", "0", ""),
            ("--draft-tokens", "0", "--no-graph"),
            ("--draft-tokens", "1", ""),
            ("--mtp", "3", ""),
        ] {
            let arguments = ["-p", &text, "-n", count, option, drafts, more];
            let arguments: Vec<&str> = arguments.into_iter().filter(|a| !a.is_empty()).collect();
            let ended = run("generate", &arguments).ok();
            assert_eq!(
                ended.stdout,
                format!("{text}{continuation}\n"),
                "{prompt}, {drafts} drafts {more}"
            );
            let line = ended.last_line();
            assert_eq!(number_before(line, " tokens,"), tokens, "{line}");
            if drafts != "0" {
                let accepted = number_before(line, " (");
                assert!(accepted > 0.0 && accepted < tokens, "{line}");
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_sample_and_another_seed_another() {
    let sample = |seed: &str| {
        let arguments = [
            "-n",
            "24",
            "--temperature",
            "1",
            "--top-k",
            "40",
            "--seed",
            seed,
        ];
        run("generate", &arguments).ok().stdout
    };
    let first = sample("1");
    assert_eq!(sample("1"), first);
    assert_ne!(sample("2"), first);
}

#[test]
fn generate_stops_before_a_stop_string() {
    let (text, continuation) = golden_text("short", 64);
    let stop = "Speak unto";
    let (before, _) = continuation
        .split_once(stop)
        .expect("the golden text has it");
    let ended = run("generate", &["-p", &text, "-n", "64", "--stop", stop]).ok();
    assert_eq!(ended.stdout, format!("{text}{before}\n"));
}

#[test]
fn generate_answers_a_chat_without_repeating_the_prompt() {
    let question = "Who made the heaven?";
    let ended = run("generate", &["--chat", "-p", question, "-n", "16"]).ok();
    assert!(!ended.stdout.contains(question), "{}", ended.stdout);
    assert!(ended.stdout.trim().len() > 10, "{}", ended.stdout);
    // The chat encoding puts special tokens around the question.
    let line = ended.last_line();
    let plain = run("generate", &["-p", question, "-n", "1"]).ok();
    assert!(
        number_before(line, " tokens in") > number_before(plain.last_line(), " tokens in"),
        "{line}"
    );
}

#[test]
fn generate_drafts_with_what_the_checkpoint_has() {
    let dspark = root().join("assets/ds4-tiny-dspark");
    let dspark = dspark.to_str().expect("a path in UTF-8");
    let mtp = root().join("assets/ds4-tiny");
    let mtp = mtp.to_str().expect("a path in UTF-8");
    let (text, continuation) = golden_text("short", 40);
    for (more, named) in [
        (&["--drafter", "dspark"][..], Ok("drafts ")),
        (
            &["--draft-tokens", "3", "--draft-confidence", "0.3"],
            Ok("drafts "),
        ),
        (&["--drafter", "none"], Ok("prompt ")),
        (
            &["--drafter", "mtp"],
            Err("--drafter mtp: the checkpoint has dspark"),
        ),
        (
            &["--draft-tokens", "6"],
            Err("`drafts` is 6, expected 0..=5"),
        ),
        // Which is the default.
        (&["--model", dspark], Ok("drafts ")),
        (&["--model", mtp, "--drafter", "mtp"], Ok("drafts ")),
    ] {
        let arguments = [&["-p", &text, "-n", "40"], more].concat();
        let ended = run("generate", &arguments);
        match named {
            Ok(named) => {
                let ended = ended.ok();
                assert_eq!(ended.stdout, format!("{text}{continuation}\n"), "{more:?}");
                assert!(ended.last_line().contains(named), "{more:?}: {ended:?}");
            }
            Err(named) => {
                assert_eq!(ended.code, 1, "{more:?}: {ended:?}");
                assert!(ended.last_line().contains(named), "{more:?}: {ended:?}");
            }
        }
    }
}

#[test]
fn bad_arguments_end_with_one_line_that_names_them() {
    let cases: [(&str, &[&str], i32, &str); 19] = [
        ("generate", &["--top-p", "2"], 1, "top_p"),
        ("generate", &["--temperature", "-1"], 1, "temperature"),
        ("generate", &["--draft-tokens", "9"], 2, "--draft-tokens"),
        ("generate", &["--model", "no/such/dir"], 1, "no/such/dir"),
        ("generate", &["--device", "cuda:4096"], 1, "cuda:4096"),
        ("generate", &["--device", "tpu"], 2, "`tpu`"),
        ("generate", &["--stop", ""], 1, "stop string 0"),
        ("inspect", &["-m", "no/such/dir"], 1, "no/such/dir"),
        ("eval", &["-m", "no/such/dir"], 1, "no/such/dir"),
        ("serve", &["-m", "no/such/dir"], 1, "no/such/dir"),
        ("inspect", &["--devices", "99"], 1, "devices: 99 of them"),
        (
            "inspect",
            &["--devices", "2", "--split", "1,1"],
            1,
            "split [1, 1]",
        ),
        (
            "inspect",
            &["--devices", "4", "--parallel", "tensor"],
            1,
            "o_groups (2)",
        ),
        ("inspect", &["--devices", "0"], 2, "--devices"),
        ("inspect", &["--split", "1,1"], 2, "required arguments"),
        (
            "generate",
            &["--device", "flex,flex"],
            1,
            "flex is named twice",
        ),
        ("generate", &["--device", "flex,tpu"], 2, "`tpu`"),
        ("eval", &["--file", "no/such/text"], 1, "no/such/text"),
        ("eval", &["--window", "0"], 2, "--window"),
    ];
    for (name, arguments, code, named) in cases {
        let ended = run(name, arguments);
        assert_eq!(ended.code, code, "{name} {arguments:?}: {ended:?}");
        // The command line parser adds a hint where to find help.
        let lines: Vec<&str> = ended
            .stderr
            .lines()
            .filter(|line| !line.is_empty())
            .collect();
        assert!(
            lines[0].starts_with("error: ") && lines[0].contains(named),
            "{name} {arguments:?}: {ended:?}"
        );
        assert!(
            lines.len() == 1 || code == 2,
            "{name} {arguments:?}: {ended:?}"
        );
        assert_eq!(ended.stdout, "", "{name} {arguments:?}");
    }
}

#[test]
fn a_device_that_is_not_compiled_in_is_named_with_its_feature() {
    for (device, compiled) in [
        ("wgpu", cfg!(feature = "wgpu")),
        ("cuda", cfg!(feature = "cuda-llvm")),
        ("cpu", cfg!(feature = "cpu")),
    ] {
        if compiled {
            continue;
        }
        let ended = run("generate", &["--device", device]);
        assert_eq!(ended.code, 1, "{ended:?}");
        assert!(
            ended.stderr.contains(&format!("--features {device}")),
            "{ended:?}"
        );
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn limits_of_devices_that_cannot_be_read_are_named() {
    let mut command = program("generate");
    command
        .args(["--device", "wgpu", "-n", "1"])
        .current_dir(root());
    let output = command.env("DS4_CAPS", "sm=90,shared=x").output();
    let output = output.expect("the program ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let line = "error: device `wgpu` cannot run the operators: DS4_CAPS has `shared=x`, expected";
    assert!(stderr.contains(line), "{stderr}");
}

#[test]
fn inspect_knows_the_bytes_of_the_loaded_model() {
    let ended = run("inspect", &[]).ok();
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("an asset");
    let device = DeviceSpec::Flex.init().expect("Flex is always present");
    for (line, expand, dtype) in [
        ("packed, f32 activations", false, FloatDType::F32),
        ("packed, bf16 activations", false, FloatDType::BF16),
        ("expanded to f32", true, FloatDType::F32),
        ("expanded to bf16", true, FloatDType::BF16),
    ] {
        let options = LoadOptions {
            dtype,
            expand,
            ..LoadOptions::default()
        };
        let bytes = checkpoint.weight_bytes(&options, &device);
        let printed = ended
            .stdout
            .lines()
            .find_map(|printed| printed.trim().strip_prefix(line));
        let digits: String = printed
            .and_then(|printed| printed.split("bytes").next())
            .unwrap_or_else(|| panic!("no line {line:?} in {}", ended.stdout))
            .split_whitespace()
            .collect();
        assert_eq!(digits.parse(), Ok(bytes.expect("an asset")), "{line}");
    }
}

#[test]
fn a_plan_has_the_layers_and_all_bytes_of_each_device() {
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("an asset");
    let options = LoadOptions {
        dtype: FloatDType::BF16,
        ..LoadOptions::default()
    };
    let device = DeviceSpec::Flex.init().expect("Flex is always present");
    let bytes = checkpoint
        .model_bytes(&options, &device, 128)
        .expect("it is complete");
    let names = ["device 0", "device 1"].map(str::to_owned);
    let plan = Plan::balanced(&bytes, &names).expect("a layer for each");
    // The embedding is there twice, for the MTP layer.
    let weights: usize = plan.bytes.iter().map(|bytes| bytes.weights).sum();
    assert_eq!(weights, bytes.weights() + bytes.embedding);
    let parts = Plan::tensor(&bytes, &names).expect("two devices");
    for (parallel, plan) in [("layers", plan), ("tensor", parts)] {
        let arguments = ["--devices", "2", "--ctx", "128", "--memory", "1"];
        let arguments = [&arguments[..], &["--parallel", parallel]].concat();
        let ended = run("inspect", &arguments).ok();
        let digits = |text: &str| text.replace(' ', "");
        for ((name, run), bytes) in names.iter().zip(&plan.runs).zip(&plan.bytes) {
            let lines = ended.stdout.lines().map(str::trim);
            let line = lines.filter_map(|line| line.strip_prefix(name)).next();
            let line = digits(line.expect("a line of each device"));
            let layers = format!("{}-{}", run.start, run.end - 1);
            let expected = format!("{layers}{}{}{}", bytes.weights, bytes.cache, bytes.total());
            assert!(line.starts_with(&expected), "{line}: {expected}");
        }
        assert!(ended.stdout.contains("  fits, with "), "{}", ended.stdout);
    }
}

#[test]
fn inspect_lists_every_tensor_on_request() {
    let ended = run("inspect", &["--tensors"]).ok();
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("an asset");
    let mut lines: Vec<&str> = ended
        .stdout
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    lines.sort_unstable();
    for tensor in checkpoint.tensors() {
        assert!(
            lines.binary_search(&tensor.name).is_ok(),
            "{} is not listed",
            tensor.name
        );
    }
    for dtype in ["I8", "F8_E4M3", "F8_E8M0", "BF16", "F32", "I64"] {
        assert!(
            ended.stdout.lines().any(|line| line.starts_with(dtype)),
            "{dtype} has no total"
        );
    }
}

#[test]
fn inspect_ends_quietly_when_nobody_reads_on() {
    let mut child = program("inspect")
        .arg("--tensors")
        .current_dir(root())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn eval_is_surer_of_scripture_than_of_the_same_words_shuffled() {
    let ended = run("eval", &["--tokens", "300"]).ok();
    let perplexity = |ended: &Ended| -> f64 {
        let line = ended.stdout.lines().next().expect("a line");
        line.rsplit(' ')
            .next()
            .and_then(|number| number.parse().ok())
            .expect("a number")
    };
    // Uniform guessing is 1024, the checkpoint's held-out figure 13.25.
    let scripture = perplexity(&ended);
    assert!((2.0..20.0).contains(&scripture), "{ended:?}");
    assert_eq!(number_before(&ended.stdout, " tokens,"), 300.0, "{ended:?}");
    // Two windows, 256 and 44 tokens, each with one draft fewer than tokens.
    assert!(ended.stdout.contains("298 MTP drafts"), "{ended:?}");
    for word in [" % as the trunk", " % as the text"] {
        let share = number_before(&ended.stdout, word);
        assert!((30.0..=100.0).contains(&share), "{ended:?}");
    }

    let text = std::fs::read_to_string(root().join("assets/sample.txt")).expect("an asset");
    let mut words: Vec<&str> = text.split_whitespace().collect();
    words.reverse();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("reversed.txt");
    std::fs::write(&path, words.join(" ")).expect("the directory is writable");
    let path = path.to_str().expect("a UTF-8 path");
    let ended = run("eval", &["--tokens", "300", "--file", path]).ok();
    assert!(perplexity(&ended) > 2.0 * scripture, "{ended:?}");
}

#[test]
fn eval_of_token_ids_has_the_perplexity_of_the_golden_logits() {
    let ids: Vec<i64> = golden("medium.input_ids", i64::from_le_bytes);
    let logits: Vec<f32> = golden("medium.logits", f32::from_le_bytes);
    // Row t predicts the token at t + 1. The first token is the beginning-of-sequence token, which
    // every window begins with.
    assert_eq!(ids[0], 0);
    let losses = logits.chunks(1024).zip(&ids[1..]).map(|(row, id)| {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        sum.ln() - f64::from(row[*id as usize])
    });
    let losses: Vec<f64> = losses.collect();
    let loss = losses.iter().sum::<f64>() / losses.len() as f64;

    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("ids.json");
    let path = path.to_str().expect("a UTF-8 path");
    let write = |ids: &[i64]| {
        let ids = serde_json::to_string(ids).expect("numbers");
        std::fs::write(path, ids).expect("the directory is writable");
    };
    write(&ids[1..]);
    let window = losses.len().to_string();
    let whole = run("eval", &["--ids", path, "--window", &window]).ok();
    let expected = format!(
        "{window} tokens, loss {loss:.3}, perplexity {:.2}\n",
        loss.exp()
    );
    assert!(whole.stdout.starts_with(&expected), "{expected}{whole:?}");
    // Less is known in shorter windows.
    let arguments = ["--ids", path, "--window", "8", "--json"];
    let short = run("eval", &arguments).ok();
    let short: Value = serde_json::from_str(&short.stdout).expect("JSON");
    assert!(short["loss"].as_f64() > Some(loss), "{short}");

    write(&[3, 1024]);
    let refused = run("eval", &["--ids", path]);
    assert_eq!(refused.code, 1, "{refused:?}");
    let message = format!("error: {path}: has token 1024, but the model's vocabulary has 1024\n");
    assert_eq!(refused.stderr, message);
    std::fs::write(path, "3 4").expect("the directory is writable");
    let refused = run("eval", &["--ids", path]);
    assert!(refused.stderr.contains("not a list of ids"), "{refused:?}");
}

#[test]
fn eval_of_windows_of_one_token_makes_no_drafts() {
    // A draft is for the token after the next, which such a window does not have.
    let ended = run("eval", &["--tokens", "20", "--window", "1"]).ok();
    assert!(!ended.stdout.contains("drafts"), "{ended:?}");
    assert_eq!(number_before(&ended.stdout, " tokens,"), 20.0, "{ended:?}");
}
