//! Tests across the crates. One binary, so that one copy of it tests everything on another machine.

mod cache;
mod chunks;
#[path = "../../crates/burn-ds4-ops/tests/common/mod.rs"]
mod common;
mod constraints;
mod devices;
mod ds4_tiny;
mod dspark;
mod engine;
mod engine_memory;
mod examples;
mod flash_head;
mod fuzz;
mod gated_delta_net;
mod golden;
mod layer_goldens;
mod pages;
mod pairs;
mod pipeline;
mod precision;
mod recordings;
mod sampled;
mod scheduling;
mod sequences;
mod sizes;
mod soak;
mod tensor_parallel;
mod two_layers;
mod v41_goldens;
mod v41_texts;
mod verification;
mod warnings;
