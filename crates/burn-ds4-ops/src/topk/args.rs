//! The argument of this family's backend operations that is no tensor.

/// How many columns are visible to the tokens of a sequence, which has one length for all of its
/// rows: its first row sees `length + 1 - counted` tokens, each later row one more, and a column
/// stands for `ratio` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalWindow {
    /// Rows of a sequence.
    pub(crate) next_n: usize,
    /// How many of these rows the length already counts.
    pub(crate) counted: usize,
    /// Tokens that a column stands for.
    pub(crate) ratio: usize,
}

impl CausalWindow {
    /// One row for each sequence, where the length is the end of its window.
    pub(crate) const ONE: Self = Self {
        next_n: 1,
        counted: 1,
        ratio: 1,
    };

    /// A length from which on all columns are visible to a sequence's tokens. The caller has
    /// checked that it is small enough for a device.
    pub(crate) fn max_length(&self, columns: usize) -> usize {
        columns
            .saturating_mul(self.ratio)
            .saturating_add(self.counted)
    }
}
