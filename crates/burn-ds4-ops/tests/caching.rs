//! Caches of sequences with queries after them, and their oracle in `f64`.

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_ds4_ops::attention::{
    CachedQueries, CachedRows, CachedWindow, DECODE_TOKENS, NewRows, PagedRows, Positions,
    RowRounding, WindowLayout, append_rows, cached_attention,
};

use super::attending::{Case, Sizes};
use super::common::{Tolerance, absolute, floats, half_unit, integers, narrow, noise, wide};
use super::rotation::{table, turned_at, turned_back_at};

const FITS: &str = "arguments that fit";
pub const EPSILON: f64 = 1e-6;

/// A cache of sequences, and queries at the positions after it.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    /// Queries of a sequence.
    pub count: usize,
    pub heads: usize,
    pub width: usize,
    pub rotated: usize,
    /// Positions that a query sees in the window, and slots of the window.
    pub span: usize,
    pub slots: usize,
    /// Whether it sees nothing after its own position. Else there are no compressed rows.
    pub causal: bool,
    /// The order of the window's rows.
    pub layout: WindowLayout,
    /// Positions of a block, and blocks that there is memory for.
    pub ratio: usize,
    pub rows: usize,
    /// Rows that a query picks, where it does.
    pub picks: Option<usize>,
    /// Of all values.
    pub seed: u32,
}

pub const PLAIN: Text = Text {
    count: 2,
    heads: 3,
    width: 16,
    rotated: 8,
    span: 5,
    slots: 9,
    causal: true,
    layout: WindowLayout::Ring,
    ratio: 3,
    rows: 10,
    picks: None,
    seed: 0,
};

/// Prompts: more queries than a sequence decodes at once, of heads enough to fill a tile of a
/// warpgroup, or nearly.
pub const PROMPT: Text = Text {
    count: DECODE_TOKENS + 1,
    heads: 40,
    width: 128,
    rotated: 64,
    span: 20,
    slots: DECODE_TOKENS + 20,
    ratio: 4,
    rows: 30,
    ..PLAIN
};

/// Before the first block, around a turn of the ring, and with all blocks.
pub const STARTS: [i64; 6] = [0, 1, 4, 9, 17, 28];

impl Text {
    pub fn positions(&self) -> usize {
        STARTS[5] as usize + self.count
    }

    /// So that no row takes all of the softmax: queries and rows are as long as their widths are.
    pub fn scale(&self) -> f64 {
        2.0 * (self.width as f64).powf(-0.5)
    }

    fn noise(&self, count: usize, of: u32) -> Vec<f32> {
        noise(count, of ^ self.seed)
    }

    pub fn norm(&self) -> Vec<f32> {
        self.noise(self.width, 3).iter().map(|w| w + 1.5).collect()
    }

    /// Rows of all positions of sequences as they are projected.
    pub fn projected(&self, sequence: usize) -> Vec<f32> {
        self.noise(self.positions() * self.width, 50 + sequence as u32)
    }

    pub fn compressed(&self, sequences: usize) -> Vec<f32> {
        self.noise(sequences * self.rows * self.width, 5)
    }

    pub fn queries(&self, sequences: usize) -> Vec<f32> {
        self.noise(sequences * self.count * self.heads * self.width, 6)
    }

    pub fn sinks(&self) -> Vec<f32> {
        self.noise(self.heads, 7)
    }

    /// Some that are none, and some that are not complete.
    pub fn picked(&self, sequences: usize) -> Vec<i64> {
        let count = sequences * self.count * self.picks.unwrap_or(0);
        let pick =
            |v: &f32| (f64::from(*v) * 0.7 * self.rows as f64 + 0.3 * self.rows as f64) as i64;
        self.noise(count, 8).iter().map(pick).collect()
    }

    pub fn place(&self, starts: &[i64], device: &Device) -> Positions {
        Positions {
            angles: table(self.positions(), self.rotated, device),
            start: integers(starts, [starts.len()], device),
        }
    }

    pub fn new_rows(&self, rows: Tensor<3>, rounding: RowRounding) -> NewRows {
        let device = rows.device();
        NewRows {
            x: rows,
            norm: floats(&self.norm(), [self.width], &device),
            epsilon: EPSILON,
            rounding,
        }
    }

