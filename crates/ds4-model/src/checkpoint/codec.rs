//! Stored bytes to the layouts of the host weights.

use std::array;
use std::collections::TryReserveError;
use std::ops::BitAnd;

use half::bf16;
use rayon::prelude::*;
use safetensors::Dtype;

use super::directory::CheckpointTensor;

/// The value of an E8M0 code: `2^(code - 127)`, and NaN for 255.
///
/// # Example
///
/// ```
/// use ds4_model::checkpoint::e8m0_to_f32;
///
/// assert_eq!([126, 127, 130].map(e8m0_to_f32), [0.5, 1.0, 8.0]);
/// assert!(e8m0_to_f32(255).is_nan());
/// ```
pub fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        // 2^-127 is subnormal: the top bit of the mantissa is worth half the smallest normal
        // number.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// The value of an E4M3 code.
pub(super) fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, code & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => f32::from(mantissa) * e8m0_to_f32(127 - 9),
        _ => f32::from(8 + mantissa) * e8m0_to_f32(127 - 10 + exponent),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// Scales of any type that has a format.
pub(super) fn scale_values(scale: &CheckpointTensor<'_>) -> Vec<f32> {
    let bytes = scale.bytes;
    match scale.dtype {
        Dtype::F32 => elements(bytes, f32::from_le_bytes).collect(),
        Dtype::BF16 => elements(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        Dtype::F8_E4M3 => bytes.iter().map(|code| e4m3_to_f32(*code)).collect(),
        _ => bytes.iter().map(|code| e8m0_to_f32(*code)).collect(),
    }
}

/// E4M3 has no infinities; all ones but the sign is NaN.
pub(super) fn is_e4m3_nan(code: u8) -> bool {
    code & 0x7f == 0x7f
}

pub(super) fn is_e8m0_nan(code: u8) -> bool {
    code == 0xff
}

/// The number of bad values, and the index of the first.
pub(super) fn count_bad<T: Copy>(
    values: impl Iterator<Item = T> + Clone,
    is_bad: impl Fn(T) -> bool,
) -> Option<(usize, usize)> {
    // No early exit and no wider sum, so that the common case of none compiles to vector code.
    if !values.clone().fold(false, |any, value| any | is_bad(value)) {
        return None;
    }
    let bad = values.clone().filter(|value| is_bad(*value)).count();
    values
        .into_iter()
        .position(is_bad)
        .map(|first| (bad, first))
}

/// The number of `F32` elements that are not finite, and the index of the first.
pub(super) fn not_finite_f32(bytes: &[u8]) -> Option<(usize, usize)> {
    not_finite(elements(bytes, u32::from_le_bytes), 0x7f80_0000)
}

/// As [`not_finite_f32`], of `BF16` elements.
pub(super) fn not_finite_bf16(bytes: &[u8]) -> Option<(usize, usize)> {
    not_finite(elements(bytes, u16::from_le_bytes), 0x7f80)
}

/// As [`not_finite_f32`], of `F16` elements.
pub(super) fn not_finite_f16(bytes: &[u8]) -> Option<(usize, usize)> {
    not_finite(elements(bytes, u16::from_le_bytes), 0x7c00)
}

/// NaN and infinities have all bits of the exponent.
fn not_finite<T: Copy + PartialEq + BitAnd<Output = T>>(
    bits: impl Iterator<Item = T> + Clone,
    exponent: T,
) -> Option<(usize, usize)> {
    count_bad(bits, |bits| bits & exponent == exponent)
}

/// An empty vector with capacity for exactly that many elements.
pub(super) fn reserved<T>(capacity: usize) -> Result<Vec<T>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(capacity)?;
    Ok(values)
}

/// Stored elements, which have no alignment, as values. Bytes after the last whole element do not
/// count.
pub(super) fn elements<'a, const N: usize, T>(
    bytes: &'a [u8],
    decode: impl Fn([u8; N]) -> T + Clone + 'a,
) -> impl ExactSizeIterator<Item = T> + Clone + 'a {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(move |chunk| decode(*chunk))
}

