//! Routing at the shapes, dtypes and layouts that choose between the ways the kernels are built.

use burn::tensor::{Bool, DType, Device, FloatDType, IntDType, Tensor, TensorData};
use burn_ds4_ops::device::is_host;
use burn_ds4_ops::router::{HashWeights, activation_topk, dense_router, hash_route, topk_select};

use super::common::{
    FLOATS, compiles_slowly, devices, every_dtype, floats, integer_values, integers, noise,
    rounded, skip, some, values, wide,
};
use super::products::{assert_same_bits, every_pair};
use super::routing::{FROM_LOGITS, FROM_PRODUCTS, assert_routed, assert_weights, products};

const SCALE: f64 = 2.5;

fn mask(padding: &[bool], device: &Device) -> Tensor<1, Bool> {
    Tensor::from_data(TensorData::new(padding.to_vec(), [padding.len()]), device)
}

fn logits(count: usize, seed: u32) -> Vec<f32> {
    noise(count, seed).into_iter().map(|v| v * 9.0).collect()
}

fn check_activation_topk(
    (rows, experts, k): (usize, usize, usize),
    (name, device, dtype): (&str, &Device, FloatDType),
) {
    let what = format!("{name} [{rows}, {experts}] k {k}");
    let (on_device, held) = rounded(&logits(rows * experts, 3), [rows, experts], dtype, device);
    let bias = noise(experts, 4);
    let bias_on_device = floats(&bias, [experts], device);
    let (weights, ids) = activation_topk(on_device, Some(bias_on_device), None, k, SCALE)
        .expect("arguments that fit");
    assert_eq!(
        (weights.dtype(), ids.dtype()),
        (DType::F32, DType::I32),
        "{what}"
    );
    let (ids, weights) = (integer_values(ids), values(weights));
    let routed = (&ids[..], &weights[..]);
    assert_routed(&held, &wide(&bias), routed, (k, SCALE), FROM_LOGITS, &what);
}

fn activation_topk_takes_any_number_of_experts_and_any_k() {
    // One in three stands for the others: lanes that list all of their part, a row that takes
    // several iterations, one that lanes share evenly, vectors of two, and more ranks than a kernel
    // takes.
    let shapes = [
        (3, 7, 7),
        (1, 1, 1),
        (5, 42, 5),
        (2, 2500, 6),
        (4, 100, 6),
        (2, 144, 8),
        (7, 256, 16),
        (1, 256, 6),
        (6, 384, 6),
        (2, 30, 30),
        (3, 384, 16),
        (2, 1024, 16),
        (2, 64, 33),
        (2, 64, 32),
    ];
    every_dtype(|name, device, dtype| {
        let step = if dtype == FloatDType::F32 { 3 } else { 6 };
        for &shape in some(name, &shapes, step) {
            check_activation_topk(shape, (name, device, dtype));
        }
    });
}

fn activation_topk_takes_thousands_of_rows() {
    let shapes = [
        (2048, 256, 6),
        (2047, 64, 6),
        (2051, 100, 16),
        (4099, 384, 6),
        // A plane works on four rows.
        (8195, 64, 6),
    ];
    for (name, device) in devices() {
        // Other tests have thousands of rows that lanes share unevenly, and more ranks.
        for &shape in some(name, &shapes, 4) {
            check_activation_topk(shape, (name, device, FloatDType::F32));
        }
    }
}

fn equal_scores_go_to_the_lower_id_whoever_reads_them() {
    let shapes = [(2500, 256, 16), (3, 256, 32), (2, 1000, 17)];
    for (name, device) in devices() {
        for &(rows, columns, k) in some(name, &shapes, shapes.len()) {
            let what = format!("{name} [{rows}, {columns}] k {k}");
            // Few distinct values: every choice is decided by position.
            let scores: Vec<f32> = noise(rows * columns, 8)
                .into_iter()
                .map(|v| (v * 1.4).round())
                .collect();
            let expected: Vec<i64> = scores
                .chunks(columns)
                .flat_map(|row| {
                    let mut ids: Vec<usize> = (0..columns).collect();
                    ids.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
                    ids.into_iter().take(k).map(|id| id as i64)
                })
                .collect();
            let (_, ids) = topk_select(floats(&scores, [rows, columns], device), k)
                .expect("arguments that fit");
            assert_eq!(integer_values(ids), expected, "{what}");
            let bias = floats(&scores[..columns], [columns], device);
            let none = Tensor::zeros([rows, columns], device);
            let (_, ids) =
                activation_topk(none, Some(bias), None, k, 1.0).expect("arguments that fit");
            assert_eq!(
                integer_values(ids),
                expected[..k].repeat(rows),
                "{what}: bias"
            );
        }
    }
}

