//! A model of the weights that a source hands out.

use burn::module::Param;
use burn::tensor::Tensor;

use super::modules::Model;
use super::source::ModelSource;
use crate::block::Block;
use crate::config::ModelConfig;
use crate::dspark::Dspark;
use crate::hyper_connection::HyperHead;
use crate::mtp::MtpLayer;
use crate::norm::{RmsNorm, RmsNormConfig};
use crate::parallel::{Rank, TensorParallel};
use crate::placement::{Place, Portion};
use crate::weights::{WeightSource, all_or_nothing, load_all};

impl ModelConfig {
    /// The model of a checkpoint's tensors. `quantized_cache` is that of every
    /// [attention](AttentionConfig::quantized_cache).
    pub(crate) fn build(
        &self,
        source: &mut impl ModelSource,
        quantized_cache: bool,
    ) -> Option<Model> {
        let placement = source.placement(self.layers.len());
        let built = source.build_portions(&placement, |source, portion| {
            self.build_portion(source, portion, quantized_cache)
        });
        let mut built = load_all(built)?;
        let last = built.pop().expect("a placement has a device");
        let (head, norm, output) = last.conclusion.expect("it is with the last layer");
        let (embedding, layers, parallel) = match last.output_part {
            Some(own) => {
                let ranks = built.into_iter().map(Built::into_rank);
                let (others, mut parts): (Vec<Rank>, Vec<Tensor<2>>) = ranks.unzip();
                parts.push(own);
                let parallel = TensorParallel::new(placement.ranks(), others, parts);
                (last.embedding, last.layers, Some(parallel))
            }
            None => {
                let first = built.iter_mut().find_map(|part| part.embedding.take());
                let before = built.into_iter().flat_map(|part| part.layers);
                let layers = before.chain(last.layers).collect();
                (first.or(last.embedding), layers, None)
            }
        };
        let embedding = embedding.expect("it is with the first layer");
        let divider = source.divider();
        let divided = divider
            .and_then(|divider| divider.finish(&embedding.val(), &head, &norm, &output.val()));
        let model = Model {
            parallel: divided.or(parallel),
            embedding,
            layers,
            head,
            norm,
            output,
            mtp: last.mtp,
            dspark: last.dspark,
            flash_head: None,
            draft_embedding: None,
            engrams: None,
            placement,
            config: self.clone(),
        };
        model.placement.warn_of_copies();
        Some(model.with_draft_embedding())
    }

    fn build_portion(
        &self,
        source: &mut impl ModelSource,
        portion: &Portion,
        quantized_cache: bool,
    ) -> Option<Built> {
        let matrix = [self.vocab_size, self.hidden_size];
        let embedding = portion.embeds().then(|| {
            source.enter(Place::Embedding);
            source.weights().embedding("embed.weight", matrix)
        });
        let layers = load_all(portion.layers.clone().map(|layer| {
            source.enter(Place::Layer(layer));
            let mut block = self.block(layer);
            block.attention.quantized_cache = quantized_cache;
            let block = block.build(source.weights(), &format!("layers.{layer}."))?;
            source.take(block, portion)
        }));
        let conclusion = portion.concludes().then(|| {
            source.enter(Place::Head);
            let head = self.hyper_connection().build_head(source.weights(), "");
            let norm = RmsNormConfig::new(self.hidden_size)
                .with_epsilon(self.rms_norm_eps)
                .build(source.weights(), "norm");
            let output = source.weights().stored(&["head.weight".into()], matrix);
            Some((head?, norm?, output?))
        });
        let has_drafter = self.num_mtp_layers > 0 || self.dspark.is_some();
        if portion.drafts() && has_drafter {
            source.enter(Place::Drafter);
        }
        let mtp = (portion.drafts() && self.num_mtp_layers > 0).then(|| {
            let mut mtp = self.mtp();
            mtp.block.attention.quantized_cache = quantized_cache;
            mtp.build(source.weights(), "mtp.0.")
        });
        let dspark = self.dspark().filter(|_| portion.drafts());
        let dspark = dspark.map(|mut dspark| {
            dspark.block.attention.quantized_cache = quantized_cache;
            dspark.build(source.weights(), "mtp.")
        });
        let conclusion = all_or_nothing(conclusion);
        let (embedding, layers) = (all_or_nothing(embedding)?, layers?);
        let (mtp, dspark) = (all_or_nothing(mtp)?, all_or_nothing(dspark)?);
        let conclusion: Option<Conclusion> = conclusion?;
        let output_part = portion.share.zip(conclusion.as_ref());
        let output_part = output_part
            .map(|(share, (_, _, output))| share.kept_output(output.val(), &portion.device));
        let is_taken = source.is_taken(&embedding)
            && source.is_taken(&conclusion)
            && source.is_taken(&output_part)
            && source.is_taken(&mtp)
            && source.is_taken(&dspark);
        is_taken.then_some(Built {
            embedding,
            layers,
            conclusion,
            output_part,
            mtp,
            dspark,
        })
    }
}

/// Head, norm and output matrix.
type Conclusion = (HyperHead, RmsNorm, Param<Tensor<2>>);

/// What is built of a model for a [`Portion`].
struct Built {
    embedding: Option<Param<Tensor<2>>>,
    layers: Vec<Block>,
    conclusion: Option<Conclusion>,
    /// The device's rows of the output matrix, where layers are divided.
    output_part: Option<Tensor<2>>,
    mtp: Option<MtpLayer>,
    dspark: Option<Dspark>,
}

impl Built {
    /// What a device other than the last has, and its rows of the output matrix.
    fn into_rank(self) -> (Rank, Tensor<2>) {
        let every = "every device has it";
        let (head, norm, _) = self.conclusion.expect(every);
        let rank = Rank {
            embedding: self.embedding.expect(every).val(),
            layers: self.layers,
            head,
            norm,
        };
        (rank, self.output_part.expect(every))
    }
}
