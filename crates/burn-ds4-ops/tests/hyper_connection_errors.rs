//! What hyper-connections refuse, and how they name it.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::hyper_connection::{Coefficients, Sinkhorn, collapse, expand, head};

use super::common::{devices, two_devices};
use super::mixing::SINKHORN;

/// Arguments of [`collapse`] for three tokens of two streams of five channels.
struct Arguments {
    streams: Tensor<3>,
    function: Tensor<2>,
    base: Tensor<1>,
    scale: Tensor<1>,
    sinkhorn: Sinkhorn,
}

impl Arguments {
    fn new(device: &Device) -> Self {
        Self {
            streams: Tensor::ones([3, 2, 5], device),
            function: Tensor::ones([8, 10], device),
            base: Tensor::ones([8], device),
            scale: Tensor::ones([8], device),
            sinkhorn: SINKHORN,
        }
    }

    fn for_head(device: &Device) -> Self {
        Self {
            function: Tensor::ones([2, 10], device),
            base: Tensor::ones([2], device),
            scale: Tensor::ones([1], device),
            ..Self::new(device)
        }
    }

    fn collapse(self) -> Result<Tensor<2>, OpError> {
        collapse(
            self.streams,
            self.function,
            self.base,
            self.scale,
            self.sinkhorn,
        )
        .map(|(input, _)| input)
    }

    fn head(self) -> Result<Tensor<2>, OpError> {
        let (epsilon, norm_epsilon) = (self.sinkhorn.epsilon, self.sinkhorn.norm_epsilon);
        head(
            self.streams,
            self.function,
            self.base,
            self.scale,
            epsilon,
            norm_epsilon,
        )
    }
}

/// Both operators that collapse refuse what `change` makes of good arguments.
#[track_caller]
fn refused(message: &str, change: impl Fn(&mut Arguments, &Device)) {
    for (name, device) in devices() {
        let (mut all, mut last) = (Arguments::new(device), Arguments::for_head(device));
        change(&mut all, device);
        change(&mut last, device);
        for result in [all.collapse(), last.head()] {
            assert_eq!(result.expect_err(message).to_string(), message, "{name}");
        }
    }
}

fn good_arguments_are_not_refused() {
    for (name, device) in devices() {
        assert!(Arguments::new(device).collapse().is_ok(), "{name}");
        assert!(Arguments::for_head(device).head().is_ok(), "{name}");
    }
}

fn streams_of_another_dtype_are_refused() {
    let device = &devices()[0].1;
    for for_head in [false, true] {
        let streams = Tensor::ones([3, 2, 5], (device, DType::F64));
        let result = if for_head {
            let arguments = Arguments::for_head(device);
            Arguments {
                streams,
                ..arguments
            }
            .head()
        } else {
            let arguments = Arguments::new(device);
            Arguments {
                streams,
                ..arguments
            }
            .collapse()
        };
        assert_eq!(
            result.unwrap_err().to_string(),
            "`streams` has dtype F64, expected F32, F16 or BF16"
        );
    }
}

fn a_base_of_another_dtype_is_refused() {
    refused("`base` has dtype F16, expected F32", |arguments, _| {
        arguments.base = arguments.base.clone().cast(FloatDType::F16);
    });
}

fn a_scale_of_another_dtype_is_refused() {
    refused("`scale` has dtype F16, expected F32", |arguments, _| {
        arguments.scale = arguments.scale.clone().cast(FloatDType::F16);
    });
}

fn streams_without_channels_are_refused() {
    let message = "`channels of streams` is 0, expected at least 1";
    refused(message, |arguments, device| {
        arguments.streams = Tensor::zeros([3, 2, 0], device);
    });
}

fn a_function_of_another_shape_is_refused() {
    for (_, device) in devices() {
        let function = Tensor::ones([8, 9], device);
        let arguments = Arguments::new(device);
        let result = Arguments {
            function,
            ..arguments
        }
        .collapse();
        assert_eq!(
            result.unwrap_err().to_string(),
            "`function` has shape [8, 9], expected [8, 10]"
        );
        let function = Tensor::ones([8, 10], device);
        let arguments = Arguments::for_head(device);
        let result = Arguments {
            function,
            ..arguments
        }
        .head();
        assert_eq!(
            result.unwrap_err().to_string(),
            "`function` has shape [8, 10], expected [2, 10]"
        );
    }
}

fn a_base_of_another_length_is_refused() {
    for (_, device) in devices() {
        let base = Tensor::ones([1], device);
        let arguments = Arguments::new(device);
        let result = Arguments { base, ..arguments }.collapse();
        assert_eq!(
            result.unwrap_err().to_string(),
            "`base` has shape [1], expected [8]"
        );
    }
}

fn three_scales_that_were_not_repeated_are_refused() {
    for (_, device) in devices() {
        let scale = Tensor::ones([3], device);
        let arguments = Arguments::new(device);
        let result = Arguments { scale, ..arguments }.collapse();
        assert_eq!(
            result.unwrap_err().to_string(),
            "`scale` has shape [3], expected [8]"
        );
    }
}

fn a_scale_for_each_stream_of_the_head_is_refused() {
    for (_, device) in devices() {
        let scale = Tensor::ones([2], device);
        let arguments = Arguments::for_head(device);
        let result = Arguments { scale, ..arguments }.head();
        assert_eq!(
            result.unwrap_err().to_string(),
            "`scale` has shape [2], expected [1]"
        );
    }
}

fn no_iterations_are_refused() {
    for (_, device) in devices() {
        let mut arguments = Arguments::new(device);
        arguments.sinkhorn.iterations = 0;
        assert_eq!(
            arguments.collapse().unwrap_err().to_string(),
            "`iterations` is 0, expected at least 1"
        );
    }
}

