//! Compressed rows against an `f64` oracle, against the operators that they are made of, and
//! against themselves.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{CompressorState, RowRounding, compress_rows, pool, rotate_at};
use burn_ds4_ops::norm::rms_norm;

use super::common::{
    EXACT, Tolerance, assert_close, devices, every_dtype, floats, half_unit, integers, is_limited,
    narrow, read, sized, some, values,
};
use super::compressing::{Case, EPSILON, Sizes, round};

const FITS: &str = "arguments that fit";

const CSA: Sizes = Sizes {
    batch: 2,
    ratio: 4,
    overlap: true,
    width: 24,
    rotated: 8,
    slots: 9,
    positions: 40,
};
/// Blocks that overlap and do not, of one position, of more than are read at once and of a number
/// that divides nothing; rows that all turn, of odd widths and of the released models; raw rows of
/// no more slots than are read back. Every third of them, from the first on: blocks that overlap
/// and do not, that are read at once and not; rows of one and of several planes.
const SIZES: [Sizes; 7] = [
    CSA,
    Sizes {
        overlap: false,
        slots: 3,
        ..CSA
    },
    Sizes {
        batch: 1,
        ratio: 1,
        overlap: true,
        width: 6,
        rotated: 6,
        slots: 1,
        positions: 12,
    },
    Sizes {
        batch: 3,
        ratio: 5,
        overlap: true,
        width: 13,
        rotated: 2,
        slots: 10,
        positions: 33,
    },
    Sizes {
        batch: 1,
        ratio: 11,
        overlap: false,
        width: 70,
        rotated: 64,
        slots: 50,
        positions: 50,
    },
    Sizes {
        batch: 2,
        ratio: 4,
        overlap: true,
        width: 512,
        rotated: 64,
        slots: 12,
        positions: 16,
    },
    Sizes {
        batch: 1,
        ratio: 128,
        overlap: false,
        width: 512,
        rotated: 64,
        slots: 132,
        positions: 140,
    },
];

/// The sizes for a dtype. Each makes a kernel of its own: a device that compiles slowly has every
/// third in f32, the first in other dtypes.
fn shapes(name: &str, dtype: FloatDType) -> impl Iterator<Item = &'static Sizes> + use<> {
    let step = if dtype == FloatDType::F32 {
        3
    } else {
        SIZES.len()
    };
    some(name, &SIZES, step)
}

/// A compressor's tensors after steps of so many positions each.
fn run(
    case: &Case,
    mut starts: Vec<i64>,
    counts: &[usize],
    rounding: RowRounding,
    (dtype, device): (FloatDType, &Device),
) -> CompressorState {
    let (raw, rows) = case.empty(dtype, device);
    let mut state = CompressorState { raw, rows };
    for count in counts {
        let inputs = case.inputs(&starts, *count, device);
        let options = case.sizes.options(rounding);
        let positions = case.positions(&starts, device);
        state = compress_rows(inputs, positions, options, state.raw, state.rows).expect(FITS);
        for start in &mut starts {
            *start += *count as i64;
        }
    }
    state
}

/// The last of so many positions in steps of one to five, after all others at once.
fn steps(positions: usize) -> Vec<usize> {
    let mut left = positions.min(35);
    let mut counts = Vec::new();
    if left < positions {
        counts.push(positions - left);
    }
    for count in [1, 2, 1, 5, 3, 4].into_iter().cycle() {
        let count = count.min(left);
        if count == 0 {
            break;
        }
        counts.push(count);
        left -= count;
    }
    counts
}

/// The part of one row of one sequence.
fn part(all: &[f32], [sequence, row]: [usize; 2], [rows, width]: [usize; 2]) -> &[f32] {
    &all[(sequence * rows + row) * width..][..width]
}

