//! A checkpoint opened with all that it takes to generate text.

use burn::module::Param;
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::quant::Activations;
use ds4_model::checkpoint::{CheckpointError, LoadOptions};
use ds4_model::config::ConfigErrorKind;
use ds4_model::generate::{
    FinishReason, GenerateConfig, GenerateError, Generation, SamplingConfig, SpecialTokens,
};
use ds4_model::pipeline::{Pipeline, PipelineError};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::golden::{golden_text, root};

const EXPANDED: LoadOptions = LoadOptions {
    dtype: burn::tensor::FloatDType::F32,
    expand: true,
    drafter: false,
    quantized_cache: false,
    activations: Activations::Exact,
};

/// A copy of the shipped checkpoint with files of its own.
pub(crate) fn copy(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let asset = root().join("assets/ds4-tiny");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(asset.join(name), dir.path().join(name)).expect("an asset");
    }
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).expect("the directory is writable");
    }
    dir
}

fn open(dir: &TempDir) -> Result<Pipeline, PipelineError> {
    Pipeline::open_with(dir.path(), &EXPANDED, &Device::flex())
}

#[test]
fn after_an_error_no_text_follows_that_was_held_back() {
    let dir = root().join("assets/ds4-tiny");
    let mut pipeline = Pipeline::open_with(&dir, &EXPANDED, &Device::flex()).expect("an asset");
    let (text, continuation) = golden_text("short", 24);
    let prompt = pipeline.encode(&text).expect("text");
    let config = GenerateConfig {
        max_new_tokens: 24,
        ..GenerateConfig::default()
    };
    let generation = Generation::new(&pipeline.model, config.clone(), &prompt);
    let tokens: Result<Vec<u32>, GenerateError> = generation.expect("valid options").collect();
    let tokens = tokens.expect("finite logits");
    // Once this token is fed, no logit is a number.
    let fatal = (4..tokens.len()).find(|&at| {
        let before = tokens[..at].iter().chain(&prompt);
        before.into_iter().all(|token| *token != tokens[at])
    });
    let fatal = fatal.expect("a token that has not occurred");
    let embedding = pipeline.model.embedding.val();
    let [_, width] = embedding.dims();
    let row = tokens[fatal] as usize;
    let nan = Tensor::full([1, width], f32::NAN, &embedding.device());
    let embedding = embedding.slice_assign([row..row + 1, 0..width], nan);
    pipeline.model.embedding = Param::from_tensor(embedding);
    // The last character before the error may be the first of a stop string.
    let before = pipeline
        .tokenizer
        .decode(&tokens[..=fatal], SpecialTokens::Keep);
    let before = before.expect("known tokens");
    let last = before.chars().last().expect("some text");
    let config = GenerateConfig {
        stop_strings: vec![format!("{last}\u{1}")],
        ..config
    };
    let mut generation = pipeline.generate(config, &prompt).expect("valid options");
    let mut pieces = String::new();
    let error = loop {
        match generation.next().expect("an error before the end") {
            Ok(piece) => pieces += &piece,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, GenerateError::NoCandidate { .. }),
        "{error}"
    );
    assert!(continuation.starts_with(&pieces) && pieces.len() < before.len());
    assert!(generation.next().is_none() && generation.next().is_none());
}

fn error(dir: &TempDir) -> PipelineError {
    open(dir).expect_err("a checkpoint that is not valid")
}

#[test]
fn a_pipeline_generates_the_golden_text_with_the_defaults() {
    let dir = root().join("assets/ds4-tiny");
    let pipeline = Pipeline::open_with(&dir, &EXPANDED, &Device::flex()).expect("an asset");
    assert_eq!(pipeline.defaults, GenerateConfig::default());
    let (text, expected) = golden_text("short", 24);
    let config = GenerateConfig {
        max_new_tokens: 24,
        ..pipeline.defaults.clone()
    };
    let prompt = pipeline.encode(&text).expect("text");
    assert_eq!(prompt[0], 0, "the beginning of the sequence");
    let generation = pipeline.generate(config, &prompt).expect("valid options");
    let pieces: Result<String, GenerateError> = generation.collect();
    assert_eq!(pieces.expect("finite logits"), expected);
}

