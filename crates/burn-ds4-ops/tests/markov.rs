//! Drafts of a Markov head: those of an oracle in f64, of tables made by hand, with ties and
//! special values, alone and among others.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::{OpError, markov::markov_drafts};

use super::common::{
    assert_on_another_device, assert_refused, devices, every_dtype, floats, integer_values,
    integers, noise, read, some, some_of_half, two_devices, wide,
};

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// A head and what it is asked.
#[derive(Clone)]
pub(crate) struct Asked {
    pub logits: Tensor<3>,
    pub ids: Option<Tensor<3, Int>>,
    pub tokens: Tensor<2, Int>,
    pub embedding: Tensor<2>,
    pub output: Tensor<2>,
}

impl Asked {
    pub(crate) fn run(self) -> Result<Tensor<2, Int>, OpError> {
        let Self {
            logits,
            ids,
            tokens,
            embedding,
            output,
        } = self;
        markov_drafts(logits, ids, tokens, embedding, output)
    }

    fn drafts(&self) -> Vec<i64> {
        let drafts = self.clone().run().expect("arguments that fit");
        let [lanes, places, _] = self.logits.dims();
        assert_eq!(drafts.dims(), [lanes, places]);
        assert_eq!(drafts.dtype(), DType::I32);
        integer_values(drafts)
    }

    /// The same of one lane.
    fn lane(&self, lane: usize) -> Self {
        let [_, places, columns] = self.logits.dims();
        let own = lane..lane + 1;
        Self {
            logits: self
                .logits
                .clone()
                .slice([own.clone(), 0..places, 0..columns]),
            ids: self
                .ids
                .clone()
                .map(|ids| ids.slice([own.clone(), 0..places, 0..columns])),
            tokens: self.tokens.clone().slice([own, 0..1]),
            embedding: self.embedding.clone(),
            output: self.output.clone(),
        }
    }
}

/// Multiples of 1/8, of which no sum is rounded, and which have many ties.
fn eighths(count: usize, seed: u32) -> Vec<f32> {
    let values = noise(count, seed).into_iter();
    values.map(|x| (16.0 * x).round() / 8.0).collect()
}

/// The drafts, one after the other, in f64.
pub(crate) fn oracle(asked: &Asked) -> Vec<i64> {
    let [lanes, places, columns] = asked.logits.dims();
    let [vocabulary, rank] = asked.embedding.dims();
    let [embedding, output] = [&asked.embedding, &asked.output].map(|matrix| wide(&read(matrix)));
    let logits = wide(
        &asked
            .logits
            .clone()
            .into_data()
            .try_to_vec::<f32>()
            .expect("f32"),
    );
    let ids = asked.ids.clone().map(integer_values);
    let known = |id: i64| id.clamp(0, vocabulary as i64 - 1) as usize;
    let tokens = integer_values(asked.tokens.clone());
    let mut drafts = Vec::new();
    for (lane, &token) in tokens.iter().enumerate().take(lanes) {
        let mut last = known(token);
        for place in 0..places {
            let first = (lane * places + place) * columns;
            let id = |column: usize| match &ids {
                None => column as i64,
                Some(ids) => ids[first + column],
            };
            let sum = |column: usize| {
                let row = known(id(column)) * rank;
                let pairs = (0..rank).map(|i| output[row + i] * embedding[last * rank + i]);
                logits[first + column] + pairs.sum::<f64>()
            };
            let mut best = (f64::NEG_INFINITY, -1);
            for column in 0..columns {
                let sum = sum(column);
                if sum > best.0 {
                    best = (sum, id(column));
                }
            }
            drafts.push(best.1);
            last = known(best.1);
        }
    }
    drafts
}

fn asked(
    device: &Device,
    dtype: FloatDType,
    [lanes, places, vocabulary, rank]: [usize; 4],
    candidates: Option<usize>,
) -> Asked {
    let columns = candidates.unwrap_or(vocabulary);
    let matrix = |seed| {
        let values = eighths(vocabulary * rank, seed);
        floats(&values, [vocabulary, rank], device).cast(dtype)
    };
    let count = lanes * places * columns;
    // Some are no ids, and have no chance.
    let ids: Vec<i64> = (0..count as i64)
        .map(|place| match place % 7 {
            3 => -1,
            _ => place * 37 % vocabulary as i64,
        })
        .collect();
    let mut logits = eighths(count, 3);
    if candidates.is_some() {
        let padding = ids.iter().zip(&mut logits).filter(|(id, _)| **id < 0);
        padding.for_each(|(_, logit)| *logit = -INF);
    }
    let tokens: Vec<i64> = (0..lanes as i64)
        .map(|lane| lane * 11 % vocabulary as i64)
        .collect();
    Asked {
        logits: floats(&logits, [lanes, places, columns], device),
        ids: candidates.map(|_| integers(&ids, [lanes, places, columns], device).cast(DType::I32)),
        tokens: integers(&tokens, [lanes, 1], device),
        embedding: matrix(1),
        output: matrix(2),
    }
}

