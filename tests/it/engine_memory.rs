//! What the engine does where lanes, prompts and kept prefixes share a bounded memory, and where
//! texts of a measurement come and go.

use burn::tensor::{Device, FloatDType};
use ds4_model::generate::{Engine, EngineConfig, GenerateError, Request};

use crate::engine::{Texts, add, alone, collect, engine, request, together};
use crate::two_layers::{Fixture, text};

/// Positions of the smallest lanes; the next ones have four times as many.
const SMALL: usize = 32;
const LARGE: usize = 4 * SMALL;
/// More steps than any of these texts takes.
const MOST_STEPS: usize = 400;

fn fixture() -> Fixture {
    Fixture::open(&Device::flex(), FloatDType::F32, true)
}

fn config() -> EngineConfig {
    EngineConfig {
        capacity: SMALL,
        prefill_chunk: 16,
        graphs: false,
        ..EngineConfig::default()
    }
}

/// Bytes of one lane and of the caches of a prompt of so many tokens, which is longer than a chunk.
fn bytes(fixture: &Fixture, capacity: usize, prompt: usize) -> usize {
    let config = EngineConfig {
        capacity,
        ..config()
    };
    let mut engine = engine(fixture, &config);
    add(&mut engine, request(&text(prompt), 1));
    engine.step().expect("a device that works");
    assert_eq!((engine.running(), engine.waiting()), (0, 1));
    engine.cache_bytes()
}

/// Bytes of one lane.
fn lane_bytes(fixture: &Fixture, capacity: usize) -> usize {
    let config = EngineConfig {
        capacity,
        ..config()
    };
    let mut engine = engine(fixture, &config);
    add(&mut engine, request(&text(2), 4));
    engine.step().expect("a device that works");
    assert_eq!(engine.running(), 1);
    engine.cache_bytes()
}

/// Steps until no text is left, which must not take for ever. Returns the texts, and how many of
/// them were being decoded at a time at most.
fn finish(engine: &mut Engine, maximum: usize) -> (Texts, usize) {
    let (mut texts, mut most) = (Texts::new(), 0);
    for _ in 0..MOST_STEPS {
        collect(engine.step().expect("a device that works"), &mut texts);
        most = most.max(engine.running());
        assert!(engine.cache_bytes() <= maximum);
        if engine.is_idle() {
            return (texts, most);
        }
    }
    panic!("{} running, {} waiting", engine.running(), engine.waiting());
}

#[test]
fn small_lanes_that_are_vacant_make_way_for_more_large_ones() {
    let fixture = fixture();
    let (prompt, any) = (60, text(80));
    let small = lane_bytes(&fixture, SMALL);
    let large = lane_bytes(&fixture, LARGE);
    // Two large lanes with a prompt on its way, but no small one beside them.
    let maximum = large + bytes(&fixture, LARGE, prompt) + small / 2;
    let config = EngineConfig {
        cache_bytes: Some(maximum),
        ..config()
    };
    let mut engine = engine(&fixture, &config);
    together(&mut engine, &[request(&any[..5], 3)]);
    assert_eq!(engine.cache_bytes(), small, "one is kept");
    let requests = [0, 20].map(|start| request(&any[start..start + prompt], 30));
    let ids = requests.clone().map(|request| add(&mut engine, request));
    let (texts, most) = finish(&mut engine, maximum);
    assert_eq!(most, 2);
    for (id, request) in ids.iter().zip(&requests) {
        assert_eq!(texts[id], alone(&fixture, request));
    }
}

#[test]
fn a_prompt_that_begins_like_a_longer_text_takes_no_more_memory_than_its_own() {
    let fixture = fixture();
    let any = text(100);
    let maximum = bytes(&fixture, LARGE, 100);
    let config = EngineConfig {
        cache_bytes: Some(maximum),
        prefix_bytes: 1 << 30,
        exact_prefix: true,
        ..config()
    };
    let mut engine = engine(&fixture, &config);
    together(&mut engine, &[request(&any, 4)]);
    // The same for 40 tokens, then others, so that several chunks are left.
    let prompt = [&any[..40], &any[50..90]].concat();
    let own = request(&prompt, 10);
    let id = add(&mut engine, own.clone());
    engine.step().expect("a device that works");
    let progress = engine.progress(id).expect("it has not ended");
    assert_eq!(progress.processed, 48, "32 were known, 16 are a chunk");
    let (texts, _) = finish(&mut engine, maximum);
    assert_eq!(texts[&id], alone_in_chunks(&fixture, &own));
}

