//! What experts with a shared one refuse, each by its name.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::moe::{Experts, moe_ffn};
use burn_ds4_ops::quant::Weights;

use super::common::errors::Arguments;
use super::common::{assert_refused, integers};

/// Two tokens of width 4, two experts of inner width 3 and a shared one of 5, two slots.
struct Mixture {
    x: Tensor<2>,
    slots: usize,
    own: [Weights; 2],
    shared: [Weights; 2],
    limits: [f64; 2],
}

impl Arguments for Mixture {
    type Output = Tensor<2>;

    fn new(device: &Device) -> Self {
        Self {
            x: Tensor::ones([2, 4], (device, DType::F32)),
            slots: 2,
            own: [dense([2, 6, 4], device), dense([2, 4, 3], device)],
            shared: [dense([1, 10, 4], device), dense([1, 4, 5], device)],
            limits: [1.0, 1.0],
        }
    }

    fn run(self) -> Result<Tensor<2>, OpError> {
        let device = self.x.device();
        let [own, shared] = [0, 1].map(|of| {
            let [gate_up, down] = [&self.own, &self.shared][of];
            Experts {
                gate_up,
                down,
                limit: Some(self.limits[of]),
            }
        });
        moe_ffn(
            self.x,
            integers(&[0, 1, 1, 0], [2, 2], &device),
            Tensor::ones([2, self.slots], (&device, DType::F32)),
            own,
            shared,
        )
    }
}

fn dense(shape: [usize; 3], device: &Device) -> Weights {
    Weights::dense(Tensor::ones(shape, (device, DType::F32))).unwrap()
}

fn a_shared_expert_is_one() {
    Mixture::refused(
        |arguments, _| arguments.shared.clone_from(&arguments.own),
        "`number of shared experts` is 2, expected 1",
    );
}

fn its_gate_up_must_have_as_many_columns_as_the_tokens() {
    Mixture::refused(
        |arguments, device| arguments.shared[0] = dense([1, 10, 5], device),
        "`gate_up of the shared expert` has shape [1, 10, 5], expected [1, 10, 4]",
    );
}

fn its_gate_up_must_have_an_even_number_of_rows() {
    Mixture::refused(
        |arguments, device| arguments.shared[0] = dense([1, 9, 4], device),
        "`rows of gate_up of the shared expert` is 9, expected an even number",
    );
}

fn its_down_must_be_as_wide_as_half_of_its_gate_up() {
    Mixture::refused(
        |arguments, device| arguments.shared[1] = dense([1, 4, 6], device),
        "`down of the shared expert` has shape [1, 4, 6], expected [1, 4, 5]",
    );
}

fn its_limit_must_not_be_negative() {
    Mixture::refused(
        |arguments, _| arguments.limits[1] = -1.0,
        "`limit of the shared expert` is -1, expected a number that is not negative",
    );
}

fn the_experts_of_a_token_are_checked_as_without_it() {
    Mixture::refused(
        |arguments, device| arguments.own[1] = dense([2, 4, 5], device),
        "`down` has shape [2, 4, 5], expected [2, 4, 3]",
    );
    Mixture::refused(
        |arguments, _| arguments.limits[0] = f64::NAN,
        "`limit` is NaN, expected a number that is not negative",
    );
    Mixture::refused(
        |arguments, _| arguments.slots = 1,
        "`weights` has shape [2, 1], expected [2, 2]",
    );
}

fn tokens_must_be_floats_of_a_known_dtype() {
    let device = &Device::flex();
    let mut arguments = Mixture::new(device);
    arguments.x = arguments.x.cast(FloatDType::F64);
    let message = "`x` has dtype F64, expected F32, F16 or BF16";
    assert_refused(arguments.run(), message);
}

catalogue![
    a_shared_expert_is_one,
    its_gate_up_must_have_as_many_columns_as_the_tokens,
    its_gate_up_must_have_an_even_number_of_rows,
    its_down_must_be_as_wide_as_half_of_its_gate_up,
    its_limit_must_not_be_negative,
    the_experts_of_a_token_are_checked_as_without_it,
    tokens_must_be_floats_of_a_known_dtype,
];
