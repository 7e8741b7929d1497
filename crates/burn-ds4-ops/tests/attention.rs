//! Attention building blocks against `f64` oracles and cases worked out by hand.

use super::common::{EXACT, absolute, assert_close, devices, floats, narrow, noise, values, wide};
use burn::tensor::{Device, Tensor};
use burn_ds4_ops::attention::{CompressedKeys, MASKED, index_scores, pool, rotate, sink_attention};

fn a_quarter_turn_maps_each_pair_to_its_perpendicular() {
    for (name, device) in devices() {
        // (x, y) by angle t is (x cos t - y sin t, x sin t + y cos t); the sign of sin sits at the even channel.
        let x = floats(&[3.0, 4.0, 3.0, 4.0], [1, 2, 1, 2], device);
        let cos = floats(&[0.0, 0.0, 0.6, 0.6], [1, 2, 2], device);
        let sin = floats(&[-1.0, 1.0, -0.8, 0.8], [1, 2, 2], device);
        let expected = [-4.0, 3.0, 1.8 - 3.2, 2.4 + 2.4];
        let actual = values(rotate(x, cos, sin));
        assert_close(&actual, &expected, absolute(1e-6), name);
    }
}

/// Angles of `[batch, positions, rotated]` as [`rotate`] wants them.
fn angles(count: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / 2) as f32 * 0.61 - 2.0;
    let sign = |i: usize| if i.is_multiple_of(2) { -1.0 } else { 1.0 };
    (
        (0..count).map(|i| angle(i).cos()).collect(),
        (0..count).map(|i| angle(i).sin() * sign(i)).collect(),
    )
}

fn only_the_trailing_channels_turn_and_every_head_by_its_position() {
    let (batch, positions, heads, width, rotated) = (2, 3, 2, 7, 4);
    let x = noise(batch * positions * heads * width, 1);
    let (cos, sin) = angles(batch * positions * rotated);
    let mut expected = wide(&x);
    for row in 0..batch * positions * heads {
        for pair in 0..rotated / 2 {
            let at = row * width + (width - rotated) + 2 * pair;
            let angle = (row / heads * rotated + 2 * pair) / 2;
            let (sin, cos) = (f64::from(angle as u32) * 0.61 - 2.0).sin_cos();
            let (a, b) = (expected[at], expected[at + 1]);
            expected[at] = a * cos - b * sin;
            expected[at + 1] = a * sin + b * cos;
        }
    }
    for (name, device) in devices() {
        let cos = floats(&cos, [batch, positions, rotated], device);
        let sin = floats(&sin, [batch, positions, rotated], device);
        let input = floats(&x, [batch, positions, heads, width], device);
        let turned = rotate(input, cos.clone(), sin.clone());
        let actual = values(turned.clone());
        assert_close(&actual, &narrow(&expected), absolute(1e-6), name);
        for (turned, x) in actual.chunks(width).zip(x.chunks(width)) {
            assert_eq!(turned[..width - rotated], x[..width - rotated], "{name}");
        }
        let restored = values(rotate(turned, cos, sin.neg()));
        assert_close(&restored, &x, absolute(1e-6), &format!("{name}, back"));
    }
}

#[test]
#[should_panic(
    expected = "rotate: the number of rotated channels must be even and at most 4, got 6"
)]
fn rotate_refuses_more_channels_than_there_are() {
    let angles = Tensor::zeros([1, 1, 6], flex());
    rotate(Tensor::zeros([1, 1, 1, 4], flex()), angles.clone(), angles);
}

#[test]
#[should_panic(
    expected = "rotate: the number of rotated channels must be even and at most 4, got 3"
)]
fn rotate_refuses_half_a_pair() {
    let angles = Tensor::zeros([1, 1, 3], flex());
    rotate(Tensor::zeros([1, 1, 1, 4], flex()), angles.clone(), angles);
}

fn flex() -> &'static Device {
    &devices()[0].1
}

fn pooling_weighs_the_slots_of_every_channel_apart() {
    let ln3 = 3f32.ln();
    for (name, device) in devices() {
        // Channel 0 weighs its slots 3/4 and 1/4, channel 1 equally.
        let values_of = floats(&[1.0, 10.0, 5.0, 30.0], [1, 1, 2, 2], device);
        let scores = floats(&[ln3, 500.0, 0.0, 500.0], [1, 1, 2, 2], device);
        let actual = values(pool(values_of, scores));
        assert_close(&actual, &[2.0, 20.0], absolute(1e-5), name);
    }
}

