//! A model whose layers are on several devices has the bits that it has on one, whatever is
//! combined. docs/testing.md says how to run it on two GPUs.

use burn::module::Module;
use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::device::DeviceSpec;
use burn_ds4_ops::quant::Activations;
use ds4_model::cache::CacheConfig;
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{Engine, EngineConfig, Request, RequestId};
use ds4_model::model::Model;
use ds4_model::placement::{Devices, ModelBytes, Placement, PlacementError, Plan};
use ds4_model::trace::Trace;

use crate::common::{compiles_slowly, devices, few, integers, skip, some, values};
use crate::engine::{
    CALLS, Texts, add, alone, collect, engine, has_graphs, penalised, request, sampled, together,
    unrecordable, with_logits,
};
use crate::golden::root;
use crate::two_layers::{CAPACITY, Fixture, PAGE, bits, text};
use crate::v41_goldens;

/// Two devices of one kind for each kind that is there, by name.
pub(crate) fn pairs() -> Vec<(String, [Device; 2])> {
    let pairs = devices().iter().filter_map(|(name, device)| {
        let second = match name.as_str() {
            // The same once more: it computes what two would.
            "flex" => Some(device.clone()),
            "wgpu" => second_wgpu(),
            _ => second_cuda(),
        };
        if second.is_none() {
            eprintln!("skipped: a second device beside {name}");
        }
        Some((name.clone(), [device.clone(), second?]))
    });
    pairs.collect()
}

fn second_cuda() -> Option<Device> {
    DeviceSpec::Cuda(1).init().ok()
}

/// Where there is no GPU, a software driver is the default adapter, and once more by its kind.
#[cfg(feature = "wgpu")]
fn second_wgpu() -> Option<Device> {
    use burn::tensor::{DeviceKind, DeviceType};
    let found = Device::enumerate(DeviceType::Wgpu);
    let gpus = [DeviceKind::DiscreteGpu(0), DeviceKind::IntegratedGpu(0)].map(Device::wgpu);
    let cpu = Device::wgpu(DeviceKind::Cpu);
    let has_gpu = gpus.iter().any(|gpu| found.contains(gpu));
    (!has_gpu && found.contains(&cpu)).then_some(cpu)
}

#[cfg(not(feature = "wgpu"))]
fn second_wgpu() -> Option<Device> {
    None
}

/// Runs `test` with the model of two layers on one device and on two, in every dtype.
pub(crate) fn every_pair(test: impl Fn(&str, &Fixture, &Fixture)) {
    for (name, pair) in pairs() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            if !pair[0].supports_dtype(dtype) {
                skip(&name, &format!("{dtype:?}").to_lowercase());
                continue;
            }
            let whole = Fixture::open(&pair[0], dtype, name == "flex");
            let divided = Fixture {
                model: placed(&whole.model, &pair, &[1, 1]),
                ..whole.clone()
            };
            test(&format!("{name} {dtype:?}"), &whole, &divided);
        }
    }
}

fn placed(model: &Model, devices: &[Device], split: &[usize]) -> Model {
    let placement = Placement::new(devices, split).expect("a layer for each device");
    let placed = model.clone().place(placement);
    placed.expect("a placement of as many layers")
}

#[test]
fn each_module_of_a_divided_model_is_where_the_placement_has_it() {
    for (name, pair) in pairs() {
        let whole = Fixture::open(&pair[0], FloatDType::F32, name == "flex").model;
        let model = placed(&whole, &pair, &[1, 1]);
        let [first, second] = pair;
        assert_eq!(model.layers[0].devices(), vec![first.clone()], "{name}");
        assert_eq!(model.layers[1].devices(), vec![second.clone()], "{name}");
        assert_eq!(model.embedding.val().device(), first, "{name}");
        assert_eq!(model.output.val().device(), second, "{name}");
        let own = model.draft_embedding.as_ref().map(|own| own.device());
        assert_eq!(own, Some(second.clone()), "{name}");
        let mtp = model.mtp.as_ref().map(Module::devices);
        assert_eq!(mtp, Some(vec![second]), "{name}");
        let other = Placement::single(&first, 3);
        let error = model.place(other).map(|_| ()).unwrap_err().to_string();
        assert_eq!(
            error, "split [3]: it has 3 layers, the model has 2",
            "{name}"
        );
    }
}

