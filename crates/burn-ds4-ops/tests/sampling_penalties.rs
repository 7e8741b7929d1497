//! Penalties and logit bias: those of an oracle in f64, and what counts.

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_ds4_ops::sampling::{
    BatchParams, LaneParams, Penalties, TokenCounts, apply_penalties, sample,
};

use super::common::{
    EXACT, absolute, assert_close, devices, every_dtype, floats, integer_values, integers, narrow,
    noise, read, values,
};
use super::tokens::{draws, positions, sampled};

/// More than a cube works on.
const COLUMNS: usize = 5000;

/// A lane: its parameters, its text and its drafts.
struct Lane {
    params: LaneParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    drafts: Vec<i64>,
}

fn penalties(repetition: f32, presence: f32, frequency: f32) -> LaneParams {
    LaneParams {
        penalties: Penalties {
            repetition,
            presence,
            frequency,
        },
        ..LaneParams::default()
    }
}

/// Lanes with every penalty alone and with all of them. Drafts are new, counted, repeated and no
/// tokens.
fn lanes() -> Vec<Lane> {
    let bias = vec![
        (0, 1.25),
        (17, -3.5),
        (4999, 100.0),
        (7, 0.3),
        (4096, f32::NEG_INFINITY),
    ];
    let lane = |params, drafts: &[i64]| Lane {
        params,
        prompt: (0..60).map(|i| i * i % 5000).collect(),
        output: (0..90)
            .map(|i| (i % 30) * 171 % 5000)
            .chain([17, 4999, 7])
            .collect(),
        drafts: drafts.to_vec(),
    };
    let biased = |params| LaneParams {
        logit_bias: bias.clone(),
        ..params
    };
    vec![
        lane(LaneParams::default(), &[3, 4, 5]),
        lane(penalties(1.3, 0.0, 0.0), &[3, 3, 171]),
        lane(penalties(1.0, 0.6, 0.0), &[2, 171, 2]),
        lane(penalties(1.0, 0.0, -0.7), &[171, 171, 4999]),
        lane(biased(LaneParams::default()), &[0, 17, 4998]),
        lane(biased(penalties(0.8, -1.1, 1.7)), &[0, 4096, 0]),
        lane(biased(penalties(1.9, 0.3, 0.123)), &[-1, 5000, 1 << 30]),
    ]
}

/// The logits of all rows of a lane, each with more drafts than the one before.
fn oracle(lane: &Lane, logits: &[f32]) -> Vec<f64> {
    let rows = logits.chunks(COLUMNS).enumerate();
    let row = |(row, logits): (usize, &[f32])| {
        let drafts = lane.drafts[..row].iter().copied();
        let output: Vec<i64> = lane
            .output
            .iter()
            .map(|&id| i64::from(id))
            .chain(drafts)
            .collect();
        let Penalties {
            repetition,
            presence,
            frequency,
        } = lane.params.penalties;
        let one = |(id, &logit): (usize, &f32)| {
            let mut logit = f64::from(logit);
            for &(token, bias) in &lane.params.logit_bias {
                if token as usize == id {
                    logit += f64::from(bias);
                }
            }
            let count = output.iter().filter(|&&token| token == id as i64).count();
            if count > 0 || lane.prompt.contains(&(id as u32)) {
                let factor = f64::from(repetition);
                logit = if logit > 0.0 {
                    logit / factor
                } else {
                    logit * factor
                };
            }
            let presence = if count > 0 { f64::from(presence) } else { 0.0 };
            logit - f64::from(frequency) * count as f64 - presence
        };
        logits.iter().enumerate().map(one).collect::<Vec<_>>()
    };
    rows.flat_map(row).collect()
}

fn batch(lanes: &[Lane], device: &Device) -> (BatchParams, TokenCounts) {
    let params: Vec<LaneParams> = lanes.iter().map(|lane| lane.params.clone()).collect();
    let params = BatchParams::new(&params, COLUMNS, device).expect("parameters in range");
    let mut counts = TokenCounts::new(lanes.len(), COLUMNS, device);
    for (index, lane) in lanes.iter().enumerate() {
        let reset = counts.reset_lane(index, &lane.prompt, &lane.output);
        reset.expect("a lane");
    }
    (params, counts)
}