fn masked_slots_add_nothing_to_a_pooled_block() {
    let (blocks, slots, width) = (3, 4, 5);
    let values_of: Vec<f32> = noise(blocks * slots * width, 2);
    let mut scores: Vec<f32> = noise(blocks * slots * width, 3);
    // The first two slots of the first block, as where there is no block before it.
    scores[..2 * width].fill(MASKED);
    let mut expected = vec![0.0; blocks * width];
    for block in 0..blocks {
        for channel in 0..width {
            let at = |slot: usize| (block * slots + slot) * width + channel;
            let seen = (if block == 0 { 2 } else { 0 })..slots;
            let weight = |slot: usize| f64::from(scores[at(slot)]).exp();
            let sum: f64 = seen.clone().map(weight).sum();
            expected[block * width + channel] = seen
                .map(|slot| weight(slot) / sum * f64::from(values_of[at(slot)]))
                .sum();
        }
    }
    for (name, device) in devices() {
        let run = |values_of: &[f32]| {
            let shape = [1, blocks, slots, width];
            values(pool(
                floats(values_of, shape, device),
                floats(&scores, shape, device),
            ))
        };
        let actual = run(&values_of);
        assert_close(&actual, &narrow(&expected), absolute(1e-6), name);
        let mut other = values_of.clone();
        other[..2 * width].fill(1e30);
        assert_close(
            &run(&other),
            &actual,
            EXACT,
            &format!("{name}, masked values"),
        );
    }
}

fn index_scores_cut_each_head_at_zero_before_its_weight() {
    for (name, device) in devices() {
        // Head 0 sees the keys as 2 and -2, head 1 as -3 and 5; weights 10 and -1.
        let queries = floats(&[2.0, 0.0, 0.0, 1.0], [1, 1, 2, 2], device);
        let keys = floats(&[1.0, -3.0, -1.0, 5.0], [1, 2, 2], device);
        let weights = floats(&[10.0, -1.0], [1, 1, 2], device);
        let actual = values(index_scores(queries, keys, weights));
        assert_close(&actual, &[20.0, -5.0], absolute(1e-5), name);
    }
}

fn index_scores_agree_with_the_oracle() {
    let (batch, count, heads, width, rows) = (2, 3, 4, 5, 6);
    let queries = noise(batch * count * heads * width, 4);
    let keys = noise(batch * rows * width, 5);
    let weights = noise(batch * count * heads, 6);
    let mut expected = Vec::new();
    for query in 0..batch * count {
        for row in 0..rows {
            let key = (query / count * rows + row) * width;
            let score = |head: usize| {
                let from = (query * heads + head) * width;
                let dot: f64 = (0..width)
                    .map(|c| f64::from(queries[from + c]) * f64::from(keys[key + c]))
                    .sum();
                f64::from(weights[query * heads + head]) * dot.max(0.0)
            };
            expected.push((0..heads).map(score).sum());
        }
    }
    for (name, device) in devices() {
        let actual = index_scores(
            floats(&queries, [batch, count, heads, width], device),
            floats(&keys, [batch, rows, width], device),
            floats(&weights, [batch, count, heads], device),
        );
        assert_close(&values(actual), &narrow(&expected), absolute(2e-6), name);
    }
}

/// One attention problem; `picks` compressed rows per query, the same for all queries where `shared`.
struct Case {
    batch: usize,
    count: usize,
    heads: usize,
    width: usize,
    columns: usize,
    picks: usize,
    shared: bool,
    scale: f64,
    queries: Vec<f32>,
    window: Vec<f32>,
    window_bias: Vec<f32>,
    rows: Vec<f32>,
    rows_bias: Vec<f32>,
    sinks: Vec<f32>,
}

impl Case {
    fn new(picks: usize, shared: bool) -> Self {
        let (batch, count, heads, width, columns) = (2, 3, 2, 4, 5);
        let bias = |count, seed| {
            noise(count, seed)
                .into_iter()
                .map(|v| if v < -0.3 { MASKED } else { 0.0 })
                .collect()
        };
        let owners = if shared { batch } else { batch * count };
        Self {
            batch,
            count,
            heads,
            width,
            columns,
            picks,
            shared,
            scale: 1.7,
            queries: noise(batch * count * heads * width, 7),
            window: noise(batch * columns * width, 8),
            window_bias: bias(batch * count * columns, 9),
            rows: noise(owners * picks * width, 10),
            rows_bias: bias(batch * count * picks, 11),
            sinks: vec![0.4, -1.1],
        }
    }