#[test]
fn layers_of_v41_that_share_no_rows_can_be_on_two_devices() {
    let fixture = v41_goldens::Fixture::new("exact");
    let quick = pairs().into_iter();
    for (name, pair) in quick.filter(|(name, _)| !compiles_slowly(name)) {
        let whole = fixture.load(Activations::Exact, &pair[0]);
        let (layers, mut divided) = (whole.config().layers.len(), 0);
        let prompt: Vec<u32> = fixture.ids(0, 0..20).iter().map(|id| *id as u32).collect();
        let results = |model: &Model| {
            let mut cache = model.new_cache(CacheConfig::default()).expect("valid");
            let [first, second] = [0..13, 13..20].map(|range| {
                let ids = v41_goldens::tensor(&fixture.ids(0, range), 1, &pair[0]);
                values(model.forward(ids, &mut cache).expect("it fits"))
            });
            let config = EngineConfig {
                lanes: 2,
                drafts: 3,
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(model, config).expect("valid options");
            let requests = [5, 20].map(|length| request(&prompt[..length], 70));
            (
                bits(&first),
                bits(&second),
                together(&mut engine, &requests),
            )
        };
        let expected = results(&whole);
        for begin in 1..layers {
            let placement = Placement::new(&pair, &[begin, layers - begin]).expect("two runs");
            let placed = whole.clone().place(placement);
            if whole.config().may_begin(begin) {
                divided += 1;
                let model = placed.expect("a device may begin there");
                assert!(results(&model) == expected, "{name}: from layer {begin}");
            } else {
                let refused = placed.map(|_| ());
                let is_it = matches!(refused, Err(PlacementError::SharedRows { .. }));
                assert!(is_it, "{name}: from layer {begin}");
            }
        }
        assert!(divided > 0 && divided + 1 < layers, "{name}: {divided}");
    }
}

#[test]
fn a_checkpoint_is_loaded_to_where_its_layers_live() {
    let checkpoint = Checkpoint::open(&root().join("assets/ds4-tiny")).expect("a checkpoint");
    let layers = checkpoint.config().layers.len();
    for (name, [first, second]) in pairs() {
        let options = LoadOptions {
            expand: name == "flex",
            ..LoadOptions::default()
        };
        if first == second {
            let twice = ["flex", "flex"].map(|name| (name.to_owned(), first.clone()));
            let error = Devices::new(twice.into()).unwrap_err();
            assert_eq!(error.to_string(), "devices: flex is named twice");
            continue;
        }
        let names = [("one", &first), ("two", &second)];
        let named = names.map(|(name, device)| (name.to_owned(), device.clone()));
        let devices = Devices::new(named.into()).expect("two devices");
        let model = checkpoint.load(&options, &devices).expect("it loads");
        let runs = model.placement.runs();
        assert_eq!(
            (runs.len(), model.placement.layers()),
            (2, layers),
            "{name}"
        );
        for run in runs {
            for layer in &model.layers[run.layers.clone()] {
                assert_eq!(layer.devices(), vec![run.device.clone()], "{name}");
            }
        }
        let split = devices.clone().with_split(Some(vec![1, 1]));
        let error = checkpoint.load(&options, &split).map(|_| ()).unwrap_err();
        let expected = format!("split [1, 1]: it has 2 layers, the model has {layers}");
        assert_eq!(error.to_string(), expected, "{name}");
        let small = devices.with_memory(1000);
        let error = checkpoint.load(&options, &small).map(|_| ()).unwrap_err();
        assert!(
            error.to_string().starts_with("one: layers 0 to "),
            "{error}"
        );
    }
}

#[test]
fn a_forward_call_has_the_same_bits_on_two_devices() {
    every_pair(|name, whole, divided| {
        let ids = text(45);
        let run = |fixture: &Fixture| {
            let mut rows = Vec::new();
            let mut cache = fixture.cache(CAPACITY);
            // A prefill step, a verification, and steps of one token.
            for range in [0..20, 20..23, 23..24, 24..25] {
                let streams = fixture.streams(&ids[range], &mut cache, &Trace::off());
                rows.push(values(streams.clone()));
                rows.push(fixture.logits(streams).concat());
            }
            // Rolled back, also beyond what was committed at once, and on beyond the capacity.
            for (removed, range) in [(2, 23..24), (1, 23..45)] {
                cache.remove_newest(removed).expect("within the rollback");
                let streams = fixture.streams(&ids[range], &mut cache, &Trace::off());
                rows.push(values(streams));
            }
            assert_eq!(cache.lengths(), [45], "{name}");
            rows
        };
        let (expected, actual) = (run(whole), run(divided));
        for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let wrong = bits(actual)
                .iter()
                .zip(bits(expected))
                .filter(|(a, b)| *a != b)
                .count();
            let all = expected.len();
            assert_eq!(
                wrong, 0,
                "{name}: {wrong} of {all} values of call {index} differ"
            );
        }
    });
}

