//! The cache: however a text is fed, rolled back and fed again, the logits are those of one call
//! over the text.

use std::collections::BTreeMap;

use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use ds4_model::cache::{Cache, CacheConfig, CacheError, CacheLayout, Rollback};
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use ds4_model::config::AttentionKind;
use ds4_model::model::Model;
use ds4_model::trace::Trace;
use proptest::prelude::*;

use crate::common::{absolute, assert_close, compiles_slowly, devices, seeded, values};
use crate::golden::root;

/// Logits of this model are of order ten.
pub(crate) const TOLERANCE: f64 = 1e-4;
const LENGTH: usize = 61;
pub(crate) const VOCABULARY: u32 = 128;

pub(crate) struct Fixture {
    pub(crate) model: Model,
    pub(crate) device: Device,
}

impl Fixture {
    pub(crate) fn open(device: &Device) -> Self {
        let checkpoint = Checkpoint::open(&root().join("tests/fixtures/layer-goldens"))
            .expect("the fixture is a checkpoint");
        Self {
            model: checkpoint
                .load(&LoadOptions::default(), device)
                .expect("the fixture loads"),
            device: device.clone(),
        }
    }

    fn flex() -> Self {
        Self::open(&Device::flex())
    }

    pub(crate) fn cache(&self, batch: usize, rollback: Rollback) -> Cache {
        let options = CacheConfig {
            batch,
            // Small, so that it grows in the middle of a text.
            capacity: 8,
            rollback,
            ..CacheConfig::default()
        };
        self.model
            .new_cache(options)
            .expect("the options are valid")
    }

    fn ids(&self, ids: &[u32]) -> Tensor<2, Int> {
        self.batch(&[ids])
    }

    pub(crate) fn batch(&self, rows: &[&[u32]]) -> Tensor<2, Int> {
        let ids: Vec<i32> = rows.concat().iter().map(|id| *id as i32).collect();
        let shape = [rows.len(), rows[0].len()];
        Tensor::from_data(TensorData::new(ids, shape), &self.device)
    }

    pub(crate) fn feed(&self, ids: &[u32], cache: &mut Cache) -> Vec<f32> {
        values(
            self.model
                .forward(self.ids(ids), cache)
                .expect("the text fits the context"),
        )
    }

    pub(crate) fn one_shot(&self, ids: &[u32]) -> Vec<f32> {
        self.feed(ids, &mut self.cache(1, Rollback::Bounded(0)))
    }
}

/// A text without a pattern.
pub(crate) fn text(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32)
        .map(|i| {
            (i.wrapping_mul(2_654_435_761)
                .wrapping_add(seed.wrapping_mul(40_503))
                >> 7)
                % VOCABULARY
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Action {
    /// Feeds the next tokens of the text.
    Accept(usize),
    /// Feeds tokens that are not the text's, and takes them back: drafts that were rejected.
    Reject(usize),
    /// Takes back tokens of the text.
    Rollback(usize),
}

fn actions(rollback: usize) -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        4 => (1..12usize).prop_map(Action::Accept),
        2 => (1..=rollback).prop_map(Action::Reject),
        1 => (1..=rollback).prop_map(Action::Rollback),
    ];
    prop::collection::vec(action, 1..16)
}

/// Plays the actions and checks the logits of every token of the text that is fed.
fn play(fixture: &Fixture, rollback: Rollback, limit: usize, actions: &[Action], expected: &[f32]) {
    let text = text(1, LENGTH);
    let mut cache = fixture.cache(1, rollback);
    let mut length = 0;
    // How far back a bounded cache still reaches.
    let mut high_water = 0;
    for action in actions {
        match *action {
            Action::Accept(count) => {
                let end = (length + count).min(LENGTH);
                if end == length {
                    break;
                }
                let logits = fixture.feed(&text[length..end], &mut cache);
                let range = length * VOCABULARY as usize..end * VOCABULARY as usize;
                let what = format!("positions {length}..{end} after {actions:?}");
                assert_close(&logits, &expected[range], absolute(TOLERANCE), &what);
                length = end;
            }
            Action::Reject(count) => {
                fixture.feed(&self::text(length as u32 + 99, count), &mut cache);
                high_water = high_water.max(length + count);
                cache
                    .remove_newest(count)
                    .expect("drafts can be taken back");
            }
            Action::Rollback(count) => {
                let back = length
                    .saturating_sub(count)
                    .max(high_water.saturating_sub(limit));
                cache
                    .truncate_to(&[back.min(length)])
                    .expect("within the rollback");
                length = back.min(length);
            }
        }
        high_water = high_water.max(length);
        assert_eq!(cache.lengths(), [length]);
    }
}

