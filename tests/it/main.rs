//! Tests across the crates. One binary, so that one copy of it tests everything on another machine.

mod batch;
mod cache;
mod cli;
mod cli_flash_head;
#[path = "../../crates/burn-ds4-ops/tests/common/mod.rs"]
mod common;
mod cycle;
mod decoder;
mod ds4_tiny;
mod flash_head;
mod gated_delta_net;
mod golden;
mod layer_goldens;
mod precision;
mod sampled;
mod sequences;
mod verification;