#[test]
fn sequences_of_several_lengths_have_the_same_bits_on_two_devices() {
    every_pair(|name, whole, divided| {
        let run = |fixture: &Fixture| {
            let options = CacheConfig {
                batch: 2,
                capacity: 4,
                ..CacheConfig::default()
            };
            let cache = fixture.model.new_cache(options);
            let mut cache = cache.expect("the options are valid");
            let mut rows = Vec::new();
            for (ids, lengths) in [(0..10, [5, 3]), (10..16, [8, 2]), (16..56, [28, 22])] {
                let ids: Vec<i64> = text(56)[ids].iter().map(|id| i64::from(*id)).collect();
                let shape = [2, ids.len() / 2];
                let ids = integers(&ids, shape, &fixture.device);
                let logits = fixture.model.forward(ids, &mut cache);
                rows.push(values(logits.expect("the text fits the context")));
                cache.truncate_to(&lengths).expect("shorter than they are");
            }
            rows
        };
        let (expected, actual) = (run(whole), run(divided));
        for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            assert!(bits(actual) == bits(expected), "{name}: call {index}");
        }
    });
}

#[test]
fn a_recording_that_fails_on_the_second_device_loses_no_tokens() {
    every_pair(|name, whole, divided| {
        if name.starts_with("cuda") {
            // The weights count as lost then, as with one device.
            return;
        }
        let own = request(&whole.prompt, 40);
        let expected = alone(whole, &own);
        for &drafts in some(name, &[1, 0], 2) {
            let config = EngineConfig {
                drafts,
                ..EngineConfig::default()
            };
            CALLS.set(0);
            let mut engine = engine(divided, &config).with_logits_processor(unrecordable);
            let actual = together(&mut engine, std::slice::from_ref(&own)).remove(0);
            assert_eq!(actual, expected, "{name}, {drafts} drafts");
            assert_eq!(engine.graph_refusal().is_some(), has_graphs(name), "{name}");
        }
    });
}