fn one_lane_can_hold_all_of_the_best() {
    for (name, device) in devices() {
        for &rows in some(name, &[2100, 2], 2) {
            let (columns, k) = (256, 8);
            // Ascending in steps of any power of two that a plane may have, so that some lane sees
            // nothing but winners.
            for step in [2, 4, 8, 32, 64] {
                let row: Vec<f32> = (0..columns)
                    .map(|i| {
                        if i % step == 0 {
                            100.0 + i as f32
                        } else {
                            -1.0
                        }
                    })
                    .collect();
                let mut expected: Vec<usize> = (0..columns).collect();
                expected.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
                let expected: Vec<i64> = expected[..k].iter().map(|&id| id as i64).collect();
                let (_, ids) = topk_select(floats(&row.repeat(rows), [rows, columns], device), k)
                    .expect("arguments that fit");
                assert_eq!(
                    integer_values(ids),
                    expected.repeat(rows),
                    "{name} step {step}"
                );
            }
        }
    }
}

fn topk_select_works_along_the_last_of_many_dimensions() {
    every_dtype(|name, device, dtype| {
        let (scores, held) = rounded(&noise(2 * 3 * 50, 6), [2, 3, 50], dtype, device);
        let (best, ids) = topk_select(scores.clone(), 4).expect("arguments that fit");
        assert_eq!(
            (best.dims(), best.dtype()),
            ([2, 3, 4], scores.dtype()),
            "{name}"
        );
        let ids = integer_values(ids);
        let best = values(best.cast(FloatDType::F32));
        for (row, (ids, best)) in ids.chunks(4).zip(best.chunks(4)).enumerate() {
            let mut sorted: Vec<(f64, usize)> = (0..50).map(|i| (held[row * 50 + i], i)).collect();
            sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for rank in 0..4 {
                let (value, id) = sorted[rank];
                let found = (f64::from(best[rank]), ids[rank]);
                assert_eq!(found, (value, id as i64), "{name} row {row} rank {rank}");
            }
        }
    });
}

fn rows_of_a_wider_tensor_and_transposed_ones_are_read_in_place_or_copied() {
    for (name, device) in devices() {
        let (rows, experts, k) = (9, 64, 6);
        let all = logits(rows * 96, 12);
        let tensor = floats(&all, [rows, 96], device);
        let bias = vec![0.0; experts];
        let sliced: Vec<f64> = all.chunks(96).flat_map(|row| wide(&row[32..])).collect();
        let transposed: Vec<f64> = (0..rows * experts)
            .map(|i| f64::from(all[i % experts * rows + i / experts]))
            .collect();
        let views = [
            ("slice", tensor.slice([0..rows, 32..96]), sliced),
            (
                "transpose",
                floats(&all[..rows * experts], [experts, rows], device).transpose(),
                transposed,
            ),
        ];
        for (view, tensor, held) in views {
            let (weights, ids) =
                activation_topk(tensor, None, None, k, SCALE).expect("arguments that fit");
            let (ids, weights) = (integer_values(ids), values(weights));
            let what = format!("{name} {view}");
            let routed = (&ids[..], &weights[..]);
            assert_routed(&held, &bias, routed, (k, SCALE), FROM_LOGITS, &what);
        }
    }
}

fn padding_rows_are_blank_and_disturb_nobody() {
    for (name, device) in devices() {
        // Of many rows, a plane works on several.
        for &rows in some(name, &[2200, 5], 2) {
            let (experts, k) = (100, 6);
            let mut data = logits(rows * experts, 21);
            let padding: Vec<bool> = (0..rows).map(|row| row % 3 == 1).collect();
            let plain = {
                let tensor = floats(&data, [rows, experts], device);
                let (weights, ids) =
                    activation_topk(tensor, None, None, k, SCALE).expect("arguments that fit");
                (values(weights), integer_values(ids))
            };
            for (row, padded) in data.chunks_mut(experts).zip(&padding) {
                if *padded {
                    row.fill(f32::NAN);
                }
            }
            let tensor = floats(&data, [rows, experts], device);
            let mask = mask(&padding, device);
            let (weights, ids) =
                activation_topk(tensor, None, Some(mask), k, SCALE).expect("arguments that fit");
            let (weights, ids) = (values(weights), integer_values(ids));
            for (row, padded) in padding.iter().enumerate() {
                let part = row * k..(row + 1) * k;
                let found = (&weights[part.clone()], &ids[part.clone()]);
                let expected = if *padded {
                    (&[0.0; 6][..], &[-1; 6][..])
                } else {
                    (&plain.0[part.clone()], &plain.1[part])
                };
                assert_eq!(found, expected, "{name} row {row} of {rows}");
            }
        }
    }
}

