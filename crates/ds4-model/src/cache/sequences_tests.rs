use burn_ds4_ops::attention::DECODE_TOKENS;
use burn_ds4_ops::device::DeviceSpec;

use super::*;
use crate::cache::{CacheConfig, CacheLayout, Rollback};
use crate::config::AttentionKind;
use crate::repository;
use crate::rope::RotaryConfig;

const WINDOW: usize = 4;
const ROLLBACK: usize = 1;
/// Slots of the rings of window rows.
const SLOTS: usize = WINDOW - 1 + DECODE_TOKENS + ROLLBACK;

fn cache(spec: DeviceSpec, batch: usize, capacity: usize) -> Option<Cache> {
    let rotary = RotaryConfig {
        dim: 2,
        theta: 10000.0,
        yarn: None,
    };
    let layout = CacheLayout {
        layers: vec![
            AttentionKind::Window,
            AttentionKind::HeavilyCompressed { ratio: 2 },
        ],
        window: WINDOW,
        head_dim: 3,
        index_head_dim: 2,
        rotary: rotary.clone(),
        compressed_rotary: rotary,
        max_positions: 64,
    };
    let options = CacheConfig {
        batch,
        capacity,
        rollback: Rollback::Bounded(ROLLBACK),
        ..CacheConfig::default()
    };
    let device = spec.init().ok()?;
    Some(Cache::new(layout, options, &device).unwrap())
}

fn every_device(test: impl Fn(&dyn Fn(usize, usize) -> Cache)) {
    let _alone = repository::alone_on_wgpu();
    for spec in [DeviceSpec::Flex, DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
        if cache(spec, 1, 1).is_some() {
            test(&|batch, capacity| cache(spec, batch, capacity).unwrap());
        }
    }
}

fn step(cache: &mut Cache, count: usize) {
    let step = cache.begin(count).unwrap();
    cache.commit(step).unwrap();
}

fn starts(cache: &Cache) -> Vec<i64> {
    cache.start().into_data().iter::<i64>().collect()
}

/// Fills all rings with a number.
fn fill(cache: &mut Cache, number: f64) {
    for ring in cache.layers.iter_mut().flat_map(LayerCache::rings_mut) {
        let rows = ring.take();
        ring.put(rows.full_like(number));
    }
}

/// Rows of a sequence in each ring; all channels of a row are the same.
fn rows(cache: &Cache, sequence: usize) -> Vec<Vec<f32>> {
    let rings = cache.layers.iter().flat_map(LayerCache::rings);
    let rings = rings.map(|ring| {
        let rows = ring.all().narrow(0, sequence, 1).narrow(2, 0, 1);
        rows.try_into_vec_as::<f32>().unwrap()
    });
    rings.collect()
}

#[test]
fn a_cache_filled_at_random_has_no_vacant_sequences() {
    every_device(|cache| {
        let mut cache = cache(3, 8);
        cache.vacate(1).unwrap();
        let random = burn::tensor::Distribution::Normal(0.0, 1.0);
        cache.fill_random(6, random).unwrap();
        step(&mut cache, 2);
        assert_eq!(starts(&cache), [8, 8, 8]);
        assert_eq!(cache.lengths(), [8, 8, 8]);
        cache.vacate(2).unwrap();
        step(&mut cache, 1);
        assert_eq!(starts(&cache), [9, 9, 0]);
    });
}

#[test]
fn steps_add_no_positions_to_what_is_vacant() {
    every_device(|cache| {
        let mut cache = cache(3, 8);
        cache.vacate(1).unwrap();
        let epoch = cache.epoch();
        step(&mut cache, 1);
        step(&mut cache, 3);
        assert_eq!(starts(&cache), [4, 0, 4]);
        assert_eq!(cache.lengths(), [4, 0, 4]);
        cache.vacate(0).unwrap();
        step(&mut cache, 1);
        assert_eq!(starts(&cache), [0, 0, 5]);
        assert_eq!(cache.lengths(), [0, 0, 5]);
        // A recorded step remains valid.
        assert_eq!(cache.epoch(), epoch);

        let all = [Some(0), Some(1), Some(2), None, None];
        let mut cache = cache.with_sequences(&all).unwrap();
        assert_ne!(cache.epoch(), epoch);
        step(&mut cache, 1);
        assert_eq!(starts(&cache), [0, 0, 6, 0, 0]);
        assert_eq!(cache.lengths(), [0, 0, 6, 0, 0]);
        assert_eq!(cache.batch(), 5);
    });
}

