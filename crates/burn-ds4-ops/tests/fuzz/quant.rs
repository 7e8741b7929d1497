//! Packed weights, products by them, and round trips through FP8 and FP4.

use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor};
use burn_ds4_ops::OpError;
use burn_ds4_ops::matmul::{SmallMOptions, small_m_matmul_group};
use burn_ds4_ops::quant::{
    FP4_BLOCK, Fp4Layout, Weights, fp4_roundtrip, fp8_roundtrip, hadamard, quant_linear,
    quant_linear_group,
};

use super::super::common::{EXACT, assert_close, half_unit, narrow, read, values};
use super::super::linear::Input;
use super::super::packing::{DENSE, FP4, FP8, FP8_PAIR, Format, Packed, REPACKED_FP4, fp8_blocks};
use super::super::products::assert_same_bits;
use super::draw::Draw;

pub fn quant(data: &[u8]) {
    let draw = &mut Draw::new(data);
    match draw.below(5) {
        0 => decoded(draw),
        1 => round_trips(draw),
        2 => words(draw),
        3 => group(draw),
        _ => product(draw),
    }
}

/// Any code and any scale, against the tables.
fn decoded(draw: &mut Draw) {
    let shape = [draw.size(3), 2 * draw.size(4), draw.size(70)];
    let count: usize = shape.iter().product();
    let packed = if draw.one_in(2) {
        let parts = draw.pick(&[1, 2]);
        let scales: usize = fp8_blocks(shape, parts).iter().product();
        let codes = (0..count).map(|_| draw.below(256) as u8).collect();
        Packed::fp8(shape, parts, codes, draw.rows(1, scales).values)
    } else {
        let scales = shape[0] * shape[1] * shape[2].div_ceil(FP4_BLOCK);
        let codes = (0..count).map(|_| draw.below(16) as u8).collect();
        let scales = (0..scales).map(|_| draw.below(256) as u8).collect();
        Packed::fp4(shape, codes, scales)
            .in_layout(draw.pick(&[Fp4Layout::Plain, Fp4Layout::Repacked]))
    };
    let weights = packed.on(&Device::flex());
    assert_eq!(weights.dims(), shape);
    let actual = weights.dequantize(FloatDType::F32).expect("Flex has it");
    assert_eq!(actual.dims(), shape);
    let expected: Vec<f64> = (0..shape[0]).flat_map(|one| packed.matrix(one)).collect();
    assert_close(&values(actual), &narrow(&expected), EXACT, "decoded");
}

/// Shapes that need not fit.
fn words(draw: &mut Draw) {
    let [count, rows, columns] = [draw.size(2), draw.size(5), draw.size(300)];
    let columns_given = draw.pick(&[columns, columns, columns + 1, 0, usize::MAX]);
    let parts = draw.pick(&[1, 2, 0, usize::MAX]);
    let fp8 = draw.one_in(2);
    let per_word = if fp8 { 4 } else { 8 };
    let width = columns.div_ceil(per_word);
    let words = Tensor::<3, Int>::zeros([count, rows, width], &Device::flex());
    let words = words.cast(IntDType::U32);
    if fp8 {
        let [_, block_rows, block_columns] = match parts {
            1 | 2 => fp8_blocks([count, rows, columns], parts),
            _ => [count, 1, 1],
        };
        let scales = Tensor::ones([count, block_rows, block_columns], &Device::flex());
        let weights = Weights::fp8(words, scales, columns_given, parts);
        check_dims(weights, [count, rows, columns_given]);
    } else {
        let scales = (rows * columns.div_ceil(FP4_BLOCK)).div_ceil(4);
        let scales = Tensor::<2, Int>::zeros([count, scales], &Device::flex());
        let scales = scales.cast(IntDType::U32);
        check_dims(
            Weights::fp4(words, scales, columns_given, Fp4Layout::Plain),
            [count, rows, columns_given],
        );
    }
}

fn check_dims(weights: Result<Weights, OpError>, shape: [usize; 3]) {
    if let Ok(weights) = weights {
        assert_eq!(weights.dims(), shape);
        let decoded = weights.dequantize(FloatDType::F32).expect("Flex has it");
        assert_eq!(decoded.dims(), shape);
    }
}

fn product(draw: &mut Draw) {
    let [rows, out, columns] = [draw.size(5), 2 * draw.size(4), draw.size(140)];
    let formats: [Format; 7] = [
        FP4,
        REPACKED_FP4,
        FP8,
        FP8_PAIR,
        DENSE[0],
        DENSE[1],
        DENSE[2],
    ];
    let (format, matrices) = (draw.pick(&formats), draw.pick(&[1, 1, 1, 1, 0, 2]));
    let packed = Packed::random(format, [matrices, out, columns], draw.seed());
    let x = draw.rows(rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&x.values, [rows, columns], dtype);
    let product = quant_linear(tensor, &packed.on(&Device::flex()));
    let Some(product) = draw.settle(product, matrices == 1) else {
        return;
    };
    assert_eq!(
        (product.dims(), product.dtype()),
        ([rows, out], dtype.into())
    );
    let actual = read(&product);
    for row in (0..rows).filter(|&row| x.tame[row]) {
        let input = Input::new([1, columns], dtype, &held[row * columns..][..columns]);
        input.check(&packed, &actual[row * out..][..out], "flex");
    }
}

