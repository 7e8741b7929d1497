//! Operations that CubeCL does not offer, or lowers to far more than the one instruction that the
//! hardware has.

use burn::tensor::{bf16, f16};
use cubecl::prelude::*;

/// `log1p(t) / t` for `t` in 0..=1 as a polynomial, highest power first; relative error 3e-8
/// (minimax, by Remez).
pub(crate) const LOG1P: &[f32] = &[
    0.005_232_69,
    -0.029_505_22,
    0.078_225_92,
    -0.136_632_43,
    0.191_060_05,
    -0.248_429_82,
    0.333_190_97,
    -0.499_994_93,
    0.999_999_97,
];

/// The instructions that a kernel may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    /// The code generator emits CUDA C++, which can contain PTX.
    pub ptx: bool,
    /// The architecture of the SMs, 90 for compute capability 9.0, which the PTX may be of; 0
    /// without PTX.
    pub sm: u32,
    /// A plane can synchronise its own lanes alone.
    pub sync_plane: bool,
}

impl Target {
    /// Whether PTX may have the instructions of this architecture.
    pub(crate) const fn is_at_least(self, sm: u32) -> bool {
        self.sm >= sm
    }
}

/// `x % by`. CubeCL 0.11.3 has a rule that makes `x` of `x % 1`, which applies wherever no other
/// rule has made 0 of it before.
#[cube]
pub(crate) fn modulo(x: u32, #[comptime] by: u32) -> u32 {
    if comptime!(by == 1) {
        0u32.runtime()
    } else {
        x % by
    }
}

