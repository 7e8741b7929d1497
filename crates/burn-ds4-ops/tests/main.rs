//! Every operator, on every device. One binary, so that one copy of it tests everything on another machine.

#[macro_use]
mod catalogue;

mod attention;
pub(crate) mod common;
mod hyper_connection;
mod matmul;
mod moe;
mod quant;
mod quant_roundtrip;
mod router;
mod router_kernels;
pub(crate) mod routing;
mod tables;
mod topk;

/// The tests of one family by name.
type Family = &'static [(&'static str, fn())];

/// Every family's tests, for the benchmark binary, which includes this file.
#[allow(dead_code)]
pub const CATALOGUE: &[(&str, Family)] = &[
    ("attention", attention::CASES),
    ("hyper_connection", hyper_connection::CASES),
    ("matmul", matmul::CASES),
    ("moe", moe::CASES),
    ("quant", quant::CASES),
    ("quant_roundtrip", quant_roundtrip::CASES),
    ("router", router::CASES),
    ("router_kernels", router_kernels::CASES),
    ("topk", topk::CASES),
];