#[test]
fn lone_texts_have_the_same_tokens_and_logits_on_two_devices() {
    every_pair(|name, whole, divided| {
        let count = few(name, 60, 30);
        let requests = [
            request(&whole.prompt, count),
            Request {
                sampling: penalised(3),
                ..request(&whole.prompt[..9], count)
            },
        ];
        // The logits of all tokens but the last.
        let plain = EngineConfig {
            graphs: false,
            steps_ahead: 0,
            ..EngineConfig::default()
        };
        let expected = requests
            .each_ref()
            .map(|own| with_logits(&mut engine(whole, &plain), own.clone()));
        let cases = [(0, true), (2, true), (1, false), (3, false)];
        let cases = few(name, &cases[..], &cases[1..2]);
        for &(drafts, graphs) in cases {
            for (index, (own, expected)) in requests.iter().zip(&expected).enumerate() {
                // The first has several pages, the second one.
                let config = EngineConfig {
                    drafts,
                    graphs,
                    page: [PAGE, 256][index],
                    ..EngineConfig::default()
                };
                let mut engine = engine(divided, &config);
                let actual = with_logits(&mut engine, own.clone());
                let what = format!("{name}: text {index}, {drafts} drafts");
                assert_eq!(actual.len(), expected.len(), "{what}");
                for (place, (actual, expected)) in actual.iter().zip(expected).enumerate() {
                    assert_eq!(actual.0, expected.0, "{what}: token {place}");
                    if let (Some(actual), Some(expected)) = (&actual.1, &expected.1) {
                        assert!(actual == expected, "{what}: logits of token {place}");
                    }
                }
                assert_eq!(engine.graph_refusal(), None, "{what}");
                if has_graphs(name) && graphs {
                    assert!(engine.replays() > 0, "{what}: no step was replayed");
                }
            }
        }
    });
}

/// Texts that begin one after the other, of which the second is aborted; the others whole.
pub(crate) fn joining(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<u32>> {
    let (mut ids, mut texts) = (Vec::<RequestId>::new(), Texts::new());
    let mut steps = 0;
    while ids.len() < requests.len() || !engine.is_idle() {
        if steps % 5 == 0
            && let Some(next) = requests.get(ids.len())
        {
            ids.push(add(engine, next.clone()));
        }
        let second = ids.get(1).copied().filter(|_| steps == 13);
        if let Some(id) = second.filter(|id| engine.progress(*id).is_some()) {
            engine.abort(id).expect("it is there");
        }
        collect(engine.step().expect("a device that works"), &mut texts);
        steps += 1;
    }
    let texts = ids.iter().map(|id| texts.remove(id).unwrap_or_default());
    texts.collect()
}

#[test]
fn texts_that_join_and_leave_have_the_same_tokens_on_two_devices() {
    every_pair(|name, whole, divided| {
        let any = text(120);
        let count = few(name, 50, 40);
        let requests: Vec<Request> = (0..few(name, 7, 4))
            .map(|index| {
                let kinds = [sampled(index), penalised(index), Default::default()];
                Request {
                    sampling: kinds[index as usize % 3].clone(),
                    log_probs: (index == 2).then_some(2),
                    ..request(&any[index as usize * 9..][..3 + 5 * index as usize], count)
                }
            })
            .collect();
        let cases = [(1, 4, 256), (0, 8, PAGE), (3, 2, PAGE)];
        let every = if name == "flex BF16" { 3 } else { 1 };
        let cases = cases[..few(name, cases.len(), 1)].iter().step_by(every);
        for &(drafts, lanes, page) in cases {
            let config = EngineConfig {
                drafts,
                lanes,
                page,
                prefill_chunk: 18,
                overlap: true,
                ..EngineConfig::default()
            };
            let expected = joining(&mut engine(whole, &config), &requests);
            let mut engine = engine(divided, &config);
            let actual = joining(&mut engine, &requests);
            for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                // A text that is aborted may have been read sooner.
                let shorter = actual.len().min(expected.len());
                let what = format!("{name}, {drafts} drafts: text {index}");
                assert_eq!(actual[..shorter], expected[..shorter], "{what}");
                assert!(index == 1 || shorter == count, "{what}: {shorter} tokens");
            }
            assert_eq!(engine.graph_refusal(), None, "{name}");
            if has_graphs(name) {
                assert!(engine.replays() > 0, "{name}: no step was replayed");
            }
        }
    });
}

/// Processes that share two GPUs, so that these are busy with others between any two launches of
/// one.
const COPIES: usize = 30;

