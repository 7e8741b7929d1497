use std::cell::Cell;

use burn::tensor::Device;

use super::super::{Engine, EngineConfig, Output, Request};
use crate::generate::error::GenerateError;
use crate::generate::request_id::RequestId;
use crate::pipeline::Pipeline;
use crate::repository;

thread_local! {
    /// What devices of this thread have left.
    static FREE: Cell<u64> = const { Cell::new(0) };
}

fn free(_: &Device) -> Option<u64> {
    Some(FREE.get())
}

fn pipeline() -> Pipeline {
    let dir = repository::path("assets/ds4-tiny");
    Pipeline::open(&dir, &Device::flex()).expect("an asset")
}

fn config(cache_bytes: Option<usize>) -> EngineConfig {
    EngineConfig {
        page: 16,
        lanes: 4,
        context: Some(256),
        cache_bytes,
        ..EngineConfig::default()
    }
}

/// Steps until no text is left. Returns what became of each of some requests, and how many were
/// decoded at a time at most.
fn finish(engine: &mut Engine, requests: &[RequestId]) -> (Vec<Result<Vec<u32>, String>>, usize) {
    let mut texts = vec![Ok(Vec::new()); requests.len()];
    let mut most = 0;
    while !engine.is_idle() {
        for output in engine.step().expect("a device that works") {
            let known = requests
                .iter()
                .position(|request| *request == output.request);
            let text = &mut texts[known.expect("a request of this test")];
            match (output.token, &mut *text) {
                (Ok(token), Ok(tokens)) => tokens.push(token),
                (Err(error), _) => *text = Err(error.to_string()),
                (Ok(_), Err(error)) => panic!("a token after {error}"),
            }
        }
        most = most.max(engine.running());
    }
    (texts, most)
}

fn tokens(outputs: Vec<Output>) -> Vec<u32> {
    let tokens = outputs.into_iter().map(|output| output.token);
    tokens.map(|token| token.expect("it has memory")).collect()
}

#[test]
fn caches_take_what_is_left_at_most() {
    let pipeline = pipeline();
    let limit = |free_bytes: u64, wanted: Option<usize>| {
        FREE.set(free_bytes);
        let engine = Engine::with_memory(&pipeline.model, config(wanted), free);
        engine.expect("a valid configuration").cache_limit()
    };
    assert_eq!(limit(100 << 30, None), Some(90 << 30));
    assert_eq!(limit(8 << 30, None), Some(6 << 30));
    assert_eq!(limit(4 << 20, None), Some(3 << 20));
    assert_eq!(limit(8 << 30, Some(1 << 30)), Some(1 << 30));
    assert_eq!(limit(8 << 30, Some(7 << 30)), Some(6 << 30));
    let untold = Engine::with_memory(&pipeline.model, config(None), |_| None);
    assert_eq!(untold.expect("a valid configuration").cache_limit(), None);
}

#[test]
fn texts_wait_for_memory_that_a_device_does_not_have_and_others_go_on() {
    let pipeline = pipeline();
    let prompt = pipeline.encode("And God said,").expect("a text");
    let request = || Request::new(&prompt, 12);
    FREE.set(8 << 30);
    let engine = || Engine::with_memory(&pipeline.model, config(None), free);
    let mut alone = engine().expect("a valid configuration");
    let ids = [alone.add(request()).expect("it fits")];
    let (expected, _) = finish(&mut alone, &ids);

    // One lane, and no copy of it.
    let mut engine = engine().expect("a valid configuration");
    let mut ids = vec![engine.add(request()).expect("it fits")];
    let begun = engine.step().expect("a device that works");
    let mut first = tokens(begun);
    // Caches for a prompt, but not for two lanes.
    let lane = engine.setup.bytes_of([1, 0]).expect("a cache") as u64;
    FREE.set(2 * lane);
    ids.extend([0; 2].map(|_| engine.add(request()).expect("it may wait")));
    let (mut texts, most) = finish(&mut engine, &ids);
    assert_eq!(most, 1, "others wait");
    first.extend(texts.remove(0).expect("it has memory"));
    texts.push(Ok(first));
    for text in texts {
        assert_eq!(text, expected[0]);
    }
    // With memory, they are decoded together.
    FREE.set(8 << 30);
    let ids = [0; 2].map(|_| engine.add(request()).expect("it fits"));
    assert_eq!(finish(&mut engine, &ids).1, 2);
}

