//! Where the parameters of a lane are in the two tables that kernels read: one of floats and one of
//! integers, each with [`WIDTH`] columns for every lane.

use super::params::MAX_LOGIT_BIAS;

/// Columns of both tables.
pub(super) const WIDTH: usize = 8 + MAX_LOGIT_BIAS;

// Columns of the floats. The rate is 0 where the temperature is, else that of `WeightFilter`.
pub(super) const RATE: usize = 0;
pub(super) const FARTHEST: usize = 1;
pub(super) const REPETITION: usize = 2;
pub(super) const PRESENCE: usize = 3;
pub(super) const FREQUENCY: usize = 4;
/// The first of the biases.
pub(super) const BIAS: usize = 8;

// Columns of the integers, which are the bits of unsigned ones.
pub(super) const SEED: [usize; 2] = [0, 1];
pub(super) const TOP_K: usize = 2;
/// In units of 2^-32; 0 keeps all.
pub(super) const TOP_P: usize = 3;
/// The last exponent that min-p keeps.
pub(super) const LAST: usize = 4;
/// 1 where a penalty makes a difference, else 0.
pub(super) const PENALISED: usize = 5;
/// How many biases there are.
pub(super) const BIASES: usize = 6;
/// The first of the biases' tokens.
pub(super) const BIAS_ID: usize = 8;

/// The bit of a token's count that says that the prompt has the token. The bits below it count the
/// output.
pub(super) const PROMPT: u32 = 1 << 30;
