//! Stacks of weights: what they refuse, and that operators read the packed ones as their
//! dequantised values.

use super::common::{
    EXACT, FLOATS, Tolerance, assert_close, devices, every_dtype, floats, integers, noise,
    two_devices, values,
};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::OpError;
use burn_ds4_ops::moe::expert_ffn;
use burn_ds4_ops::quant::{Fp4Layout, Weights, quant_linear};

const F32: FloatDType = FloatDType::F32;
const CLOSE: Tolerance = Tolerance {
    absolute: 1e-4,
    relative: 1e-5,
};

fn words<const D: usize>(
    shape: [usize; D],
    word: impl Fn(u32) -> u32,
    device: &Device,
) -> Tensor<D, Int> {
    let count = shape.iter().product::<usize>() as u32;
    let data: Vec<u32> = (0..count)
        .map(|i| word(i.wrapping_mul(2_654_435_761)))
        .collect();
    Tensor::from_data(TensorData::new(data, shape), (device, DType::U32))
}

/// FP8 codes of all signs and of exponents below 8: magnitudes below 2.
fn fp8([count, out, columns]: [usize; 3], parts: usize, device: &Device) -> Weights {
    let blocks = [
        count,
        parts * (out / parts).div_ceil(128),
        columns.div_ceil(128),
    ];
    let scales: Vec<f32> = (0..blocks.iter().product())
        .map(|i| 0.3 + i as f32 / 16.0)
        .collect();
    Weights::fp8(
        words(
            [count, out, columns.div_ceil(4)],
            |bits| bits & 0xbfbf_bfbf,
            device,
        ),
        floats(&scales, blocks, device),
        columns,
        parts,
    )
    .unwrap()
}

/// All FP4 codes; scales 1/16, 1/8, 1/4 and 1/2.
fn fp4([count, out, columns]: [usize; 3], device: &Device) -> Weights {
    let scale_words = (out * columns.div_ceil(32)).div_ceil(4);
    Weights::fp4(
        words([count, out, columns.div_ceil(8)], |bits| bits, device),
        words(
            [count, scale_words],
            |bits| 0x7b7b_7b7b + (bits & 0x0303_0303),
            device,
        ),
        columns,
        Fp4Layout::Plain,
    )
    .unwrap()
}

/// The same values as floats.
fn dequantized(weights: &Weights) -> Weights {
    Weights::dense(weights.dequantize(F32).unwrap()).unwrap()
}

fn a_stack_knows_its_shape_and_device_in_every_format() {
    for (name, device) in devices() {
        let dense = Weights::dense(Tensor::zeros([2, 3, 5], (device, DType::F32))).unwrap();
        let shape = [3, 6, 70];
        for (weights, shape) in [
            (dense, [2, 3, 5]),
            (fp8(shape, 2, device), shape),
            (fp4(shape, device), shape),
        ] {
            assert_eq!(weights.dims(), shape, "{name}");
            assert_eq!(weights.device(), *device, "{name}");
            let floats = weights.dequantize(F32).unwrap();
            assert_eq!(floats.dims(), shape, "{name}");
        }
    }
}

fn a_dense_stack_dequantizes_to_itself_rounded() {
    let data = noise(30, 1);
    every_dtype(|what, device, dtype| {
        let tensor = floats(&data, [2, 3, 5], device);
        let expected = values(tensor.clone().cast(dtype).cast(F32));
        let weights = Weights::dense(tensor).unwrap();
        let actual = weights.dequantize(dtype).unwrap();
        assert_eq!(actual.dtype(), dtype.into());
        assert_close(&values(actual.cast(F32)), &expected, EXACT, what);
    });
}

fn a_dtype_that_the_device_lacks_is_refused_for_a_dense_stack_too() {
    for (name, device) in devices() {
        let weights = Weights::dense(Tensor::zeros([1, 1, 1], (device, DType::F32))).unwrap();
        for dtype in FLOATS {
            let lacks = matches!(
                weights.dequantize(dtype),
                Err(OpError::UnsupportedDtype {
                    argument: "dtype",
                    ..
                })
            );
            assert_eq!(lacks, !device.supports_dtype(dtype), "{name} {dtype:?}");
        }
    }
}

fn dense_values_must_be_of_a_known_dtype() {
    let device = &Device::flex();
    let error = Weights::dense(Tensor::zeros([1, 1, 1], (device, DType::F64))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`values` has dtype F64, expected F32, F16 or BF16"
    );
}

fn a_linear_map_reads_packed_weights_as_their_dequantised_values() {
    let (rows, out, columns) = (5, 130, 140);
    for (name, device) in devices() {
        let x = || floats(&noise(rows * columns, 3), [rows, columns], device);
        for (format, weights) in [
            ("FP8", fp8([1, out, columns], 1, device)),
            ("FP4", fp4([1, out, columns], device)),
        ] {
            let expected = quant_linear(x(), &dequantized(&weights)).unwrap();
            let actual = quant_linear(x(), &weights).unwrap();
            assert_eq!(actual.dims(), [rows, out]);
            let what = format!("{name} {format}");
            assert!(values(expected.clone()).iter().any(|v| v.abs() > 1.0));
            assert_close(&values(actual), &values(expected), CLOSE, &what);
        }
    }
}

