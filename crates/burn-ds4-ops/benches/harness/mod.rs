//! Parts that all operators' benchmarks share: cases, timing and reports.

mod case;
pub mod catch;
mod measure;
mod report;
mod timing;

pub use case::{Case, Outputs, Prepared};
pub use catch::catching;
pub use measure::{Effort, measure};
pub use report::Report;
pub use timing::copy_rate;
