//! What linear maps by several matrices at once refuse, each by its name.

use burn::tensor::{DType, Device, Tensor};
use burn_ds4_ops::matmul::SmallMOptions;
use burn_ds4_ops::quant::{Weights, quant_linear_group, quant_linear_pair};

use super::common::{assert_on_another_device, assert_refused, devices, two_devices};
use super::packing::{FP8, Packed};

fn dense(shape: [usize; 3], device: &Device) -> Weights {
    Weights::dense(Tensor::zeros(shape, (device, DType::F32))).expect("floats")
}

fn what_does_not_fit_is_refused_by_name() {
    for (_, device) in devices() {
        let x = || Tensor::<2>::zeros([3, 4], (device, DType::F32));
        let fits = dense([1, 5, 4], device);
        for (shape, message) in [
            ([1, 5, 3], "has shape [1, 5, 3], expected [1, 5, 4]"),
            ([2, 5, 4], "has shape [2, 5, 4], expected [1, 5, 4]"),
            ([0, 6, 4], "has shape [0, 6, 4], expected [1, 6, 4]"),
        ] {
            let other = dense(shape, device);
            let of_dense = [Tensor::<2>::zeros([2, 4], (device, DType::F32))];
            for (index, weights) in [[&other, &fits], [&fits, &other]].into_iter().enumerate() {
                let message = format!("`weights[{index}]` {message}");
                for dense in [&[][..], &of_dense] {
                    let result = quant_linear_group(x(), weights, dense, SmallMOptions::default());
                    assert_refused(result, &message);
                }
            }
        }
        let refused = |columns, invariant_rows, message| {
            let dense = [Tensor::<2>::zeros([2, columns], (device, DType::F32))];
            let options = SmallMOptions {
                invariant_rows,
                ..SmallMOptions::default()
            };
            assert_refused(
                quant_linear_group(x(), [&fits; 2], &dense, options),
                message,
            );
        };
        refused(5, 16, "`dense` has shape [2, 5], expected [2, 4]");
        refused(4, 15, "`invariant_rows` is 15, expected 16 to 64");
    }
    let device = &devices()[0].1;
    let x = || Tensor::<2>::zeros([3, 4], (device, DType::F64));
    let weights = Packed::exact(FP8, [1, 5, 4], 0, 1).on(device);
    let message = "`x` has dtype F64, expected F32, F16 or BF16";
    let result = quant_linear_group(x(), [&weights; 2], &[], SmallMOptions::default());
    assert_refused(result, message);
    assert_refused(quant_linear_pair(x(), [&weights; 2]), message);
}

fn weights_on_another_device_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let packed = Packed::exact(FP8, [1, 5, 4], 0, 1);
    let (here, there) = (packed.on(first), packed.on(second));
    let x = || Tensor::<2>::zeros([3, 4], (first, DType::F32));
    let dense = [Tensor::<2>::zeros([2, 4], (second, DType::F32))];
    for (weights, dense, name) in [
        ([&there, &here], &[][..], "weights[0]"),
        ([&here, &there], &[], "weights[1]"),
        ([&here; 2], &dense, "dense"),
    ] {
        let result = quant_linear_group(x(), weights, dense, SmallMOptions::default());
        assert_on_another_device(result, [name, "x"]);
    }
}

catalogue![
    what_does_not_fit_is_refused_by_name,
    weights_on_another_device_are_refused,
];
