//! The targets, which are modules of the tests. They look for their oracles beside them, so that
//! these stand here, too.

#![allow(dead_code, unused_imports)]

#[macro_use]
#[path = "../../crates/burn-ds4-ops/tests/catalogue.rs"]
mod catalogue;

#[path = "../../crates/burn-ds4-ops/tests/attending.rs"]
mod attending;
#[path = "../../crates/burn-ds4-ops/tests/caching.rs"]
mod caching;
#[path = "../../crates/burn-ds4-ops/tests/common/mod.rs"]
mod common;
#[path = "../../crates/burn-ds4-ops/tests/compressing.rs"]
mod compressing;
#[path = "../../crates/burn-ds4-ops/tests/delta.rs"]
mod delta;
#[path = "../../crates/burn-ds4-ops/tests/distributions.rs"]
mod distributions;
#[path = "../../crates/burn-ds4-ops/tests/experts.rs"]
mod experts;
#[path = "../../crates/burn-ds4-ops/tests/heads.rs"]
mod heads;
#[path = "../../crates/burn-ds4-ops/tests/linear.rs"]
mod linear;
#[path = "../../crates/burn-ds4-ops/tests/markov.rs"]
mod markov;
#[path = "../../crates/burn-ds4-ops/tests/mixing.rs"]
mod mixing;
#[path = "../../crates/burn-ds4-ops/tests/packing.rs"]
mod packing;
#[path = "../../crates/burn-ds4-ops/tests/products.rs"]
mod products;
#[path = "../../crates/burn-ds4-ops/tests/ranking.rs"]
mod ranking;
#[path = "../../crates/burn-ds4-ops/tests/rotation.rs"]
mod rotation;
#[path = "../../crates/burn-ds4-ops/tests/round_trips.rs"]
mod round_trips;
#[path = "../../crates/burn-ds4-ops/tests/routing.rs"]
mod routing;
#[path = "../../crates/burn-ds4-ops/tests/sharing.rs"]
mod sharing;
#[path = "../../crates/burn-ds4-ops/tests/storing.rs"]
mod storing;
#[path = "../../crates/burn-ds4-ops/tests/sums.rs"]
mod sums;
#[path = "../../crates/burn-ds4-ops/tests/tables/mod.rs"]
mod tables;
#[path = "../../crates/burn-ds4-ops/tests/tokens.rs"]
mod tokens;

#[path = "../../tests/it/fuzz/mod.rs"]
pub mod model;
#[path = "../../crates/burn-ds4-ops/tests/fuzz/mod.rs"]
pub mod ops;
