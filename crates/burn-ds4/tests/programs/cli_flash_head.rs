//! The clustered head in the examples as a user runs them.

use std::fs;
use std::path::Path;

use burn::tensor::Tensor;
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::flash_head::{FLASH_HEAD_FILE, FlashHeadFile};
use serde_json::Value;
use tempfile::TempDir;

use crate::cli::{golden_text, number_before, run};
use crate::golden::root;

/// A copy of the shipped checkpoint, which the programs may write to.
fn checkpoint() -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let asset = root().join("assets/ds4-tiny");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(asset.join(name), dir.path().join(name)).expect("the directory is writable");
    }
    let path = dir.path().to_str().expect("a UTF-8 path").to_owned();
    (dir, path)
}

fn output_matrix() -> Tensor<2> {
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("an asset");
    let device = DeviceSpec::Flex.init().expect("Flex is always present");
    let model = checkpoint.load(&LoadOptions::default(), &device);
    model.expect("the asset loads").output.val()
}

/// Saves a head with other clusters than are built by default.
fn save(matrix: Tensor<2>, clusters: usize, directory: &Path) {
    let head = FlashHead::build(matrix, clusters, &BuildOptions::default(), |_| {});
    let path = directory.join(FLASH_HEAD_FILE);
    FlashHeadFile::save(&path, &head.expect("a head"), None).expect("the directory is writable");
}

#[test]
fn generate_prints_the_golden_continuation_with_drafts_of_a_flash_head() {
    let (text, continuation) = golden_text("short", 40);
    for (drafts, probes) in [("1", None), ("3", Some("1")), ("2", Some("64"))] {
        let mut arguments = vec!["-p", &text, "-n", "40", "--draft-tokens", drafts];
        // Its MTP layer drafts.
        arguments.extend(["--model", "assets/ds4-tiny"]);
        let dense = run("generate", &arguments).ok();
        arguments.extend(["--draft-head", "flash"]);
        arguments.extend(probes.iter().flat_map(|probes| ["--probes", *probes]));
        let ended = run("generate", &arguments).ok();
        let what = format!("{drafts} drafts, {probes:?} probes");
        assert_eq!(ended.stdout, format!("{text}{continuation}\n"), "{what}");
        // The text is exact; there is nothing to warn of.
        assert_eq!(ended.stderr.lines().count(), 1, "{what}: {ended:?}");
        let accepted = number_before(ended.last_line(), " (");
        let with_dense = number_before(dense.last_line(), " (");
        match probes {
            Some("64") => assert_eq!(accepted, with_dense, "{what}"),
            _ => assert!(accepted > 0.0 && accepted < with_dense, "{what}: {ended:?}"),
        }
    }
}

#[test]
fn generate_says_whether_the_text_of_a_flash_head_is_approximate() {
    let (text, continuation) = golden_text("short", 24);
    let exact = format!("{text}{continuation}\n");
    for (probes, note, golden) in [
        (None, "[approximate flash head: 4 of 64 clusters", false),
        (Some("1"), "[approximate flash head: 1 of 64", false),
        (Some("64"), "[exact flash head: 64 of 64", true),
    ] {
        let mut arguments = vec!["-p", &text, "-n", "24", "--head", "flash"];
        arguments.extend(probes.iter().flat_map(|probes| ["--probes", *probes]));
        let ended = run("generate", &arguments).ok();
        assert!(ended.stderr.starts_with(note), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 2, "{ended:?}");
        assert_eq!(ended.stdout == exact, golden, "{ended:?}");
        // Drafts are verified by the same head.
        arguments.extend(["--draft-tokens", "2"]);
        let drafted = run("generate", &arguments);
        assert_eq!(drafted.ok().stdout, ended.stdout, "{probes:?} probes");
    }
}

#[test]
fn the_same_seed_gives_the_same_sample_of_a_flash_head_and_another_seed_another() {
    let sample = |seed: &str, top_k: &str| {
        let arguments = ["-n", "12", "--temperature", "1", "--head", "flash"];
        let more = ["--seed", seed, "--top-k", top_k, "--top-p", "0.98"];
        run("generate", &[arguments, more].concat()).ok().stdout
    };
    let first = sample("1", "0");
    assert_eq!(sample("1", "0"), first);
    assert_ne!(sample("2", "0"), first);
    let greedy = run("generate", &["-n", "12", "--head", "flash"]);
    assert_eq!(sample("1", "1"), greedy.ok().stdout);
}