#[test]
#[ignore = "it takes two GPUs for minutes"]
fn thirty_copies_of_texts_that_join_and_leave_have_the_same_tokens_on_two_gpus() {
    if two_gpus().is_none() {
        return;
    }
    let program = std::env::current_exe().expect("this program");
    let start = |_| {
        std::process::Command::new(&program)
            .arg("devices::texts_that_join_and_leave_have_the_same_tokens_on_two_devices")
            .args(["--exact", "--nocapture", "--test-threads", "1"])
            .envs([("DS4_DEVICES", "cuda"), ("DS4_REQUIRE", "cuda")])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("a process")
    };
    let copies: Vec<_> = (0..COPIES).map(start).collect();
    let told = copies.into_iter().map(|copy| {
        let output = copy.wait_with_output().expect("its output");
        let told = [output.stdout, output.stderr].map(String::from_utf8);
        told.map(|told| told.expect("a text")).concat()
    });
    // One that has not found both GPUs has passed without a test.
    let has_passed =
        |told: &String| told.contains("1 passed") && !told.contains("skipped: a second device");
    let failed: Vec<String> = told.filter(|told| !has_passed(told)).collect();
    let first = failed.first().map_or("", String::as_str);
    assert!(
        failed.is_empty(),
        "{} of {COPIES} failed:\n{first}",
        failed.len()
    );
}

#[test]
fn two_texts_are_in_a_group_each_unless_devices_are_not_to_overlap() {
    every_pair(|name, whole, divided| {
        if !has_graphs(name) {
            return;
        }
        for (fixture, overlap, groups) in
            [(whole, true, 1), (divided, true, 2), (divided, false, 1)]
        {
            let config = EngineConfig {
                overlap,
                ..EngineConfig::default()
            };
            let mut engine = engine(fixture, &config);
            for length in [5, 9] {
                add(&mut engine, request(&whole.prompt[..length], 40));
            }
            let mut most = 0;
            while !engine.is_idle() {
                engine.step().expect("a device that works");
                most = most.max(engine.graphs().recordings);
            }
            assert_eq!(most, groups, "{name}");
        }
    });
}

#[test]
fn prefixes_that_are_kept_are_the_same_on_two_devices() {
    every_pair(|name, whole, divided| {
        if compiles_slowly(name) {
            return;
        }
        let any = text(100);
        let config = EngineConfig {
            drafts: 1,
            page: PAGE,
            prefill_chunk: 18,
            prefix_bytes: 1 << 22,
            exact_prefix: true,
            ..EngineConfig::default()
        };
        let requests = [40, 70, 75, 40].map(|length| request(&any[..length], 12));
        let run = |fixture: &Fixture| {
            let mut engine = engine(fixture, &config);
            let texts = requests.iter().map(|own| {
                let id = add(&mut engine, own.clone());
                let mut texts = Texts::new();
                let mut most = 0;
                while !engine.is_idle() {
                    let before = engine.progress(id).map_or(0, |own| own.processed);
                    collect(engine.step().expect("a device that works"), &mut texts);
                    let after = engine.progress(id).map_or(before, |own| own.processed);
                    most = most.max(after - before);
                }
                (texts.remove(&id), most)
            });
            texts.collect::<Vec<_>>()
        };
        let (actual, expected) = (run(divided), run(whole));
        assert_eq!(actual, expected, "{name}");
        assert!(actual[1].1 > 18, "{name}: no prefix was used");
    });
}

#[test]
fn trained_models_with_either_drafter_have_the_same_texts_on_three_devices() {
    let flex = Device::flex();
    for (dir, drafts) in [("assets/ds4-tiny", 2), ("assets/ds4-tiny-dspark", 4)] {
        let checkpoint = Checkpoint::open(&root().join(dir)).expect("it is a checkpoint");
        let options = LoadOptions {
            expand: true,
            ..LoadOptions::default()
        };
        let whole = checkpoint.load(&options, &flex).expect("it loads");
        let layers = whole.layers.len();
        // The first run has some of the layers that a drafter reads, or all of them.
        let devices = [flex.clone(), flex.clone(), flex.clone()];
        let divided = placed(&whole, &devices, &[layers - 2, 1, 1]);
        let config = EngineConfig {
            drafts,
            ..EngineConfig::default()
        };
        let requests = [
            request(&text(20), 24),
            Request {
                sampling: sampled(5),
                ..request(&text(7), 24)
            },
        ];
        let [expected, actual] = [&whole, &divided].map(|model| {
            let mut engine = Engine::new(model, config.clone()).expect("valid options");
            let texts = together(&mut engine, &requests);
            (texts, engine.stats().clone())
        });
        assert_eq!(actual, expected, "{dir}");
        assert!(actual.1.drafted > 0, "{dir}");
    }
}

