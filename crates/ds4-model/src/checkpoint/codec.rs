//! Stored bytes to the layouts of the host weights.

use std::collections::TryReserveError;
use std::ops::BitAnd;

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

/// Bytes packed into `u32` words: the first byte is the lowest.
#[derive(Debug)]
pub(super) struct Words {
    words: Vec<u32>,
    /// The bytes of the unfinished word.
    tail: [u8; 4],
    tail_len: usize,
}

impl Words {
    pub(super) fn with_capacity(words: usize) -> Result<Self, TryReserveError> {
        Ok(Self {
            words: reserved(words)?,
            tail: [0; 4],
            tail_len: 0,
        })
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        let finish = bytes.len().min((4 - self.tail_len) % 4);
        let (head, rest) = bytes.split_at(finish);
        head.iter().for_each(|&byte| self.push_byte(byte));
        let (chunks, rest) = rest.as_chunks::<4>();
        self.words
            .extend(chunks.iter().map(|chunk| u32::from_le_bytes(*chunk)));
        rest.iter().for_each(|&byte| self.push_byte(byte));
    }

    fn push_byte(&mut self, byte: u8) {
        self.tail[self.tail_len] = byte;
        self.tail_len += 1;
        if self.tail_len == 4 {
            self.words.push(u32::from_le_bytes(self.tail));
            self.tail_len = 0;
        }
    }

    /// Fills up an unfinished word with `byte`.
    pub(super) fn pad(&mut self, byte: u8) {
        while self.tail_len != 0 {
            self.push_byte(byte);
        }
    }

    /// The words of `bytes`, each row of `row_bytes` beginning a new word, with zeros in between.
    pub(super) fn push_rows(&mut self, bytes: &[u8], row_bytes: usize) {
        if row_bytes.is_multiple_of(4) {
            self.push(bytes);
            return;
        }
        for row in bytes.chunks_exact(row_bytes) {
            self.push(row);
            self.pad(0);
        }
    }

    /// As [`push_rows`](Self::push_rows), for rows of nibbles. Where their number is odd, the high
    /// nibble of a row's last byte is ignored.
    pub(super) fn push_nibble_rows(&mut self, bytes: &[u8], row_nibbles: usize) {
        let row_bytes = row_nibbles.div_ceil(2);
        if row_nibbles.is_multiple_of(2) {
            self.push_rows(bytes, row_bytes);
            return;
        }
        for row in bytes.chunks_exact(row_bytes) {
            if let Some((last, row)) = row.split_last() {
                self.push(row);
                self.push_byte(last & 0x0f);
                self.pad(0);
            }
        }
    }

    pub(super) fn finish(mut self, padding: u8) -> Vec<u32> {
        self.pad(padding);
        self.words
    }
}
