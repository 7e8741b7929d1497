//! Top-k of random rows, windows and dtypes against a sort.

use super::common::{compiles_slowly, devices};
use super::distributions::{DISTRIBUTIONS, Periodic, Random, row};
use super::ranking::{Rows, assert_ids, int32};
use burn::tensor::{Device, FloatDType};
use burn_ds4_ops::topk::{top_k_per_row, top_k_per_row_decode};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

/// What a row consists of.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// By its place among [`DISTRIBUTIONS`].
    Distribution(usize),
    Periodic(Periodic),
    /// So many values.
    Values(usize),
}

#[derive(Clone, Debug)]
struct Case {
    shape: (usize, usize),
    dtype: FloatDType,
    seed: u64,
    /// Kind and bounds of each row.
    rows: Vec<(Kind, (i32, i32))>,
    next_n: usize,
}

fn kind() -> impl Strategy<Value = Kind> {
    let periodic =
        (2..3000_usize, 1..130_usize, any::<bool>()).prop_flat_map(|(period, run, inverse)| {
            (0..period).prop_map(move |phase| {
                Kind::Periodic(Periodic {
                    period,
                    phase,
                    run: run.min(period - 1),
                    inverse,
                })
            })
        });
    prop_oneof![
        4 => (0..DISTRIBUTIONS.len()).prop_map(Kind::Distribution),
        2 => periodic,
        1 => (1..50_usize).prop_map(Kind::Values),
    ]
}

/// Mostly within the row or next to its ends.
fn bounds(columns: usize) -> impl Strategy<Value = (i32, i32)> {
    let columns = columns as i32;
    let start = prop_oneof![
        3 => Just(0),
        3 => 0..columns + 1,
        1 => -3..columns + 3,
        1 => any::<i32>(),
    ];
    let end = prop_oneof![
        3 => Just(columns),
        3 => 0..columns + 1,
        1 => -3..columns + 3,
        1 => any::<i32>(),
    ];
    (start, end)
}

fn case(
    shape: impl Strategy<Value = (usize, usize)>,
    dtypes: Vec<FloatDType>,
) -> impl Strategy<Value = Case> {
    let parts = (
        shape,
        proptest::sample::select(dtypes),
        any::<u32>(),
        1..4_usize,
        1..5_usize,
    );
    parts.prop_flat_map(|(shape, dtype, seed, next_n, batch)| {
        let rows = proptest::collection::vec((kind(), bounds(shape.0)), batch * next_n);
        rows.prop_map(move |rows| Case {
            shape,
            dtype,
            seed: seed.into(),
            rows,
            next_n,
        })
    })
}

fn data(kind: Kind, columns: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    match kind {
        Kind::Distribution(index) => row(DISTRIBUTIONS[index], columns, seed),
        Kind::Periodic(periodic) => periodic.row(columns, &mut random),
        Kind::Values(count) => {
            let values: Vec<f32> = (0..count).map(|_| random.normal()).collect();
            (0..columns).map(|_| values[random.index(count)]).collect()
        }
    }
}

fn check(case: &Case, name: &str, device: &Device) {
    let ((columns, k), count) = (case.shape, case.rows.len());
    let seeds = case.seed..;
    let logits = case.rows.iter().zip(seeds);
    let logits = logits.flat_map(|((kind, _), seed)| data(*kind, columns, seed));
    let rows = Rows::of_dtype(columns, logits.collect(), case.dtype);
    let bounds = |bound: fn(&(i32, i32)) -> i32| -> Vec<i64> {
        let bounds = case.rows.iter().map(|(_, bounds)| bound(bounds));
        bounds.map(i64::from).collect()
    };
    let (starts, ends) = (bounds(|b| b.0), bounds(|b| b.1));
    let windows: Vec<_> = (0..count)
        .map(|row| super::ranking::window(starts[row], ends[row], columns))
        .collect();
    let ids = top_k_per_row(
        rows.tensor(count, device),
        int32(&starts, [count], device),
        int32(&ends, [count], device),
        k,
    )
    .expect("arguments that fit");
    assert_ids(ids, &rows.ids(&windows, k), name);

    let next_n = case.next_n;
    let lengths = &ends[..count / next_n];
    let windows: Vec<_> = (0..count)
        .map(|row| {
            let end = lengths[row / next_n] - next_n as i64 + (row % next_n) as i64 + 1;
            super::ranking::window(0, end, columns)
        })
        .collect();
    let ids = top_k_per_row_decode(
        rows.tensor(count, device),
        int32(lengths, [lengths.len()], device),
        next_n,
        k,
    )
    .expect("arguments that fit");
    assert_ids(ids, &rows.ids(&windows, k), &format!("{name}: decode"));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        rng_seed: RngSeed::Fixed(0),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    // On the first device only: every other shape is another kernel to build on a GPU.
    #[test]
    fn any_shape_agrees_with_a_sort(
        case in case(
            (1..3000_usize, 1..700_usize),
            vec![FloatDType::F32, FloatDType::F16, FloatDType::BF16],
        )
    ) {
        let (name, device) = &devices()[0];
        check(&case, name, device);
    }
}

fn any_rows_agree_with_a_sort_on_every_device() {
    let shapes = vec![(37, 5), (1500, 64), (5000, 512), (12_000, 512)];
    for (name, device) in devices() {
        let mut runner = TestRunner::new(ProptestConfig {
            cases: if compiles_slowly(name) { 14 } else { 40 },
            rng_seed: RngSeed::Fixed(0),
            failure_persistence: None,
            max_shrink_iters: 200,
            ..ProptestConfig::default()
        });
        let dtypes = [FloatDType::F32, FloatDType::F16].into_iter();
        let dtypes = dtypes
            .filter(|&dtype| device.supports_dtype(dtype))
            .collect();
        let cases = case(proptest::sample::select(shapes.clone()), dtypes);
        let result = runner.run(&cases, |case| {
            check(&case, name, device);
            Ok(())
        });
        if let Err(error) = result {
            panic!("{name}: {error}");
        }
    }
}

catalogue![any_rows_agree_with_a_sort_on_every_device];
