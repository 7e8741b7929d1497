//! What the experts refuse, each by its name.

use super::common::errors::Arguments;
use super::common::{
    assert_on_another_device, assert_refused, devices, integers, skip, two_devices, values,
};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::moe::{check_expert_ids, expert_ffn, swiglu};
use burn_ds4_ops::quant::Weights;

/// Two tokens of width 4, two experts of inner width 3, two slots.
struct Experts {
    x: Tensor<2>,
    ids: Tensor<2, Int>,
    weights: Tensor<2>,
    gate_up: Weights,
    down: Weights,
    limit: Option<f64>,
}

impl Arguments for Experts {
    type Output = Tensor<2>;

    fn new(device: &Device) -> Self {
        Self {
            x: ones([2, 4], device),
            ids: integers(&[0, 1, 1, 0], [2, 2], device),
            weights: ones([2, 2], device),
            gate_up: dense([2, 6, 4], device),
            down: dense([2, 4, 3], device),
            limit: Some(1.0),
        }
    }

    fn run(self) -> Result<Tensor<2>, OpError> {
        expert_ffn(
            self.x,
            self.ids,
            self.weights,
            &self.gate_up,
            &self.down,
            self.limit,
        )
    }
}

fn ones<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::ones(shape, (device, DType::F32))
}

fn dense(shape: [usize; 3], device: &Device) -> Weights {
    Weights::dense(ones(shape, device)).unwrap()
}

fn arguments_must_be_of_a_known_dtype() {
    let device = &Device::flex();
    let refused = |change: fn(&mut Experts), message| {
        let mut arguments = Experts::new(device);
        change(&mut arguments);
        assert_refused(arguments.run(), message);
    };
    refused(
        |own| own.x = own.x.clone().cast(FloatDType::F64),
        "`x` has dtype F64, expected F32, F16 or BF16",
    );
    refused(
        |own| own.ids = own.ids.clone().cast(DType::I16),
        "`ids` has dtype I16, expected I32, I64 or U32",
    );
}

fn routing_weights_must_be_f32() {
    for (name, device) in devices() {
        if !device.supports_dtype(FloatDType::F16) {
            skip(name, "f16");
            continue;
        }
        let mut arguments = Experts::new(device);
        arguments.weights = arguments.weights.cast(FloatDType::F16);
        assert_refused(arguments.run(), "`weights` has dtype F16, expected F32");
    }
}

fn arguments_must_be_of_the_shapes_that_the_others_ask_for() {
    Experts::refused(
        |own, device| own.ids = integers(&[0; 6], [3, 2], device),
        "`ids` has shape [3, 2], expected [2, 2]",
    );
    Experts::refused(
        |own, device| own.weights = ones([2, 1], device),
        "`weights` has shape [2, 1], expected [2, 2]",
    );
    Experts::refused(
        |own, device| own.gate_up = dense([2, 6, 5], device),
        "`gate_up` has shape [2, 6, 5], expected [2, 6, 4]",
    );
    Experts::refused(
        |own, device| own.gate_up = dense([2, 7, 4], device),
        "`rows of gate_up` is 7, expected an even number",
    );
    Experts::refused(
        |own, device| own.down = dense([2, 4, 6], device),
        "`down` has shape [2, 4, 6], expected [2, 4, 3]",
    );
    Experts::refused(
        |own, device| own.down = dense([3, 4, 3], device),
        "`down` has shape [3, 4, 3], expected [2, 4, 3]",
    );
}

fn a_limit_that_is_negative_or_no_number_is_refused() {
    for (limit, named) in [(f64::NAN, "NaN"), (-0.5, "-0.5")] {
        let message = format!("`limit` is {named}, expected a number that is not negative");
        Experts::refused(|own, _| own.limit = Some(limit), &message);
    }
}

fn arguments_on_another_device_are_refused() {
    Experts::refused_device(["ids", "x"], |own, device| {
        own.ids = integers(&[0; 4], [2, 2], device);
    });
    Experts::refused_device(["weights", "x"], |own, device| {
        own.weights = ones([2, 2], device);
    });
    Experts::refused_device(["gate_up", "x"], |own, device| {
        own.gate_up = dense([2, 6, 4], device);
    });
    Experts::refused_device(["down", "x"], |own, device| {
        own.down = dense([2, 4, 3], device);
    });
}

fn an_id_past_the_last_expert_is_an_error_on_the_host_and_padding_elsewhere() {
    for (name, device) in devices() {
        let mut arguments = Experts::new(device);
        arguments.ids = integers(&[0, -1, 7, 2], [2, 2], device);
        let result = arguments.run();
        if name == "flex" {
            assert_eq!(
                result.unwrap_err().to_string(),
                "`ids` is 7, expected less than 2, the number of experts"
            );
        } else {
            let output = values(result.unwrap());
            assert_eq!(output[4..], [0.0; 4], "{name}");
            assert!(output[0] > 0.0, "{name}");
        }
    }
}

fn check_expert_ids_names_the_first_id_that_is_no_experts() {
    for (name, device) in devices() {
        let ids = integers(&[0, -1, 5, 4, 9, 6], [3, 2], device);
        assert_eq!(check_expert_ids(ids.clone(), 10), Ok(()), "{name}");
        let error = check_expert_ids(ids.clone(), 5).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`ids` is 5, expected less than 5, the number of experts",
            "{name}"
        );
        let largest = ids.cast(DType::U32).clamp(u32::MAX, u32::MAX);
        let error = check_expert_ids(largest, 5).unwrap_err();
        assert!(error.to_string().contains("is 4294967295,"), "{error}");
    }
}

#[test]
fn swiglu_refuses_parts_that_do_not_fit() {
    let device = &devices()[0].1;
    let message = "`up` has shape [8, 5], expected [8, 1]";
    let result = swiglu(ones([8, 1], device), ones([8, 5], device), None);
    assert_refused(result, message);
    let half = ones([2, 3], device).cast(FloatDType::BF16);
    let message = "`up` has dtype BF16, expected that of `gate`";
    assert_refused(swiglu(ones([2, 3], device), half, None), message);
    let wide = || ones([2, 3], device).cast(FloatDType::F64);
    let message = "`gate` has dtype F64, expected F32, F16 or BF16";
    assert_refused(swiglu(wide(), wide(), None), message);
    for (limit, named) in [(-1.0, "-1"), (f64::NAN, "NaN")] {
        let message = format!("`limit` is {named}, expected a number that is not negative");
        let result = swiglu(ones([2, 3], device), ones([2, 3], device), Some(limit));
        assert_refused(result, &message);
    }
}

#[test]
fn swiglu_refuses_parts_on_two_devices() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let result = swiglu(ones([2, 3], first), ones([2, 3], second), None);
    assert_on_another_device(result, ["up", "gate"]);
}

fn swiglu_of_nothing_is_nothing() {
    for (name, device) in devices() {
        let none = || ones([2, 0], device);
        let result = swiglu(none(), none(), Some(7.0)).expect("arguments that fit");
        assert_eq!(result.dims(), [2, 0], "{name}");
        assert!(values(result).is_empty(), "{name}");
    }
}

catalogue![
    arguments_must_be_of_a_known_dtype,
    routing_weights_must_be_f32,
    arguments_must_be_of_the_shapes_that_the_others_ask_for,
    a_limit_that_is_negative_or_no_number_is_refused,
    arguments_on_another_device_are_refused,
    an_id_past_the_last_expert_is_an_error_on_the_host_and_padding_elsewhere,
    check_expert_ids_names_the_first_id_that_is_no_experts,
    swiglu_of_nothing_is_nothing,
];