#[test]
fn a_flash_head_is_saved_on_request_and_read_from_then_on() {
    let (dir, model) = checkpoint();
    let path = dir.path().join(FLASH_HEAD_FILE);
    let arguments = ["--model", &model, "-n", "16", "--head", "flash"];
    let built = run("generate", &arguments).ok();
    assert!(!path.exists(), "nobody asked for a file");
    let saving = [&arguments[..], &["--save-head"]].concat();
    let saved = run("generate", &saving).ok();
    assert_eq!(saved.stdout, built.stdout);
    let file = FlashHeadFile::open(&path).expect("a file");
    assert_eq!(file.seed(), Some(0));
    let eos = Checkpoint::open(dir.path()).expect("a checkpoint");
    assert_eq!(file.special_tokens(), [eos.config().eos_token_id]);
    let read = run("generate", &arguments);
    assert_eq!(read.ok().stdout, built.stdout);

    save(output_matrix(), 32, dir.path());
    let bytes = fs::read(&path).expect("a file");
    let read = run("generate", &saving).ok();
    assert!(read.stderr.contains("2 of 32 clusters"), "{read:?}");
    assert_eq!(
        fs::read(&path).expect("a file"),
        bytes,
        "a file that was read"
    );
}

#[test]
fn a_file_of_another_checkpoint_or_a_damaged_one_is_refused_by_name() {
    let (dir, model) = checkpoint();
    save(output_matrix() * 2.0, 64, dir.path());
    let refused = |named: &str| {
        for arguments in [
            ["generate", "--head", "flash"],
            ["generate", "--draft-head", "flash"],
            ["eval", "--tokens", "20"],
        ] {
            let more: &[&str] = match arguments[1] {
                "--draft-head" => &["--draft-tokens", "1"],
                "--tokens" => &["--flash-head"],
                _ => &[],
            };
            let all = [&arguments[1..], more, &["--model", &model]].concat();
            let ended = run(arguments[0], &all);
            assert_eq!(ended.code, 1, "{ended:?}");
            assert_eq!(ended.stdout, "", "{ended:?}");
            assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
            assert!(ended.stderr.contains(FLASH_HEAD_FILE), "{ended:?}");
            assert!(ended.stderr.contains(named), "{ended:?}");
        }
    };
    refused("was made of the head 1024x256:");
    let path = dir.path().join(FLASH_HEAD_FILE);
    fs::write(&path, b"no safetensors").expect("the directory is writable");
    refused("error: ");
    // A head that nobody asks for is not read.
    let plain = ["--model", &model, "-n", "4"];
    run("generate", &plain).ok();
}

#[test]
fn bad_options_of_a_flash_head_end_with_one_line_that_names_them() {
    let flash = ["--head", "flash"];
    let cases: [(&str, &[&str], i32, &str); 10] = [
        (
            "generate",
            &["--probes", "3"],
            1,
            "--probes needs --head flash",
        ),
        ("generate", &["--save-head"], 1, "--save-head needs --head"),
        (
            "generate",
            &["--draft-head", "flash", "--drafter", "none"],
            1,
            "--draft-tokens 1 to 8",
        ),
        ("generate", &["--head", "clustered"], 2, "--head"),
        (
            "generate",
            &["--probes", "0"],
            1,
            "`probes` is 0, expected 1 to 64",
        ),
        (
            "generate",
            &["--probes", "65"],
            1,
            "`probes` is 65, expected 1 to 64",
        ),
        ("eval", &["--probes", "4"], 1, "--probes needs --flash-head"),
        (
            "eval",
            &["--flash-head", "--probes", "65"],
            1,
            "`probes` is 65",
        ),
        (
            "eval",
            &["--flash-head", "--draft-tokens", "0"],
            2,
            "--draft-tokens",
        ),
        ("eval", &["--generate", "8"], 2, "required"),
    ];
    for (name, arguments, code, named) in cases {
        let needs_head = named.starts_with("`probes`") && name == "generate";
        let arguments = [arguments, if needs_head { &flash } else { &[] }].concat();
        let ended = run(name, &arguments);
        assert_eq!(ended.code, code, "{name} {arguments:?}: {ended:?}");
        let first = ended.stderr.lines().next().unwrap_or_default();
        assert!(
            first.starts_with("error: ") && first.contains(named),
            "{name} {arguments:?}: {ended:?}"
        );
        assert!(
            code == 2 || ended.stderr.lines().count() == 1,
            "{name} {arguments:?}: {ended:?}"
        );
        assert_eq!(ended.stdout, "", "{name} {arguments:?}");
    }
}

