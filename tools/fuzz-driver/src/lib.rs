//! Runs fuzz targets without a fuzzer: on their corpus, and on as many made-up inputs as the gate
//! has time for.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{RngSeed, TestError, TestRunner};

/// What stands for a value of JSON in an input, or for markup of a chat.
const WORDS: [&str; 32] = [
    "0",
    "-1",
    "1",
    "127",
    "0.5",
    "1e400",
    "-1e-400",
    "2147483647",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "true",
    "false",
    "\"\"",
    "\"\\ud800\"",
    "\"\\u001b[2J\"",
    "[]",
    "{}",
    "[[[[[[[[",
    "\n\n<｜DSML｜tool_calls>\n",
    "</｜DSML｜tool_calls>",
    "<｜DSML｜invoke name=\"",
    "</｜DSML｜invoke>\n",
    "<｜DSML｜parameter name=\"",
    "\" string=\"true\">",
    "\" string=\"false\">",
    "</｜DSML｜parameter>\n",
    "\">\n",
    "</think>",
];

/// A change to an input.
#[derive(Clone, Debug)]
enum Edit {
    Flip(Index, u8),
    Cut(Index, usize),
    Repeat(Index, usize),
    Insert(Index, &'static str),
    /// Puts a word in place of a number or a name.
    Replace(Index, &'static str),
    Truncate(Index),
}

fn edit() -> impl Strategy<Value = Edit> {
    let word = || proptest::sample::select(&WORDS[..]);
    prop_oneof![
        1 => (any::<Index>(), 1u8..).prop_map(|(at, bits)| Edit::Flip(at, bits)),
        1 => (any::<Index>(), 1..20_usize).prop_map(|(at, count)| Edit::Cut(at, count)),
        1 => (any::<Index>(), 1..60_usize).prop_map(|(at, count)| Edit::Repeat(at, count)),
        1 => (any::<Index>(), word()).prop_map(|(at, word)| Edit::Insert(at, word)),
        3 => (any::<Index>(), word()).prop_map(|(at, word)| Edit::Replace(at, word)),
        1 => any::<Index>().prop_map(Edit::Truncate),
    ]
}

impl Edit {
    fn apply(&self, input: &mut Vec<u8>) {
        if input.is_empty() {
            return;
        }
        let place = |at: &Index| at.index(input.len());
        let upto = |at: usize, count: usize| input.len().min(at + count);
        match self {
            Self::Flip(at, bits) => {
                let at = place(at);
                input[at] ^= bits;
            }
            Self::Cut(at, count) => {
                let at = place(at);
                input.drain(at..upto(at, *count));
            }
            Self::Repeat(at, count) => {
                let at = place(at);
                let again = input[at..upto(at, *count)].to_vec();
                input.splice(at..at, again);
            }
            Self::Insert(at, word) => {
                let at = place(at);
                input.splice(at..at, word.bytes());
            }
            Self::Replace(at, word) => {
                let inside = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.+-\"".contains(byte);
                let at = place(at);
                let start = at + input[at..].iter().position(inside).unwrap_or(0);
                let length = input[start..].iter().take_while(|byte| inside(byte));
                let end = start + length.count();
                input.splice(start..end, word.bytes());
            }
            Self::Truncate(at) => {
                let at = place(at);
                input.truncate(at);
            }
        }
    }
}

/// The inputs of a target that the repository keeps; none beside a published package.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let running = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let Some(running) = running else {
        return Vec::new();
    };
    let folders = running.ancestors().map(|path| path.join("fuzz/corpus"));
    let Some(folder) = folders.into_iter().find(|path| path.is_dir()) else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(folder.join(name)).expect("every target has a corpus");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let read = |path: &PathBuf| std::fs::read(path).expect("a readable file");
    paths.iter().map(read).collect()
}

/// Gives a target its corpus, and then so many inputs that are made of the corpus or of nothing,
/// the same ones in every run. `PROPTEST_CASES` overrules the number and makes them random, or
/// those of `PROPTEST_RNG_SEED`. An input that fails is made smaller and kept as a file.
///
/// # Panics
///
/// If the target does.
pub fn drive(name: &str, cases: u32, target: fn(&[u8])) {
    let corpus = corpus(name);
    for input in &corpus {
        target(input);
    }
    let seeds = [Vec::new()].into_iter().chain(corpus).collect::<Vec<_>>();
    let changed = (
        proptest::sample::select(seeds),
        prop::collection::vec(edit(), 0..6),
    );
    let changed = changed.prop_map(|(mut input, edits)| {
        edits.iter().for_each(|edit| edit.apply(&mut input));
        input
    });
    let inputs = prop_oneof![
        1 => prop::collection::vec(any::<u8>(), 0..96),
        2 => changed,
    ];
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    // A gate that draws anew each time fails for a change that has nothing to do with it.
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
        config.rng_seed = RngSeed::Fixed(cases.into());
    }
    let mut runner = TestRunner::new(config);
    let result = runner.run(&inputs, |input| {
        target(&input);
        Ok(())
    });
    if let Err(TestError::Fail(reason, input)) = result {
        let path = std::env::temp_dir().join(format!("fuzz-{name}"));
        let kept = std::fs::write(&path, &input);
        let path = Path::display(&path);
        panic!("{name}: {reason}; {kept:?} in {path}, to be fixed and put into fuzz/corpus/{name}");
    }
}
