//! A counter on the device that the cubes of a launch increment, to find out which of them arrives
//! last.

use std::cell::RefCell;
use std::collections::HashMap;

use burn::backend::StreamId;
use burn_cubecl::CubeDevice;
use cubecl::client::Client;
use cubecl::server::Handle;

use crate::launching::has_counters;

thread_local! {
    static COUNTERS: RefCell<HashMap<(CubeDevice, StreamId), Handle>> = RefCell::default();
}

/// Whether a kernel on this device can leave its end to the last-arriving cube, which must see what
/// the other cubes wrote.
pub(crate) fn has_last_cube(client: &Client) -> bool {
    client.properties().features.device_memory_scope && has_counters(client)
}

/// The counter of the current stream. It is 0 between launches: the kernel that uses it resets it.
///
/// Each stream has its own counter, because launches of different streams may overlap; those of one
/// stream never do. Its address does not change, so that a recorded graph can be replayed.
pub(crate) fn counter(client: &Client, device: &CubeDevice) -> Handle {
    let key = (device.clone(), StreamId::current());
    COUNTERS.with_borrow_mut(|counters| {
        let counter = counters.entry(key);
        counter
            .or_insert_with(|| client.create_from_slice(&0u32.to_ne_bytes()))
            .clone()
    })
}

/// Drops the current thread's counters, so that they are created again when they are next needed.
pub(crate) fn forget() {
    COUNTERS.with_borrow_mut(HashMap::clear);
}
