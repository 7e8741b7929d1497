//! The account of a decode step: the time of each of its launches, and how much of it the memory
//! needs.
//!
//! [`profile`] reads the output of NVIDIA's `ncu`, [`account`] selects the launches of the step and
//! adds up neighbours of one kernel, and [`table`] prints the result.

pub mod account;
mod csv;
pub mod error;
pub mod profile;
pub mod table;
