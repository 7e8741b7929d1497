//! Benchmark results as a chart and a table.
//!
//! [`input`] reads what the benchmark program printed and what the best existing kernels take, [`select`] settles on the
//! measurements to show, [`chart`] pairs the two and arranges them in panels and lines, and [`svg`] and [`table`] put the
//! arrangement on paper. [`recall`] does all of that for another kind of result, what a clustered output head finds. Equal input
//! gives equal output, byte for byte, so that a regenerated chart differs only if a figure does.

pub mod chart;
pub mod error;
pub mod input;
pub mod recall;
pub mod select;
mod style;
pub mod svg;
pub mod table;
