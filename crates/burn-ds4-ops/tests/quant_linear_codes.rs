//! Every code of the packed formats through `quant_linear`: rows of x with a single one give single
//! weights.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_ds4_ops::quant::{Fp4Layout, Weights, quant_linear};

use super::common::{self, EXACT, assert_close, devices, every_dtype, floats, values};
use super::packing::{Packed, rounded};
use super::tables::{E2M1, E4M3, E8M0};

/// Sixteen blocks of FP4, four of FP8.
const COLUMNS: usize = 512;
/// Columns at once: one row as in decoding, a few, so many that they are no decoding, all. One and
/// many will do where there is one kernel for all, which a software device takes long to run.
const AT_ONCE: [usize; 4] = [1, 6, 48, COLUMNS];

/// Four in each block of FP8, all together one for each FP4 code: enough where columns come one by
/// one.
fn some() -> Vec<usize> {
    (0..16).map(|i| i / 4 * 128 + 64 + i).collect()
}

/// `[columns, COLUMNS]`: a one in each row.
fn ones(columns: &[usize], dtype: FloatDType, device: &Device) -> Tensor<2> {
    let mut data = vec![0.0_f32; columns.len() * COLUMNS];
    for (row, column) in columns.iter().enumerate() {
        data[row * COLUMNS + column] = 1.0;
    }
    let data = TensorData::new(data, [columns.len(), COLUMNS]).convert_dtype(dtype.into());
    Tensor::from_data(data, (device, dtype.into()))
}

/// Picks columns one or several at a time and compares each weight with what `expected` says of it,
/// by row and column.
#[track_caller]
fn check(
    weights: &Weights,
    expected: impl Fn(usize, usize) -> f64,
    may_vanish: impl Fn(usize, f64) -> bool,
    (name, device, dtype): (&str, &Device, FloatDType),
) {
    let [_, rows, _] = weights.dims();
    let all: Vec<usize> = (0..COLUMNS).collect();
    for &at_once in common::some(name, &AT_ONCE, 2) {
        let columns = if at_once < 16 { some() } else { all.clone() };
        for columns in columns.chunks(at_once) {
            let y = quant_linear(ones(columns, dtype, device), weights).unwrap();
            assert_eq!(y.dtype(), DType::from(dtype), "{name}");
            let pairs = columns.iter();
            let pairs = pairs.flat_map(|&column| (0..rows).map(move |row| (row, column)));
            let exact: Vec<(usize, f64)> = pairs.map(|(row, c)| (row, expected(row, c))).collect();
            let single: Vec<f32> = exact.iter().map(|&(_, weight)| weight as f32).collect();
            let single = rounded(&single, dtype);
            let mut actual = values(y.cast(FloatDType::F32));
            assert_eq!(actual.len(), exact.len(), "{name}");
            for (actual, (&single, &(row, weight))) in
                actual.iter_mut().zip(single.iter().zip(&exact))
            {
                if *actual == 0.0 && may_vanish(row, weight) {
                    *actual = single;
                }
            }
            let what = format!("{name} {at_once} columns from {}", columns[0]);
            assert_close(&actual, &single, EXACT, &what);
        }
    }
}

/// What a device that flushes denormals may take for zero.
fn is_denormal(value: f64) -> bool {
    value.abs() < f64::from(f32::MIN_POSITIVE)
}

fn every_fp4_code_times_every_scale_byte_is_the_product() {
    every_dtype(|name, device, dtype| {
        // Beyond, a code times its scale leaves the range of normal values of the dtype. A row of
        // infinities has an oracle of its own.
        let bytes: Vec<u8> = match dtype {
            FloatDType::F16 => (114..=140).collect(),
            _ => (0..=252).collect(),
        };
        let columns = |row: usize| (0..COLUMNS).map(move |column| (row + column * 5) % 16);
        let codes = (0..bytes.len()).flat_map(columns).map(|code| code as u8);
        let scales = bytes.iter().flat_map(|&byte| [byte; COLUMNS / 32]);
        let shape = [1, bytes.len(), COLUMNS];
        let packed = Packed::fp4(shape, codes.collect(), scales.collect());
        let expected =
            |row: usize, column| E2M1[(row + column * 5) % 16] * E8M0[usize::from(bytes[row])];
        let may_vanish = |row: usize, value| is_denormal(value) || bytes[row] == 0;
        for layout in [Fp4Layout::Plain, Fp4Layout::Repacked] {
            let weights = packed.clone().in_layout(layout).on(device);
            check(&weights, expected, may_vanish, (name, device, dtype));
        }
    });
}

