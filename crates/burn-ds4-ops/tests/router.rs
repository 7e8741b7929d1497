//! Routing against an `f64` oracle and tables worked out by hand.

use super::common::{
    EXACT, Tolerance, assert_close, devices, floats, integer_values, integers, narrow, noise, some,
    values, wide,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_ds4_ops::router::{
    HashWeights, activation_topk, dense_router, hash_route, sqrt_softplus, topk_select,
};

/// Expert counts of a toy, of nothing in particular, and of both released models.
const EXPERTS: [usize; 4] = [8, 100, 256, 384];

/// The devices that take a number of experts: some numbers will do where each has a kernel that
/// compiles slowly.
fn devices_for(experts: usize) -> impl Iterator<Item = &'static (String, Device)> {
    devices()
        .iter()
        .filter(move |(name, _)| some(name, &EXPERTS, 2).any(|&taken| taken == experts))
}

const fn relative(relative: f64) -> Tolerance {
    Tolerance {
        // A device may flush what lies below the normal range.
        absolute: f32::MIN_POSITIVE as f64,
        relative,
    }
}

fn flex() -> &'static Device {
    &devices()[0].1
}

fn oracle_sqrt_softplus(x: f64) -> f64 {
    (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()
}

/// Column ids by (value descending, id ascending); -inf and NaN count as the lowest finite value.
fn oracle_order(row: &[f64]) -> Vec<usize> {
    let lowest = f64::from(f32::MIN);
    let key = |id: usize| if row[id] > lowest { row[id] } else { lowest };
    let mut ids: Vec<usize> = (0..row.len()).collect();
    ids.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap().then(a.cmp(&b)));
    ids
}

fn oracle_weights(logits: &[f64], ids: &[usize], scale: f64) -> Vec<f64> {
    let chosen = ids.iter().map(|&id| oracle_sqrt_softplus(logits[id]));
    let sum: f64 = chosen.clone().sum();
    chosen.map(|score| score / (sum + 1e-20) * scale).collect()
}

/// `0..count` in an order without a pattern; `step` shares no factor with `count`.
fn shuffled(count: usize, step: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| (i * step + 3) % count)
}

fn sqrt_softplus_has_the_values_worked_out_by_hand() {
    let table: [(f32, f64); 9] = [
        (0.0, 0.832_554_611_157_697_7), // sqrt(ln 2)
        (1.0, 1.145_976_303_209_723),
        (-1.0, 0.559_697_853_773_107_5),
        (9.0, 3.000_020_566_961_120_4),
        (100.0, 10.0),
        (1e10, 1e5),
        (-20.0, 4.539_992_973_909_079e-5),   // e^-10, nearly
        (-100.0, 1.928_749_847_963_918e-22), // e^-50
        (-174.0, 1.645_811_431_082_274e-38), // e^-87, just above the smallest normal f32
    ];
    let x: Vec<f32> = table.iter().map(|row| row.0).collect();
    let expected: Vec<f32> = table.iter().map(|row| row.1 as f32).collect();
    for (name, device) in devices() {
        let actual = values(sqrt_softplus(floats(&x, [9], device)));
        assert_close(&actual, &expected, relative(3e-5), name);
    }
}

fn sqrt_softplus_keeps_its_precision_from_minus_200_to_200() {
    let x: Vec<f32> = (-20_000..=20_000).map(|i| i as f32 / 100.0).collect();
    let expected: Vec<f64> = wide(&x).into_iter().map(oracle_sqrt_softplus).collect();
    let expected = narrow(&expected);
    for (name, device) in devices() {
        let actual = values(sqrt_softplus(floats(&x, [x.len()], device)));
        // WGSL lets `exp` lose |x| ulp.
        assert_close(&actual, &expected, relative(3e-5), name);
        let near = 18_000..22_001;
        let what = format!("{name}, -20..20");
        assert_close(
            &actual[near.clone()],
            &expected[near],
            relative(2e-6),
            &what,
        );
    }
}

fn sqrt_softplus_of_infinities_and_nan_is_documented() {
    let x = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN,
    ];
    let expected = [f32::INFINITY, 0.0, f32::NAN, f32::MAX.sqrt(), 0.0];
    for (name, device) in devices() {
        let actual = values(sqrt_softplus(floats(&x, [5], device)));
        assert_close(&actual, &expected, relative(1e-6), name);
    }
}

