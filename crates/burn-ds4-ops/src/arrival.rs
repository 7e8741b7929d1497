//! A number on the device that the cubes of a launch count themselves in on, to find out which of them is last.

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

/// Whether a kernel on this device can leave its end to the cube that comes last: it has to see what the others wrote.
pub(crate) fn has_last_cube(client: &Client) -> bool {
    client.properties().features.device_memory_scope && has_counters(client)
}

/// The number of the current stream, 0 between launches: whoever counts on it resets it.
///
/// One to a stream, because launches of different streams may overlap; those of one stream never do. It stays where it is, so
/// that a recorded graph finds it again.
pub(crate) fn counter(client: &Client, device: &CubeDevice) -> Handle {
    let key = (device.clone(), StreamId::current());
    COUNTERS.with_borrow_mut(|counters| {
        let counter = counters.entry(key);
        counter
            .or_insert_with(|| client.create_from_slice(&0u32.to_ne_bytes()))
            .clone()
    })
}

/// Has the current thread's numbers made anew when they are needed next.
pub(crate) fn forget() {
    COUNTERS.with_borrow_mut(HashMap::clear);
}
