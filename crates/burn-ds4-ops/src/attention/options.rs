//! What kernels and everything above them agree on.

use crate::matmul::INVARIANT_ROWS;

/// Bias of a hidden key. It is finite, so that no infinity enters the arithmetic: `exp(MASKED - m)`
/// is 0 for any real maximum `m`.
pub const MASKED: f32 = -1e30;

/// The most tokens, in all sequences of a batch together, for which results are row-invariant.
/// Kernels for decoding take up to as many.
pub const DECODE_TOKENS: usize = INVARIANT_ROWS;

/// A key with a bias below this is hidden.
pub(crate) const HIDDEN_BELOW: f32 = MASKED / 2.0;
/// Less than any sum of a softmax, whose largest term is 1.
pub(crate) const TINY: f32 = 1e-30;

/// Channels that share a scale in [`RowRounding::Content`].
pub const CONTENT_BLOCK: usize = 64;

/// Channels that share a scale in [`RowRounding::Whole`].
pub const WHOLE_BLOCK: usize = 32;

/// Channels that share a scale in [`RowRounding::Shared`].
pub const SHARED_BLOCK: usize = 16;

/// How a row is rounded before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowRounding {
    /// It is not rounded.
    #[default]
    None,
    /// The channels that are not rotated go through an [FP8 round
    /// trip](crate::quant::fp8_roundtrip), in blocks of [`CONTENT_BLOCK`].
    Content,
    /// All channels go through a [Hadamard transform](crate::quant::hadamard) and an [FP4 round
    /// trip](crate::quant::fp4_roundtrip), in blocks of [`FP4_BLOCK`](crate::quant::FP4_BLOCK).
    Index,
    /// All channels go through an [FP8 round trip](crate::quant::fp8_roundtrip), in blocks of
    /// [`WHOLE_BLOCK`]: a row of DeepSeek-V4.1's window.
    Whole,
    /// All channels go through an [FP4 round trip with E4M3
    /// scales](crate::quant::fp4_scaled_roundtrip), in blocks of [`SHARED_BLOCK`]: a compressed row
    /// of DeepSeek-V4.1.
    Shared,
    /// All channels go through an [FP4 round trip](crate::quant::fp4_roundtrip), in blocks of
    /// [`FP4_BLOCK`](crate::quant::FP4_BLOCK): an indexer's key of DeepSeek-V4.1.
    Key,
}

impl RowRounding {
    /// Whether kernels round like that. Plain tensor operations do otherwise.
    #[cfg(feature = "cube")]
    pub(super) fn has_kernel(self) -> bool {
        matches!(self, Self::None | Self::Content | Self::Index)
    }
}

/// Which slot of a window has the row of a position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WindowLayout {
    /// Slot `position % slots`, where [`append_rows`](super::append_rows) stores it.
    #[default]
    Ring,
    /// The last slot has the row of the last query's position, each slot before it that of the
    /// position before.
    Latest,
}
