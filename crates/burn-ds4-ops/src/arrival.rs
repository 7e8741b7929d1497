//! Counters on the device that the cubes of a launch increment, to find out which of them arrives
//! last.

use std::cell::RefCell;
use std::collections::HashMap;

use burn::backend::StreamId;
use burn_cubecl::CubeDevice;
use cubecl::client::Client;
use cubecl::server::Handle;

thread_local! {
    static COUNTERS: RefCell<HashMap<(CubeDevice, StreamId), Counters>> = RefCell::default();
}

/// Two counters, which the launches of a stream use in turn.
struct Counters {
    handle: Handle,
    /// The one that the next launch uses.
    turn: u32,
}

/// The counters of the current stream, and which of them a launch uses if it `counts`.
///
/// Both are 0 between launches: the last-arriving cube resets the one that its launch has used. A
/// launch that was aborted may leave it at another number, from which no launch could count again.
/// So each launch also resets the other counter, see
/// [`arrives_last`](crate::intrinsics::arrives_last): the launch after one that was aborted finds a
/// 0, and so does the one after that. Only where the same launch of a recorded graph follows on
/// itself does it find what it has left.
///
/// Each stream has its own counters, because launches of different streams may overlap; those of
/// one stream never do. Their address does not change, so that a recorded graph can be replayed.
pub(crate) fn counters(client: &Client, device: &CubeDevice, counts: bool) -> (Handle, u32) {
    let key = (device.clone(), StreamId::current());
    COUNTERS.with_borrow_mut(|counters| {
        let counters = counters.entry(key).or_insert_with(|| Counters {
            handle: client.create_from_slice(&[0; 2 * size_of::<u32>()]),
            turn: 0,
        });
        let turn = counters.turn;
        if counts {
            counters.turn = 1 - turn;
        }
        (counters.handle.clone(), turn)
    })
}

/// Drops the current thread's counters, so that they are created again when they are next needed.
pub(crate) fn forget() {
    COUNTERS.with_borrow_mut(HashMap::clear);
}
