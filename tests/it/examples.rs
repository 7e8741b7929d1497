//! The examples as a user runs them: what they print, how they end.

use std::path::{Path, PathBuf};
use std::process::Command;

use ds4_test_support::{Ended, number_before, root};

/// The example next to this test binary.
///
/// # Panics
///
/// Where it was not built: a test of a program that is not there has tested nothing.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test binary has a path");
    let profile = test
        .parent()
        .and_then(Path::parent)
        .expect("target/PROFILE/deps/it");
    let path = profile
        .join("examples")
        .join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(
        path.exists(),
        "no example at {}: `cargo test` without a target builds it, and so does `cargo build \
         --examples` with the features and the profile of this binary; `--skip examples` leaves \
         these tests out",
        path.display()
    );
    path
}

/// Runs an example in the repository's root.
fn run(name: &str, arguments: &[&str]) -> Ended {
    let mut command = Command::new(example(name));
    let output = command.args(arguments).current_dir(root()).output();
    let output = output.expect("the example starts");
    Ended::of(output)
}

#[test]
fn compose_routes_every_token_to_as_many_experts_as_it_should() {
    let ended = run("compose", &["--tokens", "100"]).ok();
    let loads: Vec<Vec<usize>> = ended
        .stdout
        .lines()
        .filter_map(|line| line.split_once('[').filter(|_| line.contains("tokens per")))
        .map(|(_, list)| {
            list.trim_end_matches(']')
                .split(", ")
                .map(|n| n.parse().expect("a count"))
                .collect()
        })
        .collect();
    let sums: Vec<usize> = loads.iter().map(|load| load.iter().sum()).collect();
    // Three blocks with four experts per token, then one head per token.
    assert_eq!(sums, [400, 400, 400, 100], "{}", ended.stdout);
    // The first block's table deals ids out in turn.
    assert_eq!(loads[0], [25; 16], "{}", ended.stdout);
    assert_ne!(loads[1], loads[0], "{}", ended.stdout);
}

#[test]
fn tutorial_continues_a_text_with_the_weights_that_it_has_saved() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("weights.safetensors");
    let path = path.to_str().expect("a path in UTF-8");
    let made = run("tutorial", &["--save", path]).ok();
    let loaded = run("tutorial", &["--load", path]).ok();
    assert!(
        made.stdout.contains("[72, 101, 108, 108, 111, "),
        "{made:?}"
    );
    assert_eq!(made.stdout, loaded.stdout);
}

#[test]
fn gated_delta_net_gives_the_same_for_drafts_and_single_steps() {
    for arguments in [&[][..], &["--dtype", "bf16", "--tokens", "5"]] {
        let arguments = [&["--device", "flex"], arguments].concat();
        let ended = run("gated_delta_net", &arguments).ok();
        let lines = ended
            .stdout
            .lines()
            .filter(|line| line.contains("differ by"));
        let differences: Vec<f64> = lines.map(|line| number_before(line, " at most")).collect();
        assert_eq!(differences, [0.0; 3], "{}", ended.stdout);
        let line = ended.stdout.lines().find(|line| line.contains("checksum"));
        let (_, checksum) = line
            .and_then(|line| line.rsplit_once(' '))
            .expect("a checksum");
        let checksum: f64 = checksum.parse().expect("a number");
        assert!(checksum > 1.0, "{}", ended.stdout);
    }
}

#[test]
fn generate_continues_the_prompt_that_it_is_given() {
    let ended = run("generate", &["And God said,"]).ok();
    let continuation = ended.stdout.strip_prefix("And God said,");
    let continuation = continuation.expect("the prompt comes first");
    assert!(continuation.split_whitespace().count() > 16, "{ended:?}");
}

#[test]
fn bad_arguments_end_with_one_line_that_names_them() {
    for (name, arguments, code, word) in [
        ("compose", &["--device", "cuda:4096"][..], 1, "cuda:4096"),
        (
            "gated_delta_net",
            &["--device", "cuda:4096"],
            1,
            "cuda:4096",
        ),
        ("gated_delta_net", &["--tokens", "17"], 2, "--tokens"),
        ("tutorial", &["--device", "cuda:4096"], 1, "cuda:4096"),
        ("tutorial", &["--load", "no/such/file"], 1, "No such file"),
    ] {
        let ended = run(name, arguments);
        assert_eq!(ended.code, code, "{ended:?}");
        let line = ended.stderr.lines().next().expect("a line");
        assert!(
            line.starts_with("error: ") && line.contains(word),
            "{ended:?}"
        );
    }
}