fn check_dense_router(
    (tokens, experts, d_model): (usize, usize, usize),
    k: usize,
    (name, device): (&str, &Device),
    (x_dtype, gate_dtype): (FloatDType, FloatDType),
) {
    let what = format!("{name} x {x_dtype:?} gate {gate_dtype:?} [{tokens}, {experts}, {d_model}]");
    let (x, x_held) = rounded(
        &noise(tokens * d_model, 31),
        [tokens, d_model],
        x_dtype,
        device,
    );
    let step = (6.0 / d_model as f32).sqrt() * 3.0;
    let gate: Vec<f32> = noise(experts * d_model, 32)
        .into_iter()
        .map(|v| v * step)
        .collect();
    let (gate, gate_held) = rounded(&gate, [experts, d_model], gate_dtype, device);
    let bias = noise(experts, 33);
    let held = products(&x_held, &gate_held, d_model);
    // Repeated, because a launch has to leave its scratch as it found it.
    for _ in 0..2 {
        let bias_on_device = floats(&bias, [experts], device);
        let (weights, ids) = dense_router(
            x.clone(),
            gate.clone(),
            Some(bias_on_device),
            None,
            k,
            SCALE,
        )
        .expect("arguments that fit");
        let (ids, weights) = (integer_values(ids), values(weights));
        let routed = (&ids[..], &weights[..]);
        assert_routed(
            &held,
            &wide(&bias),
            routed,
            (k, SCALE),
            FROM_PRODUCTS,
            &what,
        );
    }
}

fn dense_router_agrees_with_the_oracle_for_few_tokens_and_many() {
    // One in four stands for the others: single elements and vectors, many cubes that divide
    // `d_model` and several that divide the tokens.
    let shapes = [
        (5, 7, 33),
        (3, 42, 50),
        (2, 100, 96),
        (1, 256, 512),
        (11, 256, 4096),
        (1, 8, 64),
        (8, 384, 1024),
        (16, 144, 2048),
        (70, 100, 128),
        (17, 256, 256),
    ];
    for (name, device) in devices() {
        for &shape in some(name, &shapes, 4) {
            let f32 = FloatDType::F32;
            check_dense_router(shape, 6, (name, device), (f32, f32));
        }
    }
}

fn dense_router_takes_every_pair_of_dtypes() {
    for (name, device) in devices() {
        for x in FLOATS {
            for gate in FLOATS {
                let lacking = [x, gate]
                    .into_iter()
                    .find(|&dtype| !device.supports_dtype(dtype));
                if let Some(dtype) = lacking {
                    skip(name, &format!("{dtype:?}").to_lowercase());
                    continue;
                }
                // A test below has more tokens and fewer, for pairs of one dtype.
                for &tokens in some(name, &[6, 1, 16, 33], 4) {
                    check_dense_router((tokens, 96, 1040), 6, (name, device), (x, gate));
                }
            }
        }
    }
}

fn dense_router_takes_thousands_of_tokens() {
    every_dtype(|name, device, dtype| {
        let device_name = name.split(' ').next().unwrap_or_default();
        let shapes = [(2100, 100, 104), (530, 96, 1040), (2050, 7, 33)];
        for &shape in some(name, &shapes, shapes.len()) {
            check_dense_router(shape, 6, (device_name, device), (dtype, dtype));
        }
    });
}