#[test]
fn sequences_are_taken_in_any_order_with_their_rows_and_lengths() {
    every_device(|cache| {
        let mut own = cache(4, 8);
        for sequence in 0..4 {
            let mut source = cache(1, 8);
            fill(&mut source, sequence as f64);
            step(&mut source, 1 + sequence);
            own.adopt(sequence, &source, 0).unwrap();
        }
        own.vacate(0).unwrap();
        let before: Vec<_> = (0..4).map(|sequence| rows(&own, sequence)).collect();
        let mut taken = own
            .with_sequences(&[Some(2), Some(3), None, Some(1)])
            .unwrap();
        for (sequence, from) in [(0, 2), (1, 3), (3, 1)] {
            assert_eq!(rows(&taken, sequence), before[from]);
        }
        step(&mut taken, 1);
        assert_eq!(starts(&taken), [4, 5, 0, 3]);
        assert_eq!(taken.lengths(), [4, 5, 0, 3]);
        // Those of before are as they were.
        assert_eq!(starts(&own), [0, 2, 3, 4]);
        let rest: Vec<_> = (0..4).map(|sequence| rows(&own, sequence)).collect();
        assert_eq!(rest, before);
    });
}

#[test]
fn adopting_copies_rows_and_length_and_puts_zeros_where_the_source_has_none() {
    every_device(|cache| {
        let (mut small, mut large, mut own) = (cache(1, 4), cache(1, 16), cache(2, 8));
        fill(&mut small, 1.0);
        fill(&mut large, 2.0);
        fill(&mut own, 7.0);
        step(&mut small, 3);
        step(&mut large, 8);
        let before = rows(&own, 0);
        own.adopt(1, &small, 0).unwrap();
        assert_eq!(rows(&own, 0), before);
        assert_eq!((starts(&own), own.lengths()), (vec![0, 3], &[0, 3][..]));
        // The number of window rows and raw projections does not depend on the capacity.
        let window = vec![1.0; SLOTS];
        let raw = vec![1.0; 2];
        let compressed = vec![1.0, 1.0, 0.0, 0.0];
        assert_eq!(rows(&own, 1), [window.clone(), window, compressed, raw]);

        let epoch = own.epoch();
        own.adopt(1, &large, 0).unwrap();
        assert_eq!(own.epoch(), epoch);
        assert_eq!((starts(&own), own.lengths()), (vec![0, 8], &[0, 8][..]));
        let all = [SLOTS, SLOTS, 4, 2].map(|slots| vec![2.0; slots]);
        assert_eq!(rows(&own, 1), all);
        assert_eq!(rows(&own, 0), before);

        // One position more than the capacity.
        step(&mut large, 1);
        own.adopt(0, &large, 0).unwrap();
        assert_ne!(own.epoch(), epoch);
        assert_eq!((own.capacity(), own.lengths()), (16, &[9, 8][..]));
        assert_eq!(rows(&own, 0)[2], vec![2.0; 8]);
    });
}

#[test]
fn a_copy_goes_back_no_further_than_what_its_source_has_overwritten() {
    every_device(|cache| {
        let mut source = cache(1, 32);
        step(&mut source, 24);
        for _ in 0..SLOTS {
            step(&mut source, 1);
        }
        let length = 24 + SLOTS - ROLLBACK;
        source.remove_newest(ROLLBACK).unwrap();
        let mut copy = cache(2, 64);
        copy.adopt_run(1, &source, 0, &[length], false).unwrap();
        assert_eq!(copy.lengths()[1], length);
        let error = copy.truncate_to(&[0, length - 1]);
        assert!(
            matches!(error, Err(CacheError::RolledOver { .. })),
            "{error:?}"
        );
        // All of the rollback is there where nothing was removed.
        step(&mut source, ROLLBACK);
        copy.adopt_run(1, &source, 0, &[length + ROLLBACK], false)
            .unwrap();
        copy.truncate_to(&[0, length]).unwrap();
    });
}
