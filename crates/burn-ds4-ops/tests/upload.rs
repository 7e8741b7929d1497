//! What is done to words of files on the device, against the host.

use std::convert::Infallible;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::quant::repack_fp4;
use burn_ds4_ops::upload::{Encoding, any_not_finite, floats_of, repack_fp4_words, upload};

use super::common::{assert_refused, devices, every_dtype};

/// Lengths around those of cubes, and none.
const LENGTHS: [usize; 7] = [0, 1, 3, 255, 256, 257, 70_001];

fn words_of(words: &[u32], device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(words.to_vec(), [words.len()]);
    Tensor::from_data(data, (device, DType::U32))
}

fn numbers(count: usize) -> Vec<u32> {
    let number = |at: usize| (at as u32).wrapping_mul(0x9e37_79b9) ^ (at as u32) << 13;
    (0..count).map(number).collect()
}

fn words_are_repacked_as_the_host_does_it() {
    for (name, device) in devices() {
        for length in LENGTHS {
            let mut words = numbers(length);
            let given = words_of(&words, device);
            let kept = given.clone();
            let repacked = repack_fp4_words(given).unwrap().into_data();
            kept.into_data()
                .assert_eq(&words_of(&words, device).into_data(), true);
            repack_fp4(&mut words);
            assert_eq!(
                repacked.as_slice::<u32>().unwrap(),
                words,
                "{name} {length}"
            );
        }
        // Each bit by itself, in the middle of a tensor.
        let mut bits: Vec<u32> = (0..32).map(|bit| 1 << bit).collect();
        let longer = [&[7][..], &bits, &[8]].concat();
        let middle = words_of(&longer, device).narrow(0, 1, 32);
        let repacked = repack_fp4_words(middle).unwrap().into_data();
        repack_fp4(&mut bits);
        assert_eq!(repacked.iter::<u32>().collect::<Vec<_>>(), bits, "{name}");
    }
}

/// Every encoding, the largest finite element of either sign, and what is not finite.
const VALUES: [(Encoding, u32, &[u32], &[u32]); 5] = [
    (Encoding::E4m3, 8, &[0x7e, 0xfe, 0x78], &[0x7f, 0xff]),
    (Encoding::E8m0, 8, &[0xfe, 0x7f], &[0xff]),
    (
        Encoding::Bf16,
        16,
        &[0x7f7f, 0xff7f, 0x00ff],
        &[0x7f80, 0xff80, 0x7fc0, 0xff81],
    ),
    (
        Encoding::F16,
        16,
        &[0x7bff, 0xfbff, 0x03ff],
        &[0x7c00, 0xfc00, 0x7e00, 0xfc01],
    ),
    (
        Encoding::F32,
        32,
        &[0x7f7f_ffff, 0xff7f_ffff, 0x007f_ffff],
        &[0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xff80_0001],
    ),
];

fn one_element_that_is_not_finite_is_found_wherever_it_is() {
    for (name, device) in devices() {
        let found = |words: &[u32], encoding| {
            let found = any_not_finite(words_of(words, device), encoding).unwrap();
            found.into_data().iter::<i32>().collect::<Vec<_>>()
        };
        for (encoding, bits, finite, others) in VALUES {
            let elements = 32 / bits;
            for length in LENGTHS {
                let word = |at: usize| {
                    let elements = 0..elements;
                    elements.fold(0, |word, element| {
                        let own = finite[(at + element as usize) % finite.len()];
                        word | own << (bits * element)
                    })
                };
                let mut words: Vec<u32> = (0..length).map(word).collect();
                assert_eq!(found(&words, encoding), [0], "{name} {encoding:?} {length}");
                let ends = [0, length / 2, length.saturating_sub(1)];
                for at in ends.into_iter().filter(|at| *at < length) {
                    for (element, other) in (0..elements).zip(others.iter().cycle()) {
                        let whole = words[at];
                        let mask = u32::MAX >> (32 - bits) << (bits * element);
                        words[at] = whole & !mask | other << (bits * element);
                        let context = format!("{name} {encoding:?} {length} {at} {element}");
                        assert_eq!(found(&words, encoding), [1], "{context}");
                        words[at] = whole;
                    }
                }
            }
            for other in others {
                assert_eq!(
                    found(&[*other], encoding),
                    [1],
                    "{name} {encoding:?} {other:x}"
                );
            }
        }
    }
}

fn floats_have_the_bits_of_words() {
    every_dtype(|context, device, dtype| {
        let bits = match dtype {
            FloatDType::F32 => [0x3f80_0000, 0xc000_0000],
            FloatDType::F16 => [0xc000_3c00, 0x3555_0000],
            _ => [0xc000_3f80, 0x3eab_0000],
        };
        let floats = floats_of(words_of(&bits, device), dtype).unwrap();
        assert_eq!(floats.dtype(), DType::from(dtype), "{context}");
        let data = floats.into_data();
        let bytes: Vec<u8> = bits.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(data.bytes()[..], bytes, "{context}");
        assert_eq!(
            data.iter::<f32>().take(1).collect::<Vec<_>>(),
            [1.0],
            "{context}"
        );
    });
}

fn words_arrive_as_they_were_written() {
    for (name, device) in devices() {
        let uploaded = upload(device, 1000, |first, piece| {
            for (at, byte) in (first..).zip(piece) {
                *byte = (at ^ at >> 8) as u8;
            }
            Ok::<(), Infallible>(())
        });
        let data = uploaded.unwrap().into_data();
        let expected: Vec<u8> = (0..4000_usize).map(|at| (at ^ at >> 8) as u8).collect();
        assert_eq!(data.dtype(), DType::U32, "{name}");
        assert_eq!(data.bytes()[..], expected, "{name}");
        let failed = upload(device, 10, |_, _| Err("no such file"));
        assert_eq!(failed.map(|_| ()), Err("no such file"), "{name}");
    }
}

fn words_of_another_dtype_are_refused() {
    for (_, device) in devices() {
        let ids = || Tensor::<1, Int>::from_ints([1], device);
        let dtype = ids().dtype();
        let message = format!("`words` has dtype {dtype:?}, expected U32");
        assert_refused(repack_fp4_words(ids()), &message);
        assert_refused(any_not_finite(ids(), Encoding::F32), &message);
        assert_refused(floats_of(ids(), FloatDType::F32), &message);
    }
}

catalogue![
    words_are_repacked_as_the_host_does_it,
    one_element_that_is_not_finite_is_found_wherever_it_is,
    floats_have_the_bits_of_words,
    words_arrive_as_they_were_written,
    words_of_another_dtype_are_refused,
];
