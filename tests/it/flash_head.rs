//! A clustered head in the model: its drafts change no text, and probing all clusters it chooses
//! what the dense head does.

use std::sync::OnceLock;

use burn::tensor::{Tensor, TensorData};
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::flash_head::{FlashHeadFile, ProbedHead};
use ds4_model::generate::{GenerateConfig, GenerateError, Generation, SamplingConfig};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::common::{floats, noise, values, wide};
use crate::golden::root;
use crate::two_layers::{CAPACITY, Fixture, every_model};

pub(crate) const CLUSTERS: usize = 64;

/// Clusters of the shipped checkpoint's output matrix, the same for every device.
fn clusters() -> &'static FlashHeadFile {
    static FILE: OnceLock<FlashHeadFile> = OnceLock::new();
    FILE.get_or_init(|| {
        let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("an asset");
        let device = DeviceSpec::Flex.init().expect("Flex is always present");
        let model = checkpoint.load(&LoadOptions::default(), &device);
        let output = model.expect("the asset loads").output.val();
        let options = BuildOptions {
            special_tokens: vec![checkpoint.config().eos_token_id],
            ..BuildOptions::default()
        };
        let head = FlashHead::build(output, CLUSTERS, &options, |_| {}).expect("a head");
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("head.safetensors");
        FlashHeadFile::save(&path, &head, Some(options.seed)).expect("the directory is writable");
        FlashHeadFile::open(&path).expect("what was saved")
    })
}

pub(crate) fn head(model: &Model, probes: usize) -> ProbedHead {
    let head = clusters().head(model.output.val());
    ProbedHead::new(head.expect("of this checkpoint"), probes).expect("so many clusters")
}

/// The fixture with a clustered head for drafts, and with fewer tokens before where they take long.
fn drafting(fixture: &Fixture, probes: Option<usize>) -> Fixture {
    let mut fixture = fixture.clone();
    let head = probes.map(|probes| head(&fixture.model, probes));
    let mtp = fixture.model.mtp.as_mut();
    mtp.expect("the checkpoint has an MTP layer").flash_head = head;
    fixture
}

#[test]
fn greedy_text_with_drafts_of_a_clustered_head_is_plain_greedy_text() {
    every_model(|name, fixture| {
        let slow = name.starts_with("wgpu");
        let mut fixture = fixture.clone();
        fixture.prompt.truncate(if slow { 16 } else { 28 });
        let run = |probes, drafts| {
            let drafting = drafting(&fixture, probes);
            let config = GenerateConfig {
                max_new_tokens: if slow { 10 } else { 24 },
                drafts,
                ignore_eos: true,
                ..GenerateConfig::default()
            };
            let generation = Generation::new(&drafting.model, config, &fixture.prompt);
            let mut generation = generation.expect("valid options");
            let tokens: Result<Vec<u32>, _> = generation.by_ref().collect();
            (tokens.expect("finite logits"), generation.stats().clone())
        };
        let (tokens, _) = run(None, 0);
        let (_, dense) = run(None, 3);
        for probes in if slow { vec![4, 64] } else { vec![1, 4, 64] } {
            let (actual, stats) = run(Some(probes), 3);
            let what = format!("{name}, {probes} probes");
            assert_eq!(actual, tokens, "{what}: tokens");
            if probes == CLUSTERS {
                assert_eq!(stats, dense, "{what}: drafts accepted and rejected");
            }
            if probes == 1 {
                let worse = stats.acceptance() < dense.acceptance();
                assert!(worse, "{what}: {stats:?}, dense {dense:?}");
            }
        }
    });
}

/// What is generated after the fixture's prompt.
fn text(fixture: &Fixture, model: &Model, config: &GenerateConfig) -> Vec<u32> {
    let generation = Generation::new(model, config.clone(), &fixture.prompt);
    let tokens: Result<_, _> = generation.expect("valid options").collect();
    tokens.expect("a device that works")
}

/// The fixture's model with a clustered head for text and drafts.
fn approximate(fixture: &Fixture, probes: usize) -> Model {
    let mut model = drafting(fixture, Some(probes)).model;
    model.flash_head = Some(head(&model, probes));
    model
}