#[test]
fn eval_reports_what_a_flash_head_finds_by_the_clusters_that_it_probes() {
    let arguments = ["--tokens", "120", "--window", "64", "--flash-head"];
    let json = |more: &[&str]| -> Value {
        let ended = run("eval", &[&arguments, more, &["--json"]].concat()).ok();
        serde_json::from_str(&ended.stdout).expect("one JSON object")
    };
    let report = json(&["--generate", "0"]);
    assert_eq!(json(&["--generate", "0"]), report, "the same again");
    assert_eq!(report["tokens"], 120);
    let flash = &report["flash_head"];
    assert_eq!(
        (&flash["clusters"], &flash["capacity"]),
        (&64.into(), &16.into())
    );
    assert_eq!(flash["positions"], 120);
    // Each window has one draft fewer than tokens.
    assert_eq!(flash["drafts"], 118);
    assert_eq!(flash["generation"], Value::Array(Vec::new()));
    assert_eq!(flash["dense_acceptance"], report["mtp"]["as_trunk"]);
    let probes = flash["probes"].as_array().expect("a curve");
    let column = |name: &str| -> Vec<f64> {
        let values = probes.iter().map(|probe| probe[name].as_f64());
        values.map(|value| value.expect("a number")).collect()
    };
    assert_eq!(column("probes"), [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
    for name in ["recall", "draft_recall"] {
        let recall = column(name);
        // A cluster more never loses the dense head's token.
        assert!(recall.is_sorted(), "{name}: {recall:?}");
        assert!(recall[0] > 0.1 && recall[0] < 0.9, "{name}: {recall:?}");
        assert_eq!(recall[6], 1.0, "{name}");
    }
    let acceptance = column("acceptance");
    assert_eq!(Some(acceptance[6]), flash["dense_acceptance"].as_f64());
    assert!(acceptance[0] < acceptance[6], "{acceptance:?}");
}

#[test]
fn eval_prints_the_same_as_tables_and_the_speed_of_drafts_by_either_head() {
    let arguments = ["--tokens", "60", "--flash-head", "--probes", "2"];
    let generating = [&arguments[..], &["--generate", "8", "--draft-tokens", "2"]].concat();
    let ended = run("eval", &generating).ok();
    let report = run("eval", &[&generating[..], &["--json"]].concat());
    let report = report.ok();
    let report: Value = serde_json::from_str(&report.stdout).expect("one JSON object");
    let flash = &report["flash_head"];
    let percent = |value: &Value| format!("{:.1} %", 100.0 * value.as_f64().expect("a share"));
    let row = |start: &str| {
        let lines = ended.stdout.lines().map(str::trim_start);
        let mut lines = lines.filter(|line| line.starts_with(start));
        lines
            .next()
            .unwrap_or_else(|| panic!("no {start:?} in {}", ended.stdout))
    };
    let probes = flash["probes"].as_array().expect("a curve");
    assert_eq!(probes.len(), 7, "{flash}");
    for probe in probes {
        let line = row(&format!("{} ", probe["probes"]));
        let cells = ["recall", "draft_recall", "acceptance"].map(|name| percent(&probe[name]));
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        assert_eq!(words.join(" "), cells.join(" "), "{}", ended.stdout);
    }
    let runs = flash["generation"].as_array().expect("two runs");
    assert_eq!(runs.len(), 2);
    for (run, name) in runs.iter().zip(["dense head", "flash head, P = 2"]) {
        // Four texts of eight tokens.
        assert_eq!(run["tokens"], 32);
        let line = row(name);
        let rest = line.strip_prefix(name).expect("it starts so");
        let words: Vec<&str> = rest.split_whitespace().collect();
        assert_eq!(words[0], run["drafted"].to_string(), "{line}");
        assert_eq!(words[1..3].join(" "), percent(&run["acceptance"]), "{line}");
        let speed: f64 = words[3].parse().expect("tokens/s");
        assert!(speed > 0.0, "{line}");
        assert!(run["tokens_per_second"].as_f64() > Some(0.0), "{run}");
    }
    assert_eq!(runs[0]["probes"], Value::Null);
    assert_eq!(runs[1]["probes"], 2);
}
