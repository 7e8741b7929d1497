//! The programs with damaged and hostile checkpoints, and where nothing can be written.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

#[cfg(target_os = "linux")]
use burn::tensor::Device;
#[cfg(target_os = "linux")]
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::flash_head::{FLASH_HEAD_FILE, FlashHeadFile};
use serde_json::{Value, json};
use tempfile::TempDir;

#[cfg(unix)]
use crate::cli::signal;
use crate::cli::{Ended, golden_text, program, run};
use crate::golden::{copy, root};

/// The shipped checkpoint with another configuration.
fn with_config(change: impl FnOnce(&mut Value)) -> TempDir {
    let config = fs::read(root().join("assets/ds4-tiny/config.json")).expect("an asset");
    let mut config = serde_json::from_slice(&config).expect("JSON");
    change(&mut config);
    copy(&[("config.json", &config.to_string())])
}

fn run_on(name: &str, dir: &Path, arguments: &[&str]) -> Ended {
    let dir = dir.to_str().expect("a UTF-8 path");
    run(name, &[&["--model", dir], arguments].concat())
}

/// Checks that an error, of few lines, is all that is printed.
#[track_caller]
fn assert_refused(ended: &Ended) {
    assert_eq!((ended.code, &*ended.stdout), (1, ""), "{ended:?}");
    assert!(ended.stderr.starts_with("error: "), "{ended:?}");
    assert!(ended.stderr.lines().count() < 50, "{ended:?}");
    let controls = |character: char| character.is_control() && character != '\n';
    assert!(!ended.stderr.contains(controls), "{ended:?}");
}

#[test]
fn a_window_of_any_length_takes_no_more_than_the_text() {
    let dir = with_config(|config| config["sliding_window"] = json!(i32::MAX));
    let (text, continuation) = golden_text("short", 4);
    for drafts in ["0", "2"] {
        let arguments = ["-p", &text, "-n", "4", "--draft-tokens", drafts];
        let ended = run_on("generate", dir.path(), &arguments).ok();
        assert_eq!(ended.stdout, format!("{text}{continuation}\n"));
    }
    let ended = run_on("inspect", dir.path(), &[]).ok();
    assert!(ended.stdout.contains("2147483647"), "{ended:?}");
}

#[test]
fn sizes_that_the_tensors_contradict_are_refused_before_anything_is_allocated() {
    let ratios = |config: &mut Value| {
        config["compress_ratios"][2] = json!(i32::MAX);
        let config = config.as_object_mut().expect("an object");
        for key in ["layer_types", "compress_rate_hca"] {
            config.remove(key);
        }
    };
    type Change<'a> = &'a dyn Fn(&mut Value);
    let cases: [(Change, &str); 4] = [
        (
            &|config| config["head_dim"] = json!(1 << 24),
            "layers.0.attn.wkv.weight is [64, 256], expected [16777216, 256]",
        ),
        (
            &|config| config["index_head_dim"] = json!(1 << 24),
            "layers.1.attn.indexer.compressor.norm.weight is [32], expected [16777216]",
        ),
        (
            &ratios,
            "layers.2.attn.compressor.ape is [16, 64], expected [2147483647, 64]",
        ),
        // Of 32 experts in 7 layers, each of three matrices.
        (
            &|config| config["n_routed_experts"] = json!(1 << 20),
            "missing (22019424):",
        ),
    ];
    for (change, expected) in cases {
        let dir = with_config(change);
        for name in ["inspect", "generate"] {
            // All of the model, as `inspect` shows it.
            let arguments = [&[][..], &["--draft-tokens", "1"]][usize::from(name == "generate")];
            let ended = run_on(name, dir.path(), arguments);
            assert_refused(&ended);
            assert!(ended.stderr.contains(expected), "{expected}: {ended:?}");
        }
    }
}

