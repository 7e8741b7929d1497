//! What devices pass on.

use burn::tensor::Tensor;

use crate::block::unflattened;
use crate::hyper_connection::Streams;

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
    pub(crate) fn rows(self) -> Tensor<2> {
        let [tokens, n, d] = self.streams.dims();
        let streams = self
            .streams
            .ready()
            .expect("a layer that keeps shape and dtype");
        let streams = streams.reshape([tokens, n * d]);
        if self.tapped.is_empty() {
            return streams;
        }
        let tapped = self.tapped.into_iter().map(|tap| tap.reshape([tokens, d]));
        Tensor::cat(std::iter::once(streams).chain(tapped).collect(), 1)
    }

    /// What [`rows`](Self::rows) has been made of, `n` streams and any number of taps.
    pub(crate) fn of_rows(
        rows: Tensor<2>,
        n: usize,
        d_model: usize,
        [batch, positions]: [usize; 2],
    ) -> Self {
        let [tokens, columns] = rows.dims();
        let taps = columns / d_model - n;
        if taps == 0 {
            let streams = rows.reshape([tokens, n, d_model]);
            return Self {
                streams: streams.into(),
                tapped: Vec::new(),
            };
        }
        let streams = rows.clone().narrow(1, 0, n * d_model);
        let tapped = (0..taps).map(|tap| {
            let rows = rows.clone().narrow(1, (n + tap) * d_model, d_model);
            rows.reshape([batch, positions, d_model])
        });
        Self {
            tapped: tapped.collect(),
            streams: streams.reshape([tokens, n, d_model]).into(),
        }
    }
}
