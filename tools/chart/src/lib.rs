//! Benchmark results as a chart and a table.
//!
//! [`input`] reads the output of the benchmark program and the times of the best existing kernels.
//! [`select`] chooses the measurements to show. [`chart`] pairs the two and arranges them in panels
//! and lines. [`svg`] and [`table`] draw and print the arrangement. [`recall`] does all of that for
//! another kind of result: the recall of a clustered output head. Equal input gives equal output,
//! byte for byte, so that a regenerated chart differs only if a figure does.

pub mod chart;
pub mod error;
pub mod input;
pub mod recall;
pub mod select;
mod sizes;
mod style;
pub mod svg;
pub mod table;
