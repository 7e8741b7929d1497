//! Rows that are hard on a selection: ties by the thousand, bits in common, clusters, and periods
//! that mislead a sample.

use burn_ds4_ops::attention::MASKED;

/// A reproducible stream (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// In `0..below`.
    pub fn index(&mut self, below: usize) -> usize {
        ((u64::from(self.bits()) * below as u64) >> 32) as usize
    }

    /// In `0.0..1.0`.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 24) as f32
    }

    /// Normally distributed (Box-Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.unit()).cos()
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.index(count) == 0
    }

    fn finite(&mut self) -> f32 {
        loop {
            let value = f32::from_bits(self.bits());
            if value.is_finite() {
                return value;
            }
        }
    }
}

/// Where an entry is.
#[derive(Clone, Copy)]
pub struct Place {
    pub column: usize,
    pub columns: usize,
}

impl Place {
    /// Whether it is among some 300 neighbours around a place in thousandths of the row.
    fn near(self, thousandths: usize) -> bool {
        let center = self.columns * thousandths / 1000;
        self.column.abs_diff(center) < 300.min(self.columns / 8 + 1)
    }

    fn before(self, thousandths: usize) -> bool {
        self.column < self.columns * thousandths / 1000
    }
}

/// A kind of row, by name.
pub type Distribution = (&'static str, fn(&mut Random, Place) -> f32);

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// The values that have these 22 upper bits.
fn ten_low_bits(random: &mut Random, upper: u32) -> f32 {
    f32::from_bits(upper | random.bits() & 0x3FF)
}

pub const NORMAL: Distribution = ("normal", |random, _| random.normal());
pub const TEN_LOW_BITS: Distribution = ("ten low bits", |random, _| {
    ten_low_bits(random, 0x3F90_0000)
});
pub const ALL_EQUAL: Distribution = ("all equal", |_, _| 1.5);
pub const ASCENDING: Distribution = ("ascending", |_, at| at.column as f32);
pub const DESCENDING: Distribution = ("descending", |_, at| -(at.column as f32));

pub const DISTRIBUTIONS: &[Distribution] = &[
    NORMAL,
    ("uniform", |random, _| random.unit()),
    TEN_LOW_BITS,
    ("ten low bits, negative", |random, _| {
        ten_low_bits(random, 0xBF90_0000)
    }),
    ("ten low bits around zero", |random, _| {
        let sign = random.bits() & 0x8000_0000;
        ten_low_bits(random, sign)
    }),
    ("ten low bits below infinity", |random, _| {
        ten_low_bits(random, 0x7F7F_FC00)
    }),
    ALL_EQUAL,
    ("all equal and negative", |_, _| -1.5),
    ("all -inf", |_, _| -INF),
    ("all +inf", |_, _| INF),
    ("all NaN", |_, _| NAN),
    ("NaNs of all kinds", |random, _| {
        f32::from_bits(0x7F80_0001 | random.bits() & 0x807F_FFFF)
    }),
    ("zeros of both signs", |random, _| {
        if random.one_in(2) { 0.0 } else { -0.0 }
    }),
    (
        "a positive zero here and there among negative ones",
        |random, _| {
            if random.one_in(150) { 0.0 } else { -0.0 }
        },
    ),
    (
        "a negative zero here and there among positive ones",
        |random, _| {
            if random.one_in(150) { -0.0 } else { 0.0 }
        },
    ),
    ("zeros and next to them", |random, _| {
        [0.0, -0.0, f32::MIN_POSITIVE, -f32::MIN_POSITIVE][random.index(4)]
    }),
    ("half equal, few above", |random, _| {
        match random.index(200) {
            0 => 2.0 + random.unit(),
            1..=100 => 1.0,
            _ => random.unit() - 1.0,
        }
    }),
    ("quantized normal", |random, _| {
        (random.normal() * 4.0).round() / 4.0
    }),
    ("two values", |random, _| random.index(2) as f32),
    ("two values, one rare", |random, _| {
        f32::from(u8::from(random.one_in(1000)))
    }),
    ("two values, one next to the other", |random, _| {
        f32::from_bits(0x4048_F5C3 + u32::from(random.one_in(2)))
    }),
    ("NaN here and there", |random, _| {
        if random.one_in(20) {
            NAN
        } else {
            random.normal()
        }
    }),
    ("a number here and there among NaN", |random, _| {
        if random.one_in(200) {
            random.normal()
        } else {
            NAN
        }
    }),
    ("few numbers among -inf", |random, _| {
        if random.one_in(500) {
            random.normal()
        } else {
            -INF
        }
    }),
    ("few +inf", |random, _| {
        if random.one_in(300) {
            INF
        } else {
            random.normal()
        }
    }),
    ("many +inf", |random, _| {
        if random.one_in(3) {
            INF
        } else {
            random.normal()
        }
    }),
    ("infinities, extremes and NaN", |random, _| {
        [NAN, INF, -INF, f32::MIN, f32::MAX, MASKED][random.index(6)]
    }),
    ("any bits", |random, _| f32::from_bits(random.bits())),
    ("any finite", |random, _| random.finite()),
    ("denormal", |random, _| {
        f32::from_bits(random.bits() & 0x807F_FFFF)
    }),
    ("tiny", |random, _| random.normal() * 1e-30),
    ("huge", |random, _| random.normal() * 1e37),
    ASCENDING,
    DESCENDING,
    ("ascending in steps", |_, at| (at.column / 700) as f32),
    ("descending in steps", |_, at| -((at.column / 700) as f32)),
    ("ascending through all exponents", |_, at| {
        f32::from_bits((at.column as u64 * 0x7F00_0000 / at.columns as u64) as u32)
    }),
    ("cluster at the start", |random, at| {
        random.normal() + if at.near(0) { 100.0 } else { 0.0 }
    }),
    ("cluster in the middle", |random, at| {
        random.normal() + if at.near(500) { 100.0 } else { 0.0 }
    }),
    ("cluster at the end", |random, at| {
        random.normal() + if at.near(1000) { 100.0 } else { 0.0 }
    }),
    ("one large half", |random, at| {
        random.normal() + if at.before(500) { 0.0 } else { 50.0 }
    }),
    ("-inf beyond a third", |random, at| {
        if at.before(333) {
            random.normal()
        } else {
            -INF
        }
    }),
    ("masked beyond a third", |random, at| {
        random.normal() + if at.before(333) { 0.0 } else { MASKED }
    }),
    ("masked but for a start", |random, at| {
        if at.before(10) {
            random.normal()
        } else {
            MASKED
        }
    }),
];

/// A row that has `run` large values every `period` columns, from column `phase` on, or everywhere
/// else.
#[derive(Clone, Copy, Debug)]
pub struct Periodic {
    pub period: usize,
    pub phase: usize,
    pub run: usize,
    pub inverse: bool,
}

impl Periodic {
    pub fn row(self, columns: usize, random: &mut Random) -> Vec<f32> {
        let place = |column: usize| (column + self.period - self.phase) % self.period;
        let large = |column: usize| (place(column) < self.run) != self.inverse;
        (0..columns)
            .map(|column| random.unit() + if large(column) { 10.0 } else { 0.0 })
            .collect()
    }
}

/// A row of a distribution.
pub fn row((_, value): Distribution, columns: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..columns)
        .map(|column| value(&mut random, Place { column, columns }))
        .collect()
}

/// A row of each distribution.
pub fn rows(distributions: &[Distribution], columns: usize, seed: u64) -> Vec<f32> {
    let seeds = seed..;
    distributions
        .iter()
        .zip(seeds)
        .flat_map(|(&distribution, seed)| row(distribution, columns, seed))
        .collect()
}
