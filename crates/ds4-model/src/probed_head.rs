//! A clustered head in place of an output matrix.

use burn::tensor::{Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::flash_head::{
    FlashHead, FlashHeadCandidates, MAX_TOKENS, flash_head_argmax, flash_head_candidates,
    flash_head_logits,
};

/// Tokens of a cluster, where no other number is known to be better.
pub const DEFAULT_CAPACITY: usize = 16;

/// A clustered head and how many of its clusters are probed: what a [`Model`](crate::model::Model)
/// and its [`MtpLayer`](crate::mtp::MtpLayer) can have in place of the output matrix.
///
/// # Example
///
/// ```
/// use burn_ds4_ops::OpError;
/// use burn_ds4_ops::flash_head::{BuildOptions, FlashHead};
/// use ds4_model::flash_head::{DEFAULT_CAPACITY, ProbedHead};
/// use ds4_model::model::Model;
///
/// /// Chooses drafts by a sixteenth of the clusters. The generated text stays the same.
/// fn cluster_the_draft_head(model: &mut Model) -> Result<(), OpError> {
///     let output = model.output.val();
///     let clusters = output.dims()[0].div_ceil(DEFAULT_CAPACITY);
///     let head = FlashHead::build(output, clusters, &BuildOptions::default(), |_| {})?;
///     let probes = ProbedHead::default_probes(clusters);
///     model.set_draft_head(Some(ProbedHead::new(head, probes)?));
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct ProbedHead {
    head: FlashHead,
    probes: usize,
}

impl ProbedHead {
    /// A head of which `probes` clusters are probed.
    ///
    /// # Errors
    ///
    /// As [`check_probes`](Self::check_probes).
    pub fn new(head: FlashHead, probes: usize) -> Result<Self, OpError> {
        Self::check_probes(probes, head.clusters())?;
        Ok(Self { head, probes })
    }

    /// Checks a number of probes against the number of clusters, before the clusters have to exist.
    ///
    /// # Errors
    ///
    /// [`OpError::InvalidValue`] unless `probes` is 1 to `clusters`.
    pub fn check_probes(probes: usize, clusters: usize) -> Result<(), OpError> {
        if (1..=clusters).contains(&probes) {
            return Ok(());
        }
        Err(OpError::InvalidValue {
            argument: "probes",
            expected: format!("1 to {clusters}, the number of clusters"),
            actual: probes,
        })
    }

    /// A sixteenth of the clusters, at least one.
    pub fn default_probes(clusters: usize) -> usize {
        (clusters / 16).max(1)
    }

    /// The head.
    pub fn head(&self) -> &FlashHead {
        &self.head
    }

    /// Clusters that are probed.
    pub fn probes(&self) -> usize {
        self.probes
    }

    /// The candidate with the highest logit, of equal ones the lowest id; -1 where no logit is a
    /// number above `-inf`.
    ///
    /// # Shapes
    ///
    /// - `hidden`: `[batch, positions, d_model]`, the input of the output matrix
    /// - output: `[batch, positions]`
    ///
    /// # Errors
    ///
    /// [`OpError`] for hidden states of another dtype, width or device than the head takes.
    pub fn greedy_tokens(&self, hidden: Tensor<3>) -> Result<Tensor<2, Int>, OpError> {
        let [batch, positions, _] = hidden.dims();
        let tokens = calls(hidden).map(|h| flash_head_argmax(h, &self.head, self.probes));
        let tokens = tokens.collect::<Result<_, _>>()?;
        Ok(Tensor::cat(tokens, 0).reshape([batch, positions]))
    }

    /// The logits of the whole vocabulary in place of the output matrix's, `-inf` for tokens that
    /// are no candidates; see [`flash_head_logits`].
    ///
    /// # Shapes
    ///
    /// - `hidden`: `[batch, positions, d_model]`, the input of the output matrix
    /// - output: f32 `[batch, positions, vocabulary]`
    ///
    /// # Errors
    ///
    /// As [`greedy_tokens`](Self::greedy_tokens).
    pub fn logits(&self, hidden: Tensor<3>) -> Result<Tensor<3>, OpError> {
        let [batch, positions, _] = hidden.dims();
        let logits = calls(hidden).map(|h| flash_head_logits(h, &self.head, self.probes));
        let logits = logits.collect::<Result<_, _>>()?;
        Ok(Tensor::cat(logits, 0).reshape([batch, positions, self.head.vocabulary()]))
    }

    /// The candidates with their logits, one row per position.
    ///
    /// # Shapes
    ///
    /// - `hidden`: `[batch, positions, d_model]`, the input of the output matrix
    /// - output: `[batch · positions, candidates]`, see [`FlashHeadCandidates`]
    ///
    /// # Errors
    ///
    /// As [`greedy_tokens`](Self::greedy_tokens).
    pub fn candidates(&self, hidden: Tensor<3>) -> Result<FlashHeadCandidates, OpError> {
        let calls = calls(hidden).map(|h| flash_head_candidates(h, &self.head, self.probes));
        let calls = calls.collect::<Result<Vec<_>, _>>()?;
        let (ids, logits) = calls
            .into_iter()
            .map(|call| (call.ids, call.logits))
            .unzip();
        Ok(FlashHeadCandidates {
            ids: Tensor::cat(ids, 0),
            logits: Tensor::cat(logits, 0),
        })
    }
}

/// Splits the positions into as many as the operators take at a time.
fn calls(hidden: Tensor<3>) -> impl Iterator<Item = Tensor<2>> {
    let [batch, positions, width] = hidden.dims();
    let rows = batch * positions;
    let hidden = hidden.reshape([rows, width]);
    (0..rows).step_by(MAX_TOKENS).map(move |start| {
        let end = rows.min(start + MAX_TOKENS);
        hidden.clone().slice_dim(0, start..end)
    })
}