/// What `convert` writes gives the golden text, damaged it is refused in every form, and a full
/// disk leaves what another run goes on with.
#[test]
fn every_form_is_written_and_its_damage_refused() {
    let (text, continuation) = golden_text("short", 4);
    for (form, told) in [
        ("released", "672 in FP4"),
        ("dense", "packed weights        none"),
        ("hf", "of transformers"),
    ] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let target = dir.path().join("target");
        let arguments = ["--to", form, "--shard-size", "4"];
        #[cfg(unix)]
        {
            // Writing fails after 64 kB, and no signal ends the program.
            let limited = r#"trap '' XFSZ; ulimit -f 128; exec "$0" convert "$@""#;
            let mut command = Command::new("sh");
            command.args(["-c", limited, env!("CARGO_BIN_EXE_burn-ds4")]);
            let output = command.args(arguments).arg(&target).output();
            let output = output.expect("a shell");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains("cannot be written"), "{stderr}");
            assert_refused(&run_on("inspect", &target, &[]));
        }
        let path = target.to_str().expect("a UTF-8 path");
        run("convert", &[&arguments[..], &[path]].concat()).ok();
        let again = run("convert", &[&arguments[..], &[path]].concat());
        assert_refused(&again);
        assert!(again.stderr.contains("is not empty"), "{again:?}");
        let ended = run_on("inspect", &target, &[]).ok();
        assert!(ended.stdout.contains(told), "{ended:?}");
        let generate = ["-p", &text, "-n", "4", "--device", "flex"];
        let ended = run_on("generate", &target, &generate).ok();
        assert_eq!(ended.stdout, format!("{text}{continuation}\n"));

        let files = fs::read_dir(&target).expect("it is there");
        let mut shards = files.map(|entry| entry.expect("an entry").path());
        let is_shard =
            |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "safetensors");
        let shard = shards.find(is_shard).expect("a shard");
        let whole = fs::read(&shard).expect("it is there");
        let swapped = [&whole[..20], &[0xff, b'"'], &whole[22..]].concat();
        for damaged in [&whole[..4], &whole[..whole.len() - 1], &swapped, b""] {
            fs::write(&shard, damaged).expect("it is writable");
            assert_refused(&run_on("inspect", &target, &[]));
            assert_refused(&run_on("generate", &target, &generate));
        }
        fs::remove_file(&shard).expect("it is there");
        let ended = run_on("inspect", &target, &[]);
        assert_refused(&ended);
        assert!(
            ended.stderr.contains("shards that do not exist"),
            "{ended:?}"
        );
    }
}

#[test]
fn names_and_values_of_files_cannot_control_the_terminal() {
    let escape = "\u{1b}]0;title\u{7}\u{9b}2J\r";
    let dir = with_config(|config| config["model_type"] = json!(escape));
    let ended = run_on("inspect", dir.path(), &[]);
    assert_refused(&ended);
    assert!(ended.stderr.contains(r"\u{1b}]0;title\u{7}"), "{ended:?}");

    // What the JSON parser says of the same.
    let dir = copy(&[]);
    fs::remove_file(dir.path().join("model.safetensors")).expect("it is there");
    let twice = r#"{"weight_map": {"\u001b[2J": "a", "\u001b[2J": "a"}}"#;
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(index, twice).expect("the directory is writable");
    let ended = run_on("inspect", dir.path(), &[]);
    assert_refused(&ended);
    assert!(ended.stderr.contains(r"`\u{1b}[2J`"), "{ended:?}");
}

/// Runs a program whose standard error goes elsewhere.
fn code_with_stderr(name: &str, arguments: &[&str], stderr: Stdio) -> Option<i32> {
    let mut command = program(name);
    command.args(arguments).current_dir(root());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let status = command.stderr(stderr).status();
    status.expect("the program starts").code()
}

#[cfg(target_os = "linux")]
#[test]
fn the_exit_code_stays_where_standard_error_cannot_be_written() {
    let full = || {
        let full = File::options().write(true).open("/dev/full");
        Stdio::from(full.expect("it is always there"))
    };
    let closed = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    let flash = ["-n", "2", "--head", "flash"];
    let cases: [(&str, &[&str], i32); 4] = [
        ("inspect", &["--model", "no/such/dir"], 1),
        ("generate", &["--top-p", "2"], 1),
        ("generate", &flash, 0),
        ("eval", &["--tokens", "3"], 0),
    ];
    for (name, arguments, code) in cases {
        for stderr in [full(), closed()] {
            let ended = code_with_stderr(name, arguments, stderr);
            assert_eq!(ended, Some(code), "{name} {arguments:?}");
        }
    }
}