#[test]
fn the_dspark_drafter_has_the_same_texts_on_two_devices_of_each_kind() {
    let dir = root().join("assets/ds4-tiny-dspark");
    let checkpoint = Checkpoint::open(&dir).expect("it is a checkpoint");
    for (name, pair) in pairs() {
        if compiles_slowly(&name) {
            continue;
        }
        let options = LoadOptions {
            expand: name == "flex",
            ..LoadOptions::default()
        };
        let whole = checkpoint.load(&options, &pair[0]).expect("it loads");
        let layers = whole.layers.len();
        let divided = placed(&whole, &pair, &[layers - 1, 1]);
        let config = EngineConfig {
            drafts: 3,
            ..EngineConfig::default()
        };
        let requests = [request(&text(20), 40), request(&text(9), 40)];
        let [expected, actual] = [&whole, &divided].map(|model| {
            let mut engine = Engine::new(model, config.clone()).expect("valid options");
            (together(&mut engine, &requests), engine.stats().clone())
        });
        assert_eq!(actual, expected, "{name}");
    }
}

/// Layers of V4-Flash with few experts, on one GPU and on two.
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
    let devices = [first.clone(), second.clone()];
    let divided = placed(&whole, &devices, &[layers / 2, layers - layers / 2]);
    [whole, divided]
}

pub(crate) fn two_gpus() -> Option<[Device; 2]> {
    let gpus = [0, 1].map(|index| DeviceSpec::Cuda(index).init());
    match gpus {
        [Ok(first), Ok(second)] => Some([first, second]),
        [Err(error), _] | [_, Err(error)] => {
            eprintln!("skipped: two GPUs ({error})");
            None
        }
    }
}

#[test]
fn twelve_layers_of_flash_have_the_same_texts_on_two_gpus() {
    let Some(gpus) = two_gpus() else {
        return;
    };
    let start = std::time::Instant::now();
    let models = flash(12, &gpus);
    println!("made in {:.1} s", start.elapsed().as_secs_f64());
    let prompt: Vec<u32> = (0..700).map(|place| place * 7919 % 8192).collect();
    for (drafts, lanes) in [(0, 1), (1, 4), (3, 4)] {
        let requests: Vec<Request> = (0..lanes)
            .map(|index| {
                let kinds = [Default::default(), sampled(3)];
                Request {
                    sampling: kinds[index % 2].clone(),
                    ..request(&prompt[..9 + 180 * index], 500 / lanes + 20 * index)
                }
            })
            .collect();
        let [expected, actual] = models.each_ref().map(|model| {
            let config = EngineConfig {
                drafts,
                lanes,
                context: Some(2048),
                ..EngineConfig::default()
            };
            let start = std::time::Instant::now();
            let engine = Engine::new(model, config).expect("valid options");
            // Drafts of random weights are never right.
            let mut engine = match drafts {
                0 => engine,
                _ => engine.with_acceptance(0.7, 5),
            };
            let texts = joining(&mut engine, &requests);
            let tokens: usize = texts.iter().map(Vec::len).sum();
            println!(
                "{drafts} drafts, {lanes} lanes, {} device(s): {tokens} tokens in {:.2} s, {} \
                 replays, refused: {:?}",
                model.placement.runs().len(),
                start.elapsed().as_secs_f64(),
                engine.replays(),
                engine.graph_refusal()
            );
            (
                texts,
                engine.replays(),
                engine.graph_refusal().map(str::to_owned),
            )
        });
        for (index, (actual, expected)) in actual.0.iter().zip(&expected.0).enumerate() {
            let shorter = actual.len().min(expected.len());
            let first = (0..shorter).find(|at| actual[*at] != expected[*at]);
            let what = format!("{drafts} drafts, {lanes} lanes: text {index} of {shorter} tokens");
            assert_eq!(first, None, "{what} differs first at this token");
            assert!(index == 1 || actual.len() == expected.len(), "{what}");
        }
        assert_eq!(actual.2, None, "{drafts} drafts: recording was refused");
        let replays = [actual.1, expected.1];
        assert!(
            replays[0] * 2 > replays[1],
            "{drafts} drafts: replays {replays:?}"
        );
    }
}

