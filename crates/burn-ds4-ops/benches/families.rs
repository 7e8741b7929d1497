//! The benchmarks of every operator, for the benchmark binary and for the tests, which run each
//! operator's smallest case once.

mod attention;
mod cached_attention;
mod compress_rows;
mod flash_head;
mod gated_delta;
pub mod harness;
mod markov;
mod moe;
mod moe_shared;
mod norm;
mod quant_linear;
mod router;
mod sampling;
mod small_m;
mod store_step;
mod topk;

use std::{collections::BTreeMap, io, path::PathBuf};

use burn::tensor::Device;
use burn_ds4_ops::device::DeviceSpec;

use super::common::{devices, skip};
use harness::{Case, Effort, Report, catching, copy_rate, measure};

pub fn cases() -> Vec<Case> {
    let families = [
        attention::cases,
        cached_attention::cases,
        compress_rows::cases,
        store_step::cases,
        router::cases,
        topk::cases,
        small_m::cases,
        quant_linear::cases,
        moe::cases,
        moe_shared::cases,
        norm::cases,
        flash_head::cases,
        markov::cases,
        gated_delta::cases,
        sampling::cases,
    ];
    families.into_iter().flat_map(|cases| cases()).collect()
}

/// Returns whether all outputs were right and nothing was skipped that must not be. Cases of a
/// dtype that the device lacks are skipped.
pub fn time(
    cases: &[Case],
    spec: DeviceSpec,
    device: &Device,
    effort: Effort,
    json: Option<PathBuf>,
) -> io::Result<bool> {
    // Without `catching`, nobody would print the message of a panic: the panic hook only stores it.
    let copy_gbps = catching(|| copy_rate(device, effort.copy_elements, effort.samples))
        .map_err(io::Error::other)?;
    let codegen = codegen(spec);
    println!("device {spec}, code generator {codegen}, copy {copy_gbps:.0} GB/s");
    let report = Report::new(codegen, copy_gbps, json, cases)?;
    let mut right = true;
    for case in cases {
        if !device.supports_dtype(case.dtype) {
            println!("skipped: {}", case.id());
            if let Err(error) = catching(|| skip(&spec.to_string(), &case.dtype_name())) {
                right = false;
                println!("{error}");
            }
            continue;
        }
        let times = measure(case, device, effort);
        report.add(case, times.as_ref().ok().copied())?;
        if let Err(error) = times {
            right = false;
            println!("{error}");
        }
    }
    Ok(right)
}

/// The compiler of a device's kernels.
fn codegen(spec: DeviceSpec) -> &'static str {
    match spec {
        DeviceSpec::Flex => "none",
        DeviceSpec::Wgpu => "wgsl",
        DeviceSpec::Cuda(_) if cfg!(feature = "cuda") => "cpp",
        DeviceSpec::Cuda(_) | DeviceSpec::Cpu => "llvm",
    }
}

#[test]
fn the_smallest_case_of_every_operator_runs_on_every_device() {
    let mut smallest: BTreeMap<&str, Case> = BTreeMap::new();
    for case in cases() {
        let best = smallest.get(case.op);
        if best.is_none_or(|best| case.bytes < best.bytes) {
            smallest.insert(case.op, case);
        }
    }
    let cases: Vec<Case> = smallest.into_values().collect();
    for (name, device) in devices() {
        let spec = name.parse().expect("a device by its name");
        assert!(time(&cases, spec, device, Effort::SMOKE, None).expect("a report"));
    }
}
