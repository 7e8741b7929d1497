//! Compressed rows of a few tokens and of prompts, at the sizes of the released models.

use std::cell::RefCell;
use std::rc::Rc;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{CompressorState, RowRounding, compress_rows};
use burn_ds4_ops::quant::{FP4_BLOCK, fp4_roundtrip, fp8_roundtrip, hadamard};

use super::{
    super::common::{EXACT, absolute, assert_close, narrow, read, values},
    super::compressing::{Case as Problem, Sizes},
    harness::{Case, Prepared},
};

pub const ROTATED: usize = 64;
/// Positions that a rollback may remove: all of a step, which is repeated.
const ROLLBACK: usize = 5;
/// Channels that share a scale in the unrotated part of a row.
const CONTENT: usize = 64;
/// Sequences, and new positions of each.
const STEPS: [(usize, usize); 4] = [(1, 1), (1, 5), (64, 1), (1, 2048)];
/// Bytes of a bf16, and of an f32.
const BF16_BYTES: usize = 2;
const F32_BYTES: usize = 4;

/// A compressor of the released models.
#[derive(Clone, Copy)]
pub struct Kind {
    ratio: usize,
    overlap: bool,
    width: usize,
    pub rounding: RowRounding,
    /// Names of the steps that complete a block, and of those that do not.
    pub names: [&'static str; 2],
}

pub const KINDS: [Kind; 3] = [
    Kind {
        ratio: 4,
        overlap: true,
        width: 512,
        rounding: RowRounding::Content,
        names: ["csa-complete", "csa-partial"],
    },
    Kind {
        ratio: 4,
        overlap: true,
        width: 128,
        rounding: RowRounding::Index,
        names: ["index-complete", "index-partial"],
    },
    Kind {
        ratio: 128,
        overlap: false,
        width: 512,
        rounding: RowRounding::Content,
        names: ["hca-complete", "hca-partial"],
    },
];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in KINDS {
        for (batch, count) in STEPS {
            cases.push(case(kind, batch, count, true));
            if count < kind.ratio {
                cases.push(case(kind, batch, count, false));
            }
        }
    }
    cases
}

impl Kind {
    fn series(self) -> usize {
        1 + usize::from(self.overlap)
    }

    /// The sizes of steps of `count` positions of each sequence.
    pub fn sizes(self, batch: usize, count: usize) -> Sizes {
        let series = self.series();
        Sizes {
            batch,
            ratio: self.ratio,
            overlap: self.overlap,
            width: self.width,
            rotated: ROTATED,
            slots: series * self.ratio - 1 + ROLLBACK.max(count),
            positions: (series + 1) * self.ratio + count,
        }
    }

    /// The first position of a step: the last of a block that has a block before it, or the first
    /// of a block.
    pub fn first(self, complete: bool) -> usize {
        self.series() * self.ratio - usize::from(complete)
    }

    /// Bytes that a step reads and writes, without weights.
    pub fn bytes(self, batch: usize, count: usize, complete: bool) -> usize {
        let step = batch * count * self.sizes(batch, count).raw_width();
        let pooled = batch * self.series() * self.ratio * 2 * self.width;
        let first = self.first(complete);
        let done = (first + count) / self.ratio - first / self.ratio;
        (2 * step + done * pooled) * F32_BYTES + done * batch * self.width * BF16_BYTES
    }
}

fn case(kind: Kind, batch: usize, count: usize, complete: bool) -> Case {
    let sizes = kind.sizes(batch, count);
    let first = kind.first(complete);
    let raw_width = sizes.raw_width();
    let step = batch * count * raw_width;
    Case {
        op: "compress_rows",
        shape: vec![("N", batch), ("Q", count), ("D", kind.width)],
        variant: kind.names[usize::from(!complete)],
        // The dtype of the rows; raw rows are f32.
        dtype: DType::BF16,
        bytes: kind.bytes(batch, count, complete),
        flops: None,
        input_bytes: (step + batch * sizes.slots * raw_width) * F32_BYTES,
        build: Box::new(move |device, seed| prepared(kind, sizes, (first, count), device, seed)),
    }
}

fn prepared(
    kind: Kind,
    sizes: Sizes,
    (first, count): (usize, usize),
    device: &Device,
    seed: u32,
) -> Prepared {
    let problem = Problem::new(sizes, seed);
    // The state after the first positions. Repeating the step does not change it.
    let before = |dtype| {
        let (raw, rows) = problem.empty(dtype, device);
        let starts = vec![0; sizes.batch];
        let inputs = problem.inputs(&starts, first, device);
        let positions = problem.positions(&starts, device);
        let options = sizes.options(kind.rounding);
        compress_rows(inputs, positions, options, raw, rows).expect("arguments that fit")
    };
    let state = Rc::new(RefCell::new(Some(before(FloatDType::BF16))));
    let left = state.clone();
    let unrounded = before(FloatDType::F32);
    let starts = vec![first as i64; sizes.batch];
    let inputs = problem.inputs(&starts, count, device);
    let positions = problem.positions(&starts, device);
    let of_check = (inputs.clone(), positions.clone());
    Prepared::new(
        move || {
            let CompressorState { raw, rows } = state.take().expect("what the last call left");
            let options = sizes.options(kind.rounding);
            let result = compress_rows(inputs.clone(), positions.clone(), options, raw, rows);
            state.replace(Some(result.expect("arguments that fit")));
        },
        move |()| {
            let left = left.borrow();
            let CompressorState { raw, rows } = left.as_ref().expect("what the last call left");
            let CompressorState {
                raw: raw_before,
                rows: rows_before,
            } = unrounded.clone();
            let options = sizes.options(RowRounding::None);
            let (inputs, positions) = of_check.clone();
            let plain = compress_rows(inputs, positions, options, raw_before, rows_before)
                .expect("arguments that fit");
            assert_eq!(values(raw.clone()), values(plain.raw), "raw rows");
            let sequence = sizes.batch - 1;
            for block in first / kind.ratio..(first + count) / kind.ratio {
                let row = |rows: Tensor<3>| {
                    let of_sequence = rows.slice_dim(0, sequence..sequence + 1);
                    of_sequence.slice_dim(1, block..block + 1)
                };
                let expected = row(plain.rows.clone());
                let oracle = narrow(&problem.row(sequence, block));
                assert_close(&values(expected.clone()), &oracle, absolute(1e-5), "row");
                let expected = round(expected, kind).cast(FloatDType::BF16);
                assert_close(
                    &read(&row(rows.clone())),
                    &read(&expected),
                    EXACT,
                    "rounded",
                );
            }
        },
    )
}

/// Rounds a row as it is stored.
fn round(row: Tensor<3>, kind: Kind) -> Tensor<3> {
    let fits = "a row of floats";
    match kind.rounding {
        RowRounding::None => row,
        RowRounding::Content => {
            let unrotated = kind.width - ROTATED;
            let content =
                fp8_roundtrip(row.clone().slice_dim(2, 0..unrotated), CONTENT).expect(fits);
            Tensor::cat(vec![content, row.slice_dim(2, unrotated..kind.width)], 2)
        }
        RowRounding::Index => fp4_roundtrip(hadamard(row).expect(fits), FP4_BLOCK).expect(fits),
        other => unreachable!("{other:?} is not measured"),
    }
}