/// A polynomial. The coefficients are in the order of falling powers.
#[cube]
// Compile-time values must be accessed by index.
#[allow(clippy::needless_range_loop)]
pub(crate) fn polynomial(t: f32, #[comptime] coefficients: &[f32]) -> f32 {
    let mut sum = coefficients[0].runtime();
    #[unroll]
    for i in 1..comptime!(coefficients.len()) {
        sum = fma(sum, t, comptime!(coefficients[i]));
    }
    sum
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
        // A variable would be passed as its address; a result is not.
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

/// `x`, or `other` where `x` is NaN or less. `other` is a number.
#[cube]
pub(crate) fn not_nan(x: f32, other: f32, #[comptime] target: Target) -> f32 {
    if target.ptx {
        // Of a number and NaN, CUDA's maximum is the number.
        max(x, other)
    } else {
        select(x > other, x, other)
    }
}

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

/// The value of lane `from`. Every lane of the plane must call this, with the same `from`.
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

/// Whether `x` is NaN. It tests bits, because compilers may assume that comparisons of floats see
/// no NaN.
#[cube]
pub(crate) fn has_nan_bits(x: f32) -> bool {
    u32::reinterpret(x) & 0x7fff_ffffu32 > 0x7f80_0000u32
}

/// `bits` shifted up by one, with the lowest bit set if `x` is below `low`, which is not `0.0`, or
/// above `high`, which is not `-0.0`. The bit may be clear although `x` is outside, but is never
/// set if it is not. NaN counts as neither.
#[cube]
pub(crate) fn push_outside(
    bits: u32,
    x: f32,
    low: f32,
    high: f32,
    #[comptime] target: Target,
) -> u32 {
    if target.ptx {
        let y: u32;
        // Uses the signs of two differences, because comparisons would use the pipe that the rest
        // of the work keeps busy.
        let below = i32::reinterpret(x - low);
        let above = i32::reinterpret(high - x);
        let outside = below | above;
        let bits = i32::reinterpret(bits);
        gpu_asm!(
            "shf.l.wrap.b32 {y}, {outside}, {bits}, 1;",
            y = out(_) y, outside = in(_) outside, bits = in(_) bits, options(pure, nomem)
        );
        y
    } else {
        let outside = (x < low || x > high) && !has_nan_bits(x);
        (bits << 1) | select(outside, 1u32, 0u32)
    }
}

/// `bits` shifted up by one, with the lowest bit set if `x` is below `low`, which is not `0.0`. The
/// bit may be clear for very small numbers although they are below, but is never set if `x` is not.
/// NaN counts as not below.
#[cube]
pub(crate) fn push_below(bits: u32, x: f32, low: f32, #[comptime] target: Target) -> u32 {
    if target.ptx {
        let y: u32;
        let below = i32::reinterpret(x - low);
        let bits = i32::reinterpret(bits);
        gpu_asm!(
            "shf.l.wrap.b32 {y}, {below}, {bits}, 1;",
            y = out(_) y, below = in(_) below, bits = in(_) bits, options(pure, nomem)
        );
        y
    } else {
        (bits << 1) | select(x < low && !has_nan_bits(x), 1u32, 0u32)
    }
}

/// Two floats truncated to `f16`, as integers in the same order, with the first in the low half of
/// the word. Zeros of either sign, and everything that is truncated to them, are equal. NaN is
/// `-inf`. Needs PTX.
#[cube]
pub(crate) fn ordered_f16(a: f32, b: f32) -> u32 {
    let y: u32;
    let a = u32::reinterpret(a);
    let b = u32::reinterpret(b);
    gpu_asm!(
        "{{ .reg .b32 h, s, n; .reg .f32 x, z; mov.b32 x, {a}; mov.b32 z, {b}; \
        cvt.rz.f16x2.f32 h, z, x; ",
        "mov.b32 n, 0; add.rn.f16x2 h, h, n; mov.b32 n, 0xFC00FC00; max.f16x2 h, h, n; ",
        "prmt.b32 s, h, 0, 0xBB99; or.b32 s, s, 0x80008000; xor.b32 {y}, h, s; }}",
        y = out(_) y, a = in(_) a, b = in(_) b, options(pure, nomem)
    );
    y
}

/// The f32 of `f16` bits. Needs PTX.
#[cube]
pub(crate) fn f16_to_f32(bits: u32) -> f32 {
    let y: f32;
    let bits = i32::reinterpret(bits);
    gpu_asm!(
        "{{ .reg .b16 h, g; mov.b32 {{h, g}}, {bits}; cvt.f32.f16 {y}, h; }}",
        y = out(_) y, bits = in(_) bits, options(pure, nomem)
    );
    y
}

/// The differences of two pairs of `f16`, one pair to a word. NaN and infinity become the largest
/// finite number. Needs PTX.
#[cube]
pub(crate) fn f16_differences(a: u32, b: u32) -> u32 {
    let y: u32;
    let a = i32::reinterpret(a);
    let b = i32::reinterpret(b);
    // Of NaN and a number, the minimum is the number.
    gpu_asm!(
        "{{ .reg .b32 d, m; sub.rn.f16x2 d, {a}, {b}; mov.b32 m, 0x7bff7bff; \
        min.f16x2 {y}, d, m; }}",
        y = out(_) y, a = in(_) a, b = in(_) b, options(pure, nomem)
    );
    y
}

/// Converts a pair of `f16` to a pair of `bf16`. Needs PTX.
#[cube]
pub(crate) fn f16_to_bf16(pair: u32) -> u32 {
    let y: u32;
    let pair = i32::reinterpret(pair);
    gpu_asm!(
        "{{ .reg .b16 h, g; .reg .f32 x, z; mov.b32 {{h, g}}, {pair}; cvt.f32.f16 x, h; \
        cvt.f32.f16 z, g; ",
        "cvt.rn.bf16x2.f32 {y}, z, x; }}",
        y = out(_) y, pair = in(_) pair, options(pure, nomem)
    );
    y
}

/// Rounds two floats to `bf16`, to nearest with ties to even, with the first in the low half of the
/// word. Needs PTX.
#[cube]
pub(crate) fn pack_bf16(a: f32, b: f32) -> u32 {
    let y: u32;
    let a = f32::reinterpret(u32::reinterpret(a));
    let b = f32::reinterpret(u32::reinterpret(b));
    gpu_asm!(
        "cvt.rn.bf16x2.f32 {y}, {b}, {a};",
        y = out(_) y, a = in(_) a, b = in(_) b, options(pure, nomem)
    );
    y
}

/// Rounds two floats to `f16`, to nearest with ties to even, with the first in the low half of the
/// word. Needs PTX.
#[cube]
pub(crate) fn pack_f16(a: f32, b: f32) -> u32 {
    let y: u32;
    let a = f32::reinterpret(u32::reinterpret(a));
    let b = f32::reinterpret(u32::reinterpret(b));
    gpu_asm!(
        "cvt.rn.f16x2.f32 {y}, {b}, {a};",
        y = out(_) y, a = in(_) a, b = in(_) b, options(pure, nomem)
    );
    y
}

/// Converts two of the four E4M3 codes of a word to `f16`: the lower two, or the `upper` two. `f16`
/// represents all codes, NaN among them. Needs PTX and a processor that has this conversion.
#[cube]
pub(crate) fn e4m3_to_f16(word: u32, #[comptime] upper: bool) -> u32 {
    let y: u32;
    let word = i32::reinterpret(word);
    let codes = comptime!(if upper { "h" } else { "l" });
    gpu_asm!(
        "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {word}; cvt.rn.f16x2.e4m3x2 {y}, {codes}; }}",
        y = out(_) y, word = in(_) word, options(pure, nomem)
    );
    y
}

/// Rounds four floats to E4M3, to nearest with ties to even, with the first in the lowest byte of
/// the word. NaN stays NaN, larger numbers become the largest. Needs PTX and a processor that has
/// this conversion.
#[cube]
pub(crate) fn pack_e4m3(x: &Array<f32>, #[comptime] first: usize) -> u32 {
    let y: u32;
    let a = f32::reinterpret(u32::reinterpret(x[first]));
    let b = f32::reinterpret(u32::reinterpret(x[comptime!(first + 1)]));
    let c = f32::reinterpret(u32::reinterpret(x[comptime!(first + 2)]));
    let d = f32::reinterpret(u32::reinterpret(x[comptime!(first + 3)]));
    gpu_asm!(
        "{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {b}, {a}; \
        cvt.rn.satfinite.e4m3x2.f32 h, {d}, {c}; mov.b32 {y}, {{l, h}}; }}",
        y = out(_) y, a = in(_) a, b = in(_) b, c = in(_) c, d = in(_) d, options(pure, nomem)
    );
    y
}

/// Multiplies a 16x16 and a 16x8 tile on tensor cores and adds the product to `sum`. Every lane of
/// the plane holds its part of each tile.
///
/// `dtype` is `bf16` or `f16`. Words hold two elements. Lane `4 * g + q` holds of the left tile:
/// row `g` columns `2q`, row `g + 8` the same, then columns `2q + 8` of both. Of the right tile it
/// holds rows `2q` and `2q + 8` of column `g`. Of the sum it holds columns `2q` and `2q + 1` of
/// rows `g` and `g + 8`.
#[cube]
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
    let mut left = Sequence::<u32>::new();
    left.push(a0);
    left.push(a1);
    left.push(a2);
    left.push(a3);
    let mut right = Sequence::<u32>::new();
    right.push(b0);
    right.push(b1);
    if comptime!(dtype == "f16") {
        multiply_words::<f16>(&left, &right, sum)
    } else {
        multiply_words::<bf16>(&left, &right, sum)
    }
}

