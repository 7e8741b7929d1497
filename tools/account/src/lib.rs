//! The account of a decode step: what each of its launches takes, and how much of that the memory needs.
//!
//! [`profile`] reads what NVIDIA's `ncu` prints, [`account`] settles on the launches of the step and adds up what neighbours of one kind
//! took, and [`table`] writes it down.

pub mod account;
mod csv;
pub mod error;
pub mod profile;
pub mod table;
