//! Codecs in plain tensor operations: the readable truth. Arguments are validated by the caller; no
//! dimension is zero.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, TensorData};

use super::QuantOps;
use super::args::{Activations, FP4_BLOCK, PackedWeights, fp8_block};
use crate::dims::Dims;
use crate::gemm::Fp4Layout;
use crate::matmul::multiply_one;
use crate::reference::slice;
use crate::roundtrip::reference::roundtrip as rounded;
use crate::roundtrip::{SmallFloat, power_of_two};

/// E2M1 magnitudes, then the same with the sign bit.
const E2M1_VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Value of every E4M3 code.
fn e4m3_values() -> Vec<f32> {
    (0..=u8::MAX)
        .map(|code| {
            let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
            let magnitude = match (exponent, mantissa) {
                (15, 7) => f32::NAN,
                (0, _) => f32::from(mantissa) * power_of_two(-9),
                _ => f32::from(8 + mantissa) * power_of_two(i32::from(exponent) - 10),
            };
            if code < 128 { magnitude } else { -magnitude }
        })
        .collect()
}

/// Value of every E8M0 code: the byte is the biased exponent of an `f32`, except at both ends.
fn e8m0_values() -> Vec<f32> {
    (0..=u8::MAX)
        .map(|code| match code {
            0 => power_of_two(-126) / 2.0,
            255 => f32::NAN,
            _ => f32::from_bits(u32::from(code) << 23),
        })
        .collect()
}

/// The matrices `[count, out, in]` in `dtype`, rounded once.
pub(super) fn dequantize<B: Backend>(
    weights: PackedWeights<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let values = match weights {
        PackedWeights::Dense { values } => values,
        PackedWeights::Fp8 {
            words,
            scales,
            columns,
            parts,
        } => dequantize_fp8::<B>(words, scales, columns, parts),
        PackedWeights::Fp4 {
            words,
            scales,
            columns,
            layout,
        } => {
            let words = match layout {
                Fp4Layout::Plain => words,
                Fp4Layout::Repacked => plain::<B>(words),
            };
            dequantize_fp4::<B>(words, scales, columns)
        }
    };
    B::float_cast(values, dtype)
}

/// Rounds in blocks, in f32, to a small format and back.
pub(super) fn roundtrip<B: Backend>(
    x: FloatTensor<B>,
    block: usize,
    to: SmallFloat,
) -> FloatTensor<B> {
    let dtype = x.dtype().into();
    let x = B::float_cast(x, FloatDType::F32);
    B::float_cast(rounded::<B>(x, block, &to.format()), dtype)
}

/// The linear maps of the groups of `[tokens, groups, in]`, one after the other.
pub(super) fn grouped_linear<B: QuantOps>(
    x: FloatTensor<B>,
    weights: PackedWeights<B>,
    activations: Activations,
) -> FloatTensor<B> {
    let [tokens, groups, columns] = x.dims();
    let [_, out, _] = weights.dims();
    if groups > 1 {
        let products = (0..groups).map(|group| {
            let x = slice::<B>(x.clone(), 1, group..group + 1);
            B::grouped_linear(x, weights.one(group), activations)
        });
        return B::float_cat(products.collect(), 1);
    }
    let dtype = x.dtype().into();
    let x = input::<B>(
        B::float_reshape(x, Shape::new([tokens, columns])),
        activations,
    );
    let weight = match weights {
        // The product rounds neither operand.
        PackedWeights::Dense { values } => values,
        weights => dequantize::<B>(weights, dtype),
    };
    let weight = B::float_reshape(weight, Shape::new([out, columns]));
    let product = multiply_one::<B>(x, weight, dtype);
    B::float_reshape(product, Shape::new([tokens, 1, out]))
}

/// Rows of `x` as products take them.
pub(super) fn input<B: QuantOps>(x: FloatTensor<B>, activations: Activations) -> FloatTensor<B> {
    match activations.block() {
        None => x,
        Some(block) => B::roundtrip(x, block, SmallFloat::Fp8),
    }
}

/// The linear map of the rows `[rows, in]` of `x` by the one matrix of `weights`.
pub(crate) fn linear<B: QuantOps>(
    x: FloatTensor<B>,
    weights: PackedWeights<B>,
    activations: Activations,
) -> FloatTensor<B> {
    let ([rows, columns], [_, out, _]) = (x.dims(), weights.dims());
    let x = B::float_reshape(x, Shape::new([rows, 1, columns]));
    let product = B::grouped_linear(x, weights, activations);
    B::float_reshape(product, Shape::new([rows, out]))
}