fn a_linear_map_keeps_all_dimensions_but_the_last() {
    for (name, device) in devices() {
        let weights = Weights::dense(floats(
            &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0],
            [1, 3, 2],
            device,
        ));
        let x = floats(
            &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0],
            [2, 1, 2, 2],
            device,
        );
        let y = quant_linear(x, &weights.unwrap()).unwrap();
        assert_eq!(y.dims(), [2, 1, 2, 3], "{name}");
        let expected = [
            1.0, 2.0, 3.0, 10.0, 20.0, 30.0, 11.0, 22.0, 33.0, 2.0, 4.0, 6.0,
        ];
        assert_close(&values(y), &expected, EXACT, name);
    }
}

fn a_linear_map_without_columns_gives_zeros_and_without_rows_or_outputs_nothing() {
    for (name, device) in devices() {
        let run = |rows: usize, out: usize, columns: usize| {
            let weights = Weights::dense(Tensor::empty([1, out, columns], (device, DType::F32)));
            let x = Tensor::<2>::empty([rows, columns], (device, DType::F32));
            let y = quant_linear(x, &weights.unwrap()).unwrap();
            assert_eq!(y.dims(), [rows, out], "{name}");
            y
        };
        assert_close(&values(run(2, 3, 0)), &[0.0; 6], EXACT, name);
        run(0, 3, 4);
        run(2, 0, 4);
    }
}

fn a_linear_map_refuses_what_does_not_fit_by_name() {
    for (name, device) in devices() {
        let refused =
            |x: Tensor<2>, weights: &Weights| quant_linear(x, weights).expect_err(name).to_string();
        let x = || Tensor::<2>::zeros([3, 4], (device, DType::F32));
        let of_shape = |shape| Weights::dense(Tensor::zeros(shape, (device, DType::F32))).unwrap();
        assert_eq!(
            refused(x(), &of_shape([2, 5, 4])),
            "`number of matrices in weights` is 2, expected 1"
        );
        assert_eq!(
            refused(x(), &of_shape([1, 4, 5])),
            "`x` has shape [3, 4], expected [3, 5]"
        );
    }
    let device = &devices()[0].1;
    let x = Tensor::<2>::zeros([3, 4], (device, DType::F64));
    let error = quant_linear(x, &fp4([1, 5, 4], device)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`x` has dtype F64, expected F32, F16 or BF16"
    );
}

fn a_linear_map_refuses_weights_on_another_device() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let x = Tensor::<2>::zeros([3, 4], (first, DType::F32));
    let result = quant_linear(x, &fp4([1, 5, 4], second));
    assert!(
        matches!(
            result,
            Err(OpError::DeviceMismatch {
                argument: "weights",
                other: "x",
                ..
            })
        ),
        "{result:?}"
    );
}

fn experts_read_packed_weights_as_their_dequantised_values() {
    let (experts, d, inner, k) = (3, 40, 70, 2);
    for (name, device) in devices() {
        for tokens in [2, 30] {
            let ids: Vec<i64> = (0..tokens * k)
                .map(|i| (i * 5 % (experts + 1)) as i64 - 1)
                .collect();
            let run = |gate_up: &Weights, down: &Weights| {
                let output = expert_ffn(
                    floats(&noise(tokens * d, 5), [tokens, d], device),
                    integers(&ids, [tokens, k], device),
                    floats(&noise(tokens * k, 6), [tokens, k], device),
                    gate_up,
                    down,
                    Some(10.0),
                );
                values(output.unwrap())
            };
            for (format, gate_up, down) in [
                (
                    "FP8",
                    fp8([experts, 2 * inner, d], 2, device),
                    fp8([experts, d, inner], 1, device),
                ),
                (
                    "FP4",
                    fp4([experts, 2 * inner, d], device),
                    fp4([experts, d, inner], device),
                ),
            ] {
                let expected = run(&dequantized(&gate_up), &dequantized(&down));
                let what = format!("{name} {format} tokens {tokens}");
                assert!(expected.iter().any(|v| v.abs() > 1.0), "{what}");
                assert_close(&run(&gate_up, &down), &expected, CLOSE, &what);
            }
        }
    }
}

catalogue![
    a_stack_knows_its_shape_and_device_in_every_format,
    a_dense_stack_dequantizes_to_itself_rounded,
    a_dtype_that_the_device_lacks_is_refused_for_a_dense_stack_too,
    dense_values_must_be_of_a_known_dtype,
    a_linear_map_reads_packed_weights_as_their_dequantised_values,
    a_linear_map_keeps_all_dimensions_but_the_last,
    a_linear_map_without_columns_gives_zeros_and_without_rows_or_outputs_nothing,
    a_linear_map_refuses_what_does_not_fit_by_name,
    a_linear_map_refuses_weights_on_another_device,
    experts_read_packed_weights_as_their_dequantised_values,
];