fn topk_select_sorts_by_value_then_id_whatever_the_row_holds() {
    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    let rows = [
        ([3.0, 1.0, 3.0, 2.0], [0, 2, 3, 1]),
        ([1.0, 2.0, 3.0, 4.0], [3, 2, 1, 0]),
        ([5.0, 5.0, 5.0, 5.0], [0, 1, 2, 3]),
        ([-0.0, 0.0, 0.0, -0.0], [0, 1, 2, 3]),
        ([-INF, -INF, -INF, -INF], [0, 1, 2, 3]),
        ([-INF, -5.0, -INF, -7.0], [1, 3, 0, 2]),
        ([NAN, 1.0, NAN, -2.0], [1, 3, 0, 2]),
        ([NAN, NAN, NAN, NAN], [0, 1, 2, 3]),
        ([-INF, NAN, 7.0, -INF], [2, 0, 1, 3]),
        ([0.0, INF, f32::MAX, INF], [1, 3, 2, 0]),
    ];
    let scores: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
    for (name, device) in devices() {
        // All four say how the lowest rank.
        for &k in some(name, &[4, 1, 3], 3) {
            let (best, ids) = topk_select(floats(&scores, [rows.len(), 4], device), k)
                .expect("arguments that fit");
            let expected: Vec<i64> = rows.iter().flat_map(|row| &row.1[..k]).copied().collect();
            assert_eq!(integer_values(ids), expected, "{name} k {k}");
            let gathered: Vec<f32> = (0..rows.len() * k)
                .map(|i| rows[i / k].0[expected[i] as usize])
                .collect();
            assert_close(&values(best), &gathered, EXACT, &format!("{name} k {k}"));
        }
    }
}

#[test]
fn topk_select_never_takes_a_column_twice_in_half_precision() {
    let scores = [f32::NEG_INFINITY, 1.0, f32::NAN, f32::NEG_INFINITY];
    for dtype in [DType::BF16, DType::F16] {
        let scores = floats(&scores, [1, 4], flex()).cast(FloatDType::from(dtype));
        let (_, ids) = topk_select(scores, 4).expect("arguments that fit");
        assert_eq!(integer_values(ids), [1, 0, 2, 3], "{dtype:?}");
    }
}

fn topk_select_agrees_with_a_sort_for_every_number_of_experts() {
    for experts in EXPERTS {
        // Half of the rows are full of ties, half have none to speak of.
        let scores: Vec<f32> = noise(16 * experts, 5)
            .into_iter()
            .enumerate()
            .map(|(i, v)| {
                if (i / experts).is_multiple_of(2) {
                    (v * 4.0).round()
                } else {
                    v
                }
            })
            .collect();
        let expected: Vec<i64> = scores
            .chunks(experts)
            .flat_map(|row| oracle_order(&wide(row)).into_iter().take(6))
            .map(|id| id as i64)
            .collect();
        for (name, device) in devices_for(experts) {
            let (_, ids) =
                topk_select(floats(&scores, [16, experts], device), 6).expect("arguments that fit");
            assert_eq!(integer_values(ids), expected, "{name} experts {experts}");
        }
    }
}

fn activation_topk_agrees_with_the_oracle_for_every_number_of_experts() {
    const ROWS: usize = 5;
    const SCALE: f64 = 2.5;
    for experts in EXPERTS {
        let k = if experts == 8 { 3 } else { 6 };
        let logits: Vec<f32> = (0..ROWS)
            .flat_map(|row| shuffled(experts, [37, 41, 43, 47, 53][row]))
            .map(|rank| rank as f32 * (16.0 / experts as f32) - 9.0)
            .collect();
        // Large enough to overrule the scores, and off their grid.
        let bias: Vec<f32> = shuffled(experts, 59)
            .map(|rank| (rank % 7) as f32 * 0.731)
            .collect();
        let (mut expected_ids, mut expected) = (Vec::new(), Vec::new());
        for row in logits.chunks(experts) {
            let row = wide(row);
            let biased: Vec<f64> = (0..experts)
                .map(|id| oracle_sqrt_softplus(row[id]) + f64::from(bias[id]))
                .collect();
            let order = oracle_order(&biased);
            for pair in order[..=k].windows(2) {
                let gap = biased[pair[0]] - biased[pair[1]];
                assert!(gap > 1e-5, "experts {experts}: rounding decides, gap {gap}");
            }
            expected.extend(oracle_weights(&row, &order[..k], SCALE));
            expected_ids.extend(order[..k].iter().map(|&id| id as i64));
        }
        for (name, device) in devices_for(experts) {
            let (weights, ids) = activation_topk(
                floats(&logits, [ROWS, experts], device),
                Some(floats(&bias, [experts], device)),
                None,
                k,
                SCALE,
            )
            .expect("arguments that fit");
            let what = format!("{name} experts {experts}");
            assert_eq!(integer_values(ids), expected_ids, "{what}");
            let weights = values(weights);
            assert_close(&weights, &narrow(&expected), relative(5e-6), &what);
            for row in weights.chunks(k) {
                let sum: f32 = row.iter().sum();
                assert!((sum - 2.5).abs() < 1e-5, "{what}: weights sum to {sum}");
            }
        }
    }
}

