//! What the engine does where lanes, prompts and kept prefixes share a bounded memory, and where
//! texts of a measurement come and go.

use burn::tensor::{Device, FloatDType};
use ds4_model::generate::{Engine, EngineConfig, GenerateError, Request};

use crate::engine::{Texts, add, alone, collect, engine, request, together};
use crate::two_layers::{Fixture, PAGE, text};

/// More steps than any of these texts takes.
const MOST_STEPS: usize = 400;

fn fixture() -> Fixture {
    Fixture::open(&Device::flex(), FloatDType::F32, true)
}

fn config() -> EngineConfig {
    EngineConfig {
        page: PAGE,
        prefill_chunk: 16,
        graphs: false,
        ..EngineConfig::default()
    }
}

/// Steps until no text is left, which must not take for ever. Returns the texts, and the most bytes
/// of caches.
fn finish(engine: &mut Engine) -> (Texts, usize) {
    let (mut texts, mut most) = (Texts::new(), 0);
    for _ in 0..MOST_STEPS {
        collect(engine.step().expect("a device that works"), &mut texts);
        most = most.max(engine.cache_bytes());
        if engine.is_idle() {
            return (texts, most);
        }
    }
    panic!("{} running, {} waiting", engine.running(), engine.waiting());
}

#[test]
fn a_prompt_that_begins_like_a_kept_text_shares_its_pages() {
    let fixture = fixture();
    let any = text(100);
    // Seven of the kept text, and four besides the two that the prompt shares with it.
    let config = EngineConfig {
        pages: Some(11),
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
    let (texts, _) = finish(&mut engine);
    assert_eq!(texts[&id], alone_in_chunks(&fixture, &own));
    // With one page less, the kept text makes way.
    let config = EngineConfig {
        pages: Some(10),
        ..config
    };
    let mut engine = self::engine(&fixture, &config);
    together(&mut engine, &[request(&any, 4)]);
    let id = add(&mut engine, own.clone());
    let (texts, _) = finish(&mut engine);
    assert_eq!(texts[&id], alone_in_chunks(&fixture, &own));
}

#[test]
fn texts_that_begin_alike_have_the_pages_of_what_is_alike_once() {
    let fixture = fixture();
    let any = text(120);
    let requests: Vec<Request> = (0..4)
        .map(|index| request(&[&any[..96], &any[100 + index..104 + index]].concat(), 40))
        .collect();
    let most = |prefix_bytes| {
        let config = EngineConfig {
            lanes: 4,
            prefix_bytes,
            exact_prefix: true,
            ..config()
        };
        let mut engine = engine(&fixture, &config);
        together(&mut engine, &[request(&any[..100], 2)]);
        let ids: Vec<_> = requests
            .iter()
            .map(|own| add(&mut engine, own.clone()))
            .collect();
        let (mut texts, mut most) = (Texts::new(), 0);
        while !engine.is_idle() {
            collect(engine.step().expect("a device that works"), &mut texts);
            if engine.running() == 4 {
                most = most.max(engine.cache_bytes());
            }
        }
        for (id, own) in ids.iter().zip(&requests) {
            assert_eq!(texts[id], alone_in_chunks(&fixture, own));
        }
        most
    };
    let [apart, shared] = [0, 1 << 30].map(most);
    // Six pages of each text are those of the kept one, which has seven.
    assert!(shared > 0 && shared < apart, "{shared}, {apart}");
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
fn a_text_of_128_ki_tokens_is_decoded_beside_a_short_one() {
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
        together = together.or(long.zip(short));
    }
    assert_eq!(texts[&ids[0]].len(), 4);
    assert_eq!(texts[&ids[1]], alone(&fixture, &short));
    let sizes = together.expect("they were decoded side by side");
    assert_eq!(sizes, (TOKENS + 256, 256));

    // Where there is no memory for it, that is said before anything is allocated.
    let config = EngineConfig {
        pages: Some(100),
        ..config
    };
    let mut engine = self::engine(&fixture, &config);
    let error = engine
        .add(request(&prompt, 4))
        .expect_err("it does not fit");
    let is_it = matches!(error, GenerateError::CacheMemory { missing: 413, .. });
    assert!(is_it, "{error}");
    assert_eq!(engine.cache_bytes(), 0);
}

#[test]
fn a_text_that_is_too_large_to_be_kept_leaves_what_is_kept() {
    let fixture = fixture();
    let mut sizes = (0..100).map(|steps| steps << 12);
    let enough = sizes.find(|bytes| processed(&fixture, *bytes, false) == 32);
    let enough = enough.expect("enough for a text and a mark");
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
