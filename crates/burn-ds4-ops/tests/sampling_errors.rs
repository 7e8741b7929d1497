//! What sampling and verification refuse, and what is empty.

use burn::tensor::{DType, Device, Int, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::sampling::{
    BatchParams, LaneParams, MAX_COLUMNS, Penalties, SamplingParams, TokenCounts, accept_drafts,
    apply_penalties, log_probs, sample, verify,
};

use super::common::{assert_on_another_device, devices, integers, two_devices};
use super::tokens::{batch, draws, sampled};

fn error<T: std::fmt::Debug>(result: Result<T, OpError>) -> String {
    result.expect_err("arguments that do not fit").to_string()
}

/// Greedy lanes.
fn greedy(lanes: usize, columns: usize, device: &Device) -> BatchParams {
    batch(&vec![LaneParams::default(); lanes], columns, device)
}

/// The first position in every lane.
fn start(lanes: usize, device: &Device) -> Tensor<1, Int> {
    integers(&vec![0; lanes], [lanes], device)
}

/// Fails where a lane with these parameters is not refused with this message, in a new batch and
/// in one that exists.
fn assert_refused(params: &LaneParams, expected: &str) {
    for (name, device) in devices() {
        let lanes = [LaneParams::default(), params.clone()];
        let message = error(BatchParams::new(&lanes, 400, device));
        assert!(message.starts_with(expected), "{name}: {message}");
        let mut batch = greedy(2, 400, device);
        assert_eq!(error(batch.set_lane(1, params)), message, "{name}");
    }
}

fn filters_out_of_range_are_named() {
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
        let params = LaneParams {
            sampling,
            ..LaneParams::default()
        };
        assert_refused(&params, expected);
    }
}

fn penalties_and_biases_out_of_range_are_named() {
    let penalised = |repetition, presence, frequency| LaneParams {
        penalties: Penalties {
            repetition,
            presence,
            frequency,
        },
        ..LaneParams::default()
    };
    let biased = |logit_bias: &[(u32, f32)]| LaneParams {
        logit_bias: logit_bias.to_vec(),
        ..LaneParams::default()
    };
    let many: Vec<(u32, f32)> = (0..301).map(|id| (id, 1.0)).collect();
    for (params, expected) in [
        (penalised(0.0, 0.0, 0.0), "`repetition_penalty` is 0"),
        (
            penalised(f32::INFINITY, 0.0, 0.0),
            "`repetition_penalty` is inf",
        ),
        (penalised(f32::NAN, 0.0, 0.0), "`repetition_penalty` is NaN"),
        (penalised(1.0, 2.5, 0.0), "`presence_penalty` is 2.5"),
        (penalised(1.0, 0.0, -3.0), "`frequency_penalty` is -3"),
        (penalised(1.0, 0.0, f32::NAN), "`frequency_penalty` is NaN"),
        (biased(&[(1, f32::NAN)]), "`logit_bias` is NaN"),
        (biased(&[(1, f32::INFINITY)]), "`logit_bias` is inf"),
        (
            biased(&[(400, 1.0)]),
            "`logit_bias` is 400, expected tokens below 400",
        ),
        (
            biased(&[(4, 1.0), (3, 1.0), (4, 2.0)]),
            "`logit_bias` is 4, expected each token once",
        ),
        (biased(&many), "`logit_bias entries` is 301"),
    ] {
        assert_refused(&params, expected);
    }
}

fn parameters_of_another_batch_are_refused() {
    for (name, device) in devices() {
        let mut params = greedy(2, 5, device);
        let message = error(params.set_lane(2, &LaneParams::default()));
        assert_eq!(message, "`lane` is 2, expected below 2", "{name}");
        for (shape, expected) in [
            ([3, 5], "`params` has shape [2, 5], expected [3, 5]"),
            ([2, 6], "`params` has shape [2, 5], expected [2, 6]"),
        ] {
            let [lanes, columns]: [usize; 2] = shape;
            let logits = Tensor::<2>::zeros([lanes, columns], device);
            let message = error(sample(logits, &params, start(lanes, device)));
            assert_eq!(message, expected, "{name}");
            let logits = Tensor::<3>::zeros([lanes, 1, columns], device);
            let drafts = Tensor::zeros([lanes, 0], device);
            let message = error(verify(logits, drafts, &params, start(lanes, device)));
            assert_eq!(message, expected, "{name}");
        }
    }
}