fn every_block_of_fp4_has_a_scale_of_its_own() {
    every_dtype(|name, device, dtype| {
        let (rows, blocks) = (37, COLUMNS / 32);
        let codes = (0..rows * COLUMNS).map(|at| (at % 7 + 1) as u8).collect();
        let byte = |row: usize, block: usize| (114 + (row * 11 + block * 5) % 27) as u8;
        let scales = (0..rows).flat_map(|row| (0..blocks).map(move |block| byte(row, block)));
        let weights = Packed::fp4([1, rows, COLUMNS], codes, scales.collect()).on(device);
        let expected = |row: usize, column: usize| {
            let code = (row * COLUMNS + column) % 7 + 1;
            E2M1[code] * E8M0[usize::from(byte(row, column / 32))]
        };
        check(&weights, expected, |_, _| false, (name, device, dtype));
    });
}

/// Those of full mantissas; the last is for a whole block that is zero.
const FP8_SCALES: [f32; 8] = [0.37, 1.0, 57.3, 2.5e-3, 1.9e30, 3.3e-31, 7.0 / 3.0, 0.0];

fn every_fp8_code_times_any_scale_is_the_product() {
    every_dtype(|name, device, dtype| {
        let scales: Vec<f32> = match dtype {
            // Beyond, a code times its scale leaves the range of normal values.
            FloatDType::F16 => FP8_SCALES.map(|s| if (0.1..100.0).contains(&s) { s } else { 0.7 }),
            _ => FP8_SCALES,
        }
        .to_vec();
        let code = |row: usize, column: usize| match (row * 3 + column) % 256 {
            code if code & 0x7f == 0x7f => code - 1,
            code => code,
        };
        let shape = [1, 256, COLUMNS];
        let scale = |row: usize, column: usize| scales[row / 128 * 4 + column / 128];
        let codes = (0..256).flat_map(|row| (0..COLUMNS).map(move |c| code(row, c) as u8));
        let weights = Packed::fp8(shape, 1, codes.collect(), scales.clone()).on(device);
        let expected = |row, column| {
            // The product with the scale is made in f32.
            let product = E4M3[code(row, column)] * f64::from(scale(row, column));
            f64::from(product as f32)
        };
        check(
            &weights,
            expected,
            |_, value| is_denormal(value),
            (name, device, dtype),
        );
    });
}

/// Those that leave the least code normal and the largest one in range, and some between.
const EXPONENTS: [i32; 15] = [
    -117, -110, -100, -30, -9, -8, -1, 0, 1, 6, 7, 8, 30, 100, 118,
];

fn every_fp8_code_times_any_power_of_two_of_a_block_of_32_is_the_product() {
    every_dtype(|name, device, dtype| {
        let code = |row: usize, column: usize| match (row * 3 + column) % 256 {
            code if code & 0x7f == 0x7f => code - 1,
            code => code,
        };
        let scale = |block_row: usize, block: usize| match (block_row * 7 + block) % 16 {
            15 => 0.0,
            at => match dtype {
                // Beyond, a code times its scale leaves the range of normal values.
                FloatDType::F16 => 2f32.powi(EXPONENTS[at].clamp(-4, 6)),
                _ => 2f32.powi(EXPONENTS[at]),
            },
        };
        let codes = (0..256).flat_map(|row| (0..COLUMNS).map(move |c| code(row, c) as u8));
        let blocks = COLUMNS / 32;
        let scales = (0..8).flat_map(|row| (0..blocks).map(move |block| scale(row, block)));
        let (codes, scales) = (codes.collect(), scales.collect());
        let weights = Packed::fp8_in_blocks([1, 256, COLUMNS], [1, 32], codes, scales);
        let expected = |row: usize, column: usize| {
            E4M3[code(row, column)] * f64::from(scale(row / 32, column / 32))
        };
        check(
            &weights.on(device),
            expected,
            |_, value| is_denormal(value),
            (name, device, dtype),
        );
    });
}

