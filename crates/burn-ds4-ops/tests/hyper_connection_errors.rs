//! What hyper-connections refuse, and how they name it.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::hyper_connection::{Coefficients, Sinkhorn, collapse, expand, head};

use super::common::{
    Refusal, assert_each_refused, assert_on_another_device, assert_refused, devices, two_devices,
};
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
        let (streams, function) = (self.streams, self.function);
        let collapsed = collapse(streams, function, self.base, self.scale, self.sinkhorn);
        collapsed.map(|(input, _)| input)
    }

    fn head(self) -> Result<Tensor<2>, OpError> {
        let (streams, function) = (self.streams, self.function);
        let (epsilon, norm_epsilon) = (self.sinkhorn.epsilon, self.sinkhorn.norm_epsilon);
        head(
            streams,
            function,
            self.base,
            self.scale,
            epsilon,
            norm_epsilon,
        )
    }
}

fn what_collapses_refuses_each_argument_that_does_not_fit() {
    let wide: [Refusal<Arguments>; 1] = [(
        |own| own.streams = Tensor::ones([3, 2, 5], (&own.streams.device(), DType::F64)),
        "`streams` has dtype F64, expected F32, F16 or BF16",
    )];
    let both: [Refusal<Arguments>; 5] = [
        (
            |own| {
                own.base = own.base.clone().cast(FloatDType::F16);
            },
            "`base` has dtype F16, expected F32",
        ),
        (
            |own| {
                own.scale = own.scale.clone().cast(FloatDType::F16);
            },
            "`scale` has dtype F16, expected F32",
        ),
        (
            |own| {
                own.streams = Tensor::zeros([3, 2, 0], &own.streams.device());
            },
            "`channels of streams` is 0, expected at least 1",
        ),
        (
            |own| own.sinkhorn.epsilon = -1.0,
            "`epsilon` is -1, expected a number that is not negative",
        ),
        (
            |own| own.sinkhorn.norm_epsilon = f64::NAN,
            "`norm_epsilon` is NaN, expected a number that is not negative",
        ),
    ];
    let of_collapse: [Refusal<Arguments>; 4] = [
        (
            |own| {
                own.function = Tensor::ones([8, 9], &own.streams.device());
            },
            "`function` has shape [8, 9], expected [8, 10]",
        ),
        (
            |own| {
                own.base = Tensor::ones([1], &own.streams.device());
            },
            "`base` has shape [1], expected [8]",
        ),
        // Three scales that were not repeated.
        (
            |own| {
                own.scale = Tensor::ones([3], &own.streams.device());
            },
            "`scale` has shape [3], expected [8]",
        ),
        (
            |own| {
                own.sinkhorn.iterations = 0;
            },
            "`iterations` is 0, expected at least 1",
        ),
    ];
    let of_head: [Refusal<Arguments>; 2] = [
        (
            |own| {
                own.function = Tensor::ones([8, 10], &own.streams.device());
            },
            "`function` has shape [8, 10], expected [2, 10]",
        ),
        // One for each stream.
        (
            |own| {
                own.scale = Tensor::ones([2], &own.streams.device());
            },
            "`scale` has shape [2], expected [1]",
        ),
    ];
    for (_, device) in devices() {
        let (whole, last) = (|| Arguments::new(device), || Arguments::for_head(device));
        assert_each_refused(whole, Arguments::collapse, &both);
        assert_each_refused(whole, Arguments::collapse, &of_collapse);
        assert_each_refused(last, Arguments::head, &both);
        assert_each_refused(last, Arguments::head, &of_head);
    }
    // Not every device has such streams.
    let device = &devices()[0].1;
    assert_each_refused(|| Arguments::new(device), Arguments::collapse, &wide);
    assert_each_refused(|| Arguments::for_head(device), Arguments::head, &wide);
}

fn parameters_on_another_device_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    for argument in ["function", "base", "scale"] {
        let (mut own, other) = (Arguments::new(first), Arguments::new(second));
        match argument {
            "function" => own.function = other.function,
            "base" => own.base = other.base,
            _ => own.scale = other.scale,
        }
        assert_on_another_device(own.collapse(), [argument, "streams"]);
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

/// Spreads over three tokens of two streams of five channels.
fn spread(output: Tensor<2>, coefficients: &Coefficients) -> Result<Tensor<3>, OpError> {
    let streams = Tensor::ones([3, 2, 5], &output.device());
    expand(output, streams, coefficients)
}

fn outputs_and_coefficients_that_do_not_fit_are_not_spread() {
    for (_, device) in devices() {
        let output = || Tensor::ones([3, 5], device);
        let good = coefficients(3, 2, device);
        assert!(spread(output(), &good).is_ok());
        let narrow = Tensor::ones([3, 1], device);
        let message = "`output` has shape [3, 1], expected [3, 5]";
        assert_refused(spread(narrow, &good), message);
        let message = "`coefficients` has shape [1, 2], expected [3, 2]";
        assert_refused(spread(output(), &coefficients(1, 2, device)), message);
        let message = "`coefficients` has shape [3, 4], expected [3, 2]";
        assert_refused(spread(output(), &coefficients(3, 4, device)), message);
    }
    let device = &devices()[0].1;
    let wide = Tensor::ones([3, 5], (device, DType::F64));
    let message = "`output` has dtype F64, expected F32, F16 or BF16";
    assert_refused(spread(wide, &coefficients(3, 2, device)), message);
}

fn an_output_on_another_device_is_not_spread() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let streams = || Tensor::ones([3, 2, 5], first);
    let output = |device| Tensor::ones([3, 5], device);
    let far_output = expand(output(second), streams(), &coefficients(3, 2, first));
    assert_on_another_device(far_output, ["output", "streams"]);
    let far_coefficients = expand(output(first), streams(), &coefficients(3, 2, second));
    assert_on_another_device(far_coefficients, ["coefficients", "streams"]);
}

fn coefficients_whose_parts_do_not_fit_are_refused() {
    for (_, device) in devices() {
        let gates = |n: usize| Tensor::<2>::ones([3, n], device);
        let comb = |n: usize| Tensor::<3>::ones([3, 2, n], device);
        let message = "`post` has shape [3, 3], expected [3, 2]";
        assert_refused(Coefficients::new(gates(2), gates(3), comb(2)), message);
        let message = "`comb` has shape [3, 2, 3], expected [3, 2, 2]";
        assert_refused(Coefficients::new(gates(2), gates(2), comb(3)), message);
        let half = gates(2).cast(FloatDType::F16);
        let message = "`pre` has dtype F16, expected F32";
        assert_refused(Coefficients::new(half, gates(2), comb(2)), message);
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
    what_collapses_refuses_each_argument_that_does_not_fit,
    parameters_on_another_device_are_refused,
    outputs_and_coefficients_that_do_not_fit_are_not_spread,
    an_output_on_another_device_is_not_spread,
    coefficients_whose_parts_do_not_fit_are_refused,
    coefficients_of_no_streams_or_no_tokens_have_no_parts,
];