#[test]
fn a_text_for_which_there_is_no_memory_ends_alone() {
    let pipeline = pipeline();
    let prompt = pipeline.encode("And God said,").expect("a text");
    FREE.set(8 << 30);
    let mut engine =
        Engine::with_memory(&pipeline.model, config(None), free).expect("a valid configuration");
    let first = engine.add(Request::new(&prompt, 12)).expect("it fits");
    let begun = engine.step().expect("a device that works");
    let mut begun = tokens(begun);
    FREE.set(0);
    let second = engine.add(Request::new(&prompt, 12)).expect("it may wait");
    let (texts, _) = finish(&mut engine, &[first, second]);
    begun.extend(texts[0].iter().flatten());
    assert_eq!(begun.len(), 12);
    let error = texts[1].as_ref().expect_err("its prompt takes more");
    assert!(error.contains("do not fit in memory"), "{error}");
    FREE.set(8 << 30);
    let again = [engine.add(Request::new(&prompt, 12)).expect("it fits")];
    let (again, _) = finish(&mut engine, &again);
    assert_eq!(again[0], Ok(begun));
    // A bound that no text fits is an error at once.
    let config = config(Some(1000));
    let mut bounded =
        Engine::with_memory(&pipeline.model, config, free).expect("a valid configuration");
    let error = bounded.add(Request::new(&prompt, 12));
    assert!(matches!(error, Err(GenerateError::CacheMemory { .. })));
}

#[test]
fn rings_and_pages_take_the_bytes_that_are_planned() {
    let pipeline = pipeline();
    FREE.set(8 << 30);
    let engine = |bytes| {
        let engine = Engine::with_memory(&pipeline.model, config(bytes), free);
        engine.expect("a valid configuration")
    };
    let setup = engine(None).setup;
    for size in [[1, 0], [3, 0], [3, 40]] {
        let bytes = setup.new_caches(size).expect("they fit").bytes();
        assert_eq!(bytes, setup.bytes_of(size).expect("a cache"), "{size:?}");
    }
    // All pages that four texts of 256 positions can have, and a step of each.
    let most = 4 * setup.pool.pages_for(setup.reach());
    assert_eq!((setup.budget.pages, most), (68, 68));
    let (ring, page) = (
        setup.bytes_of([1, 0]).unwrap(),
        setup.pool.page_bytes()[0].1,
    );
    // Half of what there is for six, where four lanes want no more.
    let left = |rings: usize| (rings * ring / page).saturating_sub(1).min(most);
    for (whole, pages, rings) in [(12, left(6), 6), (4, left(2), 2), (2, 0, 2), (1, 0, 1)] {
        let budget = engine(Some(whole * ring)).setup.budget;
        assert_eq!(
            (budget.pages, budget.rings),
            (pages, rings * ring),
            "{whole}"
        );
    }
    // They are made at once, where the device tells what it has.
    assert!(setup.budget.at_once && setup.make_pages(1));
    assert_eq!((setup.pool.len(), setup.pages_to_make()), (68, 0));
    // Elsewhere some, and then twice as many.
    let large = EngineConfig {
        page: 1024,
        lanes: 64,
        ..EngineConfig::default()
    };
    let untold = Engine::with_memory(&pipeline.model, large, |_| None);
    let setup = untold.expect("a valid configuration").setup;
    assert_eq!(setup.budget.pages, 64 * 4);
    let first = super::FIRST_BYTES / setup.pool.page_bytes()[0].1;
    for (least, is_made, len) in [
        (3, true, first),
        (1, true, 2 * first),
        (200, false, 2 * first),
        (120, true, 2 * first + 120),
    ] {
        assert_eq!(setup.make_pages(least), is_made, "{least} to {len}");
        assert_eq!(setup.pool.len(), len);
    }
}

#[test]
fn a_copy_has_place_if_what_is_dropped_for_it_leaves_enough() {
    let pipeline = pipeline();
    FREE.set(8 << 30);
    let engine = Engine::with_memory(&pipeline.model, config(None), free);
    let engine = engine.expect("a valid configuration");
    let (setup, copy) = (&engine.setup, [[2, 0]]);
    let bytes = setup.bytes_of(copy[0]).expect("a cache") as u64;
    // A quarter of so little is left for work.
    let needed = bytes.div_ceil(3) * 4;
    let (device, other) = (setup.device(), Device::flex());
    assert_eq!(*device, other);
    FREE.set(needed - 8);
    for (dropped, expected) in [(0, false), (4, false), (8, true)] {
        let has_place = setup.has_place(&copy, &[(device, dropped)]);
        assert_eq!(has_place.expect("a cache"), expected, "{dropped} bytes");
    }
}

/// The shipped model on wgpu, and a prompt, for as long as the guard is held. Reports where
/// there is no such device.
///
/// # Panics
///
/// Where `DS4_REQUIRE` names it.
#[cfg(all(feature = "wgpu", not(feature = "fusion")))]
fn on_wgpu() -> Option<(std::sync::MutexGuard<'static, ()>, Pipeline, Vec<u32>)> {
    use burn_ds4_ops::device::DeviceSpec;

    let alone = repository::alone_on_wgpu();
    let required = std::env::var("DS4_REQUIRE").unwrap_or_default();
    let is_required = required.split(',').any(|name| name.trim() == "wgpu");
    let device = DeviceSpec::Wgpu.init();
    let device = device.inspect_err(|error| {
        assert!(!is_required, "DS4_REQUIRE names wgpu: {error}");
        eprintln!("skipped: wgpu ({error})");
    });
    let dir = repository::path("assets/ds4-tiny");
    let pipeline = Pipeline::open(&dir, &device.ok()?).expect("an asset");
    let prompt = pipeline.encode("And God said,").expect("a text");
    Some((alone, pipeline, prompt))
}

