//! Lanes with parameters of their own: the tokens of rows that are sampled alone.

use burn::tensor::{Device, Int, Tensor};
use burn_ds4_ops::sampling::{
    BatchParams, Draws, LaneParams, SamplingParams, VerifiedDrafts, sample_lanes, seed_words,
    verify, verify_lanes,
};

use super::common::{devices, every_dtype, floats, integer_values, integers, noise};
use super::tokens::sampled;

const COLUMNS: usize = 1000;

/// Parameters of every kind, in an order without a period.
fn mixture(lanes: usize) -> Vec<LaneParams> {
    let kinds = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 40, 1.0, 0.0),
        (1.5, 0, 0.8, 0.0),
        (0.9, 40, 0.9, 0.05),
        (2.0, 0, 1.0, 0.3),
        (1.0, 1, 1.0, 0.0),
        // Filters without an effect.
        (0.0, 5, 0.5, 0.5),
        (1.0, usize::MAX, 1.0, 0.0),
        (1.0, COLUMNS, 1.0, 0.0),
        (1e-30, 0, 0.5, 1.0),
    ];
    let lane = |lane: usize| {
        let (temperature, top_k, top_p, min_p) = kinds[(7 * lane + lane / 5) % kinds.len()];
        LaneParams {
            sampling: SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
            },
            seed: (lane as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            ..LaneParams::default()
        }
    };
    (0..lanes).map(lane).collect()
}

/// Rows of all kinds: peaked and flat ones, ties, infinities, and nothing at all.
fn rows(count: usize, columns: usize) -> Vec<f32> {
    let kinds = noise(count * columns, 5);
    let value = |index: usize| {
        let (row, x) = (index / columns, kinds[index]);
        match row % 7 {
            0 | 1 => 8.0 * x,
            2 => (4.0 * x).round(),
            3 => 0.5,
            4 if x > 0.99 => f32::INFINITY,
            5 if x > 0.0 => f32::NAN,
            6 if row == 6 => f32::NEG_INFINITY,
            _ => 3.0 * x,
        }
    };
    (0..count * columns).map(value).collect()
}

/// Positions anywhere, as an i32 has them.
fn positions(count: usize) -> Vec<i64> {
    let position = |i: i64| i64::from(((i + 3) * 0x2545_f491) as i32);
    (0..count as i64).map(position).collect()
}

fn draws(params: &LaneParams, position: i64, device: &Device) -> Draws {
    Draws {
        seeds: seed_words(&[params.seed], device),
        positions: integers(&[position], [1], device),
    }
}

fn read(verdict: VerifiedDrafts) -> (Vec<i64>, Vec<i64>) {
    (
        integer_values(verdict.tokens),
        integer_values(verdict.accepted),
    )
}

fn batch(params: &[LaneParams], columns: usize, device: &Device) -> BatchParams {
    BatchParams::new(params, columns, device).expect("parameters in range")
}

fn tokens(logits: Tensor<2>, params: &BatchParams, at: &[i64]) -> Vec<i64> {
    let at = integers(at, [at.len()], &logits.device());
    integer_values(sample_lanes(logits, params, at).expect("arguments that fit"))
}

fn a_lane_has_the_token_of_its_parameters_alone() {
    for (name, device) in devices() {
        let lanes = 33;
        let (params, at) = (mixture(lanes), positions(lanes));
        let logits = floats(&rows(lanes, COLUMNS), [lanes, COLUMNS], device);
        let together = tokens(logits.clone(), &batch(&params, COLUMNS, device), &at);
        for lane in 0..lanes {
            let alone = logits.clone().slice([lane..lane + 1, 0..COLUMNS]);
            let own = draws(&params[lane], at[lane], device);
            let expected = sampled(alone, &params[lane].sampling, own);
            assert_eq!(
                [together[lane]],
                expected[..],
                "{name}, lane {lane}: {:?}",
                params[lane]
            );
        }
        assert!(
            together.contains(&-1),
            "{name}: no row is without candidates"
        );
    }
}

fn drafts_of_a_lane_are_verified_as_alone() {
    for (name, device) in devices() {
        let (lanes, count) = (11, 4);
        let (params, at) = (mixture(lanes), positions(lanes));
        let data = rows(lanes * count, COLUMNS);
        let logits = floats(&data, [lanes, count, COLUMNS], device);
        let of_lane = |lane: usize| logits.clone().slice([lane..lane + 1, 0..count, 0..COLUMNS]);
        let alone = |lane: usize, drafts: &[i64]| {
            let drafts = integers(drafts, [1, count - 1], device);
            let draws = draws(&params[lane], at[lane], device);
            let verdict = verify(of_lane(lane), drafts, &params[lane].sampling, draws);
            read(verdict.expect("arguments that fit"))
        };
        // Right drafts up to a place that differs.
        let drafts: Vec<i64> = (0..lanes)
            .flat_map(|lane| {
                let mut drafts = Vec::new();
                while drafts.len() < lane % count {
                    let mut known = drafts.clone();
                    known.resize(count - 1, -1);
                    let (tokens, _) = alone(lane, &known);
                    drafts.push(tokens[drafts.len()]);
                }
                drafts.resize(count - 1, -1);
                drafts
            })
            .collect();
        let verdict = verify_lanes(
            logits.clone(),
            integers(&drafts, [lanes, count - 1], device),
            &batch(&params, COLUMNS, device),
            integers(&at, [lanes], device),
        );
        let (tokens, accepted) = read(verdict.expect("arguments that fit"));
        for (lane, drafts) in drafts.chunks(count - 1).enumerate() {
            let own = (
                tokens[count * lane..][..count].to_vec(),
                vec![accepted[lane]],
            );
            assert_eq!(own, alone(lane, drafts), "{name}, lane {lane}");
        }
        assert!(accepted.contains(&3), "{name}: {accepted:?}");
    }
}

