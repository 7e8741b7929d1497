//! The tests inside the modules of the program.

// Without `main`, much of it is used by nothing.
#![allow(dead_code)]

mod answer;
mod chat;
mod generator;
mod options;
mod page;
mod prompt;
#[path = "../shared/mod.rs"]
mod shared;
