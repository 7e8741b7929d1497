//! Experts against an `f64` oracle, for few tokens and for more than a reference decodes at once.

use super::common::{
    EXACT, Tolerance, absolute, assert_close, devices, floats, integers, narrow, noise, values,
    wide,
};
use burn::tensor::{DType, Device, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::moe::{expert_ffn, swiglu};
use burn_ds4_ops::quant::Weights;

const COUNT: usize = 5;
const D: usize = 8;
const INNER: usize = 4;
/// Experts per token.
const K: usize = 2;
/// 2 slots a token: 6 pairs fit in one chunk of the gathering reference, 60 do not.
const FEW: usize = 3;
const MANY: usize = 30;

const CLOSE: Tolerance = Tolerance {
    absolute: 2e-5,
    relative: 2e-6,
};

struct Case {
    x: Vec<f32>,
    ids: Vec<i64>,
    weights: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    limit: Option<f64>,
}

impl Case {
    /// Ids of a simple pattern; weights of the experts large enough that a limit of 1 bites often.
    fn new(tokens: usize, limit: Option<f64>) -> Self {
        Self {
            x: noise(tokens * D, 1),
            ids: (0..tokens * K).map(|i| (i * 3 % COUNT) as i64).collect(),
            weights: noise(tokens * K, 2),
            gate_up: noise(COUNT * 2 * INNER * D, 3)
                .iter()
                .map(|v| v * 2.0)
                .collect(),
            down: noise(COUNT * D * INNER, 4),
            limit,
        }
    }

    fn matrices(&self, device: &Device) -> [Weights; 2] {
        [
            dense(&self.gate_up, [COUNT, 2 * INNER, D], device),
            dense(&self.down, [COUNT, D, INNER], device),
        ]
    }

    fn run(&self, device: &Device) -> Vec<f32> {
        values(self.try_run(device).unwrap())
    }

    fn try_run(&self, device: &Device) -> Result<Tensor<2>, OpError> {
        let [gate_up, down] = self.matrices(device);
        let tokens = self.x.len() / D;
        let output = expert_ffn(
            floats(&self.x, [tokens, D], device),
            integers(&self.ids, [tokens, K], device),
            floats(&self.weights, [tokens, K], device),
            &gate_up,
            &down,
            self.limit,
        )?;
        assert_eq!(output.dims(), [tokens, D]);
        assert_eq!(output.dtype(), DType::F32);
        Ok(output)
    }

    fn oracle(&self) -> Vec<f32> {
        let tokens = self.x.len() / D;
        let mut output = vec![0.0; tokens * D];
        for pair in 0..tokens * K {
            let Some(expert) = usize::try_from(self.ids[pair])
                .ok()
                .filter(|&id| id < COUNT)
            else {
                continue;
            };
            let token = pair / K;
            let x = wide(&self.x[token * D..][..D]);
            let gate_up = wide(&self.gate_up[expert * 2 * INNER * D..][..2 * INNER * D]);
            let down = wide(&self.down[expert * D * INNER..][..D * INNER]);
            let row = |r: usize| -> f64 { (0..D).map(|c| gate_up[r * D + c] * x[c]).sum() };
            let hidden: Vec<f64> = (0..INNER)
                .map(|i| oracle_swiglu(row(i), row(INNER + i), self.limit))
                .collect();
            for out in 0..D {
                let dot: f64 = (0..INNER).map(|i| down[out * INNER + i] * hidden[i]).sum();
                output[token * D + out] += f64::from(self.weights[pair]) * dot;
            }
        }
        narrow(&output)
    }

    fn tokens(&self, range: std::ops::Range<usize>) -> Self {
        let pairs = range.start * K..range.end * K;
        Self {
            x: self.x[range.start * D..range.end * D].to_vec(),
            ids: self.ids[pairs.clone()].to_vec(),
            weights: self.weights[pairs].to_vec(),
            gate_up: self.gate_up.clone(),
            down: self.down.clone(),
            limit: self.limit,
        }
    }
}

fn oracle_swiglu(gate: f64, up: f64, limit: Option<f64>) -> f64 {
    let limit = limit.unwrap_or(f64::INFINITY);
    let gate = gate.min(limit);
    gate / (1.0 + (-gate).exp()) * up.max(-limit).min(limit)
}

fn dense(values: &[f32], shape: [usize; 3], device: &Device) -> Weights {
    Weights::dense(floats(values, shape, device)).unwrap()
}

fn swiglu_clamps_the_gate_from_above_and_the_up_on_both_sides() {
    // silu(1) = 0.731059, silu(2) = 1.761594, silu(-3) = -0.142278, silu(5) = 4.966536
    let rows: [(f32, f32, f32, f32); 9] = [
        // gate, up, with a limit of 2, without
        (1.0, 1.5, 1.096_588, 1.096_588),
        (2.0, 2.0, 3.523_188, 3.523_188),
        (5.0, 1.0, 1.761_594, 4.966_536),
        (1.0, 7.0, 1.462_117, 5.117_41),
        (1.0, -7.0, -1.462_117, -5.117_41),
        // A gate clamped from below would give silu(-2) = -0.238406.
        (-3.0, 1.0, -0.142_278, -0.142_278),
        (-3.0, -9.0, 0.284_555, 1.280_498),
        (-1e4, 1.0, 0.0, 0.0),
        (0.0, 1e30, 0.0, 0.0),
    ];
    let column = |pick: fn(&(f32, f32, f32, f32)) -> f32| rows.iter().map(pick).collect::<Vec<_>>();
    let (gate, up) = (column(|row| row.0), column(|row| row.1));
    for (limit, expected) in [
        (Some(2.0), column(|row| row.2)),
        (None, column(|row| row.3)),
    ] {
        for (name, device) in devices() {
            let actual = swiglu(floats(&gate, [9], device), floats(&up, [9], device), limit)
                .expect("arguments that fit");
            let what = format!("{name} limit {limit:?}");
            assert_close(&values(actual), &expected, absolute(3e-6), &what);
        }
    }
}

fn one_token_and_one_expert_give_the_product_worked_out_by_hand() {
    for (name, device) in devices() {
        // gate = 1·3 = 3, cut to 2; up = -1·3 = -3, cut to -2; hidden = silu(2)·-2 = -3.523188;
        // times 0.5 and (1, -10).
        let output = expert_ffn(
            floats(&[3.0], [1, 1], device),
            integers(&[1], [1, 1], device),
            floats(&[0.5], [1, 1], device),
            &dense(&[9.0, 9.0, 1.0, -1.0], [2, 2, 1], device),
            &dense(&[9.0, 1.0], [2, 1, 1], device),
            Some(2.0),
        );
        assert_close(
            &values(output.unwrap()),
            &[-1.761_594],
            absolute(2e-6),
            name,
        );
    }
}

fn few_tokens_and_many_agree_with_the_oracle_and_with_each_other() {
    for limit in [None, Some(1.0)] {
        let case = Case::new(MANY, limit);
        let expected = case.oracle();
        for (name, device) in devices() {
            let what = format!("{name} limit {limit:?}");
            let many = case.run(device);
            assert_close(&many, &expected, CLOSE, &format!("{what}, many"));
            let few: Vec<f32> = (0..MANY)
                .step_by(FEW)
                .flat_map(|first| case.tokens(first..first + FEW).run(device))
                .collect();
            assert_close(&few, &expected, CLOSE, &format!("{what}, few"));
            assert_close(&few, &many, CLOSE, &format!("{what}, both"));
        }
    }
}

#[test]
fn the_limit_changes_the_result_of_these_cases() {
    let (free, clamped) = (Case::new(MANY, None), Case::new(MANY, Some(1.0)));
    let different = free
        .oracle()
        .iter()
        .zip(clamped.oracle())
        .filter(|(a, b)| (*a - b).abs() > 0.01)
        .count();
    assert!(different > MANY * D / 2, "only {different}");
}

fn an_expert_chosen_twice_counts_with_both_weights() {
    for tokens in [FEW, MANY] {
        let mut twice = Case::new(tokens, Some(1.0));
        twice.ids.fill(3);
        let mut once = twice.tokens(0..tokens);
        for (pair, weight) in once.weights.chunks_mut(K).zip(twice.weights.chunks(K)) {
            pair.copy_from_slice(&[weight.iter().sum(), 0.0]);
        }
        for (name, device) in devices() {
            let what = format!("{name} tokens {tokens}");
            let actual = twice.run(device);
            assert_close(&actual, &twice.oracle(), CLOSE, &what);
            assert_close(&actual, &once.run(device), CLOSE, &what);
        }
    }
}

fn experts_that_no_token_chose_never_matter() {
    for tokens in [FEW, MANY] {
        let mut case = Case::new(tokens, None);
        // Uneven: expert 4 has one pair, expert 1 all others.
        case.ids.fill(1);
        case.ids[3] = 4;
        for expert in [0, 2, 3] {
            case.gate_up[expert * 2 * INNER * D..][..2 * INNER * D].fill(f32::NAN);
            case.down[expert * D * INNER..][..D * INNER].fill(f32::INFINITY);
        }
        let expected = case.oracle();
        assert!(expected.iter().all(|v| v.is_finite()));
        for (name, device) in devices() {
            let what = format!("{name} tokens {tokens}");
            assert_close(&case.run(device), &expected, CLOSE, &what);
        }
    }
}

fn groups_of_all_sizes_are_put_back_in_order() {
    let mut case = Case::new(MANY, Some(1.0));
    // Groups of 1, 3, 8, 19 and 29 pairs, interleaved.
    let groups: Vec<i64> = [1, 3, 8, 19, 29]
        .iter()
        .enumerate()
        .flat_map(|(id, &size)| std::iter::repeat_n(id as i64, size))
        .collect();
    case.ids = (0..MANY * K).map(|i| groups[i * 7 % (MANY * K)]).collect();
    for (name, device) in devices() {
        assert_close(&case.run(device), &case.oracle(), CLOSE, name);
    }
}

fn a_row_does_not_depend_on_the_other_rows() {
    for tokens in [FEW, MANY] {
        let case = Case::new(tokens, Some(1.0));
        let mut other = case.tokens(0..tokens);
        other.x[D..].fill(f32::NAN);
        for (name, device) in devices() {
            let (expected, actual) = (case.run(device), other.run(device));
            let what = format!("{name} tokens {tokens}");
            assert_close(&actual[..D], &expected[..D], EXACT, &what);
            assert!(actual[D..].iter().all(|v| v.is_nan()), "{what}");
        }
    }
}

fn a_padded_slot_adds_exactly_nothing() {
    for (name, device) in devices() {
        // Past the last expert is padding too, but where the ids can be looked at: there it is an
        // error.
        let padding = match name.as_str() {
            "flex" => [-1, -2, i64::from(i32::MIN), -(COUNT as i64)],
            _ => [-1, COUNT as i64, i64::from(i32::MIN), i64::from(i32::MAX)],
        };
        for tokens in [FEW, MANY] {
            let mut case = Case::new(tokens, None);
            // Experts at which a clamped id would land, and weights, that turn a product with zero
            // into NaN.
            let (size, last) = (2 * INNER * D, COUNT - 1);
            case.gate_up[..size].fill(f32::INFINITY);
            case.gate_up[last * size..].fill(f32::NAN);
            for (slot, id) in case.ids.iter_mut().enumerate() {
                *id = if slot % K == 0 {
                    (slot % 3 + 1) as i64
                } else {
                    padding[slot / K % 4]
                };
                if slot % K == 1 {
                    case.weights[slot] = [f32::NAN, 1e30, f32::INFINITY][slot / K % 3];
                }
            }
            // And a token of nothing but padding.
            case.ids[0] = -1;
            let expected = case.oracle();
            assert_eq!(expected[..D], [0.0; D]);
            assert!(expected.iter().all(|v| v.is_finite()));
            let what = format!("{name} tokens {tokens}");
            let actual = case.run(device);
            assert_close(&actual, &expected, CLOSE, &what);
            assert_eq!(actual[..D], [0.0; D], "{what}");
        }
    }
}

fn nothing_but_padding_gives_zeros() {
    for tokens in [FEW, MANY] {
        let mut case = Case::new(tokens, Some(1.0));
        case.ids.fill(-1);
        for (name, device) in devices() {
            let actual = case.run(device);
            assert_close(&actual, &vec![0.0; tokens * D], EXACT, name);
        }
    }
}

fn no_tokens_give_no_rows_and_no_slots_give_zeros() {
    for (name, device) in devices() {
        assert!(Case::new(0, Some(1.0)).run(device).is_empty(), "{name}");
        let case = Case::new(FEW, None);
        let [gate_up, down] = case.matrices(device);
        let output = expert_ffn(
            floats(&case.x, [FEW, D], device),
            integers(&[], [FEW, 0], device),
            floats(&[], [FEW, 0], device),
            &gate_up,
            &down,
            None,
        );
        assert_close(&values(output.unwrap()), &[0.0; FEW * D], EXACT, name);
    }
}

catalogue![
    swiglu_clamps_the_gate_from_above_and_the_up_on_both_sides,
    one_token_and_one_expert_give_the_product_worked_out_by_hand,
    few_tokens_and_many_agree_with_the_oracle_and_with_each_other,
    an_expert_chosen_twice_counts_with_both_weights,
    experts_that_no_token_chose_never_matter,
    groups_of_all_sizes_are_put_back_in_order,
    a_row_does_not_depend_on_the_other_rows,
    a_padded_slot_adds_exactly_nothing,
    nothing_but_padding_gives_zeros,
    no_tokens_give_no_rows_and_no_slots_give_zeros,
];