fn a_lane_that_is_set_changes_alone() {
    for (name, device) in devices() {
        let lanes = 6;
        let (mut params, at) = (mixture(lanes), positions(lanes));
        let logits = floats(&rows(lanes, COLUMNS), [lanes, COLUMNS], device);
        let mut batch = batch(&params, COLUMNS, device);
        let held = batch.clone();
        let before = tokens(logits.clone(), &batch, &at);
        params[3] = LaneParams {
            sampling: SamplingParams {
                temperature: 1e20,
                ..SamplingParams::default()
            },
            seed: 12345,
            ..LaneParams::default()
        };
        batch.set_lane(3, &params[3]).expect("a lane");
        let after = tokens(logits.clone(), &batch, &at);
        let fresh = self::batch(&params, COLUMNS, device);
        assert_eq!(tokens(logits.clone(), &fresh, &at), after, "{name}");
        for lane in 0..lanes {
            assert_eq!(
                before[lane] == after[lane],
                lane != 3,
                "{name}, lane {lane}"
            );
        }
        assert_eq!(tokens(logits, &held, &at), before, "{name}: a clone");
    }
}

fn logits_of_every_dtype_are_taken_as_they_are() {
    every_dtype(|what, device, dtype| {
        let lanes = 5;
        let (params, at) = (mixture(lanes), positions(lanes));
        let batch = batch(&params, 203, device);
        let logits = floats(&rows(lanes, 203), [lanes, 203], device).cast(dtype);
        let wide = logits.clone().cast(burn::tensor::FloatDType::F32);
        assert_eq!(
            tokens(logits, &batch, &at),
            tokens(wide, &batch, &at),
            "{what}"
        );
    });
}

fn parameters_out_of_range_are_named() {
    let fine = LaneParams::default;
    let penalised = |repetition, presence, frequency| LaneParams {
        penalties: burn_ds4_ops::sampling::Penalties {
            repetition,
            presence,
            frequency,
        },
        ..fine()
    };
    let biased = |logit_bias: &[(u32, f32)]| LaneParams {
        logit_bias: logit_bias.to_vec(),
        ..fine()
    };
    let hot = LaneParams {
        sampling: SamplingParams {
            temperature: f32::INFINITY,
            ..SamplingParams::default()
        },
        ..fine()
    };
    let many: Vec<(u32, f32)> = (0..301).map(|id| (id, 1.0)).collect();
    for (params, expected) in [
        (hot, "`temperature` is inf"),
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
        for (name, device) in devices() {
            let error = BatchParams::new(&[fine(), params.clone()], 400, device);
            let message = error.expect_err("out of range").to_string();
            assert!(message.starts_with(expected), "{name}: {message}");
            let mut batch = batch(&[fine(), fine()], 400, device);
            let error = batch.set_lane(1, &params).expect_err("out of range");
            assert_eq!(error.to_string(), message, "{name}");
        }
    }
}

fn parameters_of_another_batch_are_refused() {
    for (name, device) in devices() {
        let mut params = batch(&mixture(2), 5, device);
        let message = params.set_lane(2, &LaneParams::default());
        let message = message.expect_err("no lane").to_string();
        assert_eq!(message, "`lane` is 2, expected below 2", "{name}");
        let at = |count| integers(&vec![0; count], [count], device);
        let sample = |[lanes, columns]: [usize; 2], count| {
            let logits = Tensor::<2>::zeros([lanes, columns], device);
            let error = sample_lanes(logits, &params, at(count));
            error.expect_err("another batch").to_string()
        };
        let message = sample([3, 5], 3);
        assert_eq!(
            message, "`params` has shape [2, 5], expected [3, 5]",
            "{name}"
        );
        let message = sample([2, 6], 2);
        assert_eq!(
            message, "`params` has shape [2, 5], expected [2, 6]",
            "{name}"
        );
        let message = sample([2, 5], 3);
        assert_eq!(message, "`positions` has shape [3], expected [2]", "{name}");
        let drafts: Tensor<2, Int> = Tensor::zeros([2, 2], device);
        let error = verify_lanes(Tensor::zeros([2, 2, 5], device), drafts, &params, at(2));
        let message = error.expect_err("other drafts").to_string();
        assert_eq!(
            message, "`drafts` has shape [2, 2], expected [2, 1]",
            "{name}"
        );
    }
}

fn nothing_is_chosen_from_nothing() {
    for (name, device) in devices() {
        let params = batch(&[], 4, device);
        let none = tokens(Tensor::zeros([0, 4], device), &params, &[]);
        assert!(none.is_empty(), "{name}");
        let params = batch(&mixture(2), 0, device);
        let none = tokens(Tensor::zeros([2, 0], device), &params, &[1, 2]);
        assert_eq!(none, [-1, -1], "{name}");
    }
}

catalogue![
    a_lane_has_the_token_of_its_parameters_alone,
    drafts_of_a_lane_are_verified_as_alone,
    a_lane_that_is_set_changes_alone,
    logits_of_every_dtype_are_taken_as_they_are,
    parameters_out_of_range_are_named,
    parameters_of_another_batch_are_refused,
    nothing_is_chosen_from_nothing,
];
