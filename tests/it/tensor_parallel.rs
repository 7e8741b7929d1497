//! A model of whose layers each device has a part computes what a whole one does, up to rounding,
//! and with every combination of lanes, drafts and graphs the same bits as without. docs/testing.md
//! says how to run it on two GPUs.

use burn::module::Module;
use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::collective::GroupRoute;
use burn_ds4_ops::quant::Activations;
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{Engine, EngineConfig, Request};
use ds4_model::model::Model;
use ds4_model::parallel::Parallel;
use ds4_model::placement::{Devices, Placement, PlacementError, Plan};
use ds4_model::trace::Trace;

use crate::common::{absolute, assert_close, compiles_slowly, few, skip, some, values};
use crate::devices::{joining, pairs, sparse_v4_flash, two_gpus};
use crate::ds4_tiny::ids_tensor;
use crate::engine::{engine, penalised, request, sampled, together};
use crate::golden::{TOLERANCE, root};
use crate::two_layers::{CAPACITY, Fixture, PAGE, text};

fn in_parts(model: &Model, devices: &[Device]) -> Model {
    let placement = Placement::tensor(devices, model.layers.len()).expect("devices");
    let placed = model.clone().place(placement);
    placed.expect("layers that can be divided")
}

/// Runs `test` with the model of two layers on one device and in parts on two, in every dtype.
fn every_pair(test: impl Fn(&str, &Fixture, &Fixture)) {
    for (name, pair) in pairs() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            if !pair[0].supports_dtype(dtype) {
                skip(&name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            let whole = Fixture::open(&pair[0], dtype, name == "flex");
            let divided = Fixture {
                model: in_parts(&whole.model, &pair),
                ..whole.clone()
            };
            test(&format!("{name} {dtype:?}"), &whole, &divided);
        }
    }
}

/// Whether the parts of a step of the model are recorded.
fn is_recorded(model: &Model) -> bool {
    let parallel = model.parallel.as_ref();
    parallel.is_some_and(|parallel| *parallel.route() == GroupRoute::Memory)
}

#[test]
fn parts_of_layers_compute_the_logits_of_whole_ones() {
    every_pair(|name, whole, divided| {
        // In bf16, rounding decides now and then which rows and experts are picked.
        if !name.ends_with("F32") {
            return;
        }
        let ids = text(45);
        let run = |fixture: &Fixture| {
            let mut rows = Vec::new();
            let mut cache = fixture.cache(CAPACITY);
            let mut step = |range: std::ops::Range<usize>, removed: usize| {
                cache.remove_newest(removed).expect("within the rollback");
                let streams = fixture.streams(&ids[range], &mut cache, &Trace::off());
                rows.push(fixture.logits(streams).concat());
            };
            // A prefill step, a verification, steps of one token, and some that are taken back.
            let steps = [
                (0..20, 0),
                (20..23, 0),
                (23..24, 0),
                (24..25, 0),
                (23..24, 2),
            ];
            for (range, removed) in steps.into_iter().chain([(23..45, 1)]) {
                step(range, removed);
            }
            rows
        };
        let (expected, actual) = (run(whole), run(divided));
        for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            assert_close(
                actual,
                expected,
                absolute(TOLERANCE),
                &format!("{name}: {index}"),
            );
        }
    });
}

#[test]
fn the_shipped_model_in_parts_has_its_logits_and_its_greedy_text() {
    let flex = Device::flex();
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("a checkpoint");
    for expand in [true, false] {
        let options = LoadOptions {
            expand,
            ..LoadOptions::default()
        };
        let whole = checkpoint.load(&options, &flex).expect("it loads");
        let divided = in_parts(&whole, &[flex.clone(), flex.clone()]);
        let prompt = text(if expand { 90 } else { 20 });
        let logits = [&whole, &divided].map(|model| {
            let cache = model.new_cache(Default::default());
            let mut cache = cache.expect("valid options");
            let ids = ids_tensor(&prompt, &flex);
            values(model.forward(ids, &mut cache).expect("a short text"))
        });
        assert_close(&logits[1], &logits[0], absolute(TOLERANCE), "logits");
        let count = if expand { 60 } else { 12 };
        let texts = [&whole, &divided].map(|model| {
            let mut engine = Engine::new(model, EngineConfig::default()).expect("valid options");
            together(&mut engine, &[request(&prompt, count)])
        });
        assert_eq!(texts[1], texts[0], "expanded: {expand}");
    }
}