fn a_token_is_routed_alike_alone_and_among_others() {
    every_pair(|name, device, pair| {
        // Each number of tokens has a kernel for each pair. Of a pair, the division of the work
        // depends on the width of vectors alone, and pairs of one dtype have all widths.
        if compiles_slowly(name) && pair.0 != pair.1 {
            return;
        }
        let (tokens, experts, d_model, k) = (128, 96, 2048, 6);
        let x = floats(&noise(tokens * d_model, 41), [tokens, d_model], device).cast(pair.0);
        let gate = floats(&noise(experts * d_model, 42), [experts, d_model], device);
        let gate = gate.cast(pair.1);
        let route = |x: Tensor<2>| {
            let (weights, ids) =
                dense_router(x, gate.clone(), None, None, k, SCALE).expect("arguments that fit");
            (values(weights), integer_values(ids))
        };
        let one = |token: usize| route(x.clone().slice([token..token + 1, 0..d_model]));
        let alone: Vec<_> = (0..tokens).map(one).collect();
        // Rows that neither start at multiples of a vector nor are as far apart.
        let wider = Tensor::cat(vec![x.clone().slice([0..tokens, 0..3]), x.clone()], 1);
        let strided = wider.slice([0..tokens, 3..d_model + 3]);
        let step = if pair.0 == FloatDType::F32 { 4 } else { 8 };
        for &count in some(name, &[9, 2, 3, 128, 5, 8, 16, 33], step) {
            // Burn's product on the host adds many rows in another order.
            if is_host(device) && count > 16 {
                continue;
            }
            let alone = alone[..count].iter().cloned();
            let (each_weights, each_ids): (Vec<_>, Vec<_>) = alone.unzip();
            for (x, layout) in [(&x, "whole"), (&strided, "strided")] {
                let (weights, ids) = route(x.clone().slice([0..count, 0..d_model]));
                let what = format!("{name} {count} tokens, {layout}");
                assert_eq!(ids, each_ids.concat(), "{what}");
                assert_same_bits(&weights, &each_weights.concat(), &what);
            }
        }
    });
}

fn what_is_not_finite_stays_in_its_own_token() {
    for (name, device) in devices() {
        for &tokens in some(name, &[4, 20], 2) {
            let (experts, d_model, k) = (64, 1030, 6);
            let clean = noise(tokens * d_model, 51);
            let gate = floats(&noise(experts * d_model, 52), [experts, d_model], device);
            let route = |data: &[f32]| {
                let x = floats(data, [tokens, d_model], device);
                let (weights, ids) = dense_router(x, gate.clone(), None, None, k, SCALE)
                    .expect("arguments that fit");
                (values(weights), integer_values(ids))
            };
            let expected = route(&clean);
            let mut data = clean.clone();
            data[d_model + 3] = f32::NAN;
            data[2 * d_model + 1029] = f32::INFINITY;
            let (weights, ids) = route(&data);
            for token in 0..tokens {
                let part = token * k..(token + 1) * k;
                for &id in &ids[part.clone()] {
                    assert!((0..experts as i64).contains(&id), "{name}: id {id}");
                }
                if token == 1 || token == 2 {
                    continue;
                }
                let found = (&weights[part.clone()], &ids[part.clone()]);
                let expected = (&expected.0[part.clone()], &expected.1[part]);
                assert_eq!(found, expected, "{name} token {token}");
            }
            // All logits NaN: the lowest ids.
            assert_eq!(ids[k..2 * k], [0, 1, 2, 3, 4, 5], "{name}");
        }
    }
}

fn dense_router_reads_padding_and_views() {
    for (name, device) in devices() {
        for &tokens in some(name, &[3, 40], 2) {
            let (experts, d_model, k) = (64, 128, 4);
            let x = noise(tokens * d_model, 61);
            let gate = noise(experts * d_model, 62);
            let padding: Vec<bool> = (0..tokens).map(|token| token == 1).collect();
            let (weights, ids) = dense_router(
                floats(&transposed(&x, d_model), [d_model, tokens], device).transpose(),
                floats(&transposed(&gate, d_model), [d_model, experts], device).transpose(),
                None,
                Some(mask(&padding, device)),
                k,
                SCALE,
            )
            .expect("arguments that fit");
            let (ids, weights) = (integer_values(ids), values(weights));
            assert_eq!(ids[k..2 * k], [-1; 4], "{name}");
            assert_eq!(weights[k..2 * k], [0.0; 4], "{name}");
            let held = products(&wide(&x), &wide(&gate), d_model);
            for token in (0..tokens).filter(|&token| token != 1) {
                let part = token * k..(token + 1) * k;
                assert_routed(
                    &held[token * experts..(token + 1) * experts],
                    &vec![0.0; experts],
                    (&ids[part.clone()], &weights[part]),
                    (k, SCALE),
                    FROM_PRODUCTS,
                    &format!("{name} token {token}"),
                );
            }
        }
    }
}

