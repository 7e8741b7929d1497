//! What DeepSeek-V4.1 rounds and computes otherwise than V4: by hand-made values, against searches
//! of code tables, and against the operators that parts of it make together.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_ds4_ops::attention::{
    CachedQueries, CachedWindow, CompressionInputs, NewRows, PooledBlocks, RowRounding,
    SHARED_BLOCK, WHOLE_BLOCK, WindowLayout, append_rows, cached_attention, compress_rows,
    pool_blocks, store_blocks,
};
use burn_ds4_ops::hyper_connection::{Norm, Streams, collapse_norm_late, end_late, expand};
use burn_ds4_ops::norm::rms_norm;
use burn_ds4_ops::quant::{
    Activations, Weights, fp4_roundtrip, fp4_scaled_roundtrip, fp8_roundtrip, quant_linear,
};

use super::common::{
    EXACT, absolute, assert_close, devices, floats, narrow, noise, read, values, wide,
};
use super::compressing::{Case as Compressor, EPSILON, Sizes, round};
use super::mixing::{Case, SINKHORN};
use super::sums::Sum;
use super::tables::{E2M1, E4M3};

fn fp4_values_have_a_scale_that_is_rounded_itself() {
    // A sixth of the largest becomes 1.125, the least scale of 2^-9, and the largest of 448.
    let small = 2f32.powi(-9);
    let x = [
        [6.6, 1.0, -2.9, 0.28, 3.94, 2.8],
        [
            1.5 * small,
            0.25 * small,
            0.75 * small,
            -4.9 * small,
            0.0,
            0.1 * small,
        ],
        [3000.0, 2688.0, -1100.0, 100.0, 112.0, 560.0],
    ];
    let expected = [
        [6.75, 1.125, -3.375, 0.0, 4.5, 2.25],
        [1.5 * small, 0.0, small, -4.0 * small, 0.0, 0.0],
        [2688.0, 2688.0, -896.0, 0.0, 0.0, 448.0],
    ];
    for (name, device) in devices() {
        let x = floats(&x.concat(), [3, 6], device);
        let actual = values(fp4_scaled_roundtrip(x, SHARED_BLOCK).unwrap());
        assert_close(&actual, &expected.concat(), EXACT, name);
    }
}

/// The nearest of some codes in their order, of two the one with the even code.
fn nearest(codes: &[f64], x: f64) -> f64 {
    let far = |code: &usize| (codes[*code] - x).abs();
    let order = |a: &usize, b: &usize| far(a).total_cmp(&far(b)).then((a % 2).cmp(&(b % 2)));
    codes[(0..codes.len()).min_by(order).unwrap()]
}

fn fp4_blocks_with_e4m3_scales_equal_a_search_of_both_tables() {
    let (scales, codes) = (&E4M3[..127], &E2M1[..8]);
    let magnitudes = noise(40 * 37, 5).into_iter().enumerate();
    let x = magnitudes.map(|(at, x)| x * 2f32.powi((at / 37) as i32 - 20));
    let x: Vec<f32> = x.collect();
    for block in [16, 5, 64] {
        let expected = x.chunks(37).flat_map(|row| row.chunks(block));
        let expected = expected.flat_map(|block| {
            let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let scale = nearest(scales, f64::from(largest.max(6.0 * 2f32.powi(-9)) / 6.0));
            block.iter().map(move |x| {
                let magnitude = (x.abs() / scale as f32).min(6.0);
                (nearest(codes, f64::from(magnitude)) * scale).copysign(f64::from(*x)) as f32
            })
        });
        let expected: Vec<f32> = expected.collect();
        for (name, device) in devices() {
            let x = floats(&x, [40, 37], device);
            let actual = values(fp4_scaled_roundtrip(x, block).unwrap());
            let what = format!("{name}, blocks of {block}");
            assert_close(&actual, &expected, EXACT, &what);
        }
    }
}

fn a_block_of_no_columns_and_other_dtypes_are_refused_by_name() {
    let device = &Device::flex();
    let error = fp4_scaled_roundtrip(Tensor::<2>::ones([1, 2], device), 0).unwrap_err();
    assert!(error.to_string().contains("block"), "{error}");
    let x = Tensor::<2>::ones([1, 2], device).cast(FloatDType::F64);
    assert!(fp4_scaled_roundtrip(x, 16).is_err());
}

fn products_round_their_inputs_in_blocks_of_32() {
    // The first block is smaller than the others.
    let small = |(at, x): (usize, f32)| if at % 96 < 32 { x / 50.0 } else { x };
    let x: Vec<f32> = noise(2 * 96, 1)
        .into_iter()
        .enumerate()
        .map(small)
        .collect();
    let weight = noise(3 * 96, 2);
    for (name, device) in devices() {
        let x = floats(&x, [2, 96], device);
        let dense = floats(&weight, [1, 3, 96], device);
        let weights = Weights::dense(dense).unwrap();
        let weights = weights.with_activations(Activations::Released32);
        let actual = values(quant_linear(x.clone(), &weights).unwrap());
        let rounded = fp8_roundtrip(x.clone(), 32).unwrap();
        // On the host: devices may multiply f32 in TF32.
        let rows = wide(&values(rounded.clone()));
        let matrix = wide(&weight);
        let product = |x: &[f64]| {
            let rows = matrix.chunks(96).map(|row| Sum::products(x, row).value);
            rows.collect::<Vec<_>>()
        };
        let expected: Vec<f64> = rows.chunks(96).flat_map(product).collect();
        assert_close(&actual, &narrow(&expected), absolute(1e-5), name);
        assert_ne!(
            values(fp8_roundtrip(x, 128).unwrap()),
            values(rounded),
            "{name}"
        );
    }
}

