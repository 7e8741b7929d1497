//! What devices pass on.

use burn::tensor::{FloatDType, Tensor};

use crate::block::unflattened;
use crate::config::ModelConfig;
use crate::hyper_connection::Streams;

/// Values of the streams' dtype that add up to a weight of a stream: three of 8 digits have all of
/// an f32.
const TERMS: usize = 3;

/// Columns that are passed on with so many taps.
pub(crate) fn passed_columns(config: &ModelConfig, taps: usize) -> usize {
    (config.hc_mult + taps) * config.hidden_size + weight_columns(config)
}

/// Those of the weights of the streams, where the next layer collapses them by what the last one
/// has computed.
fn weight_columns(config: &ModelConfig) -> usize {
    match config.late_pre_mix {
        true => TERMS * config.hc_mult,
        false => 0,
    }
}

/// What the layers of one device pass on to those of the next.
pub(crate) struct Passing {
    /// `[batch * positions, n, d_model]`
    pub(crate) streams: Streams,
    /// The mean over the streams of each layer that is tapped: `[batch, positions, d_model]`.
    pub(crate) tapped: Vec<Tensor<3>>,
}

impl Passing {
    /// Adds the tap of the streams as they are now.
    pub(super) fn tap(&mut self, positions: [usize; 2]) {
        // A copy: what the trunk computes must not depend on whether somebody looks on.
        let output = unflattened(self.streams.clone(), positions);
        self.tapped.push(output.mean_dim(2).squeeze_dim::<3>(2));
    }

    /// The streams, and the taps side by side: `[batch, positions, taps · d_model]`.
    pub(crate) fn into_parts(self) -> (Streams, Option<Tensor<3>>) {
        let Self { streams, tapped } = self;
        let taps = (!tapped.is_empty()).then(|| Tensor::cat(tapped, 2));
        (streams, taps)
    }

    /// All of it side by side, so that it is moved at once: `[batch * positions, columns]`.
    pub(crate) fn rows(self, config: &ModelConfig) -> Tensor<2> {
        let [tokens, n, d] = self.streams.dims();
        let mut rest = config.late_pre_mix.then(|| self.streams.pre());
        let streams = self
            .streams
            .ready()
            .expect("a layer that keeps shape and dtype");
        let dtype = FloatDType::from(streams.dtype());
        let tapped = self.tapped.into_iter().map(|tap| tap.reshape([tokens, d]));
        let mut parts = vec![streams.reshape([tokens, n * d])];
        parts.extend(tapped);
        for _ in 0..TERMS {
            rest = rest.map(|rest| {
                let term = rest.clone().cast(dtype);
                parts.push(term.clone());
                rest - term.cast(FloatDType::F32)
            });
        }
        match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, 1),
        }
    }

    /// What [`rows`](Self::rows) has been made of, with any number of taps.
    pub(crate) fn of_rows(
        rows: Tensor<2>,
        config: &ModelConfig,
        [batch, positions]: [usize; 2],
    ) -> Self {
        let ([tokens, columns], n, d) = (rows.dims(), config.hc_mult, config.hidden_size);
        let weights = weight_columns(config);
        let taps = (columns - weights) / d - n;
        let part = |first, width| match width == columns {
            true => rows.clone(),
            false => rows.clone().narrow(1, first, width),
        };
        let tapped = (0..taps).map(|tap| part((n + tap) * d, d).reshape([batch, positions, d]));
        let tapped = tapped.collect();
        let streams = part(0, n * d).reshape([tokens, n, d]);
        let streams = match weights {
            0 => streams.into(),
            _ => {
                let terms = part(columns - weights, weights).reshape([tokens, TERMS, n]);
                let pre = terms.cast(FloatDType::F32).sum_dim(1).reshape([tokens, n]);
                Streams::Weighted { streams, pre }
            }
        };
        Self { streams, tapped }
    }
}
