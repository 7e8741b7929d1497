//! The memory of devices that caches may take.

use burn::tensor::Device;

use super::scheduler::Size;
use super::setup::Setup;
use crate::cache::CacheError;
use crate::generate::error::GenerateError;

/// Bytes of a device that are left for what steps and chunks of prompts work with: a tenth of what
/// is free, and so many where it has four times as many.
const WORKSPACE: u64 = 2 << 30;

/// Bytes on each of some devices.
type DeviceBytes = Vec<(Device, usize)>;

fn add_bytes(all: &mut DeviceBytes, device: &Device, bytes: usize) {
    match all.iter_mut().find(|(own, _)| own == device) {
        Some((_, sum)) => *sum = sum.saturating_add(bytes),
        None => all.push((device.clone(), bytes)),
    }
}

/// What caches may take of so many free bytes.
fn without_workspace(free: u64) -> u64 {
    free - (free / 10).max(WORKSPACE.min(free / 4))
}

impl Setup<'_> {
    /// Bytes that caches take on each device.
    fn bytes_by_device(
        &self,
        [capacity, texts, padding]: Size,
    ) -> Result<DeviceBytes, GenerateError> {
        let model = self.model.config();
        let options = self.cache_config([capacity, 1, padding]);
        let (layout, placement) = self.model.trunk_cache();
        let mut all = DeviceBytes::new();
        for run in placement.runs() {
            let own = layout.of_layers(run.layers.clone()).bytes(options)?;
            add_bytes(&mut all, &run.device, own);
        }
        if let Some(drafter) = &self.drafter {
            add_bytes(
                &mut all,
                self.device(),
                drafter.layout(model).bytes(options)?,
            );
        }
        for (_, bytes) in &mut all {
            *bytes = bytes.saturating_mul(texts);
        }
        Ok(all)
    }

    /// Bytes that caches take.
    pub(super) fn bytes_of(&self, size: Size) -> Result<usize, GenerateError> {
        let all = self.bytes_by_device(size)?;
        let bytes = all.iter().map(|(_, bytes)| *bytes);
        Ok(bytes.fold(0, usize::saturating_add))
    }

    /// Bytes that the caches of one lane of so many positions take.
    pub(super) fn bytes(&self, capacity: usize) -> Result<usize, GenerateError> {
        self.bytes_of([capacity, 1, 0])
    }

    /// The most bytes that caches may take, from the memory that is free now; `None` where no
    /// device tells.
    pub(super) fn free_for_caches(&self) -> Result<Option<usize>, GenerateError> {
        let all = self.bytes_by_device([self.config.capacity, 1, 0])?;
        let whole: usize = all.iter().map(|(_, bytes)| *bytes).sum();
        let prefixes = 2 * self.config.prefix_bytes as u128;
        let bounds = all.iter().filter_map(|(device, own)| {
            let left = without_workspace((self.free_memory)(device)?);
            // All devices have as much of each cache as of this one.
            let bytes = u128::from(left) * whole as u128 / (*own).max(1) as u128;
            // What is kept makes way for texts, so it does not take most of it from the start.
            let bytes = bytes - prefixes.min(bytes / 2);
            Some(usize::try_from(bytes).unwrap_or(usize::MAX))
        });
        Ok(bounds.min())
    }

    /// Whether all devices have memory for some caches, beside what there is but for so many bytes.
    pub(super) fn has_place(
        &self,
        caches: &[Size],
        dropped: &[(&Device, u64)],
    ) -> Result<bool, GenerateError> {
        let mut needed = DeviceBytes::new();
        for size in caches.iter().filter(|[_, texts, _]| *texts > 0) {
            for (device, own) in self.bytes_by_device(*size)? {
                add_bytes(&mut needed, &device, own);
            }
        }
        Ok(needed.iter().all(|(device, own)| {
            let dropped = dropped.iter().filter(|(of, _)| *of == device);
            let dropped: u64 = dropped.map(|(_, bytes)| bytes).sum();
            let free = (self.free_memory)(device).map(|free| free.saturating_add(dropped));
            free.is_none_or(|free| *own as u64 <= without_workspace(free))
        }))
    }

    /// Whether the rotary tables of caches of so many positions can be made at once. If not, what
    /// they hold begins to be worked out.
    pub(super) fn has_tables_ready(&self, positions: usize) -> bool {
        let (layout, _) = self.model.trunk_cache();
        let drafter = self.drafter.as_ref();
        let draft = drafter.map(|drafter| drafter.layout(self.model.config()));
        let layouts = std::iter::once(layout).chain(draft);
        layouts.fold(true, |all, layout| all & layout.has_tables_ready(positions))
    }
}

