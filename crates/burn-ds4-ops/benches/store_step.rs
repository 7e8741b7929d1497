//! Everything that a step of one sequence stores in a layer, at the sizes of V4-Flash.

use std::{cell::RefCell, rc::Rc};

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    CompressorState, LowRankQueries, NewRows, Positions, RowRounding, StepCompression, StepRows,
    StoredStep, append_rows, compress_rows, store_step,
};
use burn_ds4_ops::norm::rms_norm;

use super::{
    super::common::{floats, integers, noise, read},
    super::compressing::Case as Problem,
    super::rotation::table,
    compress_rows::{KINDS, Kind, ROTATED},
    harness::{Case, Prepared},
};

const COUNTS: [usize; 2] = [1, 5];
const RANK: usize = 1024;
const WIDTH: usize = 512;
const SLOTS: usize = 143;
const EPSILON: f64 = 1e-6;
/// Positions of the table without a compressor, and the first position of the step.
const POSITIONS: usize = 4096;
const FIRST: usize = 2048;
/// Bytes of a bf16, and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;

/// The compressors of a layer.
type Kinds = &'static [Kind];

const WINDOW: Kinds = &[];
const CSA: Kinds = &[KINDS[0], KINDS[1]];
const HCA: Kinds = &[KINDS[2]];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for count in COUNTS {
        cases.push(case(WINDOW, count, false));
        cases.push(case(CSA, count, true));
        cases.push(case(HCA, count, true));
        if count == 1 {
            cases.push(case(CSA, count, false));
            cases.push(case(HCA, count, false));
        }
    }
    cases
}

fn case(kinds: Kinds, count: usize, complete: bool) -> Case {
    let compressed: usize = kinds
        .iter()
        .map(|kind| kind.bytes(1, count, complete))
        .sum();
    let raw = |kind: &Kind| {
        let sizes = kind.sizes(1, count);
        (count + sizes.slots) * sizes.raw_width()
    };
    let rows = count * (RANK + WIDTH);
    Case {
        op: "store_step",
        shape: vec![("Q", count), ("R", RANK), ("D", WIDTH)],
        variant: kinds
            .first()
            .map_or("window", |kind| kind.names[usize::from(!complete)]),
        dtype: DType::BF16,
        bytes: 2 * rows * BF16_BYTES
            + (RANK + WIDTH) * F32_BYTES
            + count * ROTATED * F32_BYTES
            + compressed,
        flops: None,
        input_bytes: (rows + SLOTS * WIDTH) * BF16_BYTES
            + kinds.iter().map(raw).sum::<usize>() * F32_BYTES,
        build: Box::new(move |device, seed| {
            Layer::new(kinds, count, complete, device, seed).prepare()
        }),
    }
}

/// The inputs of a step, without the tensors that it updates.
#[derive(Clone)]
struct Layer {
    queries: LowRankQueries,
    new: NewRows,
    positions: Positions,
    compressors: Vec<StepCompression>,
    ring: Tensor<3>,
}

impl Layer {
    fn new(kinds: Kinds, count: usize, complete: bool, device: &Device, seed: u32) -> Self {
        let draw = |width: usize, seed| {
            let shape = [1, count, width];
            floats(&noise(count * width, seed), shape, device).cast(FloatDType::BF16)
        };
        let ones = |width: usize| Tensor::<1>::ones([width], (device, DType::F32));
        let first = kinds.first().map_or(FIRST, |kind| kind.first(complete));
        let known = kinds
            .first()
            .map_or(POSITIONS, |kind| kind.sizes(1, count).positions);
        let compressors = kinds.iter().zip(seed + 1..).map(|(kind, seed)| {
            let sizes = kind.sizes(1, count);
            let problem = Problem::new(sizes, seed);
            let (raw, rows) = problem.empty(FloatDType::BF16, device);
            StepCompression {
                inputs: problem.inputs(&[first as i64], count, device),
                options: sizes.options(kind.rounding),
                state: CompressorState { raw, rows },
            }
        });
        Self {
            queries: LowRankQueries {
                x: draw(RANK, seed),
                norm: ones(RANK),
                epsilon: EPSILON,
            },
            new: NewRows {
                x: draw(WIDTH, seed ^ 7),
                norm: ones(WIDTH),
                epsilon: EPSILON,
                rounding: RowRounding::None,
            },
            positions: Positions {
                angles: table(known, ROTATED, device),
                start: integers(&[first as i64], [1], device),
            },
            compressors: compressors.collect(),
            ring: Tensor::zeros([1, SLOTS, WIDTH], (device, DType::BF16)),
        }
    }

    /// Runs a step on the tensors that the last call returned. There is no other reference to them,
    /// so they are updated in place.
    fn step(&self, last: StoredStep) -> StoredStep {
        let mut states = [last.compressed, last.indexed].into_iter();
        let mut parts = self.compressors.iter().map(|part| StepCompression {
            state: states.next().flatten().expect("of each compressor"),
            ..part.clone()
        });
        let step = StepRows {
            queries: self.queries.clone(),
            new: self.new.clone(),
            ring: last.ring,
            compressed: parts.next(),
            indexed: parts.next(),
            pages: None,
        };
        store_step(step, self.positions.clone()).expect("arguments that fit")
    }

    /// Computes the same by the operators for each part.
    fn one_by_one(&self) -> StoredStep {
        let fits = "arguments that fit";
        let mut states = self.compressors.iter().map(|part| {
            let StepCompression {
                inputs,
                options,
                state,
            } = part.clone();
            let positions = self.positions.clone();
            compress_rows(inputs, positions, options, state.raw, state.rows).expect(fits)
        });
        let queries = self.queries.clone();
        let ring = append_rows(self.new.clone(), self.positions.clone(), self.ring.clone());
        StoredStep {
            queries: rms_norm(queries.x, Some(queries.norm), queries.epsilon).expect(fits),
            ring: ring.expect(fits),
            compressed: states.next(),
            indexed: states.next(),
        }
    }

    fn prepare(self) -> Prepared {
        let mut states = self.compressors.iter().map(|part| CompressorState {
            // Copies, since the check needs the originals.
            raw: part.state.raw.clone() + 0.0,
            rows: part.state.rows.clone() + 0.0,
        });
        let first = StoredStep {
            queries: self.queries.x.clone(),
            ring: self.ring.clone() + 0.0,
            compressed: states.next(),
            indexed: states.next(),
        };
        drop(states);
        let state = Rc::new(RefCell::new(Some(first)));
        let left = state.clone();
        let of_check = self.clone();
        Prepared::new(
            move || {
                let last = state.take().expect("what the last call left");
                let stored = self.step(last);
                state.replace(Some(stored));
            },
            move |()| {
                let left = left.borrow();
                let stored = left.as_ref().expect("what the last call left");
                let expected = of_check.one_by_one();
                assert_eq!(read(&stored.queries), read(&expected.queries), "queries");
                assert_eq!(read(&stored.ring), read(&expected.ring), "ring");
                for (actual, expected) in [
                    (&stored.compressed, &expected.compressed),
                    (&stored.indexed, &expected.indexed),
                ] {
                    let tensors = |state: &Option<CompressorState>| {
                        let state = state.as_ref()?;
                        Some((read(&state.raw), read(&state.rows)))
                    };
                    assert_eq!(tensors(actual), tensors(expected), "compressed rows");
                }
            },
        )
    }
}