fn dequantize_fp8<B: Backend>(
    words: IntTensor<B>,
    scales: FloatTensor<B>,
    columns: usize,
    parts: usize,
) -> FloatTensor<B> {
    let [count, rows, width] = words.dims();
    let [_, _, block_columns] = scales.dims();
    let part_rows = rows / parts;
    let block = fp8_block(scales.dims(), [rows, columns], parts).expect("checked by Weights::fp8");
    let block_rows = part_rows.div_ceil(block);
    let words = B::int_reshape(words, Shape::new([count * rows, width]));
    let values = decode::<B>(words, columns, 8, e4m3_values());
    let all_block_rows = count * parts * block_rows;
    let scales = B::float_reshape(scales, Shape::new([all_block_rows, block_columns]));
    let scales = repeat_columns::<B>(scales, block, columns);
    let scales = B::float_reshape(scales, Shape::new([all_block_rows, 1, columns]));
    let scales = B::float_expand(scales, Shape::new([all_block_rows, block, columns]));
    let whole_blocks = Shape::new([count * parts, block_rows * block, columns]);
    let scales = slice::<B>(B::float_reshape(scales, whole_blocks), 1, 0..part_rows);
    let scales = B::float_reshape(scales, Shape::new([count * rows, columns]));
    B::float_reshape(
        B::float_mul(values, scales),
        Shape::new([count, rows, columns]),
    )
}

fn dequantize_fp4<B: Backend>(
    words: IntTensor<B>,
    scales: IntTensor<B>,
    columns: usize,
) -> FloatTensor<B> {
    let [count, rows, width] = words.dims();
    let blocks = columns.div_ceil(FP4_BLOCK);
    let words = B::int_reshape(words, Shape::new([count * rows, width]));
    let values = decode::<B>(words, columns, 4, E2M1_VALUES.to_vec());
    let scales = decode::<B>(scales, rows * blocks, 8, e8m0_values());
    let scales = B::float_reshape(scales, Shape::new([count * rows, blocks]));
    let scales = repeat_columns::<B>(scales, FP4_BLOCK, columns);
    B::float_reshape(
        B::float_mul(values, scales),
        Shape::new([count, rows, columns]),
    )
}

/// Words of FP4 that are repacked, in the plain layout: the definition of [`Fp4Layout::Repacked`].
fn plain<B: Backend>(words: IntTensor<B>) -> IntTensor<B> {
    let left = |x: &IntTensor<B>, by: u32| B::bitwise_left_shift_scalar(x.clone(), by.into());
    let right = |x: &IntTensor<B>, by: u32| B::bitwise_right_shift_scalar(x.clone(), by.into());
    let masked = |x, bits: u32| B::bitwise_and_scalar(x, bits.into());
    let turned = B::bitwise_or(right(&words, 8), left(&words, 24));
    let pairs = [
        words.clone(),
        left(&words, 4),
        B::bitwise_xor(turned.clone(), left(&turned, 2)),
        B::bitwise_xor(turned.clone(), left(&turned, 6)),
    ];
    let codes = (0..).zip(pairs).map(|(i, pair)| {
        let magnitudes = masked(right(&pair, 6), 0x0007_0007);
        let signs = masked(right(&pair, 12), 0x0008_0008);
        left(&B::bitwise_or(magnitudes, signs), 4 * i)
    });
    codes.reduce(B::bitwise_or).expect("four pairs")
}

/// Splits every word into codes of `bits` bits, lowest first, keeps the first `columns` of a row
/// and looks them up.
fn decode<B: Backend>(
    words: IntTensor<B>,
    columns: usize,
    bits: usize,
    table: Vec<f32>,
) -> FloatTensor<B> {
    let device = words.device();
    let [rows, width] = words.dims();
    let per_word = 32 / bits;
    let shape = Shape::new([rows, width, per_word]);
    // Shift the unsigned words themselves: in a signed type, the top code of a word would extend
    // its sign.
    let shifts = B::int_arange(0..per_word as i64, &device, IntDType::U32);
    let shifts = B::int_mul_scalar(shifts, (bits as u32).into());
    let shifts = B::int_reshape(shifts, Shape::new([1, 1, per_word]));
    let words = B::int_reshape(words, Shape::new([rows, width, 1]));
    let codes = B::bitwise_right_shift(
        B::int_expand(words, shape.clone()),
        B::int_expand(shifts, shape),
    );
    let codes = B::bitwise_and_scalar(codes, ((1_u32 << bits) - 1).into());
    let codes = B::int_reshape(codes, Shape::new([rows, width * per_word]));
    let codes = B::int_slice(codes, &[(0..rows).into(), (0..columns).into()]);
    let codes = B::int_reshape(codes, Shape::new([rows * columns]));
    let length = table.len();
    let table = B::float_from_data(TensorData::new(table, [length]), &device);
    let values = B::float_select(table, 0, codes);
    B::float_reshape(values, Shape::new([rows, columns]))
}

/// `[rows, blocks]` to `[rows, columns]`: every element `block` times, the last one perhaps fewer.
fn repeat_columns<B: Backend>(x: FloatTensor<B>, block: usize, columns: usize) -> FloatTensor<B> {
    let [rows, blocks] = x.dims();
    let x = B::float_reshape(x, Shape::new([rows, blocks, 1]));
    let x = B::float_expand(x, Shape::new([rows, blocks, block]));
    let x = B::float_reshape(x, Shape::new([rows, blocks * block]));
    slice::<B>(x, 1, 0..columns)
}