/// What was made, or `None` where there was no memory for it.
pub(super) fn if_fitting<T>(made: Result<T, GenerateError>) -> Result<Option<T>, GenerateError> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(GenerateError::Cache(CacheError::OutOfMemory { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::cell::Cell;

    use burn::tensor::Device;

    use super::super::{Engine, EngineConfig, Output, Request};
    use crate::generate::error::GenerateError;
    use crate::generate::request_id::RequestId;
    use crate::pipeline::Pipeline;
    use crate::repository;

    /// Lanes whose caches take more than a step works with.
    #[cfg(all(feature = "wgpu", not(feature = "fusion")))]
    const CAPACITY: usize = 4096;
    #[cfg(all(feature = "wgpu", not(feature = "fusion")))]
    const LANES: usize = 8;

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
            capacity: 64,
            cache_bytes,
            ..EngineConfig::default()
        }
    }

    /// Steps until no text is left. Returns what became of each of some requests, and how many were
    /// decoded at a time at most.
    fn finish(
        engine: &mut Engine,
        requests: &[RequestId],
    ) -> (Vec<Result<Vec<u32>, String>>, usize) {
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
        let lane = engine.cache_bytes() as u64;
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
        let long = prompt.repeat(20);
        FREE.set(8 << 30);
        let mut engine = Engine::with_memory(&pipeline.model, config(None), free)
            .expect("a valid configuration");
        let first = engine.add(Request::new(&prompt, 12)).expect("it fits");
        let begun = engine.step().expect("a device that works");
        let mut begun = tokens(begun);
        FREE.set(0);
        let more = [&long, &prompt].map(|prompt| engine.add(Request::new(prompt, 12)));
        let [second, third] = more.map(|id| id.expect("it may wait"));
        let (texts, _) = finish(&mut engine, &[first, second, third]);
        begun.extend(texts[0].iter().flatten());
        assert_eq!(begun.len(), 12);
        let error = texts[1].as_ref().expect_err("its lane is larger");
        assert!(error.contains("do not fit in memory"), "{error}");
        assert!(texts[2].is_err(), "the vacant lane made way");
        FREE.set(8 << 30);
        let again = [&long, &prompt].map(|prompt| engine.add(Request::new(prompt, 12)));
        let again = again.map(|id| id.expect("it fits"));
        let (again, _) = finish(&mut engine, &again);
        assert_eq!(again[0].as_ref().map(Vec::len), Ok(12));
        assert_eq!(again[1], Ok(begun));
        // A bound that no lane fits is an error at once.
        let config = config(Some(1000));
        let mut bounded =
            Engine::with_memory(&pipeline.model, config, free).expect("a valid configuration");
        let error = bounded.add(Request::new(&prompt, 12));
        assert!(matches!(error, Err(GenerateError::CacheMemory { .. })));
    }

    #[test]
    fn caches_of_texts_that_are_made_longer_take_the_bytes_that_are_planned() {
        let pipeline = pipeline();
        FREE.set(8 << 30);
        let engine = Engine::with_memory(&pipeline.model, config(None), free);
        let setup = engine.expect("a valid configuration").setup;
        for size in [[64, 1, 0], [64, 3, 0], [64, 3, 40]] {
            let bytes = setup.new_caches(size).expect("they fit").bytes();
            assert_eq!(bytes, setup.bytes_of(size).expect("a cache"), "{size:?}");
        }
    }

    #[test]
    fn a_copy_has_place_if_what_is_dropped_for_it_leaves_enough() {
        let pipeline = pipeline();
        FREE.set(8 << 30);
        let engine = Engine::with_memory(&pipeline.model, config(None), free);
        let engine = engine.expect("a valid configuration");
        let (setup, copy) = (&engine.setup, [[64, 2, 0]]);
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

    #[cfg(all(feature = "wgpu", not(feature = "fusion")))]
    #[test]
    fn the_copy_of_the_caches_does_not_count_as_memory_of_a_recording() {
        let Some((_alone, pipeline, prompt)) = on_wgpu() else {
            return;
        };
        let config = EngineConfig {
            capacity: CAPACITY,
            lanes: LANES,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&pipeline.model, config).expect("a valid configuration");
        for _ in 0..LANES {
            engine.add(Request::new(&prompt, 60)).expect("it fits");
        }
        while engine.graphs().recordings == 0 {
            engine.step().expect("a device that works");
        }
        let caches = engine.setup.bytes_of([CAPACITY, engine.lanes(), 0]);
        let caches = caches.expect("a cache") as u64;
        let bytes = engine.graphs().bytes.expect("the device tells");
        assert!(bytes < caches, "{bytes} of {caches} bytes");
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
            capacity: 256,
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
        let needed = engine.setup.bytes_of([prompt.len(), 1, 0]);
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
        let mut alone = Engine::with_memory(&pipeline.model, config_alone(), free)
            .expect("a valid configuration");
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
}