fn the_parts_of_an_fp8_matrix_have_block_rows_of_their_own() {
    every_dtype(|name, device, dtype| {
        // 150 rows a part: the second one starts in the middle of a block of the first, were it not
        // for the parts.
        let scales: Vec<f32> = (0..16).map(|block| 0.37 + block as f32 / 7.0).collect();
        // 0x3c is 1.5.
        let codes = vec![0x3c; 300 * COLUMNS];
        let weights = Packed::fp8([1, 300, COLUMNS], 2, codes, scales.clone());
        let expected = |row: usize, column: usize| {
            let block_row = match row {
                0..128 => 0,
                128..150 => 1,
                150..278 => 2,
                _ => 3,
            };
            f64::from(scales[block_row * 4 + column / 128] * 1.5)
        };
        check(
            &weights.on(device),
            expected,
            |_, _| false,
            (name, device, dtype),
        );
    });
}

/// Which outputs are not finite, for one row of ones and for many.
fn not_finite(weights: &Weights, dtype: FloatDType, device: &Device) -> Vec<Vec<bool>> {
    let [_, rows, columns] = weights.dims();
    let of_rows = |count| {
        let x = Tensor::<2>::ones([count, columns], device).cast(dtype);
        let y = values(quant_linear(x, weights).unwrap().cast(FloatDType::F32));
        let y = y.chunks(rows);
        y.map(|row| row.iter().map(|v| !v.is_finite()).collect())
            .collect::<Vec<_>>()
    };
    [of_rows(1), of_rows(20)].concat()
}

fn a_nan_code_or_scale_spoils_its_rows_and_no_other() {
    every_dtype(|name, device, dtype| {
        let rows = 140;
        let ones = vec![2; rows * COLUMNS];
        let mut scales = vec![127; rows * COLUMNS / 32];
        // Row 3 in its first block, row 77 in the last.
        scales[3 * 16] = 255;
        scales[77 * 16 + 15] = 255;
        let fp4 = Packed::fp4([1, rows, COLUMNS], ones, scales);
        let repacked = fp4.clone().in_layout(Fp4Layout::Repacked).on(device);
        let fp4 = fp4.on(device);
        let mut codes = vec![0x38; rows * COLUMNS];
        codes[3 * COLUMNS] = 0x7f;
        codes[77 * COLUMNS + COLUMNS - 1] = 0xff;
        let fp8 = Packed::fp8([1, rows, COLUMNS], 1, codes, vec![0.7; 8]).on(device);
        let expected: Vec<bool> = (0..rows).map(|row| [3, 77].contains(&row)).collect();
        for (weights, format) in [(fp4, "FP4"), (repacked, "repacked FP4"), (fp8, "FP8")] {
            for actual in not_finite(&weights, dtype, device) {
                assert_eq!(actual, expected, "{name} {format}");
            }
        }
        let codes = vec![0x38; rows * COLUMNS];
        let mut scales = vec![0.7; 8];
        scales[5] = f32::NAN;
        let block = Packed::fp8([1, rows, COLUMNS], 1, codes, scales).on(device);
        let expected: Vec<bool> = (0..rows).map(|row| row >= 128).collect();
        for actual in not_finite(&block, dtype, device) {
            assert_eq!(actual, expected, "{name} scale of a block");
        }
        let codes = vec![0x38; rows * COLUMNS];
        let mut scales = vec![1.0; 5 * COLUMNS / 32];
        scales[2 * COLUMNS / 32 + 5] = f32::NAN;
        let mut codes32 = codes;
        codes32[3 * COLUMNS + 40] = 0xff;
        let block = Packed::fp8_in_blocks([1, rows, COLUMNS], [1, 32], codes32, scales);
        let expected: Vec<bool> = (0..rows)
            .map(|row| row == 3 || (64..96).contains(&row))
            .collect();
        for actual in not_finite(&block.on(device), dtype, device) {
            assert_eq!(actual, expected, "{name} block of 32");
        }
    });
}