#[cfg(unix)]
#[test]
fn a_head_that_cannot_be_saved_leaves_no_file() {
    let dir = copy(&[]);
    let names = || {
        let entries = fs::read_dir(dir.path()).expect("a directory");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let before = names();
    // Writing fails after a few blocks, as on a full disk, and no signal ends the program.
    let limited = r#"trap '' XFSZ; ulimit -f 8; exec "$0" "$@""#;
    let mut command = Command::new("sh");
    command.args(["-c", limited, env!("CARGO_BIN_EXE_burn-ds4"), "generate"]);
    command.arg("--model").arg(dir.path()).current_dir(root());
    command.args(["-n", "1", "--device", "flex"]);
    command.args(["--head", "flash", "--save-head"]);
    let output = command.output().expect("a shell");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8 on stderr");
    let path = dir.path().join(FLASH_HEAD_FILE);
    let expected = format!("error: {}: cannot be written: ", path.display());
    assert!(stderr.starts_with(&expected), "{stderr}");
    assert_eq!(names(), before);
}

/// SECURITY.md: the one thing that is trusted about files.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_is_truncated_while_it_is_mapped_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    const SIGBUS: i32 = 7;
    const CHILD: &str = "DS4_TEST_TRUNCATES";
    let weights = |dir: &Path| {
        File::options()
            .write(true)
            .open(dir.join("model.safetensors"))
    };
    if let Some(dir) = std::env::var_os(CHILD) {
        let checkpoint = Checkpoint::open(Path::new(&dir)).expect("an asset");
        let truncated = weights(Path::new(&dir)).and_then(|file| file.set_len(0));
        truncated.expect("the directory is writable");
        let _ = checkpoint.load(&LoadOptions::default(), &Device::flex());
        return;
    }
    let dir = copy(&[]);
    let mut child = Command::new(std::env::current_exe().expect("the test binary has a path"));
    let name = "cli_damaged::a_file_that_is_truncated_while_it_is_mapped_ends_the_process";
    child.args(["--exact", name]).env(CHILD, dir.path());
    let output = child.output().expect("it runs");
    assert_eq!(output.status.signal(), Some(SIGBUS), "{output:?}");
}

/// Whether SIGINT is among the signals that this process ignores, where the system tells.
#[cfg(unix)]
fn ignores_interrupts() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let ignored = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 0b10 != 0)
}

/// The signal that interrupts, and its number. A process in the background may ignore interrupts,
/// and so do its children.
#[cfg(unix)]
fn interrupt() -> (&'static str, i32) {
    match ignores_interrupts() {
        true => ("TERM", 15),
        false => ("INT", 2),
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_at_any_time_leaves_a_whole_head_or_none() {
    use std::os::unix::process::ExitStatusExt;
    use std::time::Instant;
    let start = |dir: &Path| {
        let mut child = program("generate");
        child.arg("--model").arg(dir).current_dir(root());
        child.args([
            "-n",
            "2",
            "--device",
            "flex",
            "--head",
            "flash",
            "--save-head",
        ]);
        child.stdin(Stdio::null());
        child.stdout(Stdio::null()).stderr(Stdio::null());
        child.spawn().expect("the program starts")
    };
    let whole = copy(&[]);
    let started = Instant::now();
    let ended = start(whole.path()).wait().expect("a child");
    let mut time = started.elapsed();
    assert_eq!(ended.code(), Some(0));
    let length = |path: &Path| Some(fs::metadata(path).ok()?.len());
    let expected = length(&whole.path().join(FLASH_HEAD_FILE));
    assert!(expected.is_some(), "it is saved");

    let (name, number) = interrupt();
    let dir = copy(&[]);
    let path = dir.path().join(FLASH_HEAD_FILE);
    let (mut runs, mut interrupted) = (0, 0);
    // At least in twelve parts of the time that the program took before.
    while runs < 12 || interrupted < 4 {
        let part = 1 + runs % 12;
        runs += 1;
        let mut child = start(dir.path());
        std::thread::sleep(time * part / 12);
        signal(&child, name);
        let ended = child.wait().expect("a child");
        let by_signal = ended.signal() == Some(number);
        assert!(by_signal || ended.code() == Some(0), "{ended:?}");
        interrupted += u32::from(by_signal);
        if !by_signal {
            // It takes less now, as where other work has ended.
            time = time * 3 / 4;
        }
        if let Some(bytes) = length(&path) {
            assert_eq!(Some(bytes), expected, "after {part} of 12 parts");
            FlashHeadFile::open(&path).expect("it is whole");
            fs::remove_file(&path).expect("the directory is writable");
        }
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_a_generation_after_the_text_so_far() {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    let (name, number) = interrupt();
    let (text, continuation) = golden_text("short", 64);
    let mut child = program("generate");
    child.args(["-p", &text, "-n", "4000", "--device", "flex"]);
    child.current_dir(root());
    child.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = child.spawn().expect("the program starts");
    let mut stdout = child.stdout.take().expect("it is piped");
    let mut printed = vec![0; text.len() + 1];
    stdout.read_exact(&mut printed).expect("a first token");
    signal(&child, name);
    stdout.read_to_end(&mut printed).expect("a pipe");
    assert_eq!(child.wait().expect("a child").signal(), Some(number));
    let printed = String::from_utf8(printed).expect("whole characters");
    let expected = text + &continuation;
    let length = printed.len().min(expected.len());
    assert_eq!(printed[..length], expected[..length]);
}