/// Checks both tensors after steps of so many positions, from the start on.
fn assert_oracle(
    name: &str,
    (dtype, device): (FloatDType, &Device),
    sizes: Sizes,
    steps: &[usize],
) {
    let case = Case::new(sizes, 3);
    let what = format!("{name} {sizes:?} {steps:?}");
    let starts = vec![0; sizes.batch];
    let state = run(&case, starts, steps, RowRounding::None, (dtype, device));
    assert_eq!(state.rows.dtype(), dtype.into(), "{what}");
    let (raw, rows) = (read(&state.raw), read(&state.rows));
    let length = steps.iter().sum::<usize>();
    let close = Tolerance {
        // Without PTX, an H200 has come to 5.7e-6.
        absolute: if is_limited() { 1e-5 } else { 5e-6 },
        relative: half_unit(dtype),
    };
    for sequence in 0..sizes.batch {
        for block in 0..sizes.rows() {
            let actual = part(&rows, [sequence, block], [sizes.rows(), sizes.width]);
            let what = format!("{what}, block {block} of {sequence}");
            if (block + 1) * sizes.ratio <= length {
                let expected = narrow(&case.row(sequence, block));
                assert_close(actual, &expected, close, &what);
            } else {
                assert!(actual.iter().all(|x| *x == 1.0), "{what}: not complete");
            }
        }
        for position in length.saturating_sub(sizes.slots)..length {
            let at = [sequence, position % sizes.slots];
            let actual = part(&raw, at, [sizes.slots, sizes.raw_width()]);
            assert_eq!(actual, case.raw(sequence, position), "{what} {position}");
        }
    }
}

fn rows_of_complete_blocks_agree_with_the_oracle() {
    every_dtype(|name, device, dtype| {
        for &sizes in shapes(name, dtype) {
            let steps = steps(sizes.positions - 1);
            assert_oracle(name, (dtype, device), sizes, &steps);
        }
    });
}

fn many_blocks_at_once_agree_with_the_oracle() {
    let narrow = Sizes {
        batch: 2,
        ratio: 2,
        overlap: true,
        width: 6,
        rotated: 2,
        slots: 40,
        positions: 1400,
    };
    // Raw rows of some positions and of all, several of them in the slots of earlier ones.
    let sizes = [
        (narrow, [5, 1300, 94]),
        (
            Sizes {
                overlap: false,
                ratio: 1,
                slots: 1301,
                ..narrow
            },
            [1, 1200, 198],
        ),
    ];
    for (name, device) in devices() {
        for (sizes, steps) in sizes {
            assert_oracle(name, (FloatDType::F32, device), sizes, &steps);
        }
    }
}

/// One product more is rounded.
const ROUNDED: Tolerance = Tolerance {
    absolute: 1e-7,
    relative: 1e-6,
};

fn rows_have_the_bits_of_the_operators_that_they_are_made_of() {
    for (name, device) in devices() {
        for &sizes in shapes(name, FloatDType::F32) {
            let case = Case::new(sizes, 4);
            let counts = steps(sizes.positions);
            let starts = vec![0; sizes.batch];
            let f32s = (FloatDType::F32, device);
            let state = run(&case, starts, &counts, RowRounding::None, f32s);
            let rows = values(state.rows);
            let starts = vec![0; sizes.batch];
            let inputs = case.inputs(&starts, 1, device);
            let positions = case.positions(&starts, device);
            for sequence in 0..sizes.batch {
                for block in 0..sizes.positions / sizes.ratio {
                    let tensors = case.pooled(sequence, block).map(|slots| {
                        let shape = [1, 1, slots.len(), sizes.width];
                        floats(&slots.concat(), shape, device)
                    });
                    let [slots, scores] = tensors;
                    let pooled = pool(slots, scores).expect(FITS);
                    let row = rms_norm(pooled, Some(inputs.norm.clone()), EPSILON).expect(FITS);
                    let start = integers(&[(block * sizes.ratio) as i64], [1], device);
                    let row = row.unsqueeze_dim::<4>(2);
                    let row = rotate_at(row, positions.angles.clone(), start, false).expect(FITS);
                    let actual = part(&rows, [sequence, block], [sizes.rows(), sizes.width]);
                    let what = format!("{name} {sizes:?}, block {block} of {sequence}");
                    // Channels that are no pairs of neighbours are turned by other operators, which
                    // round a product before it is added.
                    let pairs = sizes.width.is_multiple_of(2);
                    let close = if pairs { EXACT } else { ROUNDED };
                    assert_close(actual, &values(row), close, &what);
                }
            }
        }
    }
}

