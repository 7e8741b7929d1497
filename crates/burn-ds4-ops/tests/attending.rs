//! Problems of attention with a sink, and their `f64` oracle.

use super::common::{floats, integers, noise, values, wide};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    CompressedKeys, MASKED, WindowKeys, sink_attention, sink_probabilities,
};

const FITS: &str = "arguments that fit";

/// How large a problem is.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub count: usize,
    pub heads: usize,
    pub width: usize,
    /// Rows of the window that a query sees.
    pub span: usize,
    /// Compressed rows of a sequence.
    pub rows: usize,
    /// Those that each query picks, if not all.
    pub picks: Option<usize>,
}

/// A few of everything.
pub const SMALL: Sizes = Sizes {
    batch: 2,
    count: 3,
    heads: 2,
    width: 4,
    span: 3,
    rows: 6,
    picks: None,
};

/// One problem.
#[derive(Clone, Debug)]
pub struct Case {
    pub sizes: Sizes,
    pub scale: f64,
    pub queries: Vec<f32>,
    pub window: Vec<f32>,
    pub window_bias: Vec<f32>,
    pub rows: Vec<f32>,
    pub rows_bias: Vec<f32>,
    pub picks: Vec<i64>,
    pub sinks: Vec<f32>,
}

impl Case {
    pub fn new(sizes: Sizes, seed: u32) -> Self {
        let Sizes {
            batch,
            count,
            heads,
            width,
            span,
            rows,
            picks,
        } = sizes;
        // A row more than the queries see.
        let columns = span + count;
        let bias = |count, seed| {
            noise(count, seed)
                .into_iter()
                .map(|v| if v < -0.3 { MASKED } else { 0.0 })
                .collect()
        };
        let picked = noise(batch * count * picks.unwrap_or(0), seed ^ 12);
        Self {
            sizes,
            scale: 1.7,
            queries: noise(batch * count * heads * width, seed ^ 7),
            window: noise(batch * columns * width, seed ^ 8),
            window_bias: bias(batch * columns, seed ^ 9),
            rows: noise(batch * rows * width, seed ^ 10),
            rows_bias: bias(batch * count * rows, seed ^ 11),
            picks: picked
                .iter()
                .map(|v| ((f64::from(*v) + 1.0) / 2.0 * rows as f64) as i64)
                .collect(),
            sinks: noise(heads, seed ^ 13),
        }
    }

    /// Rows of the window of a sequence.
    pub fn columns(&self) -> usize {
        self.window.len() / (self.sizes.batch * self.sizes.width)
    }

    /// Compressed rows that a query sees or picks.
    pub fn seen(&self) -> usize {
        self.sizes.picks.unwrap_or(self.sizes.rows)
    }

    /// One query, with the rows of its window alone.
    pub fn alone(&self, query: usize) -> Self {
        let Sizes {
            batch: _,
            count,
            heads,
            width,
            span,
            rows,
            picks,
        } = self.sizes;
        let (sequence, columns, seen) = (query / count, self.columns(), picks.unwrap_or(0));
        let first = sequence * columns + columns + 1 - count - span + query % count;
        let part = |all: &[f32], first: usize, count: usize| all[first..first + count].to_vec();
        Self {
            sizes: Sizes {
                batch: 1,
                count: 1,
                ..self.sizes
            },
            scale: self.scale,
            queries: part(&self.queries, query * heads * width, heads * width),
            window: part(&self.window, first * width, span * width),
            window_bias: part(&self.window_bias, first, span),
            rows: part(&self.rows, sequence * rows * width, rows * width),
            rows_bias: part(&self.rows_bias, query * rows, rows),
            picks: self.picks[query * seen..(query + 1) * seen].to_vec(),
            sinks: self.sinks.clone(),
        }
    }

    /// With values as they are in `dtype`.
    pub fn rounded(mut self, dtype: FloatDType, device: &Device) -> Self {
        for part in [&mut self.queries, &mut self.window, &mut self.rows] {
            let tensor = floats::<1>(part, [part.len()], device).cast(dtype);
            *part = values(tensor.cast(FloatDType::F32));
        }
        self
    }