/// The text of a request by itself, its prompt in chunks of the same size.
fn alone_in_chunks(fixture: &Fixture, own: &Request) -> Vec<u32> {
    let mut engine = engine(fixture, &config());
    together(&mut engine, std::slice::from_ref(own)).remove(0)
}

#[test]
fn the_lane_of_a_prompt_is_made_once() {
    let fixture = fixture();
    let mut engine = engine(&fixture, &config());
    add(&mut engine, request(&text(100), 3));
    for chunk in 1..=6 {
        engine.step().expect("a device that works");
        assert_eq!(
            engine.lanes(),
            1,
            "chunk {chunk}: it is kept between chunks"
        );
    }
    engine.step().expect("a device that works");
    assert_eq!(engine.running(), 1);
}

/// Tokens of a prompt that begins like a short text which ended before, processed after one step,
/// with so many bytes for what is kept, and perhaps a long text in between.
fn processed(fixture: &Fixture, prefix_bytes: usize, long: bool) -> usize {
    let any = text(100);
    let config = EngineConfig {
        lanes: 1,
        prefix_bytes,
        ..config()
    };
    let mut engine = engine(fixture, &config);
    together(&mut engine, &[request(&any[..20], 2)]);
    if long {
        together(&mut engine, &[request(&any[20..], 80)]);
    }
    let prompt = [&any[..20], &any[50..90]].concat();
    let id = add(&mut engine, request(&prompt, 2));
    engine.step().expect("a device that works");
    engine.progress(id).expect("it has not ended").processed
}

#[test]
fn a_text_of_128_ki_tokens_has_a_lane_of_its_own_size() {
    const TOKENS: usize = 128 << 10;
    let mut fixture = fixture();
    fixture.model.config.max_position_embeddings = 2 * TOKENS;
    let prompt: Vec<u32> = (0..TOKENS as u32).map(|position| position % 1000).collect();
    let short = request(&text(1), 10);
    let config = EngineConfig {
        graphs: false,
        ..EngineConfig::default()
    };
    // Rows of the long text are drawn; the short one has none before it.
    let mut engine = engine(&fixture, &config).with_random_contexts(0);
    let ids = [request(&prompt, 4), short.clone()].map(|request| add(&mut engine, request));
    let (mut texts, mut together) = (Texts::new(), None);
    while !engine.is_idle() {
        collect(engine.step().expect("a device that works"), &mut texts);
        let [long, short] = ids.map(|id| engine.capacity(id));
        let sizes = long.zip(short);
        together = together.or(sizes.map(|sizes| (sizes, engine.cache_bytes())));
    }
    assert_eq!(texts[&ids[0]].len(), 4);
    assert_eq!(texts[&ids[1]], alone(&fixture, &short));
    let (sizes, bytes) = together.expect("they were decoded side by side");
    assert_eq!(sizes, (2 * TOKENS, 1024));
    let lanes = lane_bytes(&fixture, 1024) + lane_bytes(&fixture, 2 * TOKENS);
    assert_eq!(bytes, lanes, "one lane of each size");

    // Where there is no memory for it, that is said before anything is allocated.
    let config = EngineConfig {
        cache_bytes: Some(bytes / 2),
        ..config
    };
    let mut engine = self::engine(&fixture, &config);
    let error = engine
        .add(request(&prompt, 4))
        .expect_err("it does not fit");
    assert!(
        matches!(error, GenerateError::CacheMemory { .. }),
        "{error}"
    );
    assert_eq!(engine.cache_bytes(), 0);
}

#[test]
fn a_text_that_is_too_large_to_be_kept_leaves_what_is_kept() {
    let fixture = fixture();
    let step = lane_bytes(&fixture, SMALL) / 32;
    let mut sizes = (0..100).map(|steps| steps * step);
    let enough = sizes.find(|bytes| processed(&fixture, *bytes, false) == 32);
    let enough = enough.expect("three lanes are enough for a text and a mark");
    assert!(enough > 0);
    assert_eq!(processed(&fixture, enough, true), 32);
}

#[test]
fn drafts_of_a_measurement_are_accepted_beside_vacant_lanes_and_at_the_end_of_the_context() {
    let mut fixture = fixture();
    let maximum = 40;
    fixture.model.config.max_position_embeddings = maximum;
    let config = EngineConfig {
        drafts: 3,
        lanes: 2,
        ..config()
    };
    let mut engine = engine(&fixture, &config).with_acceptance(0.9, 7);
    let requests = [request(&text(5), 2), request(&text(6), maximum)];
    let texts = together(&mut engine, &requests);
    assert_eq!((texts[0].len(), texts[1].len()), (2, maximum + 1 - 6));
    let stats = engine.stats();
    assert!(stats.accepted > stats.drafted / 2, "{stats:?}");
}
