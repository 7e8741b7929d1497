//! Verifies and times every operator. It also contains the tests of `tests/`, for machines that get
//! one binary only.

// Tests that use no device are run by the test harness only.
#[allow(dead_code, unused_imports)]
#[path = "../tests/main.rs"]
mod tests;

use std::{path::PathBuf, process::ExitCode};

use burn::tensor::Device;
use burn_ds4_ops::device::DeviceSpec;
use clap::{Parser, Subcommand};

use tests::{
    CATALOGUE,
    common::devices,
    families::{
        cases,
        harness::{Case, Effort, catch::report_panics_here, catching},
        time,
    },
};

/// Verifies and times the operators.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the tests of every operator on every device; DS4_REQUIRE makes a missing device a
    /// failure.
    Verify {
        /// Parts of `family::test`; all tests if there are none.
        filters: Vec<String>,
    },
    /// Verify and time the cases.
    Time {
        /// Part of `op/shape/variant/dtype`.
        filter: Option<String>,
        /// cuda, cuda:INDEX, wgpu, flex or cpu; the first of these that is present if none is
        /// named.
        #[arg(long)]
        device: Option<DeviceSpec>,
        /// Also write the results to DIR/<op>.jsonl.
        #[arg(long, value_name = "DIR")]
        json: Option<PathBuf>,
        /// The last cache before memory, in MiB: inputs rotate over more than twice of it.
        #[arg(long, default_value_t = 60)]
        cache: usize,
    },
    /// Call every case once, whatever it returns, for the sake of what is compiled.
    Launch {
        /// Parts of `op/shape/variant/dtype`; all cases if there are none.
        filters: Vec<String>,
        /// As for `time`.
        #[arg(long)]
        device: Option<DeviceSpec>,
    },
    /// Print the names of all cases and tests.
    List,
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().collect();
    let benchmark = arguments.iter().position(|argument| argument == "--bench");
    let names = ["verify", "time", "launch", "list", "help", "--help", "-h"];
    let named = |name: &String| names.contains(&name.as_str());
    match benchmark {
        // From `cargo bench`, which puts it last.
        Some(index) => {
            arguments.remove(index);
            if !arguments.get(1).is_some_and(named) {
                arguments.insert(1, "time".into());
            }
        }
        // From `cargo test --all-targets`: the test binary has all of this file's tests.
        None if !arguments.get(1).is_some_and(named) => return ExitCode::SUCCESS,
        None => {}
    }
    let arguments = Arguments::parse_from(arguments);
    report_panics_here();
    match arguments.command {
        Command::Verify { filters } => verify(&filters),
        Command::Time {
            filter,
            device,
            json,
            cache,
        } => {
            let mut cases = cases();
            cases.retain(|case| case.id().contains(filter.as_deref().unwrap_or_default()));
            let result = device_or_best(device).and_then(|(spec, device)| {
                let effort = Effort {
                    cache_bytes: cache << 20,
                    calls: 40,
                    short_calls: 400,
                    samples: 12,
                    copy_elements: if matches!(spec, DeviceSpec::Cuda(_)) {
                        1 << 29
                    } else {
                        1 << 23
                    },
                };
                time(&cases, spec, &device, effort, json).map_err(|error| error.to_string())
            });
            finish(result)
        }
        Command::Launch { filters, device } => {
            let launched = device_or_best(device).and_then(|(_, device)| {
                let cases = cases();
                launch(
                    cases.iter().filter(|case| is_named(&case.id(), &filters)),
                    &device,
                )
            });
            finish(launched)
        }
        Command::List => {
            for case in cases() {
                println!("{}", case.id());
            }
            for (name, _) in catalogue() {
                println!("{name}");
            }
            ExitCode::SUCCESS
        }
    }
}

fn finish(result: Result<bool, String>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn device_or_best(spec: Option<DeviceSpec>) -> Result<(DeviceSpec, Device), String> {
    if let Some(spec) = spec {
        let device = spec.init().map_err(|error| error.to_string())?;
        return Ok((spec, device));
    }
    let specs = [DeviceSpec::Cuda(0), DeviceSpec::Wgpu, DeviceSpec::Flex];
    specs
        .into_iter()
        .find_map(|spec| Some((spec, spec.init().ok()?)))
        .ok_or_else(|| "no device is compiled in and present".into())
}

fn catalogue() -> impl Iterator<Item = (String, fn())> {
    CATALOGUE.iter().flat_map(|(family, tests)| {
        tests
            .iter()
            .map(move |(test, run)| (format!("{family}::{test}"), *run))
    })
}

/// Whether one of the filters is a part of the name, or there is none.
fn is_named(name: &str, filters: &[String]) -> bool {
    filters.is_empty() || filters.iter().any(|filter| name.contains(filter))
}

fn verify(filters: &[String]) -> ExitCode {
    // Before any test, so that a required device that is missing fails once, and not in a test.
    let names = catching(|| {
        let names = devices().iter().map(|(name, _)| name.as_str());
        names.collect::<Vec<_>>().join(", ")
    });
    match names {
        Ok(names) => println!("devices: {names}"),
        Err(error) => return finish(Err(error)),
    }
    let (mut passed, mut failed) = (0, 0);
    for (name, run) in catalogue().filter(|(name, _)| is_named(name, filters)) {
        match catching(run) {
            Ok(()) => {
                passed += 1;
                println!("ok      {name}");
            }
            Err(error) => {
                failed += 1;
                println!("FAILED  {name}\n{error}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    // A filter that matches nothing has verified nothing.
    finish(Ok(failed == 0 && passed > 0))
}

/// Returns whether no call failed.
fn launch<'a>(cases: impl Iterator<Item = &'a Case>, device: &Device) -> Result<bool, String> {
    let mut right = true;
    for case in cases.filter(|case| device.supports_dtype(case.dtype)) {
        println!("{}", case.id());
        let launched = catching(|| {
            drop((case.build)(device, 0).run());
            device.sync()
        });
        let error = match launched {
            Ok(done) => done.err().map(|error| error.to_string()),
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            right = false;
            println!("{error}");
        }
    }
    Ok(right)
}