fn configs(tokens: usize) -> Vec<GenerateConfig> {
    let sampled = SamplingConfig {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        seed: 3,
        ..SamplingConfig::default()
    };
    let penalised = SamplingConfig {
        repetition_penalty: 1.3,
        ..SamplingConfig::default()
    };
    let configs = [
        (SamplingConfig::default(), 0),
        (SamplingConfig::default(), 2),
        (sampled.clone(), 0),
        (sampled, 2),
        (penalised, 0),
    ];
    let configs = configs.map(|(sampling, drafts)| GenerateConfig {
        max_new_tokens: tokens,
        sampling,
        drafts,
        ignore_eos: true,
        ..GenerateConfig::default()
    });
    configs.to_vec()
}

/// With a prompt and a number of tokens that the device can take.
fn sized(name: &str, fixture: &Fixture) -> (Fixture, usize) {
    let mut fixture = fixture.clone();
    let slow = name.starts_with("wgpu");
    fixture.prompt.truncate(if slow { 8 } else { 28 });
    (fixture, if slow { 6 } else { 16 })
}

#[test]
fn text_of_a_clustered_head_that_probes_all_clusters_is_that_of_the_dense_head() {
    every_model(|name, fixture| {
        let (fixture, tokens) = sized(name, fixture);
        let flash = approximate(&fixture, CLUSTERS);
        for config in configs(tokens) {
            let expected = text(&fixture, &fixture.model, &config);
            assert_eq!(expected.len(), tokens, "{name}");
            assert_eq!(
                text(&fixture, &flash, &config),
                expected,
                "{name}, {config:?}"
            );
        }
    });
}

#[test]
fn samples_of_a_clustered_head_depend_on_the_seed_and_nothing_else() {
    every_model(|name, fixture| {
        let (fixture, tokens) = sized(name, fixture);
        let flash = approximate(&fixture, 4);
        let sample = |seed, drafts| {
            let config = GenerateConfig {
                max_new_tokens: tokens,
                sampling: SamplingConfig {
                    temperature: 1.5,
                    seed,
                    ..SamplingConfig::default()
                },
                drafts,
                ignore_eos: true,
                ..GenerateConfig::default()
            };
            text(&fixture, &flash, &config)
        };
        let first = sample(1, 0);
        assert_eq!(sample(1, 2), first, "{name}: drafts");
        assert_ne!(sample(2, 2), first, "{name}: another seed");
    });
}

/// The token that a head with so many probes should choose, from products in f64 and the dense
/// logits.
fn expected(model: &Model, streams: Tensor<4>, probes: usize) -> u32 {
    let head = head(model, probes);
    let h = wide(&values(
        model.hidden(streams.clone()).cast(burn::tensor::DType::F32),
    ));
    let centroids = head.head().centroids().cast(burn::tensor::DType::F32);
    let centroids = wide(&values(centroids));
    let score = |row: &[f64]| row.iter().zip(&h).map(|(a, b)| a * b).sum::<f64>();
    let mut scores: Vec<(f64, u32)> = centroids.chunks(h.len()).map(score).zip(0..).collect();
    scores.sort_by(|a, b| b.0.total_cmp(&a.0));
    let chosen: Vec<u32> = scores[..probes].iter().map(|score| score.1).collect();
    let logits = values(model.logits(streams));
    let candidate = |id: &u32| {
        chosen.contains(&head.head().assignments()[*id as usize])
            || head.head().special_tokens().contains(id)
    };
    let candidates = (0..logits.len() as u32).filter(candidate);
    let best = candidates.reduce(
        |best, id| match logits[id as usize] > logits[best as usize] {
            true => id,
            false => best,
        },
    );
    best.expect("a cluster has tokens")
}

#[test]
fn a_clustered_head_chooses_the_best_token_of_the_clusters_that_it_probes() {
    every_model(|name, fixture| {
        let (fixture, tokens) = sized(name, fixture);
        let probes = 2;
        let flash = approximate(&fixture, probes);
        let config = &configs(tokens)[0];
        let actual = text(&fixture, &flash, config);
        assert_eq!(actual.len(), tokens, "{name}");
        let mut cache = fixture.cache(CAPACITY);
        let mut input = fixture.prompt.clone();
        for (index, token) in actual.into_iter().enumerate() {
            let streams = fixture.streams(&input, &mut cache, &Trace::off());
            let last = streams.narrow(1, input.len() - 1, 1);
            let expected = expected(&fixture.model, last, probes);
            assert_eq!(token, expected, "{name}: token {index}");
            input = vec![token];
        }
        // Otherwise nothing was approximate about it.
        assert_ne!(
            text(&fixture, &flash, config),
            text(&fixture, &fixture.model, config),
            "{name}"
        );
    });
}