fn epsilons_below_zero_are_refused() {
    let message = "`epsilon` is -1, expected a number that is not negative";
    refused(message, |arguments, _| arguments.sinkhorn.epsilon = -1.0);
    let message = "`norm_epsilon` is NaN, expected a number that is not negative";
    refused(message, |arguments, _| {
        arguments.sinkhorn.norm_epsilon = f64::NAN;
    });
}

fn parameters_on_another_device_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let move_one = |argument: &str| {
        let mut arguments = Arguments::new(first);
        let other = Arguments::new(second);
        match argument {
            "function" => arguments.function = other.function,
            "base" => arguments.base = other.base,
            _ => arguments.scale = other.scale,
        }
        arguments.collapse()
    };
    for argument in ["function", "base", "scale"] {
        match move_one(argument) {
            Err(OpError::DeviceMismatch {
                argument: named,
                other: "streams",
                ..
            }) => assert_eq!(named, argument),
            other => panic!("{argument}: {other:?}"),
        }
    }
}

fn coefficients(tokens: usize, n: usize, device: &Device) -> Coefficients {
    Coefficients::new(
        Tensor::ones([tokens, n], device),
        Tensor::ones([tokens, n], device),
        Tensor::ones([tokens, n, n], device),
    )
    .expect("parts that fit")
}

#[track_caller]
fn not_spread(output: Tensor<2>, coefficients: &Coefficients, message: &str) {
    let streams = Tensor::ones([3, 2, 5], &output.device());
    let error = expand(output, streams, coefficients).expect_err(message);
    assert_eq!(error.to_string(), message);
}

fn an_output_of_another_width_is_not_spread() {
    for (_, device) in devices() {
        let message = "`output` has shape [3, 1], expected [3, 5]";
        let output = Tensor::ones([3, 1], device);
        not_spread(output, &coefficients(3, 2, device), message);
    }
}

fn an_output_of_another_dtype_is_not_spread() {
    let device = &devices()[0].1;
    let message = "`output` has dtype F64, expected F32, F16 or BF16";
    let output = Tensor::ones([3, 5], (device, DType::F64));
    not_spread(output, &coefficients(3, 2, device), message);
}

fn coefficients_of_other_tokens_or_streams_are_refused() {
    for (_, device) in devices() {
        let output = || Tensor::ones([3, 5], device);
        let message = "`coefficients` has shape [1, 2], expected [3, 2]";
        not_spread(output(), &coefficients(1, 2, device), message);
        let message = "`coefficients` has shape [3, 4], expected [3, 2]";
        not_spread(output(), &coefficients(3, 4, device), message);
    }
}

fn an_output_on_another_device_is_not_spread() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let streams = || Tensor::ones([3, 2, 5], first);
    let output = |device| Tensor::ones([3, 5], device);
    let far_output = expand(output(second), streams(), &coefficients(3, 2, first));
    let far_coefficients = expand(output(first), streams(), &coefficients(3, 2, second));
    for (expected, result) in [("output", far_output), ("coefficients", far_coefficients)] {
        match result {
            Err(OpError::DeviceMismatch {
                argument,
                other: "streams",
                ..
            }) => assert_eq!(argument, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

fn coefficients_whose_parts_do_not_fit_are_refused() {
    for (_, device) in devices() {
        let gates = |n: usize| Tensor::<2>::ones([3, n], device);
        let comb = |n: usize| Tensor::<3>::ones([3, 2, n], device);
        let f16 = |gates: Tensor<2>| gates.cast(FloatDType::F16);
        let refused = [
            (
                Coefficients::new(gates(2), gates(3), comb(2)),
                "`post` has shape [3, 3], expected [3, 2]",
            ),
            (
                Coefficients::new(gates(2), gates(2), comb(3)),
                "`comb` has shape [3, 2, 3], expected [3, 2, 2]",
            ),
            (
                Coefficients::new(f16(gates(2)), gates(2), comb(2)),
                "`pre` has dtype F16, expected F32",
            ),
        ];
        for (result, message) in refused {
            assert_eq!(result.expect_err(message).to_string(), message);
        }
    }
}

fn coefficients_of_no_streams_or_no_tokens_have_no_parts() {
    for (_, device) in devices() {
        for (tokens, n) in [(3, 0), (0, 4), (0, 0)] {
            let zeros = || Tensor::zeros([tokens, n], device);
            let comb = Tensor::zeros([tokens, n, n], device);
            let own = Coefficients::new(zeros(), zeros(), comb).expect("parts that fit");
            assert_eq!(own.comb().dims(), [tokens, n, n]);
            assert_eq!(own.pre().dims(), [tokens, n]);
            assert_eq!(own.post().dims(), [tokens, n]);
        }
    }
}

catalogue![
    good_arguments_are_not_refused,
    streams_of_another_dtype_are_refused,
    a_base_of_another_dtype_is_refused,
    a_scale_of_another_dtype_is_refused,
    streams_without_channels_are_refused,
    a_function_of_another_shape_is_refused,
    a_base_of_another_length_is_refused,
    three_scales_that_were_not_repeated_are_refused,
    a_scale_for_each_stream_of_the_head_is_refused,
    no_iterations_are_refused,
    epsilons_below_zero_are_refused,
    parameters_on_another_device_are_refused,
    an_output_of_another_width_is_not_spread,
    an_output_of_another_dtype_is_not_spread,
    coefficients_of_other_tokens_or_streams_are_refused,
    an_output_on_another_device_is_not_spread,
    coefficients_whose_parts_do_not_fit_are_refused,
    coefficients_of_no_streams_or_no_tokens_have_no_parts,
];
