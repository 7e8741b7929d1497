//! What is done to words of files, in plain tensor operations. Generic over the backend, as it is
//! the default body of the operators' backend trait.

use super::Encoding;
use crate::reference::prelude::*;

/// [`repack_fp4`](crate::quant::repack_fp4), operation by operation.
pub(super) fn repack_fp4_words<B: Backend>(words: IntTensor<B>) -> IntTensor<B> {
    let left = |x: &IntTensor<B>, by: u32| B::bitwise_left_shift_scalar(x.clone(), by.into());
    let right = |x: &IntTensor<B>, by: u32| B::bitwise_right_shift_scalar(x.clone(), by.into());
    let masked = |x, bits: u32| B::bitwise_and_scalar(x, bits.into());
    let turned = |x: &IntTensor<B>, by: u32| B::bitwise_or(left(x, by), right(x, 32 - by));
    let pair = |shift: u32| {
        let codes = match shift {
            0 => words.clone(),
            _ => right(&words, shift),
        };
        let magnitudes = left(&masked(codes.clone(), 0x0007_0007), 6);
        B::bitwise_or(magnitudes, left(&masked(codes, 0x0008_0008), 12))
    };
    let known = B::bitwise_or(pair(0), right(&pair(4), 4));
    let [by_2, by_6] = [8, 12].map(|shift| turned(&pair(shift), 8));
    let q_14 = B::bitwise_xor(by_6.clone(), turned(&known, 6));
    let q_14 = masked(q_14, 0x4000_4000);
    let q_16 = B::bitwise_xor(by_2.clone(), turned(&q_14, 2));
    let q_16 = masked(q_16, 0x0001_0001);
    let upper = B::bitwise_or(masked(known.clone(), 0x8080_8080), q_14);
    let upper = B::bitwise_or(upper, q_16);
    let others = [(by_2, 30), (by_6, 26)];
    let others = others.map(|(bits, by)| turned(&B::bitwise_xor(bits, upper.clone()), by));
    let known = B::bitwise_or(known, upper.clone());
    others.into_iter().fold(known, B::bitwise_or)
}

pub(super) fn any_not_finite<B: Backend>(words: IntTensor<B>, encoding: Encoding) -> IntTensor<B> {
    let (bits, mask) = encoding.mask();
    let mask_dtype = bool_dtype::<B>(&words.device());
    let found = (0..32).step_by(bits as usize).map(|shift| {
        let elements = B::bitwise_right_shift_scalar(words.clone(), (shift as u32).into());
        let elements = B::bitwise_and_scalar(elements, mask.into());
        let found = B::int_equal_elem(elements, mask.into(), mask_dtype);
        B::int_max(B::bool_into_int(found, INT))
    });
    B::int_max(B::int_cat(found.collect(), 0))
}
