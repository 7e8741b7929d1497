//! Forward calls of the trunk.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::collective::GroupError;
use burn_ds4_ops::transfer::{transfer, transfer_in_turn};

use super::modules::Model;
use super::passing::Passing;
use crate::block::{flattened, unflattened};
use crate::cache::{Cache, CacheError, OpenStep, Step};
use crate::config::AttentionKind;
use crate::hyper_connection::Streams;
use crate::linear::project_f32;
use crate::parallel::TensorParallel;
use crate::trace::Trace;

impl Model {
    /// Runs the trunk over new tokens of every sequence, and returns the logits at each: f32
    /// `[batch, positions, vocabulary]`.
    ///
    /// # Arguments
    ///
    /// * `token_ids` - `[batch, positions]`; ids outside the vocabulary are read as the nearest id
    ///   inside it.
    /// * `cache` - the positions so far; the new positions are added to it.
    ///
    /// # Errors
    ///
    /// If batch or layers are not those of the cache, or the cache [cannot take](Cache::begin) the
    /// new positions.
    ///
    /// # Example
    ///
    /// The token after a prompt.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor, s};
    /// use ds4_model::{cache::CacheConfig, generate::SpecialTokens, pipeline::Pipeline};
    ///
    /// let device = Device::flex();
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &device)?;
    /// let prompt = pipeline.encode("Once upon a time")?;
    /// let ids: Vec<i64> = prompt.into_iter().map(i64::from).collect();
    /// let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).unsqueeze();
    /// let mut cache = pipeline.model.new_cache(CacheConfig::default())?;
    /// let logits = pipeline.model.forward(ids, &mut cache)?;
    /// let next = logits.slice(s![.., -1..]).argmax(2).into_data().iter::<u32>().next();
    /// let next = pipeline.tokenizer.decode(&[next.unwrap()], SpecialTokens::Keep)?;
    /// assert_eq!(next, ",");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<Tensor<3>, CacheError> {
        let hidden = self.forward_hidden(token_ids, cache)?;
        Ok(self.logits_of(hidden))
    }

    /// Runs the trunk like [`forward`](Self::forward), and returns the hidden states that the
    /// output matrix multiplies: `[batch, positions, d_model]`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_hidden(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
    ) -> Result<Tensor<3>, CacheError> {
        let positions = token_ids.dims();
        let (streams, _) = self.run(token_ids, cache, &[], &Trace::off())?;
        Ok(self.hidden_of(streams, positions))
    }

    /// Runs the trunk like [`forward`](Self::forward), and returns the streams before the head:
    /// `[batch, positions, n, d_model]`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_streams(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<Tensor<4>, CacheError> {
        let (streams, _) = self.forward_tapped(token_ids, cache, &[], trace)?;
        Ok(streams)
    }

    /// Runs the trunk like [`forward_streams`](Self::forward_streams). The second result are the
    /// taps: the mean over the streams of the output of each layer in `taps`, in ascending order,
    /// side by side: `[batch, positions, taps · d_model]`; `None` without any.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_tapped(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Result<(Tensor<4>, Option<Tensor<3>>), CacheError> {
        let positions = token_ids.dims();
        let (streams, taps) = self.run(token_ids, cache, taps, trace)?;
        Ok((unflattened(streams, positions), taps))
    }

    /// The streams before the head, `[batch * positions, n, d_model]`, and the taps.
    fn run(
        &self,
        token_ids: Tensor<2, Int>,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Result<(Streams, Option<Tensor<3>>), CacheError> {
        let [batch, positions] = token_ids.dims();
        check_batch("token_ids", batch, cache)?;
        let open = self.open(positions, cache)?;
        if let Some(parallel) = &self.parallel {
            let devices = parallel.devices().iter();
            let token_ids = devices.map(|device| transfer(token_ids.clone(), device));
            let ranks = self.run_ranks((0, token_ids.collect()), open, cache, taps, trace);
            cache.close(open)?;
            let last = ranks.into_iter().next_back();
            return Ok(last.expect("there is a rank at least").into_parts());
        }
        let mut passing: Option<Passing> = None;
        for (part, run) in self.placement.runs().iter().enumerate() {
            let (given, token_ids) = match passing {
                None => (None, transfer(token_ids.clone(), &run.device)),
                Some(passing) => {
                    let rows = transfer(passing.rows(), &run.device);
                    // The host must not wait: it has to launch the sender's next chunk meanwhile.
                    // SAFETY: all that the device still has to do is to receive the rows.
                    let token_ids = unsafe { transfer_in_turn(token_ids.clone(), &run.device) };
                    (Some(self.passed(rows, [batch, positions])), token_ids)
                }
            };
            let step = cache.step(open, part);
            passing = Some(self.run_part(part, (token_ids, given), (&step, cache), taps, trace));
            cache.advance(part, step);
        }
        cache.close(open)?;
        Ok(passing.expect("there is at least one run").into_parts())
    }

    /// Runs all layers on the devices of some ranks, the first of them with the first of the token
    /// ids `[batch, positions]`. The caches take their rows, and the lengths there advance.
    pub(crate) fn run_ranks(
        &self,
        (first, token_ids): (usize, Vec<Tensor<2, Int>>),
        open: OpenStep,
        cache: &mut Cache,
        taps: &[usize],
        trace: &Trace,
    ) -> Vec<Passing> {
        let parallel = self.parallel.as_ref().expect("layers in parts");
        let (layers, last) = (self.layers.len(), parallel.ranks() - 1);
        let all = Trace::off();
        let trace = |rank: usize| if rank == last { trace } else { &all };
        let ids = token_ids.into_iter().map(|ids| self.in_vocabulary(ids));
        let ids: Vec<Tensor<2, Int>> = ids.collect();
        let positions = ids[0].dims();
        let ranks = first..first + ids.len();
        let steps = ranks.clone().map(|rank| cache.step(open, rank));
        let steps: Vec<Step> = steps.collect();
        let mut passings: Vec<Passing> = ranks
            .clone()
            .zip(&ids)
            .map(|(rank, ids)| {
                let embedding = match parallel.other(rank) {
                    Some(rank) => rank.embedding.clone(),
                    None => self.embedding.val(),
                };
                self.embedded(embedding, ids.clone())
            })
            .collect();
        for index in 0..layers {
            let block = |rank: usize| match parallel.other(rank) {
                Some(rank) => &rank.layers[index],
                None => &self.layers[index],
            };
            let name = format!("layer{index}");
            let given = passings.iter().zip(ranks.clone()).zip(&steps);
            let partials = given.map(|((passing, rank), step)| {
                let cache = &mut cache.layers_mut()[rank * layers + index];
                let (streams, trace) = (passing.streams.clone(), trace(rank).scope(&name));
                block(rank).attend(streams, positions, step, cache, &trace)
            });
            let attended = parallel.sum(first, partials.collect());
            let given = attended.into_iter().zip(ranks.clone());
            let partials = given.zip(ids.iter().zip(&steps));
            let partials = partials.map(|((streams, rank), (ids, step))| {
                let trace = trace(rank).scope(&name);
                block(rank).mix_experts(streams, ids.clone(), step, &trace)
            });
            let mixed = parallel.sum(first, partials.collect());
            for ((passing, streams), rank) in passings.iter_mut().zip(mixed).zip(ranks.clone()) {
                passing.streams = streams;
                let trace = trace(rank).scope(&name);
                trace.record_with("output", || unflattened(passing.streams.clone(), positions));
                if rank == last && taps.contains(&index) {
                    passing.tap(positions);
                }
            }
        }
        for (rank, step) in ranks.zip(steps) {
            cache.advance(rank, step);
        }
        passings
    }

    /// The streams of token ids `[batch, positions]` before the first layer.
    fn embedded(&self, embedding: Tensor<2>, token_ids: Tensor<2, Int>) -> Passing {
        let embedded = embed(embedding, token_ids);
        let streams = embedded
            .unsqueeze_dim::<4>(2)
            .repeat_dim(2, self.config.hc_mult);
        Passing {
            streams: flattened(streams),
            tapped: Vec::new(),
        }
    }

    /// The logits at what the ranks from `first` on have, where layers are in parts:
    /// `[batch, positions, vocabulary]` on each of them.
    pub(crate) fn logits_of_ranks(
        &self,
        first: usize,
        streams: Vec<Streams>,
        [batch, positions]: [usize; 2],
    ) -> Vec<Tensor<3>> {
        let parallel = self.parallel.as_ref().expect("layers in parts");
        let hidden = streams.into_iter().zip(first..);
        let hidden = hidden.map(|(streams, rank)| match parallel.other(rank) {
            Some(rank) => rank.head.forward_norm(streams, &rank.norm),
            None => self.head.forward_norm(streams, &self.norm),
        });
        let logits = parallel.logits(first, hidden.collect()).into_iter();
        let logits = logits.map(|logits| {
            let [_, vocabulary] = logits.dims();
            logits.reshape([batch, positions, vocabulary])
        });
        logits.collect()
    }

    /// Waits for what the calling thread has launched, and tells whether a device that has parts of
    /// the layers has waited in vain for another. What has been computed since this was asked last
    /// is worth nothing then.
    ///
    /// # Errors
    ///
    /// If one has.
    pub fn check_group(&self) -> Result<(), GroupError> {
        let parallel = self.parallel.as_ref();
        parallel.map_or(Ok(()), |parallel| parallel.group().check())
    }

    /// What the device before has passed on as [rows](Passing::rows).
    pub(crate) fn passed(&self, rows: Tensor<2>, positions: [usize; 2]) -> Passing {
        let [_, d_model] = self.embedding.dims();
        Passing::of_rows(rows, self.config.hc_mult, d_model, positions)
    }

    /// Begins a step of the trunk.
    pub(crate) fn open(&self, positions: usize, cache: &mut Cache) -> Result<OpenStep, CacheError> {
        let kinds = self.layers.iter().map(|layer| layer.attention.kind());
        let kinds: Vec<AttentionKind> = kinds.collect();
        let ranks = self.parallel.as_ref().map_or(1, TensorParallel::ranks);
        cache.check_layers(kinds.repeat(ranks).into_iter())?;
        if let Some(parallel) = &self.parallel {
            parallel.group().prepare()?;
        }
        cache.open(positions)
    }

    /// Runs the layers of one device over token ids `[batch, positions]`, after what the device
    /// before it has passed on.
    pub(crate) fn run_part(
        &self,
        part: usize,
        (token_ids, given): (Tensor<2, Int>, Option<Passing>),
        (step, cache): (&Step, &mut Cache),
        taps: &[usize],
        trace: &Trace,
    ) -> Passing {
        let positions = token_ids.dims();
        let token_ids = self.in_vocabulary(token_ids);
        let mut passing =
            given.unwrap_or_else(|| self.embedded(self.embedding.val(), token_ids.clone()));
        for index in self.placement.runs()[part].layers.clone() {
            let (layer, cache) = (&self.layers[index], &mut cache.layers_mut()[index]);
            let trace = trace.scope(&format!("layer{index}"));
            let streams = passing.streams;
            passing.streams = layer.forward(streams, token_ids.clone(), step, cache, &trace);
            if taps.contains(&index) {
                passing.tap(positions);
            }
        }
        passing
    }

    /// The trunk's logits at streams `[batch, positions, n, d_model]`: f32
    /// `[batch, positions, vocabulary]`.
    pub fn logits(&self, streams: Tensor<4>) -> Tensor<3> {
        self.logits_of(self.hidden(streams))
    }

    /// The hidden states that the output matrix multiplies, from streams
    /// `[batch, positions, n, d_model]`: `[batch, positions, d_model]`.
    pub fn hidden(&self, streams: Tensor<4>) -> Tensor<3> {
        let [batch, positions, _, _] = streams.dims();
        self.hidden_of(flattened(streams), [batch, positions])
    }

    fn hidden_of(&self, streams: Streams, [batch, positions]: [usize; 2]) -> Tensor<3> {
        let [_, _, d_model] = streams.dims();
        let hidden = self.head.forward_norm(streams, &self.norm);
        hidden.reshape([batch, positions, d_model])
    }

    /// Multiplies hidden states `[batch, positions, d_model]` by the output matrix: f32
    /// `[batch, positions, vocabulary]`.
    pub fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        project_f32(hidden, self.output.val())
    }

    pub(super) fn in_vocabulary(&self, token_ids: Tensor<2, Int>) -> Tensor<2, Int> {
        let [vocabulary, _] = self.embedding.dims();
        token_ids.clamp(0, vocabulary as i64 - 1)
    }
}

/// Rows `[batch, positions, d_model]` of a matrix `[vocabulary, d_model]`.
pub(super) fn embed(embedding: Tensor<2>, token_ids: Tensor<2, Int>) -> Tensor<3> {
    let ([batch, positions], [_, d_model]) = (token_ids.dims(), embedding.dims());
    let embedded = embedding.select(0, token_ids.reshape([batch * positions]));
    embedded.reshape([batch, positions, d_model])
}

pub(super) fn check_batch(
    argument: &'static str,
    actual: usize,
    cache: &Cache,
) -> Result<(), CacheError> {
    if actual == cache.batch() {
        return Ok(());
    }
    Err(CacheError::BatchMismatch {
        argument,
        expected: cache.batch(),
        actual,
    })
}