/// Decodes texts that need twice as many pages as there are at first, and more than that.
fn outgrow_a_pool(pipeline: &Pipeline, has_graphs: bool) {
    let prompt = pipeline.encode("And God said,").expect("a text");
    let request = |tokens| Request {
        ignore_eos: true,
        ..Request::new(&prompt, tokens)
    };
    let run = |pages: usize| {
        let config = config(None);
        let engine = Engine::with_memory(&pipeline.model, config, |_| None);
        let mut engine = engine.expect("a valid configuration");
        engine.setup.pool.grow(pages).expect("there is memory");
        let ids = [60, 50].map(|tokens| engine.add(request(tokens)).expect("it fits"));
        let (texts, _) = finish(&mut engine, &ids);
        assert_eq!(engine.replays() > 20, has_graphs);
        (texts, engine.setup.pool.len())
    };
    let [(texts, few), (expected, many)] = [1, 40].map(run);
    assert_eq!((few, many), (12, 40));
    assert_eq!(texts, expected);
}

#[test]
fn a_pool_becomes_larger_while_texts_are_decoded() {
    outgrow_a_pool(&pipeline(), false);
}

#[cfg(all(feature = "wgpu", not(feature = "fusion")))]
#[test]
fn a_pool_becomes_larger_while_steps_are_replayed() {
    if let Some((_alone, pipeline, _)) = on_wgpu() {
        outgrow_a_pool(&pipeline, true);
    }
}

#[cfg(all(feature = "wgpu", not(feature = "fusion")))]
#[test]
fn what_is_recorded_and_not_replayed_makes_way_for_a_text_that_waits() {
    let Some((_alone, pipeline, prompt)) = on_wgpu() else {
        return;
    };
    let request = |tokens| Request {
        ignore_eos: true,
        ..Request::new(&prompt, tokens)
    };
    let config = EngineConfig {
        lanes: 4,
        context: Some(256),
        ..EngineConfig::default()
    };
    FREE.set(8 << 30);
    let mut engine =
        Engine::with_memory(&pipeline.model, config, free).expect("a valid configuration");
    let long = engine.add(request(120)).expect("it fits");
    let listed = Request {
        log_probs: Some(0),
        ..request(8)
    };
    engine.add(listed).expect("it fits");
    let mut told = Vec::new();
    let mut step = |engine: &mut Engine| {
        let outputs = engine.step().expect("a device that works");
        told.extend(outputs.into_iter().filter(|own| own.request == long));
    };
    // With log-probabilities, and then without.
    while engine.graphs().recordings < 2 {
        step(&mut engine);
        assert!(engine.progress(long).is_some(), "no step is recorded");
    }
    let (replays, lanes) = (engine.replays(), engine.lanes());
    // Its lane is there. For its prompt, there is a little less than it takes.
    let needed = engine.setup.bytes_of([1, 0]);
    let needed = needed.expect("a cache") as u64;
    FREE.set(needed.div_ceil(3) * 4 - 8);
    let waits = engine.add(request(3)).expect("it may wait");
    step(&mut engine);
    assert_eq!((engine.waiting(), engine.graphs().recordings), (1, 1));
    step(&mut engine);
    // The other one is replayed.
    assert_eq!((engine.waiting(), engine.graphs().recordings), (1, 1));
    assert!(engine.replays() > replays);
    FREE.set(8 << 30);
    step(&mut engine);
    assert_eq!((engine.running(), engine.lanes()), (2, lanes));
    assert!(engine.progress(waits).is_some());
    while !engine.is_idle() {
        step(&mut engine);
    }
    // A text that comes to an idle lane takes the memory of all that is recorded.
    engine.add(request(60)).expect("it fits");
    while !engine.is_idle() {
        step(&mut engine);
    }
    assert!(engine.graphs().recordings > 0);
    FREE.set(0);
    engine.add(request(3)).expect("it may wait");
    step(&mut engine);
    assert_eq!((engine.waiting(), engine.graphs().recordings), (1, 0));
    FREE.set(8 << 30);
    while !engine.is_idle() {
        step(&mut engine);
    }
    FREE.set(8 << 30);
    let mut alone =
        Engine::with_memory(&pipeline.model, config_alone(), free).expect("a valid configuration");
    alone.add(request(120)).expect("it fits");
    let mut expected = Vec::new();
    while !alone.is_idle() {
        expected.extend(alone.step().expect("a device that works"));
    }
    assert_eq!(tokens(told), tokens(expected));
}

#[cfg(all(feature = "wgpu", not(feature = "fusion")))]
fn config_alone() -> EngineConfig {
    EngineConfig {
        lanes: 1,
        graphs: false,
        ..config(None)
    }
}