#[test]
fn any_split_with_any_rollback_equals_one_shot() {
    let fixture = Fixture::flex();
    let expected = fixture.one_shot(&text(1, LENGTH));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&actions(40), |actions| {
            play(
                &fixture,
                Rollback::Unlimited,
                usize::MAX,
                &actions,
                &expected,
            );
            Ok(())
        })
        .unwrap();
}

#[test]
fn any_split_with_bounded_rollback_equals_one_shot() {
    let fixture = Fixture::flex();
    let expected = fixture.one_shot(&text(1, LENGTH));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 32,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(
            &(1..=5usize).prop_flat_map(|limit| (Just(limit), actions(limit))),
            |(limit, actions)| {
                play(
                    &fixture,
                    Rollback::Bounded(limit),
                    limit,
                    &actions,
                    &expected,
                );
                Ok(())
            },
        )
        .unwrap();
}

#[test]
fn one_rollback_across_block_boundaries_equals_one_shot_on_every_device() {
    for (name, device) in devices() {
        let fixture = Fixture::open(device);
        let text = text(1, 29);
        let expected = fixture.one_shot(&text);
        let mut cache = fixture.cache(1, Rollback::Unlimited);
        fixture.feed(&self::text(7, 13), &mut cache);
        cache
            .remove_newest(13)
            .expect("everything can be taken back");
        fixture.feed(&text[..21], &mut cache);
        fixture.feed(&self::text(8, 11), &mut cache);
        // Back over several blocks of both ratios.
        cache
            .truncate_to(&[6])
            .expect("any number can be taken back");
        let logits = fixture.feed(&text[6..], &mut cache);
        let expected = &expected[6 * VOCABULARY as usize..];
        assert_close(&logits, expected, absolute(TOLERANCE), name);
    }
}

#[test]
fn sequences_of_different_lengths_share_a_batch() {
    let fixture = Fixture::flex();
    let (long, short) = (text(1, 40), text(2, 40));
    let (short_length, step) = (17, 4);
    let mut cache = fixture.cache(2, Rollback::Unlimited);

    // Prompts of 33 and 17 tokens: the shorter is padded, and the padding forgotten.
    let mut padded = short[..short_length].to_vec();
    padded.resize(33, 5);
    fixture
        .model
        .forward(fixture.batch(&[&long[..33], &padded]), &mut cache)
        .expect("the text fits the context");
    cache
        .truncate_to(&[33, short_length])
        .expect("padding can be taken back");
    assert_eq!(cache.lengths(), [33, short_length]);

    let next = [
        &long[33..33 + step],
        &short[short_length..short_length + step],
    ];
    let logits = fixture
        .model
        .forward(fixture.batch(&next), &mut cache)
        .expect("the text fits the context");
    for (sequence, (text, start)) in [(&long, 33), (&short, short_length)]
        .into_iter()
        .enumerate()
    {
        let alone = fixture.one_shot(&text[..start + step]);
        let expected = &alone[start * VOCABULARY as usize..];
        let actual = values(logits.clone().narrow(0, sequence, 1));
        assert_close(
            &actual,
            expected,
            absolute(TOLERANCE),
            &format!("sequence {sequence}"),
        );
    }
}

