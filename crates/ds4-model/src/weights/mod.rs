//! Where the weights of modules come from.
//!
//! Every configuration has one `build`, which makes its module of a [`WeightSource`]. The source is
//! a checkpoint or [random numbers](Random), and the weights are dense or packed.

mod bits;
mod random;
mod source;
mod stack;
mod table;

pub(crate) use bits::stored_dtype;
pub(crate) use random::{Random, dense};
pub use source::load_all;
pub(crate) use source::{Initial, WeightSource, all_or_nothing};
pub(crate) use stack::int_parameter;
pub use stack::{Fp4Weight, Fp8Weight, StackValues, WeightStack};
pub use table::{EngramTable, TableSource};
