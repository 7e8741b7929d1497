//! Forward calls and decoding as they are launched, and what a decoder makes of them.

use std::error::Error;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_ds4_ops::attention::FEW_TOKENS;
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::config::ModelConfig;
use ds4_model::generate::{Decoder, MAX_DRAFTS};
use ds4_model::model::Model;
use ds4_model::trace::Trace;

/// Positions of the largest verification: the last token and all drafts.
const MAX_POSITIONS: usize = 1 + MAX_DRAFTS;
/// Tokens of a forward call that only fills the cache.
const FILL: usize = 64;
/// Calls of each kind before the first that counts: kernels are compiled, memory is allocated.
const WARM_UPS: usize = 3;

/// What is in a cache before anything is timed.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    pub batch: usize,
    pub positions: usize,
    /// Rows are drawn, in place of a model's for some text.
    pub drawn: bool,
}

impl Context {
    /// A cache that has room for so many more positions.
    fn cache(
        self,
        model: &Model,
        config: &ModelConfig,
        room: usize,
        rollback: usize,
    ) -> Result<Cache, Box<dyn Error>> {
        let options = CacheConfig {
            batch: self.batch,
            capacity: self.positions + room,
            rollback: Rollback::Bounded(rollback),
            ..CacheConfig::default()
        };
        let mut cache = model.new_cache(config, options)?;
        if self.drawn {
            cache.fill_random(self.positions, Distribution::Normal(0.0, 1.0))?;
            return Ok(cache);
        }
        let device = model.embedding.val().device();
        for first in (0..self.positions).step_by(FILL) {
            let count = FILL.min(self.positions - first);
            let ids = any_ids(first, [self.batch, count], config, &device);
            model.forward_streams(ids, &mut cache, &Trace::off())?;
        }
        Ok(cache)
    }
}

/// Prints the time of a forward call over 1 to 5 positions, or as many as are few tokens together.
pub fn steps(
    model: &Model,
    config: &ModelConfig,
    context: Context,
    samples: usize,
    device: &Device,
) -> Result<(), Box<dyn Error>> {
    let most = (FEW_TOKENS / context.batch).clamp(1, MAX_POSITIONS);
    let mut cache = context.cache(model, config, most, most)?;
    let mut times = vec![Vec::new(); most];
    for round in 0..WARM_UPS + samples {
        // All kinds in turn, so that whatever slows the machine down for a while slows all of them.
        for (positions, times) in (1..).zip(&mut times) {
            let ids = any_ids(
                context.positions,
                [context.batch, positions],
                config,
                device,
            );
            let time = step(model, ids, &mut cache, device)?;
            if round >= WARM_UPS {
                times.push(time);
            }
        }
    }
    println!("positions      ms   ratio   fastest   slowest");
    let times: Vec<Sorted> = times.into_iter().map(Sorted::new).collect();
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

/// Milliseconds of a forward call, logits included, until the device has finished it. The cache is as before.
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
    cache.truncate(positions)?;
    Ok(time)
}

/// Prints the time of greedy decoding, token by token, and what of it is the device's and the host's where a step is replayed.
pub fn decoding(
    model: &Model,
    config: &ModelConfig,
    context: Context,
    samples: usize,
    graphs: bool,
) -> Result<(), Box<dyn Error>> {
    let device = model.embedding.val().device();
    let cache = context.cache(model, config, 5 * (samples + FILL), 1)?;
    let mut decoder = Decoder::new(model, cache, graphs)?;
    let kind = if graphs { "recorded" } else { "launched" };
    let start = Instant::now();
    for _ in 0..WARM_UPS {
        decoder.decode(usize::MAX)?;
    }
    let warm_up = start.elapsed().as_secs_f64() * 1e3;
    if graphs && decoder.replays() == 0 {
        let reason = decoder.refusal().unwrap_or("the device has no graphs");
        println!("decode, {kind}: err: {reason}");
        return Ok(());
    }
    let mut tokens = Vec::with_capacity(samples);
    for _ in 0..samples {
        let start = Instant::now();
        decoder.decode(1)?;
        tokens.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let token = Sorted::new(tokens);
    print!(
        "decode, {kind}: ok, {:.3} ms a token with its id read back (fastest {:.3}, slowest {:.3}; {warm_up:.0} ms until then)",
        token.median(),
        token.fastest(),
        token.slowest()
    );
    if !graphs {
        println!();
        return Ok(());
    }
    let mut host = Vec::with_capacity(samples);
    for _ in 0..samples {
        device.sync()?;
        let start = Instant::now();
        decoder.replay()?;
        host.push(start.elapsed().as_secs_f64() * 1e6);
    }
    device.sync()?;
    let start = Instant::now();
    for _ in 0..samples {
        decoder.replay()?;
    }
    device.sync()?;
    let replay = start.elapsed().as_secs_f64() * 1e3 / samples as f64;
    let mut decoder = decoder.with_steps_ahead(1);
    let start = Instant::now();
    for sample in 0..samples {
        decoder.decode(samples - sample)?;
    }
    let late = start.elapsed().as_secs_f64() * 1e3 / samples as f64;
    println!(
        "; with its id read a step late {late:.3} ms; one of many replays {replay:.3} ms, of the host {:.1} us a replay",
        Sorted::new(host).median()
    );
    Ok(())
}

/// Any tokens `[sequences, count]`, for the positions from `first` on.
pub fn any_ids(
    first: usize,
    [sequences, count]: [usize; 2],
    config: &ModelConfig,
    device: &Device,
) -> Tensor<2, Int> {
    let id = |place: usize| (place * 7919 % config.vocab_size) as i32;
    let ids: Vec<i32> = (first..first + sequences * count).map(id).collect();
    Tensor::from_data(TensorData::new(ids, [sequences, count]), device)
}

/// Measurements in order.
pub struct Sorted(Vec<f64>);

impl Sorted {
    pub fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The middle value; the mean of both where there are two.
    pub fn median(&self) -> f64 {
        let last = self.0.len() - 1;
        f64::midpoint(self.0[last / 2], self.0[last.div_ceil(2)])
    }

    fn fastest(&self) -> f64 {
        self.0[0]
    }

    fn slowest(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}