const SIZES: Sizes = Sizes {
    batch: 2,
    ratio: 2,
    overlap: false,
    width: 64,
    rotated: 16,
    slots: 5,
    positions: 21,
};

fn both_parts_of_a_compressor_make_what_it_makes() {
    let case = Compressor::new(SIZES, 3);
    for (name, device) in devices() {
        // From an odd position, of a vacant sequence, and of more blocks at a time.
        for (starts, count) in [([0, 0], 7), ([7, 2], 1), ([8, -1], 4), ([3, 12], 9)] {
            let (raw, rows) = case.empty(FloatDType::F32, device);
            let inputs = case.inputs(&starts, count, device);
            let positions = case.positions(&starts, device);
            let options = SIZES.options(RowRounding::Shared);
            let both = (inputs.clone(), positions.clone());
            let whole = compress_rows(both.0, both.1, options, raw.clone(), rows.clone());
            let whole = whole.expect("arguments that fit");
            let PooledBlocks { raw, rows: new } =
                pool_blocks(inputs, positions.clone(), raw).unwrap();
            let blocks = (SIZES.ratio, count);
            let rows = store_blocks(new, positions, blocks, RowRounding::Shared, rows).unwrap();
            let what = format!("{name}, {count} positions from {starts:?}");
            assert_close(&values(raw), &values(whole.raw), EXACT, &what);
            assert_close(&values(rows), &values(whole.rows), EXACT, &what);
        }
    }
}

fn arguments_of_the_parts_that_do_not_fit_are_named() {
    let (case, device) = (Compressor::new(SIZES, 5), &Device::flex());
    let positions = || case.positions(&[0, 0], device);
    let (raw, rows) = case.empty(FloatDType::F32, device);
    let inputs = CompressionInputs {
        norm: Tensor::ones([63], device),
        ..case.inputs(&[0, 0], 2, device)
    };
    let error = pool_blocks(inputs, positions(), raw)
        .unwrap_err()
        .to_string();
    assert!(error.contains("norm"), "{error}");
    let new = |blocks: usize| Tensor::<3>::ones([2, blocks, 64], device);
    let store = |new, blocks, rows: Tensor<3>| {
        let stored = store_blocks(new, positions(), blocks, RowRounding::Key, rows);
        stored.unwrap_err().to_string()
    };
    let error = store(new(2), (2, 2), rows.clone());
    assert!(error.contains("new"), "{error}");
    let error = store(new(1), (0, 1), rows.clone());
    assert!(error.contains("ratio"), "{error}");
    let error = store(new(5), (2, 10), rows.narrow(1, 0, 4));
    assert!(error.contains("complete blocks"), "{error}");
}

fn window_rows_are_rounded_over_all_channels() {
    for (name, device) in devices() {
        for (rounding, expected) in [
            (RowRounding::Whole, fp8_roundtrip::<3> as fn(_, _) -> _),
            (RowRounding::Shared, fp4_scaled_roundtrip::<3>),
            (RowRounding::Key, fp4_roundtrip::<3>),
        ] {
            let block = match rounding {
                RowRounding::Shared => SHARED_BLOCK,
                _ => WHOLE_BLOCK,
            };
            let new = |rounding| NewRows {
                x: floats(&noise(3 * 64, 6), [1, 3, 64], device),
                norm: floats(&noise(64, 7), [64], device),
                epsilon: EPSILON,
                rounding,
            };
            let case = Compressor::new(SIZES, 6);
            let stored = |rounding| {
                let positions = case.positions(&[2], device);
                append_rows(new(rounding), positions, Tensor::zeros([1, 8, 64], device)).unwrap()
            };
            let exact = stored(RowRounding::None);
            let by_hand = values(expected(exact.clone(), block).unwrap());
            let what = format!("{name}, {rounding:?}");
            // A kernel for rows that are not rounded may be off by one in the last place.
            let pairs = values(stored(rounding)).into_iter().zip(&by_hand);
            let differing = pairs.filter(|(a, b)| a != *b).count();
            assert!(differing <= 2, "{what}: {differing} values differ");
            assert_eq!(values(round(exact, rounding, 16)), by_hand, "{what}");
        }
    }
}

