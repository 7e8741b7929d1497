//! Verifies a case, then times it.

use std::any::Any;

use burn::tensor::Device;

use super::{
    Case, Prepared, catching,
    timing::{Recording, device_times, host_time, median, microseconds},
};

/// The fewest sets of inputs: a set used twice in a row would be in the cache.
const MIN_SETS: usize = 2;
/// The most sets of inputs: with more, the smallest cases would take long to build.
const MAX_SETS: usize = 4096;
/// A case that moves fewer bytes is short. It takes about a microsecond, so the start of a replay
/// would count.
const SHORT: usize = 4 << 20;
/// The most bytes of outputs of one recording, which are alive together.
const MAX_OUTPUTS: usize = 16 << 30;
/// The most microseconds that the host may take to enqueue the calls of one recording.
const MAX_ENQUEUE: f64 = 1e6;

/// The effort that a measurement is worth.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Half of what the inputs exceed: they rotate over more than twice this.
    pub cache_bytes: usize,
    /// The fewest calls in one recording.
    pub calls: usize,
    /// The same for short cases.
    pub short_calls: usize,
    /// The number of samples; their median is taken.
    pub samples: usize,
    /// f32 elements of the copy that measures the copy rate.
    pub copy_elements: usize,
}

impl Effort {
    /// Just enough to see that everything runs.
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
    /// With replay by the device from a recording, if it can record.
    pub replayed: Option<f64>,
    /// With calls one after the other, including the host's time.
    pub eager: f64,
}

/// Times a case if its outputs are right.
///
/// # Errors
///
/// The message of the check if the outputs of a plain call or of a replay are wrong.
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

/// Returns the number of sets of inputs and of calls in one recording. The latter is a multiple of
/// the former, so that every replay uses all sets.
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
            // Errors of devices contain their whole history, over many lines.
            let reason = error.to_string().replace('\n', " ");
            let reason: String = reason.chars().take(300).collect();
            println!("{}: no recording: {reason}", case.id());
            return None;
        }
    };
    // SAFETY: `sets` and `outputs` hold all tensors, and no other thread has any of them.
    let times = device_times(device, samples, || unsafe { recording.replay() });
    sets[0].check(outputs.swap_remove(0));
    Some(median(times) / calls as f64)
}