fn the_bias_chooses_but_does_not_weigh() {
    // softplus(ln(e^y - 1)) = y: activations 2, 1 and 1 from y = 4, 1 and 1.
    let one = (1f64.exp() - 1.0).ln() as f32;
    let two = (4f64.exp() - 1.0).ln() as f32;
    for (name, device) in devices() {
        let logits = floats(&[two, one, one], [1, 3], device);
        let bias = floats(&[0.0, -5.0, 10.0], [3], device);
        let (weights, ids) =
            activation_topk(logits.clone(), Some(bias), None, 2, 1.5).expect("arguments that fit");
        assert_eq!(integer_values(ids), [2, 0], "{name}");
        assert_close(&values(weights), &[0.5, 1.0], relative(1e-6), name);

        let (weights, ids) =
            activation_topk(logits, None, None, 2, 1.5).expect("arguments that fit");
        assert_eq!(integer_values(ids), [0, 1], "{name}");
        assert_close(&values(weights), &[1.0, 0.5], relative(1e-6), name);
    }
}

fn weights_stay_finite_where_the_activations_underflow() {
    const INF: f32 = f32::INFINITY;
    // e^-30 is far above the 1e-20 of the denominator, e^-75 = 2.68e-33 far below it: 2.68e-33 /
    // 1e-20 is left.
    let logits = [[-60.0_f32; 4], [-150.0; 4], [-1000.0; 4], [-INF; 4]].concat();
    let tiny = (-75f64).exp() / 1e-20;
    let expected = [[0.5; 2], [tiny as f32; 2], [0.0; 2], [0.0; 2]].concat();
    for (name, device) in devices() {
        let (weights, ids) = activation_topk(floats(&logits, [4, 4], device), None, None, 2, 1.0)
            .expect("arguments that fit");
        assert_eq!(integer_values(ids), [0, 1].repeat(4), "{name}");
        assert_close(&values(weights), &expected, relative(3e-5), name);
    }
}

fn nan_logits_are_chosen_last_and_spoil_only_their_own_row() {
    const NAN: f32 = f32::NAN;
    let logits = [
        [NAN, 0.0, -900.0, 0.0],
        [NAN, 0.0, NAN, NAN],
        [0.0, 0.0, 0.0, 0.0],
    ]
    .concat();
    for (name, device) in devices() {
        let bias = floats(&[50.0, 0.0, 0.0, 0.0], [4], device);
        let logits = floats(&logits, [3, 4], device);
        let (weights, ids) =
            activation_topk(logits, Some(bias), None, 2, 1.0).expect("arguments that fit");
        assert_eq!(integer_values(ids), [1, 3, 1, 0, 0, 1], "{name}");
        let expected = [0.5, 0.5, NAN, NAN, 0.5, 0.5];
        assert_close(&values(weights), &expected, relative(1e-6), name);
    }
}

fn an_expert_that_is_masked_out_goes_before_one_that_is_nan() {
    for (name, device) in devices() {
        let logits = floats(&[f32::NAN, f32::NEG_INFINITY, 1.0], [1, 3], device);
        let (weights, ids) =
            activation_topk(logits, None, None, 2, 1.0).expect("arguments that fit");
        assert_eq!(integer_values(ids), [2, 1], "{name}");
        assert_close(&values(weights), &[1.0, 0.0], relative(1e-6), name);
    }
}

fn no_width_gives_equal_scores() {
    for (name, device) in devices() {
        let (x, gate) = (Tensor::zeros([2, 0], device), Tensor::zeros([4, 0], device));
        let (weights, ids) = dense_router(x, gate, None, None, 2, 1.0).expect("arguments that fit");
        assert_eq!(integer_values(ids), [0, 1, 0, 1], "{name}");
        assert_close(&values(weights), &[0.5; 4], relative(1e-6), name);
    }
}

