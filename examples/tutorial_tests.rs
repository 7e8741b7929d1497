//! The tests inside the tutorial.

// Without `main`, much of it is used by nothing.
#![allow(dead_code)]

#[path = "tutorial.rs"]
mod tutorial;