    pub fn arguments(
        &self,
        device: &Device,
        dtype: FloatDType,
    ) -> (Tensor<4>, WindowKeys, Option<CompressedKeys>, Tensor<1>) {
        let Sizes {
            batch,
            count,
            heads,
            width,
            span,
            rows,
            picks,
        } = self.sizes;
        let compressed = (rows > 0).then(|| CompressedKeys {
            rows: floats(&self.rows, [batch, rows, width], device).cast(dtype),
            bias: floats(&self.rows_bias, [batch, count, rows], device),
            picks: picks.map(|picks| integers(&self.picks, [batch, count, picks], device)),
        });
        let columns = self.columns();
        let window = WindowKeys {
            rows: floats(&self.window, [batch, columns, width], device).cast(dtype),
            bias: floats(&self.window_bias, [batch, columns], device),
            span,
        };
        let queries = floats(&self.queries, [batch, count, heads, width], device).cast(dtype);
        (
            queries,
            window,
            compressed,
            floats(&self.sinks, [heads], device),
        )
    }

    pub fn output_in(&self, device: &Device, dtype: FloatDType) -> Vec<f32> {
        let (queries, window, compressed, sinks) = self.arguments(device, dtype);
        let (shape, dtype) = (queries.dims(), queries.dtype());
        let output = sink_attention(queries, window, compressed, sinks, self.scale).expect(FITS);
        assert_eq!((output.dims(), output.dtype()), (shape, dtype));
        values(output.cast(FloatDType::F32))
    }

    pub fn output(&self, device: &Device) -> Vec<f32> {
        self.output_in(device, FloatDType::F32)
    }

    pub fn probabilities(&self, device: &Device) -> Vec<f32> {
        let (queries, window, compressed, sinks) = self.arguments(device, FloatDType::F32);
        let [batch, count, heads, _] = queries.dims();
        let shares =
            sink_probabilities(queries, window, compressed, sinks, self.scale).expect(FITS);
        let columns = self.columns() + self.seen();
        assert_eq!(shares.dims(), [batch, count, heads, columns]);
        values(shares)
    }

    /// Output and probabilities.
    pub fn oracle(&self) -> (Vec<f64>, Vec<f64>) {
        let Sizes {
            batch,
            count,
            heads,
            width,
            span,
            rows,
            picks,
        } = self.sizes;
        let columns = self.columns();
        let row = |all: &[f32], at: usize| wide(&all[at * width..(at + 1) * width]);
        let (mut output, mut probabilities) = (Vec::new(), Vec::new());
        for query in 0..batch * count {
            let sequence = query / count;
            let first = columns + 1 - count - span + query % count;
            let mut seen: Vec<(Vec<f64>, bool)> = (0..columns)
                .map(|column| {
                    let at = sequence * columns + column;
                    let inside = (first..first + span).contains(&column);
                    (row(&self.window, at), inside && self.window_bias[at] == 0.0)
                })
                .collect();
            for place in 0..self.seen() {
                let picked = match picks {
                    None => place as i64,
                    Some(picks) => self.picks[query * picks + place],
                };
                let known = usize::try_from(picked).ok().filter(|pick| *pick < rows);
                seen.push(match known {
                    None => (vec![0.0; width], false),
                    Some(pick) => (
                        row(&self.rows, sequence * rows + pick),
                        self.rows_bias[query * rows + pick] == 0.0,
                    ),
                });
            }
            for head in 0..heads {
                let q = row(&self.queries, query * heads + head);
                let sink = f64::from(self.sinks[head]);
                let logits: Vec<f64> = seen
                    .iter()
                    .map(|(key, visible)| {
                        let dot: f64 = q.iter().zip(key).map(|(a, b)| a * b).sum();
                        if *visible {
                            dot * self.scale
                        } else {
                            f64::NEG_INFINITY
                        }
                    })
                    .collect();
                let max = logits.iter().copied().fold(sink, f64::max);
                let sum = (sink - max).exp()
                    + logits.iter().map(|logit| (logit - max).exp()).sum::<f64>();
                let p: Vec<f64> = logits.iter().map(|l| (l - max).exp() / sum).collect();
                output.extend((0..width).map(|c| {
                    let terms = p.iter().zip(&seen).map(|(p, (key, _))| p * key[c]);
                    terms.sum::<f64>()
                }));
                probabilities.extend(p);
            }
        }
        (output, probabilities)
    }
}
