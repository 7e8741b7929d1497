//! Clocks, and recordings of many calls that the device replays without the host.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use burn::{
    backend::{Backend, BackendGraph, Dispatch, ExecutionError, ProfileDuration, ProfileOptions},
    tensor::{Device, Distribution, Tensor},
};

/// The shortest wall-clock sample: it must be long next to the host's part in it.
const LONG_ENOUGH: Duration = Duration::from_millis(20);
/// Runs before a recording. The first run includes one-time work; with fusion, only the second
/// takes the path of all later ones.
const WARM_UPS: usize = 2;

/// Launches recorded once. Everything they read and wrote must outlive the recording.
pub struct Recording {
    device: Device,
    graph: BackendGraph<Dispatch>,
}

impl Recording {
    /// Records what `work` launches. `discard` is given the results of warm-up runs.
    ///
    /// # Errors
    ///
    /// If the device cannot record, or cannot record this work.
    pub fn new<T>(
        device: &Device,
        work: impl Fn() -> T,
        discard: impl Fn(T),
    ) -> Result<(Self, T), ExecutionError> {
        let dispatch = device.as_dispatch();
        Dispatch::graph_prepare(dispatch)?;
        // Nothing may be allocated during the recording. These runs leave enough memory behind for
        // it, which is why all results of one run are alive together here, as they are in the
        // recording.
        for _ in 0..WARM_UPS {
            let results = work();
            Dispatch::sync(dispatch)?;
            discard(results);
        }
        Dispatch::sync(dispatch)?;
        Dispatch::graph_start_capture(dispatch)?;
        let results = work();
        let graph = Dispatch::graph_stop_capture(dispatch)?;
        let device = device.clone();
        Ok((Self { device, graph }, results))
    }

    /// Enqueues the recorded launches.
    ///
    /// # Safety
    ///
    /// Every tensor that the recorded work read, and its results, must be alive and not in use by
    /// another thread.
    pub unsafe fn replay(&self) {
        // SAFETY: the caller promises it.
        unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) }
            .expect("a recording that replays");
    }
}

/// Microseconds of each of `samples` runs of `work`, by the device's clock where it has one.
///
/// All runs are enqueued before any is waited for, after one run that is not measured. The device
/// is still busy with one run while the host enqueues the next, so no sample contains the host's
/// time.
pub fn device_times(device: &Device, samples: usize, work: impl Fn()) -> Vec<f64> {
    work();
    let windows: Result<Option<Vec<_>>, _> = (0..samples).map(|_| window(device, &work)).collect();
    let times: Option<Vec<f64>> = windows
        .ok()
        .flatten()
        .and_then(|windows| windows.into_iter().map(resolve).collect());
    times.unwrap_or_else(|| (0..samples).map(|_| wall_time(device, &work)).collect())
}

fn window(device: &Device, work: impl Fn()) -> Result<Option<ProfileDuration>, ExecutionError> {
    let dispatch = device.as_dispatch();
    let Some(token) = Dispatch::profile_start(dispatch)? else {
        return Ok(None);
    };
    work();
    Dispatch::profile_end(dispatch, token, ProfileOptions::default().flush()).map(Some)
}

/// The microseconds of a window. `None` if nothing was measured: no work takes no time.
fn resolve(window: ProfileDuration) -> Option<f64> {
    let ticks = wait(window.resolve())?;
    Some(microseconds(ticks.duration())).filter(|&time| time > 0.0)
}

/// Waits for a device's answer. Device futures block in `poll` or need no waking.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::yield_now();
    }
}

/// Microseconds of one run of `work`, averaged over enough runs for the host's time not to matter.
fn wall_time(device: &Device, work: impl Fn()) -> f64 {
    let mut runs = 1;
    loop {
        let time = host_time(device, || (0..runs).for_each(|_| work()));
        if time >= LONG_ENOUGH {
            return microseconds(time) / f64::from(runs);
        }
        runs *= 2;
    }
}

/// Wall-clock time until the device has finished the work that `work` enqueues.
pub fn host_time(device: &Device, work: impl FnOnce()) -> Duration {
    device.sync().expect("a device that works");
    let start = Instant::now();
    work();
    device.sync().expect("a device that works");
    start.elapsed()
}

pub fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The middle value, or the mean of the two middle ones.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values[middle]
    }
}

/// GB/s, read plus written, of a copy of `elements` f32 values.
pub fn copy_rate(device: &Device, elements: usize, samples: usize) -> f64 {
    let source = Tensor::<1>::random([elements], Distribution::Default, device);
    // A negation reads and writes as much as a copy, and no backend removes it.
    let time = median(device_times(device, samples, || drop(source.clone().neg())));
    (2 * size_of::<f32>() * elements) as f64 / time / 1e3
}
