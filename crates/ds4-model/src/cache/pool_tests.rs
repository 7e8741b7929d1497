use std::collections::BTreeSet;

use burn_ds4_ops::device::DeviceSpec;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::*;
use crate::cache::{Cache, Rollback};
use crate::config::AttentionKind;
use crate::repository;
use crate::rope::RotaryConfig;

const DEVICES: [DeviceSpec; 3] = [DeviceSpec::Flex, DeviceSpec::Wgpu, DeviceSpec::Cuda(0)];
const POSITIONS: usize = 4;

fn layout() -> CacheLayout {
    let rotary = RotaryConfig {
        dim: 2,
        theta: 10000.0,
        yarn: None,
    };
    CacheLayout {
        layers: vec![
            AttentionKind::Window,
            AttentionKind::HeavilyCompressed { ratio: 4 },
            AttentionKind::CompressedSparse { ratio: 2 },
        ],
        window: 4,
        head_dim: 3,
        index_head_dim: 2,
        rotary: rotary.clone(),
        compressed_rotary: rotary,
        max_positions: 64,
    }
}

fn pool(device: &Device, pages: usize) -> PagePool {
    let layout = layout();
    let placement = Placement::single(device, layout.layers.len());
    let pool = PagePool::new(&layout, FloatDType::F32, &placement, POSITIONS);
    pool.grow(pages).unwrap();
    pool
}

fn cache(pool: &PagePool, batch: usize) -> Cache {
    let layout = layout();
    let (device, _) = &pool.page_bytes()[0];
    let placement = Placement::single(device, layout.layers.len());
    let options = CacheConfig {
        batch,
        capacity: 1,
        rollback: Rollback::Unlimited,
        dtype: FloatDType::F32,
    };
    Cache::in_pages(layout, options, &placement, pool).unwrap()
}

/// Numbers of the pages of each sequence, as steps read them, but for those that are nobody's.
fn tables(cache: &Cache) -> Vec<Vec<i64>> {
    let table = cache.parts[0].pages.clone().unwrap();
    let [_, reach] = table.dims();
    let data = table.into_data();
    let numbers: Vec<i64> = data.iter::<i64>().collect();
    let rows = numbers.chunks(reach);
    let own = |row: &[i64]| row.iter().copied().filter(|page| *page > 0).collect();
    rows.map(own).collect()
}

#[test]
fn a_page_is_of_whole_rows_of_all_layers() {
    let device = Device::flex();
    for (least, expected) in [(1, 4), (4, 4), (5, 8), (256, 256)] {
        let placement = Placement::single(&device, 3);
        let pool = PagePool::new(&layout(), FloatDType::F32, &placement, least);
        assert_eq!(pool.positions(), expected);
        // One row of 3 channels, two of 3 and two of 2 in four positions.
        assert_eq!(pool.page_bytes()[0].1, 4 * 13 * expected / 4);
        assert_eq!((pool.len(), pool.free()), (0, 0));
        assert_eq!(pool.bytes(), pool.page_bytes()[0].1);
    }
}

#[test]
fn no_page_is_lost_or_has_two_holders_whatever_is_taken_and_given_back() {
    let pool = pool(&Device::flex(), 3);
    let mut random = ChaCha12Rng::seed_from_u64(7);
    let mut below = |count: usize| random.next_u32() as usize % count;
    let mut held: Vec<Vec<Arc<Page>>> = Vec::new();
    for _ in 0..2000 {
        match below(20) {
            0 if pool.len() < 40 => pool.grow(1 + below(3)).unwrap(),
            1..10 => {
                let (count, free) = (below(5), pool.free());
                match pool.take(count) {
                    Ok(pages) => held.push(pages),
                    Err(error) => {
                        let (missing, all) = (count - free, pool.len());
                        assert_eq!(error, CacheError::NoPages { missing, all });
                        assert_eq!(pool.free(), free);
                    }
                }
            }
            _ if !held.is_empty() => {
                let one = below(held.len());
                // Another holder of some of them may be left.
                let kept = held[one].iter().take(below(3)).cloned().collect();
                held.swap_remove(one);
                held.push(kept);
            }
            _ => {}
        }
        let numbers: Vec<u32> = held.iter().flatten().map(|page| page.number).collect();
        let distinct: BTreeSet<u32> = numbers.iter().copied().collect();
        assert_eq!(numbers.len(), distinct.len(), "a page has two holders");
        assert!(
            distinct
                .iter()
                .all(|page| (1..=pool.len() as u32).contains(page))
        );
        assert_eq!(distinct.len() + pool.free(), pool.len(), "a page is lost");
    }
    drop(held);
    assert_eq!(pool.free(), pool.len());
}