#[test]
fn lone_texts_in_parts_are_those_of_whole_layers() {
    every_pair(|name, whole, divided| {
        // As above.
        if !name.ends_with("F32") {
            return;
        }
        let own = request(&whole.prompt, few(name, 50, 20));
        for &drafts in some(name, &[2, 0], 2) {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            let expected = together(&mut engine(whole, &config), std::slice::from_ref(&own));
            let mut engine = engine(divided, &config);
            let actual = together(&mut engine, std::slice::from_ref(&own));
            assert_eq!(actual, expected, "{name}, {drafts} drafts");
            assert_eq!(engine.graph_refusal(), None, "{name}");
            let replays = is_recorded(&divided.model);
            assert_eq!(engine.replays() > 0, replays, "{name}: replays");
        }
    });
}

#[test]
fn texts_in_parts_do_not_depend_on_lanes_drafts_and_graphs() {
    every_pair(|name, _, divided| {
        let any = text(120);
        let count = few(name, 40, 10);
        let requests: Vec<Request> = (0..few(name, 5, 3))
            .map(|index| {
                let kinds = [sampled(index), penalised(index), Default::default()];
                Request {
                    sampling: kinds[index as usize % 3].clone(),
                    ..request(&any[index as usize * 9..][..3 + 5 * index as usize], count)
                }
            })
            .collect();
        let alone = |own: &Request| {
            let config = EngineConfig {
                lanes: 1,
                graphs: false,
                prefill_chunk: 18,
                ..EngineConfig::default()
            };
            together(&mut engine(divided, &config), std::slice::from_ref(own)).remove(0)
        };
        let expected: Vec<Vec<u32>> = requests.iter().map(alone).collect();
        let cases = [(1, 4, 256), (3, 2, PAGE), (0, 8, PAGE)];
        for &(drafts, lanes, page) in &cases[..few(name, cases.len(), 1)] {
            let config = EngineConfig {
                drafts,
                lanes,
                page,
                prefill_chunk: 18,
                ..EngineConfig::default()
            };
            let mut engine = engine(divided, &config);
            let actual = joining(&mut engine, &requests);
            for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                // The second is aborted.
                let shorter = actual.len().min(expected.len());
                let what = format!("{name}, {drafts} drafts: text {index}");
                assert_eq!(actual[..shorter], expected[..shorter], "{what}");
                assert!(index == 1 || shorter == count, "{what}: {shorter} tokens");
            }
            assert_eq!(engine.graph_refusal(), None, "{name}");
        }
    });
}

#[test]
fn the_dspark_drafter_reads_layers_in_parts() {
    let flex = Device::flex();
    let dir = root().join("assets/ds4-tiny-dspark");
    let checkpoint = Checkpoint::open(&dir).expect("it is a checkpoint");
    let options = LoadOptions {
        expand: true,
        ..LoadOptions::default()
    };
    let whole = checkpoint.load(&options, &flex).expect("it loads");
    let divided = in_parts(&whole, &[flex.clone(), flex.clone()]);
    let config = EngineConfig {
        drafts: 4,
        ..EngineConfig::default()
    };
    let requests = [request(&text(20), 24), request(&text(9), 24)];
    let [expected, actual] = [&whole, &divided].map(|model| {
        let mut engine = Engine::new(model, config.clone()).expect("valid options");
        (together(&mut engine, &requests), engine.stats().clone())
    });
    assert_eq!(actual, expected);
    assert!(actual.1.accepted > 0);
}

#[test]
fn a_checkpoint_is_loaded_in_parts() {
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("a checkpoint");
    for (name, [first, second]) in pairs() {
        if first == second || compiles_slowly(&name) {
            continue;
        }
        let named = [("one", &first), ("two", &second)];
        let named = named.map(|(name, device)| (name.to_owned(), device.clone()));
        let devices = Devices::new(named.into()).expect("two devices");
        let devices = devices.with_parallel(Parallel::Tensor);
        let options = LoadOptions::default();
        let model = checkpoint.load(&options, &devices).expect("it loads");
        let parallel = model.parallel.as_ref().expect("layers in parts");
        assert_eq!(parallel.devices(), [first, second.clone()], "{name}");
        for layer in &model.layers {
            assert_eq!(layer.devices(), vec![second.clone()], "{name}");
            assert_eq!(layer.attention.heads, 4, "{name}");
        }
        let small = devices.with_memory(1000);
        let error = checkpoint.load(&options, &small).map(|_| ()).unwrap_err();
        assert!(
            error.to_string().starts_with("one: layers 0 to 5"),
            "{error}"
        );
    }
}

