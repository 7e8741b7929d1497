//! Caches whose compressed rows are in pages: each text has the bits that it has in a cache of its
//! own, whoever shares the pool.

use ds4_model::cache::{Cache, CacheConfig, PagePool, Rollback};

use crate::cache::{Fixture, text};
use crate::common::{devices, values};

fn options(batch: usize) -> CacheConfig {
    CacheConfig {
        batch,
        capacity: 8,
        rollback: Rollback::Bounded(4),
        ..CacheConfig::default()
    }
}

fn in_pages(fixture: &Fixture, pool: &PagePool, batch: usize) -> Cache {
    let cache = fixture.model.new_cache_in_pages(options(batch), pool);
    cache.expect("the options are valid")
}

/// Feeds the same to a cache in pages and to another one, and compares the bits of all logits.
fn feed(fixture: &Fixture, rows: &[&[u32]], caches: [&mut Cache; 2], what: &str) {
    let [paged, plain] = caches.map(|cache| {
        let logits = fixture.model.forward(fixture.batch(rows), cache);
        values(logits.expect("there are pages"))
    });
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&paged) == bits(&plain), "{what}");
}

#[test]
fn texts_that_share_a_pool_have_the_bits_that_they_have_in_caches_of_their_own() {
    for (name, device) in devices() {
        let fixture = Fixture::open(device);
        let pool = fixture.model.new_page_pool(8);
        pool.grow(40).expect("there is memory");
        let new = || {
            let plain = fixture.model.new_cache(options(1));
            (in_pages(&fixture, &pool, 1), plain.expect("valid options"))
        };
        let [a, b] = [1, 2].map(|seed| text(seed, 60));
        let (mut long, mut long_plain) = new();
        let (mut short, mut short_plain) = new();
        // The two take pages in turn, for chunks and for steps.
        for (from, to) in [(0, 21), (21, 24), (24, 25), (25, 44), (44, 45)] {
            let what = format!("{name}: {from}..{to}");
            let rows = [&a[from..to]];
            feed(&fixture, &rows, [&mut long, &mut long_plain], &what);
            let (from, to) = (from / 2, to / 2);
            if from < to {
                let rows = [&b[from..to]];
                feed(&fixture, &rows, [&mut short, &mut short_plain], &what);
            }
        }
        // Both go on in one cache, and one of them alone, in pages of which it has copied one.
        let mut batch = in_pages(&fixture, &pool, 2);
        let plain = fixture.model.new_cache(options(2));
        let mut plain = plain.expect("valid options");
        for (cache, sources) in [
            (&mut batch, [&long, &short]),
            (&mut plain, [&long_plain, &short_plain]),
        ] {
            for (sequence, source) in sources.into_iter().enumerate() {
                cache.adopt(sequence, source, 0).expect("a cache alike");
            }
        }
        for step in 0..6 {
            let what = format!("{name}: step {step}");
            let rows = [&a[45 + step..46 + step], &b[22 + step..23 + step]];
            feed(&fixture, &rows, [&mut batch, &mut plain], &what);
            let rows = [&b[step..step + 2]];
            feed(&fixture, &rows, [&mut long, &mut long_plain], &what);
            for cache in [&mut batch, &mut plain] {
                if step == 3 {
                    cache.remove_newest(2).expect("so much rollback");
                }
            }
        }
        drop((long, short));
        batch.vacate(0).expect("there is one");
        assert_eq!(pool.free(), 40 - pool.pages_for(26), "{name}");
        drop(batch);
        assert_eq!(pool.free(), 40, "{name}");
    }
}