fn rows_are_rounded_as_by_the_round_trips() {
    // Numbers of blocks, of stages of the transform and of channels that do not turn. Every second
    // has an odd and an even number of stages, which end in different places.
    let widths = [(128, 64), (8, 4), (64, 2), (512, 64)];
    for (name, device) in devices() {
        for &(width, rotated) in some(name, &widths, 2) {
            let sizes = Sizes {
                width,
                rotated,
                positions: 16,
                ..CSA
            };
            let mut case = Case::new(sizes, 5);
            // Large and small channels, so that blocks have different scales and many values are
            // next to nothing.
            for (channel, weight) in case.norm.iter_mut().enumerate() {
                *weight *= 10f32.powi(channel as i32 * 7 % 9 - 5);
            }
            let with = |rounding| {
                let starts = vec![0; sizes.batch];
                run(&case, starts, &[11, 5], rounding, (FloatDType::F32, device)).rows
            };
            let plain = with(RowRounding::None);
            for rounding in [RowRounding::Content, RowRounding::Index] {
                let expected = values(round(plain.clone(), rounding, rotated));
                let what = format!("{name} {width} {rounding:?}");
                assert_close(&values(with(rounding)), &expected, EXACT, &what);
            }
        }
    }
}

fn positions_at_once_are_positions_one_by_one() {
    every_dtype(|name, device, dtype| {
        for &sizes in shapes(name, dtype) {
            let case = Case::new(sizes, 6);
            let length = (sizes.positions - sizes.batch).min(30);
            let first = sizes.positions - sizes.batch - length;
            let state = |counts: &[usize]| {
                let starts = (first..first + sizes.batch).map(|start| start as i64);
                let starts = starts.collect();
                run(&case, starts, counts, RowRounding::None, (dtype, device))
            };
            let alone = state(&vec![1; length]);
            for counts in [steps(length), vec![length]] {
                let together = state(&counts);
                let what = format!("{name} {sizes:?} {counts:?}");
                assert_close(&read(&together.raw), &read(&alone.raw), EXACT, &what);
                assert_close(&read(&together.rows), &read(&alone.rows), EXACT, &what);
            }
        }
    });
}

fn sequences_that_are_not_there_keep_what_they_have() {
    for (name, device) in devices() {
        let case = Case::new(CSA, 7);
        let run = |starts: [i64; 2]| {
            let f32s = (FloatDType::F32, device);
            let state = run(&case, starts.into(), &[4], RowRounding::None, f32s);
            (values(state.raw), values(state.rows))
        };
        let (raw, rows) = run([-8, 0]);
        let (all_raw, all_rows) = run([0, 0]);
        assert!(raw[..raw.len() / 2].iter().all(|x| *x == 1.0), "{name}");
        assert!(rows[..rows.len() / 2].iter().all(|x| *x == 1.0), "{name}");
        assert_eq!(raw[raw.len() / 2..], all_raw[raw.len() / 2..], "{name}");
        assert_eq!(rows[rows.len() / 2..], all_rows[rows.len() / 2..], "{name}");
        assert_ne!(all_rows[0], 1.0, "{name}");
    }
}

fn what_somebody_else_holds_stays_as_it_is() {
    for (name, device) in devices() {
        let case = Case::new(CSA, 8);
        let (raw, rows) = case.empty(FloatDType::F32, device);
        let held = (raw.clone(), rows.clone());
        let inputs = case.inputs(&[0, 0], 4, device);
        let positions = case.positions(&[0, 0], device);
        let options = CSA.options(RowRounding::None);
        let state = compress_rows(inputs.clone(), positions.clone(), options, raw, rows);
        let state = state.expect(FITS);
        assert!(values(held.0).iter().all(|x| *x == 1.0), "{name}");
        assert!(values(held.1).iter().all(|x| *x == 1.0), "{name}");

        // Views with gaps between their rows, which somebody else holds, too.
        let (raw, rows) = case.empty(FloatDType::F32, device);
        let wide = |tensor: Tensor<3>| {
            let width = tensor.dims()[2];
            Tensor::cat(vec![tensor.clone(), tensor], 2).slice_dim(2, width..2 * width)
        };
        let of_views = compress_rows(inputs, positions, options, wide(raw), wide(rows));
        let of_views = of_views.expect(FITS);
        assert_eq!(values(of_views.raw), values(state.raw), "{name}");
        assert_eq!(values(of_views.rows), values(state.rows), "{name}");
    }
}