#[test]
fn hidden_states_of_more_positions_than_one_call_takes_are_divided() {
    every_model(|name, fixture| {
        let count = 37;
        let head = head(&fixture.model, 3);
        let width = fixture.model.config().hidden_size;
        let dtype = fixture.model.embedding.val().dtype();
        let hidden = floats(&noise(count * width, 5), [1, count, width], &fixture.device);
        let hidden = hidden.cast(dtype);
        let together = head.greedy_tokens(hidden.clone()).expect("hidden states");
        assert_eq!(together.dims(), [1, count], "{name}");
        let candidates = head.candidates(hidden.clone()).expect("hidden states");
        assert_eq!(candidates.ids.dims(), [count, 3 * 16 + 1], "{name}");
        let logits = head.logits(hidden.clone()).expect("hidden states");
        let vocabulary = fixture.model.config().vocab_size;
        assert_eq!(logits.dims(), [1, count, vocabulary], "{name}");
        for position in [0, 15, 16, 36] {
            let alone = hidden.clone().narrow(1, position, 1);
            let token = head.greedy_tokens(alone.clone()).expect("a hidden state");
            let expected = together.clone().narrow(1, position, 1);
            assert_eq!(token.into_data(), expected.into_data(), "{name}");
            let own = head.candidates(alone).expect("a hidden state");
            let expected = candidates.logits.clone().narrow(0, position, 1);
            assert_eq!(
                own.logits.clone().into_data(),
                expected.into_data(),
                "{name}"
            );
            let mut expected = vec![f32::NEG_INFINITY; vocabulary];
            let ids = own.ids.into_data();
            for (id, logit) in ids.iter::<i64>().zip(values(own.logits)) {
                if let Ok(id) = usize::try_from(id) {
                    expected[id] = logit;
                }
            }
            let row = logits.clone().narrow(1, position, 1);
            assert_eq!(values(row), expected, "{name}");
        }
    });
}

#[test]
fn a_head_of_another_model_and_probes_out_of_range_are_named() {
    every_model(|name, fixture| {
        let output = fixture.model.output.val();
        let of = |vocabulary: usize, width: usize| {
            let data = TensorData::new(noise(vocabulary * width, 1), [vocabulary, width]);
            let rows = Tensor::<2>::from_data(data, (&output.device(), output.dtype()));
            let assignments: Vec<u32> = (0..vocabulary as u32).map(|id| id % 8).collect();
            let centroids = rows.clone().slice_dim(0, 0..8);
            let head = FlashHead::new(rows, &assignments, centroids, Default::default());
            ProbedHead::new(head.expect("balanced clusters"), 1).expect("8 clusters")
        };
        let width = fixture.model.config().hidden_size;
        let error = |model: &Model| -> GenerateError {
            let config = GenerateConfig {
                drafts: 1,
                max_new_tokens: 4,
                ..GenerateConfig::default()
            };
            match Generation::new(model, config, &fixture.prompt[..4]) {
                Ok(generation) => {
                    let tokens: Result<Vec<u32>, _> = generation.collect();
                    tokens.expect_err("a head that does not fit")
                }
                Err(error) => error,
            }
        };
        let smaller = "the clustered head has 512 tokens, the model's vocabulary 1024";
        let narrower = "the clustered head refused a hidden state: `h` has shape";
        for (head, message) in [(of(512, width), smaller), (of(1024, width / 2), narrower)] {
            let mut model = fixture.model.clone();
            model.flash_head = Some(head.clone());
            let actual = error(&model).to_string();
            assert!(actual.starts_with(message), "{name}: {actual}");
            let drafting = drafting(fixture, None);
            let mut model = drafting.model;
            model.mtp.as_mut().expect("an MTP layer").flash_head = Some(head);
            let actual = error(&model).to_string();
            assert!(actual.starts_with(message), "{name}, drafts: {actual}");
        }
        for probes in [0, CLUSTERS + 1] {
            let head = clusters().head(output.clone()).expect("of this checkpoint");
            let error = ProbedHead::new(head, probes).expect_err("probes out of range");
            let expected =
                format!("`probes` is {probes}, expected 1 to 64, the number of clusters");
            assert_eq!(error.to_string(), expected, "{name}");
        }
    });
    let defaults = [1, 15, 16, 64, 8080].map(ProbedHead::default_probes);
    assert_eq!(defaults, [1, 1, 1, 4, 505]);
}
