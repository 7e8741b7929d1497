//! Linear layers with packed weights, at the sizes of the released models' projections.

use burn::tensor::{DType, Distribution, FloatDType, Tensor};
use burn_ds4_ops::quant::{FP4_BLOCK, quant_linear};

use crate::{
    harness::{Case, Prepared},
    tests::common::values,
    tests::drawn::Drawn,
    tests::linear::Input,
    tests::packing::{FP8, Format, fp8_blocks},
};

/// Outputs and inputs.
const SIZES: [(usize, usize); 3] = [(4096, 4096), (32768, 1024), (7168, 2048)];
/// For a look at whether everything runs.
const SMALL: (usize, usize) = (256, 512);
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 64, 4096];
/// From so many rows on, arithmetic may be the limit.
const MANY: usize = 64;

pub fn cases() -> Vec<Case> {
    let formats = [("fp8", FP8), ("fp4", Format::Fp4)].into_iter();
    let large = formats.flat_map(|format| {
        let sizes = SIZES.into_iter();
        sizes.flat_map(move |size| ROWS.map(|rows| case(rows, size, format, FloatDType::BF16)))
    });
    let small = case(1, SMALL, ("fp4", Format::Fp4), FloatDType::F32);
    std::iter::once(small).chain(large).collect()
}

fn case(
    rows: usize,
    (outputs, inputs): (usize, usize),
    (variant, format): (&'static str, Format),
    dtype: FloatDType,
) -> Case {
    let weights = bytes_of_one(format, outputs, inputs);
    let size = DType::from(dtype).size();
    Case {
        op: "quant_linear",
        shape: vec![("M", rows), ("N", outputs), ("K", inputs)],
        variant,
        dtype: dtype.into(),
        bytes: weights + rows * (inputs + outputs) * size,
        flops: (rows >= MANY).then_some(2 * (rows * outputs * inputs) as u64),
        input_bytes: weights + rows * inputs * size,
        build: Box::new(move |device, seed| {
            let drawn = Drawn::new(format, [1, outputs, inputs], device, seed);
            let uniform = Distribution::Uniform(-1.0, 1.0);
            let x = Tensor::<2>::random([rows, inputs], uniform, (device, DType::F32)).cast(dtype);
            let (weights, checked) = (drawn.weights(), x.clone());
            Prepared::new(
                move || quant_linear(x.clone(), &weights).expect("a matrix"),
                move |output: Tensor<2>| {
                    let matrix = drawn.read();
                    let mut some = vec![0, rows - 1];
                    some.dedup();
                    for row in some {
                        let read = |tensor: &Tensor<2>| {
                            let row = tensor.clone().slice_dim(0, row..row + 1);
                            values(row.cast(FloatDType::F32))
                        };
                        let x = Input::new([1, inputs], dtype, &read(&checked));
                        let what = format!("{variant} row {row}");
                        x.check(&matrix, &read(&output), &what);
                    }
                },
            )
        }),
    }
}

/// Bytes that a kernel reads of a matrix.
pub fn bytes_of_one(format: Format, rows: usize, columns: usize) -> usize {
    match format {
        Format::Dense(dtype) => rows * columns * DType::from(dtype).size(),
        Format::Fp8 { parts } => {
            let scales: usize = fp8_blocks([1, rows, columns], parts).iter().product();
            rows * columns.next_multiple_of(4) + 4 * scales
        }
        Format::Fp4 => rows * (columns.div_ceil(8) * 4 + columns.div_ceil(FP4_BLOCK)),
    }
}
