//! What the tests of the model and those of the program share.

use std::path::PathBuf;
use std::process::Output;

use ds4_model::generate::{SpecialTokens, TextTokenizer};
use serde_json::Value;

/// The repository's root: as cargo tells or, for a test binary that was copied to another machine,
/// the current directory.
pub fn root() -> PathBuf {
    let crate_root = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    crate_root.map_or_else(|| PathBuf::from("."), |root| root.join("../.."))
}

/// What a program left behind.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code, -1 after a signal.
    pub code: i32,
    /// What it has written to standard output.
    pub stdout: String,
    /// What it has written to standard error.
    pub stderr: String,
}

impl Ended {
    /// Takes it from what was captured.
    pub fn of(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
        }
    }

    /// Checks that the program has succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// The last line on standard error.
    #[track_caller]
    pub fn last_line(&self) -> &str {
        self.stderr
            .lines()
            .last()
            .unwrap_or_else(|| panic!("nothing on stderr: {self:?}"))
    }
}

/// Prompt and greedy continuation of the golden file, as text: the first `count` tokens of 64.
pub fn golden_text(prompt: &str, count: usize) -> (String, String) {
    let path = root().join("tests/fixtures/ds4-tiny/golden.json");
    let facts: Value =
        serde_json::from_slice(&std::fs::read(path).expect("a fixture")).expect("JSON");
    let tokenizer = TextTokenizer::from_dir(root().join("assets/ds4-tiny")).expect("an asset");
    let text = |name: &str, count: usize| {
        let ids = facts["prompts"][prompt][name].as_array().expect("ids");
        let ids = ids.iter().take(count);
        let ids: Vec<u32> = ids.map(|id| id.as_u64().expect("an id") as u32).collect();
        tokenizer
            .decode(&ids, SpecialTokens::Skip)
            .expect("ids of the vocabulary")
    };
    (text("input_ids", usize::MAX), text("greedy", count))
}

/// The number before `word` in `text`.
#[track_caller]
pub fn number_before(text: &str, word: &str) -> f64 {
    let before = text
        .split(word)
        .next()
        .filter(|before| before.len() < text.len());
    let number = before.and_then(|before| before.split_whitespace().last());
    number
        .and_then(|number| number.trim_start_matches(['[', '(']).parse().ok())
        .unwrap_or_else(|| panic!("no number before {word:?} in {text:?}"))
}
