//! What sampling and verification refuse, and what is empty.

use burn::tensor::{DType, Device, Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::sampling::{Draws, MAX_COLUMNS, SamplingParams, sample, seed_words, verify};

use super::common::{devices, integer_values, integers};
use super::tokens::draws;

fn error<T: std::fmt::Debug>(result: Result<T, OpError>) -> String {
    result.expect_err("arguments that do not fit").to_string()
}

fn logits(rows: usize, columns: usize, device: &Device) -> Tensor<2> {
    Tensor::zeros([rows, columns], device)
}

fn parameters_out_of_range_are_named() {
    for (name, device) in devices() {
        let fine = SamplingParams::default();
        for (sampling, expected) in [
            (
                SamplingParams {
                    temperature: -1.0,
                    ..fine
                },
                "`temperature` is -1",
            ),
            (
                SamplingParams {
                    temperature: f32::NAN,
                    ..fine
                },
                "`temperature` is NaN",
            ),
            (
                SamplingParams {
                    temperature: f32::INFINITY,
                    ..fine
                },
                "`temperature` is inf",
            ),
            (SamplingParams { top_p: 0.0, ..fine }, "`top_p` is 0"),
            (SamplingParams { top_p: 1.5, ..fine }, "`top_p` is 1.5"),
            (
                SamplingParams {
                    top_p: f32::NAN,
                    ..fine
                },
                "`top_p` is NaN",
            ),
            (
                SamplingParams {
                    min_p: -0.5,
                    ..fine
                },
                "`min_p` is -0.5",
            ),
            (SamplingParams { min_p: 2.0, ..fine }, "`min_p` is 2"),
            (
                SamplingParams {
                    min_p: f32::NAN,
                    ..fine
                },
                "`min_p` is NaN",
            ),
        ] {
            let message = error(sample(
                logits(1, 3, device),
                &sampling,
                draws(0, 0, 1, device),
            ));
            assert!(message.starts_with(expected), "{name}: {message}");
        }
    }
}

fn seeds_and_positions_of_another_number_are_refused() {
    for (name, device) in devices() {
        let fine = draws(0, 0, 2, device);
        for (wrong, expected) in [
            (
                Draws {
                    seeds: seed_words(&[1], device),
                    ..fine.clone()
                },
                "`seeds` has shape [1, 2], expected [2, 2]",
            ),
            (
                Draws {
                    positions: integers(&[1, 2, 3], [3], device),
                    ..fine.clone()
                },
                "`positions` has shape [3], expected [2]",
            ),
        ] {
            let message = error(sample(
                logits(2, 3, device),
                &SamplingParams::default(),
                wrong,
            ));
            assert!(message.starts_with(expected), "{name}: {message}");
        }
        let drafts: Tensor<2, Int> = Tensor::zeros([2, 2], device);
        let rows = logits(2, 3, device).reshape([2, 1, 3]);
        let message = error(verify(
            rows,
            drafts.clone(),
            &SamplingParams::default(),
            fine.clone(),
        ));
        assert!(
            message.starts_with("`drafts` has shape [2, 2], expected [2, 0]"),
            "{name}: {message}"
        );
        let rows: Tensor<3> = Tensor::zeros([2, 0, 3], device);
        let message = error(verify(rows, drafts, &SamplingParams::default(), fine));
        assert!(
            message.starts_with("`rows of a sequence` is 0"),
            "{name}: {message}"
        );
    }
}

fn too_many_columns_are_refused() {
    for (name, device) in devices() {
        let logits = logits(1, 1, device).expand([1, MAX_COLUMNS + 1]);
        let message = error(sample(
            logits,
            &SamplingParams::default(),
            draws(0, 0, 1, device),
        ));
        assert!(
            message.starts_with("`columns` is 1048577"),
            "{name}: {message}"
        );
    }
}

fn logits_that_are_no_floats_of_ours_are_refused() {
    let device = Device::flex();
    let logits: Tensor<2> = Tensor::zeros([1, 3], (&device, DType::F64));
    let message = error(sample(
        logits,
        &SamplingParams::default(),
        draws(0, 0, 1, &device),
    ));
    assert!(message.starts_with("`logits` has dtype F64"), "{message}");
}

fn nothing_is_chosen_from_nothing() {
    for (name, device) in devices() {
        let drawn = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        for sampling in [SamplingParams::default(), drawn] {
            let none = sample(logits(0, 3, device), &sampling, draws(0, 0, 0, device));
            assert_eq!(none.expect("arguments that fit").dims(), [0], "{name}");
            let none = sample(logits(2, 0, device), &sampling, draws(0, 0, 2, device));
            assert_eq!(
                integer_values(none.expect("arguments that fit")),
                [-1, -1],
                "{name}"
            );
        }
    }
}

catalogue![
    parameters_out_of_range_are_named,
    seeds_and_positions_of_another_number_are_refused,
    too_many_columns_are_refused,
    logits_that_are_no_floats_of_ours_are_refused,
    nothing_is_chosen_from_nothing,
];