#[test]
fn special_tokens_are_left_out_of_a_text_or_kept_for_those_who_parse_it() {
    let dir = root().join("assets/ds4-tiny");
    let pipeline = Pipeline::open_with(&dir, &EXPANDED, &Device::flex()).expect("an asset");
    let begin = pipeline.model.config().bos_token_id;
    let texts = [SpecialTokens::Skip, SpecialTokens::Keep].map(|special_tokens| {
        let config = GenerateConfig {
            max_new_tokens: 2,
            special_tokens,
            sampling: SamplingConfig {
                // Nothing else is ever chosen.
                logit_bias: vec![(begin, 1e6)],
                ..SamplingConfig::default()
            },
            ..pipeline.defaults.clone()
        };
        let generation = pipeline.generate(config, &[begin]).expect("valid options");
        let pieces: Result<String, GenerateError> = generation.collect();
        pieces.expect("finite logits")
    });
    assert_eq!(texts[0], "");
    assert_eq!(texts[1], "<｜begin▁of▁sentence｜>".repeat(2));
}

#[test]
fn the_default_options_keep_weights_packed_and_the_mtp_layer() {
    let dir = root().join("assets/ds4-tiny");
    let pipeline = Pipeline::open(&dir, &Device::flex()).expect("an asset");
    let projection = &pipeline.model.layers[0].attention.query_a;
    assert!(!matches!(
        projection.weight.values,
        ds4_model::linear::StackValues::Dense(_)
    ));
    assert!(pipeline.model.mtp.is_some());
}

