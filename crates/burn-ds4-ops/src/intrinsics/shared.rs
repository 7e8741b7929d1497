//! Atomics of shared memory. CubeCL's take an address of any memory, for which there are slower
//! instructions.

use cubecl::prelude::*;

use super::shared_address;
use crate::caps::Target;

/// Adds to a word.
#[cube]
pub(crate) fn add_shared(
    words: &[Atomic<u32>],
    index: u32,
    amount: u32,
    #[comptime] target: Target,
) {
    if target.ptx {
        let at = i32::reinterpret(shared_address(words) + index * 4);
        let amount = i32::reinterpret(amount);
        gpu_asm!("red.shared.add.u32 [{at}], {amount};", at = in(_) at, amount = in(_) amount);
    } else {
        words[index as usize].fetch_add(amount);
    }
}