    /// The window of sequences up to their last query, appended in several goes.
    pub fn window(&self, starts: &[i64], dtype: FloatDType, device: &Device) -> Tensor<3> {
        let (slots, width) = (self.slots, self.width);
        let rings = starts.iter().enumerate().map(|(sequence, start)| {
            let ring = floats(&vec![100.0; slots * width], [1, slots, width], device);
            let all = floats(
                &self.projected(sequence),
                [1, self.positions(), width],
                device,
            );
            let (mut ring, mut from) = (ring.cast(dtype), 0);
            let end = (*start).max(0) as usize + self.count;
            while from < end {
                let count = [3, 1, self.slots + 2][from % 3].min(end - from);
                let rows = all.clone().narrow(1, from, count).cast(dtype);
                let new = self.new_rows(rows, RowRounding::None);
                let positions = self.place(&[from as i64], device);
                ring = append_rows(new, positions, ring).expect(FITS);
                from += count;
            }
            ring
        });
        Tensor::cat(rings.collect(), 0)
    }

    /// A ring of rows in the order of the text's window.
    fn laid_out(&self, starts: &[i64], ring: Tensor<3>) -> Tensor<3> {
        if self.layout == WindowLayout::Ring {
            return ring;
        }
        let slots = self.slots as i64;
        let rows = starts.iter().enumerate().map(|(sequence, start)| {
            let end = start + self.count as i64;
            let order: Vec<i64> = (end..end + slots)
                .map(|position| position % slots)
                .collect();
            let own = ring.clone().narrow(0, sequence, 1);
            own.select(1, integers(&order, [self.slots], &ring.device()))
        });
        Tensor::cat(rows.collect(), 0)
    }

    pub fn attend(&self, starts: &[i64], dtype: FloatDType, device: &Device) -> Tensor<4> {
        let sequences = starts.len();
        let x = floats(
            &self.queries(sequences),
            [sequences, self.count, self.heads, self.width],
            device,
        );
        let rows = floats(
            &self.compressed(sequences),
            [sequences, self.rows, self.width],
            device,
        );
        let picks = self.picks.map(|picks| {
            integers(
                &self.picked(sequences),
                [sequences, self.count, picks],
                device,
            )
        });
        self.attend_to(starts, x.cast(dtype), rows.cast(dtype), picks)
    }

    pub fn attend_to(
        &self,
        starts: &[i64],
        x: Tensor<4>,
        rows: impl Into<PagedRows>,
        picks: Option<Tensor<3, Int>>,
    ) -> Tensor<4> {
        let device = x.device();
        let positions = self.place(starts, &device);
        self.attend_at(starts, positions, x, rows, picks)
    }

    /// From `positions`, which are those of `starts`.
    pub fn attend_at(
        &self,
        starts: &[i64],
        positions: Positions,
        x: Tensor<4>,
        rows: impl Into<PagedRows>,
        picks: Option<Tensor<3, Int>>,
    ) -> Tensor<4> {
        let device = x.device();
        let window = CachedWindow {
            rows: self.laid_out(starts, self.window(starts, x.dtype().into(), &device)),
            layout: self.layout,
            span: self.span,
            causal: self.causal,
        };
        let compressed = CachedRows {
            rows: rows.into(),
            ratio: self.ratio,
            picking: self.picks.is_some(),
            picks,
        };
        let queries = CachedQueries {
            x,
            epsilon: Some(EPSILON),
            sinks: floats(&self.sinks(), [self.heads], &device),
            scale: self.scale(),
        };
        let compressed = self.causal.then_some(compressed);
        cached_attention(queries, positions, window, compressed).expect(FITS)
    }

    /// Rows normalised and turned, each for all its heads.
    pub fn prepared(&self, x: &[f32], norm: Option<&[f32]>, positions: &[usize]) -> Vec<f64> {
        let mut rows = wide(x);
        for row in rows.chunks_mut(self.width) {
            let squares: f64 = row.iter().map(|x| x * x).sum();
            let factor = 1.0 / (squares / self.width as f64 + EPSILON).sqrt();
            for (channel, x) in row.iter_mut().enumerate() {
                *x *= factor * norm.map_or(1.0, |norm| f64::from(norm[channel]));
            }
        }
        turned_at(&rows, self.width, self.rotated, positions)
    }

