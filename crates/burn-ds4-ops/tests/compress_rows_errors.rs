//! What compressed rows refuse.

use burn::tensor::{DType, Device, FloatDType, IntDType, Tensor};
use burn_ds4_ops::attention::{
    CompressionInputs, CompressionOptions, Positions, RowRounding, compress_rows,
};

use super::common::{devices, floats, integers, second_device};
use super::compressing::{Case, Sizes};

const SIZES: Sizes = Sizes {
    batch: 1,
    ratio: 4,
    overlap: true,
    width: 6,
    rotated: 2,
    slots: 7,
    positions: 16,
};

/// Arguments that fit, to be spoilt.
struct Arguments {
    inputs: CompressionInputs,
    positions: Positions,
    options: CompressionOptions,
    raw: Tensor<3>,
    rows: Tensor<3>,
}

fn arguments(device: &Device) -> Arguments {
    let case = Case::new(SIZES, 1);
    let (raw, rows) = case.empty(FloatDType::F32, device);
    Arguments {
        inputs: case.inputs(&[0], 2, device),
        positions: case.positions(&[0], device),
        options: SIZES.options(RowRounding::None),
        raw,
        rows,
    }
}

/// The message of an error that should be.
fn refused(arguments: Arguments) -> String {
    let Arguments {
        inputs,
        positions,
        options,
        raw,
        rows,
    } = arguments;
    match compress_rows(inputs, positions, options, raw, rows) {
        Ok(_) => "accepted".into(),
        Err(error) => error.to_string(),
    }
}

fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, (&devices()[0].1, DType::F32))
}

#[test]
fn compressed_rows_refuse_what_does_not_fit() {
    type Spoil = fn(&mut Arguments);
    let spoils: [(Spoil, &str); 19] = [
        (
            |a| a.inputs.projections = a.inputs.projections.clone().cast(FloatDType::F16),
            "`projections` has dtype F16, expected F32",
        ),
        (
            |a| a.raw = a.raw.clone().cast(FloatDType::F16),
            "`raw` has dtype F16, expected F32",
        ),
        (
            |a| a.inputs.bias = a.inputs.bias.clone().cast(FloatDType::F16),
            "`bias` has dtype F16, expected F32",
        ),
        (
            |a| a.positions.angles = a.positions.angles.clone().cast(FloatDType::F16),
            "`angles` has dtype F16, expected F32",
        ),
        (
            |a| a.inputs.norm = a.inputs.norm.clone().cast(FloatDType::F64),
            "`norm` has dtype F64, expected F32, F16 or BF16",
        ),
        (
            |a| a.rows = a.rows.clone().cast(FloatDType::F64),
            "`rows` has dtype F64, expected F32, F16 or BF16",
        ),
        (
            |a| a.positions.start = a.positions.start.clone().cast(IntDType::I8),
            "`start` has dtype I8, expected I32, I64 or U32",
        ),
        (
            |a| a.inputs.bias = zeros([0, 24]),
            "`rows of bias` is 0, expected at least 1",
        ),
        (
            |a| a.rows = zeros([1, 0, 6]),
            "`rows` is 0, expected at least 1",
        ),
        (
            |a| a.options.overlap = false,
            "`projections` has shape [1, 2, 24], expected [1, 2, 12]",
        ),
        (
            |a| a.inputs.bias = zeros([4, 12]),
            "`bias` has shape [4, 12], expected [4, 24]",
        ),
        (
            |a| a.inputs.norm = zeros([5]),
            "`norm` has shape [5], expected [6]",
        ),
        (
            |a| a.raw = zeros([2, 7, 24]),
            "`raw` has shape [2, 7, 24], expected [1, 7, 24]",
        ),
        (
            |a| a.positions.angles = zeros([16, 3]),
            "`number of rotated channels` is 3, expected even and at most 6",
        ),
        (
            |a| a.raw = zeros([1, 6, 24]),
            "`slots of raw` is 6, expected at least 7, which blocks of 4 read back",
        ),
        (
            |a| a.options.rounding = RowRounding::Index,
            "`columns of rows` is 6, expected a power of two where rows are rounded as an index",
        ),
        (
            |a| a.inputs.epsilon = -1.0,
            "`epsilon` is -1, expected a number that is not negative",
        ),
        (
            |a| a.positions.start = integers(&[15], [1], &devices()[0].1),
            "`last position` is 16, expected less than 16, the positions of angles",
        ),
        (
            |a| {
                a.positions.start = integers(&[7], [1], &devices()[0].1);
                a.rows = zeros([1, 1, 6]);
            },
            "`complete blocks` is 2, expected at most 1, the rows that there are",
        ),
    ];
    for (spoil, message) in spoils {
        let mut spoilt = arguments(&devices()[0].1);
        spoil(&mut spoilt);
        assert_eq!(refused(spoilt), message);
    }
    assert_eq!(refused(arguments(&devices()[0].1)), "accepted");
}

#[test]
fn compressed_rows_of_tensors_of_other_devices_are_refused() {
    let Some((name, other)) = second_device() else {
        return;
    };
    let there = arguments(other);
    type Spoil = fn(&mut Arguments, &Arguments);
    let spoils: [(Spoil, &str); 6] = [
        (
            |a, there| a.inputs.projections = there.inputs.projections.clone(),
            "projections",
        ),
        (|a, there| a.inputs.bias = there.inputs.bias.clone(), "bias"),
        (|a, there| a.inputs.norm = there.inputs.norm.clone(), "norm"),
        (
            |a, there| a.positions.angles = there.positions.angles.clone(),
            "angles",
        ),
        (|a, there| a.raw = there.raw.clone(), "raw"),
        (
            |a, there| a.positions.start = there.positions.start.clone(),
            "start",
        ),
    ];
    for (spoil, argument) in spoils {
        let mut spoilt = arguments(&devices()[0].1);
        spoil(&mut spoilt, &there);
        let message = refused(spoilt);
        let expected = format!("`{argument}` is on ");
        assert!(message.starts_with(&expected), "{name}: {message}");
    }
}

#[test]
fn nothing_new_changes_nothing() {
    for (name, device) in devices() {
        let Arguments {
            mut inputs,
            positions,
            options,
            raw,
            rows,
        } = arguments(device);
        inputs.projections = floats(&[], [1, 0, 24], device);
        let state =
            compress_rows(inputs, positions, options, raw, rows).expect("arguments that fit");
        let ones = |tensor: Tensor<3>| super::common::values(tensor).iter().all(|x| *x == 1.0);
        assert!(ones(state.raw) && ones(state.rows), "{name}");
    }
}
