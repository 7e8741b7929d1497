//! Sequences of a cache that come from another one and go again: each has the logits of its text
//! alone.

use burn::tensor::FloatDType;
use ds4_model::cache::{Cache, CacheConfig, CacheError, CacheLayout, Rollback};
use ds4_model::config::AttentionKind;
use ds4_model::trace::Trace;

use crate::cache::{Fixture, TOLERANCE, VOCABULARY, text};
use crate::common::{absolute, assert_close, devices, values};

/// Logits of one more token of each text, at the lengths that the cache has; of what is vacant,
/// none.
fn step(fixture: &Fixture, texts: &[Option<&[u32]>], cache: &mut Cache) -> Vec<Option<Vec<f32>>> {
    let lengths = cache.lengths().to_vec();
    let next = |(text, length): (&Option<&[u32]>, &usize)| [text.map_or(3, |text| text[*length])];
    let next: Vec<[u32; 1]> = texts.iter().zip(&lengths).map(next).collect();
    let next: Vec<&[u32]> = next.iter().map(<[u32; 1]>::as_slice).collect();
    let logits = fixture.model.forward(fixture.batch(&next), cache);
    let logits = logits.expect("the text fits the context");
    let row = |(sequence, text): (usize, &Option<&[u32]>)| {
        text.map(|_| values(logits.clone().narrow(0, sequence, 1)))
    };
    texts.iter().enumerate().map(row).collect()
}

/// Steps, and compares with each text alone.
fn check(fixture: &Fixture, texts: &[Option<&[u32]>], cache: &mut Cache, steps: usize, what: &str) {
    let alone = texts.iter().flatten().map(|text| fixture.one_shot(text));
    let alone: Vec<Vec<f32>> = alone.collect();
    for _ in 0..steps {
        let mut alone = alone.iter();
        let rows = step(fixture, texts, cache);
        for (sequence, row) in rows.iter().enumerate() {
            let length = cache.lengths()[sequence];
            let Some(row) = row else {
                assert_eq!(length, 0, "{what}: {sequence} is vacant");
                continue;
            };
            let expected = alone.next().expect("a text");
            let vocabulary = VOCABULARY as usize;
            let expected = &expected[(length - 1) * vocabulary..length * vocabulary];
            let what = format!("{what}: sequence {sequence} at {length}");
            assert_close(row, expected, absolute(TOLERANCE), &what);
        }
    }
}

/// A text in a cache of its own.
fn alone(fixture: &Fixture, text: &[u32], capacity: usize, rollback: Rollback) -> Cache {
    let options = CacheConfig {
        capacity,
        rollback,
        ..CacheConfig::default()
    };
    let cache = fixture.model.new_cache(options);
    let mut cache = cache.expect("the options are valid");
    fixture.feed(text, &mut cache);
    cache
}

#[test]
fn adopted_sequences_go_on_like_their_texts_alone_whatever_was_there_before() {
    for (name, device) in devices() {
        let fixture = Fixture::open(device);
        let [a, b, c] = [1, 2, 3].map(|seed| text(seed, 40));
        for rollback in [Rollback::Unlimited, Rollback::Bounded(2)] {
            let what = format!("{name}, {rollback:?}");
            let mut cache = fixture.cache(3, rollback);
            assert_eq!(cache.capacity(), 8);
            // Of a smaller capacity, though it grows, and of a larger one.
            let long = alone(&fixture, &a[..30], 8, rollback);
            let short = alone(&fixture, &b[..5], 64, rollback);
            cache
                .adopt(0, &short, 0)
                .expect("a cache of the same model");
            assert_eq!((cache.capacity(), cache.lengths()), (8, &[5, 0, 0][..]));
            cache.vacate(1).expect("there is one");
            cache.vacate(2).expect("there is one");
            check(&fixture, &[Some(&b), None, None], &mut cache, 2, &what);
            cache.adopt(2, &long, 0).expect("a cache of the same model");
            assert_eq!((cache.capacity(), cache.lengths()), (32, &[7, 0, 30][..]));
            check(&fixture, &[Some(&b), None, Some(&a)], &mut cache, 4, &what);
            assert_eq!((cache.capacity(), cache.lengths()), (64, &[11, 0, 34][..]));
            // Where a longer one was, and where none was.
            let other = alone(&fixture, &c[..7], 8, rollback);
            cache
                .adopt(2, &other, 0)
                .expect("a cache of the same model");
            cache.adopt(1, &long, 0).expect("a cache of the same model");
            let texts = [Some(&b[..]), Some(&a[..]), Some(&c[..])];
            check(&fixture, &texts, &mut cache, 2, &what);
            cache.vacate(0).expect("there is one");
            check(&fixture, &[None, texts[1], texts[2]], &mut cache, 2, &what);
            assert_eq!(cache.lengths(), [0, 34, 11], "{what}");
        }
    }
}

