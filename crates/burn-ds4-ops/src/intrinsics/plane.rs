//! What the lanes of a plane do together, and waiting for each other.

use cubecl::prelude::*;

use crate::caps::Target;

/// The value of the lane whose index differs by `mask`. Every lane of the plane must call this.
#[cube]
pub(crate) fn shuffle_xor(x: f32, #[comptime] mask: u32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: u32;
        let x = u32::reinterpret(x);
        // CubeCL's own shuffle queries the active lanes each time; here they are known.
        gpu_asm!(
            "shfl.sync.bfly.b32 {y}, {x}, {mask}, 31, -1;",
            y = out(_) y, x = in(_) x, options(nomem)
        );
        f32::reinterpret(y)
    } else {
        plane_shuffle_xor(x, mask)
    }
}

/// The sum over each group of `lanes` neighbouring lanes, in all of them. Every lane of the plane
/// must call this.
#[cube]
pub(crate) fn group_sum(x: f32, #[comptime] lanes: u32, #[comptime] target: Target) -> f32 {
    let mut sum = x;
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        sum += shuffle_xor(sum, comptime!(1u32 << step), target);
    }
    sum
}

/// [`group_sum`] of each of the first `count` values, which do not wait for each other.
#[cube]
pub(crate) fn group_sums(
    values: &mut Array<f32>,
    #[comptime] count: u32,
    #[comptime] lanes: u32,
    #[comptime] target: Target,
) {
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        #[unroll]
        for i in 0..count as usize {
            values[i] += shuffle_xor(values[i], comptime!(1u32 << step), target);
        }
    }
}

/// The maximum over each group of `lanes` neighbouring lanes, in all of them. None of the values is
/// NaN or -0.0. Every lane of the plane must call this.
#[cube]
pub(crate) fn group_max(x: f32, #[comptime] lanes: u32, #[comptime] target: Target) -> f32 {
    if comptime!(target.is_at_least(80) && lanes == 32) {
        let y: i32;
        let x = ordered(i32::reinterpret(x));
        gpu_asm!("redux.sync.max.s32 {y}, {x}, -1;", y = out(_) y, x = in(_) x, options(nomem));
        f32::reinterpret(ordered(y))
    } else {
        let mut best = x;
        #[unroll]
        for step in 0..comptime!(lanes.ilog2()) {
            best = max(best, shuffle_xor(best, comptime!(1u32 << step), target));
        }
        best
    }
}

/// Maps the bits of a float to an integer in the same order, and back.
#[cube]
fn ordered(bits: i32) -> i32 {
    bits ^ ((bits >> 31) & 0x7fff_ffffi32)
}

/// A mask of the lanes for which `holds` is true, with the first lane in the lowest bit. The plane
/// has no more than 32 lanes. Every lane of the plane must call this.
#[cube]
pub(crate) fn ballot(holds: bool, #[comptime] target: Target) -> u32 {
    if target.ptx {
        let y: u32;
        let x = select(holds, 1u32, 0u32);
        gpu_asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {x}, 0; vote.sync.ballot.b32 {y}, p, -1; }}",
            y = out(_) y, x = in(_) x, options(nomem)
        );
        y
    } else {
        plane_ballot(holds).extract(0usize)
    }
}

/// [`ballot`] of the group of `lanes` neighbouring lanes, in a cube whose first dimension is a
/// plane.
#[cube]
pub(crate) fn group_ballot(holds: bool, #[comptime] lanes: u32, #[comptime] target: Target) -> u32 {
    let all = ballot(holds, target);
    if comptime!(lanes == 32) {
        all
    } else {
        let first = UNIT_POS_X / lanes * lanes;
        (all >> first) & comptime!((1u32 << (lanes % 32)) - 1)
    }
}

/// The sum over the lanes up to and including this one. Every lane of the plane must call this.
#[cube]
pub(crate) fn plane_running_sum(x: u32, #[comptime] lanes: u32, #[comptime] target: Target) -> u32 {
    if target.ptx {
        let mut sum = x;
        #[unroll]
        for step in 0..comptime!(lanes.ilog2()) {
            let distance = comptime!(1u32 << step);
            let y: u32;
            let x = i32::reinterpret(sum);
            gpu_asm!(
                "{{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, {x}, {distance}, 0, -1; ",
                "selp.b32 t, t, 0, p; add.u32 {y}, t, {x}; }}",
                y = out(_) y, x = in(_) x, options(nomem)
            );
            sum = y;
        }
        sum
    } else if comptime!(lanes == 1) {
        x
    } else {
        plane_inclusive_sum(x)
    }
}

/// The sum over the plane, in all lanes. Every lane of the plane must call this.
#[cube]
pub(crate) fn sum_of_plane(x: u32, #[comptime] lanes: u32, #[comptime] target: Target) -> u32 {
    if comptime!(target.is_at_least(80) && lanes == 32) {
        let y: u32;
        let x = i32::reinterpret(x);
        gpu_asm!("redux.sync.add.u32 {y}, {x}, -1;", y = out(_) y, x = in(_) x, options(nomem));
        y
    } else {
        plane_sum(x)
    }
}

/// The highest of the plane, in all lanes. Every lane of the plane must call this.
#[cube]
pub(crate) fn plane_highest(x: u32, #[comptime] lanes: u32, #[comptime] target: Target) -> u32 {
    if comptime!(target.is_at_least(80) && lanes == 32) {
        let y: u32;
        let x = i32::reinterpret(x);
        gpu_asm!("redux.sync.max.u32 {y}, {x}, -1;", y = out(_) y, x = in(_) x, options(nomem));
        y
    } else {
        plane_max(x)
    }
}

/// A mask of the lanes whose value is that of this lane. Every lane of the plane must call this.
/// Needs PTX.
#[cube]
pub(crate) fn plane_matches(x: u32) -> u32 {
    let y: u32;
    let x = i32::reinterpret(x);
    gpu_asm!("match.any.sync.b32 {y}, {x}, -1;", y = out(_) y, x = in(_) x, options(nomem));
    y
}

/// The value of lane `from`. Every lane of the plane must call this.
#[cube]
pub(crate) fn plane_value(x: u32, from: u32, #[comptime] target: Target) -> u32 {
    if target.ptx {
        let y: u32;
        let x = i32::reinterpret(x);
        let lane = i32::reinterpret(from);
        gpu_asm!(
            "shfl.sync.idx.b32 {y}, {x}, {lane}, 31, -1;",
            y = out(_) y, x = in(_) x, lane = in(_) lane, options(nomem)
        );
        y
    } else {
        plane_shuffle(x, from)
    }
}

/// Waits until the lanes of the plane see what the other lanes wrote to shared memory. Every unit
/// of the cube must call this.
#[cube]
pub(crate) fn sync_group(#[comptime] target: Target) {
    if target.sync_plane {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Waits for the other planes of this plane's group. The cube has at most 15 groups of `planes`
/// planes each. Every unit of the group must call this. Needs PTX.
#[cube]
pub(crate) fn sync_planes(group: u32, #[comptime] planes: u32) {
    // Barrier 0 is the barrier of the cube.
    let barrier = i32::reinterpret(group + 1u32);
    let units = comptime!(32 * planes);
    gpu_asm!("bar.sync {barrier}, {units};", barrier = in(_) barrier);
}
