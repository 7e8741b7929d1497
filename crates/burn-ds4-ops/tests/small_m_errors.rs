//! What products of a few rows refuse, each by its name.

use burn::tensor::{DType, Device, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul, small_m_matmul_group};
use burn_ds4_ops::quant::{Weights, grouped_linear};

use super::common::{devices, skip, two_devices};

fn ones<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::ones(shape, (device, DType::F32))
}

/// Three rows by weights of five, alone and in a group behind others that fit.
fn refused(
    x: impl Fn(&Device) -> Tensor<2>,
    weights: impl Fn(&Device) -> Tensor<2>,
    options: SmallMOptions,
    message: &str,
) {
    for (name, device) in devices() {
        let fitting = small_m_matmul(
            ones([3, 4], device),
            ones([5, 4], device),
            SmallMOptions::default(),
        );
        assert!(fitting.is_ok(), "{name}");
        let error = small_m_matmul(x(device), weights(device), options).expect_err(message);
        assert_eq!(error.to_string(), message, "{name}");
        let columns = x(device).dims()[1];
        let group = [ones([5, columns], device), weights(device)];
        let error = small_m_matmul_group(x(device), &group, options).expect_err(message);
        assert_eq!(error.to_string(), message, "{name} in a group");
    }
}

fn weights_of_other_columns_than_x_are_refused() {
    refused(
        |device| ones([3, 4], device),
        |device| ones([5, 6], device),
        SmallMOptions::default(),
        "`weight` has shape [5, 6], expected [5, 4]",
    );
    refused(
        |device| ones([3, 0], device),
        |device| ones([5, 1], device),
        SmallMOptions::default(),
        "`weight` has shape [5, 1], expected [5, 0]",
    );
}

fn more_or_fewer_invariant_rows_than_there_can_be_are_refused() {
    for invariant_rows in [0, 15, 65, usize::MAX] {
        refused(
            |device| ones([3, 4], device),
            |device| ones([5, 4], device),
            SmallMOptions {
                invariant_rows,
                ..SmallMOptions::default()
            },
            &format!("`invariant_rows` is {invariant_rows}, expected 16 to 64"),
        );
    }
    for (name, device) in devices() {
        for invariant_rows in [16, 17, 64] {
            let options = SmallMOptions {
                invariant_rows,
                ..SmallMOptions::default()
            };
            let product = small_m_matmul(ones([3, 4], device), ones([5, 4], device), options);
            assert!(product.is_ok(), "{name} {invariant_rows}");
        }
    }
}

fn floats_of_64_bits_are_refused() {
    for (name, device) in devices() {
        if !device.supports_dtype(DType::F64) {
            skip(name, "f64");
            continue;
        }
        let wide = |shape| Tensor::<2>::ones(shape, (device, DType::F64));
        let options = SmallMOptions::default();
        let expected = |argument| OpError::DtypeMismatch {
            argument,
            expected: "F32, F16 or BF16",
            actual: DType::F64,
        };
        let error = small_m_matmul(wide([3, 4]), ones([5, 4], device), options);
        assert_eq!(error.expect_err("x"), expected("x"), "{name}");
        let error = small_m_matmul(ones([3, 4], device), wide([5, 4]), options);
        assert_eq!(error.expect_err("weight"), expected("weight"), "{name}");
        let group = [ones([5, 4], device), wide([5, 4])];
        let error = small_m_matmul_group(ones([3, 4], device), &group, options);
        assert_eq!(error.expect_err("weight"), expected("weight"), "{name}");
        let weights = Weights::dense(ones([2, 5, 4], device)).expect("a stack");
        let x = Tensor::<3>::ones([3, 2, 4], (device, DType::F64));
        let error = grouped_linear(x, &weights);
        assert_eq!(error.expect_err("x"), expected("x"), "{name}");
    }
}

fn weights_on_another_device_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let is_of_devices = |error: OpError, name| {
        let OpError::DeviceMismatch {
            argument, other, ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((argument, other), (name, "x"));
    };
    let options = SmallMOptions::default();
    let error = small_m_matmul(ones([3, 4], first), ones([5, 4], second), options);
    is_of_devices(error.expect_err("two devices"), "weight");
    let group = [ones([5, 4], first), ones([5, 4], second)];
    let error = small_m_matmul_group(ones([3, 4], first), &group, options);
    is_of_devices(error.expect_err("two devices"), "weight");
    let weights = Weights::dense(ones([2, 5, 4], second)).expect("a stack");
    let error = grouped_linear(ones([3, 2, 4], first), &weights);
    is_of_devices(error.expect_err("two devices"), "weights");
}

fn grouped_maps_refuse_another_number_of_groups_and_of_columns() {
    for (name, device) in devices() {
        let weights = Weights::dense(ones([2, 5, 4], device)).expect("a stack");
        assert!(
            grouped_linear(ones([3, 2, 4], device), &weights).is_ok(),
            "{name}"
        );
        for shape in [[3, 1, 4], [3, 3, 4], [3, 2, 5], [3, 0, 4], [0, 4, 2]] {
            let error = grouped_linear(ones(shape, device), &weights).expect_err("a wrong shape");
            let expected = OpError::ShapeMismatch {
                argument: "x",
                expected: vec![shape[0], 2, 4],
                actual: shape.to_vec(),
            };
            assert_eq!(error, expected, "{name}");
        }
    }
}

catalogue![
    weights_of_other_columns_than_x_are_refused,
    more_or_fewer_invariant_rows_than_there_can_be_are_refused,
    floats_of_64_bits_are_refused,
    weights_on_another_device_are_refused,
    grouped_maps_refuse_another_number_of_groups_and_of_columns,
];