fn positions_and_drafts_of_another_number_are_refused() {
    for (name, device) in devices() {
        let params = greedy(2, 3, device);
        let logits = Tensor::<2>::zeros([2, 3], device);
        let message = error(sample(logits, &params, start(3, device)));
        assert_eq!(message, "`positions` has shape [3], expected [2]", "{name}");
        let refused = |rows: usize, at: usize| {
            let logits = Tensor::<3>::zeros([2, rows, 3], device);
            let drafts = Tensor::zeros([2, 2], device);
            error(verify(logits, drafts, &params, start(at, device)))
        };
        for (rows, at, expected) in [
            (3, 1, "`positions` has shape [1], expected [2]"),
            (1, 2, "`drafts` has shape [2, 2], expected [2, 0]"),
            (2, 2, "`drafts` has shape [2, 2], expected [2, 1]"),
            (0, 2, "`rows of a sequence` is 0"),
        ] {
            let message = refused(rows, at);
            assert!(message.starts_with(expected), "{name}: {message}");
        }
    }
}

#[test]
fn arguments_on_two_devices_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let params = [first, second].map(|device| greedy(2, 3, device));
    let [own, other] = &params;
    let logits = || Tensor::<2>::zeros([2, 3], first);
    let rows = || Tensor::<3>::zeros([2, 2, 3], first);
    let [drafts, others] = [first, second].map(|device| integers(&[0; 2], [2, 1], device));

    let result = sample(logits(), other, start(2, first));
    assert_on_another_device(result, ["params", "logits"]);
    let result = sample(logits(), own, start(2, second));
    assert_on_another_device(result, ["positions", "logits"]);

    let result = verify(rows(), drafts.clone(), other, start(2, first));
    assert_on_another_device(result, ["params", "logits"]);
    let result = verify(rows(), drafts.clone(), own, start(2, second));
    assert_on_another_device(result, ["positions", "logits"]);
    let result = verify(rows(), others.clone(), own, start(2, first));
    assert_on_another_device(result, ["drafts", "logits"]);
    let tokens = Tensor::zeros([2, 2], (first, DType::I32));
    assert_on_another_device(accept_drafts(tokens, others.clone()), ["drafts", "tokens"]);

    let mut counts = TokenCounts::new(2, 3, second);
    assert_on_another_device(counts.count(drafts.clone()), ["tokens", "counts"]);
    let result = apply_penalties(rows(), drafts.clone(), own, &counts);
    assert_on_another_device(result, ["counts", "logits"]);
    let counts = TokenCounts::new(2, 3, first);
    let result = apply_penalties(rows(), others, own, &counts);
    assert_on_another_device(result, ["drafts", "logits"]);
    let result = apply_penalties(rows(), drafts, other, &counts);
    assert_on_another_device(result, ["params", "logits"]);

    let tokens = Tensor::zeros([2], (second, DType::I32));
    assert_on_another_device(log_probs(logits(), tokens, 0), ["tokens", "logits"]);
}

fn too_many_columns_are_refused() {
    for (name, device) in devices() {
        let columns = MAX_COLUMNS + 1;
        let logits = Tensor::<2>::zeros([1, 1], device).expand([1, columns]);
        let params = greedy(1, columns, device);
        let message = error(sample(logits, &params, start(1, device)));
        assert!(
            message.starts_with("`columns` is 1048577"),
            "{name}: {message}"
        );
    }
}

fn logits_that_are_no_floats_of_ours_are_refused() {
    let device = Device::flex();
    let logits: Tensor<2> = Tensor::zeros([1, 3], (&device, DType::F64));
    let message = error(sample(logits, &greedy(1, 3, &device), start(1, &device)));
    assert!(message.starts_with("`logits` has dtype F64"), "{message}");
}

fn nothing_is_chosen_from_nothing() {
    for (name, device) in devices() {
        let drawn = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        for sampling in [SamplingParams::default(), drawn] {
            let none = sampled(Tensor::zeros([0, 3], device), &sampling, &[]);
            assert!(none.is_empty(), "{name}");
            let draws = draws(0, 0, 2);
            let none = sampled(Tensor::zeros([2, 0], device), &sampling, &draws);
            assert_eq!(none, [-1, -1], "{name}");
        }
    }
}

catalogue![
    filters_out_of_range_are_named,
    penalties_and_biases_out_of_range_are_named,
    parameters_of_another_batch_are_refused,
    positions_and_drafts_of_another_number_are_refused,
    too_many_columns_are_refused,
    logits_that_are_no_floats_of_ours_are_refused,
    nothing_is_chosen_from_nothing,
];
