//! 64-bit integers, for shader languages that have none.

use cubecl::prelude::*;

/// Bits of a limb.
const LIMB_BITS: u32 = 22;

#[derive(CubeType, Clone, Copy)]
pub(super) struct Wide {
    pub high: u32,
    pub low: u32,
}

#[cube]
impl Wide {
    pub fn new(high: u32, low: u32) -> Wide {
        Wide { high, low }
    }

    pub fn product(a: u32, b: u32) -> Wide {
        Wide {
            high: a.mul_hi(b),
            low: a * b,
        }
    }

    pub fn add(&mut self, other: &Wide) {
        let low = self.low + other.low;
        self.high += other.high + select(low < other.low, 1u32, 0u32);
        self.low = low;
    }

    pub fn minus(&self, other: &Wide) -> Wide {
        let borrow = select(self.low < other.low, 1u32, 0u32);
        Wide {
            high: self.high - other.high - borrow,
            low: self.low - other.low,
        }
    }

    pub fn is_below(&self, other: &Wide) -> bool {
        self.high < other.high || (self.high == other.high && self.low < other.low)
    }

    /// Three numbers of at most 22 bits, sums of which [`from_limbs`](Self::from_limbs) puts
    /// together. Each of them can be added a thousand times without a carry.
    pub fn limb(&self, #[comptime] index: u32) -> u32 {
        let mask = comptime!((1u32 << LIMB_BITS) - 1);
        if comptime!(index == 0) {
            self.low & mask
        } else if comptime!(index == 1) {
            ((self.low >> LIMB_BITS) | (self.high << comptime!(32 - LIMB_BITS))) & mask
        } else {
            self.high >> comptime!(2 * LIMB_BITS - 32)
        }
    }

    pub fn from_limbs(first: u32, second: u32, third: u32) -> Wide {
        let mut sum = Wide::new(0u32, first);
        sum.add(&Wide::new(
            second >> comptime!(32 - LIMB_BITS),
            second << LIMB_BITS,
        ));
        sum.add(&Wide::new(third << comptime!(2 * LIMB_BITS - 32), 0u32));
        sum
    }

    pub fn is_zero(&self) -> bool {
        self.high == 0 && self.low == 0
    }

    /// The product with `factor`, divided by 2^32 and rounded up.
    pub fn fraction(&self, factor: u32) -> Wide {
        let low = Wide::product(self.low, factor);
        let mut fraction = Wide::product(self.high, factor);
        fraction.add(&Wide::new(0u32, low.high));
        fraction.add(&Wide::new(0u32, select(low.low > 0, 1u32, 0u32)));
        fraction
    }

    /// The product with `other`, divided by 2^64 and rounded down.
    pub fn high_product(&self, other: &Wide) -> Wide {
        let low = Wide::product(self.low, other.low);
        let middle = Wide::product(self.high, other.low);
        let second = Wide::product(self.low, other.high);
        let mut carries = Wide::new(0u32, middle.low);
        carries.add(&Wide::new(0u32, second.low));
        carries.add(&Wide::new(0u32, low.high));
        let mut product = Wide::product(self.high, other.high);
        product.add(&Wide::new(0u32, middle.high));
        product.add(&Wide::new(0u32, second.high));
        product.add(&Wide::new(0u32, carries.high));
        product
    }
}