#[test]
fn a_step_has_the_same_shapes_at_every_position_of_one_capacity() {
    let fixture = Fixture::flex();
    let options = CacheConfig {
        capacity: 64,
        rollback: Rollback::Bounded(2),
        ..CacheConfig::default()
    };
    let mut cache = fixture
        .model
        .new_cache(options)
        .expect("the options are valid");
    let trace = Trace::recording();
    let mut shapes: Option<BTreeMap<String, Vec<usize>>> = None;
    for token in text(3, 64) {
        fixture
            .model
            .forward_streams(fixture.ids(&[token]), &mut cache, &trace)
            .expect("the text fits the context");
        let now: BTreeMap<String, Vec<usize>> = trace
            .take()
            .into_iter()
            .map(|(name, data)| (name, data.shape().to_vec()))
            .collect();
        assert!(now.len() > 20, "the trace records the intermediates");
        assert_eq!(*shapes.get_or_insert_with(|| now.clone()), now);
    }
    assert_eq!(cache.capacity(), 64);
}

#[test]
fn a_bounded_cache_refuses_what_it_has_forgotten_and_stays_usable() {
    let fixture = Fixture::flex();
    let text = text(1, 48);
    let mut cache = fixture.cache(1, Rollback::Bounded(3));
    fixture.feed(&text[..40], &mut cache);
    assert_eq!(
        cache.remove_newest(4),
        Err(CacheError::RolledOver {
            sequence: 0,
            requested: 36,
            oldest: 37
        })
    );
    assert_eq!(cache.lengths(), [40]);
    cache.remove_newest(3).expect("as far as it reaches");
    assert!(
        cache.remove_newest(1).is_err(),
        "truncating restores no rollback"
    );
    let logits = fixture.feed(&text[37..], &mut cache);
    let expected = fixture.one_shot(&text);
    assert_close(
        &logits,
        &expected[37 * VOCABULARY as usize..],
        absolute(TOLERANCE),
        "after refusals",
    );

    cache
        .truncate_to(&[0])
        .expect("the empty sequence can always be gone back to");
    let logits = fixture.feed(&text, &mut cache);
    assert_close(&logits, &expected, absolute(TOLERANCE), "from the start");
}

#[test]
fn a_cache_filled_at_random_goes_on_from_rows_that_are_seen() {
    // As good as zeros: a range has to have a width.
    let zeros = Distribution::Uniform(0.0, 1e-30);
    // What it draws is Burn's; that decoding goes on from rows of a cache, other tests see.
    let devices = devices().iter().filter(|(name, _)| !compiles_slowly(name));
    for (name, device) in devices {
        let fixture = Fixture::open(device);
        let feed = |ids: &[&[u32]], cache: &mut Cache| {
            let logits = fixture.model.forward(fixture.batch(ids), cache);
            values(logits.expect("the text fits the context"))
        };
        let after = |distribution| {
            let mut cache = fixture.cache(2, Rollback::Bounded(3));
            feed(&[&text(2, 5), &text(3, 5)], &mut cache);
            seeded(device, 1, || cache.fill_random(43, distribution))
                .expect("the model supports so many");
            assert_eq!((cache.lengths(), cache.capacity()), (&[43, 43][..], 64));
            assert!(cache.remove_newest(4).is_err() && cache.remove_newest(3).is_ok());
            feed(&[&text(1, 2), &text(1, 2)], &mut cache)
        };
        let of_zeros = after(zeros);
        let (first, second) = of_zeros.split_at(of_zeros.len() / 2);
        assert_close(
            first,
            second,
            absolute(TOLERANCE),
            &format!("two sequences alike, {name}"),
        );
        let of_draws = after(Distribution::Normal(0.0, 1.0));
        assert!(of_draws.iter().all(|logit| logit.is_finite()), "{name}");
        let far = |(one, other): (&f32, &f32)| (one - other).abs() > 0.1;
        assert!(
            of_draws.iter().zip(&of_zeros).any(far),
            "the rows make no difference, {name}"
        );
    }
    let fixture = Fixture::flex();
    let mut cache = fixture.cache(1, Rollback::Unlimited);
    let maximum = fixture.model.config().max_position_embeddings;
    let refusal = CacheError::TooLong {
        requested: maximum + 1,
        maximum,
    };
    assert_eq!(cache.fill_random(maximum + 1, zeros), Err(refusal));
    assert_eq!(cache.lengths(), [0]);
    assert_eq!(cache.fill_random(maximum, zeros), Ok(()));
    assert_eq!(cache.lengths(), [maximum]);
}