#[test]
fn what_cannot_be_divided_is_an_error_that_names_it() {
    let flex = Device::flex();
    let whole = Fixture::open(&flex, FloatDType::F32, true).model;
    let place = |count: usize| {
        let devices = vec![flex.clone(); count];
        let placement = Placement::tensor(&devices, whole.layers.len());
        placement.and_then(|placement| whole.clone().place(placement))
    };
    let message = |count: usize| place(count).map(|_| ()).unwrap_err().to_string();
    assert_eq!(
        message(3),
        "num_attention_heads (8) cannot be divided among 3 devices, each with a multiple of 1"
    );
    assert_eq!(
        message(4),
        "o_groups (2) cannot be divided among 4 devices, each with a multiple of 1"
    );
    assert_eq!(message(0), PlacementError::NoDevice.to_string());
    let divided = place(2).expect("an even number of everything");
    let again = divided.place(Placement::single(&flex, 2)).map(|_| ());
    assert_eq!(again.unwrap_err(), PlacementError::Divided);
    let alone = place(1).expect("a device");
    assert!(alone.parallel.is_none());

    let devices = Devices::from(&flex).with_parallel(Parallel::Tensor);
    let devices = devices.with_split(Some(vec![2]));
    let config = ModelConfig {
        num_hash_layers: 1,
        layers: ModelConfig::new().layers[..2].to_vec(),
        ..ModelConfig::new()
    };
    let error = config.init_packed_on(FloatDType::F32, Activations::Exact, devices);
    assert_eq!(
        error.map(|_| ()).unwrap_err().to_string(),
        "split [2]: each device has a part of every layer"
    );
}

#[test]
fn v4_flash_can_be_divided_among_2_4_and_8_devices() {
    let Some((_, bytes)) = sparse_v4_flash() else {
        return;
    };
    let drafter = bytes.drafter.map_or(0, |drafter| drafter.weights);
    let trunk = bytes.weights() - drafter;
    for count in [2, 4, 8] {
        let named = (0..count).map(|index| format!("device {index}"));
        let plan = Plan::tensor(&bytes, &named.collect::<Vec<_>>()).expect("devices");
        assert_eq!(plan.runs, vec![0..43; count]);
        for part in &plan.bytes[..count - 1] {
            // Not all of it is divided.
            let least = trunk / count;
            assert!(
                (least..least + 6_000_000_000).contains(&part.weights),
                "{plan:?}"
            );
        }
    }
}

/// Layers of V4-Flash with few experts, on one GPU and in parts on two.
fn flash(layers: usize, [first, second]: &[Device; 2]) -> [Model; 2] {
    let config = ModelConfig::new();
    let config = ModelConfig {
        vocab_size: 8192,
        n_routed_experts: 16,
        layers: config.layers[..layers].to_vec(),
        ..config
    };
    first.seed(1);
    let whole = config.init_packed(FloatDType::BF16, Activations::Exact, first);
    let divided = in_parts(&whole, &[second.clone(), first.clone()]);
    [whole, divided]
}

#[test]
fn layers_of_flash_in_parts_are_recorded_on_two_gpus() {
    let Some(gpus) = two_gpus() else {
        return;
    };
    let [whole, divided] = flash(4, &gpus);
    let parallel = divided.parallel.as_ref().expect("layers in parts");
    println!("exchanges: {:?}", parallel.route());
    let prompt: Vec<u32> = (0..40).map(|place| place * 7919 % 8192).collect();
    let logits = [&whole, &divided].map(|model| {
        let mut cache = model.new_cache(Default::default()).expect("valid options");
        let ids = ids_tensor(&prompt, &gpus[0]);
        values(model.forward(ids, &mut cache).expect("a short text"))
    });
    let largest = logits[0]
        .iter()
        .fold(0f32, |most, value| most.max(value.abs()));
    let pairs = logits[0].iter().zip(&logits[1]);
    let worst = pairs.fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
    println!("logits up to {largest}, off by {worst} at most");
    assert!(worst < 0.1 * largest, "off by {worst} of {largest}");
    // Most of the time goes into compiling kernels on both GPUs: few kinds of steps.
    let requests = [9, 14].map(|length| request(&prompt[..length], 60));
    let alone = |own: &Request| {
        let config = EngineConfig {
            lanes: 1,
            graphs: false,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&divided, config).expect("valid options");
        together(&mut engine, std::slice::from_ref(own)).remove(0)
    };
    let expected: Vec<Vec<u32>> = requests.iter().map(alone).collect();
    for (drafts, lanes) in [(0, 1), (1, 2)] {
        let config = EngineConfig {
            drafts,
            lanes,
            ..EngineConfig::default()
        };
        let start = std::time::Instant::now();
        let mut engine = Engine::new(&divided, config).expect("valid options");
        let texts = together(&mut engine, &requests);
        println!(
            "{drafts} drafts, {lanes} lanes: {:.2} s, {} replays, refused: {:?}",
            start.elapsed().as_secs_f64(),
            engine.replays(),
            engine.graph_refusal()
        );
        assert_eq!(texts, expected, "{drafts} drafts, {lanes} lanes");
        assert_eq!(engine.graph_refusal(), None);
        assert_eq!(engine.replays() > 0, is_recorded(&divided));
    }
    assert_eq!(divided.check_group(), Ok(()));
}
