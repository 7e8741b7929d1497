//! Forward calls of the trunk.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::collective::GroupError;

use super::modules::Model;
use super::trunk::{Ranks, Runs, Trunk};
use crate::block::flattened;
use crate::cache::{Cache, CacheError, OpenStep};
use crate::config::AttentionKind;
use crate::hyper_connection::Streams;
use crate::linear::project_f32;
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
    /// `[batch, positions, n, d_model]`; one stream where the head [has no
    /// gates](crate::hyper_connection::HyperHead::end).
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
    /// taps: the mean over the streams of the output of each layer in `taps`, or of its input where
    /// the drafter [wants that](crate::config::DsparkParams::taps_inputs), in ascending order, side
    /// by side: `[batch, positions, taps · d_model]`; `None` without any.
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
        Ok((self.head.end(streams, positions), taps))
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
        let passing = self.trunk().run(token_ids, open, cache, taps, trace);
        cache.close(open)?;
        Ok(passing.into_parts())
    }

    /// What runs the layers.
    fn trunk(&self) -> Box<dyn Trunk + '_> {
        match Ranks::of(self) {
            Some(ranks) => Box::new(ranks),
            None => Box::new(Runs(self)),
        }
    }

    /// Waits for what the calling thread has launched, and tells whether a device that has parts of
    /// the layers has waited in vain for another. What has been computed since this was asked last
    /// is worth nothing then.
    ///
    /// # Errors
    ///
    /// If one has.
    pub fn check_group(&self) -> Result<(), GroupError> {
        self.trunk().check()
    }

    /// Begins a step of the trunk.
    pub(crate) fn open(&self, positions: usize, cache: &mut Cache) -> Result<OpenStep, CacheError> {
        let kinds = self.layers.iter().map(|layer| layer.attention.kind());
        let kinds: Vec<AttentionKind> = kinds.collect();
        let ranks = self.placement.ranks().len().max(1);
        cache.check_layers(kinds.repeat(ranks).into_iter())?;
        self.trunk().prepare()?;
        cache.open(positions)
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
