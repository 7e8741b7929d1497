//! Forward calls of what drafts.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::transfer::transfer;

use super::forward::check_batch;
use super::modules::Model;
use super::trunk::embed;
use crate::cache::{Cache, CacheError, Step};
use crate::dspark::Dspark;
use crate::trace::Trace;

impl Model {
    /// Runs the MTP layer over new positions of every sequence, and returns its streams.
    ///
    /// # Arguments
    ///
    /// * `streams` - `[batch, positions, n, d_model]`: the trunk's at these positions or, to draft
    ///   further, the MTP layer's own.
    /// * `next_ids` - `[batch, positions]`: the token after each position.
    /// * `cache` - the cache of the MTP layer, which holds all positions before these.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    ///
    /// If the model has no MTP layer, or `streams` and `next_ids` differ in batch or positions.
    ///
    /// # Example
    ///
    /// The token after a prompt, and a draft of the one that follows it.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor, s};
    /// use ds4_model::{cache::CacheConfig, generate::SpecialTokens};
    /// use ds4_model::{pipeline::Pipeline, trace::Trace};
    ///
    /// let (device, off, options) = (Device::flex(), Trace::off(), CacheConfig::default());
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny".as_ref(), &device)?;
    /// let (model, tokenizer) = (&pipeline.model, &pipeline.tokenizer);
    /// let (mut cache, mut drafter) = (model.new_cache(options)?, model.new_mtp_cache(options)?);
    /// let ids: Vec<i64> = tokenizer.encode("And God said,")?.into_iter().map(i64::from).collect();
    /// let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).unsqueeze::<2>();
    /// let most_likely = |logits: Tensor<3>| logits.slice(s![.., -1..]).argmax(2).squeeze_dim(2);
    ///
    /// let streams = model.forward_streams(ids.clone(), &mut cache, &off)?;
    /// let token: Tensor<2, Int> = most_likely(model.logits(streams.clone()));
    /// let next_ids = Tensor::cat(vec![ids.slice(s![.., 1..]), token.clone()], 1);
    /// let streams = model.forward_mtp(streams, next_ids, &mut drafter, &off)?;
    /// let draft = most_likely(model.mtp_logits(streams));
    /// let text: Vec<u32> = Tensor::cat(vec![token, draft], 1).into_data().iter().collect();
    /// assert_eq!(tokenizer.decode(&text, SpecialTokens::Skip)?, " Thou");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_mtp(
        &self,
        streams: Tensor<4>,
        next_ids: Tensor<2, Int>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<Tensor<4>, CacheError> {
        let mtp = self.mtp.as_ref().expect("the model has no MTP layer");
        let [batch, positions] = next_ids.dims();
        check_batch("next_ids", batch, cache)?;
        cache.check_layers([mtp.block.attention.kind()].into_iter())?;
        assert_eq!(
            streams.dims()[..2],
            [batch, positions],
            "streams and next_ids must have the same batch and positions"
        );
        let step = cache.begin(positions)?;
        let next_ids = transfer(self.in_vocabulary(next_ids), self.placement.last());
        let embedded = self.embed_for_drafter(next_ids.clone());
        let layer = &mut cache.layers_mut()[0];
        let streams = mtp.forward(
            streams,
            embedded,
            next_ids,
            &step,
            layer,
            &trace.scope("mtp"),
        );
        cache.commit(step)?;
        Ok(streams)
    }

    /// The MTP layer's logits at its streams: row t predicts the token at t + 2; f32
    /// `[batch, positions, vocabulary]`.
    ///
    /// # Panics
    ///
    /// If the model has no MTP layer.
    pub fn mtp_logits(&self, streams: Tensor<4>) -> Tensor<3> {
        let mtp = self.mtp.as_ref().expect("the model has no MTP layer");
        self.logits_of(mtp.hidden(streams))
    }