/// A pair and some dense matrices by one x.
fn group(draw: &mut Draw) {
    let [rows, columns] = [draw.size(4) * draw.pick(&[1, 1, 5]), draw.size(40)];
    let formats = [FP4, REPACKED_FP4, FP8, FP8_PAIR, DENSE[0]];
    let odd = draw.pick(&[0, 0, 0, 1]);
    let shape = |draw: &mut Draw, odd| [1, 2 * draw.size(4), columns + odd];
    let shapes = [shape(draw, 0), shape(draw, odd)];
    let packed = shapes.map(|shape| Packed::random(draw.pick(&formats), shape, draw.seed()));
    let x = draw.rows(rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&x.values, [rows, columns], dtype);
    let dense: Vec<_> = (0..draw.below(3))
        .map(|_| {
            let (out, of) = (draw.size(7), draw.dtype());
            let values = draw.tame_values(out * columns);
            draw.tensor(&values, [out, columns], of).0
        })
        .collect();
    let [first, second] = packed.each_ref().map(|packed| packed.on(&Device::flex()));
    let options = SmallMOptions {
        f32_output: draw.one_in(2),
        invariant_rows: draw.pick(&[16, 64, 15]),
    };
    let fits = odd == 0 && options.invariant_rows != 15;
    let result = quant_linear_group(tensor.clone(), [&first, &second], &dense, options);
    let Some((pair, products)) = draw.settle(result, fits) else {
        return;
    };
    for (product, packed) in pair.iter().zip(&packed) {
        let [_, out, _] = packed.shape();
        assert_eq!(
            (product.dims(), product.dtype()),
            ([rows, out], dtype.into())
        );
        let actual = read(product);
        for row in (0..rows).filter(|&row| x.tame[row]) {
            let input = Input::new([1, columns], dtype, &held[row * columns..][..columns]);
            input.check(packed, &actual[row * out..][..out], "flex");
        }
    }
    // Their values have a fuzzer of their own.
    let alone = small_m_matmul_group(tensor, &dense, options).expect("what fits fits alone");
    for (product, alone) in products.iter().zip(&alone) {
        assert_same_bits(&read(product), &read(alone), "dense");
    }
}

fn round_trips(draw: &mut Draw) {
    let (rows, columns) = (draw.size(4), draw.size(40));
    let block = draw.pick(&[1, 7, 32, 64, 0, usize::MAX]);
    let x = draw.rows(rows, columns);
    let dtype = draw.dtype();
    let (tensor, held) = draw.tensor(&x.values, [rows, columns], dtype);
    // Bits of a mantissa, and the largest code.
    type RoundTrip = fn(Tensor<2>, usize) -> Result<Tensor<2>, OpError>;
    let formats: [(RoundTrip, f32, f32); 2] =
        [(fp8_roundtrip, 16.0, 448.0), (fp4_roundtrip, 4.0, 6.0)];
    for (round_trip, steps, largest) in formats {
        let Some(rounded) = draw.settle(round_trip(tensor.clone(), block), block > 0) else {
            continue;
        };
        let rounded = read(&rounded);
        for (rounded, held) in rounded.iter().zip(&held) {
            if !held.is_finite() {
                assert!(rounded == held || (rounded.is_nan() && held.is_nan()));
            }
        }
        for row in (0..rows).filter(|&row| x.tame[row]) {
            let slots = row * columns..(row + 1) * columns;
            let highest = held[slots.clone()]
                .iter()
                .fold(1e-4, |m: f32, v| m.max(v.abs()));
            for (rounded, v) in rounded[slots.clone()].iter().zip(&held[slots]) {
                let step = 2.0 * highest / largest;
                let unit = half_unit(dtype) as f32 * v.abs();
                assert!(
                    (rounded - v).abs() <= v.abs() / steps + step + unit,
                    "{rounded} of {v}"
                );
            }
        }
    }
    let turned = hadamard(tensor);
    let Some(turned) = draw.settle(turned, columns.is_power_of_two()) else {
        return;
    };
    let back = read(&hadamard(turned).expect("the same shape"));
    for row in (0..rows).filter(|&row| x.tame[row]) {
        for column in row * columns..(row + 1) * columns {
            let error = f64::from((back[column] - held[column]).abs());
            assert!(error <= 1e-5 + 64.0 * half_unit(dtype), "{error}");
        }
    }
}