fn what_lies_beyond_the_tables_is_refused_or_left_out() {
    for (name, device) in devices() {
        let case = Case::new(CSA, 9);
        let options = CSA.options(RowRounding::None);
        // The second sequence ends beyond the angles and the rows, the third part begins there.
        for starts in [[30, 38], [30, 1 << 20]] {
            let clamped = [30, starts[1].min(36)];
            let (raw, rows) = case.empty(FloatDType::F32, device);
            let inputs = case.inputs(&clamped, 4, device);
            let positions = case.positions(&starts, device);
            let result = compress_rows(inputs, positions, options, raw, rows);
            if name == "flex" {
                let message = result.err().map(|error| error.to_string());
                let message = message.unwrap_or_default();
                assert!(
                    message.starts_with("`last position` is"),
                    "{name}: {message}"
                );
            } else {
                let rows = values(result.expect(FITS).rows);
                let block = |row| part(&rows, row, [CSA.rows(), CSA.width]);
                // Of the first sequence, block 7 is complete at 32.
                assert_ne!(block([0, 7])[0], 1.0, "{name}");
                assert!(block([1, 0]).iter().all(|x| *x == 1.0), "{name}");
                assert!(block([1, 8]).iter().all(|x| *x == 1.0), "{name}");
            }
        }
    }
}

fn a_nan_reaches_the_rows_that_pool_it_only() {
    for (name, device) in devices() {
        let case = Case::new(CSA, 10);
        let mut spoilt = case.clone();
        // Position 5, the first score of the second series.
        spoilt.projections[5 * CSA.raw_width() + 3 * CSA.width] = f32::NAN;
        let rows = |case: &Case| {
            let f32s = (FloatDType::F32, device);
            values(run(case, vec![0, 0], &[5; 4], RowRounding::None, f32s).rows)
        };
        let (actual, expected) = (rows(&spoilt), rows(&case));
        for row in 0..2 * CSA.rows() {
            let at = row * CSA.width..(row + 1) * CSA.width;
            if row == 1 {
                assert!(actual[at].iter().all(|x| x.is_nan()), "{name}");
            } else {
                assert_eq!(actual[at.clone()], expected[at], "{name}: row {row}");
            }
        }
    }
}

fn what_another_sequence_has_left_in_the_raw_rows_is_not_pooled() {
    for (name, device) in devices() {
        let case = Case::new(CSA, 12);
        let rows = |left: f32| {
            let (raw, rows) = case.empty(FloatDType::F32, device);
            let inputs = case.inputs(&[0, 0], 9, device);
            let positions = case.positions(&[0, 0], device);
            let options = CSA.options(RowRounding::None);
            let state = compress_rows(inputs, positions, options, raw * left, rows);
            values(state.expect(FITS).rows)
        };
        let expected = rows(0.0);
        assert!(expected.iter().all(|x| x.is_finite()), "{name}");
        for left in [f32::NAN, f32::INFINITY, -1e30, 1e30, f32::MAX] {
            assert_eq!(rows(left), expected, "{name} after {left}");
        }
    }
}

fn a_large_batch_of_sequences_of_different_lengths_is_each_of_them_alone() {
    sized(64, 5, |name, device, batch| {
        let sizes = Sizes { batch, ..CSA };
        let case = Case::new(sizes, 11);
        let starts: Vec<i64> = (0..batch as i64).map(|i| i * 3 % 31).collect();
        let f32s = (FloatDType::F32, device);
        let state = run(&case, starts.clone(), &[5, 1, 2], RowRounding::None, f32s);
        let rows = values(state.rows);
        for (sequence, start) in starts.iter().enumerate() {
            let size = sizes.positions * sizes.raw_width();
            let alone = Case {
                sizes: Sizes { batch: 1, ..sizes },
                projections: case.projections[sequence * size..][..size].to_vec(),
                ..case.clone()
            };
            let state = run(&alone, vec![*start], &[5, 1, 2], RowRounding::None, f32s);
            let size = sizes.rows() * sizes.width;
            let together = &rows[sequence * size..][..size];
            let what = format!("{name}, sequence {sequence}");
            assert_close(together, &values(state.rows), EXACT, &what);
        }
    });
}

catalogue![
    a_large_batch_of_sequences_of_different_lengths_is_each_of_them_alone,
    a_nan_reaches_the_rows_that_pool_it_only,
    many_blocks_at_once_agree_with_the_oracle,
    positions_at_once_are_positions_one_by_one,
    rows_are_rounded_as_by_the_round_trips,
    rows_have_the_bits_of_the_operators_that_they_are_made_of,
    rows_of_complete_blocks_agree_with_the_oracle,
    sequences_that_are_not_there_keep_what_they_have,
    what_another_sequence_has_left_in_the_raw_rows_is_not_pooled,
    what_lies_beyond_the_tables_is_refused_or_left_out,
    what_somebody_else_holds_stays_as_it_is,
];