fn drafts_are_those_of_the_oracle() {
    every_dtype(|what, device, dtype| {
        let shapes = [
            ([1, 5, 1024, 64], None),
            ([3, 2, 101, 9], None),
            ([1, 5, 300, 16], Some(65)),
            ([5, 3, 40, 24], None),
            ([3, 4, 70, 8], Some(9)),
            ([1, 1, 1, 1], None),
            ([2, 8, 5000, 256], None),
        ];
        for &(shape, candidates) in some_of_half(what, dtype, &shapes, 3) {
            let asked = asked(device, dtype, shape, candidates);
            let actual = asked.drafts();
            assert_eq!(actual, oracle(&asked), "{what}: {shape:?}, {candidates:?}");
        }
    });
}

fn each_draft_depends_on_the_one_before() {
    for (name, device) in devices() {
        // Token t is followed by t + 1: logits say nothing, embeddings are one-hot.
        let vocabulary = 6;
        let one_hot = |shift: usize| {
            let entry = |at: usize| {
                let (row, column) = (at / vocabulary, at % vocabulary);
                if row == (column + shift) % vocabulary {
                    1.0
                } else {
                    0.0
                }
            };
            let values: Vec<f32> = (0..vocabulary * vocabulary).map(entry).collect();
            floats(&values, [vocabulary, vocabulary], device)
        };
        let asked = Asked {
            logits: Tensor::zeros([2, 5, vocabulary], device),
            ids: None,
            tokens: integers(&[3, 0], [2, 1], device),
            embedding: one_hot(0),
            output: one_hot(1),
        };
        let expected = [4, 5, 0, 1, 2, 1, 2, 3, 4, 5];
        assert_eq!(asked.drafts(), expected, "{name}");
    }
}

fn of_equal_sums_the_lowest_column_wins_and_what_is_no_number_never() {
    for (name, device) in devices() {
        let rows = [
            [1.0, 3.0, 3.0, -1.0, NAN],
            [NAN, -INF, -INF, -INF, NAN],
            [0.0, INF, NAN, INF, 5.0],
            [-3e38, -INF, -3e38, NAN, -INF],
            [-0.0, 0.0, -1.0, 0.0, -INF],
        ];
        let zeros = || Tensor::<2>::zeros([5, 4], device);
        let asked = Asked {
            logits: floats(rows.as_flattened(), [1, 5, 5], device),
            ids: None,
            tokens: integers(&[2], [1, 1], device),
            embedding: zeros(),
            output: zeros(),
        };
        assert_eq!(asked.drafts(), [1, -1, 1, 0, 0], "{name}");
        let ids = integers(&[4, 2, 1, 0, 3].repeat(5), [1, 5, 5], device).cast(DType::I32);
        let asked = Asked {
            ids: Some(ids),
            ..asked
        };
        assert_eq!(asked.drafts(), [2, -1, 2, 4, 4], "{name}: candidates");
        // NaN in the row of one token leaves the others alone, after it as token 0 before.
        let weights = Tensor::cat(
            vec![
                Tensor::<2>::zeros([2, 4], device),
                Tensor::full([1, 4], NAN, device),
                Tensor::ones([2, 4], device),
            ],
            0,
        );
        let asked = Asked {
            logits: Tensor::zeros([1, 2, 5], device),
            ids: None,
            tokens: integers(&[3], [1, 1], device),
            embedding: weights.clone(),
            output: weights,
        };
        assert_eq!(asked.drafts(), [3, 3], "{name}: NaN in a row");
    }
}

fn tokens_that_are_no_ids_count_as_the_nearest() {
    for (name, device) in devices() {
        let asked = asked(device, FloatDType::F32, [3, 2, 50, 8], None);
        let of = |tokens: &[i64]| Asked {
            tokens: integers(tokens, [3, 1], device),
            ..asked.clone()
        };
        let expected = of(&[0, 49, 49]).drafts();
        let actual = of(&[-7, 50, i64::from(i32::MAX)]).drafts();
        assert_eq!(actual, expected, "{name}");
    }
}

fn a_lane_has_the_same_drafts_alone_and_among_others() {
    for (name, device) in devices() {
        for &candidates in some(name, &[None, Some(33)], 1) {
            let (lanes, places) = (6, 4);
            let all = asked(device, FloatDType::F32, [lanes, places, 90, 12], candidates);
            // Of sums that are rounded.
            let all = Asked {
                embedding: floats(&noise(90 * 12, 8), [90, 12], device),
                output: floats(&noise(90 * 12, 9), [90, 12], device),
                ..all
            };
            let together = all.drafts();
            for lane in 0..lanes {
                let own = &together[lane * places..][..places];
                assert_eq!(all.lane(lane).drafts(), own, "{name}: lane {lane}");
            }
        }
    }
}

