use burn::tensor::Device;

/// How the eight E2M1 codes of eight neighbouring columns are arranged in a word.
///
/// A row has as many words in either layout, and its word `w` has the columns from `8 * w` on.
/// Scales are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fp4Layout {
    /// Code `c` has the bits from `4 * c` on, as in released files.
    #[default]
    Plain,
    /// The layout that tensor-core kernels decode with the fewest instructions: [`repack_fp4`]
    /// makes it of the other.
    ///
    /// With `t` for the word `w` rotated by 8 bits to the right, codes `c` and `c + 4` are what the
    /// mask `0x81c081c0` leaves of
    ///
    /// - `w` for `c = 0`,
    /// - `w << 4` for `c = 1`,
    /// - `t ^ (t << 2)` for `c = 2`,
    /// - `t ^ (t << 6)` for `c = 3`.
    ///
    /// The sign of code `c` is bit 15, and its other bits are bits 6 to 8; code `c + 4` is 16 bits
    /// above it. These are where a `bf16` has its sign, and the end of its exponent next to the
    /// beginning of its mantissa.
    Repacked,
}

impl Fp4Layout {
    /// The layout that products on a device read fastest. They accept either.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_ds4_ops::quant::Fp4Layout;
    ///
    /// assert_eq!(Fp4Layout::fastest_on(&Device::flex()), Fp4Layout::Plain);
    /// # }
    /// ```
    pub fn fastest_on(device: &Device) -> Self {
        #[cfg(feature = "cube")]
        if let Some(client) = crate::kinds::client(device)
            && crate::caps::Caps::of(&client).tensor_cores
        {
            return Self::Repacked;
        }
        let _ = device;
        Self::Plain
    }
}

/// Rearranges the codes of words of FP4, from [`Fp4Layout::Plain`] to [`Fp4Layout::Repacked`].
///
/// Words of several rows or matrices may follow each other. A word of zeros stays one.
///
/// # Example
///
/// ```
/// use burn_ds4_ops::quant::repack_fp4;
///
/// // Code 0 is -6, whose sign goes to bit 15 and the rest to bits 6 to 8.
/// let mut words = [0xf_u32];
/// repack_fp4(&mut words);
/// assert_eq!(words[0] & 0x81c0_81c0, 0x81c0);
/// ```
pub fn repack_fp4(words: &mut [u32]) {
    for word in words {
        *word = repacked(*word);
    }
}

fn repacked(word: u32) -> u32 {
    let pairs = [0, 4, 8, 12].map(|shift| {
        let codes = word >> shift;
        (codes & 0x0007_0007) << 6 | (codes & 0x0008_0008) << 12
    });
    // Two pairs are bits 6, 7, 8 and 15 of each half of the word, and those four below.
    let known = pairs[0] | pairs[1] >> 4;
    // The others, turned back, are bit `q` of the word by XOR with bit `q - 2`, and with bit
    // `q - 6`, where `q` is 7, 14, 15 or 16 of either half. One of the two bits is known, or
    // follows from what was found before.
    let [by_2, by_6] = [pairs[2], pairs[3]].map(|pair| pair.rotate_left(8));
    let q_14 = (by_6 ^ known.rotate_left(6)) & 0x4000_4000;
    let q_16 = (by_2 ^ q_14.rotate_left(2)) & 0x0001_0001;
    let upper = (known & 0x8080_8080) | q_14 | q_16;
    known | upper | (by_2 ^ upper).rotate_right(2) | (by_6 ^ upper).rotate_right(6)
}
