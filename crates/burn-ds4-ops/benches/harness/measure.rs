//! Verifying a case, then timing it.

use std::any::Any;

use burn::tensor::Device;

use super::{
    Case, Prepared, catching,
    timing::{Recording, device_times, host_time, median, microseconds},
};

/// Sets of inputs, at least: one after itself finds its inputs in the cache.
const MIN_SETS: usize = 2;
/// Sets of inputs, at most: beyond, the smallest cases would take their time to build.
const MAX_SETS: usize = 4096;
/// A case that moves less is short: over in a microsecond or so, next to which the start of a replay would count.
const SHORT: usize = 4 << 20;
/// Outputs of the calls of one recording are alive together.
const MAX_OUTPUTS: usize = 16 << 30;
/// The host may take this long to enqueue the calls of one recording, in microseconds.
const MAX_ENQUEUE: f64 = 1e6;

/// How much effort a figure is worth.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Inputs rotate over more than twice this.
    pub cache_bytes: usize,
    /// Calls in one recording, at least.
    pub calls: usize,
    /// The same for short cases.
    pub short_calls: usize,
    /// Samples of which the median is taken.
    pub samples: usize,
    /// f32 elements of the copy that gives the copy rate.
    pub copy_elements: usize,
}

impl Effort {
    /// Enough to see that everything runs.
    pub const SMOKE: Self = Self {
        cache_bytes: 0,
        calls: 2,
        short_calls: 2,
        samples: 1,
        copy_elements: 1 << 16,
    };
}

/// Microseconds of one call.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Replayed by the device from a recording, if it can record.
    pub replayed: Option<f64>,
    /// Called one after the other, the host's time included.
    pub eager: f64,
}

/// Times a case if its outputs are right.
///
/// # Errors
///
/// What the check says about outputs, of a plain call or of a replay, that are wrong.
pub fn measure(case: &Case, device: &Device, effort: Effort) -> Result<Times, String> {
    catching(|| {
        let first = (case.build)(device, 0);
        first.poison(first.run());
        first.check(first.run());
        let time = |calls: usize| {
            let some = || (0..calls).for_each(|_| drop(first.run()));
            microseconds(host_time(device, some)) / calls as f64
        };
        let once = time(1);
        let slow = once * effort.calls as f64 > MAX_ENQUEUE;
        let estimate = if slow { once } else { time(effort.calls) };
        let (sets, calls) = plan(case, effort, estimate);
        let mut all = vec![first];
        all.extend((1..sets).map(|seed| (case.build)(device, seed as u32)));
        let eager = (0..effort.samples.min(5)).map(|_| {
            let enqueue = || (0..calls).for_each(|call| drop(all[call % sets].run()));
            microseconds(host_time(device, enqueue)) / calls as f64
        });
        let eager = median(eager.collect());
        let replayed = replayed(case, device, &all, calls, effort.samples);
        Times { replayed, eager }
    })
}

/// Sets of inputs, and calls in one recording: a multiple, so that every replay goes through all of them.
fn plan(case: &Case, effort: Effort, estimate: f64) -> (usize, usize) {
    let at_least = if case.bytes < SHORT {
        effort.short_calls
    } else {
        effort.calls
    };
    let fitting = MAX_OUTPUTS / case.bytes.saturating_sub(case.input_bytes).max(1);
    let at_most = ((MAX_ENQUEUE / estimate) as usize)
        .min(fitting)
        .max(MIN_SETS);
    let sets = (2 * effort.cache_bytes / case.input_bytes.max(1) + 1).clamp(MIN_SETS, MAX_SETS);
    let sets = sets.min(at_most);
    let rounds = at_least.min(at_most).div_ceil(sets);
    (sets, sets * rounds)
}

fn replayed(
    case: &Case,
    device: &Device,
    sets: &[Prepared],
    calls: usize,
    samples: usize,
) -> Option<f64> {
    let work = || -> Vec<Box<dyn Any>> {
        (0..calls)
            .map(|call| sets[call % sets.len()].run())
            .collect()
    };
    let poison = |outputs: Vec<Box<dyn Any>>| {
        for (call, outputs) in outputs.into_iter().enumerate() {
            sets[call % sets.len()].poison(outputs);
        }
    };
    let (recording, mut outputs) = match Recording::new(device, work, poison) {
        Ok(recorded) => recorded,
        Err(error) => {
            // Errors of devices carry their whole history, over many lines.
            let reason = error.to_string().replace('\n', " ");
            let reason: String = reason.chars().take(300).collect();
            println!("{}: no recording: {reason}", case.id());
            return None;
        }
    };
    // Safety: `sets` and `outputs` hold all tensors, and no other thread has any of them.
    let times = device_times(device, samples, || unsafe { recording.replay() });
    sets[0].check(outputs.swap_remove(0));
    Some(median(times) / calls as f64)
}