fn views_are_read_like_contiguous_tensors() {
    for (name, device) in devices() {
        let plain = asked(device, FloatDType::F32, [2, 3, 30, 8], None);
        let transposed = |matrix: &Tensor<2>| {
            let data = matrix.clone().transpose().into_data();
            Tensor::<2>::from_data(data, device).transpose()
        };
        let logits = plain.logits.clone().swap_dims(0, 2).into_data();
        let viewed = Asked {
            logits: Tensor::<3>::from_data(logits, device).swap_dims(0, 2),
            ids: None,
            tokens: plain.tokens.clone(),
            embedding: transposed(&plain.embedding),
            output: transposed(&plain.output),
        };
        assert_eq!(viewed.drafts(), plain.drafts(), "{name}");
    }
}

fn nothing_to_choose_from_gives_no_tokens() {
    for (name, device) in devices() {
        let of = |[lanes, places, columns]: [usize; 3], vocabulary| {
            let like = (device, DType::I32);
            let ids = Tensor::<3, Int>::zeros([lanes, places, columns], like);
            let drafts = markov_drafts(
                Tensor::zeros([lanes, places, columns], device),
                Some(ids),
                Tensor::zeros([lanes, 1], device),
                Tensor::zeros([vocabulary, 3], device),
                Tensor::zeros([vocabulary, 3], device),
            );
            let drafts = drafts.expect("arguments that fit");
            (drafts.dims(), integer_values(drafts))
        };
        assert_eq!(of([2, 2, 0], 4), ([2, 2], vec![-1; 4]), "{name}");
        assert_eq!(of([0, 2, 3], 4), ([0, 2], vec![]), "{name}");
        assert_eq!(of([2, 0, 3], 4), ([2, 0], vec![]), "{name}");
    }
}

fn what_does_not_fit_is_refused() {
    let device = &Device::flex();
    let data = |count: usize| TensorData::new(vec![0_i32; count], [1, count]);
    let run = |change: fn(&mut Asked)| {
        let mut asked = asked(device, FloatDType::F32, [2, 3, 5, 4], None);
        change(&mut asked);
        asked.run()
    };
    type Change = fn(&mut Asked);
    let cases: [(Change, &str); 6] = [
        (
            |asked| asked.logits = asked.logits.clone().slice([0..2, 0..3, 0..4]),
            "`logits` has shape [2, 3, 4], expected [2, 3, 5]",
        ),
        (
            |asked| asked.logits = asked.logits.clone().cast(FloatDType::BF16),
            "`logits` has dtype BF16, expected F32",
        ),
        (
            |asked| asked.tokens = asked.tokens.clone().slice([0..1, 0..1]),
            "`tokens` has shape [1, 1], expected [2, 1]",
        ),
        (
            |asked| asked.output = asked.output.clone().slice([0..5, 0..3]),
            "`output` has shape [5, 3], expected [5, 4]",
        ),
        (
            |asked| {
                let [embedding, output] = [&asked.embedding, &asked.output];
                let none = |matrix: &Tensor<2>| matrix.clone().slice([0..5, 0..0]);
                (asked.embedding, asked.output) = (none(embedding), none(output));
            },
            "`rank` is 0, expected at least 1",
        ),
        (
            |asked| {
                let device = asked.logits.device();
                asked.ids = Some(Tensor::zeros([2, 3, 4], (&device, DType::I32)));
            },
            "`ids` has shape [2, 3, 4], expected [2, 3, 5]",
        ),
    ];
    for (change, message) in cases {
        assert_refused(run(change), message);
    }
    let asked = Asked {
        tokens: Tensor::from_data(data(1), (device, DType::I8)),
        ..asked(device, FloatDType::F32, [1, 1, 5, 4], None)
    };
    assert_refused(
        asked.run(),
        "`tokens` has dtype I8, expected I32, I64, U32 or U64",
    );
}

#[test]
fn arguments_on_two_devices_are_refused() {
    let Some(on) = two_devices() else {
        return;
    };
    type Change = fn(&mut Asked, Asked);
    let changes: [(Change, &str); 4] = [
        (|asked, other| asked.ids = other.ids, "ids"),
        (|asked, other| asked.tokens = other.tokens, "tokens"),
        (
            |asked, other| asked.embedding = other.embedding,
            "embedding",
        ),
        (|asked, other| asked.output = other.output, "output"),
    ];
    for (change, argument) in changes {
        let [mut spoilt, other] =
            on.map(|device| asked(device, FloatDType::F32, [2, 3, 5, 4], Some(3)));
        change(&mut spoilt, other);
        assert_on_another_device(spoilt.run(), [argument, "logits"]);
    }
}

catalogue![
    drafts_are_those_of_the_oracle,
    each_draft_depends_on_the_one_before,
    of_equal_sums_the_lowest_column_wins_and_what_is_no_number_never,
    tokens_that_are_no_ids_count_as_the_nearest,
    a_lane_has_the_same_drafts_alone_and_among_others,
    views_are_read_like_contiguous_tensors,
    nothing_to_choose_from_gives_no_tokens,
    what_does_not_fit_is_refused,
];