#[test]
fn weights_that_are_drawn_take_the_bytes_of_the_plan() {
    for (name, pair) in pairs() {
        if compiles_slowly(&name) || pair[0] == pair[1] {
            continue;
        }
        let config = ModelConfig {
            vocab_size: 1024,
            n_routed_experts: 16,
            layers: ModelConfig::new().layers[..4].to_vec(),
            ..ModelConfig::new()
        };
        let named = pair.clone().map(|device| (format!("{device:?}"), device));
        let devices = Devices::new(named.into()).expect("two devices");
        let devices = devices.with_split(Some(vec![3, 1]));
        let model = config.init_packed_on(FloatDType::BF16, Activations::Exact, &devices);
        let model = model.expect("four layers");
        for (index, run) in model.placement.runs().iter().enumerate() {
            assert_eq!(run.device, pair[index], "{name}");
            for layer in &model.layers[run.layers.clone()] {
                assert_eq!(layer.devices(), vec![run.device.clone()], "{name}");
            }
        }
        let mtp = model.mtp.as_ref().map(Module::devices);
        assert_eq!(mtp, Some(vec![pair[1].clone()]), "{name}");
    }
}

/// The configuration of the checkpoint of V4-Flash that the tool writes, and the bytes of its model
/// in bf16 with caches for 128 Ki positions. `None` without Python.
pub(crate) fn sparse_v4_flash() -> Option<(ModelConfig, ModelBytes)> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let tool = root().join("tools/sparse-checkpoint.py");
    let written = std::process::Command::new("python3")
        .arg(tool)
        .arg(dir.path())
        .output();
    let Ok(written) = written else {
        eprintln!("skipped: python3");
        return None;
    };
    assert!(written.status.success(), "{written:?}");
    let checkpoint = Checkpoint::open(dir.path()).expect("it is a checkpoint");
    let options = LoadOptions {
        dtype: FloatDType::BF16,
        ..LoadOptions::default()
    };
    let bytes = checkpoint.model_bytes(&options, &Device::flex(), 131_072);
    // Nothing is missing, unexpected or of another shape.
    let bytes = bytes.expect("all tensors of the release");
    Some((checkpoint.config().clone(), bytes))
}

#[test]
fn the_sparse_checkpoint_of_the_tool_has_all_tensors_of_v4_flash() {
    let Some((config, bytes)) = sparse_v4_flash() else {
        return;
    };
    assert_eq!(config, ModelConfig::new());
    let names = ["first", "second"].map(str::to_owned);
    let plan = Plan::balanced(&bytes, &names).expect("43 layers");
    let largest = bytes.layers.iter().map(|layer| layer.total()).max();
    let [first, second] = [0, 1].map(|index| plan.bytes[index].total());
    assert!(Some(first.abs_diff(second)) <= largest, "{plan:?}");
    let h200 = [Some(141_000_000_000); 2];
    assert_eq!(plan.check(&names, &h200), Ok(()), "{plan:?}");
    let whole = Plan::balanced(&bytes, &names[..1]).expect("43 layers");
    let error = whole
        .check(&names[..1], &h200[..1])
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("first: layers 0 to 42 take "), "{error}");
}
