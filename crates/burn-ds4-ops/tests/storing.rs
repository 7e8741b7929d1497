//! Steps that store rows, and what the operators for each part of them give.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::attention::{
    CompressorState, LowRankQueries, NewRows, Positions, RowRounding, StepCompression, StepRows,
    StoredStep, append_rows, compress_rows,
};
use burn_ds4_ops::norm::rms_norm;

use super::common::{floats, noise, read};
use super::compressing::{Case, EPSILON, Sizes};

/// A layer, and a step of it.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// Of low-rank queries, and of key/value rows.
    pub rank: usize,
    pub width: usize,
    pub slots: usize,
    /// Of its compressors: positions of a block, and whether blocks overlap.
    pub compressed: Option<(usize, bool)>,
    /// Rows of the indexer's, whose blocks are the same.
    pub indexed: Option<usize>,
    pub rounding: RowRounding,
    /// New positions.
    pub count: usize,
}

pub const WINDOW: Layer = Layer {
    rank: 48,
    width: 24,
    slots: 9,
    compressed: None,
    indexed: None,
    rounding: RowRounding::None,
    count: 1,
};
/// Positions that a sequence may have.
pub const POSITIONS: usize = 24;
const ROTATED: usize = 8;

impl Layer {
    fn compressor(&self, batch: usize, width: usize, seed: u32) -> Case {
        let (ratio, overlap) = self.compressed.unwrap_or((4, true));
        let sizes = Sizes {
            batch,
            ratio,
            overlap,
            width,
            rotated: ROTATED,
            slots: 2 * ratio + 1,
            positions: POSITIONS,
        };
        Case::new(sizes, seed)
    }

    fn compression(
        &self,
        case: &Case,
        starts: &[i64],
        rounding: RowRounding,
        (dtypes, device): State,
    ) -> StepCompression {
        let (raw, rows) = case.empty(dtypes.rows, device);
        let mut inputs = case.inputs(starts, self.count, device);
        inputs.norm = inputs.norm.cast(dtypes.norm);
        StepCompression {
            inputs,
            options: case.sizes.options(rounding),
            state: CompressorState { raw, rows },
        }
    }

    /// Of sequences with these starts, which are at most [`POSITIONS`].
    pub fn step(&self, starts: &[i64], state: State) -> (StepRows, Positions) {
        let (dtypes, device) = state;
        let (batch, count) = (starts.len(), self.count);
        let draw = |shape: [usize; 3], seed| {
            floats(&noise(shape.iter().product(), seed), shape, device).cast(dtypes.x)
        };
        let norm = |width, seed| floats(&noise(width, seed), [width], device).cast(dtypes.norm);
        let own = self.compressor(batch, self.width, 21);
        let index = self.compressor(batch, self.indexed.unwrap_or(8), 22);
        let index_rounding = match self.rounding {
            RowRounding::None => RowRounding::None,
            _ => RowRounding::Index,
        };
        let ring = [batch, self.slots, self.width];
        let step = StepRows {
            queries: LowRankQueries {
                x: draw([batch, count, self.rank], 11),
                norm: norm(self.rank, 12),
                epsilon: 1e-5,
            },
            new: NewRows {
                x: draw([batch, count, self.width], 13),
                norm: norm(self.width, 14),
                epsilon: EPSILON,
                rounding: self.rounding,
            },
            ring: Tensor::ones(ring, (device, dtypes.rows.into())),
            compressed: self
                .compressed
                .map(|_| self.compression(&own, starts, self.rounding, state)),
            indexed: self
                .indexed
                .map(|_| self.compression(&index, starts, index_rounding, state)),
            pages: None,
        };
        (step, own.positions(starts, device))
    }
}

/// Of what is projected, of what is stored and of the weights of norms.
#[derive(Clone, Copy, Debug)]
pub struct Dtypes {
    pub x: FloatDType,
    pub rows: FloatDType,
    pub norm: FloatDType,
}

impl Dtypes {
    pub fn all(dtype: FloatDType) -> Self {
        Self {
            x: dtype,
            rows: dtype,
            norm: dtype,
        }
    }
}

/// Where a step is made, and of what.
pub type State<'a> = (Dtypes, &'a Device);

/// What the operators for each part give.
pub fn one_by_one(step: StepRows, positions: &Positions) -> Result<StoredStep, OpError> {
    let queries = step.queries;
    let compress = |part: StepCompression| {
        let CompressorState { raw, rows } = part.state;
        compress_rows(part.inputs, positions.clone(), part.options, raw, rows)
    };
    Ok(StoredStep {
        queries: rms_norm(queries.x, Some(queries.norm), queries.epsilon)?,
        ring: append_rows(step.new, positions.clone(), step.ring)?,
        compressed: step.compressed.map(compress).transpose()?,
        indexed: step.indexed.map(compress).transpose()?,
    })
}

/// All tensors, by name.
fn tensors(step: &StoredStep) -> Vec<(&'static str, Vec<f32>)> {
    let mut all = vec![("queries", read(&step.queries)), ("ring", read(&step.ring))];
    if let Some(state) = &step.compressed {
        all.extend([("raw", read(&state.raw)), ("rows", read(&state.rows))]);
    }
    if let Some(state) = &step.indexed {
        all.extend([
            ("index raw", read(&state.raw)),
            ("index rows", read(&state.rows)),
        ]);
    }
    all
}

/// Fails unless two steps have stored the same bits.
#[track_caller]
pub fn expect_equal(actual: &StoredStep, expected: &StoredStep, what: &str) {
    let (actual, expected) = (tensors(actual), tensors(expected));
    assert_eq!(actual.len(), expected.len(), "{what}");
    for ((name, actual), (_, expected)) in actual.into_iter().zip(expected) {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(actual), bits(expected), "{what}: {name}");
    }
}
