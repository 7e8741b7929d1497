use std::fs;
use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::hash::EngramHash;
use super::{ENGRAM_IDS_FILE, EngramIds, EngramIdsError};
use crate::config::EngramParams;
use crate::repository::path;

fn golden(file: &str) -> Value {
    let text = fs::read_to_string(path(&format!("tests/fixtures/v41-goldens/{file}"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(all) => all.iter().flat_map(numbers).collect(),
        number => vec![number.as_u64().unwrap()],
    }
}

fn released() -> EngramParams {
    EngramParams {
        layers: vec![1, 14],
        rows: vec![384006168, 384016682],
        max_ngram: 4,
        heads: 8,
        head_dim: 256,
        vocab_size: 16_000_000,
        pad_token_id: 2,
        compressed_vocab_size: 99092,
    }
}

/// The rows of all positions, of both layers in turn.
fn hashed(params: &EngramParams, ids: &[u32], pad: u32) -> Vec<u64> {
    let hashes = [0, 1].map(|index| EngramHash::new(params, index, pad));
    let positions = (0..ids.len()).flat_map(|at| hashes.each_ref().map(|hash| (at, hash)));
    positions
        .flat_map(|(at, hash)| hash.rows(ids, at))
        .collect()
}

#[test]
fn rows_of_the_release_equal_the_golden() {
    let golden = golden("engram_release.json");
    assert_eq!(released().table_rows(), [384006168, 384016682]);
    for case in ["case_0_3", "case_text"] {
        let ids = numbers(&golden[case]["compressed"]);
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        let expected = numbers(&golden[case]["rows"]);
        assert_eq!(hashed(&released(), &ids, 2), expected, "{case}");
    }
}

#[test]
fn ids_of_a_tokenizer_and_their_rows_equal_the_golden() {
    let golden = golden("ds4-tiny-map.json");
    let tokenizer = Tokenizer::from_file(path("assets/ds4-tiny/tokenizer.json")).unwrap();
    let ids = EngramIds::of_tokenizer(&tokenizer);
    let expected = numbers(&golden["map"]);
    let actual: Vec<u64> = ids.ids().iter().map(|id| u64::from(*id)).collect();
    assert_eq!(actual, expected);
    let case = &golden["hash_case"];
    let params = EngramParams {
        layers: vec![1, 4],
        rows: Vec::new(),
        heads: 2,
        vocab_size: 1000,
        compressed_vocab_size: 868,
        ..released()
    };
    let text = numbers(&case["ids"]).into_iter();
    let text: Vec<u32> = text.map(|token| ids.id(token as u32)).collect();
    let rows = hashed(&params, &text, ids.id(2));
    // Theirs are one layer after the other.
    let columns = params.columns();
    let of_layer = |layer: usize| rows.chunks(columns).skip(layer).step_by(2).flatten();
    let rows: Vec<u64> = of_layer(0).chain(of_layer(1)).copied().collect();
    assert_eq!(rows, numbers(&case["rows"]));
}

#[test]
fn texts_that_differ_by_case_accents_or_space_are_one() {
    for (text, expected) in [
        (" The", "the"),
        ("\t\r\n", " "),
        ("e\u{301}A\u{327}", "ea"),
        // A spacing mark and an enclosing one go, too.
        ("\u{915}\u{93e}x\u{20dd}", "\u{915}x"),
        ("\u{fb01}\u{ff21}", "fia"),
        ("a  \n b", "a b"),
        // A separator is no white space.
        ("\u{1c}a\u{a0}\u{3000}", "\u{1c}a"),
    ] {
        assert_eq!(super::ids::folded(text), expected, "{text:?}");
    }
}

fn of(
    dir: &Path,
    compressed_vocab_size: usize,
    tokens: usize,
) -> Result<EngramIds, EngramIdsError> {
    let params = EngramParams {
        compressed_vocab_size,
        ..released()
    };
    EngramIds::of_checkpoint(dir, &params, tokens)
}

#[test]
fn ids_are_made_once_and_kept_beside_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let error = of(dir, 868, 1024).unwrap_err();
    assert!(matches!(error, EngramIdsError::Tokenizer { .. }), "{error}");
    fs::copy(
        path("assets/ds4-tiny/tokenizer.json"),
        dir.join("tokenizer.json"),
    )
    .unwrap();
    let error = of(dir, 867, 1024).unwrap_err();
    let told = "it has 868 engram ids, engram_compressed_vocab_size is 867";
    assert!(error.to_string().contains(told), "{error}");
    assert!(!dir.join(ENGRAM_IDS_FILE).exists());
    let made = of(dir, 868, 1024).unwrap();
    fs::remove_file(dir.join("tokenizer.json")).unwrap();
    assert_eq!(of(dir, 868, 1024).unwrap(), made);
    let bytes = fs::read(dir.join(ENGRAM_IDS_FILE)).unwrap();
    assert_eq!(bytes.len(), 1024 * 8);
    assert_eq!(bytes[8 * 71..8 * 72], 39i64.to_le_bytes());
    let error = of(dir, 868, 1025).unwrap_err().to_string();
    assert!(error.contains("1024 tokens"), "{error}");
}

#[test]
fn kept_ids_that_are_damaged_are_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let tokenizer = path("assets/ds4-tiny/tokenizer.json");
    fs::copy(&tokenizer, dir.join("tokenizer.json")).unwrap();
    let made = of(dir, 868, 1024).unwrap();
    let kept = dir.join(ENGRAM_IDS_FILE);
    let whole = fs::read(&kept).unwrap();
    let mut swapped = whole.clone();
    // The first token has the second id.
    swapped[0] = 1;
    for damaged in [
        &whole[..4096],
        &whole[..8191],
        &[&whole[..], &[0]].concat(),
        &swapped,
    ] {
        fs::write(&kept, damaged).unwrap();
        assert_eq!(of(dir, 868, 1024).unwrap(), made);
        assert!(fs::read(&kept).unwrap() == whole);
    }
    let names = fs::read_dir(dir).unwrap();
    assert_eq!(names.count(), 2, "a part was left");
    // Nothing to make them of.
    fs::write(&kept, &swapped).unwrap();
    let text = fs::read_to_string(&tokenizer).unwrap();
    let (before, after) = text.split_once("\"decoder\":").unwrap();
    let damaged = format!("{before}\"decoder\": {{ {after}");
    fs::write(dir.join("tokenizer.json"), damaged).unwrap();
    let error = of(dir, 868, 1024).unwrap_err();
    assert!(matches!(error, EngramIdsError::Damaged { .. }), "{error}");
    fs::remove_file(&kept).unwrap();
    let error = of(dir, 868, 1024).unwrap_err().to_string();
    assert!(error.contains("`tokenizers` panics on it"), "{error}");
}

#[cfg(unix)]
#[test]
fn fifos_are_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    for file in [ENGRAM_IDS_FILE, "tokenizer.json"] {
        crate::repository::fifo(dir.path(), file);
    }
    let dir = dir.path().to_path_buf();
    let error = crate::repository::in_time(move || of(&dir, 868, 1024).unwrap_err());
    assert!(error.to_string().contains("not a regular file"), "{error}");
}
