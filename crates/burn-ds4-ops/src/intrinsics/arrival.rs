//! Which cube of a launch is the last.

use cubecl::prelude::*;

use crate::caps::Target;

/// Counts this cube on a counter, and returns how many cubes were counted before. The last cube
/// sees everything that the other cubes wrote.
#[cube]
pub(crate) fn arrival_order(
    counters: &mut [Atomic<u32>],
    index: usize,
    #[comptime] target: Target,
) -> u32 {
    let mut order = Shared::<u32>::new();
    if target.ptx {
        // One unit's fences suffice: the barrier before makes the cube's writes visible to that
        // unit, and the barrier after passes on what the unit sees.
        sync_cube();
        if UNIT_POS == 0 {
            gpu_asm!("fence.acq_rel.gpu;");
            *order = counters[index].fetch_add(1u32);
            gpu_asm!("fence.acq_rel.gpu;");
        }
        sync_cube();
    } else {
        sync_storage();
        if UNIT_POS == 0 {
            *order = counters[index].fetch_add(1u32);
        }
        sync_storage();
    }
    *order
}

/// Counts this cube on one of two `counters`, and returns whether it is the last of `cubes`, as
/// [`arrival_order`] says.
///
/// That counter is 0 before and after the launch. The other one is 0 after it, whatever an aborted
/// launch has left there. See [`counters`](crate::arrival::counters).
#[cube]
pub(crate) fn arrives_last(
    counters: &mut [Atomic<u32>],
    turn: u32,
    cubes: u32,
    #[comptime] target: Target,
) -> bool {
    let is_last = arrival_order(counters, turn as usize, target) == cubes - 1;
    if UNIT_POS == 0 {
        if is_last {
            counters[turn as usize].store(0u32);
        }
        if CUBE_POS == 0 {
            counters[(1u32 - turn) as usize].store(0u32);
        }
    }
    is_last
}
