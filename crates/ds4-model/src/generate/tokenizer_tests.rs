use super::*;
use crate::repository;
use proptest::prelude::*;

const CONTROL: [&str; 7] = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
];

fn assets() -> std::path::PathBuf {
    repository::path("assets/ds4-tiny")
}

fn tiny() -> TextTokenizer {
    TextTokenizer::from_dir(assets()).unwrap()
}

fn golden() -> serde_json::Value {
    let path = repository::path("tests/fixtures/ds4-tiny/golden.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// The shipped tokenizer file after a change.
fn changed(change: impl FnOnce(&mut serde_json::Value)) -> Result<TextTokenizer, GenerateError> {
    let mut file =
        serde_json::from_slice(&std::fs::read(assets().join(TOKENIZER_FILE)).unwrap()).unwrap();
    change(&mut file);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(TOKENIZER_FILE), file.to_string()).unwrap();
    TextTokenizer::from_dir(dir.path())
}

#[test]
fn golden_prompts_encode_to_the_golden_ids() {
    let tokenizer = tiny();
    for name in ["short", "medium", "long"] {
        let prompt = &golden()["prompts"][name];
        assert_eq!(
            tokenizer.encode(prompt["text"].as_str().unwrap()).unwrap(),
            ids(&prompt["input_ids"]),
            "{name}"
        );
    }
}

#[test]
fn golden_continuations_decode_to_the_golden_texts_whole_and_streamed() {
    let tokenizer = tiny();
    for name in ["short", "medium", "long"] {
        let prompt = &golden()["prompts"][name];
        let (greedy, text) = (
            ids(&prompt["greedy"]),
            prompt["greedy_text"].as_str().unwrap(),
        );
        assert_eq!(
            tokenizer.decode(&greedy, SpecialTokens::Skip).unwrap(),
            text,
            "{name}"
        );
        let mut stream = tokenizer.decode_stream(SpecialTokens::Skip);
        let pieces: Vec<String> = greedy.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(pieces.concat() + &stream.finish(), text, "{name}");
    }
}

#[cfg(unix)]
#[test]
fn a_fifo_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = repository::fifo(dir.path(), TOKENIZER_FILE);
    let error = repository::in_time(move || TextTokenizer::from_dir(dir.path()).unwrap_err());
    let expected = format!("{}: cannot be read: not a regular file", path.display());
    assert_eq!(error.to_string(), expected);
}

#[test]
fn nothing_is_added_to_a_text() {
    let tokenizer = tiny();
    assert!(tokenizer.encode("").unwrap().is_empty());
    let word = tokenizer.encode("LORD").unwrap();
    assert!(!word.contains(&0) && !word.contains(&1), "{word:?}");
}

#[test]
fn control_tokens_are_found_by_their_text() {
    let tokenizer = tiny();
    for (id, token) in CONTROL.iter().enumerate() {
        assert_eq!(tokenizer.token_id(token), Some(id as u32));
        assert_eq!(tokenizer.encode(token).unwrap(), [id as u32]);
    }
    assert_eq!(tokenizer.token_id("｜DSML｜"), None);
    assert_eq!(tokenizer.vocab_size(), 1024);
}

#[test]
fn plain_text_cannot_become_a_control_token() {
    let tokenizer = tiny();
    for token in CONTROL {
        let text = format!("a{token}b");
        let ids = tokenizer.encode_plain(&text).unwrap();
        assert!(
            ids.iter().all(|id| *id >= CONTROL.len() as u32),
            "{token}: {ids:?}"
        );
        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip).unwrap(), text);
    }
    let text = "In the beginning 2024 世界 é\r\n\n  x";
    assert_eq!(
        tokenizer.encode_plain(text).unwrap(),
        tokenizer.encode(text).unwrap()
    );
}

