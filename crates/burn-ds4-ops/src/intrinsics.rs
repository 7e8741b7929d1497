//! Operations that CubeCL has no name for, or lowers to far more than the one instruction that the hardware has.

use cubecl::client::Client;
use cubecl::features::Plane;
use cubecl::prelude::*;

/// What a kernel may be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    /// CUDA C++, in which there can be PTX.
    pub ptx: bool,
    /// A plane can wait for its own lanes only.
    pub sync_plane: bool,
}

impl Target {
    pub(crate) fn of(client: &Client) -> Self {
        Self {
            ptx: cfg!(feature = "cuda") && client.name() == "cuda",
            sync_plane: client.features().plane.contains(Plane::Sync),
        }
    }
}

/// `e^x` to about `2 + |x|` ulp; results below the normal range may be 0.
#[cube]
pub(crate) fn exp(x: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        let x = x * std::f32::consts::LOG2_E;
        gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
        y
    } else {
        x.exp()
    }
}

/// `sqrt(x)` to about 2 ulp.
#[cube]
pub(crate) fn sqrt(x: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        // A variable would come as its address; a result does not.
        let x = f32::reinterpret(u32::reinterpret(x));
        gpu_asm!("sqrt.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
        y
    } else {
        x.sqrt()
    }
}

/// `1 / x` to about 2 ulp, for an `x` whose reciprocal is in the normal range.
#[cube]
pub(crate) fn reciprocal(x: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: f32;
        let x = f32::reinterpret(u32::reinterpret(x));
        gpu_asm!("rcp.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
        y
    } else {
        1.0f32 / x
    }
}

/// `x`, or `other` where it is NaN or less. `other` is a number.
#[cube]
pub(crate) fn not_nan(x: f32, other: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        // Of a number and NaN, CUDA's maximum is the number.
        max(x, other)
    } else {
        select(x > other, x, other)
    }
}

/// The value of the lane whose index differs by `mask`. All lanes of the plane must be here.
#[cube]
pub(crate) fn shuffle_xor(x: f32, #[comptime] mask: u32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        let y: u32;
        let x = u32::reinterpret(x);
        // CubeCL's own shuffle asks for the active lanes each time; here they are known.
        gpu_asm!(
            "shfl.sync.bfly.b32 {y}, {x}, {mask}, 31, -1;",
            y = out(_) y, x = in(_) x, options(nomem)
        );
        f32::reinterpret(y)
    } else {
        plane_shuffle_xor(x, mask)
    }
}

/// Sum over each group of `lanes` neighbouring lanes, in all of them. All lanes of the plane must be here.
#[cube]
pub(crate) fn group_sum(x: f32, #[comptime] lanes: u32, #[comptime] target: Target) -> f32 {
    let mut sum = x;
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        sum += shuffle_xor(sum, comptime!(1u32 << step), target);
    }
    sum
}

/// Maximum over each group of `lanes` neighbouring lanes, in all of them; none of the values is NaN or -0.0. All lanes of the
/// plane must be here.
#[cube]
pub(crate) fn group_max(x: f32, #[comptime] lanes: u32, #[comptime] target: Target) -> f32 {
    if comptime!(target.ptx && lanes == 32) {
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

/// From the bits of a float to an integer that is in the same order, and back.
#[cube]
fn ordered(bits: i32) -> i32 {
    bits ^ ((bits >> 31) & 0x7fff_ffffi32)
}

/// Which lanes of the group of `lanes` neighbouring lanes have `holds`, the first in the lowest bit. All lanes of the plane must be
/// here.
#[cube]
pub(crate) fn group_ballot(holds: bool, #[comptime] lanes: u32, #[comptime] target: Target) -> u32 {
    let all = if target.ptx {
        let y: u32;
        let x = select(holds, 1u32, 0u32);
        gpu_asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {x}, 0; vote.sync.ballot.b32 {y}, p, -1; }}",
            y = out(_) y, x = in(_) x, options(nomem)
        );
        y
    } else {
        plane_ballot(holds).extract(0usize)
    };
    if comptime!(lanes == 32) {
        all
    } else {
        let first = UNIT_POS_X / lanes * lanes;
        (all >> first) & comptime!((1u32 << (lanes % 32)) - 1)
    }
}

/// Waits until the lanes of the plane see what the others wrote to shared memory. All of the cube must be here.
#[cube]
pub(crate) fn sync_group(#[comptime] target: Target) {
    if target.sync_plane {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Counts this cube in on `counter`: whether it is the last of `cubes`, which then sees all that the others have written.
#[cube]
pub(crate) fn arrives_last(
    counter: &mut [Atomic<u32>],
    cubes: u32,
    #[comptime] target: Target,
) -> bool {
    let mut order = Shared::<u32>::new();
    if target.ptx {
        // One unit's fence hands on what the barrier has gathered, and the barrier hands on what it has received.
        sync_cube();
        if UNIT_POS == 0 {
            gpu_asm!("fence.acq_rel.gpu;");
            *order = counter[0].fetch_add(1u32);
            gpu_asm!("fence.acq_rel.gpu;");
        }
        sync_cube();
    } else {
        sync_storage();
        if UNIT_POS == 0 {
            *order = counter[0].fetch_add(1u32);
        }
        sync_storage();
    }
    *order == cubes - 1
}

/// Product of a 16x16 and a 16x8 tile, added to `sum`, by the tensor cores: every lane of the plane has its part of each.
///
/// `dtype` is `bf16` or `f16`. Needs PTX. The lane `4 * g + q` has of the left tile, in words of two: row `g` columns `2q`, row
/// `g + 8` the same, then columns `2q + 8` of both; of the right tile rows `2q` and `2q + 8` of column `g`; of the sum columns
/// `2q` and `2q + 1` of rows `g` and `g + 8`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn multiply_tiles(
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    b0: u32,
    b1: u32,
    sum: Vector<f32, Const<4>>,
    #[comptime] dtype: &str,
) -> Vector<f32, Const<4>> {
    let total: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 ",
        "{total}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {sum};",
        total = out(_) total,
        a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, b0 = in(_) b0, b1 = in(_) b1,
        sum = in(_) sum,
        options(nomem)
    );
    total
}