/// [`multiply_tiles`] of a 16x8 and an 8x8 tile of `bf16`. A lane holds the first two words of the
/// left tile and the first word of the right one.
#[cube]
pub(crate) fn multiply_half_tiles(
    a0: u32,
    a1: u32,
    b0: u32,
    sum: Vector<f32, Const<4>>,
) -> Vector<f32, Const<4>> {
    let mut left = Sequence::<u32>::new();
    left.push(a0);
    left.push(a1);
    let mut right = Sequence::<u32>::new();
    right.push(b0);
    multiply_words::<bf16>(&left, &right, sum)
}

/// Multiplies tiles of which a lane holds these words, by one `mma` instruction.
#[cube]
fn multiply_words<E: Float>(
    left: &Sequence<u32>,
    right: &Sequence<u32>,
    sum: Vector<f32, Const<4>>,
) -> Vector<f32, Const<4>> {
    // Each word of the right tile has a pair of the depth for each of four lanes.
    let depth = comptime!(8 * right.len());
    let tiles = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, depth);
    let mut a = Array::<Vector<E, Const<2>>>::new(comptime!(left.len()));
    #[unroll]
    for i in 0..left.len() {
        a[i] = Vector::<E, Const<2>>::reinterpret(*left.index(i));
    }
    let mut b = Array::<Vector<E, Const<2>>>::new(comptime!(right.len()));
    #[unroll]
    for i in 0..right.len() {
        b[i] = Vector::<E, Const<2>>::reinterpret(*right.index(i));
    }
    let mut sums = Array::<Vector<f32, Const<2>>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
        pair.insert(0usize, sum.extract(comptime!(2 * i)));
        pair.insert(1usize, sum.extract(comptime!(2 * i + 1)));
        sums[i] = pair;
    }
    let product = tiles.execute(&a, &b, &sums);
    let mut total = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for i in 0..2usize {
        total.insert(comptime!(2 * i), product[i].extract(0usize));
        total.insert(comptime!(2 * i + 1), product[i].extract(1usize));
    }
    total
}