    /// Output and probabilities.
    fn run(&self, device: &Device) -> (Vec<f32>, Vec<f32>) {
        let (batch, count) = (self.batch, self.count);
        let compressed = (self.picks > 0).then(|| {
            let bias = floats(&self.rows_bias, [batch, count, self.picks], device);
            let owners = self.rows.len() / (self.picks * self.width);
            let rows = floats(&self.rows, [owners, self.picks, self.width], device);
            if self.shared {
                CompressedKeys::Shared { rows, bias }
            } else {
                CompressedKeys::PerQuery { rows, bias }
            }
        });
        let queries = [batch, count, self.heads, self.width];
        let attention = sink_attention(
            floats(&self.queries, queries, device),
            floats(&self.window, [batch, self.columns, self.width], device),
            floats(&self.window_bias, [batch, count, self.columns], device),
            compressed,
            floats(&self.sinks, [self.heads], device),
            self.scale,
        );
        let columns = self.columns + self.picks;
        assert_eq!(attention.output.dims(), queries);
        assert_eq!(
            attention.probabilities.dims(),
            [batch, count, self.heads, columns]
        );
        (values(attention.output), values(attention.probabilities))
    }

    fn oracle(&self) -> (Vec<f64>, Vec<f64>) {
        let width = self.width;
        let (mut output, mut probabilities) = (Vec::new(), Vec::new());
        for query in 0..self.batch * self.count {
            let sequence = query / self.count;
            let owner = if self.shared { sequence } else { query };
            let keys = |all: &[f32], first: usize, count: usize| -> Vec<Vec<f64>> {
                let range = first * count * width..(first + 1) * count * width;
                wide(&all[range])
                    .chunks(width)
                    .map(<[f64]>::to_vec)
                    .collect()
            };
            let mut seen = keys(&self.window, sequence, self.columns);
            let mut bias = self.window_bias[query * self.columns..][..self.columns].to_vec();
            if self.picks > 0 {
                seen.extend(keys(&self.rows, owner, self.picks));
                bias.extend(&self.rows_bias[query * self.picks..][..self.picks]);
            }
            for head in 0..self.heads {
                let from = (query * self.heads + head) * width;
                let q = wide(&self.queries[from..from + width]);
                let sink = f64::from(self.sinks[head]);
                let logits: Vec<f64> = seen
                    .iter()
                    .zip(&bias)
                    .map(|(key, &bias)| {
                        let dot: f64 = q.iter().zip(key).map(|(a, b)| a * b).sum();
                        dot * self.scale + f64::from(bias)
                    })
                    .collect();
                let max = logits.iter().copied().fold(sink, f64::max);
                let sum = (sink - max).exp()
                    + logits.iter().map(|logit| (logit - max).exp()).sum::<f64>();
                let p: Vec<f64> = logits.iter().map(|l| (l - max).exp() / sum).collect();
                output.extend((0..width).map(|c| {
                    let terms = p.iter().zip(&seen).map(|(p, key)| p * key[c]);
                    terms.sum::<f64>()
                }));
                probabilities.extend(p);
            }
        }
        (output, probabilities)
    }
}

fn the_sink_takes_its_share_of_a_softmax_by_hand() {
    // Logits ln 2 and ln 3 against a sink of ln 5: shares of 2/10, 3/10 and 5/10.
    for (name, device) in devices() {
        let attention = sink_attention(
            floats(&[1.0, 0.0], [1, 1, 1, 2], device),
            floats(
                &[2f32.ln() * 2.0, 10.0, 3f32.ln() * 2.0, -20.0],
                [1, 2, 2],
                device,
            ),
            Tensor::zeros([1, 1, 2], device),
            None,
            floats(&[5f32.ln()], [1], device),
            0.5,
        );
        let probabilities = values(attention.probabilities);
        assert_close(&probabilities, &[0.2, 0.3], absolute(1e-6), name);
        let first = 2.0 * (0.2 * 2f32.ln() + 0.3 * 3f32.ln());
        let output = values(attention.output);
        assert_close(&output, &[first, 2.0 - 6.0], absolute(1e-5), name);
    }
}

fn attention_agrees_with_the_oracle_over_window_and_compressed_keys() {
    for (picks, shared) in [(0, true), (3, true), (3, false)] {
        let case = Case::new(picks, shared);
        let (output, probabilities) = case.oracle();
        for (name, device) in devices() {
            let what = format!("{name} picks {picks} shared {shared}");
            let actual = case.run(device);
            assert_close(&actual.1, &narrow(&probabilities), absolute(1e-6), &what);
            assert_close(&actual.0, &narrow(&output), absolute(2e-6), &what);
        }
    }
}

fn shared_keys_equal_the_same_keys_given_to_every_query() {
    let shared = Case::new(3, true);
    let mut own = Case::new(3, false);
    let block = 3 * own.width;
    own.rows = shared
        .rows
        .chunks(block)
        .flat_map(|rows| rows.repeat(own.count))
        .collect();
    for (name, device) in devices() {
        let (expected, actual) = (shared.run(device), own.run(device));
        assert_close(&actual.0, &expected.0, absolute(1e-6), name);
        assert_close(&actual.1, &expected.1, absolute(1e-6), name);
    }
}