/// Neither routers by score nor those by token id choose any, so no expert is read for them.
#[test]
fn vacant_sequences_choose_no_experts() {
    for (name, device) in devices() {
        let fixture = Fixture::open(device);
        let mut cache = fixture.cache(3, Rollback::Unlimited);
        let texts = [1, 2, 3].map(|seed| text(seed, 5));
        let chosen = |positions: usize, cache: &mut Cache| {
            let rows = texts.each_ref().map(|text| &text[..positions]);
            let trace = Trace::recording();
            let streams = fixture
                .model
                .forward_streams(fixture.batch(&rows), cache, &trace);
            drop(streams.expect("the texts fit the context"));
            let records = trace.take().into_iter();
            let ids = records.filter(|(name, _)| name.ends_with("moe.router.ids"));
            let ids: Vec<Vec<i64>> = ids
                .map(|(_, ids)| ids.iter::<i64>().collect::<Vec<_>>())
                .collect();
            assert_eq!(ids.len(), fixture.model.config().layers.len(), "{name}");
            ids
        };
        for (vacant, positions) in [(None, 1), (Some(1), 1), (Some(0), 3), (None, 2)] {
            match vacant {
                Some(vacant) => cache.vacate(vacant).expect("there is one"),
                None => {
                    cache = fixture.cache(3, Rollback::Unlimited);
                }
            }
            for ids in chosen(positions, &mut cache) {
                for (sequence, ids) in ids.chunks(ids.len() / 3).enumerate() {
                    let is_vacant = match vacant {
                        None => false,
                        // The first one is vacant as well by then.
                        Some(0) => sequence < 2,
                        Some(vacant) => sequence == vacant,
                    };
                    let what = format!("{name}, {positions} of sequence {sequence}: {ids:?}");
                    assert!(ids.iter().all(|&id| (id < 0) == is_vacant), "{what}");
                }
            }
        }
    }
}

#[test]
fn an_adopted_sequence_can_be_rolled_back_as_far_as_the_one_it_was() {
    let fixture = Fixture::open(&burn::tensor::Device::flex());
    let text = text(1, 40);
    let rollback = Rollback::Bounded(3);
    let mut source = alone(&fixture, &text[..30], 8, rollback);
    source.remove_newest(2).expect("as far as it reaches");
    let mut cache = fixture.cache(2, rollback);
    cache
        .adopt(1, &source, 0)
        .expect("a cache of the same model");
    let error = cache.truncate_to(&[0, 26]).expect_err("one too far");
    let expected = CacheError::RolledOver {
        sequence: 1,
        requested: 26,
        oldest: 27,
    };
    assert_eq!(error, expected);
    cache.truncate_to(&[0, 27]).expect("as far as it reaches");
    cache.vacate(0).expect("there is one");
    check(&fixture, &[None, Some(&text)], &mut cache, 3, "rolled back");
}

#[test]
fn what_cannot_be_adopted_is_named_and_changes_nothing() {
    let fixture = Fixture::open(&burn::tensor::Device::flex());
    let text = text(1, 9);
    let rollback = Rollback::Bounded(2);
    let source = alone(&fixture, &text, 16, rollback);
    let mut cache = fixture.cache(2, rollback);
    let error = cache.adopt(2, &source, 0).expect_err("there is none");
    assert_eq!(
        error.to_string(),
        "sequence is 2, the cache has 2 sequences"
    );
    let error = cache.vacate(7).expect_err("there is none");
    assert_eq!(
        error.to_string(),
        "sequence is 7, the cache has 2 sequences"
    );
    let several = fixture.cache(3, rollback);
    let error = cache.adopt(0, &several, 3).expect_err("there is none");
    assert_eq!(error.to_string(), "from is 3, the cache has 3 sequences");

    let other = alone(&fixture, &text, 16, Rollback::Bounded(3));
    let error = cache.adopt(0, &other, 0).expect_err("rows at other slots");
    let expected = "source has rollback Bounded(3), the cache has Bounded(2)";
    assert_eq!(error.to_string(), expected);

    let made = |layout, dtype| {
        let options = CacheConfig {
            rollback,
            dtype,
            ..CacheConfig::default()
        };
        Cache::new(layout, options, &fixture.device).expect("the options are valid")
    };
    let layout = CacheLayout::trunk(fixture.model.config());
    let other = made(layout.clone(), FloatDType::F16);
    let error = cache
        .adopt(0, &other, 0)
        .expect_err("rows of another dtype");
    assert_eq!(error.to_string(), "source has dtype F16, the cache has F32");
    let wider = CacheLayout {
        window: 9,
        ..layout.clone()
    };
    let error = cache.adopt(0, &made(wider, FloatDType::F32), 0);
    let error = error.expect_err("another window");
    assert_eq!(error.to_string(), "source has window 9, the cache has 8");
    let fewer = CacheLayout {
        layers: vec![AttentionKind::Window],
        ..layout
    };
    let error = cache.adopt(0, &made(fewer, FloatDType::F32), 0);
    let message = error.expect_err("fewer layers").to_string();
    assert!(
        message.starts_with("source has layers [Window], the cache has ["),
        "{message}"
    );
    assert_eq!((cache.lengths(), cache.capacity()), (&[0, 0][..], 8));
}
