//! What the kernels have in common that choose from long rows: top-k and sampling.

mod bitonic;
pub(crate) mod key;
mod scan;

mod units;

pub(crate) use bitonic::sort;
pub(crate) use scan::{Scan, Scanner};
pub(crate) use units::CubeUnits;