fn no_compressed_rows_are_as_good_as_no_compressed_part() {
    for (name, device) in devices() {
        for own in [false, true] {
            let case = Case::new(0, true);
            let bias = Tensor::zeros([2, 3, 0], device);
            let rows = |count: usize| Tensor::zeros([count, 0, 4], device);
            let empty = if own {
                CompressedKeys::PerQuery {
                    rows: rows(6),
                    bias,
                }
            } else {
                CompressedKeys::Shared {
                    rows: rows(2),
                    bias,
                }
            };
            let attention = sink_attention(
                floats(&case.queries, [2, 3, 2, 4], device),
                floats(&case.window, [2, 5, 4], device),
                floats(&case.window_bias, [2, 3, 5], device),
                Some(empty),
                floats(&case.sinks, [2], device),
                case.scale,
            );
            let (output, probabilities) = case.run(device);
            assert_close(&values(attention.output), &output, EXACT, name);
            assert_close(
                &values(attention.probabilities),
                &probabilities,
                EXACT,
                name,
            );
        }
    }
}

fn a_very_large_sink_leaves_nothing() {
    let mut case = Case::new(3, true);
    case.sinks = vec![1e6; 2];
    for (name, device) in devices() {
        let (output, probabilities) = case.run(device);
        assert_close(&output, &vec![0.0; output.len()], EXACT, name);
        assert_close(&probabilities, &vec![0.0; probabilities.len()], EXACT, name);
    }
}

fn a_very_small_sink_leaves_an_ordinary_softmax() {
    for sink in [-1e6, f32::NEG_INFINITY] {
        let mut case = Case::new(3, true);
        case.sinks = vec![sink; 2];
        for (name, device) in devices() {
            let (_, probabilities) = case.run(device);
            for row in probabilities.chunks(8) {
                let sum: f32 = row.iter().sum();
                assert!((sum - 1.0).abs() < 1e-6, "{name} sink {sink}: {sum}");
            }
        }
    }
}

fn a_query_that_sees_only_its_own_key_returns_that_key_less_the_sink() {
    let mut case = Case::new(3, true);
    case.rows_bias.fill(MASKED);
    case.window_bias.fill(MASKED);
    for query in 0..case.batch * case.count {
        case.window_bias[query * case.columns + query % case.count] = 0.0;
    }
    let (output, _) = case.oracle();
    for (name, device) in devices() {
        let (actual, probabilities) = case.run(device);
        assert_close(&actual, &narrow(&output), absolute(2e-6), name);
        for (row, columns) in probabilities.chunks(8).enumerate() {
            let own = row / case.heads % case.count;
            for (column, &p) in columns.iter().enumerate() {
                assert_eq!(p > 0.0, column == own, "{name} row {row}: {columns:?}");
            }
        }
    }
}

fn a_query_that_sees_nothing_gives_all_to_the_sink() {
    let mut case = Case::new(3, false);
    case.rows_bias.fill(MASKED);
    case.window_bias.fill(MASKED);
    for (name, device) in devices() {
        let (output, _) = case.run(device);
        assert_close(&output, &vec![0.0; output.len()], EXACT, name);
    }
}

fn logits_far_beyond_the_range_of_exp_do_not_overflow() {
    let mut case = Case::new(3, false);
    // Logits of up to some 10^5, and far apart.
    case.queries.iter_mut().for_each(|v| *v *= 1e5);
    let (output, probabilities) = case.oracle();
    for (name, device) in devices() {
        let actual = case.run(device);
        // f32 dots of this size are good to about 0.01, and the exponential passes that on.
        assert_close(&actual.1, &narrow(&probabilities), absolute(0.05), name);
        assert_close(&actual.0, &narrow(&output), absolute(0.05), name);
    }
}

catalogue![
    a_quarter_turn_maps_each_pair_to_its_perpendicular,
    only_the_trailing_channels_turn_and_every_head_by_its_position,
    pooling_weighs_the_slots_of_every_channel_apart,
    masked_slots_add_nothing_to_a_pooled_block,
    index_scores_cut_each_head_at_zero_before_its_weight,
    index_scores_agree_with_the_oracle,
    the_sink_takes_its_share_of_a_softmax_by_hand,
    attention_agrees_with_the_oracle_over_window_and_compressed_keys,
    shared_keys_equal_the_same_keys_given_to_every_query,
    no_compressed_rows_are_as_good_as_no_compressed_part,
    a_very_large_sink_leaves_nothing,
    a_very_small_sink_leaves_an_ordinary_softmax,
    a_query_that_sees_only_its_own_key_returns_that_key_less_the_sink,
    a_query_that_sees_nothing_gives_all_to_the_sink,
    logits_far_beyond_the_range_of_exp_do_not_overflow,
];