/// Multiplies two pairs of `bf16`, one pair to a word. Needs PTX.
#[cube]
pub(crate) fn multiply_pairs(a: u32, b: u32) -> u32 {
    let y: u32;
    let a = i32::reinterpret(a);
    let b = i32::reinterpret(b);
    // Adding -0 changes nothing; a product without an addition is an instruction of later
    // processors only.
    gpu_asm!(
        "{{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 {y}, {a}, {b}, z; }}",
        y = out(_) y, a = in(_) a, b = in(_) b, options(pure, nomem)
    );
    y
}

/// Closes a group of this unit's asynchronous copies. Needs PTX.
#[cube]
pub(crate) fn commit_copies() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until at most the last `pending` groups of this unit's asynchronous copies are unfinished.
/// Needs PTX.
#[cube]
pub(crate) fn await_copies(#[comptime] pending: u32) {
    gpu_asm!("cp.async.wait_group {pending};");
}

/// Requests that the line of device memory in which a slice begins is brought to the second-level
/// cache. Needs PTX.
#[cube]
pub(crate) fn prefetch<E: CubePrimitive>(slice: &[E]) {
    let line = slice.as_ptr();
    gpu_asm!("prefetch.global.L2 [{}];", mem_in(_) line, options(explicit_mem));
}

/// Byte `index` of a word. Needs PTX.
#[cube]
pub(crate) fn byte(word: u32, index: u32) -> u32 {
    let y: u32;
    let word = i32::reinterpret(word);
    // The upper bytes come from a zero.
    let selector = i32::reinterpret(index + 0x4440u32);
    gpu_asm!(
        "prmt.b32 {y}, {word}, 0, {selector};",
        y = out(_) y, word = in(_) word, selector = in(_) selector, options(pure, nomem)
    );
    y
}

// With fusion, tensors are of another backend.
#[cfg(all(test, not(feature = "fusion")))]
mod tests {
    use burn::tensor::{DType, Int, Tensor};
    use burn_cubecl::CubeBackend;

    use super::*;
    use crate::device::DeviceSpec;

    const UNITS: u32 = 32;

    #[cube(launch)]
    fn modulo_kernel(output: &mut [u32], #[comptime] by: u32) {
        output[UNIT_POS as usize] = modulo(UNIT_POS, by);
    }

    #[test]
    fn a_remainder_is_that_of_the_host_and_by_one_it_is_zero() {
        for spec in [DeviceSpec::Wgpu, DeviceSpec::Cuda(0)] {
            let Ok(device) = spec.init() else {
                continue;
            };
            for by in [1, 2, 7] {
                let output = Tensor::<1, Int>::ones([UNITS as usize], (&device, DType::U32));
                let written = output.clone().try_into_primitive::<CubeBackend>();
                let written = written.expect("a tensor of this backend");
                let client = written.client.clone();
                let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(UNITS));
                modulo_kernel::launch(&client, count, dim, written.into_buffer_arg(), by);
                let expected: Vec<u32> = (0..UNITS).map(|x| x % by).collect();
                let actual: Vec<u32> = output.into_data().iter::<u32>().collect();
                assert_eq!(actual, expected, "{spec}, by {by}");
            }
        }
    }
}