    /// Puts rows as they are projected into the ring of a sequence, from a position on.
    pub fn put(&self, ring: &mut [f32], projected: &[f32], first: usize) {
        let count = projected.len() / self.width;
        let positions: Vec<usize> = (first..first + count).collect();
        let rows = narrow(&self.prepared(projected, Some(&self.norm()), &positions));
        for (row, position) in rows.chunks(self.width).zip(positions) {
            let at = position % self.slots * self.width;
            ring[at..at + self.width].copy_from_slice(row);
        }
    }

    /// What the queries of a sequence give, in `f64`.
    pub fn oracle(&self, starts: &[i64], sequence: usize) -> Vec<f64> {
        self.oracle_of_picks(starts, sequence, &self.picked(starts.len()))
    }

    /// The same where all queries pick these.
    pub fn oracle_of_picks(&self, starts: &[i64], sequence: usize, picked: &[i64]) -> Vec<f64> {
        let Self {
            count,
            heads,
            width,
            span,
            rows,
            ..
        } = *self;
        if starts[sequence] < 0 {
            return vec![0.0; count * heads * width];
        }
        let start = starts[sequence] as usize;
        let positions: Vec<usize> = (start..start + count).collect();
        let part =
            |all: Vec<f32>, size: usize| all[sequence * size..(sequence + 1) * size].to_vec();
        let queries = part(self.queries(starts.len()), count * heads * width);
        let queries = self.prepared(&queries, None, &positions);
        // A row in front that is never seen, as a problem has it.
        let all: Vec<usize> = (0..self.positions()).collect();
        let cached = self.prepared(&self.projected(sequence), Some(&self.norm()), &all);
        let (mut window, mut bias) = (Vec::new(), Vec::new());
        for column in 0..span + count {
            let position = (start + column).checked_sub(span);
            bias.push(if position.is_none() { -1.0 } else { 0.0 });
            let first = position.unwrap_or(0) * width;
            window.extend_from_slice(&cached[first..first + width]);
        }
        let hidden =
            |query: usize, row: usize| (row + 1).saturating_mul(self.ratio) > start + query + 1;
        let rows_bias = (0..count).flat_map(|query| {
            (0..rows).map(move |row| if hidden(query, row) { -1.0 } else { 0.0 })
        });
        if !self.causal {
            // Each is the only query, and sees all but the first row.
            let outputs = queries.chunks(heads * width).flat_map(|query| {
                let sizes = Sizes {
                    batch: 1,
                    count: 1,
                    heads,
                    width,
                    span: span + count - 1,
                    rows: 0,
                    picks: None,
                };
                let problem = Case {
                    sizes,
                    scale: self.scale(),
                    queries: narrow(query),
                    window: narrow(&window),
                    window_bias: bias.clone(),
                    rows: Vec::new(),
                    rows_bias: Vec::new(),
                    picks: Vec::new(),
                    sinks: self.sinks(),
                };
                problem.oracle().0
            });
            let outputs: Vec<f64> = outputs.collect();
            return turned_back_at(&outputs, width, self.rotated, &positions);
        }
        let problem = Case {
            sizes: Sizes {
                batch: 1,
                count,
                heads,
                width,
                span,
                rows,
                picks: self.picks,
            },
            scale: self.scale(),
            queries: narrow(&queries),
            window: narrow(&window),
            window_bias: bias,
            rows: part(self.compressed(starts.len()), rows * width),
            rows_bias: rows_bias.collect(),
            picks: match self.picks {
                None => Vec::new(),
                Some(picks) => {
                    let size = count * picks;
                    picked[sequence * size..(sequence + 1) * size].to_vec()
                }
            },
            sinks: self.sinks(),
        };
        turned_back_at(&problem.oracle().0, width, self.rotated, &positions)
    }
}

/// In 16 bits, inputs are rounded, and so are queries and rows once they are prepared.
pub fn close(dtype: FloatDType) -> Tolerance {
    match dtype {
        FloatDType::F32 => absolute(1e-5),
        _ => Tolerance {
            absolute: 24.0 * half_unit(dtype),
            relative: 4.0 * half_unit(dtype),
        },
    }
}