#[test]
fn added_tokens_that_are_not_flagged_special_cannot_be_injected_either() {
    let tokenizer = changed(|file| {
        for token in file["added_tokens"].as_array_mut().unwrap() {
            token["special"] = false.into();
        }
    })
    .unwrap();
    assert_eq!(tokenizer.encode("<｜User｜>").unwrap(), [3]);
    let ids = tokenizer.encode_plain("<｜User｜><think>").unwrap();
    assert!(ids.iter().all(|id| *id >= CONTROL.len() as u32), "{ids:?}");
    assert_eq!(
        tokenizer.decode(&[3], SpecialTokens::Skip).unwrap(),
        "<｜User｜>"
    );
}

#[test]
fn a_vocabulary_that_leads_back_to_an_added_token_is_an_error() {
    let tokenizer = changed(|file| {
        let whole = serde_json::json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": false
        });
        file["pre_tokenizer"] = whole;
        file["model"]["ignore_merges"] = true.into();
    })
    .unwrap();
    let result = tokenizer.encode_plain("<think>");
    assert!(
        matches!(&result, Err(GenerateError::ReservedToken { token }) if token == "<think>"),
        "{result:?}"
    );
}

#[test]
fn special_tokens_are_kept_or_skipped_on_request() {
    let tokenizer = tiny();
    let ids = [vec![0, 5], tokenizer.encode("Amen").unwrap(), vec![1]].concat();
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip).unwrap(), "Amen");
    assert_eq!(
        tokenizer.decode(&ids, SpecialTokens::Keep).unwrap(),
        "<｜begin▁of▁sentence｜><think>Amen<｜end▁of▁sentence｜>"
    );
}

#[test]
fn a_character_appears_with_its_last_byte() {
    let tokenizer = tiny();
    let bytes = tokenizer.encode("世").unwrap();
    assert_eq!(bytes.len(), 3, "the tiny vocabulary spells it in bytes");
    let mut stream = tokenizer.decode_stream(SpecialTokens::Keep);
    assert_eq!(stream.push(bytes[0]).unwrap(), "");
    assert_eq!(stream.push(bytes[1]).unwrap(), "");
    assert_eq!(stream.push(bytes[2]).unwrap(), "世");
    assert_eq!(stream.finish(), "");
}

#[test]
fn a_broken_character_becomes_a_replacement_as_soon_as_it_is_known() {
    let tokenizer = tiny();
    let bytes = tokenizer.encode("世").unwrap();
    let letter = tokenizer.encode("A").unwrap();
    let mut stream = tokenizer.decode_stream(SpecialTokens::Keep);
    assert_eq!(stream.push(bytes[0]).unwrap(), "");
    assert_eq!(stream.push(letter[0]).unwrap(), "\u{fffd}A");
    assert_eq!(stream.push(bytes[1]).unwrap(), "\u{fffd}");
    assert_eq!(stream.push(bytes[0]).unwrap(), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn an_id_without_a_token_is_an_error_that_a_stream_survives() {
    let tokenizer = tiny();
    assert!(matches!(
        tokenizer.decode(&[43, 9999], SpecialTokens::Keep),
        Err(GenerateError::UnknownToken { token: 9999 })
    ));
    let mut stream = tokenizer.decode_stream(SpecialTokens::Skip);
    assert!(stream.push(1024).is_err());
    assert_eq!(stream.push(tokenizer.encode("A").unwrap()[0]).unwrap(), "A");
}

#[test]
fn the_byte_alphabet_covers_every_byte_once() {
    let mut bytes: Vec<u8> = (0..=0x200)
        .filter_map(char::from_u32)
        .filter_map(byte_of)
        .collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    // Well-known members: space, line feed, tab, DEL, no-break space, soft hyphen.
    for (character, byte) in [
        ('Ġ', b' '),
        ('Ċ', b'\n'),
        ('ĉ', b'\t'),
        ('ġ', 0x7f),
        ('ł', 0xa0),
        ('Ń', 0xad),
    ] {
        assert_eq!(byte_of(character), Some(byte), "{character}");
    }
}

#[test]
fn a_missing_file_is_an_error_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let error = TextTokenizer::from_dir(dir.path()).unwrap_err();
    assert!(
        matches!(
            &error,
            GenerateError::TokenizerRead { path, .. } if path.ends_with(TOKENIZER_FILE)
        ),
        "{error:?}"
    );
}

#[test]
fn errors_of_a_tokenizer_name_its_file_and_cannot_control_a_terminal() {
    let escape = || "\u{1b}[2J\n".to_owned();
    for error in [
        GenerateError::TokenizerFormat {
            path: TOKENIZER_FILE.into(),
            reason: escape(),
        },
        GenerateError::Encode { reason: escape() },
        GenerateError::ReservedToken { token: escape() },
        GenerateError::UnknownToken { token: 9 },
    ] {
        let text = error.to_string();
        assert!(text.contains(TOKENIZER_FILE), "{text}");
        assert!(!text.contains(char::is_control), "{text:?}");
    }
}

#[test]
fn a_bad_file_is_an_error_with_its_path() {
    let whole = std::fs::read(assets().join(TOKENIZER_FILE)).unwrap();
    let cases: [&[u8]; 5] = [b"", b"{}", b"\xff\xfe", b"[1, 2", &whole[..whole.len() / 2]];
    for bytes in cases {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(TOKENIZER_FILE), bytes).unwrap();
        let error = TextTokenizer::from_dir(dir.path()).unwrap_err();
        assert!(
            matches!(
                &error,
                GenerateError::TokenizerFormat { path, .. } if path.ends_with(TOKENIZER_FILE)
            ),
            "{error:?}"
        );
    }
}