fn hash_route_looks_the_experts_up_and_weighs_them_by_score() {
    let table = [0, 1, 2, 7, 6, 5, 3, 3, 4, 1, 0, 7];
    let tokens = [3, 0, 0, 1];
    let logits: Vec<f32> = noise(4 * 8, 9).into_iter().map(|v| v * 8.0).collect();
    let expected_ids = [1_usize, 0, 7, 0, 1, 2, 0, 1, 2, 7, 6, 5];
    let expected: Vec<f64> = logits
        .chunks(8)
        .zip(expected_ids.chunks(3))
        .flat_map(|(row, ids)| oracle_weights(&wide(row), ids, 1.5))
        .collect();
    for (name, device) in devices() {
        let (weights, ids) = hash_route(
            integers(&tokens, [4], device),
            integers(&table, [4, 3], device),
            HashWeights::Scored(floats(&logits, [4, 8], device)),
            1.5,
        )
        .expect("arguments that fit");
        let expected_ids: Vec<i64> = expected_ids.iter().map(|&id| id as i64).collect();
        assert_eq!(integer_values(ids), expected_ids, "{name}");
        assert_close(&values(weights), &narrow(&expected), relative(5e-6), name);
    }
}

fn hash_route_reads_ids_out_of_range_as_the_nearest_in_range() {
    let logits = noise(3 * 4, 10);
    for (name, device) in devices() {
        let route = |tokens: &[i64], table: &[i64]| {
            let (weights, ids) = hash_route(
                integers(tokens, [3], device),
                integers(table, [2, 2], device),
                HashWeights::Scored(floats(&logits, [3, 4], device)),
                1.0,
            )
            .expect("arguments that fit");
            (values(weights), integer_values(ids))
        };
        let wild = route(&[0, 1_000_000, 1], &[0, -1, 77, 2]);
        assert_eq!(wild, route(&[0, 1, 1], &[0, 0, 3, 2]), "{name}");
    }
}

fn an_expert_that_the_table_names_twice_counts_twice() {
    for (name, device) in devices() {
        let (weights, _) = hash_route(
            integers(&[0], [1], device),
            integers(&[1, 1], [1, 2], device),
            HashWeights::Scored(floats(&[3.0, -2.0], [1, 2], device)),
            3.0,
        )
        .expect("arguments that fit");
        assert_close(&values(weights), &[1.5, 1.5], relative(1e-6), name);
    }
}

fn no_tokens_give_no_rows() {
    for (name, device) in devices() {
        let none = || Tensor::<2>::zeros([0, 8], device);
        let (best, ids) = topk_select(none(), 3).expect("arguments that fit");
        assert_eq!((best.dims(), ids.dims()), ([0, 3], [0, 3]), "{name}");
        let (weights, ids) =
            activation_topk(none(), None, None, 3, 1.0).expect("arguments that fit");
        assert_eq!((weights.dims(), ids.dims()), ([0, 3], [0, 3]), "{name}");
        let tokens = integers(&[], [0], device);
        let table = integers(&[0, 1, 2], [1, 3], device);
        let (weights, ids) = hash_route(tokens, table, HashWeights::Scored(none()), 1.0)
            .expect("arguments that fit");
        assert_eq!((weights.dims(), ids.dims()), ([0, 3], [0, 3]), "{name}");
        assert!(values(weights).is_empty() && integer_values(ids).is_empty());
    }
}

catalogue![
    sqrt_softplus_has_the_values_worked_out_by_hand,
    sqrt_softplus_keeps_its_precision_from_minus_200_to_200,
    sqrt_softplus_of_infinities_and_nan_is_documented,
    topk_select_sorts_by_value_then_id_whatever_the_row_holds,
    topk_select_agrees_with_a_sort_for_every_number_of_experts,
    activation_topk_agrees_with_the_oracle_for_every_number_of_experts,
    the_bias_chooses_but_does_not_weigh,
    weights_stay_finite_where_the_activations_underflow,
    nan_logits_are_chosen_last_and_spoil_only_their_own_row,
    an_expert_that_is_masked_out_goes_before_one_that_is_nan,
    no_width_gives_equal_scores,
    hash_route_looks_the_experts_up_and_weighs_them_by_score,
    hash_route_reads_ids_out_of_range_as_the_nearest_in_range,
    an_expert_that_the_table_names_twice_counts_twice,
    no_tokens_give_no_rows,
];
