//! Weight decoding: all codes against the written-out tables, odd sizes against an `f64` reading of
//! the same bytes.

use super::common::{
    EXACT, assert_close, assert_on_another_device, assert_refused, devices, two_devices, values,
};
use super::packing::plain_codes;
use super::tables::{E2M1, E4M3, E8M0};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::OpError;
use burn_ds4_ops::quant::{Fp4Layout, Weights, repack_fp4};

const F32: FloatDType = FloatDType::F32;

fn words<const D: usize>(data: Vec<u32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(data, shape), (device, DType::U32))
}

fn floats<const D: usize>(data: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data, shape), (device, DType::F32))
}

/// Decodes FP8 matrices of one part.
fn decode_fp8(
    words: Tensor<3, Int>,
    scales: Tensor<3>,
    columns: usize,
) -> Result<Tensor<3>, OpError> {
    Weights::fp8(words, scales, columns, 1)?.dequantize(F32)
}

/// Decodes FP4 matrices.
fn decode_fp4(
    words: Tensor<3, Int>,
    scales: Tensor<2, Int>,
    columns: usize,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpError> {
    Weights::fp4(words, scales, columns, Fp4Layout::Plain)?.dequantize(dtype)
}

/// Four bytes to a word, little endian, every row padded to a whole word with a byte that must
/// never be seen.
fn pack(bytes: &[u8], row: usize) -> Vec<u32> {
    bytes
        .chunks(row)
        .flat_map(|row| row.chunks(4))
        .map(|chunk| {
            let mut word = [0xa5; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            u32::from_le_bytes(word)
        })
        .collect()
}

/// Bytes that take every value and have no period in common with a block.
fn bytes(count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect()
}

/// E4M3 bytes without the two NaN codes.
fn fp8_bytes(count: usize, seed: u32) -> Vec<u8> {
    let mut bytes = bytes(count, seed);
    bytes
        .iter_mut()
        .filter(|byte| **byte & 0x7f == 0x7f)
        .for_each(|byte| *byte ^= 1);
    bytes
}

/// Scales with full mantissas.
fn fp8_scales(count: usize) -> Vec<f32> {
    (0..count).map(|i| 0.37 + i as f32 / 7.0).collect()
}

fn every_fp8_code_decodes_to_its_table_value() {
    let codes: Vec<u8> = (0..=255).collect();
    let expected: Vec<f32> = E4M3.iter().map(|&value| value as f32).collect();
    for (name, device) in devices() {
        let weight = decode_fp8(
            words(pack(&codes, 256), [1, 1, 64], device),
            floats(vec![1.0; 2], [1, 1, 2], device),
            256,
        );
        assert_close(&values(weight.unwrap()), &expected, EXACT, name);
    }
}

fn every_fp4_code_times_every_scale_byte_decodes_to_the_product() {
    let word = |first: u32| (0..8).fold(0, |word, i| word | (first + i) << (4 * i));
    let row = [word(0), word(8), word(0), word(8)];
    let scales: Vec<u8> = (0..=255).collect();
    let expected: Vec<f32> = E8M0
        .iter()
        .flat_map(|scale| (0..32).map(move |column| (E2M1[column % 16] * scale) as f32))
        .collect();
    for (name, device) in devices() {
        let weight = decode_fp4(
            words(row.repeat(256), [1, 256, 4], device),
            words(pack(&scales, 256), [1, 64], device),
            32,
            F32,
        );
        let mut actual = values(weight.unwrap());
        for (actual, &expected) in actual.iter_mut().zip(&expected) {
            // The documented exception: below the normal range a device may flush to zero.
            if expected.abs() < f32::MIN_POSITIVE && *actual == 0.0 {
                *actual = expected;
            }
        }
        assert_close(&actual, &expected, EXACT, name);
    }
}

fn words_with_the_top_bit_set_do_not_smear_their_sign() {
    for (name, device) in devices() {
        let fp8 = decode_fp8(
            words(vec![0x8000_0001, 0xff38_38b8], [1, 1, 2], device),
            floats(vec![512.0], [1, 1, 1], device),
            8,
        );
        let expected = [1.0, 0.0, 0.0, -0.0, -512.0, 512.0, 512.0, f32::NAN];
        assert_close(&values(fp8.unwrap()), &expected, EXACT, name);

        let fp4 = decode_fp4(
            words(vec![0xf000_0002, 0x8765_4321], [1, 2, 1], device),
            // The scales are the two low bytes: 2 and 1. The others belong to no block.
            words(vec![0xffff_7f80], [1, 1], device),
            8,
            F32,
        );
        let expected = [
            2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -12.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0,
        ];
        assert_close(&values(fp4.unwrap()), &expected, EXACT, name);
    }
}

fn fp8_blocks_may_be_partial_in_both_directions() {
    for (rows, columns, block) in [
        (1_usize, 1_usize, 128_usize),
        (3, 129, 128),
        (128, 128, 128),
        (131, 261, 128),
        (257, 127, 128),
        (3, 33, 32),
        (64, 128, 32),
        (131, 261, 32),
    ] {
        let (block_rows, block_columns) = (rows.div_ceil(block), columns.div_ceil(block));
        let codes = fp8_bytes(rows * columns, 7);
        let scales = fp8_scales(block_rows * block_columns);
        let expected: Vec<f32> = (0..rows * columns)
            .map(|i| {
                let (row, column) = (i / columns, i % columns);
                let scale = scales[row / block * block_columns + column / block];
                (E4M3[usize::from(codes[i])] * f64::from(scale)) as f32
            })
            .collect();
        for (name, device) in devices() {
            let weight = decode_fp8(
                words(
                    pack(&codes, columns),
                    [1, rows, columns.div_ceil(4)],
                    device,
                ),
                floats(scales.clone(), [1, block_rows, block_columns], device),
                columns,
            )
            .unwrap();
            assert_eq!(weight.dims(), [1, rows, columns]);
            assert_close(
                &values(weight),
                &expected,
                EXACT,
                &format!("{name} {rows}x{columns}"),
            );
        }
    }
}

fn stacked_fp8_parts_each_start_a_block_row_of_their_own() {
    let (batch, parts, part_rows, columns) = (3, 2, 130, 140);
    let (rows, block_rows, block_columns) = (parts * part_rows, parts * 2, 2);
    let codes = fp8_bytes(batch * rows * columns, 11);
    let scales = fp8_scales(batch * block_rows * block_columns);
    let expected: Vec<f32> = (0..batch * rows * columns)
        .map(|i| {
            let (matrix, row, column) = (i / columns / rows, i / columns % rows, i % columns);
            let block_row = row / part_rows * 2 + row % part_rows / 128;
            let scale = scales[(matrix * block_rows + block_row) * block_columns + column / 128];
            (E4M3[usize::from(codes[i])] * f64::from(scale)) as f32
        })
        .collect();
    for (name, device) in devices() {
        let weights = Weights::fp8(
            words(pack(&codes, columns), [batch, rows, columns / 4], device),
            floats(scales.clone(), [batch, block_rows, block_columns], device),
            columns,
            parts,
        );
        let weight = weights.unwrap().dequantize(F32);
        assert_close(&values(weight.unwrap()), &expected, EXACT, name);
    }
}

fn fp4_matrices_of_odd_sizes_are_padded_to_whole_words_one_by_one() {
    for (batch, rows, columns) in [(1, 1, 1_usize), (2, 3, 45), (3, 5, 64), (2, 7, 33)] {
        let blocks = columns.div_ceil(32);
        let codes: Vec<u8> = bytes(batch * rows * columns, 5)
            .iter()
            .map(|b| b & 15)
            .collect();
        let scales: Vec<u8> = bytes(batch * rows * blocks, 9)
            .iter()
            .map(|b| b / 2 + 60)
            .collect();
        let packed: Vec<u32> = codes
            .chunks(columns)
            .flat_map(|row| row.chunks(8))
            .map(|chunk| {
                (0..8).fold(0, |w, i| {
                    w | u32::from(*chunk.get(i).unwrap_or(&15)) << (4 * i)
                })
            })
            .collect();
        let expected: Vec<f32> = (0..batch * rows * columns)
            .map(|i| {
                let scale = scales[i / columns * blocks + i % columns / 32];
                (E2M1[usize::from(codes[i])] * E8M0[usize::from(scale)]) as f32
            })
            .collect();
        for (name, device) in devices() {
            let scale_words = (rows * blocks).div_ceil(4);
            let weight = decode_fp4(
                words(packed.clone(), [batch, rows, columns.div_ceil(8)], device),
                words(pack(&scales, rows * blocks), [batch, scale_words], device),
                columns,
                F32,
            )
            .unwrap();
            assert_eq!(weight.dims(), [batch, rows, columns]);
            let what = format!("{name} {batch}x{rows}x{columns}");
            assert_close(&values(weight), &expected, EXACT, &what);
        }
    }
}

fn half_precision_output_is_exact_or_refused_by_name() {
    // The bytes 120 to 134 as scales keep every product inside the normal range of F16.
    let codes: Vec<u32> = bytes(15 * 16, 3)
        .chunks(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let scales: Vec<u8> = (120..135).collect();
    for (name, device) in devices() {
        let decode = |dtype| {
            let scales = words(pack(&scales, 15), [1, 4], device);
            decode_fp4(words(codes.clone(), [1, 15, 4], device), scales, 32, dtype)
        };
        let expected = values(decode(F32).unwrap());
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            match decode(dtype) {
                Ok(weight) => {
                    assert_eq!(weight.dtype(), dtype.into());
                    let what = format!("{name} {dtype:?}");
                    assert_close(&values(weight.cast(F32)), &expected, EXACT, &what);
                }
                Err(error) => {
                    assert!(!device.supports_dtype(dtype));
                    assert!(matches!(
                        error,
                        OpError::UnsupportedDtype {
                            argument: "dtype",
                            ..
                        }
                    ));
                }
            }
        }
    }
}

fn empty_matrices_decode_to_empty_matrices() {
    for (name, device) in devices() {
        let none = Tensor::<3, Int>::empty([1, 0, 2], (device, DType::U32));
        let scales = Tensor::<3>::empty([1, 0, 1], (device, DType::F32));
        let weight = decode_fp8(none, scales, 8).unwrap();
        assert_eq!(weight.dims(), [1, 0, 8], "{name}");
        let none = Tensor::<3, Int>::empty([2, 0, 1], (device, DType::U32));
        let scales = Tensor::<2, Int>::empty([2, 0], (device, DType::U32));
        let weight = decode_fp4(none, scales, 5, F32).unwrap();
        assert_eq!(weight.dims(), [2, 0, 5], "{name}");
    }
}

fn bad_arguments_are_named_with_their_value() {
    for (_, device) in devices() {
        let codes = || words(vec![0; 4], [1, 2, 2], device);
        let scales = || floats(vec![1.0], [1, 1, 1], device);
        let message = "`words` has dtype I32, expected U32";
        assert_refused(decode_fp8(codes().cast(DType::I32), scales(), 8), message);
        let message = "`words` has shape [1, 2, 2], expected [1, 2, 3]";
        assert_refused(decode_fp8(codes(), scales(), 9), message);
        let message = "`scales` has shape [1, 1, 2], expected [1, 1, 1]";
        assert_refused(
            decode_fp8(codes(), floats(vec![1.0; 2], [1, 1, 2], device), 8),
            message,
        );
        let message = "`scales` has dtype BF16, expected F32";
        if device.supports_dtype(FloatDType::BF16) {
            assert_refused(
                decode_fp8(codes(), scales().cast(FloatDType::BF16), 8),
                message,
            );
        }
        for (parts, message) in [
            (0, "`parts` is 0, expected a divisor of 2 rows"),
            (3, "`parts` is 3, expected a divisor of 2 rows"),
            (2, "`scales` has shape [1, 1, 1], expected [1, 2, 1]"),
        ] {
            assert_refused(Weights::fp8(codes(), scales(), 8, parts), message);
        }
        let scales = || words(vec![0], [1, 1], device);
        let message = "`scales` has shape [1, 2], expected [1, 1]";
        let two = words(vec![0; 2], [1, 2], device);
        assert_refused(decode_fp4(codes(), two, 16, F32), message);
        let error = decode_fp4(codes(), scales(), usize::MAX, F32).unwrap_err();
        assert!(
            error.to_string().starts_with("`words` has shape"),
            "{error}"
        );
    }
}

fn tensors_on_different_devices_are_refused() {
    let Some([first, second]) = two_devices() else {
        return;
    };
    let scales = floats(vec![1.0], [1, 1, 1], second);
    let result = decode_fp8(words(vec![0], [1, 1, 1], first), scales, 4);
    assert_on_another_device(result, ["scales", "words"]);
}

fn repacked(word: u32) -> u32 {
    let mut words = [word];
    repack_fp4(&mut words);
    words[0]
}

#[test]
fn every_code_is_where_the_repacked_layout_has_it() {
    // Both directions combine bits by XOR alone: what holds for each bit holds for all words.
    for bit in 0..32 {
        assert_eq!(plain_codes(repacked(1 << bit)), 1 << bit, "bit {bit}");
    }
    for word in [0, u32::MAX, 0x7654_3210, 0xfedc_ba98, 0x1234_8765] {
        assert_eq!(plain_codes(repacked(word)), word, "{word:#x}");
    }
}

#[test]
fn repacking_is_linear() {
    let (first, second) = (0x9e37_79b9, 0x7f4a_7c15);
    assert_eq!(repacked(0), 0);
    assert_eq!(repacked(first ^ second), repacked(first) ^ repacked(second));
}

catalogue![
    every_fp8_code_decodes_to_its_table_value,
    every_fp4_code_times_every_scale_byte_decodes_to_the_product,
    words_with_the_top_bit_set_do_not_smear_their_sign,
    fp8_blocks_may_be_partial_in_both_directions,
    stacked_fp8_parts_each_start_a_block_row_of_their_own,
    fp4_matrices_of_odd_sizes_are_padded_to_whole_words_one_by_one,
    half_precision_output_is_exact_or_refused_by_name,
    empty_matrices_decode_to_empty_matrices,
    bad_arguments_are_named_with_their_value,
    tensors_on_different_devices_are_refused,
];
