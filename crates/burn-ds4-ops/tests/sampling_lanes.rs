//! Lanes whose parameters differ: each has the tokens that it has in a batch of its own.

use burn::tensor::Tensor;
use burn_ds4_ops::sampling::{BatchParams, LaneParams, SamplingParams, sample, verify};

use super::common::{devices, floats, integer_values, integers, noise};
use super::tokens::{batch, verdict};

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
fn rows(count: usize) -> Vec<f32> {
    let kinds = noise(count * COLUMNS, 5);
    let value = |index: usize| {
        let (row, x) = (index / COLUMNS, kinds[index]);
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
    (0..count * COLUMNS).map(value).collect()
}

/// Positions anywhere, as an i32 has them.
fn positions(count: usize) -> Vec<i64> {
    let position = |i: i64| i64::from(((i + 3) * 0x2545_f491) as i32);
    (0..count as i64).map(position).collect()
}

fn tokens(logits: Tensor<2>, params: &BatchParams, at: &[i64]) -> Vec<i64> {
    let at = integers(at, [at.len()], &logits.device());
    integer_values(sample(logits, params, at).expect("arguments that fit"))
}

fn a_lane_has_the_token_that_it_has_alone() {
    for (name, device) in devices() {
        let lanes = 33;
        let (params, at) = (mixture(lanes), positions(lanes));
        let logits = floats(&rows(lanes), [lanes, COLUMNS], device);
        let together = tokens(logits.clone(), &batch(&params, COLUMNS, device), &at);
        for lane in 0..lanes {
            let alone = logits.clone().slice([lane..lane + 1, 0..COLUMNS]);
            let own = batch(&params[lane..lane + 1], COLUMNS, device);
            let expected = tokens(alone, &own, &at[lane..lane + 1]);
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
        let data = rows(lanes * count);
        let logits = floats(&data, [lanes, count, COLUMNS], device);
        let of_lane = |lane: usize| logits.clone().slice([lane..lane + 1, 0..count, 0..COLUMNS]);
        let alone = |lane: usize, drafts: &[i64]| {
            let drafts = integers(drafts, [1, count - 1], device);
            let own = batch(&params[lane..lane + 1], COLUMNS, device);
            let at = integers(&at[lane..lane + 1], [1], device);
            let verified = verify(of_lane(lane), drafts, &own, at);
            verdict(verified.expect("arguments that fit"))
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
        let verified = verify(
            logits.clone(),
            integers(&drafts, [lanes, count - 1], device),
            &batch(&params, COLUMNS, device),
            integers(&at, [lanes], device),
        );
        let (tokens, accepted) = verdict(verified.expect("arguments that fit"));
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
        let logits = floats(&rows(lanes), [lanes, COLUMNS], device);
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

catalogue![
    a_lane_has_the_token_that_it_has_alone,
    drafts_of_a_lane_are_verified_as_alone,
    a_lane_that_is_set_changes_alone,
];
