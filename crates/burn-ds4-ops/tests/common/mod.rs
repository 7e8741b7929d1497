//! What every integration test needs: the devices to run on, and comparisons that say what went
//! wrong.

// Each test binary compiles this module for itself and uses the part that it needs.
#![allow(dead_code)]

pub mod errors;

use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_ds4_ops::OpError;
use burn_ds4_ops::device::DeviceSpec;

/// Names a comma-separated list of devices to test, in place of all.
const DEVICES: &str = "DS4_DEVICES";
/// Names a comma-separated list of devices that must be there; without it a missing device is only
/// reported.
const REQUIRE: &str = "DS4_REQUIRE";
/// Names a comma-separated list of `device:capability` that a required device may lack.
const MAY_LACK: &str = "DS4_MAY_LACK";

/// The devices that are tested unless some are named.
const ALL: [DeviceSpec; 3] = [DeviceSpec::Flex, DeviceSpec::Wgpu, DeviceSpec::Cuda(0)];

/// Every device that is compiled in and present, by name; of those that `DS4_DEVICES` names, if it
/// is set.
///
/// # Panics
///
/// Where `DS4_REQUIRE` names a device that is missing, one of the variables names something that is
/// no device, and where there is no device at all.
pub fn devices() -> &'static [(String, Device)] {
    static FOUND: OnceLock<Vec<(String, Device)>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let required = specs(REQUIRE);
        let mut found = Vec::new();
        for spec in tested() {
            match spec.init() {
                Ok(device) => found.push((spec.to_string(), device)),
                Err(error) => {
                    assert!(!required.contains(&spec), "{REQUIRE} names {spec}: {error}");
                    // Not by a macro, whose output the harness shows only where a test fails.
                    let _ = writeln!(std::io::stderr(), "skipped: {spec} ({error})");
                }
            }
        }
        assert!(!found.is_empty(), "there is no device to test");
        found
    })
}

/// A device other than the first, whether `DS4_DEVICES` names it or not. Reports where there is
/// none.
pub fn second_device() -> Option<&'static (String, Device)> {
    static OTHER: OnceLock<Option<(String, Device)>> = OnceLock::new();
    let other = || {
        let mut others = ALL.into_iter().map(|spec| (spec.to_string(), spec));
        others.find_map(|(name, spec)| {
            let is_first = devices()[0].0 == name;
            Some((name, spec.init().ok().filter(|_| !is_first)?))
        })
    };
    let second = devices().get(1);
    let second = second.or_else(|| OTHER.get_or_init(other).as_ref());
    if second.is_none() {
        eprintln!("skipped: a second device");
    }
    second
}

/// The first two devices. Reports where there is but one.
pub fn two_devices() -> Option<[&'static Device; 2]> {
    second_device().map(|(_, second)| [&devices()[0].1, second])
}

/// Fails unless an operator has refused an argument that is not on the device of another one.
#[track_caller]
pub fn assert_on_another_device<T>(result: Result<T, OpError>, named: [&str; 2]) {
    match result.err() {
        Some(OpError::DeviceMismatch {
            argument, other, ..
        }) => assert_eq!([argument, other], named),
        error => panic!("{named:?}: {error:?}"),
    }
}

/// Fails unless an operator has refused an argument by this message.
#[track_caller]
pub fn assert_refused<T>(result: Result<T, OpError>, message: &str) {
    let error = result.err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some(message));
}