/// Bytes that a thread decodes at a time, about.
const PIECE_BYTES: usize = 1 << 20;

/// So many of a value. `None` where there is not so much memory.
pub(super) fn filled<T: Clone>(count: usize, value: T) -> Option<Vec<T>> {
    let mut values = reserved(count).ok()?;
    values.resize(count, value);
    Some(values)
}

/// Zeros, in memory that nothing has touched yet. `None` where there is not so much.
pub(super) fn zeros(count: usize) -> Option<Vec<u32>> {
    bytemuck::allocation::try_zeroed_vec(count).ok()
}

/// Decodes `bytes` to `values` by several threads: every `unit` bytes are as many values as that is
/// of all.
pub(super) fn decode_units<T: Send>(
    bytes: &[u8],
    unit: usize,
    values: &mut [T],
    decode: impl Fn(&[u8], &mut [T]) + Sync,
) {
    let units = bytes.len() / unit.max(1);
    if units == 0 {
        return;
    }
    let unit_values = values.len() / units;
    let piece = (PIECE_BYTES / unit).max(1);
    let values = values.par_chunks_mut(unit_values * piece);
    let pieces = values.zip(bytes.par_chunks(unit * piece));
    pieces.for_each(|(values, bytes)| decode(bytes, values));
}

/// Decodes stored elements, which have no alignment.
pub(super) fn decode_elements<const N: usize, T: Send>(
    bytes: &[u8],
    values: &mut [T],
    decode: impl Fn([u8; N]) -> T + Clone + Sync,
) {
    decode_units(bytes, N, values, |bytes, values| {
        for (value, element) in values.iter_mut().zip(elements(bytes, decode.clone())) {
            *value = element;
        }
    });
}

/// Packs the rows of a matrix into words, the first byte the lowest. Each row begins a new word and
/// has zeros behind its last byte, in `words` already.
pub(super) fn pack_rows(bytes: &[u8], row_bytes: usize, words: &mut [u32]) {
    if row_bytes.is_multiple_of(4) {
        decode_elements(bytes, words, u32::from_le_bytes);
        return;
    }
    decode_units(bytes, row_bytes, words, |bytes, words| {
        let words = words.chunks_exact_mut(row_bytes.div_ceil(4));
        for (row, words) in bytes.chunks_exact(row_bytes).zip(words) {
            for (word, bytes) in words.iter_mut().zip(row.chunks(4)) {
                let mut padded = [0; 4];
                padded[..bytes.len()].copy_from_slice(bytes);
                *word = u32::from_le_bytes(padded);
            }
        }
    });
}

/// [`pack_rows`] of nibbles. Where their number is odd, the high nibble of a row's last byte is
/// ignored.
pub(super) fn pack_nibble_rows(bytes: &[u8], row_nibbles: usize, words: &mut [u32]) {
    let row_bytes = row_nibbles.div_ceil(2);
    pack_rows(bytes, row_bytes, words);
    if row_nibbles.is_multiple_of(2) {
        return;
    }
    // Nibbles of the last word of a row.
    let last = (row_nibbles - 1) % 8 + 1;
    for words in words.chunks_exact_mut(row_bytes.div_ceil(4)) {
        if let Some(word) = words.last_mut() {
            *word &= u32::MAX >> (32 - 4 * last);
        }
    }
}

/// Bytes packed into words, the first byte the lowest, and the last word filled up with `padding`.
pub(super) fn words(bytes: &[u8], padding: u8) -> Vec<u32> {
    let word = |bytes: &[u8]| array::from_fn(|byte| bytes.get(byte).copied().unwrap_or(padding));
    bytes
        .chunks(4)
        .map(|bytes| u32::from_le_bytes(word(bytes)))
        .collect()
}