#[test]
fn impossible_requests_are_typed_errors_and_change_nothing() {
    let fixture = Fixture::flex();
    let mut cache = fixture.cache(2, Rollback::Unlimited);
    let one = fixture.ids(&[1]);
    assert_eq!(
        fixture.model.forward(one, &mut cache).err(),
        Some(CacheError::BatchMismatch {
            argument: "token_ids",
            expected: 2,
            actual: 1
        })
    );
    assert_eq!(
        cache.begin(0).err(),
        Some(CacheError::Zero { argument: "count" })
    );
    let maximum = fixture.model.config().max_position_embeddings;
    for count in [maximum + 1, usize::MAX] {
        assert_eq!(
            cache.begin(count).err(),
            Some(CacheError::TooLong {
                requested: count,
                maximum
            })
        );
    }
    assert_eq!(
        cache.remove_newest(3),
        Err(CacheError::RemoveBeyondStart {
            sequence: 0,
            count: 3,
            length: 0
        })
    );
    assert_eq!(
        cache.truncate_to(&[0, 2]),
        Err(CacheError::TruncateBeyondEnd {
            sequence: 1,
            requested: 2,
            length: 0
        })
    );
    assert!(matches!(
        cache.truncate_to(&[0]),
        Err(CacheError::BatchMismatch {
            expected: 2,
            actual: 1,
            ..
        })
    ));
    assert_eq!(cache.lengths(), [0, 0]);
    assert_eq!(cache.capacity(), 8);
    let empty = CacheConfig {
        batch: 0,
        ..CacheConfig::default()
    };
    assert_eq!(
        fixture.model.new_cache(empty).err(),
        Some(CacheError::Zero { argument: "batch" })
    );
    let mut layout = CacheLayout::trunk(fixture.model.config());
    layout.layers = vec![AttentionKind::HeavilyCompressed { ratio: 0 }];
    assert_eq!(
        Cache::new(layout, CacheConfig::default(), &fixture.device).err(),
        Some(CacheError::Zero { argument: "ratio" })
    );
}

#[test]
fn a_window_longer_than_the_text_sees_all_of_it_while_the_cache_grows() {
    let mut fixture = Fixture::flex();
    // Longer than the windows that are kept whole in caches of any capacity.
    let (length, tail) = (1101, 91);
    let text = text(1, length);
    fixture.model.config.sliding_window = 2048;
    let mut whole = fixture.cache(1, Rollback::Bounded(0));
    let expected = fixture.feed(&text, &mut whole);

    fixture.model.config.sliding_window = i32::MAX as usize;
    let mut cache = fixture.cache(1, Rollback::Bounded(0));
    let (prompt, rest) = text.split_at(1000);
    fixture.feed(prompt, &mut cache);
    assert_eq!(cache.capacity(), 1024);
    assert!(cache.bytes() < whole.bytes());
    fixture.feed(&rest[..10], &mut cache);
    let logits = fixture.feed(&rest[10..], &mut cache);
    assert_eq!(cache.bytes(), whole.bytes());
    let expected = &expected[(length - tail) * VOCABULARY as usize..];
    assert_close(&logits, expected, absolute(TOLERANCE), "the last positions");
}