fn queries_may_be_attended_with_as_they_are() {
    for (name, device) in devices() {
        let queries = |x: Tensor<4>, epsilon| CachedQueries {
            x,
            epsilon,
            sinks: floats(&noise(3, 8), [3], device),
            scale: 0.125,
        };
        let window = || CachedWindow {
            rows: floats(&noise(8 * 64, 9), [1, 8, 64], device),
            layout: WindowLayout::Ring,
            span: 5,
            causal: true,
        };
        let case = Compressor::new(SIZES, 7);
        let positions = || case.positions(&[4], device);
        let x = floats(&noise(2 * 3 * 64, 10), [1, 2, 3, 64], device) * 3.0;
        let normed = rms_norm(x.clone(), None, EPSILON).unwrap();
        let as_is = cached_attention(queries(normed, None), positions(), window(), None).unwrap();
        let own = cached_attention(
            queries(x.clone(), Some(EPSILON)),
            positions(),
            window(),
            None,
        )
        .unwrap();
        assert_close(&values(as_is), &values(own.clone()), absolute(1e-5), name);
        let other = cached_attention(queries(x, None), positions(), window(), None).unwrap();
        let pairs = values(other).into_iter().zip(values(own));
        let far = pairs.filter(|(a, b)| (a - b).abs() > 1e-3).count();
        assert!(far > 10, "{name}: the norm of queries makes no difference");
    }
}

fn streams_are_collapsed_by_the_weights_of_the_connection_before() {
    for (name, device) in devices() {
        let case = Case::new(3, 4, 64, 1.0);
        let parameters = case.parameters(device);
        let streams = case.streams(device);
        let collapse = |streams: Streams| parameters.collapse_norm_late(streams, SINKHORN);
        // The first has nothing before it: all weight is the first stream's.
        let first = collapse(streams.clone().into());
        let tokens = case.streams.chunks(4 * 64);
        let expected: Vec<f32> = tokens.flat_map(|token| token[..64].to_vec()).collect();
        assert_close(&read(&first.input), &expected, EXACT, name);
        let own = parameters.collapse_norm(streams.clone().into(), SINKHORN);
        let packed = [&first, &own].map(|of| read(&of.coefficients.packed()));
        assert_eq!(packed[0], packed[1], "{name}");

        let output = floats(&noise(3 * 64, 12), [3, 64], device);
        let pending = Streams::Pending {
            output: output.clone(),
            streams: streams.clone(),
            coefficients: first.coefficients.clone(),
        };
        let spread = expand(output, streams, &first.coefficients).unwrap();
        let (x, pre) = (wide(&read(&spread)), wide(&read(&first.coefficients.pre())));
        let expected: Vec<f32> = (0..3 * 64)
            .map(|at| {
                let (token, channel) = (at / 64, at % 64);
                let stream = |n: usize| pre[token * 4 + n] * x[(token * 4 + n) * 64 + channel];
                (0..4).map(stream).sum::<f64>() as f32
            })
            .collect();
        let second = collapse(pending.clone());
        assert_close(&read(&second.input), &expected, absolute(1e-5), name);
        let normed = narrow(&case.normed(&wide(&read(&second.input))));
        assert_close(&read(&second.normed), &normed, absolute(1e-5), name);
        // The weights stay with streams that were changed meanwhile.
        let weighted = Streams::Weighted {
            pre: pending.pre(),
            streams: spread,
        };
        for streams in [pending, weighted] {
            let ended = values(end_late(streams).unwrap());
            assert_close(&ended, &expected, absolute(1e-5), name);
        }
    }
}

fn weights_that_do_not_fit_the_streams_are_refused() {
    let device = &Device::flex();
    let streams = Streams::Weighted {
        streams: Tensor::ones([2, 4, 8], device),
        pre: Tensor::ones([2, 3], device),
    };
    let error = end_late(streams).unwrap_err().to_string();
    assert!(error.contains("pre"), "{error}");
    let streams = |pre: Tensor<2>| Streams::Weighted {
        streams: Tensor::ones([2, 4, 8], device),
        pre,
    };
    let weights = Tensor::<2>::ones([2, 4], device);
    for pre in [
        weights.clone().cast(FloatDType::BF16),
        weights.narrow(1, 0, 3),
    ] {
        let norm = Norm {
            weight: Tensor::ones([8], device),
            epsilon: 1e-6,
        };
        let function = Tensor::ones([24, 32], device);
        let (base, scale) = (Tensor::ones([24], device), Tensor::ones([3], device));
        let collapsed = collapse_norm_late(streams(pre), function, base, scale, SINKHORN, norm);
        let error = collapsed.unwrap_err().to_string();
        assert!(error.contains("pre"), "{error}");
    }
    let none = Tensor::<3>::zeros([0, 2, 8], device);
    assert_eq!(end_late(none.into()).unwrap().dims(), [0, 8]);
}

catalogue![
    fp4_values_have_a_scale_that_is_rounded_itself,
    fp4_blocks_with_e4m3_scales_equal_a_search_of_both_tables,
    a_block_of_no_columns_and_other_dtypes_are_refused_by_name,
    products_round_their_inputs_in_blocks_of_32,
    both_parts_of_a_compressor_make_what_it_makes,
    arguments_of_the_parts_that_do_not_fit_are_named,
    window_rows_are_rounded_over_all_channels,
    queries_may_be_attended_with_as_they_are,
    streams_are_collapsed_by_the_weights_of_the_connection_before,
    weights_that_do_not_fit_the_streams_are_refused,
];