/// A change of good arguments, and the message for it.
pub type Refusal<A> = (fn(&mut A), &'static str);

/// Fails unless an operator accepts its good arguments, and refuses each change of them by its
/// message.
#[track_caller]
pub fn assert_each_refused<A, T>(
    good: impl Fn() -> A,
    run: impl Fn(A) -> Result<T, OpError>,
    changes: &[(impl Fn(&mut A), &str)],
) {
    if let Err(error) = run(good()) {
        panic!("good arguments are refused: {error}");
    }
    for (change, message) in changes {
        let mut arguments = good();
        change(&mut arguments);
        assert_refused(run(arguments), message);
    }
}

/// The devices to test. CubeCL's CPU runtime is one of them only by name: most tests take minutes
/// on it.
fn tested() -> Vec<DeviceSpec> {
    match specs(DEVICES) {
        none if none.is_empty() => ALL.to_vec(),
        named => named,
    }
}

/// The devices that a variable names.
fn specs(variable: &str) -> Vec<DeviceSpec> {
    list(variable)
        .iter()
        .map(|name| {
            name.parse()
                .unwrap_or_else(|error| panic!("{variable}: {error}"))
        })
        .collect()
}

fn list(variable: &str) -> Vec<String> {
    let list = std::env::var(variable).unwrap_or_default();
    list.split(',')
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .collect()
}

/// Reports that a device of [`devices`] lacks what a test needs; `capability` is a dtype in lower
/// case or a term such as `planes`.
///
/// # Panics
///
/// Where `DS4_REQUIRE` names the device and `DS4_MAY_LACK` does not name `device:capability`.
pub fn skip(device: &str, capability: &str) {
    let device = device.split(' ').next().unwrap_or_default();
    let spec: DeviceSpec = device.parse().expect("a device by its name");
    let allowed = list(MAY_LACK).iter().any(|entry| {
        let entry = entry.rsplit_once(':');
        entry.is_some_and(|(name, what)| name.parse() == Ok(spec) && what == capability)
    });
    assert!(
        allowed || !specs(REQUIRE).contains(&spec),
        "{REQUIRE} names {device}, which lacks {capability}; \
         {MAY_LACK}={device}:{capability} allows that"
    );
    eprintln!("skipped: {device} lacks {capability}");
}

/// Whether `DS4_CAPS` takes capabilities away, so that other kernels sum than usually do.
pub fn is_limited() -> bool {
    std::env::var_os("DS4_CAPS").is_some()
}

/// Whether `DS4_CAPS` makes the size of a plane a range: kernels that rely on it are not used then.
pub fn planes_vary() -> bool {
    std::env::var("DS4_CAPS").is_ok_and(|limits| limits.contains("plane_min"))
}

/// The float dtypes of the operators.
pub const FLOATS: [FloatDType; 3] = [FloatDType::F32, FloatDType::F16, FloatDType::BF16];

/// The float dtypes that a device has. Reports the others.
pub fn dtypes(name: &str, device: &Device) -> Vec<FloatDType> {
    let has = |dtype: &FloatDType| {
        let has = device.supports_dtype(*dtype);
        if !has {
            skip(name, &format!("{dtype:?}").to_lowercase());
        }
        has
    };
    FLOATS.into_iter().filter(has).collect()
}

/// Runs `test` with every float dtype that each device has.
pub fn every_dtype(test: impl Fn(&str, &Device, FloatDType)) {
    for (name, device) in devices() {
        for dtype in dtypes(name, device) {
            test(&format!("{name} {dtype:?}"), device, dtype);
        }
    }
}

/// Runs `test` on every device with the sizes that it can take.
pub fn sized<S: Copy>(on_gpu: S, elsewhere: S, test: impl Fn(&str, &Device, S)) {
    for (name, device) in devices() {
        let size = if is_gpu(name) { on_gpu } else { elsewhere };
        test(name, device, size);
    }
}

/// Whether a device of that name is a GPU. wgpu may be one, too; where tests run with it, it is a
/// software driver.
pub fn is_gpu(name: &str) -> bool {
    name.starts_with("cuda")
}

/// Whether a device of that name, or of one that begins with it, compiles kernels for longer than
/// it runs them.
pub fn compiles_slowly(name: &str) -> bool {
    name.starts_with("wgpu") || name.starts_with("cpu")
}

/// Another number for devices that compile slowly.
pub fn few<T>(name: &str, many: T, few: T) -> T {
    match compiles_slowly(name) {
        true => few,
        false => many,
    }
}

/// What a test takes of its shapes: all of them, or every `step`th where each of them makes another
/// kernel on a device that compiles slowly. For what another test, or another dtype of the same
/// one, takes all shapes of.
pub fn some<'a, T>(
    name: &str,
    all: &'a [T],
    step: usize,
) -> impl Iterator<Item = &'a T> + use<'a, T> {
    all.iter()
        .step_by(if compiles_slowly(name) { step } else { 1 })
}

