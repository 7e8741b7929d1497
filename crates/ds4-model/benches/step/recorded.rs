//! Steps of any number of sequences and tokens, recorded once and replayed by the device without the host.

use std::error::Error;
use std::time::Instant;

use burn::backend::{Backend, BackendGraph, Dispatch};
use burn::tensor::{Device, Distribution, IndexingUpdateOp, Int, Tensor};
use burn_ds4_ops::sampling::{Draws, Sampling, sample, verify};
use burn_ds4_ops::topk::{Windows, top_k_ids};
use ds4_model::cache::{Cache, CacheConfig, Rollback};
use ds4_model::config::ModelConfig;
use ds4_model::model::Model;
use ds4_model::trace::Trace;

use crate::calls::{Sorted, any_ids};

/// Steps before a recording: the first may copy what it writes, from the second on each is like all the others.
const WARM_UPS: usize = 2;
/// Times that many replays are timed together, of which the median is taken.
const ROUNDS: usize = 3;

/// What one recording does. Whatever it chooses is what the next replay goes on from, one or two positions later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Decodes one token.
    Step,
    /// Verifies one draft: the trunk over two positions.
    Verification,
    /// Verifies one draft and makes the next: the trunk and the MTP layer, each over two positions.
    Round,
}

impl Work {
    pub const ALL: [Self; 3] = [Self::Step, Self::Verification, Self::Round];

    /// Positions of each sequence.
    pub fn positions(self) -> usize {
        match self {
            Self::Step => 1,
            Self::Verification | Self::Round => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "1 token",
            Self::Verification => "2 tokens",
            Self::Round => "2 tokens and MTP",
        }
    }
}

/// Of a replay.
pub struct Measured {
    /// Milliseconds of one of many.
    pub replay: f64,
    /// Microseconds that the host is busy with one.
    pub host: f64,
}

/// What a piece of work reads and writes.
pub struct Sequences<'a> {
    model: &'a Model,
    work: Work,
    trunk: Cache,
    mtp: Cache,
    /// The tokens to go on from, `[batch, positions]`, always in the same place. Taken while they are written.
    ids: Option<Tensor<2, Int>>,
    /// Where each is written.
    places: Vec<Tensor<1, Int>>,
    /// What a greedy choice does not read.
    draws: Draws,
    samples: usize,
}

impl<'a> Sequences<'a> {
    /// Sequences with caches that are filled at random, and have room for what `samples` replays and those around them write.
    pub fn new(
        model: &'a Model,
        config: &ModelConfig,
        work: Work,
        [batch, context]: [usize; 2],
        samples: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let device = model.embedding.val().device();
        let calls = 2 * WARM_UPS + 1 + (ROUNDS + 1) * samples;
        let options = CacheConfig {
            batch,
            capacity: context + calls * work.positions(),
            rollback: Rollback::Bounded(2 * (work.positions() - 1)),
            ..CacheConfig::default()
        };
        let mut trunk = model.new_cache(config, options)?;
        let mut mtp = model.new_mtp_cache(config, options)?;
        for cache in [&mut trunk, &mut mtp] {
            cache.fill_random(context, Distribution::Normal(0.0, 1.0))?;
        }
        let place = |place: usize| Tensor::from_data([place as i32], &device);
        Ok(Self {
            model,
            work,
            trunk,
            mtp,
            ids: Some(any_ids(0, [batch, work.positions()], config, &device)),
            places: (0..work.positions()).map(place).collect(),
            draws: Draws {
                seeds: Tensor::zeros([batch, 2], &device),
                positions: Tensor::zeros([batch], &device),
            },
            samples,
        })
    }