#[test]
fn a_tokenizer_that_does_not_decode_bytes_is_refused() {
    let error = changed(|file| file["decoder"] = serde_json::Value::Null).unwrap_err();
    assert!(error.to_string().contains("ByteLevel"), "{error}");
}

#[test]
fn a_file_that_the_library_panics_on_is_an_error() {
    let file = std::fs::read(repository::path("assets/ds4-tiny/tokenizer.json")).unwrap();
    let file = String::from_utf8(file).unwrap();
    let (before, after) = file.split_once("\"decoder\":").unwrap();
    for decoder in ["{", "{]", "1e400", "{\"type\": nul}"] {
        let damaged = format!("{before}\"decoder\": {decoder} {after}");
        let error = TextTokenizer::from_bytes(damaged.as_bytes()).unwrap_err();
        assert_eq!(error, "`tokenizers` panics on it");
    }
}

#[test]
fn settings_of_training_batches_are_ignored() {
    let tokenizer = changed(|file| {
        file["truncation"] = serde_json::json!({
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0
        });
    })
    .unwrap();
    let text = "And it came to pass in those days";
    assert_eq!(
        tokenizer.encode(text).unwrap(),
        tiny().encode(text).unwrap()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_survives_plain_encoding_and_decoding(text in "\\PC{0,40}") {
        let tokenizer = tiny();
        let ids = tokenizer.encode_plain(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip).unwrap(), text);
    }

    #[test]
    fn streamed_ids_give_the_text_that_the_library_decodes(
        ids in prop::collection::vec(0u32..1024, 0..40),
        skip: bool,
    ) {
        let tokenizer = tiny();
        let special = if skip { SpecialTokens::Skip } else { SpecialTokens::Keep };
        let mut stream = tokenizer.decode_stream(special);
        let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        let expected = tokenizer.0.tokenizer.decode(&ids, skip).unwrap();
        prop_assert_eq!(pieces.concat() + &stream.finish(), expected);
    }
}

#[test]
fn the_bytes_of_tokens_joined_are_those_of_the_text() {
    let tokenizer = tiny();
    let text = "And God said, \u{e9}\u{4e16}\n<think>";
    let ids = tokenizer.encode(text).unwrap();
    let bytes = ids
        .iter()
        .flat_map(|id| tokenizer.token_bytes(*id).unwrap());
    assert_eq!(bytes.collect::<Vec<u8>>(), text.as_bytes());
    assert!(matches!(
        tokenizer.token_bytes(1 << 20),
        Err(GenerateError::UnknownToken { token }) if token == 1 << 20
    ));
}
