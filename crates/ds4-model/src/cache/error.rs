//! What a cache refuses.

use crate::config::AttentionKind;

/// Why a cache refused a request. The cache is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// A step, or a cache, of size 0.
    #[error("{argument} must be at least 1")]
    Zero {
        /// What was 0.
        argument: &'static str,
    },
    /// A sequence would become longer than the model supports.
    #[error("{requested} positions exceed the model's maximum of {maximum}")]
    TooLong {
        /// Positions that were asked for.
        requested: usize,
        /// Positions that the model supports.
        maximum: usize,
    },
    /// The cache would take more memory than the device has.
    #[error("a cache of {positions} positions takes {bytes} bytes, which do not fit in memory")]
    OutOfMemory {
        /// Positions that the cache would have memory for.
        positions: usize,
        /// Bytes that it would take.
        bytes: usize,
    },
    /// A pool has too few pages for a sequence.
    #[error("{missing} pages are missing: all {all} of the pool are in use")]
    NoPages {
        /// Pages that are missing.
        missing: usize,
        /// Pages of the pool.
        all: usize,
    },
    /// Devices that have parts of every layer cannot exchange what they have.
    #[error(transparent)]
    Group(#[from] burn_ds4_ops::collective::GroupError),
    /// More positions were to be removed than there are.
    #[error("cannot remove {count} positions of sequence {sequence}, it has {length}")]
    RemoveBeyondStart {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Positions that were to be removed.
        count: usize,
        /// Length of the sequence.
        length: usize,
    },
    /// A sequence was to be cut to more positions than it has.
    #[error("cannot truncate sequence {sequence} to {requested} positions, it has {length}")]
    TruncateBeyondEnd {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Length that was asked for.
        requested: usize,
        /// Length of the sequence.
        length: usize,
    },
    /// The rows that the shorter sequence needs have been overwritten.
    #[error(
        "cannot roll sequence {sequence} back to {requested} positions: the cache keeps what is \
         needed from {oldest} on (raise CacheConfig::rollback)"
    )]
    RolledOver {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Length that was asked for.
        requested: usize,
        /// Shortest length, other than 0, that can be gone back to.
        oldest: usize,
    },
    /// The layers of the model are not those the cache was made for.
    #[error("the cache was made for layers {actual:?}, the model has {expected:?}")]
    LayoutMismatch {
        /// Attention kinds of the model's layers.
        expected: Vec<AttentionKind>,
        /// Attention kinds of the cache's layers.
        actual: Vec<AttentionKind>,
    },
    /// The step was not begun by this cache, or the cache has begun another or was truncated since.
    #[error("the step does not follow on the cache as it is now")]
    StaleStep,
    /// The number of sequences is not that of the cache.
    #[error("{argument} has {actual} sequences, the cache has {expected}")]
    BatchMismatch {
        /// What has the wrong number of sequences.
        argument: &'static str,
        /// Number of sequences of the cache.
        expected: usize,
        /// Number that was given.
        actual: usize,
    },
    /// There is no sequence with this index.
    #[error("{argument} is {sequence}, the cache has {batch} sequences")]
    NoSuchSequence {
        /// Which one is meant.
        argument: &'static str,
        /// Index that was given.
        sequence: usize,
        /// Number of sequences of the cache.
        batch: usize,
    },
    /// The other cache differs, so that its rows mean something else.
    #[error("{argument} has {property} {actual}, the cache has {expected}")]
    NotAlike {
        /// Which cache is meant.
        argument: &'static str,
        /// Field of [`CacheLayout`](super::CacheLayout) or
        /// [`CacheConfig`](super::CacheConfig), or `device`.
        property: &'static str,
        /// What the cache has.
        expected: String,
        /// What the other has.
        actual: String,
    },
}