    /// Tells the DSpark drafter of new positions of every sequence, by the trunk's
    /// [taps](Self::forward_tapped) of the drafter's target layers.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    ///
    /// If the model has no DSpark drafter, or the taps are of other layers.
    pub fn append_dspark(
        &self,
        taps: Tensor<3>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<(), CacheError> {
        let dspark = self.expect_dspark();
        let [batch, positions, _] = taps.dims();
        let step = self.begin_dspark("taps", [batch, positions], cache)?;
        dspark.append(taps, &step, cache.layers_mut(), &trace.scope("dspark"));
        cache.commit(step)
    }

    /// Runs the DSpark drafter over a block that begins with `tokens`, and returns its streams:
    /// `[batch, block, n, d_model]`, of which [`Dspark::choose`] makes drafts. Where the
    /// [last connection](crate::config::ModelConfig::late_pre_mix) collapses them, n is 1.
    ///
    /// The cache does not count the positions of the block: the next ones take their places.
    ///
    /// # Arguments
    ///
    /// * `tokens` - `[batch, 1]`: the token after the positions that the drafter was [told
    ///   of](Self::append_dspark).
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    ///
    /// If the model has no DSpark drafter.
    ///
    /// # Example
    ///
    /// The token after a prompt is a comma. These are the drafts that follow it, of which the model
    /// accepts the first.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor, s};
    /// use ds4_model::{cache::CacheConfig, generate::SpecialTokens};
    /// use ds4_model::{pipeline::Pipeline, trace::Trace};
    ///
    /// let (device, off, options) = (Device::flex(), Trace::off(), CacheConfig::default());
    /// let pipeline = Pipeline::open("../../assets/ds4-tiny-dspark".as_ref(), &device)?;
    /// let model = &pipeline.model;
    /// let mut cache = model.new_cache(options)?;
    /// let mut drafter = model.new_dspark_cache(options)?;
    /// let prompt = pipeline.encode("Once upon a time")?;
    /// let ids: Vec<i64> = prompt.into_iter().map(i64::from).collect();
    /// let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).unsqueeze::<2>();
    ///
    /// let dspark = model.dspark.as_ref().expect("a DSpark drafter");
    /// let targets = &dspark.params.target_layers;
    /// let (streams, taps) = model.forward_tapped(ids, &mut cache, targets, &off)?;
    /// model.append_dspark(taps.expect("of its layers"), &mut drafter, &off)?;
    /// let token = model.logits(streams.slice(s![.., -1..])).argmax(2).squeeze_dim::<2>(2);
    /// let block = model.forward_dspark(token.clone(), &mut drafter, &off)?;
    /// let drafts = dspark.choose(block, token, model.output.val(), &off)?;
    /// let text: Vec<u32> = drafts.ids.into_data().iter().collect();
    /// let text = pipeline.tokenizer.decode(&text, SpecialTokens::Skip)?;
    /// assert_eq!(text, " and the LORD, and");
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_dspark(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut Cache,
        trace: &Trace,
    ) -> Result<Tensor<4>, CacheError> {
        let dspark = self.expect_dspark();
        let size = dspark.params.block_size;
        let [batch, _] = tokens.dims();
        let step = self.begin_dspark("tokens", [batch, size], cache)?;
        let step = step.not_causal();
        let tokens = transfer(self.in_vocabulary(tokens), self.placement.last());
        let filler = i64::from(dspark.params.noise_token_id);
        let like = (&tokens.device(), tokens.dtype());
        let block = Tensor::full([batch, size], filler, like);
        let block = block.slice_assign([0..batch, 0..1], tokens);
        let embedded = self.embed_for_drafter(block.clone());
        let layers = cache.layers_mut();
        let trace = trace.scope("dspark");
        Ok(dspark.forward(embedded, block, &step, layers, &trace))
    }

    fn begin_dspark(
        &self,
        argument: &'static str,
        [batch, positions]: [usize; 2],
        cache: &mut Cache,
    ) -> Result<Step, CacheError> {
        check_batch(argument, batch, cache)?;
        let layers = self.expect_dspark().layers.iter();
        cache.check_layers(layers.map(|layer| layer.attention.kind()))?;
        cache.begin(positions)
    }

    fn expect_dspark(&self) -> &Dspark {
        let dspark = self.dspark.as_ref();
        dspark.expect("the model has no DSpark drafter")
    }

    /// Embeddings `[batch, positions, d_model]` on the device of what drafts.
    fn embed_for_drafter(&self, token_ids: Tensor<2, Int>) -> Tensor<3> {
        let own = self.draft_embedding.clone();
        embed(own.unwrap_or_else(|| self.embedding.val()), token_ids)
    }
}
