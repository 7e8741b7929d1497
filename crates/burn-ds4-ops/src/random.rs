//! Stateless random numbers: Philox-4x32-10, by Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3" (SC 2011).

#[cfg(feature = "cube")]
use cubecl::prelude::*;

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// Added to the words of the key after each round.
const KEY_INCREMENTS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The four random words of a key and a counter.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [a, b] = [
            u64::from(MULTIPLIERS[0]) * u64::from(counter[0]),
            u64::from(MULTIPLIERS[1]) * u64::from(counter[2]),
        ];
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        for (word, increment) in key.iter_mut().zip(KEY_INCREMENTS) {
            *word = word.wrapping_add(increment);
        }
    }
    counter
}

/// The first two words of [`philox`] for a counter of one word followed by zeros.
#[cfg(feature = "cube")]
#[cube]
pub(crate) fn philox_words(counter: u32, key: (u32, u32)) -> (u32, u32) {
    let mut first = counter;
    let mut second = 0u32;
    let mut third = 0u32;
    let mut fourth = 0u32;
    #[unroll]
    for round in 0..comptime!(ROUNDS as u32) {
        let increments = comptime!([
            round.wrapping_mul(KEY_INCREMENTS[0]),
            round.wrapping_mul(KEY_INCREMENTS[1])
        ]);
        let multipliers = comptime!(MULTIPLIERS);
        let (a, b) = (comptime!(multipliers[0]), comptime!(multipliers[1]));
        let (increment_a, increment_b) = (comptime!(increments[0]), comptime!(increments[1]));
        let high_a = first.mul_hi(a.runtime());
        let low_a = first * a;
        let high_b = third.mul_hi(b.runtime());
        let low_b = third * b;
        first = high_b ^ second ^ (key.0 + increment_a);
        second = low_b;
        third = high_a ^ fourth ^ (key.1 + increment_b);
        fourth = low_a;
    }
    (first, second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_answers_of_the_authors_come_out() {
        let all = u32::MAX;
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        for (counter, key, expected) in [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [all; 4],
                [all; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                pi,
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), expected);
        }
    }
}