/// Logits of all signs and sizes, with zeros of either sign.
fn logits(count: usize) -> Vec<f32> {
    let data = noise(count, 3).into_iter().enumerate();
    data.map(|(i, x)| match i % 171 {
        0 => -0.0,
        1 => 0.0,
        _ => 4.0 * x,
    })
    .collect()
}

fn penalised(
    logits: Tensor<3>,
    drafts: &[i64],
    params: &BatchParams,
    counts: &TokenCounts,
) -> Tensor<3> {
    let [lanes, rows, _] = logits.dims();
    let drafts = integers(drafts, [lanes, rows - 1], &logits.device());
    apply_penalties(logits, drafts, params, counts).expect("arguments that fit")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn logits_change_as_the_oracle_says_and_the_same_everywhere() {
    let (lanes, rows) = (lanes(), 4);
    let size = rows * COLUMNS;
    let data = logits(lanes.len() * size);
    let mut first: Option<Vec<f32>> = None;
    for (name, device) in devices() {
        let (params, counts) = batch(&lanes, device);
        let drafts: Vec<i64> = lanes.iter().flat_map(|lane| lane.drafts.clone()).collect();
        let logits = floats(&data, [lanes.len(), rows, COLUMNS], device);
        let held = logits.clone();
        let actual = values(penalised(logits, &drafts, &params, &counts));
        assert_eq!(
            bits(&values(held)),
            bits(&data),
            "{name}: logits that another holds"
        );
        for (index, lane) in lanes.iter().enumerate() {
            let own = index * size..(index + 1) * size;
            let expected = narrow(&oracle(lane, &data[own.clone()]));
            let what = format!("{name}, lane {index}");
            assert_close(&actual[own], &expected, absolute(1e-5), &what);
        }
        // The first lane has nothing that changes a logit.
        assert_eq!(bits(&actual[..size]), bits(&data[..size]), "{name}");
        let first = first.get_or_insert_with(|| actual.clone());
        assert_close(&actual, first, EXACT, name);
    }
}

fn a_repetition_penalty_is_that_of_the_host() {
    for (name, device) in devices() {
        let lane = Lane {
            prompt: (0..4000).collect(),
            output: (3000..5000).collect(),
            params: penalties(1.37, 0.0, 0.0),
            drafts: Vec::new(),
        };
        let data: Vec<f32> = logits(COLUMNS).iter().map(|x| 10.0 * x).collect();
        let factor = f64::from(1.37_f32);
        let expected = data.iter().map(|&x| match f64::from(x) {
            x if x < 0.0 => (x * factor) as f32,
            x => (x / factor) as f32,
        });
        let expected: Vec<f32> = expected.collect();
        let (params, counts) = batch(&[lane], device);
        let logits = floats(&data, [1, 1, COLUMNS], device);
        let actual = values(penalised(logits, &[], &params, &counts));
        assert_close(&actual, &expected, EXACT, name);
    }
}

fn drafts_count_as_what_is_counted_afterwards() {
    for (name, device) in devices() {
        let lanes = lanes();
        let count = lanes.len();
        let (params, mut counts) = batch(&lanes, device);
        let data = logits(count * 4 * COLUMNS);
        let logits = floats(&data, [count, 4, COLUMNS], device);
        let drafts: Vec<i64> = lanes.iter().flat_map(|lane| lane.drafts.clone()).collect();
        let together = penalised(logits.clone(), &drafts, &params, &counts);
        for row in 0..4 {
            let of_row = [0..count, row..row + 1, 0..COLUMNS];
            let alone = penalised(logits.clone().slice(of_row.clone()), &[], &params, &counts);
            let expected = values(together.clone().slice(of_row));
            assert_eq!(bits(&values(alone)), bits(&expected), "{name}, row {row}");
            if row < 3 {
                let column: Vec<i64> = lanes.iter().map(|lane| lane.drafts[row]).collect();
                let tokens = integers(&column, [count, 1], device);
                counts.count(tokens).expect("tokens that fit");
            }
        }
    }
}

/// How often each token of each lane is counted as output.
fn counted(counts: &TokenCounts, device: &Device) -> Vec<f32> {
    let [lanes, columns] = counts.dims();
    let params = vec![penalties(1.0, 0.0, 1.0); lanes];
    let params = BatchParams::new(&params, columns, device).expect("parameters in range");
    let logits = penalised(
        Tensor::zeros([lanes, 1, columns], device),
        &[],
        &params,
        counts,
    );
    values(logits.neg())
}

fn what_is_accepted_is_counted_and_a_new_text_starts_over() {
    for (name, device) in devices() {
        let mut counts = TokenCounts::new(3, 6, device);
        let tokens = [2, 5, 2, -1, -1, 0, -1, -1, -1, 6, 1 << 30, 4];
        let tokens = integers(&tokens, [3, 4], device);
        counts.count(tokens.clone()).expect("tokens that fit");
        let once = [
            [0.0, 0.0, 2.0, 0.0, 0.0, 1.0],
            [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        ];
        assert_close(&counted(&counts, device), once.as_flattened(), EXACT, name);
        let held = counts.clone();
        counts.reset_lane(0, &[3, 3], &[1, 4, 1]).expect("a lane");
        counts.count(tokens).expect("tokens that fit");
        let twice = [
            [0.0, 2.0, 2.0, 0.0, 1.0, 1.0],
            [2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 2.0, 0.0],
        ];
        assert_close(&counted(&counts, device), twice.as_flattened(), EXACT, name);
        assert_close(&counted(&held, device), once.as_flattened(), EXACT, name);
        // The prompt counts for repetition alone.
        let params = vec![penalties(2.0, 0.5, 0.0); 3];
        let params = BatchParams::new(&params, 6, device).expect("parameters in range");
        let logits = Tensor::<3>::ones([3, 1, 6], device);
        let lane = &values(penalised(logits, &[], &params, &counts))[..6];
        assert_close(lane, &[1.0, 0.0, 0.0, 0.5, 0.0, 0.0], EXACT, name);
    }
}

fn nan_and_infinity_stay() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for (name, device) in devices() {
        let mut lane = penalties(1.5, 1.0, 1.0);
        lane.logit_bias = vec![(0, 2.0), (1, 2.0), (3, -inf), (5, -inf)];
        let params = BatchParams::new(&[lane], 6, device).expect("parameters in range");
        let mut counts = TokenCounts::new(1, 6, device);
        counts.reset_lane(0, &[0], &[1, 2, 3]).expect("a lane");
        let logits = floats(&[nan, inf, -inf, 3.0, inf, inf], [1, 1, 6], device);
        let actual = values(penalised(logits, &[], &params, &counts));
        assert_close(&actual, &[nan, inf, -inf, -inf, inf, nan], EXACT, name);
    }
}

fn logits_of_every_dtype_are_widened() {
    every_dtype(|what, device, dtype| {
        let lanes = lanes();
        let (params, counts) = batch(&lanes, device);
        let data = logits(lanes.len() * COLUMNS);
        let logits = floats(&data, [lanes.len(), 1, COLUMNS], device).cast(dtype);
        let wide = logits.clone().cast(FloatDType::F32);
        let actual = penalised(logits, &[], &params, &counts);
        assert_eq!(FloatDType::from(actual.dtype()), FloatDType::F32, "{what}");
        let expected = read(&penalised(wide, &[], &params, &counts));
        assert_close(&read(&actual), &expected, EXACT, what);
    });
}

fn rows_may_be_anywhere_in_memory() {
    for (name, device) in devices() {
        let lanes = lanes();
        let count = lanes.len();
        let (params, counts) = batch(&lanes, device);
        let shape = [2, count + 1, COLUMNS + 3];
        let whole = floats(&logits(shape.iter().product()), shape, device);
        let view = whole.slice([1..2, 1..count + 1, 2..COLUMNS + 2]);
        let view = view.reshape([count, 1, COLUMNS]);
        let dense: Tensor<3> = Tensor::from_data(view.clone().into_data(), device);
        let expected = values(penalised(dense, &[], &params, &counts));
        let actual = values(penalised(view, &[], &params, &counts));
        assert_eq!(bits(&actual), bits(&expected), "{name}");
    }
}

fn tokens_are_those_of_penalised_logits() {
    for (name, device) in devices() {
        let mut lanes = lanes();
        for (index, lane) in lanes.iter_mut().enumerate() {
            lane.params.sampling.temperature = 0.3 * (index % 3) as f32;
            lane.params.seed = 100 + index as u64;
        }
        let count = lanes.len();
        let (params, counts) = batch(&lanes, device);
        let logits = floats(&logits(count * COLUMNS), [count, 1, COLUMNS], device);
        let changed = penalised(logits, &[], &params, &counts).reshape([count, COLUMNS]);
        let at = positions(&draws(0, 0, count), device);
        let tokens = sample(changed.clone(), &params, at).expect("arguments that fit");
        for (index, (lane, token)) in lanes.iter().zip(integer_values(tokens)).enumerate() {
            let row = changed.clone().slice([index..index + 1, 0..COLUMNS]);
            let draws = [(lane.params.seed, index as u32)];
            let expected = sampled(row, &lane.params.sampling, &draws);
            assert_eq!([token], expected[..], "{name}, lane {index}");
        }
    }
}

fn what_does_not_fit_is_refused_and_nothing_is_nothing() {
    for (name, device) in devices() {
        let mut counts = TokenCounts::new(2, 5, device);
        let message = |error: burn_ds4_ops::OpError| error.to_string();
        let error = message(counts.reset_lane(2, &[], &[]).expect_err("no lane"));
        assert_eq!(error, "`lane` is 2, expected below 2", "{name}");
        let error = message(counts.reset_lane(0, &[1, 5], &[]).expect_err("no column"));
        assert_eq!(error, "`prompt` is 5, expected tokens below 5", "{name}");
        let error = message(counts.reset_lane(0, &[], &[7]).expect_err("no column"));
        assert_eq!(error, "`output` is 7, expected tokens below 5", "{name}");
        let tokens: Tensor<2, Int> = Tensor::zeros([3, 1], device);
        let error = message(counts.count(tokens).expect_err("other lanes"));
        assert_eq!(
            error, "`tokens` has shape [3, 1], expected [2, 1]",
            "{name}"
        );
        counts
            .count(Tensor::zeros([2, 0], device))
            .expect("no tokens");
        let params = vec![LaneParams::default(); 2];
        let params = BatchParams::new(&params, 6, device).expect("parameters in range");
        let refused = |shape: [usize; 3], drafts: [usize; 2]| {
            let drafts = Tensor::zeros(drafts, device);
            let error = apply_penalties(Tensor::zeros(shape, device), drafts, &params, &counts);
            message(error.expect_err("arguments that do not fit"))
        };
        let error = refused([2, 1, 5], [2, 0]);
        assert_eq!(
            error, "`params` has shape [2, 6], expected [2, 5]",
            "{name}"
        );
        let error = refused([2, 1, 6], [2, 0]);
        assert_eq!(
            error, "`counts` has shape [2, 5], expected [2, 6]",
            "{name}"
        );
        let error = refused([2, 1, 6], [2, 1]);
        assert_eq!(
            error, "`drafts` has shape [2, 1], expected [2, 0]",
            "{name}"
        );
        let none = BatchParams::new(&[], 6, device).expect("no parameters");
        let counts = TokenCounts::new(0, 6, device);
        let nothing = penalised(Tensor::zeros([0, 1, 6], device), &[], &none, &counts);
        assert_eq!(nothing.dims(), [0, 1, 6], "{name}");
    }
}

catalogue![
    logits_change_as_the_oracle_says_and_the_same_everywhere,
    a_repetition_penalty_is_that_of_the_host,
    drafts_count_as_what_is_counted_afterwards,
    what_is_accepted_is_counted_and_a_new_text_starts_over,
    nan_and_infinity_stay,
    logits_of_every_dtype_are_widened,
    rows_may_be_anywhere_in_memory,
    tokens_are_those_of_penalised_logits,
    what_does_not_fit_is_refused_and_nothing_is_nothing,
];
