//! Forward calls as they are launched.

use std::error::Error;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_ds4_ops::attention::DECODE_TOKENS;
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

/// Positions of the largest call: the last token and four drafts.
const MAX_POSITIONS: usize = 5;
/// Tokens of a forward call that only fills the cache.
const FILL: usize = 64;
/// Calls of each kind before the first that counts: kernels are compiled, memory is allocated.
const WARM_UPS: usize = 3;

/// Contents of a cache before anything is timed.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    pub batch: usize,
    pub positions: usize,
    /// Whether rows are random, in position of those that a model computes for some text.
    pub drawn: bool,
}

impl Context {
    /// A cache with capacity for `free` more positions.
    fn cache(self, model: &Model, free: usize, rollback: usize) -> Result<Cache, Box<dyn Error>> {
        let options = CacheConfig {
            batch: self.batch,
            capacity: self.positions + free,
            rollback: Rollback::Bounded(rollback),
            ..CacheConfig::default()
        };
        let mut cache = model.new_cache(options)?;
        if self.drawn {
            cache.fill_random(self.positions, Distribution::Normal(0.0, 1.0))?;
            return Ok(cache);
        }
        for first in (0..self.positions).step_by(FILL) {
            let count = FILL.min(self.positions - first);
            let ids = any_ids(first, [self.batch, count], model);
            model.forward_streams(ids, &mut cache, &Trace::off())?;
        }
        Ok(cache)
    }
}

/// Prints the time of a forward call over 1 to 5 positions, as far as all sequences together have
/// at most [`DECODE_TOKENS`] tokens.
pub fn steps(model: &Model, context: Context, samples: usize) -> Result<(), Box<dyn Error>> {
    let device = model.placement.last();
    let most = (DECODE_TOKENS / context.batch).clamp(1, MAX_POSITIONS);
    let mut cache = context.cache(model, most, most)?;
    let mut times = vec![Vec::new(); most];
    for round in 0..WARM_UPS + samples {
        // Interleave all kinds, so that a temporary slowdown of the machine affects all of them.
        for (positions, times) in (1..).zip(&mut times) {
            let ids = any_ids(context.positions, [context.batch, positions], model);
            let time = step(model, ids, &mut cache, device)?;
            if round >= WARM_UPS {
                times.push(time);
            }
        }
    }
    println!("positions      ms   ratio   fastest   slowest");
    let times: Vec<Timings> = times.into_iter().map(Timings::new).collect();
    for (positions, time) in (1..).zip(&times) {
        println!(
            "{positions:>9} {:>7.3} {:>7.3} {:>9.3} {:>9.3}",
            time.median(),
            time.median() / times[0].median(),
            time.fastest(),
            time.slowest()
        );
    }
    Ok(())
}

/// Milliseconds of a forward call, logits included, until the device has finished it. Leaves the
/// cache as it was.
fn step(
    model: &Model,
    ids: Tensor<2, Int>,
    cache: &mut Cache,
    device: &Device,
) -> Result<f64, Box<dyn Error>> {
    let [_, positions] = ids.dims();
    device.sync()?;
    let start = Instant::now();
    let logits = model.forward(ids, cache)?;
    device.sync()?;
    let time = start.elapsed().as_secs_f64() * 1e3;
    drop(logits);
    cache.remove_newest(positions)?;
    Ok(time)
}

/// Arbitrary tokens `[sequences, count]`, for the positions from `first` on.
pub fn any_ids(first: usize, [sequences, count]: [usize; 2], model: &Model) -> Tensor<2, Int> {
    let vocabulary = model.config().vocab_size;
    let id = |position: usize| (position * 7919 % vocabulary) as i32;
    let ids: Vec<i32> = (first..first + sequences * count).map(id).collect();
    let device = model.embedding.val().device();
    Tensor::from_data(TensorData::new(ids, [sequences, count]), &device)
}

/// Measurements in ascending order.
pub struct Timings(Vec<f64>);

impl Timings {
    pub fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The middle value, or the mean of the two middle values.
    pub fn median(&self) -> f64 {
        let last = self.0.len() - 1;
        f64::midpoint(self.0[last / 2], self.0[last.div_ceil(2)])
    }

    /// The least value that so many percent of all do not exceed.
    pub fn percentile(&self, percent: usize) -> f64 {
        let count = (self.0.len() * percent).div_ceil(100);
        self.0[count.saturating_sub(1)]
    }

    fn fastest(&self) -> f64 {
        self.0[0]
    }

    fn slowest(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_value_that_was_measured() {
        let of = |count: u32| Timings::new((1..=count).rev().map(f64::from).collect());
        for (count, percent, expected) in [
            (1, 0, 1.0),
            (1, 99, 1.0),
            (4, 50, 2.0),
            (5, 50, 3.0),
            (100, 99, 99.0),
            (101, 99, 100.0),
            (200, 99, 198.0),
            (7, 100, 7.0),
        ] {
            assert_eq!(
                of(count).percentile(percent),
                expected,
                "{percent} of {count}"
            );
        }
    }
}