    /// Enqueues the work once.
    pub fn launch(&mut self) -> Result<(), Box<dyn Error>> {
        let (model, trace) = (self.model, &Trace::off());
        let ids = self.ids.clone().expect("they are put back");
        let [batch, positions] = ids.dims();
        let streams = model.forward_streams(ids.clone(), &mut self.trunk, trace)?;
        let logits = model.logits(streams.clone());
        let [_, _, vocabulary] = logits.dims();
        let greedy = Sampling::default();
        if self.work == Work::Step {
            drop(ids);
            let logits = logits.reshape([batch, vocabulary]);
            let token = sample(logits, &greedy, self.draws.clone())?;
            self.put(0, token.reshape([batch, 1]));
            return Ok(());
        }
        let drafts = ids.narrow(1, 1, positions - 1);
        let tokens = verify(logits, drafts, &greedy, self.draws.clone())?.tokens;
        // As if no draft stood, which is as much work as any other outcome.
        self.put(0, tokens.clone().narrow(1, 0, 1));
        if self.work == Work::Round {
            let streams = model.forward_mtp(streams, tokens, &mut self.mtp, trace)?;
            let logits = model.mtp_logits(streams.narrow(1, 0, 1));
            let logits = logits.reshape([batch, vocabulary]);
            self.put(1, top_k_ids(logits, Windows::All, 1));
        }
        Ok(())
    }

    fn put(&mut self, place: usize, tokens: Tensor<2, Int>) {
        let ids = self.ids.take().expect("they are put back");
        let tokens = tokens.cast(ids.dtype());
        let place = self.places[place].clone();
        self.ids = Some(ids.select_assign(1, place, tokens, IndexingUpdateOp::Assign));
    }

    /// Records the work, and times replays of it.
    pub fn measure(mut self) -> Result<Measured, Box<dyn Error>> {
        let device = self.model.embedding.val().device();
        let recording = Recording::new(&device, || self.launch())?;
        // Safety, of all replays: `self` and the model own every tensor of the work, and have room for as many; nothing else uses
        // them, and this thread has recorded it.
        let replay = || unsafe { recording.replay() };
        for _ in 0..WARM_UPS {
            replay()?;
        }
        let mut host = Vec::with_capacity(self.samples);
        for _ in 0..self.samples {
            device.sync()?;
            let start = Instant::now();
            replay()?;
            host.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            device.sync()?;
            let start = Instant::now();
            for _ in 0..self.samples {
                replay()?;
            }
            device.sync()?;
            times.push(start.elapsed().as_secs_f64() * 1e3 / self.samples as f64);
        }
        // Before what it reads and writes.
        drop(recording);
        Ok(Measured {
            replay: Sorted::new(times).median(),
            host: Sorted::new(host).median(),
        })
    }
}

/// Launches recorded once.
struct Recording {
    device: Device,
    graph: BackendGraph<Dispatch>,
}

impl Recording {
    /// Records what `work` launches, after it has run a few times and left behind the memory that it takes: nothing can be allocated
    /// meanwhile.
    fn new(
        device: &Device,
        mut work: impl FnMut() -> Result<(), Box<dyn Error>>,
    ) -> Result<Self, Box<dyn Error>> {
        let dispatch = device.as_dispatch();
        Dispatch::graph_prepare(dispatch)?;
        let mut record = || -> Result<(), Box<dyn Error>> {
            for _ in 0..WARM_UPS {
                work()?;
                device.sync()?;
            }
            Dispatch::graph_start_capture(dispatch)?;
            work()
        };
        let recorded = record();
        // In any case: a device must not go on recording what comes after.
        let graph = Dispatch::graph_stop_capture(dispatch);
        recorded?;
        Ok(Self {
            device: device.clone(),
            graph: graph?,
        })
    }

    /// Enqueues the recorded launches.
    ///
    /// # Safety
    ///
    /// Every tensor that the work read or wrote must be alive, in the same place and not in use by another thread, and this thread must
    /// have recorded it.
    unsafe fn replay(&self) -> Result<(), Box<dyn Error>> {
        // Safety: as the caller promises.
        Ok(unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) }?)
    }
}
