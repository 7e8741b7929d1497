//! Which rows of the tables a token reads.

use crate::config::EngramParams;

/// The seed of the multipliers of layer 1; those of others are its multiples.
const SEED: u64 = 10007;

/// How ids are hashed to rows of one table: the last 2, 3 and so on up to `max_ngram` ids, each by
/// several heads.
///
/// # Source
///
/// DeepSeek-V4.1 `inference/engram.py`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EngramHash {
    /// Of the id itself, the one before it, and so on.
    multipliers: Vec<u64>,
    /// By which the hash of each n-gram size and head is divided, and the first row of those it
    /// may be.
    moduli: Vec<[u64; 2]>,
    heads: usize,
    /// The id in the places before a text.
    pad: u32,
}

impl EngramHash {
    /// That of the table number `index`, with `pad` as the compressed id of the padding.
    ///
    /// # Panics
    ///
    /// If there is no such table.
    pub(crate) fn new(params: &EngramParams, index: usize, pad: u32) -> Self {
        let bound = (i64::MAX as u64 / params.compressed_vocab_size.max(1) as u64 / 2).max(1);
        let mut random = Pcg64::seeded(SEED * params.layers[index] as u64);
        let multipliers = (0..params.max_ngram).map(|_| 2 * random.below(bound) + 1);
        let multipliers = multipliers.collect();
        let primes = params.primes().skip(index * params.columns());
        let mut first = 0;
        let moduli = primes.take(params.columns()).map(|prime| {
            let own = [prime, first];
            first += prime;
            own
        });
        Self {
            multipliers,
            moduli: moduli.collect(),
            heads: params.heads,
            pad,
        }
    }

    /// The rows at position `at` of a text of compressed ids, by n-gram size and head.
    pub(crate) fn rows<'s>(&'s self, ids: &[u32], at: usize) -> impl Iterator<Item = u64> + 's {
        let mut hash = 0;
        let hashes = self
            .multipliers
            .iter()
            .enumerate()
            .map(|(back, multiplier)| {
                let id = at.checked_sub(back).map_or(self.pad, |place| ids[place]);
                hash ^= u64::from(id) * multiplier;
                hash
            });
        let hashes: Vec<u64> = hashes.skip(1).collect();
        let moduli = self.moduli.iter().enumerate();
        moduli.map(move |(column, [prime, first])| hashes[column / self.heads] % prime + first)
    }
}

/// The generator that `numpy.random.default_rng` makes of a seed: PCG XSL-RR with 128 bits of
/// state.
struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    fn seeded(seed: u64) -> Self {
        let words = SeedSequence::new(seed).words::<8>();
        let wide = |at: usize| {
            let words = words[at..at + 4].iter().enumerate();
            // Pairs of words are little-endian, the two pairs big-endian.
            words.fold(0, |sum, (word, value)| {
                sum | u128::from(*value) << (32 * (word ^ 2))
            })
        };
        let mut generator = Self {
            state: 0,
            increment: wide(4) << 1 | 1,
        };
        generator.next();
        generator.state = generator.state.wrapping_add(wide(0));
        generator.next();
        generator
    }

    fn next(&mut self) -> u64 {
        const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        self.state = self
            .state
            .wrapping_mul(MULTIPLIER)
            .wrapping_add(self.increment);
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// A number below `bound`, by Lemire's method. `numpy` draws 32 bits for bounds up to 2^32,
    /// which no table has.
    fn below(&mut self, bound: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

/// `numpy.random.SeedSequence` of one number.
struct SeedSequence {
    pool: [u32; 4],
}

impl SeedSequence {
    fn new(seed: u64) -> Self {
        let mut factor = 0x43b0_d7e5_u32;
        let mut hashed = |value: u32| {
            let value = value ^ factor;
            factor = factor.wrapping_mul(0x931e_8875);
            let value = value.wrapping_mul(factor);
            value ^ value >> 16
        };
        let mixed = |x: u32, y: u32| {
            let value = x
                .wrapping_mul(0xca01_f9dd)
                .wrapping_sub(y.wrapping_mul(0x4973_f715));
            value ^ value >> 16
        };
        let mut pool = [seed as u32, (seed >> 32) as u32, 0, 0].map(&mut hashed);
        for source in 0..pool.len() {
            for target in (0..pool.len()).filter(|target| *target != source) {
                pool[target] = mixed(pool[target], hashed(pool[source]));
            }
        }
        Self { pool }
    }

    fn words<const N: usize>(&self) -> [u32; N] {
        let mut factor = 0x8b51_f9dd_u32;
        std::array::from_fn(|word| {
            let value = self.pool[word % self.pool.len()] ^ factor;
            factor = factor.wrapping_mul(0x58f3_8ded);
            let value = value.wrapping_mul(factor);
            value ^ value >> 16
        })
    }
}
