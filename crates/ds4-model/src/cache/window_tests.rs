//! Windows that are longer than the cache.

use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::attention::DECODE_TOKENS;

use super::ring::Ring;
use super::*;
use crate::config::AttentionKind;
use crate::rope::RotaryConfig;

const ROLLBACK: usize = 2;

fn layout(window: usize) -> CacheLayout {
    let rotary = RotaryConfig {
        dim: 2,
        theta: 10000.0,
        yarn: None,
    };
    CacheLayout {
        layers: vec![AttentionKind::Window],
        window,
        head_dim: 3,
        index_head_dim: 2,
        rotary: rotary.clone(),
        compressed_rotary: rotary,
        max_positions: 1 << 20,
    }
}

fn cache(window: usize, capacity: usize) -> Cache {
    let options = CacheConfig {
        capacity,
        rollback: Rollback::Bounded(ROLLBACK),
        dtype: FloatDType::F32,
        ..CacheConfig::default()
    };
    Cache::new(layout(window), options, &Device::flex()).unwrap()
}

/// The slots of a window of so many positions.
fn slots_of(window: usize) -> usize {
    window - 1 + DECODE_TOKENS + ROLLBACK
}

fn ring(cache: &mut Cache) -> &mut Ring {
    &mut cache.layers[0].window
}

/// Makes all rows ones, so that rows that come later differ.
fn fill(cache: &mut Cache) {
    let rows = ring(cache).take();
    ring(cache).put(rows.ones_like());
}

/// The first channel of each row.
fn rows(cache: &mut Cache) -> Vec<f32> {
    let rows = ring(cache).all().narrow(2, 0, 1);
    rows.try_into_vec_as::<f32>().unwrap()
}

/// So many rows of ones, and zeros up to the slots of a window of so many positions.
fn ones_in(ones: usize, window: usize) -> Vec<f32> {
    let zeros = slots_of(window) - ones;
    [vec![1.0; ones], vec![0.0; zeros]].concat()
}

#[test]
fn a_window_takes_no_more_rows_than_the_capacity_but_for_short_ones() {
    for (window, capacity, kept) in [
        (1000, 4, 1000),
        (1024, 4, 1024),
        (1025, 4, 1024),
        (i32::MAX as usize, 4, 1024),
        (usize::MAX, 1500, 1500),
        (1400, 1500, 1400),
    ] {
        let mut cache = cache(window, capacity);
        let what = format!("{window} in {capacity}");
        assert_eq!(ring(&mut cache).slots(), slots_of(kept), "{what}");
        let step = cache.begin(1).unwrap();
        assert_eq!(step.span, kept, "{what}");
        let bytes = 4 * 3 * slots_of(kept);
        assert_eq!(cache.bytes(), bytes, "{what}");
    }
}

#[test]
fn rows_keep_their_slots_when_a_cut_window_grows() {
    let mut cache = cache(usize::MAX, 4);
    fill(&mut cache);
    let step = cache.begin(1200).unwrap();
    assert_eq!((cache.capacity(), step.span), (2048, 2048));
    assert_eq!(rows(&mut cache), ones_in(slots_of(1024), 2048));
}

#[test]
fn a_cut_window_is_copied_from_and_to_larger_ones() {
    let (mut small, mut large) = (cache(4000, 4), cache(4000, 1500));
    fill(&mut small);
    large.adopt(0, &small, 0).unwrap();
    assert_eq!(rows(&mut large), ones_in(slots_of(1024), 1500));
    fill(&mut large);
    let mut small = cache(4000, 4);
    small.adopt(0, &large, 0).unwrap();
    assert_eq!(rows(&mut small), ones_in(slots_of(1024), 1024));
}

#[test]
fn a_mark_of_a_smaller_cache_leaves_a_window_as_long_as_it_was() {
    let (mut small, mut large) = (cache(4000, 4), cache(4000, 1500));
    fill(&mut small);
    let mark = small.mark();
    large.return_to(&mark);
    assert_eq!(rows(&mut large), ones_in(slots_of(1024), 1500));
}

#[test]
fn sizes_beyond_counting_are_counted_as_the_largest_number() {
    let mut layout = layout(usize::MAX);
    layout.layers = vec![AttentionKind::CompressedSparse { ratio: usize::MAX }; 3];
    (layout.head_dim, layout.max_positions) = (usize::MAX, usize::MAX);
    for rollback in [Rollback::Unlimited, Rollback::Bounded(usize::MAX)] {
        let options = CacheConfig {
            batch: usize::MAX,
            capacity: usize::MAX,
            rollback,
            dtype: FloatDType::F32,
        };
        assert_eq!(layout.bytes(options), Ok(usize::MAX));
        let refused = Cache::new(layout.clone(), options, &Device::flex());
        let expected = CacheError::OutOfMemory {
            positions: usize::MAX,
            bytes: usize::MAX,
        };
        assert_eq!(refused.unwrap_err(), expected);
    }
}

#[test]
fn a_cache_that_cannot_grow_stays_as_it_was() {
    let mut layout = layout(8);
    layout.max_positions = usize::MAX;
    let options = CacheConfig {
        capacity: 4,
        ..CacheConfig::default()
    };
    let mut cache = Cache::new(layout, options, &Device::flex()).unwrap();
    let (bytes, epoch) = (cache.bytes(), cache.epoch());
    // More bytes than can be addressed.
    let count = 1 << 60;
    let refused = cache.begin(count).unwrap_err();
    assert!(
        matches!(refused, CacheError::OutOfMemory { positions, .. } if positions == count),
        "{refused}"
    );
    assert_eq!((cache.capacity(), cache.bytes()), (4, bytes));
    assert_eq!((cache.lengths(), cache.epoch()), (&[0][..], epoch));
    drop(cache.begin(4).unwrap());
}
