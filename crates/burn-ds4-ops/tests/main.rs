//! Every operator, on every device. One binary, so that one copy of it tests everything on another
//! machine.

#[macro_use]
mod catalogue;

mod activations;
pub(crate) mod attending;
mod attention;
mod attention_errors;
mod cached_attention;
pub(crate) mod caching;
mod collective;
pub(crate) mod common;
mod compress_rows;
mod compress_rows_errors;
pub(crate) mod compressing;
pub(crate) mod delta;
pub(crate) mod distributions;
pub(crate) mod drawn;
pub(crate) mod experts;
#[path = "../benches/families.rs"]
pub(crate) mod families;
mod flash_head;
mod flash_head_build;
mod flash_head_draw;
mod flash_head_errors;
mod flash_head_values;
#[cfg(test)]
mod fuzz;
mod gated_delta;
mod gated_delta_batches;
mod gated_delta_errors;
mod gated_delta_kernels;
mod gated_delta_large;
mod gated_delta_slot_errors;
mod gated_delta_slots;
mod gated_delta_states;
mod gated_delta_values;
mod grouped_linear;
pub(crate) mod heads;
mod hyper_connection;
mod hyper_connection_errors;
mod hyper_connection_fused;
mod hyper_connection_kernels;
mod late;
mod linear;
pub(crate) mod markov;
mod matmul;
pub(crate) mod mixing;
mod moe;
mod moe_errors;
mod moe_kernels;
mod moe_large;
mod moe_routing;
mod moe_shared;
mod moe_shared_errors;
mod norm;
pub(crate) mod packing;
pub(crate) mod pages;
pub(crate) mod products;
mod quant;
mod quant_linear;
mod quant_linear_codes;
mod quant_linear_errors;
mod quant_linear_group;
mod quant_roundtrip;
pub(crate) mod ranking;
mod readback;
pub(crate) mod rotation;
pub(crate) mod round_trips;
mod router;
mod router_errors;
mod router_kernels;
pub(crate) mod routing;
mod sampling;
mod sampling_draws;
mod sampling_errors;
mod sampling_lanes;
mod sampling_log_probs;
mod sampling_penalties;
mod sampling_recorded;
mod sampling_split;
mod sampling_verify;
pub(crate) mod sharing;
mod sink_attention;
mod sink_attention_values;
mod small_m_errors;
mod small_m_group;
mod small_m_layouts;
mod small_m_matmul;
mod small_m_rows;
mod small_m_tiles;
mod store_step;
pub(crate) mod storing;
pub(crate) mod sums;
mod tables;
pub(crate) mod tokens;
mod topk;
mod topk_errors;
mod topk_large;
mod topk_layouts;
mod topk_properties;
mod topk_rows;
mod topk_values;
mod topk_windows;
mod upload;
mod weights;

/// The tests of one family by name.
type Family = &'static [(&'static str, fn())];

/// Every family's tests, for the benchmark binary, which includes this file.
#[allow(dead_code)]
pub const CATALOGUE: &[(&str, Family)] = &[
    ("activations", activations::CASES),
    ("attention", attention::CASES),
    ("cached_attention", cached_attention::CASES),
    ("collective", collective::CASES),
    ("compress_rows", compress_rows::CASES),
    ("flash_head", flash_head::CASES),
    ("flash_head_build", flash_head_build::CASES),
    ("flash_head_draw", flash_head_draw::CASES),
    ("flash_head_values", flash_head_values::CASES),
    ("gated_delta", gated_delta::CASES),
    ("gated_delta_batches", gated_delta_batches::CASES),
    ("gated_delta_kernels", gated_delta_kernels::CASES),
    ("gated_delta_large", gated_delta_large::CASES),
    ("gated_delta_slots", gated_delta_slots::CASES),
    ("gated_delta_states", gated_delta_states::CASES),
    ("gated_delta_values", gated_delta_values::CASES),
    ("grouped_linear", grouped_linear::CASES),
    ("hyper_connection", hyper_connection::CASES),
    ("hyper_connection_errors", hyper_connection_errors::CASES),
    ("hyper_connection_fused", hyper_connection_fused::CASES),
    ("hyper_connection_kernels", hyper_connection_kernels::CASES),
    ("late", late::CASES),
    ("markov", markov::CASES),
    ("matmul", matmul::CASES),
    ("moe", moe::CASES),
    ("moe_errors", moe_errors::CASES),
    ("moe_kernels", moe_kernels::CASES),
    ("moe_large", moe_large::CASES),
    ("moe_routing", moe_routing::CASES),
    ("moe_shared", moe_shared::CASES),
    ("moe_shared_errors", moe_shared_errors::CASES),
    ("norm", norm::CASES),
    ("pages", pages::CASES),
    ("quant", quant::CASES),
    ("quant_linear", quant_linear::CASES),
    ("quant_linear_codes", quant_linear_codes::CASES),
    ("quant_linear_errors", quant_linear_errors::CASES),
    ("quant_linear_group", quant_linear_group::CASES),
    ("quant_roundtrip", quant_roundtrip::CASES),
    ("rotation", rotation::CASES),
    ("readback", readback::CASES),
    ("router", router::CASES),
    ("router_errors", router_errors::CASES),
    ("router_kernels", router_kernels::CASES),
    ("sampling", sampling::CASES),
    ("sampling_draws", sampling_draws::CASES),
    ("sampling_errors", sampling_errors::CASES),
    ("sampling_lanes", sampling_lanes::CASES),
    ("sampling_log_probs", sampling_log_probs::CASES),
    ("sampling_penalties", sampling_penalties::CASES),
    ("sampling_recorded", sampling_recorded::CASES),
    ("sampling_split", sampling_split::CASES),
    ("sampling_verify", sampling_verify::CASES),
    ("sink_attention", sink_attention::CASES),
    ("sink_attention_values", sink_attention_values::CASES),
    ("small_m_errors", small_m_errors::CASES),
    ("small_m_group", small_m_group::CASES),
    ("small_m_layouts", small_m_layouts::CASES),
    ("small_m_matmul", small_m_matmul::CASES),
    ("small_m_rows", small_m_rows::CASES),
    ("small_m_tiles", small_m_tiles::CASES),
    ("store_step", store_step::CASES),
    ("topk", topk::CASES),
    ("topk_large", topk_large::CASES),
    ("topk_layouts", topk_layouts::CASES),
    ("topk_properties", topk_properties::CASES),
    ("topk_rows", topk_rows::CASES),
    ("topk_values", topk_values::CASES),
    ("topk_windows", topk_windows::CASES),
    ("upload", upload::CASES),
    ("weights", weights::CASES),
];
