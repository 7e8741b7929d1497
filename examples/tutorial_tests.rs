//! The tests inside the tutorial.

// Without `main`, much of it is used by nothing.
#![allow(dead_code)]
// The tutorial has the shared module, which expects to be in the root.
#![allow(clippy::duplicate_mod)]

#[path = "shared/mod.rs"]
mod shared;
#[path = "tutorial.rs"]
mod tutorial;