/// Columns of a matrix with rows of `width`, one after the other.
fn transposed(matrix: &[f32], width: usize) -> Vec<f32> {
    let rows = matrix.len() / width;
    (0..matrix.len())
        .map(|i| matrix[i % rows * width + i / rows])
        .collect()
}

fn hash_route_takes_every_integer_and_float_dtype() {
    // One in five stands for the others: both dtypes of ids, vectors and single logits, and logits
    // that are read ahead and that are not.
    let mut cases = Vec::new();
    for tokens in [1, 40, 1500] {
        for shape in [(256, 6), (100, 5), (9, 1)] {
            cases.push((tokens, shape, IntDType::I32));
            cases.push((tokens, shape, IntDType::I64));
        }
    }
    every_dtype(|name, device, dtype| {
        let step = if dtype == FloatDType::F32 { 5 } else { 15 };
        for &(tokens, (experts, k), integer) in some(name, &cases, step) {
            let vocabulary = 300;
            let index = |count: usize, below: usize, seed| -> Vec<i64> {
                let uniform = noise(count, seed).into_iter();
                let scaled = uniform.map(|v| (v + 1.0) / 2.0 * below as f32);
                scaled.map(|v| v as i64).collect()
            };
            let token_ids = index(tokens, vocabulary, 71);
            let table = index(vocabulary * k, experts, 72);
            let (on_device, held) = rounded(
                &logits(tokens * experts, 73),
                [tokens, experts],
                dtype,
                device,
            );
            let rows = token_ids.iter().map(|&token| token as usize * k);
            let expected: Vec<i64> = rows.flat_map(|row| table[row..row + k].to_vec()).collect();
            let what = format!("{name} {integer:?} {tokens} tokens, {experts} experts, k {k}");
            let (weights, ids) = hash_route(
                integers(&token_ids, [tokens], device).cast(integer),
                integers(&table, [vocabulary, k], device).cast(integer),
                HashWeights::Scored(on_device),
                SCALE,
            )
            .expect("arguments that fit");
            assert_eq!(ids.dtype(), DType::I32, "{what}");
            let (ids, weights) = (integer_values(ids), values(weights));
            assert_eq!(ids, expected, "{what}");
            let routed = (&ids[..], &weights[..]);
            assert_weights(&held, experts, routed, (k, SCALE), FROM_LOGITS, &what);
        }
    });
}

fn uniform_hash_weights_are_the_scale_divided_by_k() {
    for (name, device) in devices() {
        for tokens in [2, 3000] {
            let token_ids: Vec<i64> = (0..tokens as i64).map(|token| token % 3 - 1).collect();
            let (weights, ids) = hash_route(
                integers(&token_ids, [tokens], device),
                integers(&[5, 1, 9, 2], [2, 2], device),
                HashWeights::Uniform { experts: 8 },
                3.0,
            )
            .expect("arguments that fit");
            let (ids, weights) = (integer_values(ids), values(weights));
            for (token, (ids, weights)) in ids.chunks(2).zip(weights.chunks(2)).enumerate() {
                // The 9 is no expert id.
                let expected = [
                    (&[-1, -1], &[0.0, 0.0]),
                    (&[5, 1], &[1.5, 1.5]),
                    (&[7, 2], &[1.5, 1.5]),
                ][token % 3];
                assert_eq!((ids, weights), (&expected.0[..], &expected.1[..]), "{name}");
            }
        }
    }
}

catalogue![
    activation_topk_takes_any_number_of_experts_and_any_k,
    activation_topk_takes_thousands_of_rows,
    equal_scores_go_to_the_lower_id_whoever_reads_them,
    one_lane_can_hold_all_of_the_best,
    topk_select_works_along_the_last_of_many_dimensions,
    rows_of_a_wider_tensor_and_transposed_ones_are_read_in_place_or_copied,
    padding_rows_are_blank_and_disturb_nobody,
    dense_router_agrees_with_the_oracle_for_few_tokens_and_many,
    dense_router_takes_every_pair_of_dtypes,
    dense_router_takes_thousands_of_tokens,
    a_token_is_routed_alike_alone_and_among_others,
    what_is_not_finite_stays_in_its_own_token,
    dense_router_reads_padding_and_views,
    hash_route_takes_every_integer_and_float_dtype,
    uniform_hash_weights_are_the_scale_divided_by_k,
];