#[test]
fn generation_config_sets_the_defaults() {
    let given = json!({
        "do_sample": true, "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125,
        "repetition_penalty": 1.5, "max_new_tokens": 7, "bos_token_id": 3,
        "eos_token_id": [4, 6, 5],
        "transformers_version": "5.0",
    });
    let pipeline = open(&copy(&[("generation_config.json", &given.to_string())]));
    let pipeline = pipeline.expect("a valid checkpoint");
    let expected = GenerateConfig {
        max_new_tokens: 7,
        sampling: SamplingConfig {
            temperature: 0.5,
            top_k: 20,
            top_p: 0.75,
            min_p: 0.125,
            repetition_penalty: 1.5,
            seed: 0,
            ..SamplingConfig::default()
        },
        stop_tokens: vec![6, 5],
        ..GenerateConfig::default()
    };
    assert_eq!(pipeline.defaults, expected);
    let config = pipeline.model.config();
    assert_eq!((config.bos_token_id, config.eos_token_id), (3, 4));
    assert_eq!(pipeline.encode("").expect("no text"), [3]);

    let temperature = |given: Value| {
        let dir = copy(&[("generation_config.json", &given.to_string())]);
        let defaults = open(&dir).expect("a valid checkpoint").defaults;
        defaults.sampling.temperature
    };
    assert_eq!(temperature(json!({})), 0.0);
    assert_eq!(temperature(json!({"temperature": 0.5})), 0.5);
    assert_eq!(temperature(json!({"do_sample": true})), 1.0);
    let greedy = json!({"do_sample": false, "temperature": 0.5});
    assert_eq!(temperature(greedy), 0.0);
    let all = copy(&[("generation_config.json", r#"{"top_k": -1}"#)]);
    let all = open(&all).expect("a valid checkpoint").defaults;
    assert_eq!(all.sampling.top_k, 0);
}

#[test]
fn ends_of_the_configuration_count_where_nothing_else_says_some() {
    let config = std::fs::read(root().join("assets/ds4-tiny/config.json")).expect("an asset");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["eos_token_id"] = json!([1, 3]);
    // As an editor may write it.
    let config = format!("\u{feff}{config}");
    for (generation, expected) in [
        ("{}", (1, vec![3])),
        (r#"{"eos_token_id": [4, 6]}"#, (4, vec![6])),
        (r#"{"eos_token_id": 4}"#, (4, vec![])),
    ] {
        let files = [
            ("config.json", &*config),
            ("generation_config.json", generation),
        ];
        let pipeline = open(&copy(&files)).expect("a valid checkpoint");
        let end = pipeline.model.config().eos_token_id;
        assert_eq!(
            (end, pipeline.defaults.stop_tokens),
            expected,
            "{generation}"
        );
    }
    let config = config.replace("[1,3]", "[1,1024]");
    let error = error(&copy(&[("config.json", &config)])).to_string();
    assert!(
        error.contains("config.json: ") && error.contains("1024"),
        "{error}"
    );
}

#[test]
fn a_stop_token_ends_the_text_and_is_not_yielded() {
    let pipeline = open(&copy(&[])).expect("a valid checkpoint");
    let prompt = pipeline.encode("Once upon a time").expect("known tokens");
    let generate = |stop_tokens: Vec<u32>| {
        let config = GenerateConfig {
            max_new_tokens: 8,
            stop_tokens,
            ..GenerateConfig::default()
        };
        let mut text = Generation::new(&pipeline.model, config, &prompt).expect("valid options");
        let tokens: Result<Vec<u32>, _> = text.by_ref().collect();
        (tokens.expect("a device that works"), text.finish_reason())
    };
    let (all, finish) = generate(Vec::new());
    assert_eq!((all.len(), finish), (8, Some(FinishReason::Length)));
    let stop = all[5];
    let before = all.iter().take_while(|token| **token != stop);
    let before: Vec<u32> = before.copied().collect();
    let expected = (before, Some(FinishReason::StopToken));
    assert_eq!(generate(vec![stop]), expected);
}

#[test]
fn a_bad_generation_config_is_refused_with_file_and_field() {
    for (text, expected) in [
        ("[]", "not a JSON object"),
        (
            r#"{"temperature": "hot"}"#,
            "temperature is \"hot\", expected a number",
        ),
        (
            r#"{"temperature": -1}"#,
            "temperature is -1, expected a finite number, 0 or above",
        ),
        (
            r#"{"top_p": 1.5}"#,
            "top_p is 1.5, expected above 0 and at most 1",
        ),
        (
            r#"{"top_k": 0.5}"#,
            "top_k is 0.5, expected -1 or a non-negative integer",
        ),
        (
            r#"{"top_k": -2}"#,
            "top_k is -2, expected -1 or a non-negative integer",
        ),
        (
            r#"{"do_sample": 1}"#,
            "do_sample is 1, expected true or false",
        ),
        (
            r#"{"eos_token_id": []}"#,
            "eos_token_id is [], expected a token id or a list of them",
        ),
        (
            r#"{"eos_token_id": [1, 1024]}"#,
            "eos_token_id is 1024, the vocabulary has 1024",
        ),
    ] {
        let dir = copy(&[("generation_config.json", text)]);
        let PipelineError::GenerationConfig(error) = error(&dir) else {
            panic!("{text}: another error");
        };
        let path = dir.path().join("generation_config.json");
        assert_eq!(error.path.as_ref(), Some(&path), "{text}");
        let message = error.to_string();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn missing_and_mismatched_files_are_typed_errors() {
    let dir = copy(&[]);
    let remove = |name: &str| std::fs::remove_file(dir.path().join(name)).expect("it is there");
    remove("model.safetensors");
    assert!(matches!(
        error(&dir),
        PipelineError::Checkpoint(CheckpointError::NoWeights { .. })
    ));
    remove("config.json");
    let PipelineError::Checkpoint(CheckpointError::Config(config)) = error(&dir) else {
        panic!("another error");
    };
    assert!(matches!(config.kind, ConfigErrorKind::Read(_)), "{config}");

    let dir = copy(&[("tokenizer.json", "{}")]);
    let PipelineError::Tokenizer(format) = error(&dir) else {
        panic!("another error");
    };
    assert!(
        matches!(format, GenerateError::TokenizerFormat { .. }),
        "{format}"
    );
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("it is there");
    let PipelineError::Tokenizer(read) = error(&dir) else {
        panic!("another error");
    };
    assert!(
        matches!(read, GenerateError::TokenizerRead { .. }),
        "{read}"
    );

    let path = root().join("assets/ds4-tiny/config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(path).expect("an asset")).expect("JSON");
    config["vocab_size"] = json!(1000);
    let dir = copy(&[("config.json", &config.to_string())]);
    let vocabulary = error(&dir);
    let expected = "tokenizer.json has 1024 tokens, the model 1000";
    assert!(vocabulary.to_string().ends_with(expected), "{vocabulary}");
    assert!(matches!(vocabulary, PipelineError::Vocabulary { .. }));
}