/// 4608 columns are nine times 512: kernels that take 512 at a time, by an even number of planes,
/// have nothing to do for the tenth.
fn a_nan_scale_does_not_reach_the_row_before_it() {
    const WIDE: usize = 4608;
    every_dtype(|name, device, dtype| {
        let rows = 17;
        let mut scales = vec![127; rows * WIDE / 32];
        // All of the first 512 columns of row 5, and of the last row.
        for row in [5, rows - 1] {
            scales[row * WIDE / 32..][..16].fill(255);
        }
        let weights = Packed::fp4([1, rows, WIDE], vec![2; rows * WIDE], scales).on(device);
        for tokens in [1, 3] {
            let x = Tensor::<2>::ones([tokens, WIDE], (device, DType::F32)).cast(dtype);
            let y = quant_linear(x, &weights).unwrap().cast(FloatDType::F32);
            for (at, value) in values(y).into_iter().enumerate() {
                let spoiled = [5, rows - 1].contains(&(at % rows));
                assert_eq!(value.is_nan(), spoiled, "{name} [{at}] {value}");
                assert!(spoiled || value == WIDE as f32, "{name} [{at}] {value}");
            }
        }
    });
}

fn a_weight_beyond_the_range_of_f32_gives_nothing_finite() {
    for (name, device) in devices() {
        // 2^126 and 2^127 times the codes from 0.5 to 6, one code a row.
        let codes = (0..16).flat_map(|row| [(row % 8) as u8; COLUMNS]);
        let scales = (0..16).flat_map(|row| [if row < 8 { 253 } else { 254 }; COLUMNS / 32]);
        let shape = [1, 16, COLUMNS];
        let weights = Packed::fp4(shape, codes.collect(), scales.collect());
        let weights = weights.in_layout(Fp4Layout::fastest_on(device)).on(device);
        // 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^126, then 2^127: f32 ends below 2^128.
        let beyond = [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1].map(|b| b == 1);
        for columns in [&[100][..], &some()] {
            let x = ones(columns, FloatDType::F32, device);
            let y = values(quant_linear(x, &weights).unwrap());
            for row in y.chunks(16) {
                let actual: Vec<bool> = row.iter().map(|v| !v.is_finite()).collect();
                assert_eq!(actual, beyond, "{name}");
            }
        }
    }
}

fn what_fills_up_the_last_word_of_a_row_is_never_seen() {
    for (name, device) in devices() {
        for columns in [1, 2, 3, 5, 7, 9, 33, 63, 129, 514] {
            let fp8 = Packed::fp8(
                [1, 3, columns],
                1,
                vec![0x38; 3 * columns],
                vec![1.0; columns.div_ceil(128)],
            );
            let scales = vec![127; 3 * columns.div_ceil(32)];
            let fp4 = Packed::fp4([1, 3, columns], vec![2; 3 * columns], scales);
            let scales = vec![1.0; columns.div_ceil(32)];
            let codes = vec![0x38; 3 * columns];
            let blocks32 = Packed::fp8_in_blocks([1, 3, columns], [1, 32], codes, scales);
            for (weights, format) in [(fp8, "FP8"), (fp4, "FP4"), (blocks32, "FP8 in 32x32")] {
                for rows in [1, 20] {
                    let x = vec![1.0; rows * columns];
                    let x = floats(&x, [rows, columns], device);
                    let y = values(quant_linear(x, &weights.on(device)).unwrap());
                    let what = format!("{name} {format} {rows} x {columns}");
                    assert_close(&y, &vec![columns as f32; rows * 3], EXACT, &what);
                }
            }
        }
    }
}

#[test]
fn some_columns_have_every_code_for_any_scale() {
    let mut fp4: Vec<usize> = some().iter().map(|column| column * 5 % 16).collect();
    fp4.sort_unstable();
    assert_eq!(fp4, (0..16).collect::<Vec<_>>());
    for block in some().chunks(4) {
        let codes = (0..128).flat_map(|row| block.iter().map(move |column| row * 3 + column));
        let codes: std::collections::HashSet<usize> = codes.map(|code| code % 256).collect();
        assert_eq!(codes.len(), 256);
        assert_eq!(block[0] / 128, block[3] / 128);
    }
}

catalogue![
    every_fp4_code_times_every_scale_byte_is_the_product,
    every_block_of_fp4_has_a_scale_of_its_own,
    every_fp8_code_times_any_scale_is_the_product,
    every_fp8_code_times_any_power_of_two_of_a_block_of_32_is_the_product,
    the_parts_of_an_fp8_matrix_have_block_rows_of_their_own,
    a_nan_code_or_scale_spoils_its_rows_and_no_other,
    a_nan_scale_does_not_reach_the_row_before_it,
    a_weight_beyond_the_range_of_f32_gives_nothing_finite,
    what_fills_up_the_last_word_of_a_row_is_never_seen,
];