/// All shapes of f32, [`some`] of every other dtype.
pub fn some_of_half<'a, T>(
    name: &str,
    dtype: FloatDType,
    all: &'a [T],
    step: usize,
) -> impl Iterator<Item = &'a T> + use<'a, T> {
    some(name, all, if dtype == FloatDType::F32 { 1 } else { step })
}

/// The elements of a tensor, read back as `f32`.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as().expect("a device that works")
}

/// The elements of a tensor of any float dtype.
pub fn read<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    values(tensor.clone().cast(FloatDType::F32))
}

/// A tensor of this dtype, and the values that it holds in place of `data`.
pub fn rounded<const D: usize>(
    data: &[f32],
    shape: [usize; D],
    dtype: FloatDType,
    device: &Device,
) -> (Tensor<D>, Vec<f64>) {
    let tensor = floats(data, shape, device).cast(dtype);
    let held = wide(&read(&tensor));
    (tensor, held)
}

/// What a result in f16 or bf16 may be off by for its rounding, relative to its size.
pub fn half_unit(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::F16 => 2f64.powi(-11),
        FloatDType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

/// Absolute and relative tolerance: `|actual - expected| <= absolute + relative * |expected|`.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub absolute: f64,
    pub relative: f64,
}

/// Nothing but equal values; zeros of either sign are equal, and so are NaNs.
pub const EXACT: Tolerance = Tolerance {
    absolute: 0.0,
    relative: 0.0,
};

/// The same absolute tolerance everywhere.
pub const fn absolute(absolute: f64) -> Tolerance {
    Tolerance {
        absolute,
        relative: 0.0,
    }
}

/// Fails with the number of mismatches, the largest error and its index, and the first few
/// mismatches.
#[track_caller]
pub fn assert_close(actual: &[f32], expected: &[f32], tolerance: Tolerance, what: &str) {
    let allowed =
        |index: usize| tolerance.absolute + tolerance.relative * f64::from(expected[index]).abs();
    assert_within(actual, expected, allowed, what);
}

/// The same with an allowed error for each element; where that is no finite number, none is
/// allowed.
#[track_caller]
pub fn assert_within(actual: &[f32], expected: &[f32], allowed: impl Fn(usize) -> f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of elements");
    let error = |index: usize| {
        let (a, e) = (f64::from(actual[index]), f64::from(expected[index]));
        if a == e || (a.is_nan() && e.is_nan()) {
            0.0
        } else {
            // A NaN or infinity on one side only would otherwise compare as no error at all.
            Some((a - e).abs())
                .filter(|error| !error.is_nan())
                .unwrap_or(f64::INFINITY)
        }
    };
    let allowed = |index: usize| {
        Some(allowed(index))
            .filter(|a| a.is_finite())
            .unwrap_or(0.0)
    };
    let wrong: Vec<usize> = (0..actual.len())
        .filter(|&index| error(index) > allowed(index))
        .collect();
    if wrong.is_empty() {
        return;
    }
    let worst = wrong
        .iter()
        .copied()
        .max_by(|&a, &b| error(a).total_cmp(&error(b)))
        .unwrap_or_default();
    let first: Vec<String> = wrong
        .iter()
        .take(8)
        .map(|&index| format!("[{index}] {:e} != {:e}", actual[index], expected[index]))
        .collect();
    panic!(
        "{what}: {} of {} elements differ, largest error {:e} at [{worst}] (allowed {:e}), \
         first: {}",
        wrong.len(),
        actual.len(),
        error(worst),
        allowed(worst),
        first.join(", "),
    );
}

/// An f32 tensor.
pub fn floats<const D: usize>(data: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data.to_vec(), shape), (device, DType::F32))
}

/// An integer tensor of the device's own integer type.
pub fn integers<const D: usize>(
    data: &[i64],
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(data.to_vec(), shape), device)
}

/// The elements of an integer tensor.
pub fn integer_values<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
    tensor.try_into_vec_as().expect("a device that works")
}

/// Reproducible values in -1..1 without a period.
pub fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// What `draw` makes of Burn's own generator with this seed. A device has one for all threads, so
/// that tests draw one after the other: no value depends on what else runs.
pub fn seeded<T>(device: &Device, seed: u64, draw: impl FnOnce() -> T) -> T {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    draw()
}

/// The f64 values of an f32 slice, for oracles.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// The f32 values nearest to those of an oracle.
pub fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}