#[test]
fn capacity_and_rollback_beyond_the_context_are_cut_to_it() {
    let mut fixture = Fixture::flex();
    fixture.model.config.max_position_embeddings = 20;
    let options = CacheConfig {
        rollback: Rollback::Bounded(usize::MAX),
        ..CacheConfig::default()
    };
    let mut cache = fixture
        .model
        .new_cache(options)
        .expect("the options are valid");
    assert_eq!(cache.capacity(), 20);
    let text = text(1, 20);
    let logits = fixture.feed(&text, &mut cache);
    assert_close(
        &logits,
        &fixture.one_shot(&text),
        absolute(TOLERANCE),
        "to the last position",
    );
    assert!(matches!(
        cache.begin(1),
        Err(CacheError::TooLong {
            requested: 21,
            maximum: 20
        })
    ));
    cache.remove_newest(20).expect("all of it is kept");
}

#[test]
fn a_cache_of_other_layers_is_refused() {
    let fixture = Fixture::flex();
    let mut mtp = fixture
        .model
        .new_mtp_cache(CacheConfig::default())
        .expect("the options are valid");
    let refused = fixture.model.forward(fixture.ids(&[1]), &mut mtp);
    assert!(matches!(refused, Err(CacheError::LayoutMismatch { .. })));
    assert_eq!(mtp.lengths(), [0]);

    let mut trunk = fixture.cache(1, Rollback::Unlimited);
    let streams = Tensor::zeros([1, 1, 4, 64], &fixture.device);
    let refused = fixture
        .model
        .forward_mtp(streams, fixture.ids(&[1]), &mut trunk, &Trace::off());
    assert!(matches!(refused, Err(CacheError::LayoutMismatch { .. })));
}

#[test]
fn only_the_last_step_of_the_cache_can_be_committed() {
    let fixture = Fixture::flex();
    let mut cache = fixture.cache(1, Rollback::Unlimited);
    let mut other = fixture.cache(1, Rollback::Unlimited);
    let step = other.begin(2).expect("the text fits the context");
    assert_eq!(cache.commit(step), Err(CacheError::StaleStep));
    let first = cache.begin(2).expect("the text fits the context");
    let second = cache.begin(3).expect("the text fits the context");
    assert_eq!(cache.commit(first), Err(CacheError::StaleStep));
    assert_eq!(cache.commit(second), Ok(()));
    let third = cache.begin(1).expect("the text fits the context");
    cache
        .remove_newest(1)
        .expect("there is something to remove");
    assert_eq!(cache.commit(third), Err(CacheError::StaleStep));
    assert_eq!(cache.lengths(), [2]);
}

#[test]
fn token_ids_outside_the_vocabulary_are_read_as_the_nearest_inside() {
    for (name, device) in devices() {
        let fixture = Fixture::open(device);
        let ids =
            Tensor::<2, Int>::from_data(TensorData::new(vec![-1, 1_000_000, 5], [1, 3]), device);
        let mut cache = fixture.cache(1, Rollback::Unlimited);
        let actual = values(
            fixture
                .model
                .forward(ids, &mut cache)
                .expect("the text fits the context"),
        );
        let expected = fixture.one_shot(&[0, VOCABULARY - 1, 5]);
        assert_close(&actual, &expected, absolute(TOLERANCE), name);
    }
}

#[test]
fn a_dropped_step_leaves_the_sequence_as_it_was() {
    let fixture = Fixture::flex();
    let text = text(1, 30);
    let mut cache = fixture.cache(1, Rollback::Bounded(4));
    fixture.feed(&text[..20], &mut cache);
    drop(cache.begin(4).expect("the text fits the context"));
    assert_eq!(cache.lengths(), [20]);
    let logits = fixture.feed(&text[20..], &mut cache);
    let expected = fixture.one_shot(&text);
    assert_close(
        &logits,
        &expected[20 * VOCABULARY as usize..],
        absolute(TOLERANCE),
        "after a dropped step",
    );

    // One that may have overwritten what is still needed is noticed.
    drop(cache.begin(30).expect("the text fits the context"));
    assert!(matches!(cache.begin(1), Err(CacheError::RolledOver { .. })));
}
