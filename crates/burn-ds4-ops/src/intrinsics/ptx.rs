//! Instructions that need PTX: conversions, products of tiles, copies.

use burn::tensor::{bf16, f16};
use cubecl::prelude::*;

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

/// Of each half of two words of `bf16`, the larger magnitude, with a sign of no meaning; where one
/// is NaN, the other. Needs PTX for `sm_86` or later.
#[cube]
pub(crate) fn larger_bf16_magnitudes(a: u32, b: u32) -> u32 {
    let y: u32;
    let a = i32::reinterpret(a);
    let b = i32::reinterpret(b);
    gpu_asm!(
        "max.xorsign.abs.bf16x2 {y}, {a}, {b};",
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
pub(crate) fn multiply_bf16x2(a: u32, b: u32) -> u32 {
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

/// Starts to copy vector `index` of 16 bytes to an address in shared memory, or zeros where it is
/// not `inside`. The vector must exist in either case. The line of 128 bytes that it is part of
/// comes to the second-level cache as a whole. Needs PTX.
#[cube]
pub(crate) fn copy_vector<E: CubePrimitive>(to: u32, from: &[E], index: u32, inside: bool) {
    let base = from.as_ptr();
    let to = i32::reinterpret(to);
    let index = i32::reinterpret(index);
    let bytes = i32::reinterpret(select(inside, 16u32, 0u32));
    gpu_asm!(
        "{{ .reg .b64 t; mad.wide.u32 t, {index}, 16, {base}; cvta.to.global.u64 t, t; \
        cp.async.cg.shared.global.L2::128B [{to}], [t], 16, {bytes}; }}",
        base = in(_) base, index = in(_) index, to = in(_) to, bytes = in(_) bytes
    );
}

/// The address of a slice in device memory, as PTX takes it. Needs PTX.
#[cube]
pub(crate) fn global_address<E: CubePrimitive>(slice: &[E]) -> u64 {
    let y: i64;
    let start = slice.as_ptr();
    gpu_asm!(
        "cvta.to.global.u64 {y}, {start};",
        y = out(_) y, start = in(_) start, options(pure, nomem)
    );
    u64::reinterpret(y)
}

/// Starts to copy the 16 bytes that are `ahead` bytes after a [`global_address`] to `ahead` bytes
/// after an address in shared memory; or zeros where they are not `inside`, and nothing is read.
/// Needs PTX.
#[cube]
pub(crate) fn copy_address(to: u32, from: u64, inside: bool, #[comptime] ahead: u32) {
    let to = i32::reinterpret(to);
    let from = i64::reinterpret(from);
    let bytes = i32::reinterpret(select(inside, 16u32, 0u32));
    gpu_asm!(
        "cp.async.cg.shared.global.L2::128B [{to} + {ahead}], [{from} + {ahead}], 16, {bytes};",
        to = in(_) to, from = in(_) from, bytes = in(_) bytes, ahead = const ahead
    );
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

/// The address in shared memory that PTX takes. Needs PTX.
#[cube]
pub(crate) fn shared_address<E: CubePrimitive>(slice: &[E]) -> u32 {
    let y: u32;
    let start = slice.as_ptr();
    gpu_asm!(
        "{{ .reg .b64 t; cvta.to.shared.u64 t, {start}; cvt.u32.u64 {y}, t; }}",
        y = out(_) y, start = in(_) start, options(pure, nomem)
    );
    y
}

/// Waits for all units of the cubes of a cluster, which then see what each other wrote to shared
/// memory. Every unit must call this. Needs PTX, from `sm_90` on.
#[cube]
pub(crate) fn sync_cluster() {
    gpu_asm!("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;");
}

/// Waits until all units of the cubes of a cluster have read what they needed of each other's
/// shared memory, which is lost when a cube ends. Every unit must call this. Needs PTX, from
/// `sm_90` on.
#[cube]
pub(crate) fn leave_cluster() {
    gpu_asm!("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;");
}

/// The address of what cube `rank` of the cluster has at [`address`](shared_address) of its own
/// shared memory. Needs PTX, from `sm_90` on.
#[cube]
pub(crate) fn cluster_address(address: u32, #[comptime] rank: u32) -> u32 {
    let y: u32;
    let address = i32::reinterpret(address);
    gpu_asm!(
        "mapa.shared::cluster.u32 {y}, {address}, {rank};",
        y = out(_) y, address = in(_) address, rank = const rank, options(pure, nomem)
    );
    y
}

/// Reads a number `ahead` bytes after a [`cluster_address`]. Needs PTX, from `sm_90` on.
#[cube]
pub(crate) fn read_cluster(address: u32, #[comptime] ahead: u32) -> f32 {
    let y: f32;
    let address = i32::reinterpret(address);
    gpu_asm!(
        "ld.shared::cluster.f32 {y}, [{address} + {ahead}];",
        y = out(_) y, address = in(_) address, ahead = const ahead
    );
    y
}

/// Reads two numbers `ahead` bytes after a [`cluster_address`]. Needs PTX, from `sm_90` on.
#[cube]
pub(crate) fn read_cluster_pair(address: u32, #[comptime] ahead: u32) -> Vector<f32, Const<2>> {
    // An instruction has no more than one result here.
    let words: u64;
    let address = i32::reinterpret(address);
    gpu_asm!(
        "ld.shared::cluster.b64 {words}, [{address} + {ahead}];",
        words = out(_) words, address = in(_) address, ahead = const ahead
    );
    let mut y = Vector::<f32, Const<2>>::new(f32::reinterpret(u32::cast_from(words)));
    y.insert(1usize, f32::reinterpret(u32::cast_from(words >> 32u64)));
    y
}