#[test]
fn sequences_of_caches_have_pages_of_their_own_until_they_go() {
    let _alone = repository::alone_on_wgpu();
    for device in DEVICES.into_iter().filter_map(|spec| spec.init().ok()) {
        let pool = pool(&device, 12);
        let mut random = ChaCha12Rng::seed_from_u64(3);
        let mut below = |count: usize| random.next_u32() as usize % count;
        let mut caches = [cache(&pool, 2), cache(&pool, 3)];
        for round in 0..60 {
            let one = below(2);
            let [a, b] = &mut caches;
            let (own, other) = if one == 0 { (a, b) } else { (b, a) };
            let sequence = below(own.batch());
            match below(5) {
                0 => own.vacate(sequence).unwrap(),
                1 => {
                    let from = below(other.batch());
                    let free = pool.free();
                    let length = other.lengths()[from];
                    match own.adopt(sequence, other, from) {
                        Ok(()) => assert_eq!(own.lengths()[sequence], length),
                        Err(error) => {
                            assert_eq!(free, 0, "{error}");
                            assert!(matches!(error, CacheError::NoPages { .. }), "{error}");
                        }
                    }
                }
                2 => {
                    let mut lengths = own.lengths().to_vec();
                    lengths[sequence] -= below(lengths[sequence] + 1);
                    // Another may have the page that it goes on in.
                    let _ = own.truncate_to(&lengths);
                }
                _ => match own.begin(1 + below(3)) {
                    Ok(step) => own.commit(step).unwrap(),
                    Err(error) => {
                        let refused = matches!(error, CacheError::NoPages { .. });
                        let is_full = matches!(error, CacheError::TooLong { .. });
                        assert!(refused || is_full, "{error}");
                    }
                },
            }
            let mut writable = BTreeSet::new();
            for cache in &caches {
                let tables = tables(cache);
                for (pages, length) in tables.iter().zip(cache.lengths()) {
                    assert!(pages.len() * POSITIONS >= *length, "{round}: {pages:?}");
                    for page in &pages[length / POSITIONS..] {
                        assert!(writable.insert(*page), "{round}: two write to {page}");
                    }
                }
            }
            let all = caches.iter().flat_map(tables).flatten();
            let all: BTreeSet<i64> = all.collect();
            assert_eq!(all.len() + pool.free(), 12, "{round}: a page is lost");
        }
        drop(caches);
        assert_eq!(pool.free(), 12);
    }
}

#[test]
fn rows_stay_when_a_pool_grows_and_are_copied_by_pages() {
    let _alone = repository::alone_on_wgpu();
    for device in DEVICES.into_iter().filter_map(|spec| spec.init().ok()) {
        let pool = pool(&device, 2);
        let pages = pool.take(2).unwrap();
        for (number, rows) in pool.rows().iter().enumerate() {
            let all = rows.take();
            let [count, of_page, width] = all.dims();
            let page = Tensor::<1, Int>::arange(0..count as i64, &device).float();
            let page = page.reshape([count, 1, 1]) + number as f64 * 10.0;
            rows.put(page.expand([count, of_page, width]) + all.zeros_like());
        }
        // Each row has ten times the number of its compressor, and its page.
        let of_pages = |pool: &PagePool| -> Vec<Vec<f32>> {
            let pages = pool.rows().iter().map(|rows| {
                let first = rows.all().narrow(1, 0, 1).narrow(2, 0, 1);
                first.try_into_vec_as::<f32>().unwrap()
            });
            pages.collect()
        };
        pool.copy(&pages[0], &pages[1]);
        let expected = |pages: [f32; 3]| -> Vec<Vec<f32>> {
            let of = |number: u8| pages.map(|page| page + f32::from(number) * 10.0).to_vec();
            (0..3).map(of).collect()
        };
        assert_eq!(of_pages(&pool), expected([0.0, 1.0, 1.0]));
        pool.grow(1).unwrap();
        let grown: Vec<Vec<f32>> = expected([0.0, 1.0, 1.0]);
        let grown: Vec<Vec<f32>> = grown
            .into_iter()
            .map(|rows| [rows, vec![0.0]].concat())
            .collect();
        assert_eq!(of_pages(&pool), grown);
    }
}
